"""Runs models in a browser that someone opens: a page asks a server on this machine for them, and answers.

What onnxruntime-web computes, and a browser's WebGPU, is compared by `onward conform` in this way.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

import numpy as np
import onnx

from onward.errors import DeviceError
from onward.ort_session import shorten_error
from onward.runtime.separate_process import Run, pack_message, unpack_message
from onward.web.serving import Handler, make_server
from onward.web.site import node_modules, package_files

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
