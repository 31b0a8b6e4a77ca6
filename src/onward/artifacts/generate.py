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
from onward.artifacts.teacher import Distillation, add_distillation, kind_of, load_teacher
from onward.artifacts.training_graph import TrainingGraphs, build_training_graphs, plain_outputs
from onward.artifacts.write import write_artifacts, write_portable
from onward.checkpoint.content import CheckpointData, NominalTensor
from onward.contract import OPSET
from onward.errors import ModelError
from onward.graph.builder import Builder
from onward.graph.dialect.lower import lower
from onward.graph.dialect.normalize import normalize
from onward.graph.gc_paused import gc_paused
from onward.graph.load import ModelSource, load_model
from onward.graph.passes.inference_mode import freeze_statistics
from onward.graph.passes.lora import LoRA, add_adapters
from onward.graph.passes.precision import PRECISIONS, Precision
from onward.graph.proto.conservative_forms import in_portable_forms
from onward.graph.prune import find_value, values_of
from onward.losses.functions import LossFunction, target_inputs
from onward.model_metadata import producer, read_names, read_table
from onward.optim import update_rules
from onward.optim.optimizer_model import ParameterGroup, optimizer_model
from onward.optim.update_rules import Optimizer
from onward.quantize.calibration import Samples, round_model
from onward.quantize.planning import Quantization
from onward.whole_step.portable_step import (
    accumulate_step,
    eval_step,
    gradient_step,
    portable_step,
    update_step,
)

if TYPE_CHECKING:
    from onward.autodiff.recompute.segments import Recompute
    from onward.checkpoint.portable import StateLayout

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


