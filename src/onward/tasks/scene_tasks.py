"""What tasks share whose targets lie on pictures: opening a model, batches that change both, figures of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.scenes import ChangeTarget, SceneAugmentation, scene_strengths
from onward.tasks.figures import encode_png, name_of_sample, to_pixels
from onward.train.batches import make_batches
from onward.train.report import Figure

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec
    from onward.data.read import Data
    from onward.tasks.protocol import Arrays

import onnx_ir as ir

from onward.artifacts.choose import constant_vectors
from onward.graph.dialect.normalize import normalize
from onward.graph.shapes.model import infer_shapes

# operators have the forms of today from this opset on, as far as tasks use them
_OLDEST = 17
# pictures of a report: those with the lowest agreement
_SHOWN = 12


def open_graph(model: ir.Model) -> tuple[ir.Model, list[str]]:
    """A model to which nodes can be added, converted where its opset is old; and settings that look like weights then.

    The conversion makes initializers of Constant nodes: those that are no weights must not train.
    """
    if model.graph.opset_imports.get("", 0) >= _OLDEST:
        infer_shapes(model)
        return model, []
    # before the conversion, after which a setting looks like a weight
    settings = constant_vectors(model)
    prepared = normalize(model)
    values = prepared.graph.initializers.items()
    return prepared, [
        name
        for name, value in values
        if name in settings and value.dtype == ir.DataType.FLOAT and value.const_value is not None
        and value.const_value.size > 1
    ]  # fmt: skip


def scene_batches(
    data: Data,
    specs: Sequence[InputSpec],
    options: Any,
    *,
    training: bool,
    target: str,
    change: ChangeTarget,
    augmentations: Sequence[str],
    finish: Callable[[SceneAugmentation], Any] = lambda augmentation: augmentation,
) -> Any:
    """Batches of pictures and the targets on them, which in training `change` moves as the pictures are."""
    names = [spec.name for spec in specs]
    strengths = scene_strengths(options.augment, augmentations)
    augmentation = None
    if training and strengths:
        augmentation = SceneAugmentation(
            pictures=next(i for i, name in enumerate(names) if name != target),
            targets=names.index(target), change=change, settings=data.settings, strengths=strengths,
        )  # fmt: skip
    return make_batches(
        data.arrays, names, batch_size=options.batch_size, shuffle=training, seed=options.seed,
        transform=None if augmentation is None else finish(augmentation),
    )  # fmt: skip


def scene_figures(
    title: str,
    agreement: Sequence[float],
    inputs: Arrays,
    data: Data,
    *,
    target: str,
    draw: Callable[[int, np.ndarray], Sequence[np.ndarray]],
    describe: Callable[[int], str],
) -> list[Figure]:
    """The pictures of an evaluation on which data and model agree least, each as `draw` shows it for both."""
    name = next(name for name in inputs if name != target)
    figures = []
    for row in np.argsort(agreement, kind="stable")[:_SHOWN].tolist():
        pixels = to_pixels(inputs[name][row], data.settings)
        picture = encode_png(np.concatenate(draw(row, pixels), axis=1))
        figures.append(Figure(title, f"{name_of_sample(data, row)}: {describe(row)}", picture=picture))
    return figures
