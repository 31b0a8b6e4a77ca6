"""The store for several machines: torch's store for those who know the secret, nothing for others."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from onward.distributed import secret_store
from onward.distributed.secret_store import SecretStore

SECRET = b"what nobody else can guess"


def connect(port: int, *, secret: bytes = SECRET, server: bool = False, seconds: float = 5, attempt: int = 0):
    span = timedelta(seconds=seconds)
    return SecretStore("127.0.0.1", port, secret, is_server=server, timeout=span, attempt=attempt)


@pytest.fixture
def store() -> Iterator[SecretStore]:
    made = connect(0, server=True)
    yield made
    made.close()


def test_it_does_what_torchs_own_store_does(store: SecretStore) -> None:
    """A table of calls, with the same answers from torch's store in memory."""
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    other = connect(store.port)
    calls: list[tuple[Any, ...]] = [
        ("set", "a", b"\x00\xff"), ("get", "a"), ("add", "n", 3), ("add", "n", -1), ("get", "n"),
        ("check", ["a"]), ("check", ["a", "b"]), ("compare_set", "a", b"\x00\xff", b"new"), ("get", "a"),
        ("compare_set", "a", b"old", b"newer"), ("get", "a"), ("delete_key", "a"), ("check", ["a"]),
        ("set", "text", "word"), ("get", "text"), ("num_keys",),
    ]  # fmt: skip
    reference = HashStore()
    for number, (name, *arguments) in enumerate(calls):
        ours = getattr((store, other)[number % 2], name)(*arguments)
        assert ours == getattr(reference, name)(*arguments), (name, arguments)


def test_who_waits_for_a_key_gets_it_when_it_is_set(store: SecretStore) -> None:
    threading.Timer(0.3, lambda: connect(store.port).set("late", b"there")).start()
    assert store.get("late") == b"there"


def test_a_key_that_never_comes_is_an_error(store: SecretStore) -> None:
    with pytest.raises(RuntimeError, match=r"no rank set never within 0\.2 s"):
        store.wait(["never"], timedelta(seconds=0.2))


def test_a_wrong_secret_is_refused(store: SecretStore) -> None:
    with pytest.raises(RuntimeError, match="ONWARD_SECRET must be the same"):
        connect(store.port, secret=b"what somebody did guess")


def test_ranks_of_another_attempt_wait_outside(store: SecretStore) -> None:
    with pytest.raises(RuntimeError, match="another attempt"):
        connect(store.port, attempt=1, seconds=0.5)


def test_it_listens_on_the_address_that_was_named_only(store: SecretStore) -> None:
    assert store._server is not None
    assert store._server._listener.getsockname()[0] == "127.0.0.1"


def exchange(port: int, message: bytes) -> bytes:
    """What the server says to bytes from a stranger."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(OSError):
            while part := connection.recv(1 << 16):
                answer += part
        return answer


STRANGERS = {
    "nothing": b"",
    "a request of the web": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9,
    "zeros": bytes(4096),
    "its own number again": b"echo",
    "a message without a proof": b"\0" * 32 + struct.pack(">I", 2**31) + b"x" * 64,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_get_a_random_number_and_nothing_else(store: SecretStore, name: str) -> None:
    assert len(exchange(store.port, STRANGERS[name])) <= 32
    store.set("still", b"there")
    assert connect(store.port).get("still") == b"there"


def test_a_stranger_who_waits_holds_nobody_up(store: SecretStore) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", store.port)))
        begun = time.monotonic()
        assert connect(store.port).num_keys() == 0
        assert time.monotonic() - begun < 5  # each of them may say nothing for 10 s


@pytest.mark.parametrize("change", ["a byte", "again", "reordered"])
def test_a_changed_or_repeated_message_ends_the_connection(store: SecretStore, change: str) -> None:
    channel = secret_store._connect("127.0.0.1", store.port, SECRET, 0, 5)

    def sealed(key: str) -> bytes:
        message = json.dumps({"action": "set", "keys": [key], "value": "x"}).encode()
        code = channel._code(b"client", channel._sent, message)
        channel._sent += 1
        return struct.pack(">I", len(message)) + message + code

    if change == "a byte":
        data = bytearray(sealed("forged"))
        data[8] ^= 1
    elif change == "again":
        first = sealed("first")
        channel.socket.sendall(first)
        channel.receive()
        data = first
    else:
        first, data = sealed("first"), sealed("forged")
    channel.socket.sendall(bytes(data))
    with pytest.raises(OSError):
        channel.receive()
    assert not store.check(["forged"])


def test_the_key_of_a_session_is_of_this_session(store: SecretStore) -> None:
    """Both sides give a fresh number: what was recorded opens no second connection."""
    first, second = (secret_store._connect("127.0.0.1", store.port, SECRET, 0, 5) for _ in range(2))
    assert first._key != second._key
