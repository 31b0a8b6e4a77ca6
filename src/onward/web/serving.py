"""Serves a site on this machine, with the headers that let WebAssembly use threads; and runs models in a page.

Only files of the site itself: nothing that a link leads out to, nothing hidden, no listings. Only to whom this
machine's own name was given as host, so that a page of someone else's, whose name leads here, gets nothing.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import queue
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onward.errors import DeviceError, OnwardError
from onward.ort_session import shorten_error
from onward.runtime.separate_process import Run, pack_message, unpack_message
from onward.web.site import node_modules, package_files

_SCRIPT = re.compile(rb"<script(?![^>]*\ssrc\s*=)[^>]*>(.*?)</script>", re.DOTALL | re.IGNORECASE)


class Handler(SimpleHTTPRequestHandler):
    """Answers with files of a site."""

    timeout = 30  # a browser that says nothing for so long connects again

    extensions_map = {  # noqa: RUF012 (the base class's own attribute)
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".onnx": "application/octet-stream",
    }

    def __init__(
        self, *args: Any, policy: str, hosts: frozenset[str], any_address: bool, **named: Any
    ) -> None:
        self._policy, self._hosts, self._any_address = policy, hosts, any_address
        super().__init__(*args, **named)

    def send_head(self) -> Any:
        """The file, or an error: other hosts, what lies outside of the site, hidden files and folders."""
        if not self.is_for_us():
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this server is for its own machine's name")
            return None
        path, root = Path(self.translate_path(self.path)), Path(self.directory).resolve()
        try:
            inside = path.resolve().relative_to(root).parts
            plain = path.resolve() == root / Path(os.path.normpath(path.absolute())).relative_to(
                Path(os.path.normpath(Path(self.directory).absolute()))
            )
        except (ValueError, OSError, RuntimeError):
            inside, plain = (), False
        hidden = any(part.startswith(".") for part in inside)
        file = path / "index.html" if path.is_dir() else path  # not a pipe, which would never end
        if not plain or hidden or not file.is_file():
            self.send_error(HTTPStatus.NOT_FOUND, "File not found")
            return None
        return super().send_head()

    def list_directory(self, path: Any) -> None:
        """No listings."""
        self.send_error(HTTPStatus.NOT_FOUND, "File not found")

    def end_headers(self) -> None:
        # the first two make the page cross-origin isolated: browsers have SharedArrayBuffer, so threads, nowhere else
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", self._policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        # asked again each time, answered 304: else a rewritten site would run with the old one's scripts
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass  # a line for each of forty files says nothing

    def is_for_us(self) -> bool:
        """Whether the request names this machine."""
        header = self.headers.get("Host", "")
        name = header.rsplit(":", 1)[0] if not header.endswith("]") else header
        name = name.strip("[]").lower().rstrip(".")
        # a phone on the same network names an address
        return name in self._hosts or (self._any_address and _is_address(name))


class _Server(ThreadingHTTPServer):
    # Ctrl+C does not wait for browsers that keep their connections
    daemon_threads = True
    block_on_close = False
    # a page asks for all of its files at once: beyond this many waiting ones, the system makes it wait for seconds
    request_queue_size = 128
    _MOST_CONNECTIONS = 256

    def __init__(self, *args: Any) -> None:
        self._slots = threading.BoundedSemaphore(self._MOST_CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; connections beyond what a browser opens are closed."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """What the thread does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that left: that is no mistake of anybody's."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def make_server(
    site: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    handler: type[Handler] = Handler,
) -> ThreadingHTTPServer:
    """A server for a folder, not started; port 0 takes a free one."""
    folder = Path(site)
    if not (folder / "index.html").is_file():
        raise OnwardError(f"'{folder}' has no index.html: write a site with onward.web.write_site")
    own = socket.gethostname().lower()
    names = {host.lower(), "localhost", "127.0.0.1", "::1"}
    if not _is_local(host):
        names |= {own, f"{own}.local", own.partition(".")[0]}
    make_handler = functools.partial(
        handler,
        directory=str(folder),
        policy=_policy(folder),
        hosts=frozenset(names),
        any_address=not _is_local(host),
    )
    return _Server((host, port), make_handler)


