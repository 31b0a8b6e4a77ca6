"""Parts of diffusers' pipelines as traceable modules: networks that remove noise, and both halves of autoencoders.

Takes what the classes of diffusers have in common; imports diffusers only to read a folder.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onward.errors import ExportError
from onward.export.huggingface.traceable import Adapter, Traceable
from onward.reading import read_json

if TYPE_CHECKING:
    from onward.export.huggingface.find_model import Source
    from onward.export.huggingface.tasks import Axes

_PICTURE: Axes = {0: "batch", 2: "height", 3: "width"}
_COMPONENTS = {"denoising": "unet", "vae-encoder": "vae", "vae-decoder": "vae"}
_MISSING = "pip install diffusers"


class Part(nn.Module):
    """A network of diffusers that looks to the exporter like one of transformers; parameters keep their names."""

    main_input_name = "sample"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self.inner = SimpleNamespace(model=model)  # not a submodule: names would get its prefix
        self.settings = dict(model.config)
        self.config = SimpleNamespace(model_type=type(model).__name__, is_encoder_decoder=False)


def is_diffusers(model: Any) -> bool:
    """Whether an object is a network of diffusers."""
    home = type(model).__module__.partition(".")[0]
    return home == "diffusers" and isinstance(model, nn.Module)


def is_diffusers_folder(folder: str) -> bool:
    """Whether a folder holds a pipeline of diffusers, or one network of it."""
    path = Path(folder)
    if (path / "model_index.json").is_file():
        return True
    try:
        return (path / "config.json").is_file() and "_diffusers_version" in read_json(path / "config.json")
    except (OSError, ValueError):
        return False


def read_part(folder: str, task: str) -> Any:
    """The network that a task needs from a folder: itself, or one of a pipeline's."""
    try:
        import diffusers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ExportError(f"'{folder}' is of diffusers, which is not installed", hint=_MISSING) from error
    path = Path(folder)
    if (path / "model_index.json").is_file():
        if task not in _COMPONENTS:
            raise ExportError(
                f"'{folder}' holds a whole pipeline: name the part with task='denoising', 'vae-encoder' or "
                "'vae-decoder'"
            )
        path = path / _COMPONENTS[task]
    if not (path / "config.json").is_file():
        raise ExportError(f"'{path}': no config.json")
    named = read_json(path / "config.json").get("_class_name")
    kind = getattr(diffusers, str(named), None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise ExportError(
            f"'{path / 'config.json'}' names {str(named)[:60]!r}, which diffusers does not have"
        )
    # never the older .bin files, which are pickles
    return kind.from_pretrained(path, use_safetensors=True)  # pyright: ignore[reportAttributeAccessIssue]


def as_part(model: Any, task: str) -> tuple[Part, str]:
    """A network and the task that it is exported for; autoencoders need to be told which half."""
    is_coder = hasattr(model, "encode") and hasattr(model, "decode")
    name = "denoising" if task in ("auto", "default") and not is_coder else task
    if is_coder and name not in ("vae-encoder", "vae-decoder"):
        raise ExportError(
            f"{type(model).__name__} has two halves: choose task='vae-encoder' or task='vae-decoder', not {task!r}"
        )
    if not is_coder and name != "denoising":
        raise ExportError(f"{type(model).__name__} is exported for 'denoising', not for {task!r}")
    return Part(model), name


def denoiser(source: Source, model: Part) -> Traceable:
    """A noisy sample, the time and what conditions it in; the noise that the network sees in it out."""
    network, settings = model.inner.model, model.settings
    taken = inspect.signature(network.forward).parameters
    random = torch.Generator().manual_seed(0)
    more = _conditions(settings, taken)
    names = ["sample", "timestep", *more]

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        added = {name: batch[name] for name in ("text_embeds", "time_ids") if name in batch}
        direct = {name: batch[name] for name in more if name not in added}
        if added:
            direct["added_cond_kwargs"] = added  # type: ignore[assignment]
        return (network(batch["sample"], batch["timestep"], **direct, return_dict=False)[0],)

    side = _side(settings)

    def case(rows: int, height: int, width: int, length: int) -> dict[str, Tensor]:
        shape = (rows, int(settings.get("in_channels") or 4), height, width)
        batch = {"sample": torch.randn(shape, generator=random)}
        batch["timestep"] = torch.randint(0, 1000, (rows,), generator=random)
        for name, (_, make) in more.items():
            batch[name] = make(rows, length, random)
        return batch

    return Traceable(
        module=Adapter(model, names, run),
        inputs={
            "sample": _PICTURE,
            "timestep": {0: "batch"},
            **{name: axes for name, (axes, _) in more.items()},
        },
        outputs={"out_sample": _PICTURE},
        example=case(2, side, side, 7),
        # tall and wide, so that the two axes cannot be taken for one
        cases=[case(1, 2 * side, side, 5), case(3, side, 2 * side, 9)],
    )


def _conditions(settings: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, tuple[Axes, Any]]:
    """What conditions the network: its axes, and a function (rows, length, random) that makes an example."""
    conditions: dict[str, tuple[Axes, Any]] = {}
    width = settings.get("cross_attention_dim")
    if "encoder_hidden_states" in taken and width is not None:
        size = int(width if isinstance(width, int) else width[0])
        size = int(settings.get("encoder_hid_dim") or size)
        conditions["encoder_hidden_states"] = (
            {0: "batch", 1: "sequence"},
            lambda rows, length, random: torch.randn(rows, length, size, generator=random),
        )
    classes = settings.get("num_class_embeds")
    if "class_labels" in taken and classes and settings.get("class_embed_type") is None:
        conditions["class_labels"] = (
            {0: "batch"},
            lambda rows, length, random: torch.randint(0, int(classes), (rows,), generator=random),
        )
    if settings.get("addition_embed_type") == "text_time":
        # original size, crop and target size of the picture, two numbers each (SDXL)
        times = 6
        text = int(settings["projection_class_embeddings_input_dim"]) - times * int(
            settings["addition_time_embed_dim"]
        )
        conditions["text_embeds"] = (
            {0: "batch"},
            lambda rows, length, random: torch.randn(rows, text, generator=random),
        )
        conditions["time_ids"] = (
            {0: "batch"},
            lambda rows, length, random: torch.randint(0, 64, (rows, times), generator=random).float(),
        )
    elif settings.get("addition_embed_type") is not None:
        raise ExportError(f"the addition_embed_type {settings['addition_embed_type']!r} is not known here")
    return conditions


def _side(settings: Mapping[str, Any]) -> int:
    """A small picture that all steps down to the coarsest divide."""
    blocks = settings.get("down_block_types") or settings.get("block_out_channels") or ()
    return 2 ** max(len(blocks), 3)


def autoencoder(source: Source, model: Part) -> Traceable:
    """One half of an autoencoder: pictures to means and log variances of latents, or latents to pictures."""
    network, settings = model.inner.model, model.settings
    encodes = source.task.name == "vae-encoder"
    random = torch.Generator().manual_seed(0)
    channels = int(settings["in_channels"] if encodes else settings["latent_channels"])

    def run(batch: dict[str, Tensor]) -> Sequence[Tensor]:
        if not encodes:
            return (network.decode(batch["latent_sample"], return_dict=False)[0],)
        coded = network.encode(batch["sample"], return_dict=False)[0]
        # A distribution, whose means and log variances lie in one tensor: drawing from it is the caller's.
        return (getattr(coded, "parameters", coded),)

    name = "sample" if encodes else "latent_sample"
    # Latents are smaller by all steps down: any small size divides.
    side = 2 * _side(settings) if encodes else 4

    def case(rows: int, height: int, width: int) -> dict[str, Tensor]:
        return {name: torch.randn(rows, channels, height, width, generator=random)}

    result: Axes = {0: "batch", 2: "output_height", 3: "output_width"}
    return Traceable(
        module=Adapter(model, [name], run),
        inputs={name: _PICTURE},
        outputs={"latent_parameters" if encodes else "sample": result},
        example=case(2, side, side),
        cases=[case(1, 2 * side, side), case(3, side, 2 * side)],
    )
