"""Block, ForwardBlock and TrainingBlock: base classes for users' blocks, and checkpoints of what they built."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from onward import contract
from onward.artifacts.training_graph import build_training_graphs
from onward.checkpoint.content import CheckpointData, NominalTensor
from onward.checkpoint.store import load, save
from onward.errors import SEE_NAMES, CheckpointError, ModelError
from onward.graph.dialect.normalize import normalize
from onward.onnxblock.context import current_model, empty_base, sharing
from onward.onnxblock.emit import find_type

if TYPE_CHECKING:
    from onward.optim.optimizer_model import ParameterGroup

__all__ = ["Block", "ForwardBlock", "TrainingBlock", "load_checkpoint_to_model", "save_checkpoint"]


# Weights above this size, or in other files, are shown to blocks by name, type and shape only: no block
# needs the numbers.
_HEADER_ONLY = 4096


class Block(abc.ABC):
    """A piece of a graph: `build` takes names of values and returns the names of its results.

    Blocks are called inside `onnxblock.base(model)` or `onnxblock.empty_base()`, or by another block's
    `build`; `self.base` is then the model being built. A subclass need not call `super().__init__()`.
    """

    base: onnx.ModelProto | None = None

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        # The name is accepted for compatibility; nothing is written to disk.
        del temp_file_name

    @abc.abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Append to `self.base` and return the name of the output, or several names."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.base = current_model()
        output = self.build(*args, **kwargs)
        _check(self.base, output)
        return output

    def add_to(self, model: ir.Model, names: Sequence[str]) -> tuple[list[str], ir.Model]:
        """Build onto a model in the dialect, which is taken over; returns what `build` named, and the new model."""
        # Checkpoints list parameters in the order of the initializers: a detour through a ModelProto must not
        # change it.
        order = list(model.graph.initializers)
        large = {
            name: value.const_value
            for name, value in model.graph.initializers.items()
            if value.const_value is not None
            and (value.const_value.nbytes > _HEADER_ONLY or isinstance(value.const_value, ir.ExternalTensor))
        }
        # A ModelProto holds 2 GB at the most, and copying weights there and back takes longer than all of the
        # rest.
        for name in large:
            model.graph.initializers.pop(name)
        proto = ir.to_proto(model)
        proto.graph.initializer.extend(_header(name, tensor) for name, tensor in large.items())
        with sharing(proto):
            output = self(*names)
        results = [output] if isinstance(output, str) else list(output)
        for tensor in [tensor for tensor in proto.graph.initializer if tensor.name in large]:
            proto.graph.initializer.remove(tensor)
            proto.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        # A block may append whatever operators it likes, of any opset that the base has.
        composed = normalize(proto)
        graph = composed.graph
        for value in [value for value in graph.inputs if value.name in large]:
            graph.inputs.remove(value)
            value.const_value = large[value.name or ""]
            graph.register_initializer(value)
        for name in [*order, *(name for name in list(graph.initializers) if name not in order)]:
            if name in graph.initializers:
                graph.initializers[name] = graph.initializers.pop(name)
        return results, composed

    def optimizer_model(
        self, parameters: Mapping[str, ir.TensorProtocol], groups: Sequence[ParameterGroup] = ()
    ) -> ir.Model:
        """The optimizer model that this block builds over sequences of parameters and gradients."""
        if groups:
            raise ModelError(
                f"parameter_groups need an update rule; {type(self).__name__} is a block of its own form"
            )
        trainable = [_header(name, tensor) for name, tensor in parameters.items()]
        with empty_base() as accessor:
            self((trainable, []))
            model = ir.from_proto(accessor.model)
        inputs = {value.name for value in model.graph.inputs}
        # the two that every rule needs; learning rate, step and moments are there only if the block reads them
        if not {"params", "gradients"} <= inputs:
            raise ModelError(
                f"the optimizer block {type(self).__name__} must build a graph with the inputs 'params' and "
                f"'gradients' (sequences of tensors); it has {sorted(name or '' for name in inputs)}"
            )
        model.metadata_props[contract.ROLE] = "optimizer"
        # What has only this form runs through `SequenceUpdater`: lists of tensors, slower than one vector.
        model.metadata_props[contract.OPTIMIZER] = json.dumps(
            {"name": type(self).__name__, "sequences": True}
        )
        return model

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """The base model with the types and shapes of all its values."""
        # data_prop: reshapes by computed sizes are common in exported models
        return onnx.shape_inference.infer_shapes(current_model(), data_prop=True)


class ForwardBlock(Block):
    """Builds a forward model: what `build` returns becomes the model's outputs."""

    _model: onnx.ModelProto | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.base = current_model()
        output = self.build(*args, **kwargs)
        _check(self.base, output)
        _set_outputs(self.base, output)
        self._model = self.base
        return output

    def to_model_proto(self) -> onnx.ModelProto:
        """The model that was built."""
        if self._model is None:
            raise ModelError("Please build the forward models first before trying to retrieve them.")
        return self._model


