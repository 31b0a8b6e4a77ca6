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
from typing import Any

from onward import contract
from onward.errors import DataError
from onward.reading import parse_json

__all__ = [
    "KEY",
    "NORMALIZATIONS",
    "Preprocessing",
    "check_settings",
    "image_settings",
    "known_image_settings",
    "plain_settings",
]

# where a model's metadata has it
KEY = contract.PREPROCESSING
NORMALIZATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # −1 to 1
}
_KINDS = ("image", "text", "table", "sound")
# Hugging Face's words, so that a preprocessor_config.json is read and written as it is
_IMAGE = {
    "do_resize": bool, "size": (dict, int), "resample": int, "do_center_crop": bool, "crop_size": (dict, int),
    "do_rescale": bool, "rescale_factor": (float, int), "do_normalize": bool, "image_mean": list,
    "image_std": list, "channels": int, "layout": str, "do_flip_channel_order": bool, "unknown": str,
    "letterbox": str, "pad_value": int,
}  # fmt: skip
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "image": _IMAGE,
    "text": {"tokenizer": str, "max_length": int, "pad_id": int, "column": (str, type(None))},
    "table": {"columns": list, "categories": dict, "fill": list, "mean": list, "scale": list},
    "sound": {"sampling_rate": int, "length": int, "layout": str, "do_normalize": bool},
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
        return cls.list_from_json(text, where)[0]

    @classmethod
    def list_from_json(cls, text: str, where: str = "the model") -> list[Preprocessing]:
        """The same where a model has several inputs: a list of tables, or one."""
        try:
            tables = parse_json(text, object)
        except ValueError as error:
            raise DataError(
                f"{where}: its preprocessing is not valid JSON ({error})", "deploy it again"
            ) from error
        return [cls.from_dict(table, where) for table in (tables if isinstance(tables, list) else [tables])]

    @classmethod
    def from_dict(cls, table: Any, where: str = "the model") -> Preprocessing:
        """The same of a dict, such as `run.json` has."""
        if (
            not isinstance(table, dict)
            or table.get("kind") not in _KINDS
            or not isinstance(table.get("input"), str)
        ):
            raise DataError(
                f"{where}: this version does not know its preprocessing",
                "deploy it again with this version",
            )
        settings = {key: value for key, value in table.items() if key not in ("kind", "input")}
        types = _SETTINGS[table["kind"]]
        for key, value in settings.items():
            if key not in types or not isinstance(value, types[key]) or not _finite(value):
                raise DataError(f"{where}: its preprocessing has a wrong '{key}'", "deploy it again")
        check_settings(settings, f"{where}: its preprocessing")
        _check_table(settings, where)
        return cls(table["kind"], table["input"], settings)


def known_image_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an image processor's settings that are understood here."""
    return {k: v for k, v in settings.items() if k in _IMAGE and isinstance(v, _IMAGE[k]) and _finite(v)}


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """An image processor's settings in the words that `image` knows: what some types do beyond the others, spelled out.

    >>> plain_settings({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}})["crop_size"]
    {'height': 224, 'width': 224}
    """
    plain = dict(settings)
    kind, size = str(settings.get("image_processor_type") or ""), settings.get("size")
    edge = size.get("shortest_edge") if isinstance(size, Mapping) else None
    share = settings.get("crop_pct")
    if kind.startswith("ConvNext") and edge:
        # ConvNeXt's own rule: small pictures are cut out of larger ones, at 384 and above nothing is cut
        if edge < 384:
            plain["size"] = {"shortest_edge": int(edge / (share or 224 / 256))}
            plain |= {"do_center_crop": True, "crop_size": {"height": edge, "width": edge}}
        else:
            plain["size"] = {"height": edge, "width": edge}
    elif kind.startswith("Levit") and edge:
        plain["size"] = {"shortest_edge": int(256 / 224 * edge)}
    elif kind.startswith("PoolFormer") and share and isinstance(size, Mapping):
        sides = {name: int(value / share) for name, value in size.items()}
        square = not edge and sides.get("height") == sides.get("width")
        plain["size"] = {"shortest_edge": sides["height"]} if square else sides
    elif kind.startswith("EfficientNet"):
        normal = settings.get("do_normalize", True)
        mean, spread = ([float(x) for x in settings.get(name) or [fill] * 3]
                        for name, fill in (("image_mean", 0.0), ("image_std", 1.0)))  # fmt: skip
        if settings.get("rescale_offset"):  # one less after rescaling
            mean = [x + 1.0 for x in (mean if normal else [0.0] * 3)]
        elif not normal:
            mean = [0.0] * 3
        twice = settings.get("include_top", True)
        spread = [(x if normal else 1.0) * (x if twice else 1.0) for x in spread]
        plain |= {"do_normalize": True, "image_mean": mean, "image_std": spread}
    return plain


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
    "pad_value": range(256),
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
