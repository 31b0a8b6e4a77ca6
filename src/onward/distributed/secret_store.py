"""A store for ranks on several machines, which only those who know a secret can read or write.

torch's own TCPStore takes orders from whoever can reach its port. Here both sides first prove that they know the
secret, over fresh random numbers, and each message after that carries its own code: nobody on the way can add, change
or repeat one. Nothing is encrypted: what the ranks leave here are addresses. Messages are JSON; nothing is unpickled.
Torch is imported here, at the top: import this module inside of functions.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_NONCE, _CODE = 32, 32
# What a rank may send at once; addresses are some hundred bytes.
_LARGEST_MESSAGE = 1 << 24
# A stranger who connects and says nothing holds one thread for so long.
_HANDSHAKE_SECONDS = 10.0
_MOST_CONNECTIONS = 4096


class SecretError(OSError):
    """The other side does not know the secret, or something between the two changed a message."""


class SecretStore(Store):
    """What rank 0 serves and the other ranks connect to; torch calls its methods."""

    def __init__(
        self, address: str, port: int, secret: bytes, *, is_server: bool, timeout: timedelta, attempt: int = 0
    ) -> None:
        super().__init__()
        self._server = _Server(address, port, secret, attempt) if is_server else None
        self.port = self._server.port if self._server else port
        self._connect = lambda: _connect(address, self.port, secret, attempt, timeout.total_seconds())
        # A connection for each thread: one that waits for a key must not keep another from setting it.
        self._connections = threading.local()
        self._seconds = timeout.total_seconds()
        self._ask("check", keys=[])  # a wrong secret or address shows here, not in torch

    def close(self) -> None:
        """Stop serving; ranks that still wait for a key get an error."""
        if self._server:
            self._server.close()

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", keys=[key], value=_to_text(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", keys=[key], seconds=self._seconds).encode("latin-1")

    def add(self, key: str, value: int) -> int:
        return self._ask("add", keys=[key], amount=value)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        texts = {"expected": _to_text(expected_value), "value": _to_text(desired_value)}
        return self._ask("compare_set", keys=[key], **texts).encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", keys=list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys=list(keys), seconds=timeout.total_seconds() if timeout else self._seconds)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", keys=[key])

    def num_keys(self) -> int:
        return self._ask("num_keys", keys=[])

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> SecretStore:
        return self  # safe to be used by several threads, which is what torch clones stores for

    def _ask(self, action: str, **values: Any) -> Any:
        channel = getattr(self._connections, "channel", None)
        if channel is None:
            channel = self._connections.channel = self._connect()
        channel.socket.settimeout(values.get("seconds", self._seconds) + _HANDSHAKE_SECONDS)
        try:
            channel.send(json.dumps({"action": action, **values}).encode())
            answer = json.loads(channel.receive())
        except (OSError, ValueError) as error:
            self._connections.channel = None
            raise RuntimeError(f"the store of rank 0 is lost: {error}") from error
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def _to_text(value: bytes | str) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


# ---- the wire ------------------------------------------------------------------------------------


class _Channel:
    """A connection after the handshake: messages with a length and a code that counts them."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_server: bool) -> None:
        self.socket, self._key = connection, key
        self._sent = self._received = 0
        self._own, self._other = (b"server", b"client") if is_server else (b"client", b"server")

    def send(self, message: bytes) -> None:
        code = self._code(self._own, self._sent, message)
        self._sent += 1
        self.socket.sendall(struct.pack(">I", len(message)) + message + code)

    def receive(self) -> bytes:
        (length,) = struct.unpack(">I", _read(self.socket, 4))
        # before it is read: the code comes after the message
        if length > _LARGEST_MESSAGE:
            raise SecretError(f"a message of {length} bytes")
        message, code = _read(self.socket, length), _read(self.socket, _CODE)
        # in constant time: byte by byte a stranger could measure his way to a code
        if not hmac.compare_digest(code, self._code(self._other, self._received, message)):
            raise SecretError("a message was changed on its way")
        self._received += 1
        return message

    def _code(self, side: bytes, number: int, message: bytes) -> bytes:
        return hmac.digest(self._key, side + struct.pack(">Q", number) + message, "sha256")


def _read(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 16))
        if not part:
            raise SecretError("the other side closed the connection")
        parts += part
    return bytes(parts)


