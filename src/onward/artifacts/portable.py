"""The portable step: a training step, its update and the test for non-finite numbers in one standard graph.

The state goes in and the next state comes out, so that a loop in any language is: run, keep the outputs, feed
them back. Built from the training and the optimizer model. docs/portable.md specifies names, order and metadata.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.checkpoint import CheckpointData
from onward.checkpoint.portable import StateLayout, StatePart, StateTensor, aligned, to_portable, weights_of
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.cleanup import finish, share_subexpressions, simplify
from onward.graph.passes.inference_mode import to_inference
from onward.graph.passes.randomness import SEED_INPUT
from onward.graph.passes.specialize import BUFFER, OUT, RESET
from onward.graph.prune import prune, values_of
from onward.graph.save import EXTERNAL_THRESHOLD, initializer_bytes

__all__ = ["portable_step", "write_portable"]

VERSION = "1"
# How `Module` makes the seed of a step: odd multipliers spread neighbouring seeds and steps over all 64 bits.
_SEED_FACTOR = np.int64(0x9E3779B97F4A7C15 - 2**64)
_STEP_FACTOR = np.int64(0xD1B54A32D192ED03 - 2**64)
# Gradients beyond this are an overflow: some rules clamp infinities to the largest float32.
_OVERFLOW = 1e30
_MOMENTS = ("first_order_moments", "second_order_moments", "third_order_moments")
# Parameters with fewer numbers are updated as one vector: a node costs more time than so many numbers.
_SMALL = 1 << 16
# Those with more are updated in pieces of about this many, which stay in the processor's caches.
_LARGE, _PIECE = 1 << 19, 1 << 17

Values = Mapping[str, ir.Value]


@dataclasses.dataclass
class _Unit:
    """Parameters that are updated together: the state's inputs, and the gradient in the same shape."""

    sizes: dict[str, int]
    shape: tuple[int, ...]
    parameter: ir.Value
    slots: dict[str, ir.Value] = dataclasses.field(default_factory=dict)
    gradient: ir.Value | None = None
    in_pieces: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.sizes)


def portable_step(
    training: ir.Model, optimizer: ir.Model, checkpoint: CheckpointData
) -> tuple[ir.Model, StateLayout]:
    """One graph that trains: batch, learning rate and state in; loss, outputs and next state out."""
    model = training.clone()
    graph = model.graph
    gradients, following = _take_results(graph, checkpoint)
    inputs = {value.name or "": value for value in graph.inputs}
    graph.inputs.clear()
    graph.inputs.extend(value for name, value in inputs.items() if _is_batch(name, checkpoint))
    batch = len(graph.inputs)
    results = list(graph.outputs)
    op = Builder(graph)
    rule = _Rule(op, optimizer, rate=op.input("learning_rate", ir.DataType.FLOAT, [1]))
    state = _State(op, inputs)
    state.add_weights(checkpoint, rule, statistics=following)
    state.add_slots(rule)
    state.add_counters()
    if SEED_INPUT in inputs:
        _mix_seed(op, inputs[SEED_INPUT], state.seed, state.train_step)
    for unit in state.units:
        unit.gradient = _together(op, unit, gradients)
    judged = [unit.gradient for unit in state.units if unit.gradient is not None]
    good, scale = _judge(op, results[0], judged, list(following.values()), rule.clip_norm)
    _add_update(op, good, rule, state, scale, following)
    layout = StateLayout(state.tensors)
    model.metadata_props.update(
        {
            "onward.role": "train_step",
            "onward.portable": VERSION,
            "onward.batch_inputs": str(batch),
            "onward.results": str(len(results)),
            "onward.state": layout.text(),
            "onward.state_digest": layout.digest.hex(),
            "onward.weights_size": str(layout.weights_size),
            "onward.label_ranges": _label_ranges(model),
        }
    )
    return finish(model), layout


