"""Chooses formulations by time: weight gradients of convolutions, for each shape that a model has.

Every possible form of a shape runs a few times on this machine; the fastest is stored in the user's cache folder, by
processor, onnxruntime version and number of threads, and never timed again. A form replaces the one of the fixed
rules only where it is clearly faster, so noise changes little. A cache file that is damaged, unreadable or not
writable costs the time to measure again, and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort

from onward.errors import LimitError, ModelError
from onward.files import write_bytes
from onward.graph.protobuf import opset_of
from onward.ort_session import quiet_options
from onward.reading import parse_json
from onward.runtime.cache import cache_folder
from onward.runtime.environment import processors
from onward.runtime.processor import instruction_sets, name_of_processor
from onward.runtime.sessions import make_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx

    from onward.graph.proto.conv_forms import Convolution

# Changes whenever a form is written in another way, so that old times do not count.
_FORMS = 3
_SWITCH = "ONWARD_AUTOTUNE"
# A form must take less than this part of the time of the rule's.
_CLEARLY = 0.9
# Runs of each form, and seconds after which no more begin for one shape.
_RUNS, _SECONDS = 7, 0.5
# After the first run, forms that take more than this times the best are left out.
_HOPELESS = 2.5
_MOST_BYTES = 1 << 22


def is_enabled(default: bool) -> bool:
    """Whether to tune: as `default` says, unless variable ONWARD_AUTOTUNE is 0 (never) or 1 (always)."""
    setting = os.environ.get(_SWITCH, "")
    return {"0": False, "1": True}.get(setting, default)


def tune(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], options: ort.SessionOptions | None
) -> int:
    """Put the fastest forms into a training model for inputs of these shapes; how many were exchanged."""
    # graph libraries: loaded only where something is tuned
    from onward.graph.proto.conv_forms import noted_convolutions, use_forms

    convolutions = noted_convolutions(model, shapes)
    if not convolutions:
        return 0
    opset = opset_of(model)
    # Read once for all convolutions of a model; a ResNet has dozens, of few different shapes.
    table = _Table(_machine(options, opset))
    chosen = {}
    for index, (convolution, x, dy) in convolutions.items():
        form = table.get(convolution)
        if form is None:
            form = _fastest(convolution, opset, options)
            table.add(convolution, form)
        if form != convolution.form:
            chosen[index] = (convolution, x, dy, form)
    table.save()
    use_forms(model, chosen)
    return len(chosen)


# ---- timing --------------------------------------------------------------------------------------------


def _fastest(convolution: Convolution, opset: int, options: ort.SessionOptions | None) -> str:
    """Time all forms of a shape in turns; that of the rule unless another is clearly faster."""
    from onward.graph.proto.conv_forms import form_model

    own = convolution.form
    model, others = form_model(convolution, None, opset)
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in (("x", convolution.x), ("dy", convolution.dy))
    }
    runs: dict[str, _Timed] = {own: _Timed(model, feeds, options)}
    for form in others:
        if form != own:
            # a form may need a kernel that another version of the runtime has
            with contextlib.suppress(ModelError):
                runs[form] = _Timed(form_model(convolution, form, opset)[0], feeds, options)
    begun = time.perf_counter()
    for index in range(_RUNS):
        for timed in list(runs.values()):
            timed.run()
        least = min(timed.best for timed in runs.values())
        # Slow forms are not run again: of a large image one may take as long as all others together.
        runs = {form: timed for form, timed in runs.items() if form == own or timed.best < _HOPELESS * least}
        if len(runs) == 1 or (index > 1 and time.perf_counter() - begun > _SECONDS):
            break
    # The least time, not the mean: whatever disturbs a run only makes it longer.
    best = min(runs, key=lambda form: runs[form].best)
    return best if runs[best].best < _CLEARLY * runs[own].best else own


class _Timed:
    """A form in a session of its own, with the least time of its runs."""

    def __init__(
        self, model: onnx.ModelProto, feeds: dict[str, np.ndarray], options: ort.SessionOptions | None
    ) -> None:
        own = quiet_options(threads=0 if options is None else options.intra_op_num_threads)
        own.enable_mem_pattern = False
        own.add_session_config_entry("session.force_spinning_stop", "1")  # other forms need the processors
        self._session = make_session(model, options=own, what="form of a convolution's gradient")
        self._feeds = feeds
        self._session.run(None, feeds)  # the first run plans memory
        # a single thread is this one, whose own time does not count what other processes do
        self._clock = time.thread_time if own.intra_op_num_threads == 1 else time.perf_counter
        self.best = float("inf")

    def run(self) -> None:
        begun = self._clock()
        self._session.run(None, self._feeds)
        self.best = min(self.best, self._clock() - begun)


# ---- the table -----------------------------------------------------------------------------------------


def _machine(options: ort.SessionOptions | None, opset: int) -> dict[str, str | int]:
    """What times depend on besides the shape."""
    threads = 0 if options is None else int(options.intra_op_num_threads)
    return {
        "processor": name_of_processor(),
        "machine": f"{platform.system()} {platform.machine()}",
        "instructions": " ".join(instruction_sets()),
        "onnxruntime": ort.__version__,
        "threads": threads or processors(),
        "opset": opset,
        "forms": _FORMS,
    }


# What this process has measured or read, by machine: a file that cannot be written is no reason to measure again.
_KNOWN: dict[str, dict[str, str]] = {}


class _Table:
    """The fastest form of each shape on one kind of machine: a file of JSON."""

    def __init__(self, machine: dict[str, str | int]) -> None:
        self._machine = machine
        # The file's name is a digest of all that times depend on: another processor or runtime reads another
        # file.
        text = json.dumps(machine, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        folder = cache_folder()
        self._path = None if folder is None else folder / f"conv-forms-{name}.json"
        forms = _KNOWN.setdefault(f"{self._path} {name}", {})
        for key, form in self._read().items():
            forms.setdefault(key, form)
        self._forms, self._new = forms, False

    def get(self, convolution: Convolution) -> str | None:
        from onward.graph.forms.conv_weights import FORMS

        form = self._forms.get(convolution.key)
        return form if form in FORMS else None

    def add(self, convolution: Convolution, form: str) -> None:
        self._forms[convolution.key] = form
        self._new = True

    def save(self) -> None:
        """Write what is new, with what others have written since; the last of two writers wins where they differ."""
        if not self._new or self._path is None:
            return
        data = {"machine": self._machine, "forms": {**self._read(), **self._forms}}
        # a full or read-only disk: this process knows, the next measures again
        with contextlib.suppress(OSError):
            write_bytes(self._path, json.dumps(data, indent=1, sort_keys=True).encode())
            self._new = False

    def _read(self) -> dict[str, str]:
        """What the file says; nothing where it is damaged, too large, or of another machine."""
        try:
            if self._path is None or self._path.stat().st_size > _MOST_BYTES:
                return {}
            data = parse_json(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, LimitError):
            return {}
        forms = data.get("forms")
        if data.get("machine") != self._machine or not isinstance(forms, dict):
            return {}
        return {key: form for key, form in forms.items() if isinstance(form, str)}