# Keywords of `torch.onnx.export` that people pass on.
_EXPORT_OPTIONS = frozenset(
    {"training", "do_constant_folding", "opset_version", "export_params", "dynamic_axes"}
)
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
    portable: Mapping[str, ir.Model] = dataclasses.field(default_factory=dict)  # by the names of their files
    state_layout: StateLayout | None = None

    @property
    def trainable(self) -> list[str]:
        """The names of the trainable parameters."""
        return list(self.checkpoint.trainable)

    @property
    def frozen(self) -> list[str]:
        """The names of the frozen parameters (batch-norm statistics included)."""
        return list(self.checkpoint.frozen)

    def models(self) -> dict[str, ir.Model]:
        """The models by the names of their files."""
        models = {"training_model": self.training, "eval_model": self.evaluation}
        if self.optimizer is not None:
            models["optimizer_model"] = self.optimizer
        return {**models, **self.portable}

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
    quantize: str | Quantization | None
    calibration: Samples | None
    teacher: ModelSource | Distillation | None


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

    `options` are `parameter_groups`, `lora`, `opset`, `recompute`, `portable`, `batch_norm`, `precision`, `metadata`,
    `quantize`, `calibration` and `teacher`, as in `build_artifacts`.

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
    `quantize` ("int8", "int8-static", "int8-weights", "int4", or a `Quantization`) rounds weights and activations in
    the step as the deployed file will; `calibration` are samples of the inputs by name, from which it takes the ranges
    of activations. `teacher`, a model's file or a `Distillation`, adds a loss against its answers; with `loss=None` it
    is all of the loss, and no labels are needed (docs/small-models.md).
    `loss=None` means that the model's first output is the loss. `portable` adds the files for training in other
    languages: the step, whole and in two halves, its state, an inference model (docs/portable-format.md). Either all
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
    _check_names(options)
    artifacts = build_artifacts(
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
    checkpoints = {"checkpoint": artifacts.checkpoint}
    if nominal_checkpoint:
        checkpoints["nominal_checkpoint"] = artifacts.nominal_checkpoint()
    write_artifacts(
        Path(artifact_directory) if artifact_directory is not None else Path.cwd(),
        artifacts.models(),
        checkpoints,
        prefix=prefix,
        ort_format=ort_format,
        custom_op_library=custom_op_library,
        more=lambda folder: _write_portable(
            folder, prefix, artifacts, nominal=checkpoints.get("nominal_checkpoint")
        ),
    )


def _check_names(options: Mapping[str, object]) -> None:
    # `Unpack` is for type checkers: at run time any keyword comes through
    if unknown := [name for name in options if name not in _Options.__annotations__]:
        of_export = (
            " It belongs to the export: onward.export.from_torch takes it."
            if unknown[0] in _EXPORT_OPTIONS
            else ""
        )
        raise TypeError(f"generate_artifacts() got an unexpected keyword argument '{unknown[0]}'.{of_export}")


def _write_portable(
    folder: Path, prefix: str, artifacts: Artifacts, *, nominal: CheckpointData | None
) -> None:
    if artifacts.state_layout is not None:
        write_portable(
            folder,
            prefix,
            artifacts.evaluation,
            artifacts.state_layout,
            artifacts.checkpoint,
            steps=artifacts.portable,
            nominal=nominal,
        )


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
    quantize: str | Quantization | None = None,
    calibration: Samples | None = None,
    teacher: ModelSource | Distillation | None = None,
    normalized: bool = False,
) -> Artifacts:
    """Build the artifacts of a forward model in memory; arguments as for `generate_artifacts`.

    `normalized` says that the model is what `normalize` returned, and may be changed: it is not converted again.
    """
    _check_arguments(
        precision, additional_output_names, custom_op_library, portable=portable, optimizer=optimizer
    )
    add_loss = _chosen_loss(loss)
    rule = _chosen_optimizer(optimizer)
    prepared, own, vectors = _prepare(model, normalized=normalized)
    adapters = [] if lora is None else add_adapters(prepared, lora)
    lesson = teacher if isinstance(teacher, Distillation) or teacher is None else Distillation(teacher)
    # before rounding: the float model may be its own teacher
    teaching = None if lesson is None else load_teacher(lesson, prepared)
    ranges = []
    if quantize is not None:
        batch_norm, frozen_params, ranges = _quantize(
            prepared, quantize, calibration, adapters, batch_norm, requires_grad, frozen_params
        )
    initializers = set(prepared.graph.initializers)
    loss_title = "distillation" if loss is None and lesson is not None else _loss_name(loss)
    prepared.metadata_props.update({contract.LOSS_NAME: loss_title, **(metadata or {})})
    notes = _set_batch_norm(prepared, batch_norm)
    # A block may build a new model: what comes after must look at that one.
    (loss_name, *more), prepared = _with_teacher(prepared, add_loss, loss_input_names, lesson, teaching)
    choice = choose(
        prepared, requires_grad, frozen_params,
        loss=loss_name, initializers=initializers, adapters=adapters, vectors=vectors,
    )  # fmt: skip
    # what is learned beside the weights; named ones are there already
    choice.trainable.extend(name for name in ranges if name not in choice.trainable)
    # Written into the files: the command line, a browser and Python then fine-tune alike.
    parameter_groups = _record_defaults(prepared, choice, parameter_groups, notes)
    graphs = build_training_graphs(
        prepared, loss_name, trainable=choice.trainable, frozen=choice.frozen,
        outputs=[*more, *(additional_output_names or [])], recompute=recompute, precision=precision,
    )  # fmt: skip
    update_model = None if rule is None else _optimizer_model(rule, parameter_groups, graphs)
    # The checkpoint holds all parameters, so that the graphs need none and stay small.
    initial = CheckpointData(
        trainable={name: tensor.numpy() for name, tensor in graphs.trainable.items()},
        frozen={name: tensor.numpy() for name, tensor in graphs.frozen.items()},
    )
    models, layout = {"training": graphs.training, "evaluation": graphs.evaluation}, None
    if update_model is not None:
        models["optimizer"] = update_model
        if portable:
            steps, layout = _portable_steps(graphs, update_model, initial)
            models |= steps
    models = _in_opset(models, own=own, requested=opset)
    # after all else succeeded: an error should not come behind a page of advice
    for note in notes:
        _log.warning(note)
    training, evaluation = models.pop("training"), models.pop("evaluation")
    update_model = models.pop("optimizer", None)
    steps = {name: in_portable_forms(step) for name, step in models.items()}
    return Artifacts(training, evaluation, update_model, initial, steps, layout)