def write_portable(
    folder: Path, prefix: str, evaluation: ir.Model, layout: StateLayout, checkpoint: CheckpointData
) -> None:
    """Write the state file, the inference model and its weights into a folder."""
    to_portable(checkpoint, folder / f"{prefix}state.bin", layout=layout)
    data = folder / f"{prefix}inference_model.bin"
    with open(data, "wb") as file:
        for piece in weights_of(checkpoint, layout):
            file.write(piece)
    model = _inference_model(evaluation, layout, data)
    path = folder / f"{prefix}inference_model.onnx"
    if initializer_bytes(model) - layout.weights_size > EXTERNAL_THRESHOLD:
        large = [
            v for v in model.graph.initializers.values() if not isinstance(v.const_value, ir.ExternalTensor)
        ]
        tensors = [value.const_value for value in large if value.const_value is not None]
        moved = ir.external_data.convert_tensors_to_external(tensors, folder, f"{path.name}.data")
        for value, tensor in zip(large, moved):
            value.const_value = tensor
    ir.save(model, path)


def _inference_model(evaluation: ir.Model, layout: StateLayout, data: Path) -> ir.Model:
    """The evaluation model's own outputs, with weights that lie in a file at the offsets of the state's."""
    model = evaluation.clone()
    about = model.metadata_props
    known = values_of(model.graph)
    outputs = [name for name in json.loads(about.get("onward.outputs", "[]")) if name in known]
    prune(model, outputs or [about["onward.loss"]])
    to_inference(model)
    names = [part.name for part, _, _ in layout.parts() if part.role != "slot"]
    simplify(model, parameters=names)
    inputs = {value.name: value for value in model.graph.inputs}
    for part, dtype, offset in layout.parts():
        value = inputs.get(part.name) if part.role in ("frozen", "statistic", "trainable") else None
        if value is None:
            continue
        model.graph.inputs.remove(value)
        value.const_value = ir.ExternalTensor(
            data.name,
            offset,
            prod(part.shape) * dtype.itemsize,
            ir.DataType.from_numpy(dtype),
            shape=ir.Shape(part.shape),
            name=part.name,
            base_dir=data.parent,
        )
        model.graph.register_initializer(value)
    for key in ("onward.trainable", "onward.frozen", "onward.labels", "onward.loss"):
        about.pop(key, None)
    about.update({"onward.role": "inference", "onward.state_digest": layout.digest.hex()})
    return model


def _label_ranges(model: ir.Model) -> str:
    ranges: dict[str, dict[str, int]] = json.loads(model.metadata_props.get("onward.labels", "{}"))
    lines = [(name, str(r["classes"]), str(r.get("ignore_index", ""))) for name, r in ranges.items()]
    return "".join("\t".join(fields) + "\n" for fields in lines)


def _take_results(graph: ir.Graph, checkpoint: CheckpointData) -> tuple[dict, dict]:
    """The gradient of each trainable and the next value of each statistic; they are outputs no longer."""
    gradients: dict[str, ir.Value] = {}
    following: dict[str, ir.Value] = {}
    for output in list(graph.outputs):
        name = output.name or ""
        statistic, parameter = name.removesuffix(".next"), name.removesuffix(OUT)
        if name.endswith(".next") and statistic in checkpoint.frozen:
            graph.outputs.remove(output)
            output.name = f"{name}.computed"
            following[statistic] = output
        elif name.endswith(OUT):
            graph.outputs.remove(output)
            node = output.producer()
            gradient = node.inputs[1] if node is not None and node.op_type == "Where" else None
            if gradient is None:
                raise ModelError(f"the training model computes '{name}' in a way that is not known")
            # what is computed again may wait for it
            ir.convenience.replace_all_uses_with(output, gradient)
            if parameter in checkpoint.trainable:
                gradients[parameter] = gradient
    return gradients, following


def _is_batch(name: str, checkpoint: CheckpointData) -> bool:
    internal = name.endswith(BUFFER) or name in (RESET, SEED_INPUT)
    return not internal and name not in checkpoint.trainable and name not in checkpoint.frozen


# ---- the state ---------------------------------------------------------------------------------------