def _policy(folder: Path) -> str:
    """What pages of the site may load and run: its own files, WebAssembly, and the scripts in its own pages."""
    inline = {
        base64.b64encode(hashlib.sha256(script).digest()).decode("ascii")
        for page in sorted(folder.glob("*.html"))
        if page.is_file() and not page.is_symlink()
        for script in _SCRIPT.findall(page.read_bytes())
    }
    scripts = " ".join(
        # blob: onnxruntime-web starts its threads' workers from one
        ["'self'", "'wasm-unsafe-eval'", "blob:", *(f"'sha256-{one}'" for one in sorted(inline))]
    )
    return "; ".join(
        [
            "default-src 'self'",
            f"script-src {scripts}",
            "style-src 'self' 'unsafe-inline'",
            "worker-src 'self' blob:",
            "connect-src 'self' blob: data:",
            "img-src 'self' blob: data:",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    return str(host).startswith("127.") or host in ("localhost", "::1")


def serve(site: str | os.PathLike[str], *, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve a site until interrupted, and say where.

    >>> serve("site")  # doctest: +SKIP
    """
    with make_server(site, host=host, port=port) as server:
        print(
            f"http://{'localhost' if host == '127.0.0.1' else host}:{server.server_address[1]}/  (Ctrl+C stops)",
            flush=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


# --- Runs models in a browser that someone opens: a page asks this machine's server for them, and answers. So
# `onward conform` compares what onnxruntime-web computes, and a browser's WebGPU.

# Seconds until a page has to be there, until a model's results have, and for which a page's question is left open.
_OPENING, _PATIENCE, _POLL = 600, 300, 10
_LARGEST = 1 << 28  # bytes of an answer


@contextlib.contextmanager
def run_in_browser(
    provider: str, *, port: int = 0, packages: Path | None = None, announce: Callable[[str], object]
) -> Iterator[tuple[Run, Mapping[str, str]]]:
    """A function that runs models on onnxruntime-web, "wasm" or "webgpu", and what the browser says of itself.

    `announce` is given the address that is to be opened; the function is there once a page is.
    """
    desk = _Desk()
    with tempfile.TemporaryDirectory(prefix="onward-conform-") as folder:
        _write_page(Path(folder), provider, packages)
        handler = type("_TaskHandler", (_TaskHandler,), {"desk": desk})
        with make_server(folder, port=port, handler=handler) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                announce(f"http://localhost:{server.server_address[1]}/")
                yield desk.run, desk.wait_for_page()
            finally:
                # before the server stops: a page that asks once more is told that it is over, and does not wait
                desk.is_over.set()
                server.shutdown()
                thread.join()


def _write_page(folder: Path, provider: str, packages: Path | None) -> None:
    shutil.copytree(Path(__file__).parent / "conform", folder, dirs_exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({"provider": provider}), "utf-8")
    with node_modules(packages) as modules:
        for name, path in package_files(modules, webgpu=provider == "webgpu").items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


class _Desk:
    """Where models are left for the page, and its answers for the program."""

    def __init__(self) -> None:
        self.tasks: queue.Queue[bytes] = queue.Queue()
        self.answers: queue.Queue[bytes] = queue.Queue()
        self.is_over = threading.Event()

    def wait_for_page(self) -> Mapping[str, str]:
        """What the page says of its browser."""
        try:
            head, _, _ = unpack_message(self.answers.get(timeout=_OPENING))
        except queue.Empty:
            raise DeviceError(f"no browser opened the page within {_OPENING // 60} minutes") from None
        about = head.get("hello", {})
        if "problem" in about:
            raise DeviceError(f"{about['problem']}: try another browser, or --device cpu for WebAssembly")
        return {str(name): str(value) for name, value in about.items()}

    def run(self, model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        """Have a model run in the page."""
        self.tasks.put(pack_message({}, model.SerializeToString(), feeds))
        try:
            head, _, arrays = unpack_message(self.answers.get(timeout=_PATIENCE))
        except queue.Empty:
            raise DeviceError(f"the page gave no answer for {_PATIENCE} seconds: is it still open?") from None
        if "hello" in head:
            raise RuntimeError("it crashed the page, which was loaded anew")
        if "error" in head:
            raise RuntimeError(shorten_error(RuntimeError(head["error"])))
        return list(arrays.values())


class _TaskHandler(Handler):
    """A server of files that also hands out models: the answer to one question comes with the next."""

    desk: _Desk

    def do_POST(self) -> None:
        if not self.is_for_us() or self.path != "/next":
            self.send_error(HTTPStatus.NOT_FOUND, "File not found")
            return
        size = int(self.headers.get("Content-Length") or 0)
        # read into memory as a whole: a page of someone else's must not fill it
        if not 0 <= size <= _LARGEST:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        if size:
            self.desk.answers.put(self.rfile.read(size))
        self._answer(*self._next_task())

    def _next_task(self) -> tuple[HTTPStatus, bytes]:
        with contextlib.suppress(queue.Empty):
            return HTTPStatus.OK, self.desk.tasks.get(timeout=0 if self.desk.is_over.is_set() else _POLL)
        return (HTTPStatus.GONE if self.desk.is_over.is_set() else HTTPStatus.NO_CONTENT), b""

    def _answer(self, status: HTTPStatus, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
