"""Folders of encoder-decoders by optimum's conventions, made from the two parts that Onward exports, without optimum.

The stand-in for the encoder's hidden states holds the keys and values for cross-attention side by side; the decoder's
first step takes them apart, as a published one computes them. After it they come back empty, as in optimum's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["publish_parts"]


def publish_parts(ours: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Write the named ones of a published folder's models, from the folder `ours`."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = onnx.load(ours / "encoder_model.onnx")
    decoder = onnx.load(ours / "decoder_model.onnx")
    slots = [value.name.removeprefix("encoder.") for value in encoder.graph.output]
    first, later = _Step(decoder, slots, begun=False), _Step(decoder, slots, begun=True)
    makers = {
        "encoder_model.onnx": lambda: _encoder(encoder),
        "decoder_model.onnx": first.model,
        "decoder_with_past_model.onnx": later.model,
        "decoder_model_merged.onnx": lambda: _merged(first, later),
    }
    for name in names:
        model = makers[name]()
        onnx.checker.check_model(model)
        onnx.save(model, folder / name)


def _encoder(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    rows = []
    for value in model.graph.output:
        graph.node.append(
            helper.make_node("Transpose", [value.name], [f"{value.name}/by_token"], perm=[0, 2, 1, 3])
        )
        graph.node.append(
            helper.make_node("Reshape", [f"{value.name}/by_token", "flat"], [f"{value.name}/flat"])
        )
        rows.append(f"{value.name}/flat")
    graph.initializer.append(numpy_helper.from_array(np.array([0, 0, -1]), "flat"))
    graph.node.append(helper.make_node("Concat", rows, ["last_hidden_state"], axis=-1))
    del graph.output[:]
    graph.output.append(_tensor("last_hidden_state", ["batch", "sequence", None]))
    return _model(graph, model)


class _Step:
    """The decoder's first step, or (`begun`) those after it, under the published names."""

    def __init__(self, decoder: onnx.ModelProto, slots: list[str], *, begun: bool) -> None:
        self.decoder, self.begun = decoder, begun
        shape = next(
            v for v in decoder.graph.input if v.name == "past_key_values.0.key"
        ).type.tensor_type.shape
        heads, size = shape.dim[1].dim_value, shape.dim[3].dim_value
        self.constants = {
            "published/heads": np.array([0, 0, heads, size]),
            "published/empty": np.array([heads, 0, size]),
            "published/zero": np.array([0]),
            "published/two": np.array([2]),
        }
        self.cache: dict[str, list[Any]] = {}
        self.nodes: list[onnx.NodeProto] = []
        self._add("Identity", ["input_ids"], "decoder_input_ids")
        self._add("Identity", ["encoder_attention_mask"], "attention_mask")
        pieces = [f"published/{slot}" for slot in slots]
        if not begun:
            split = helper.make_node(
                "Split", ["encoder_hidden_states"], pieces, axis=-1, num_outputs=len(pieces)
            )
            self.nodes.append(split)
            self._add("Shape", ["input_ids"], "published/batch", start=0, end=1)
            self._add("Concat", ["published/batch", "published/empty"], "published/none", axis=0)
        for slot, piece in zip(slots, pieces):
            layer, part = slot.split(".")
            own, read = f"{layer}.decoder.{part}", f"{layer}.encoder.{part}"
            self.cache |= {own: ["batch", heads, "past", size], read: ["batch", heads, "sequence", size]}
            if begun:
                self._add("Identity", [f"past_key_values.{own}"], f"past_key_values.{slot}")
                self._add("Identity", [f"past_key_values.{read}"], f"encoder.{slot}")
                none = ["published/zero", "published/zero", "published/two"]
                self._add("Slice", [f"encoder.{slot}", *none], f"present.{read}")
            else:
                self._add("ConstantOfShape", ["published/none"], f"past_key_values.{slot}")
                self._add("Reshape", [piece, "published/heads"], f"{piece}/heads")
                self._add("Transpose", [f"{piece}/heads"], f"encoder.{slot}", perm=[0, 2, 1, 3])
                self._add("Identity", [f"encoder.{slot}"], f"present.{read}")
        self.nodes += list(decoder.graph.node)
        for slot in slots:
            layer, part = slot.split(".")
            self._add("Identity", [f"present.{slot}"], f"present.{layer}.decoder.{part}")

    def _add(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))

    @property
    def outputs(self) -> list[onnx.ValueInfoProto]:
        presents = {
            f"present.{name}": ["batch", shape[1], None, shape[3]] for name, shape in self.cache.items()
        }
        return [_tensor("logits", ["batch", None, None]), *(_tensor(*item) for item in presents.items())]

    def inputs(self, *, states: bool, past: bool) -> list[onnx.ValueInfoProto]:
        found = [
            _tensor("input_ids", ["batch", "length"], TensorProto.INT64),
            _tensor("encoder_attention_mask", ["batch", "sequence"], TensorProto.INT64),
        ]
        if states:
            found.append(_tensor("encoder_hidden_states", ["batch", "sequence", None]))
        if past:
            found += [_tensor(f"past_key_values.{name}", shape) for name, shape in self.cache.items()]
        return found

    @property
    def weights(self) -> list[onnx.TensorProto]:
        made = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        return [*self.decoder.graph.initializer, *made]

    def model(self) -> onnx.ModelProto:
        """A file of its own; that of the later steps gives the decoder's keys and values only."""
        outputs = [value for value in self.outputs if not (self.begun and ".encoder." in value.name)]
        inputs = self.inputs(states=not self.begun, past=self.begun)
        return _model(helper.make_graph(self.nodes, "step", inputs, outputs, self.weights), self.decoder)


def _merged(first: _Step, later: _Step) -> onnx.ModelProto:
    outputs = first.outputs
    choice = helper.make_node(
        "If",
        ["use_cache_branch"],
        [value.name for value in outputs],
        then_branch=helper.make_graph(later.nodes, "later", [], outputs),
        else_branch=helper.make_graph(first.nodes, "first", [], outputs),
    )
    inputs = [*first.inputs(states=True, past=True), _tensor("use_cache_branch", [1], TensorProto.BOOL)]
    return _model(helper.make_graph([choice], "merged", inputs, outputs, first.weights), first.decoder)


def _tensor(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(graph: onnx.GraphProto, like: onnx.ModelProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=like.opset_import, ir_version=like.ir_version)