class TrainingBlock(Block):
    """Builds a training model: the first name that `build` returns is the loss."""

    _requires_grad: dict[str, bool]
    _built: tuple[onnx.ModelProto, onnx.ModelProto] | None = None
    _parameters: tuple[list[onnx.TensorProto], list[onnx.TensorProto]] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> TrainingBlock:
        # set here, not in __init__, which subclasses may skip
        self = super().__new__(cls)
        self._requires_grad = {}
        return self

    def requires_grad(self, name: str, value: bool = True) -> None:
        """Make a parameter (or an input) trainable, or with False frozen."""
        self._requires_grad[name] = value

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """The trainable and the frozen parameters, in the order of the model's initializers."""
        if self._parameters is None:
            raise ModelError(
                "Please build the training model first before trying to retrieve the parameters."
            )
        return self._parameters

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training and the evaluation model."""
        if self._built is None:
            raise ModelError(
                "Please build the training and eval models first before trying to retrieve them."
            )
        return self._built

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.base = current_model()
        output = self.build(*args, **kwargs)
        _check(self.base, output)
        names = [output] if isinstance(output, str) else list(output)
        _set_outputs(self.base, names)
        # The base itself stays the forward model: the user may build on it, or save it.
        graphs = build_training_graphs(
            normalize(self.base),
            names[0],
            outputs=names[1:],
            trainable=_existing(self.base, [n for n, value in self._requires_grad.items() if value]),
            frozen=_existing(self.base, [n for n, value in self._requires_grad.items() if not value]),
        )
        self._built = ir.to_proto(graphs.training), ir.to_proto(graphs.evaluation)
        # As TensorProtos, since `save_checkpoint` of the API that this follows takes those.
        self._parameters = (
            [ir.serde.serialize_tensor(t) for t in _named(graphs.trainable)],
            [ir.serde.serialize_tensor(t) for t in _named(graphs.frozen)],
        )
        return output


def _header(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    # a tensor without data: invalid in a file, and all that blocks look at
    return onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())


def _named(tensors: dict[str, ir.TensorProtocol]) -> list[ir.TensorProtocol]:
    for name, tensor in tensors.items():
        tensor.name = name
    return list(tensors.values())


def _existing(model: onnx.ModelProto, names: Sequence[str]) -> list[str]:
    existing = {t.name for t in model.graph.initializer} | {v.name for v in model.graph.input}
    for name in names:
        if name not in existing:
            raise ModelError(f"Node arg {name} is not found in the graph", hint=SEE_NAMES)
    return list(names)


def _set_outputs(model: onnx.ModelProto, output: str | Sequence[str]) -> None:
    names = [output] if isinstance(output, str) else list(output)
    values = []
    for name in names:
        value = onnx.ValueInfoProto(name=name)
        value.type.CopyFrom(find_type(name))
        values.append(value)
    if {"params", "gradients"} <= {value.name for value in model.graph.input}:
        # an optimizer block has made outputs of its own, of which it names the first
        values += [value for value in model.graph.output if value.name not in names]
    del model.graph.output[:]
    model.graph.output.extend(values)


def _check(model: onnx.ModelProto, output: Any) -> None:
    """Check that `build` returned names of existing values."""
    names = [output] if isinstance(output, str) else output
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"a block's build must return the name of its output or a list of names, got {output!r}"
        )
    computed = {name for node in model.graph.node for name in node.output}
    computed |= {value.name for value in model.graph.input} | {
        tensor.name for tensor in model.graph.initializer
    }
    for name in names:
        if name not in computed:
            raise ModelError(f"a block's build returned '{name}', which nothing in the model computes")


# --- Parameters of a training block to a checkpoint file, and back into a model.


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Save trainable and frozen parameters; with `nominal_checkpoint` only their names and types."""
    trainable, frozen = parameters

    def convert(tensors: Sequence[onnx.TensorProto]) -> dict:
        # a phone that fetches its weights elsewhere needs only what fits: names and types, a few kB
        if nominal_checkpoint:
            return {tensor.name: NominalTensor(tensor.data_type) for tensor in tensors}
        return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}

    save(
        CheckpointData(trainable=convert(trainable), frozen=convert(frozen), nominal=nominal_checkpoint),
        path_to_checkpoint,
    )


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Overwrite the initializers of a model with the checkpoint's parameters of the same names."""
    data = load(path_to_checkpoint)
    parameters = {**data.trainable, **data.frozen}
    for tensor in model.graph.initializer:
        # What the checkpoint does not have stays: a model has constants that are no parameters.
        value = parameters.get(tensor.name)
        if isinstance(value, NominalTensor):
            reason = "it is nominal: it holds names and types, no values"
            raise CheckpointError(os.fspath(path_to_checkpoint), reason, field=tensor.name)
        if value is not None:
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
