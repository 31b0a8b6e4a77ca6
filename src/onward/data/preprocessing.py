"""The settings of preprocessing for images, text, tables or audio, as plain data.

It is written into a run and into the metadata of a deployed model, so that `onward infer` and `onward.load` do
the same as training did. Settings of pictures have the names that Hugging Face's image processors use. Files come
from outside: everything is checked when it is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward import contract
from onward.data.preprocess import plain_settings
from onward.errors import DataError
from onward.reading import parse_json, read_json

__all__ = [
    "KEY",
    "NORMALIZATIONS",
    "Preprocessing",
    "beside",
    "check_settings",
    "image_settings",
    "known_image_settings",
]

# where a model's metadata has it
KEY = contract.PREPROCESSING
NORMALIZATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # −1 to 1
}
_KINDS = ("image", "text", "table", "sound")
_IMAGE = {
    "do_resize": bool, "size": (dict, int), "resample": int, "do_center_crop": bool, "crop_size": (dict, int),
    "do_rescale": bool, "rescale_factor": (float, int), "do_normalize": bool, "image_mean": list,
    "image_std": list, "channels": int, "layout": str, "do_flip_channel_order": bool,
}  # fmt: skip
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "image": _IMAGE,
    "text": {"tokenizer": str, "max_length": int, "pad_id": int, "column": (str, type(None))},
    "table": {"columns": list, "categories": dict, "fill": list, "mean": list, "scale": list},
    "sound": {"sampling_rate": int, "length": int, "layout": str},
}
_LARGEST_SIDE = 1 << 14


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """The kind of data, the model's input that it is for, and the settings of that kind.

    >>> Preprocessing.from_json(Preprocessing("sound", "wave", {"sampling_rate": 16000}).to_json()).kind
    'sound'
    """

    kind: str
    input: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """As text, for metadata."""
        return json.dumps({"kind": self.kind, "input": self.input, **self.settings}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, where: str = "the model") -> Preprocessing:
        """Read what `to_json` wrote; an error for anything else."""
        try:
            found = parse_json(text, object)
        except ValueError as error:
            raise DataError(
                f"{where}: its preprocessing is not valid JSON ({error})", "deploy it again"
            ) from error
        return cls.from_dict(found, where)

    @classmethod
    def from_dict(cls, found: Any, where: str = "the model") -> Preprocessing:
        """The same of a dict, such as `run.json` has."""
        if (
            not isinstance(found, dict)
            or found.get("kind") not in _KINDS
            or not isinstance(found.get("input"), str)
        ):
            raise DataError(
                f"{where}: this version does not know its preprocessing",
                "deploy it again with this version",
            )
        settings = {key: value for key, value in found.items() if key not in ("kind", "input")}
        known = _SETTINGS[found["kind"]]
        for key, value in settings.items():
            if key not in known or not isinstance(value, known[key]) or not _finite(value):
                raise DataError(f"{where}: its preprocessing has a wrong '{key}'", "deploy it again")
        check_settings(settings, f"{where}: its preprocessing")
        _check_table(settings, where)
        return cls(found["kind"], found["input"], settings)


def beside(model: Path) -> dict[str, Any]:
    """The settings of a `preprocessor_config.json` beside a model, those that are known; empty where there is none."""
    path = model.parent / "preprocessor_config.json"
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except (ValueError, OSError) as error:
        raise DataError(f"'{path}' cannot be read: {error}", "fix it, or remove it") from error
    if not isinstance(found, dict):
        raise DataError(f"'{path}' holds no settings", "fix it, or remove it")
    try:
        known = known_image_settings(plain_settings(found))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"'{path}' has settings that are not understood: {error}", "fix it, or remove it"
        ) from error
    check_settings(known, f"'{path}'")
    return known


def known_image_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an image processor's settings that are understood here."""
    return {k: v for k, v in found.items() if k in _IMAGE and isinstance(v, _IMAGE[k]) and _finite(v)}


