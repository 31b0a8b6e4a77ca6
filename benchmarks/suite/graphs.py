"""How many nodes training takes, against those of the forward pass: what files, loading and each step pay for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from suite.figures import MISSING, paragraph, table
from suite.section import Cases, Section

if TYPE_CHECKING:
    from suite.settings import Settings

__all__ = ["SECTION"]

# figures of an older version are stored under names that begin so
BEFORE = "before/"
COUNTED = ("resnet18", "video", "resnet", "mobilenet", "encoder-2x32", "decoder", "lstm", "mlp")


def measure(settings: Settings) -> Cases:
    """The nodes of each model's forward graph, of its training model, and of that for the shapes of one batch."""
    import numpy as np
    import onnx
    from models import NETWORKS
    from prepare import prepare

    from onward.graph.proto.accumulation import specialize_reset
    from onward.graph.proto.known_shapes import resolve_symbols, specialize_shapes
    from onward.graph.proto.small_images import batch_convolutions

    cases: Cases = {}
    for name in COUNTED:
        if name not in settings.models and name not in NETWORKS:
            continue
        folder = prepare(name, settings.cache)
        training = onnx.load(folder / "onward" / "training_model.onnx")
        special = specialize_reset(training, reset=True, keep_shapes=True)
        shapes = {key: array.shape for key, array in np.load(folder / "inputs.npz").items()}
        batch_convolutions(special, resolve_symbols(special.graph, shapes))
        specialize_shapes(special, shapes)
        cases[name] = {
            # what exporters write as Constant nodes, training models have as initializers
            "forward": sum(n.op_type != "Constant" for n in onnx.load(folder / "forward.onnx").graph.node),
            "training": len(training.graph.node),
            "specialized": len(special.graph.node),
        }
    return cases


def render(cases: Cases) -> list[str]:
    """Counts and how many times the forward's they are."""
    rows = []
    for name, case in cases.items():
        if name.startswith(BEFORE):
            continue
        forward, before = case["forward"], cases.get(f"{BEFORE}{name}", {}).get("training")
        rows.append(
            [
                name,
                forward,
                MISSING if before is None else f"{before} ({before / forward:.1f} ×)",
                f"{case['training']} ({case['training'] / forward:.1f} ×)",
                f"{case['specialized']} ({case['specialized'] / forward:.1f} ×)",
            ]
        )
    return [
        paragraph(
            "Nodes of the forward graph, of the training model in version 0.1 and now, and of that model when it is "
            "specialised: gradients replace their buffers, and the shapes of one batch are known. The batch is "
            "symbolic in all files; Constant nodes do not count. resnet18 and video (nine three-dimensional "
            "convolutions) have the layers of networks of these kinds and few channels, which do not matter here."
        ),
        "",
        *table(["model", "forward", "training, 0.1", "training", "specialised"], rows),
    ]


SECTION = Section("graphs", "Nodes of training graphs", measure, render)
