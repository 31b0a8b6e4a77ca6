"""The values of options with fixed choices."""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any

import typer


class LossChoice(enum.StrEnum):
    """Losses by their names on the command line."""

    NONE = "none"
    MSE = "mse"
    CROSS_ENTROPY = "cross-entropy"
    BCE_WITH_LOGITS = "bce-with-logits"
    L1 = "l1"
    NLL = "nll"
    HUBER = "huber"
    SMOOTH_L1 = "smooth-l1"
    KL_DIV = "kl-div"


class OptimizerChoice(enum.StrEnum):
    """Optimizers by their names on the command line."""

    ADAMW = "adamw"
    SGD = "sgd"
    ADAM = "adam"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"
    LION = "lion"
    LAMB = "lamb"
    ADAFACTOR = "adafactor"


class BatchNormChoice(enum.StrEnum):
    """Modes of batch norm."""

    TRAIN = "train"
    FROZEN = "frozen"


def only_our_errors(device: str = "auto") -> str:
    """Let onnxruntime print nothing about devices: what fails there is an error, or a finding, of ours."""
    if device != "cpu":
        import onnxruntime

        # its warnings about devices name its source files, and come once for each session
        onnxruntime.set_default_logger_severity(4)
    return device


DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        callback=only_our_errors,
        help="Where to run: cpu, cuda, cuda:1, or auto for what is there.",
    ),
]


class PrecisionChoice(enum.StrEnum):
    """Precision of matrix products and convolutions."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class ScheduleChoice(enum.StrEnum):
    """Learning-rate schedules."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    STEP = "step"
    ONE_CYCLE = "one-cycle"
    POLYNOMIAL = "polynomial"


class QuantizeChoice(enum.StrEnum):
    """Quantization schemes."""

    INT8 = "int8"
    INT8_STATIC = "int8-static"
    INT8_TENSOR = "int8-tensor"
    INT8_WEIGHTS = "int8-weights"
    INT4 = "int4"
    FP16 = "fp16"


class DeployChoice(enum.StrEnum):
    """The same, and the best of them by measurement."""

    AUTO = "auto"
    INT8 = "int8"
    INT8_TENSOR = "int8-tensor"
    INT8_STATIC = "int8-static"
    INT8_WEIGHTS = "int8-weights"
    INT4 = "int4"
    FP16 = "fp16"


# schemes that training prepares a model for; the others are applied afterwards


class TrainedChoice(enum.StrEnum):
    """Ways of quantization that a model is trained for."""

    INT8 = "int8"
    INT8_STATIC = "int8-static"
    INT8_WEIGHTS = "int8-weights"
    INT4 = "int4"


class MetricChoice(enum.StrEnum):
    """Built-in metrics."""

    ACCURACY = "accuracy"
    TOP3 = "top3"
    TOP5 = "top5"
    F1 = "f1"
    AUC = "auc"
    MSE = "mse"
    MAE = "mae"
    R2 = "r2"
    PERPLEXITY = "perplexity"


def loss_of(choice: LossChoice) -> Any:
    """The `LossType` of a name, or None for a model whose first output is its loss."""
    from onward.artifacts.names import loss_type

    return None if choice is LossChoice.NONE else loss_type(str(choice))


def optimizer_of(
    choice: OptimizerChoice, *, weight_decay: float | None = None, momentum: float | None = None
) -> Any:
    """The optimizer of a name, with its options."""
    from onward.artifacts.names import optimizer_type
    from onward.cli.errors import CommandError
    from onward.optim.update_rules import make

    for name, value in (("weight-decay", weight_decay), ("momentum", momentum)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise CommandError(f"--{name} is {value}: it must be a number, 0 or more", "0 turns it off")
    # at 1 nothing is ever forgotten: the weights run away
    if momentum is not None and momentum >= 1:
        raise CommandError(f"--momentum is {momentum}: it must be below 1", "for example --momentum 0.9")
    options: dict[str, float] = {}
    if weight_decay is not None:
        options["weight_decay"] = weight_decay
    if momentum is not None:
        options["momentum"] = momentum
    try:
        return make(optimizer_type(str(choice)).name, **options)
    except TypeError as error:
        names = " or ".join(f"--{name.replace('_', '-')}" for name in options)
        raise CommandError(
            f"{choice} does not take {names}", "leave it away, or choose another optimizer"
        ) from error
