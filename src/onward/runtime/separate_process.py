"""Runs models in a process of their own: an operator that crashes a driver ends that process alone.

Models and arrays go through pipes: a line of JSON that says what follows, then the bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import onnx

from onward.errors import DeviceError
from onward.ort_session import shorten_error
from onward.reading import parse_json

# Runs a model: what goes in by name, what comes out in the order of its outputs.
Run = Callable[[onnx.ModelProto, Mapping[str, np.ndarray]], Sequence[np.ndarray]]

# Seconds: a driver that hangs is not waited for. Kernels of a GPU in software take seconds to compile.
_PATIENCE = 120


@contextlib.contextmanager
def run_separately(maker: str, *arguments: str) -> Iterator[Run]:
    """A function that runs models in another process, which is started again after a crash.

    `maker` names what makes the function there, as "module:function", from `arguments`. What a run raises there, or
    that the process ended, is a RuntimeError here; what says that there is no such device is a DeviceError.
    """
    child = _Child([maker, *arguments])
    try:
        yield child.run
    finally:
        child.end()


class _Child:
    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.Queue[bytes | None] = queue.Queue()

    def run(self, model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which the answer says
            self._process.stdin.write(pack_message({}, model.SerializeToString(), feeds))
            self._process.stdin.flush()
        return list(self._answer().values())

    def _answer(self) -> dict[str, np.ndarray]:
        try:
            answer = self._answers.get(timeout=_PATIENCE)
        except queue.Empty:
            self.end()
            raise RuntimeError(f"no answer within {_PATIENCE} seconds") from None
        if answer is None:
            assert self._process is not None
            code = self._process.wait()
            self.end()
            raise RuntimeError(f"it crashed the process ({_describe_exit(code)})")
        head, _, arrays = unpack_message(answer)
        if "error" in head:
            raise DeviceError(head["error"]) if head["device"] else RuntimeError(head["error"])
        return arrays

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._reader.join()
            with contextlib.suppress(OSError):  # what was not written yet cannot be
                process.communicate()

    def _start(self) -> None:
        # found as this one is found, wherever Onward and onnxruntime come from
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, *self._arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        self._process, self._answers = process, queue.Queue()
        # reading in a thread is the one way to wait for a pipe with a limit on every system
        self._reader = threading.Thread(
            target=_read_answers, args=(process.stdout, self._answers), daemon=True
        )
        self._reader.start()
        try:
            self._answer()
        except RuntimeError as error:  # not of one model: there is no point in trying another
            what = " ".join(self._arguments[1:]) or self._arguments[0]
            raise DeviceError(f"a process that uses {what} does not start: {error}") from error


def _read_answers(stream: IO[bytes], answers: queue.Queue[bytes | None]) -> None:
    while True:
        message = read_message(stream)
        answers.put(message)
        if message is None:
            return


def _describe_exit(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


# ---- messages --------------------------------------------------------------------------------------


def pack_message(head: Mapping[str, Any], model: bytes, arrays: Mapping[str, np.ndarray]) -> bytes:
    """The size of the JSON as four bytes, the JSON, the model, the arrays in C order.

    >>> head, model, arrays = unpack_message(pack_message({"a": 1}, b"m", {"x": np.eye(2)}))
    >>> head["a"], model, arrays["x"].tolist()
    (1, b'm', [[1.0, 0.0], [0.0, 1.0]])
    """
    contents = {name: np.asarray(array).tobytes() for name, array in arrays.items()}
    listed = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    total = len(model) + sum(len(content) for content in contents.values())
    text = json.dumps({**head, "model": len(model), "arrays": listed, "total": total}).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, model, *contents.values()])


def unpack_message(message: bytes) -> tuple[dict[str, Any], bytes, dict[str, np.ndarray]]:
    """What `pack_message` was given."""
    start = 4 + int.from_bytes(message[:4], "little")
    head = parse_json(message[4:start].decode())
    model = message[start : start + head["model"]]
    arrays, start = {}, start + head["model"]
    for name, kind, shape in head["arrays"]:
        dtype, count = np.dtype(kind), int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(message, dtype, count, start).reshape(shape).copy()
        start += count * dtype.itemsize
    return head, model, arrays


def read_message(stream: IO[bytes]) -> bytes | None:
    """The next message of a pipe; None at its end."""
    size = stream.read(4)
    text = stream.read(int.from_bytes(size, "little"))
    if len(size) < 4 or not text:
        return None
    content = stream.read(parse_json(text.decode())["total"])
    return b"".join([size, text, content])


# ---- in the other process --------------------------------------------------------------------------


def _answer_runs(maker: str, *arguments: str) -> None:
    """Run what comes in by standard input."""
    # providers print to standard output: it becomes standard error, and answers go where it was
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def send(message: bytes) -> None:
        answers.write(message)
        answers.flush()

    try:
        module, _, name = maker.partition(":")
        run: Run = getattr(importlib.import_module(module), name)(*arguments)
    except Exception as error:
        send(_pack_error(error))
        return
    send(pack_message({}, b"", {}))
    while (message := read_message(sys.stdin.buffer)) is not None:
        _, content, feeds = unpack_message(message)
        try:
            results = run(onnx.load_from_string(content), feeds)
            arrays = {str(index): np.asarray(array) for index, array in enumerate(results)}
            send(pack_message({}, b"", arrays))
        except Exception as error:  # whatever the runtime raises is its answer
            send(_pack_error(error))


def _pack_error(error: Exception) -> bytes:
    is_of_device = isinstance(error, DeviceError)
    text = str(error) if is_of_device else shorten_error(error)
    return pack_message({"error": text, "device": is_of_device}, b"", {})


if __name__ == "__main__":
    _answer_runs(*sys.argv[1:])
