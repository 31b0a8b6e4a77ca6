"""How likely a model holds answers to be, which preferences and multiple choice compare; and what it answers."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.data.conversations import Batches, Pair
from onward.files import write_bytes
from onward.graph.gc_paused import gc_paused
from onward.language.decoding import Decoder, Options, generate
from onward.language.kept_models import digest_of
from onward.language.swappable import add_adapter_inputs, scaled_values
from onward.language.training_models import Base, open_for_adapters
from onward.losses.preferences import LOG_PROBABILITIES
from onward.runtime.cache import cache_folder
from onward.runtime.devices import Device
from onward.runtime.sessions import session_beside
from onward.train.trainer import Trainer

if TYPE_CHECKING:
    from onward.graph.passes.lora import LoRA
    from onward.language.training_models import Base
    from onward.train.artifact_set import ArtifactFiles

# files of reference scores that are kept; each has eight bytes for a pair
_MOST = 32


def score_pairs(
    files: ArtifactFiles, base: Base, pairs: Sequence[Pair], *, batch_size: int, device: Any
) -> np.ndarray:
    """log p of both answers of each pair, [pairs, 2], by the model as the files have it; `files` are those of dpo."""
    engine = Trainer(files, progress=False, device=device).engine
    names = list(engine.module.signature.inputs)
    batches = Batches(pairs, batch_size, pad=base.pad, names=names, shuffle=False)
    report = engine.evaluate(batches.epoch(0), tables=True)
    if report.failure is not None:
        raise report.failure
    scores = np.empty((len(pairs), 2), np.float32)
    for index, table in enumerate(report.tables):
        scores[batches.rows(0, index)] = table[LOG_PROBABILITIES].reshape(-1, 2)
    return scores


def reference_scores(
    files: ArtifactFiles, base: Base, pairs: Sequence[Pair], *, batch_size: int, device: Any
) -> np.ndarray:
    """The scores of a base beside which nothing was trained yet; they are kept for the next run."""
    content = hashlib.sha256()
    for pair in pairs:
        for example in (pair.chosen, pair.rejected):
            content.update(np.asarray([len(example.ids), *example.ids, *example.labels]).tobytes())
    key, root = digest_of(base.file, content.hexdigest(), program=False), cache_folder()
    path = None if root is None or key is None else root / "references" / f"{key}.npy"
    if path is not None and path.is_file():
        with contextlib.suppress(OSError, ValueError):
            scores = np.load(path, allow_pickle=False)
            if scores.shape == (len(pairs), 2) and np.isfinite(scores).all():
                return scores
    scores = score_pairs(files, base, pairs, batch_size=batch_size, device=device)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(buffer := io.BytesIO(), scores)
            write_bytes(path, buffer.getvalue())
            oldest = sorted(path.parent.glob("*.npy"), key=lambda file: -file.stat().st_mtime)[_MOST:]
            for file in oldest:
                file.unlink(missing_ok=True)
    return scores


def rewards(outputs: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], beta: float) -> np.ndarray:
    """β·(log p − log p of the reference) of chosen and rejected answers, [pairs, 2]; ORPO has no reference."""
    scores = outputs[LOG_PROBABILITIES] - inputs.get("reference", np.float32(0.0))
    return beta * scores.reshape(-1, 2)


def perplexity(loss: float) -> float:
    """e^loss, and a large number where that is none."""
    return math.exp(min(loss, 80.0))


class AdapterWriter:
    """A base whose adapters are given with each text; its weights are mapped from its own file."""

    def __init__(self, base: Base, lora: LoRA) -> None:
        self._base, self._lora = base, lora
        with gc_paused():
            model, joined, finish = open_for_adapters(base.file, base.card)
            add_adapter_inputs(model, lora, joined=joined)
            finish()
            self._session = session_beside(
                ir.to_proto(model), str(base.file), device=Device("cpu"), options=None
            )

    def write(
        self, prompts: Sequence[Sequence[int]], adapters: Mapping[str, np.ndarray], *, max_new_tokens: int
    ) -> list[list[int]]:
        """The likeliest continuation of each prompt; one by one, which suits every model."""
        session: Any = _WithValues(self._session, scaled_values(adapters, self._lora))
        ends = frozenset(self._base.card["generation"].get("eos_ids") or ())
        longest = self._base.card["tokenizer"].get("max_length")
        texts = []
        for prompt in prompts:
            # the last new token is not read again
            room = max_new_tokens if not longest else longest - len(prompt) + 1
            options = Options(max_new_tokens=max(1, min(max_new_tokens, room)), ends=ends)
            ids = np.asarray([list(prompt)], np.int64)
            *_, new = generate(Decoder(session, ids, np.ones_like(ids)), options)
            texts.append(new[0])
        return texts


class _WithValues:
    """A session that is fed the same values in each run."""

    def __init__(self, session: Any, values: Mapping[str, np.ndarray]) -> None:
        self._session, self._values = session, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, names: Sequence[str], feed: Mapping[str, Any]) -> list[Any]:
        return self._session.run(names, {**feed, **self._values})