def image_settings(
    *, normalize: str | None = None, resize: int | None = None, crop: int | None = None
) -> dict[str, Any]:
    """Settings from what people ask for: "imagenet", "none", one number or "mean,std" each for all channels or three.

    >>> image_settings(normalize="0.5,0.25")["image_std"]
    [0.25, 0.25, 0.25]
    """
    settings: dict[str, Any] = {}
    if normalize == "none":
        settings["do_normalize"] = False
    elif normalize is not None:
        mean, spread = _normalization(normalize)
        settings |= {"do_normalize": True, "image_mean": list(mean), "image_std": list(spread)}
    if resize is not None:
        settings |= {"do_resize": True, "size": {"shortest_edge": resize}}
    if crop is not None:
        settings |= {"do_center_crop": True, "crop_size": {"height": crop, "width": crop}}
    return settings


def _normalization(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if text in NORMALIZATIONS:
        return NORMALIZATIONS[text]
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 2:
        numbers = [numbers[0]] * 3 + [numbers[1]] * 3
    if len(numbers) != 6 or not all(map(math.isfinite, numbers)) or min(numbers[3:]) <= 0:
        raise DataError(
            f"no normalization '{text}'",
            "it is imagenet, half, none, or numbers: mean,std or three means and three positive standard deviations",
        )
    return tuple(numbers[:3]), tuple(numbers[3:])


def _finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) or _finite(item) for item in value)
    if isinstance(value, dict):
        return all(_finite(item) for item in value.values())
    return not isinstance(value, int | float) or math.isfinite(value)


_SIZES = ({"height", "width"}, {"shortest_edge"}, {"longest_edge"}, {"shortest_edge", "longest_edge"})


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Reject settings that cannot be followed, and sizes that no one means: they would take any memory."""

    def wrong(key: str) -> DataError:
        return DataError(f"{where} has the {key} {str(settings[key])[:60]}", "fix it, or make it again")

    for key in ("size", "crop_size"):
        sides = settings.get(key)
        if isinstance(sides, Mapping) and sides and set(sides) not in _SIZES:
            raise wrong(key)
        for side in sides.values() if isinstance(sides, Mapping) else [sides]:
            if side is not None and (type(side) is not int or not 0 < side <= _LARGEST_SIDE):
                raise wrong(key)
    for key in ("image_mean", "image_std"):
        numbers = settings.get(key) or []
        if not isinstance(numbers, list | tuple) or not all(
            type(number) in (int, float) for number in numbers
        ):
            raise wrong(key)
        if settings.get("image_mean") and len(numbers) not in (1, 3):
            raise DataError(
                f"{where} has {len(numbers)} numbers in {key}",
                "give image_mean and image_std one or three each",
            )
    if any(number == 0 for number in settings.get("image_std") or []):
        raise wrong("image_std")
    for key, allowed in _RANGES.items():
        number = settings.get(key)
        if number is not None and not (type(number) is int and number in allowed):
            raise wrong(key)


_RANGES: Mapping[str, range] = {
    "resample": range(6),
    "channels": range(1, 5),
    "length": range((1 << 28) + 1),
    "max_length": range((1 << 20) + 1),
    "sampling_rate": range(1, 10_000_001),
}


def _check_table(settings: Mapping[str, Any], where: str) -> None:
    """Columns and categories are names, and there is one number for each feature."""
    columns, categories = settings.get("columns", []), settings.get("categories", {})
    lists = [columns, *categories.values()]
    good = all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in lists)
    width = sum(len(categories.get(name, [None])) for name in columns) if good else -1
    numbers = [settings[key] for key in ("fill", "mean", "scale") if key in settings]
    if not good or any(
        len(part) != width or not all(isinstance(number, int | float) for number in part) for part in numbers
    ):
        raise DataError(f"{where}: its preprocessing has wrong columns", "deploy it again")