def _handshake(connection: socket.socket, secret: bytes, *, is_server: bool) -> _Channel:
    """Prove to each other that both know the secret; the client first, so that a server tells strangers nothing."""
    connection.settimeout(_HANDSHAKE_SECONDS)
    # fresh for each connection: what was overheard once proves nothing the next time
    own = secrets.token_bytes(_NONCE)
    connection.sendall(own)
    other = _read(connection, _NONCE)
    nonces = own + other if is_server else other + own
    proofs = {side: hmac.digest(secret, b"onward store 1" + side + nonces, "sha256") for side in (b"s", b"c")}
    if not is_server:
        connection.sendall(proofs[b"c"])
    if not hmac.compare_digest(_read(connection, _CODE), proofs[b"c" if is_server else b"s"]):
        raise SecretError("it does not know the secret")
    if is_server:
        connection.sendall(proofs[b"s"])
    # a key of its own: codes of one connection are of no use in another
    key = hmac.digest(secret, b"onward session 1" + nonces, "sha256")
    return _Channel(connection, key, is_server=is_server)


def _connect(address: str, port: int, secret: bytes, attempt: int, seconds: float) -> _Channel:
    """Connect to rank 0, which may start later than this rank."""
    end, reason = time.monotonic() + seconds, "nobody answers"
    while time.monotonic() < end:
        try:
            connection = socket.create_connection((address, port), timeout=min(seconds, _HANDSHAKE_SECONDS))
        except OSError as error:
            reason = f"nobody answers ({error})"
            time.sleep(0.1)
            continue
        try:
            channel = _handshake(connection, secret, is_server=False)
        except OSError as error:
            connection.close()
            raise RuntimeError(
                f"{address}:{port} refused this rank ({error}): ONWARD_SECRET must be the same on all ranks"
            ) from error
        # Rank 0 of the attempt before may not have noticed yet that another rank died.
        with contextlib.suppress(OSError):
            channel.send(json.dumps({"action": "join", "keys": [], "attempt": attempt}).encode())
            if json.loads(channel.receive())["value"]:
                return channel
        reason = "rank 0 is in another attempt"
        connection.close()
        time.sleep(0.2)
    raise RuntimeError(f"{address}:{port}: {reason}")


# ---- rank 0 --------------------------------------------------------------------------------------


class _Server:
    """Answers the ranks, a thread for each connection."""

    def __init__(self, address: str, port: int, secret: bytes, attempt: int) -> None:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        # on the one address that was named, not on all that the machine has
        self._listener = socket.create_server((address, port), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._secret, self._attempt = secret, attempt
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._is_open = True
        self._slots = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        # a daemon: a rank that ends must not be kept by a server that waits
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # A stranger, or a rank that died: the connection ends, the others do not notice.
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            try:
                channel = _handshake(connection, self._secret, is_server=True)
                connection.settimeout(None)
                while True:
                    request = json.loads(channel.receive())
                    try:
                        answer = {"value": self._answer(request)}
                    except TimeoutError as error:
                        answer = {"error": str(error)}
                    channel.send(json.dumps(answer).encode())
            finally:
                self._slots.release()

    def _answer(self, request: dict[str, Any]) -> Any:
        keys, action = request["keys"], request["action"]
        with self._changed:
            if action in ("get", "wait"):
                self._wait_for(keys, request["seconds"])
                return self._values[keys[0]] if action == "get" else None
            return self._actions()[action](keys, request)

    def _actions(self) -> dict[str, Callable[[list[str], dict[str, Any]], Any]]:
        values = self._values
        return {
            "set": lambda keys, request: self._set(keys[0], request["value"]),
            "add": lambda keys, request: int(
                self._set(keys[0], str(int(values.get(keys[0], "0")) + request["amount"]))
            ),
            "compare_set": self._compare_set,
            "join": lambda keys, request: request["attempt"] == self._attempt,
            "check": lambda keys, request: all(key in values for key in keys),
            "delete_key": lambda keys, request: values.pop(keys[0], None) is not None,
            "num_keys": lambda keys, request: len(values),
        }

    def _set(self, key: str, value: str) -> str:
        self._values[key] = value
        self._changed.notify_all()
        return value

    def _compare_set(self, keys: list[str], request: dict[str, Any]) -> str:
        present = self._values.get(keys[0])
        if present is None and request["expected"]:
            return request["expected"]  # as TCPStore answers
        if present is None or present == request["expected"]:
            return self._set(keys[0], request["value"])
        return present

    def _wait_for(self, keys: Sequence[str], seconds: float) -> None:
        def are_set() -> bool:
            return not self._is_open or all(key in self._values for key in keys)

        if not self._changed.wait_for(are_set, timeout=seconds) or not self._is_open:
            missing = [key for key in keys if key not in self._values]
            raise TimeoutError(f"no rank set {', '.join(missing[:3])} within {seconds:g} s")