def _prepare(model: ModelSource, *, normalized: bool) -> tuple[ir.Model, int, set[str]]:
    """The model in the dialect, its own opset, and the names of its Constant nodes that are no weights."""
    loaded = model if normalized and isinstance(model, ir.Model) else load_model(_source(model))
    # before `normalize` raises it: the files go back to it where they can
    own = loaded.graph.opset_imports.get("", loaded.graph.opset_imports.get("ai.onnx", OPSET))
    # `normalize` makes initializers of Constant nodes: afterwards nobody can tell them apart
    vectors = constant_vectors(loaded)
    return loaded if normalized else normalize(loaded, owned=True), own, vectors


def _portable_steps(
    graphs: TrainingGraphs, update_model: ir.Model, initial: CheckpointData
) -> tuple[dict[str, ir.Model], StateLayout]:
    """The portable step, whole and in parts, by the names of the files; and how its state is laid out."""
    step, layout = portable_step(graphs.training, update_model, initial)
    steps = {
        "train_step": step,
        "accumulate_step": accumulate_step(graphs.training, update_model, initial),
        "eval_step": eval_step(graphs.evaluation, step, layout),
        # from the training graph as it is: its optimizer is on the other side
        "gradient_step": gradient_step(graphs.training, step, initial),
        "update_step": update_step(update_model, step, layout),
    }
    return steps, layout


def _quantize(
    model: ir.Model,
    quantize: str | Quantization,
    calibration: Samples | None,
    adapters: Sequence[str],
    batch_norm: BatchNorm,
    requires_grad: Sequence[str] | None,
    frozen_params: Sequence[str] | None,
) -> tuple[BatchNorm, Sequence[str] | None, list[str]]:
    """Round a model; batch norm's mode and the frozen parameters that follow from it, and the ranges to train."""
    if batch_norm == "train":
        raise ModelError(
            "batch_norm='train' does not go with quantize: batch norms become part of the integer convolutions",
            hint="leave it out: statistics stay as they are",
        )
    settings = quantize if isinstance(quantize, Quantization) else Quantization(quantize)
    ranges = round_model(model, settings, calibration, adapters=adapters)
    # Names of a batch norm's parameters that the export recorded are gone.
    for key in (contract.REQUIRES_GRAD, contract.FROZEN_PARAMS):
        if key in model.metadata_props:
            names = read_names(model.metadata_props, key)
            model.metadata_props[key] = json.dumps(
                [name for name in names if name in model.graph.initializers]
            )
    # A table's rows are rounded once and for all: trained on, they would be other numbers in the file.
    tables = read_table(model.metadata_props, contract.QUANTIZATION)["tables"]
    if requires_grad is None and contract.REQUIRES_GRAD in model.metadata_props:
        trained = read_names(model.metadata_props, contract.REQUIRES_GRAD)
        model.metadata_props[contract.REQUIRES_GRAD] = json.dumps([n for n in trained if n not in tables])
    elif requires_grad is None and tables:
        frozen_params = list(dict.fromkeys([*(frozen_params or ()), *tables]))
    return None, frozen_params, ranges


def _optimizer_model(
    rule: Optimizer | OptimizerBlock, groups: Sequence[ParameterGroup], graphs: TrainingGraphs
) -> ir.Model:
    groups = _resolve_groups(groups, list(graphs.trainable))
    if isinstance(rule, Optimizer):
        shapes = {name: tuple(tensor.shape.numpy()) for name, tensor in graphs.trainable.items()}
        kinds = {tensor.dtype for tensor in graphs.trainable.values()}
        model = optimizer_model(
            rule, shapes, groups=groups, dtype=kinds.pop() if kinds else ir.DataType.FLOAT
        )
    else:
        model = rule.optimizer_model(graphs.trainable, groups)
    model.producer_name, model.producer_version = producer()
    model.metadata_props[contract.VERSION] = producer()[1]
    model.metadata_props[contract.ARTIFACTS] = graphs.training.metadata_props[contract.ARTIFACTS]
    return model


