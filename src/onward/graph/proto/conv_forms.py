"""Exchanges the formulation of weight gradients of convolutions, for shapes that are known.

`noted_convolutions` finds them by the notes that the gradient rule leaves; `form_model` is one of them alone, to be
timed; `use_forms` puts chosen ones in place, `fit_forms` those of the rule, where it did not know the sizes. Sums are
added up in another order, nothing else changes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from onward.contract import CONV_WEIGHT, OPSET
from onward.errors import LimitError
from onward.graph.builder import Builder
from onward.graph.dialect.lower import lower
from onward.graph.forms.conv_weights import FORMS, Product, possible_forms, weight_formulation
from onward.graph.forms.windows import Window
from onward.graph.passes.finish import finish
from onward.graph.proto.known_shapes import resolve_symbols
from onward.graph.protobuf import opset_of, set_nodes
from onward.reading import parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Convolution:
    """Everything that the speed of a convolution's weight gradient depends on."""

    x: tuple[int, ...]
    dy: tuple[int, ...]
    weight: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    group: int
    # what the rule chose without knowing the batch
    form: str

    @property
    def key(self) -> str:
        """A text that names the shape, for tables."""
        parts = (self.x, self.weight, self.strides, self.dilations, self.pads, (self.group,))
        return " ".join(["x".join(map(str, part)) for part in parts])


def noted_convolutions(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]
) -> dict[int, tuple[Convolution, str, str]]:
    """Weight gradients of a model for inputs of these shapes: by place of the node, with the names of x and dy.

    The model must still have what its file says of shapes inside; symbols in these become numbers.
    """
    graph = model.graph
    dims = resolve_symbols(graph, shapes)
    floats = {
        value.name
        for value in [*graph.value_info, *graph.input, *graph.output]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    noted = {}
    for index, node in enumerate(graph.node):
        note = next((entry.value for entry in node.metadata_props if entry.key == CONV_WEIGHT), None)
        convolution = None if note is None else _read(note, dims)
        if (
            convolution is not None
            and {convolution[1], convolution[2]} <= floats
            and _agrees(convolution[0], dims, node.output[0])
        ):
            noted[index] = convolution
    return noted


def fit_forms(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> int:
    """Formulate weight gradients as the rule does for sizes that are known; how many were exchanged."""
    chosen = {}
    for index, (convolution, x, dy) in noted_convolutions(model, shapes).items():
        op, product = _product(convolution, OPSET)
        form = weight_formulation(op, product)
        if form != convolution.form:
            chosen[index] = (convolution, x, dy, form)
    use_forms(model, chosen)
    return len(chosen)


def fit_gpu_forms(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> int:
    """One product for all taps in place of forms for processors' kernels; how many were exchanged.

    A product for each tap leaves most of a GPU idle; its convolutions are made for small kernels.
    """
    chosen = {
        index: (convolution, x, dy, "channels_last" if convolution.group == 1 else "channels_first")
        for index, (convolution, x, dy) in noted_convolutions(model, shapes).items()
        if convolution.form in ("gathered", "folded")
    }
    use_forms(model, chosen)
    return len(chosen)


def _read(note: str, dims: Mapping[str, tuple[int, ...]]) -> tuple[Convolution, str, str] | None:
    """A note as what it says; None for one that is damaged, or of values that are gone or of unknown size."""
    try:
        table = parse_json(note)
        x, dy = str(table["x"]), str(table["dy"])
        lists = {key: tuple(int(n) for n in table[key]) for key in ("weight", "strides", "dilations", "pads")}
        convolution = Convolution(
            dims[x], dims[dy], group=int(table["group"]), form=str(table["form"]), **lists
        )
    except (KeyError, TypeError, ValueError, LimitError):
        return None
    return (convolution, x, dy) if convolution.form in FORMS else None


def _agrees(convolution: Convolution, dims: Mapping[str, tuple[int, ...]], output: str) -> bool:
    """Whether sizes fit together, and the result is the weight's gradient still."""
    c, rank = convolution, len(convolution.strides)
    # A note is text in a file: what it says is checked like any other input.
    if not all(len(part) == rank for part in (c.dilations, c.x[2:], c.dy[2:], c.weight[2:])):
        return False
    if len(c.pads) != 2 * rank or c.group < 1 or c.x[1] != c.weight[1] * c.group or c.dy[1] != c.weight[0]:
        return False
    spans = [(k - 1) * d + 1 for k, d in zip(c.weight[2:], c.dilations)]
    counts = [
        (size + c.pads[i] + c.pads[rank + i] - span) // stride + 1
        for i, (size, span, stride) in enumerate(zip(c.x[2:], spans, c.strides))
    ]
    return counts == list(c.dy[2:]) and c.x[0] == c.dy[0] > 0 and dims.get(output) == c.weight


def form_model(convolution: Convolution, form: str | None, opset: int) -> tuple[onnx.ModelProto, list[str]]:
    """A model of x and dy that computes dw in a form (default: the rule's), and all forms that are possible."""
    op, product = _product(convolution, opset)
    graph, result = op.graph, FORMS[form or convolution.form](op, product)
    result.name = "dw"
    graph.outputs.append(result)
    # Of the weight only the shape is read.
    graph.inputs.remove(product.w)
    # the file may be of an older opset than the forms are written in
    model = lower(finish(ir.Model(graph, ir_version=10)), opset)
    return ir.to_proto(model), possible_forms(op, product)


def _product(convolution: Convolution, opset: int) -> tuple[Builder, Product]:
    """The product as the rule sees it, in a graph of its own."""
    c = convolution
    op = Builder(ir.Graph([], [], nodes=[], opset_imports={"": max(opset, OPSET)}, name="conv_weight"))
    x, w, dy = (op.input(n, ir.DataType.FLOAT, s) for n, s in (("x", c.x), ("w", c.weight), ("dy", c.dy)))
    rank = len(c.strides)
    vectors = (c.weight[2:], c.strides, c.dilations, c.pads[:rank], c.pads[rank:])
    return op, Product(x, w, dy, Window(*(np.asarray(v, np.int64) for v in vectors)), c.group)


def use_forms(model: onnx.ModelProto, chosen: Mapping[int, tuple[Convolution, str, str, str]]) -> None:
    """Compute weight gradients in other forms: by place of the node, the names of x and dy, and the form.

    What the old forms leave behind stays until the graph is pruned.
    """
    graph = model.graph
    opset = opset_of(model)
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(graph.node):
        if index not in chosen:
            nodes.append(node)
            continue
        convolution, x, dy, form = chosen[index]
        form_graph, _ = form_model(convolution, form, opset)
        names = {"x": x, "dy": dy, "dw": node.output[0], "": ""}
        prefix = f"{node.output[0]}/{form}"
        for tensor in form_graph.graph.initializer:
            names[tensor.name] = f"{prefix}/{tensor.name}"
            tensor.name = names[tensor.name]
            graph.initializer.append(tensor)
        for new in form_graph.graph.node:
            for name in new.output:
                # Names of a form are the same for each of its uses: the result's name in front tells them apart.
                names.setdefault(name, f"{prefix}/{name}")
            new.input[:] = [names[name] for name in new.input]
            new.output[:] = [names[name] for name in new.output]
            new.name = f"{prefix}/{new.name}"
            nodes.append(new)
    set_nodes(graph, nodes)
