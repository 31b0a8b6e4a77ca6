"""Serves a site on this machine, with the headers that let WebAssembly use threads.

Only files of the site itself: nothing that a link leads out to, nothing hidden, no listings. Only to whom this
machine's own name was given as host, so that a page of someone else's, whose name leads here, gets nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import ipaddress
import os
import re
import socket
import sys
import threading
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from onward.errors import OnwardError

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
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", self._policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
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
