"""`generate_artifacts`: turns a forward model into the files that training needs.

`build_artifacts` makes the models and the initial state and writes nothing; `generate_artifacts` writes
them, all or none. The names and arguments are those of `onnxruntime.training.artifacts`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, Unpack, runtime_checkable

import onnx
import onnx_ir as ir

from onward import contract, losses
from onward.artifacts.choose import Choice, choose, constant_vectors, resolve
from onward.artifacts.names import LOSSES, LossType, OptimType, loss_type, optimizer_type
from onward.artifacts.training_graph import build_training_graphs, producer
from onward.artifacts.write import write_artifacts, write_portable
from onward.autodiff.recompute.segments import ActivationBudget, Recompute
from onward.checkpoint.content import CheckpointData, NominalTensor
from onward.contract import OPSET
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.dialect.lower import lower
from onward.graph.dialect.normalize import normalize
from onward.graph.gc_paused import gc_paused
from onward.graph.load import ModelSource, load_model
from onward.graph.passes.head import HEAD
from onward.graph.passes.inference_mode import freeze_statistics
from onward.graph.passes.lora import LoRA, add_adapters
from onward.graph.passes.precision import PRECISIONS, Precision
from onward.graph.prune import find_value, values_of
from onward.losses.functions import LossFunction, target_inputs
from onward.model_metadata import read_names
from onward.optim import update_rules
from onward.optim.optimizer_model import ParameterGroup, optimizer_model
from onward.optim.update_rules import Optimizer
from onward.whole_step.portable_step import portable_step
from onward.whole_step.step_halves import gradient_step, update_step

if TYPE_CHECKING:
    from onward.checkpoint.portable import StateLayout

__all__ = ["ActivationBudget", "Artifacts", "LossType", "OptimType", "build_artifacts", "generate_artifacts"]

_log = logging.getLogger("onward")
# what protobuf can hold
_LARGEST_PROTO = 2**31 - 1
# Models of this opset and later keep theirs. The forms that older ones need are slower: only on request.
_KEPT = 13


@runtime_checkable
class LossBlock(Protocol):
    """The interface of a custom loss: every `onnxblock.Block` has it."""

    def add_to(self, model: ir.Model, names: Sequence[str]) -> tuple[list[str], ir.Model]:
        """Build the loss onto a model; returns the names of the results, and the new model."""
        ...


@runtime_checkable
class OptimizerBlock(Protocol):
    """The interface of a custom optimizer: every `onnxblock.Block` has it."""

    def optimizer_model(
        self, parameters: Mapping[str, ir.TensorProtocol], groups: Sequence[ParameterGroup] = ()
    ) -> ir.Model:
        """The optimizer model of these parameters."""
        ...


_LOSSES: dict[LossType, LossFunction] = {
    LossType.MSELoss: losses.mse,
    LossType.CrossEntropyLoss: losses.cross_entropy,
    LossType.BCEWithLogitsLoss: losses.bce_with_logits,
    LossType.L1Loss: losses.l1,
    LossType.NLLLoss: losses.nll,
    LossType.HuberLoss: losses.huber,
    LossType.SmoothL1Loss: losses.smooth_l1,
    LossType.KLDivLoss: losses.kl_div,
}
# AdamW has onnxruntime-training's defaults here; `onward.optim.adamw` has torch's.
_Models = tuple[ir.Model, ir.Model, ir.Model | None, ir.Model | None, ir.Model | None, ir.Model | None]
Loss = LossType | str | LossFunction | LossBlock | None
OptimizerChoice = OptimType | str | Optimizer | OptimizerBlock | None
BatchNorm = Literal["train", "frozen"] | None


@dataclasses.dataclass
class Artifacts:
    """Artifacts in memory: three models and the initial state; with `portable`, the portable step too."""

    training: ir.Model
    evaluation: ir.Model
    optimizer: ir.Model | None
    checkpoint: CheckpointData
    step: ir.Model | None = None
    state_layout: StateLayout | None = None
    gradient_step: ir.Model | None = None
    update_step: ir.Model | None = None

    @property
    def trainable(self) -> list[str]:
        """The names of the trainable parameters."""
        return list(self.checkpoint.trainable)

    @property
    def frozen(self) -> list[str]:
        """The names of the frozen parameters (batch-norm statistics included)."""
        return list(self.checkpoint.frozen)

    def nominal_checkpoint(self) -> CheckpointData:
        """The names and types of the parameters, without their values."""

        def names_only(tensors: dict) -> dict:
            return {
                name: NominalTensor(int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype)))
                for name, array in tensors.items()
            }

        data = self.checkpoint
        return CheckpointData(
            trainable=names_only(data.trainable), frozen=names_only(data.frozen), nominal=True
        )


class _Options(TypedDict, total=False):
    """Arguments of `build_artifacts` that `generate_artifacts` hands on as they are."""

    parameter_groups: Sequence[ParameterGroup]
    lora: LoRA | None
    opset: int | None
    recompute: Recompute
    portable: bool
    batch_norm: BatchNorm
    precision: Precision
    metadata: Mapping[str, str] | None


@gc_paused()
def generate_artifacts(
    model: ModelSource,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: Loss = None,
    optimizer: OptimizerChoice = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: list[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: list[str] | None = None,
    **options: Unpack[_Options],
) -> None:
    """Write `training_model.onnx`, `eval_model.onnx`, `optimizer_model.onnx` and `checkpoint`.

    `options` are `parameter_groups`, `lora`, `opset`, `recompute`, `portable`, `batch_norm`, `precision` and
    `metadata`, as in `build_artifacts`.

    `requires_grad` and `frozen_params` take names and patterns (`"encoder.*"`). The default of `requires_grad` is
    the list in the model's metadata (`onward.export.from_torch` writes it), or else every float weight that
    reaches the loss; an empty list trains none. `loss` and `optimizer` may
    be names: "cross-entropy", "adamw". `batch_norm` is "train" (statistics are updated) or "frozen" (they are not);
    by default the model decides, and models exported for inference have it frozen. `metadata` is added to the
    files. With `lora`, low-rank adapters of the targeted weights train, and the parameters in `requires_grad`; the
    rest is frozen. The files use the model's own opset where that is possible, else 21; `opset` sets it.
    `recompute` trades time for memory: True, a fraction of the activation memory to keep (0.5), bytes ("500MB"),
    or scopes whose inner values are recomputed ("encoder.layer.*"). `precision` "fp16" or "bf16" lets products
    of matrices and convolutions run in 16 bits (docs/gpu.md); parameters, and the eval model, stay float32.
    `loss=None` means that the model's first output is the loss. `portable` adds the files for training in other
    languages: the step, whole and in two halves, its state, an inference model (docs/portable.md). Either all
    files are written or none; a missing directory is created.

    >>> import tempfile, onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    ...     net (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1.0, 2.0}> { y = MatMul(x, w) }''')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     generate_artifacts(model, requires_grad=["w"], loss=LossType.MSELoss,
    ...                        optimizer=OptimType.AdamW, artifact_directory=folder)
    ...     sorted(os.listdir(folder))
    ['checkpoint', 'eval_model.onnx', 'optimizer_model.onnx', 'training_model.onnx']
    """
    made = build_artifacts(
        model,
        requires_grad=requires_grad,
        frozen_params=frozen_params,
        loss=loss,
        optimizer=optimizer,
        custom_op_library=custom_op_library,
        additional_output_names=additional_output_names,
        loss_input_names=loss_input_names,
        **options,
    )
    models = {"training_model": made.training, "eval_model": made.evaluation}
    if made.optimizer is not None:
        models["optimizer_model"] = made.optimizer
    if made.step is not None and made.gradient_step is not None and made.update_step is not None:
        models["train_step"] = made.step
        models |= {"gradient_step": made.gradient_step, "update_step": made.update_step}
    checkpoints = {"checkpoint": made.checkpoint}
    if nominal_checkpoint:
        checkpoints["nominal_checkpoint"] = made.nominal_checkpoint()
    write_artifacts(
        Path(artifact_directory) if artifact_directory is not None else Path.cwd(),
        {f"{prefix}{name}": made_model for name, made_model in models.items()},
        {f"{prefix}{name}": data for name, data in checkpoints.items()},
        data_name=f"{prefix}constants.data",
        ort_format=ort_format,
        custom_op_library=custom_op_library,
        more=lambda folder: _write_portable(folder, prefix, made),
    )


def _write_portable(folder: Path, prefix: str, made: Artifacts) -> None:
    if made.state_layout is not None:
        write_portable(folder, prefix, made.evaluation, made.state_layout, made.checkpoint)


@gc_paused()
def build_artifacts(
    model: ModelSource,
    *,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: Loss = None,
    optimizer: OptimizerChoice = None,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: list[str] | None = None,
    loss_input_names: list[str] | None = None,
    parameter_groups: Sequence[ParameterGroup] = (),
    lora: LoRA | None = None,
    opset: int | None = None,
    recompute: Recompute = None,
    portable: bool = False,
    batch_norm: BatchNorm = None,
    precision: Precision = "fp32",
    metadata: Mapping[str, str] | None = None,
    normalized: bool = False,
) -> Artifacts:
    """Build the artifacts of a forward model in memory; arguments as for `generate_artifacts`.

    `normalized` says that the model is what `normalize` returned, and may be changed: it is not converted again.
    """
    _check_precision(precision, portable=portable)
    add_loss = _chosen_loss(loss)
    rule = _chosen_optimizer(optimizer)
    if additional_output_names is not None and not isinstance(additional_output_names, list):
        raise ModelError(
            f"Unknown type provided for additional output names {type(additional_output_names)}. "
            "Expected a list of strings."
        )
    if custom_op_library is not None and not Path(custom_op_library).exists():
        raise ModelError(f"Custom op library path {custom_op_library} does not exist.")
    loaded = model if normalized and isinstance(model, ir.Model) else load_model(_source(model))
    own = loaded.graph.opset_imports.get("", loaded.graph.opset_imports.get("ai.onnx", OPSET))
    vectors = constant_vectors(loaded)
    prepared = loaded if normalized else normalize(loaded)
    adapters = [] if lora is None else add_adapters(prepared, lora)
    given = set(prepared.graph.initializers)
    prepared.metadata_props.update({contract.LOSS_NAME: _loss_name(loss), **(metadata or {})})
    notes = _set_batch_norm(prepared, batch_norm)
    (loss_name, *more), prepared = _with_loss(prepared, add_loss, loss_input_names)
    choice = choose(
        prepared, requires_grad, frozen_params,
        loss=loss_name, given=given, adapters=adapters, vectors=vectors,
    )  # fmt: skip
    parameter_groups = _record_defaults(prepared, choice, parameter_groups, notes)
    trainable, frozen = choice.trainable, choice.frozen
    extra = [*more, *(additional_output_names or [])]
    graphs = build_training_graphs(
        prepared, loss_name, trainable=trainable, frozen=frozen, outputs=extra,
        recompute=recompute, precision=precision,
    )  # fmt: skip
    optimizer_made = None
    if rule is not None:
        groups = _resolve_groups(parameter_groups, list(graphs.trainable))
        if isinstance(rule, Optimizer):
            shapes = {name: tuple(tensor.shape.numpy()) for name, tensor in graphs.trainable.items()}
            optimizer_made = optimizer_model(rule, shapes, groups=groups)
        else:
            optimizer_made = rule.optimizer_model(graphs.trainable, groups)
        optimizer_made.producer_name, optimizer_made.producer_version = producer()
        optimizer_made.metadata_props[contract.VERSION] = producer()[1]
        optimizer_made.metadata_props[contract.ARTIFACTS] = graphs.training.metadata_props[contract.ARTIFACTS]
    initial = CheckpointData(
        trainable={name: tensor.numpy() for name, tensor in graphs.trainable.items()},
        frozen={name: tensor.numpy() for name, tensor in graphs.frozen.items()},
    )
    step = layout = gradients = update = None
    if portable:
        if optimizer_made is None:
            raise ModelError("portable=True needs an optimizer: the portable step has its update in it")
        step, layout = portable_step(graphs.training, optimizer_made, initial)
        gradients = gradient_step(graphs.training, step, initial)
        update = update_step(optimizer_made, step, layout)
    training, evaluation, optimizer_made, step, gradients, update = _in_opset(
        (graphs.training, graphs.evaluation, optimizer_made, step, gradients, update), own=own, asked=opset
    )
    for note in notes:
        _log.warning(note)
    return Artifacts(training, evaluation, optimizer_made, initial, step, layout, gradients, update)


def _loss_name(loss: Loss) -> str:
    """The name of a loss for reports."""
    if loss is None:
        return "the model's first output"
    kind = loss_type(loss) if isinstance(loss, str) else loss
    if isinstance(kind, LossType):
        return next(name for name, known in LOSSES.items() if known is kind)
    return getattr(kind, "__name__", type(kind).__name__).replace("_", "-")


def _check_precision(precision: str, *, portable: bool) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: it is one of {', '.join(PRECISIONS)}")
    if portable and precision != "fp32":
        raise ModelError(
            f"portable=True takes precision='fp32' only, not '{precision}': the programs that run the portable step "
            "do not adapt the scale of the loss"
        )


def _set_batch_norm(model: ir.Model, wanted: BatchNorm) -> list[str]:
    """Set batch norm to training or frozen mode; returns messages where the caller did not choose."""
    if wanted not in ("train", "frozen", None):
        raise ValueError(f"batch_norm is {wanted!r}: it is 'train', 'frozen' or None (as the model has it)")
    nodes = [node for node in model.graph if node.op_type == "BatchNormalization" and node.domain == ""]
    state = [node for node in nodes if all(v is not None and v.is_initializer() for v in node.inputs[3:5])]
    if wanted == "train" and not state:
        return ["batch_norm='train' changes nothing: the model has no batch norm left (exporters fold them)"]
    if wanted == "train":
        for node in state:
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    elif wanted == "frozen":
        freeze_statistics(model)
    still = [node for node in nodes if not node.attributes.get_int("training_mode", 0)]
    if wanted is not None or not still:
        return []
    return [
        f"{len(still)} batch norms keep their running statistics, as in the model; batch_norm='train' (--batch-norm "
        "train) updates them"
    ]


def _record_defaults(
    model: ir.Model, choice: Choice, groups: Sequence[ParameterGroup], notes: list[str]
) -> Sequence[ParameterGroup]:
    """Log what trains where the caller did not choose, and record default settings for fine-tuning.

    Pretrained weights get a tenth of the new head's learning rate, and all start with a warmup.
    """
    about = model.metadata_props
    head = [name for name in read_names(about, HEAD) if name in choice.trainable]
    if choice.by_default:
        values = sum(
            tensor.size for name in choice.trainable if (tensor := model.graph.initializers[name].const_value)
        )
        every = "the other" if choice.notes else "all"
        notes += choice.notes
        notes.append(
            f"{every} {len(choice.trainable)} float weights train ({values:,} values): neither requires_grad nor the "
            "model says which"
        )
    if not choice.by_default and not head:
        return groups
    about[contract.DEFAULTS] = json.dumps(
        {"learning_rate": 1e-3 if head else 1e-4, "warmup": 0.1, "clip_norm": 1.0}
    )
    body = [name for name in choice.trainable if name not in head]
    if head and body and not groups:
        return [ParameterGroup(tuple(body), learning_rate_scale=0.1)]
    return groups


def _in_opset(models: _Models, *, own: int, asked: int | None) -> _Models:
    """The models in the opset asked for, or in the given model's own where all of them have a form in it."""
    current = models[0].graph.opset_imports[""]
    target = own if asked is None else asked
    if asked is None and not _KEPT <= target < current:
        return models
    try:
        training, evaluation, *rest = (
            model and lower(model, target, at_any_cost=asked is not None) for model in models
        )
        assert training is not None and evaluation is not None
        optimizer, step, gradients, update = rest
        return training, evaluation, optimizer, step, gradients, update
    except ModelError as error:
        if asked is not None:
            raise
        _log.info("artifacts are in opset %d: %s", current, error)
        return models


def _source(model: ModelSource) -> ModelSource:
    if not isinstance(model, str | os.PathLike | bytes | onnx.ModelProto | ir.Model):
        raise ModelError(
            "Please pass in either a string or an ONNX ModelProto for the model. "
            f"Got {type(model).__name__} instead."
        )
    if isinstance(model, onnx.ModelProto) and model.ByteSize() > _LARGEST_PROTO:
        raise ModelError(
            "This model is > 2GB. Please pass in a path to the model (saved with external data) instead of the "
            "ModelProto itself."
        )
    return model


def _chosen_loss(loss: Loss) -> LossFunction | LossBlock | None:
    """The loss as a function over values, a block over names, or None."""
    if isinstance(loss, str):
        loss = loss_type(loss)
    if isinstance(loss, LossType):
        return _LOSSES[loss]
    if loss is None or (callable(loss) and not isinstance(loss, type)):
        return loss
    raise ModelError(
        f"Unknown loss provided {type(loss)}. Expected a LossType, a function (op, output, target) -> value, "
        "an instance of a Block subclass, or None."
    )


def _chosen_optimizer(optimizer: OptimizerChoice) -> Optimizer | OptimizerBlock | None:
    if isinstance(optimizer, str):
        optimizer = optimizer_type(optimizer)
    if isinstance(optimizer, OptimType):
        return update_rules.make(optimizer.name)
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, OptimizerBlock) and not isinstance(optimizer, type):
        return optimizer
    raise TypeError(
        f"Unknown optimizer provided {type(optimizer)}. "
        "Expected an OptimType, an onward.optim.Optimizer, an instance of a Block subclass, or None."
    )


def _with_loss(
    model: ir.Model, loss: LossFunction | LossBlock | None, loss_input_names: Sequence[str] | None
) -> tuple[list[str], ir.Model]:
    """The names of the loss and of what else its block returned, and the model with the loss."""
    graph = model.graph
    outputs = [value.name or "" for value in graph.outputs]
    if loss is None:
        if not outputs:
            raise ModelError("the model has no output, so there is no loss to train on")
        return list(loss_input_names or outputs)[:1], model
    if isinstance(loss, LossBlock):  # a block gets all outputs
        return loss.add_to(model, list(loss_input_names or outputs))
    known = values_of(graph)
    given = [find_value(graph, name) for name in loss_input_names or outputs[:1]]
    op = Builder(graph)
    op.scope = "loss"
    targets = []
    for target in target_inputs(loss, given):
        if target.name not in known:
            graph.inputs.append(target)
        targets.append(known.get(target.name or "", target))
    return [loss(op, *given, *targets).name or ""], model


def _resolve_groups(groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[ParameterGroup]:
    taken: set[str] = set()
    resolved = []
    for group in groups:
        found = resolve(group.parameters, names, "parameter_groups")
        if twice := sorted(taken.intersection(found)):
            raise ModelError(f"parameter_groups: {twice} are in two groups")
        taken.update(found)
        resolved.append(dataclasses.replace(group, parameters=tuple(found)))
    return resolved