def _loss_name(loss: Loss) -> str:
    """The name of a loss for reports."""
    if loss is None:
        return "the model's first output"
    kind = loss_type(loss) if isinstance(loss, str) else loss
    if isinstance(kind, LossType):
        return next(name for name, member in LOSSES.items() if member is kind)
    return getattr(kind, "__name__", type(kind).__name__).replace("_", "-")


def _check_arguments(
    precision: str,
    additional_output_names: object,
    custom_op_library: str | os.PathLike[str] | None,
    *,
    portable: bool,
    optimizer: OptimizerChoice,
) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: it is one of {', '.join(PRECISIONS)}")
    if portable and precision != "fp32":
        raise ModelError(
            f"portable=True takes precision='fp32' only, not '{precision}': the programs that run the portable step "
            "do not adapt the scale of the loss"
        )
    if portable and optimizer is None:
        raise ModelError("portable=True needs an optimizer: the portable step has its update in it")
    if additional_output_names is not None and not isinstance(additional_output_names, list):
        raise ModelError(
            f"Unknown type provided for additional output names {type(additional_output_names)}. "
            "Expected a list of strings."
        )
    if custom_op_library is not None and not Path(custom_op_library).exists():
        raise ModelError(f"Custom op library path {custom_op_library} does not exist.")


def _set_batch_norm(model: ir.Model, mode: BatchNorm) -> list[str]:
    """Set batch norm to training or frozen mode; returns messages where the caller did not choose."""
    if mode not in ("train", "frozen", None):
        raise ValueError(f"batch_norm is {mode!r}: it is 'train', 'frozen' or None (as the model has it)")
    nodes = [node for node in model.graph if node.op_type == "BatchNormalization" and node.domain == ""]
    state = [node for node in nodes if all(v is not None and v.is_initializer() for v in node.inputs[3:5])]
    folded = [] if mode == "frozen" else _describe_folded_batch_norms(model)
    if mode == "train" and not state:
        return folded or [
            "batch_norm='train' changes nothing: the model has no batch norm left (exporters fold them)"
        ]
    if mode == "train":
        for node in state:
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    elif mode == "frozen":
        freeze_statistics(model)
    still = [node for node in nodes if not node.attributes.get_int("training_mode", 0)]
    if mode is not None or not still:
        return folded
    return [
        *folded,
        f"{len(still)} batch norms keep their running statistics, as in the model; batch_norm='train' (--batch-norm "
        "train) updates them",
    ]


# Where torch.export says which module, by its class, a node was made for.
_MODULES = "pkg.torch.onnx.class_hierarchy"


def _describe_folded_batch_norms(model: ir.Model) -> list[str]:
    """A note on batch norms that torch.onnx's dynamo exporter folded, which it does of modules in training mode too."""
    # it leaves the batch norm's own class on the convolution or product that does its work
    folded = [
        node
        for node in model.graph
        if node.op_type in ("Conv", "ConvTranspose", "Gemm")
        and "torch.nn.modules.batchnorm." in node.metadata_props.get(_MODULES, "")
    ]
    if not folded:
        return []
    return [
        f"torch.onnx.export folded {len(folded)} batch norms into the layers before them (the first is "
        f"'{folded[0].name}'), so they do not train; onward.export.from_torch of the module keeps them"
    ]


def _record_defaults(
    model: ir.Model, choice: Choice, groups: Sequence[ParameterGroup], notes: list[str]
) -> Sequence[ParameterGroup]:
    """Log what trains where the caller did not choose, and record default settings for fine-tuning.

    Pretrained weights get a tenth of the new head's learning rate, and all start with a warmup.
    """
    about = model.metadata_props
    head = [name for name in read_names(about, contract.HEAD) if name in choice.trainable]
    if choice.by_default and not choice.trainable:
        notes += choice.notes
        return groups
    if choice.by_default:
        # the number that tells a user whether a whole model trains, or a head
        values = sum(
            tensor.size for name in choice.trainable if (tensor := model.graph.initializers[name].const_value)
        )
        every = "the other" if choice.notes else "all"
        notes += choice.notes
        notes.append(
            f"{every} {len(choice.trainable)} float weights train ({values:,} values): neither requires_grad nor the "
            "model says which"
        )
    rounded = contract.QUANTIZATION in about
    if not choice.by_default and not head and not rounded:
        return groups
    # what is rounded knows its task already: at 1e-4 the loss of MiniLM's vectors rose
    rate = 1e-3 if head else 2e-5 if rounded else 1e-4
    about[contract.DEFAULTS] = json.dumps({"learning_rate": rate, "warmup": 0.1, "clip_norm": 1.0})
    body = [name for name in choice.trainable if name not in head]
    if head and body and not groups:
        # a new head's first gradients are large and know nothing: at the full rate they would undo the
        # pretraining
        return [ParameterGroup(tuple(body), learning_rate_scale=0.1)]
    return groups