class _State:
    """The inputs of the step that hold the state, in order, and what they are made of."""

    def __init__(self, op: Builder, inputs: Values) -> None:
        self._op, self._inputs = op, inputs
        self.tensors: list[StateTensor] = []
        self.units: list[_Unit] = []
        self.statistics: dict[str, ir.Value] = {}

    def add_weights(self, checkpoint: CheckpointData, rule: _Rule, *, statistics: Values) -> None:
        """Frozen parameters, batch-norm statistics and trainables; small ones of these in common tensors."""
        for role in ("frozen", "statistic"):
            for name, array in checkpoint.frozen.items():
                if (name in statistics) == (role == "statistic"):
                    array = np.asarray(array)
                    value = self._own(name, role, array.dtype, array.shape)
                    if role == "statistic":
                        self.statistics[name] = value
        shapes = {name: np.asarray(array).shape for name, array in checkpoint.trainable.items()}
        for names in rule.together(shapes):
            if len(names) > 1:
                self._pack(names, shapes)
                continue
            (name,) = names
            shape = _in_pieces(shapes[name]) if rule.elementwise else None
            value = self._own(name, "trainable", np.dtype(np.float32), shapes[name], shape)
            self.units.append(
                _Unit({name: prod(shapes[name])}, shape or shapes[name], value, in_pieces=shape is not None)
            )

    def add_slots(self, rule: _Rule) -> None:
        """A tensor for each slot of the optimizer and each unit, made of the same parts."""
        parts = {part.name: part for tensor in self.tensors for part in tensor.parts}
        for slot in rule.slots:
            for unit in self.units:
                shape = rule.slot_shape(slot, unit)
                made = tuple(
                    dataclasses.replace(
                        parts[name],
                        role="slot",
                        slot=slot,
                        shape=parts[name].shape if rule.elementwise or rule.sequences else shape,
                    )
                    for name in unit.names
                )
                unit.slots[slot] = self._add(f"{unit.parameter.name}.{slot}", np.float32, shape, made)

    def add_counters(self) -> None:
        """How many updates and steps there were, and the seed of random numbers."""
        made = [
            self._add(name, np.int64, (1,), (StatePart(name, name, (1,)),))
            for name in ("optimizer_step", "train_step", "random_seed")
        ]
        self.optimizer_step, self.train_step, self.seed = made

    def _own(
        self,
        name: str,
        role: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        given: tuple[int, ...] | None = None,
    ) -> ir.Value:
        """An input of its own for a parameter, perhaps in another shape."""
        value = self._inputs[name]
        if given is not None:
            with self._op.inserting(next(iter(self._op.graph))):
                shaped = self._op.Reshape(value, np.asarray(shape, np.int64))
            users = [(node, index) for node, index in value.uses() if node is not shaped.producer()]
            for node, index in users:
                node.replace_input_with(index, shaped)
            value.shape = ir.Shape(given)
        self._op.graph.inputs.append(value)
        self.tensors.append(StateTensor(name, dtype, given or shape, (StatePart(role, name, shape),)))
        return value

    def _pack(self, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """One vector for several parameters, each of which begins at a multiple of 64 bytes."""
        parts, sizes, position = [], [], 0
        for name in names:
            parts.append(StatePart("trainable", name, shapes[name], start=position))
            size = prod(shapes[name])
            padded = aligned(4 * size) // 4
            sizes += [size, padded - size] if padded > size else [size]
            position += 4 * padded
        packed = self._add(f"packed{len(self.units)}", np.float32, (position // 4,), tuple(parts))
        with self._op.inserting(next(iter(self._op.graph))):
            pieces = iter(self._op.Split(packed, np.asarray(sizes, np.int64), axis=0, outputs=len(sizes)))
            for name in names:
                piece = next(pieces)
                if aligned(4 * prod(shapes[name])) != 4 * prod(shapes[name]):
                    next(pieces)
                shaped = piece
                if len(shapes[name]) != 1:
                    shaped = self._op.Reshape(piece, np.asarray(shapes[name], np.int64))
                ir.convenience.replace_all_uses_with(self._inputs[name], shaped)
        self.units.append(_Unit({name: prod(shapes[name]) for name in names}, (position // 4,), packed))

    def _add(self, name: str, dtype: Any, shape: tuple[int, ...], parts: tuple[StatePart, ...]) -> ir.Value:
        kind = np.dtype(dtype)
        value = self._op.input(name, ir.DataType.from_numpy(kind), shape)
        self.tensors.append(StateTensor(value.name or "", kind, shape, parts))
        return value


def _in_pieces(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """A large tensor as rows of about as many numbers as fit the caches, where its size has such a divisor."""
    size = prod(shape)
    if size < _LARGE:
        return None
    rows = [
        count for count in range(size // (2 * _PIECE), 2 * size // _PIECE + 1) if count and size % count == 0
    ]
    return min(((n, size // n) for n in rows), key=lambda s: abs(s[1] - _PIECE), default=None)


def _together(op: Builder, unit: _Unit, gradients: Values) -> ir.Value | None:
    """The gradient of a unit, in the shape in which it is updated."""
    if len(unit.names) == 1:
        gradient = gradients.get(unit.names[0])
        return (
            op.Reshape(gradient, np.asarray(unit.shape, np.int64))
            if unit.in_pieces and gradient
            else gradient
        )
    parts: list[ir.Value] = []
    for name in unit.names:
        gradient = gradients[name]
        flat = gradient.shape is not None and gradient.shape.rank() == 1
        parts.append(gradient if flat else op.Reshape(gradient, [-1]))
        size = unit.sizes[name]
        if padding := aligned(4 * size) // 4 - size:
            parts.append(op.constant(np.zeros(padding, np.float32), name="padding"))
    return op.Concat(*parts, axis=0)


def _mix_seed(op: Builder, old: ir.Value, seed: ir.Value, step: ir.Value) -> None:
    """The seed of this step, as `Module` computes it."""
    with op.inserting(next(iter(op.graph))):
        number = op.Add(step, np.int64(1))
        mixed = op.Add(op.Mul(seed, _SEED_FACTOR), op.Mul(number, _STEP_FACTOR))
    ir.convenience.replace_all_uses_with(old, mixed)


# ---- is it finite? -----------------------------------------------------------------------------------


def _judge(
    op: Builder,
    loss: ir.Value,
    gradients: Sequence[ir.Value],
    statistics: Sequence[ir.Value],
    limit: float | None,
) -> tuple[ir.Value, ir.Value | None]:
    """Whether this step may change the state, and the factor that limits the gradients' norm."""
    kind = ir.DataType.DOUBLE if op.dtype(loss) == ir.DataType.DOUBLE else ir.DataType.FLOAT
    good = _is_finite(op, loss if op.dtype(loss) == kind else op.Cast(loss, to=kind))
    if statistics:
        # a variance can overflow while the normalized values, and so the loss, stay finite
        parts = [_as_float(op, op.Reshape(value, [-1])) for value in statistics]
        good = op.And(good, _is_finite(op, op.ReduceL1(op.Concat(*parts, axis=0), keepdims=0)))
    if not gradients:
        return good, None
    if limit is None:
        parts = [op.ReduceL1(value, keepdims=0) for value in gradients]
        total = parts[0] if len(parts) == 1 else op.Sum(*parts)
        return op.And(good, op.Less(total, _OVERFLOW)), None
    total = _squared_norm(op, gradients)
    norm = op.Sqrt(total)
    scale = op.Min(op.Div(limit, op.Add(norm, 1e-6)), 1.0)
    scale = op.Reshape(op.Cast(scale, to=ir.DataType.FLOAT), [1])
    return op.And(good, op.Less(norm, _OVERFLOW)), scale


def _as_float(op: Builder, value: ir.Value) -> ir.Value:
    return value if op.dtype(value) == ir.DataType.FLOAT else op.Cast(value, to=ir.DataType.FLOAT)


def _is_finite(op: Builder, number: ir.Value) -> ir.Value:
    most = np.finfo(op.dtype(number).numpy()).max
    return op.LessOrEqual(op.Abs(number), most)


def _squared_norm(op: Builder, gradients: Sequence[ir.Value]) -> ir.Value:
    """Σg² as a double; computed in doubles only where float32 overflows, which clipping is there for."""
    squares = [op.ReduceSumSquare(value, keepdims=0) for value in gradients]
    total = squares[0] if len(squares) == 1 else op.Sum(*squares)
    single, double = op.subgraph("single"), op.subgraph("double")
    single.graph.outputs.append(single.Cast(total, to=ir.DataType.DOUBLE))
    wide = [
        double.ReduceSumSquare(double.Cast(value, to=ir.DataType.DOUBLE), keepdims=0) for value in gradients
    ]
    double.graph.outputs.append(wide[0] if len(wide) == 1 else double.Sum(*wide))
    (norm,) = _if(op, _is_finite(op, total), single.graph, double.graph)
    norm.dtype, norm.shape = ir.DataType.DOUBLE, ir.Shape([])
    return norm


def _if(op: Builder, condition: ir.Value, then: ir.Graph, otherwise: ir.Graph) -> tuple[ir.Value, ...]:
    branches = {
        "then_branch": ir.AttrGraph("then_branch", then),
        "else_branch": ir.AttrGraph("else_branch", otherwise),
    }
    return op.node("If", [condition], branches, outputs=len(then.outputs))


# ---- the update --------------------------------------------------------------------------------------


class _Rule:
    """The optimizer model, to be written out over the tensors of the state."""

    def __init__(self, op: Builder, optimizer: ir.Model, *, rate: ir.Value) -> None:
        self._root, self._optimizer, self._rate = op, optimizer, rate
        self._options = json.loads(optimizer.metadata_props["onward.optimizer"])
        self.sequences = bool(self._options.get("sequences"))
        self.elementwise = not self.sequences and bool(self._options["elementwise"])
        self.clip_norm: float | None = self._options.get("clip_norm")
        given = {value.name for value in optimizer.graph.inputs}
        moments = [name for name in _MOMENTS if name in given]
        # as checkpoints name the state, and as the graph does
        self.slots: dict[str, str] = (
            {f"momentum{index}": name for index, name in enumerate(moments)}
            if self.sequences
            else {slot: slot for slot in self._options["slots"]}
        )
        self._groups = {
            name: i for i, group in enumerate(self._options.get("groups", ())) for name in group["parameters"]
        }

    def together(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
        """The parameters by those that are updated together: small ones with the same settings."""
        small: dict[int | None, list[str]] = {}
        for name, shape in shapes.items():
            if self.elementwise and 0 < prod(shape) < _SMALL:
                small.setdefault(self._groups.get(name), []).append(name)
            else:
                yield [name]
        yield from small.values()

    def slot_shape(self, slot: str, unit: _Unit) -> tuple[int, ...]:
        """The shape of a unit's state."""
        if self.elementwise or self.sequences:
            return unit.shape
        value = next(v for v in self._optimizer.graph.inputs if v.name == f"{unit.names[0]}.{slot}")
        assert value.shape is not None
        return tuple(value.shape.numpy())

    def build(
        self, op: Builder, units: Sequence[_Unit], step: ir.Value, scale: ir.Value | None
    ) -> list[list[ir.Value]]:
        """For each unit the next value of its parameter and of its slots."""
        scalars = {"step": step, "learning_rate": self._rate}
        if scale is not None:
            scalars["gradient_scale"] = scale
        if self.sequences:
            return self._over_sequences(op, units, scalars)
        if not self.elementwise:
            return self._by_name(op, units, scalars)
        return [self._elementwise(op, unit, scalars) for unit in units]

    def _elementwise(self, op: Builder, unit: _Unit, scalars: dict[str, ir.Value]) -> list[ir.Value]:
        index = self._groups.get(unit.names[0])
        group = (
            {"weight_decay": None, "learning_rate_scale": 1.0}
            if index is None
            else self._options["groups"][index]
        )
        decay = self._options["weight_decay"] if group["weight_decay"] is None else group["weight_decay"]
        scalars = {**scalars, "weight_decay": self._decay(decay)}
        if group["learning_rate_scale"] != 1.0:
            scalars["learning_rate"] = op.Mul(self._rate, group["learning_rate_scale"])
        assert unit.gradient is not None
        tensors = {"parameter": unit.parameter, "gradient": unit.gradient, **unit.slots}
        kept = ["parameter", *unit.slots]
        if not unit.in_pieces:
            made = self._graft(op, {**{k: _at_least_1d(op, v) for k, v in tensors.items()}, **scalars})
            return [made[f"{name}.next"] for name in kept]
        body = op.subgraph("piece")
        rows = {k: body.input(k, ir.DataType.FLOAT, unit.shape[1:]) for k in tensors}
        made = self._graft(body, {**rows, **scalars})
        for name in kept:
            made[f"{name}.next"].dtype, made[f"{name}.next"].shape = (
                ir.DataType.FLOAT,
                ir.Shape(unit.shape[1:]),
            )
            body.graph.outputs.append(made[f"{name}.next"])
        attributes = {"body": ir.AttrGraph("body", body.graph), "num_scan_inputs": len(tensors)}
        return list(op.node("Scan", list(tensors.values()), attributes, outputs=len(kept)))

    def _by_name(
        self, op: Builder, units: Sequence[_Unit], scalars: dict[str, ir.Value]
    ) -> list[list[ir.Value]]:
        given: dict[str, ir.Value] = {"weight_decay": self._decay(self._options["weight_decay"])}
        for unit in units:
            assert unit.gradient is not None
            (name,) = unit.names
            given |= {name: unit.parameter, f"{name}_grad": unit.gradient}
            given |= {f"{name}.{slot}": value for slot, value in unit.slots.items()}
        made = self._graft(op, {**given, **scalars})
        return [
            [made[f"{name}.next"], *(made[f"{name}.{slot}.next"] for slot in unit.slots)]
            for unit in units
            for name in unit.names
        ]

    def _over_sequences(
        self, op: Builder, units: Sequence[_Unit], scalars: dict[str, ir.Value]
    ) -> list[list[ir.Value]]:
        lists = {"params": [unit.parameter for unit in units], "gradients": [unit.gradient for unit in units]}
        lists |= {source: [unit.slots[slot] for unit in units] for slot, source in self.slots.items()}
        given = {name: op.SequenceConstruct(*values) for name, values in lists.items()}
        made = self._graft(op, {**given, **scalars})
        sources = ["params", *self.slots.values()]
        return [
            [op.SequenceAt(made[f"updated_{source}"], np.int64(index)) for source in sources]
            for index in range(len(units))
        ]

    def _decay(self, number: float) -> ir.Value:
        return self._root.constant(np.asarray([number], np.float32), name="weight_decay")

    def _graft(self, op: Builder, given: Values) -> dict[str, ir.Value]:
        """Copy the optimizer's nodes to the end of a branch, reading `given`; its outputs by name."""
        copy = self._optimizer.graph.clone()
        for value in list(copy.inputs):
            if value.name == "gradient_scale" and value.name not in given:
                _drop_scaling(value)
            elif value.uses():
                ir.convenience.replace_all_uses_with(value, given[value.name or ""])
        for value in list(copy.initializers.values()):
            assert value.const_value is not None
            constant = self._root.constant(value.const_value.numpy(), name=value.name or "constant")
            ir.convenience.replace_all_uses_with(value, constant)
        made = {value.name or "": value for value in copy.outputs}
        copy.outputs.clear()
        nodes = list(copy)
        copy.remove(nodes)
        for node in nodes:
            node.name = op.namer(f"update/{node.op_type}")
            for value in node.outputs:
                # sizes are those of this parameter now
                value.name, value.shape = op.namer(f"{node.name}.out"), None
        op.graph.extend(nodes)
        return made


def _at_least_1d(op: Builder, value: ir.Value) -> ir.Value:
    return op.Reshape(value, [1]) if value.shape is not None and value.shape.rank() == 0 else value


def _drop_scaling(scale: ir.Value) -> None:
    """Let what reads gradient·scale read the gradient: nothing limits it."""
    for node, index in list(scale.uses()):
        assert node.op_type == "Mul"
        gradient = node.inputs[1 - index]
        assert gradient is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], gradient)


def _add_update(
    op: Builder, good: ir.Value, rule: _Rule, state: _State, scale: ir.Value | None, following: Values
) -> None:
    """Outputs for the next state: updated where the step is good, else as it was."""
    branch, keep = op.subgraph("update"), op.subgraph("keep")
    step = branch.Add(state.optimizer_step, np.int64(1))
    updated = rule.build(branch, state.units, step, scale)
    pairs = [(value, following[name]) for name, value in state.statistics.items()]
    for index in range(1 + len(rule.slots)):
        for unit, results in zip(state.units, updated):
            pairs.append(([unit.parameter, *unit.slots.values()][index], results[index]))
    pairs += [(state.optimizer_step, step), (state.train_step, branch.Add(state.train_step, np.int64(1)))]
    for before, after in pairs:
        if before.shape is not None and before.shape.rank() == 0:
            after = branch.Reshape(after, np.zeros(0, np.int64))
        if after.graph is not branch.graph or after.is_graph_output():
            after = branch.Identity(after)
        same = keep.Identity(before)
        for value in (after, same):
            value.type, value.shape = before.type, before.shape
        branch.graph.outputs.append(after)
        keep.graph.outputs.append(same)
    share_subexpressions(ir.Model(branch.graph, ir_version=10))
    results = [*_if(op, good, branch.graph, keep.graph), op.Identity(state.seed)]
    for before, after in zip([*(before for before, _ in pairs), state.seed], results):
        after.name = op.namer(f"{before.name}.next")
        after.type, after.shape = before.type, before.shape
        op.graph.outputs.append(after)
