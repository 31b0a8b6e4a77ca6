"""Serves a site on this machine, with the headers that let WebAssembly use threads."""

from __future__ import annotations

import functools
import os
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from onward.errors import OnwardError

__all__ = ["make_server", "serve"]


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = {  # noqa: RUF012 (the base class's own attribute)
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".onnx": "application/octet-stream",
    }

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass  # a line for each of forty files says nothing


def make_server(
    site: str | os.PathLike[str], *, host: str = "127.0.0.1", port: int = 0
) -> ThreadingHTTPServer:
    """A server for a folder, not started; port 0 takes a free one."""
    folder = Path(site)
    if not (folder / "index.html").is_file():
        raise OnwardError(f"'{folder}' has no index.html: write a site with onward.web.write_site")
    return ThreadingHTTPServer((host, port), functools.partial(_Handler, directory=str(folder)))


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