def _in_opset(models: dict[str, ir.Model], *, own: int, requested: int | None) -> dict[str, ir.Model]:
    """The models in the opset asked for, or in the forward model's own where all of them have a form in it."""
    current = models["training"].graph.opset_imports[""]
    target = own if requested is None else requested
    # newer opsets than ours keep ours: a training graph needs nothing of theirs
    if requested is None and not _KEPT <= target < current:
        return models
    try:
        return {
            name: lower(model, target, at_any_cost=requested is not None) for name, model in models.items()
        }
    except ModelError as error:
        if requested is not None:
            raise
        _log.info("artifacts are in opset %d: %s", current, error)
        return models


def _source(model: ModelSource) -> ModelSource:
    if not isinstance(model, str | os.PathLike | bytes | onnx.ModelProto | ir.Model):
        raise ModelError(
            "Please pass in either a string or an ONNX ModelProto for the model. "
            f"Got {type(model).__name__} instead."
        )
    # protobuf itself would fail later, with an error that names no file
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
    outputs = [value.name or "" for value in plain_outputs(model)]
    if loss is None:
        if not outputs:
            raise ModelError("the model has no output, so there is no loss to train on")
        return list(loss_input_names or outputs)[:1], model
    # before functions: a block is callable, too
    if isinstance(loss, LossBlock):  # a block gets all outputs
        return loss.add_to(model, list(loss_input_names or outputs))
    values = values_of(graph)
    predictions = [find_value(graph, name) for name in loss_input_names or outputs[:1]]
    op = Builder(graph)
    op.scope = "loss"
    targets = []
    for target in target_inputs(loss, predictions):
        if target.name in graph.initializers:  # a weight that happens to be called so is no target
            target.name = f"{target.name}_input"
        # a model that has an input of that name already computes with it
        if target.name not in values:
            graph.inputs.append(target)
        targets.append(values.get(target.name or "", target))
    return [loss(op, *predictions, *targets).name or ""], model


def _with_teacher(
    model: ir.Model,
    loss: LossFunction | LossBlock | None,
    loss_input_names: Sequence[str] | None,
    lesson: Distillation | None,
    teacher: ir.Model | None,
) -> tuple[list[str], ir.Model]:
    """The names of the loss and of what else its block returned, and the model with it, against a teacher too."""
    if lesson is None or teacher is None:
        return _with_loss(model, loss, loss_input_names)
    answer = next(iter(loss_input_names or [model.graph.outputs[0].name or ""]))
    if lesson.model == "self" and lesson.output is None:
        # a copy has the same value, which need not be an output: a reader's are its characters, not their scores
        lesson = dataclasses.replace(lesson, output=answer)
    names: list[str] = []
    if loss is not None:
        names, model = _with_loss(model, loss, loss_input_names)
    own = names[0] if names else None
    kind = kind_of(loss, find_value(model.graph, answer))
    name = add_distillation(model, teacher, lesson, answer=answer, loss=own, kind=kind)
    return [name, *names[1:]], model


def _resolve_groups(groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[ParameterGroup]:
    taken: set[str] = set()
    resolved = []
    for group in groups:
        members = resolve(group.parameters, names, "parameter_groups")
        if twice := sorted(taken.intersection(members)):
            raise ModelError(f"parameter_groups: {twice} are in two groups")
        taken.update(members)
        resolved.append(dataclasses.replace(group, parameters=tuple(members)))
    return resolved
