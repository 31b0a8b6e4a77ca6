"""Images: a folder with one folder for each class, or single files, read lazily."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.data.columns import EmbeddedFile
from onward.data.preprocess import image
from onward.errors import DataError
from onward.info.preprocessing import Preprocessing
from onward.train.batches import Rows

if TYPE_CHECKING:
    from onward.data.match_inputs import InputSpec

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
# Pillow judges a file by its content, and for some formats (EPS) it starts another program: only these are decoded.
DECODERS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# the side of pictures for a model that takes any, which most were trained with; and the least one that data may choose
_DEFAULT, _SMALLEST = 224, 32
# so many bytes of decoded pictures are kept; the rest is decoded again in every epoch
_KEPT = 1 << 30


class Pictures(Rows):
    """Pictures in files as an array of [samples, channels, height, width]."""

    def __init__(self, files: Sequence[Any], settings: Mapping[str, Any], *, dtype: Any = np.float32) -> None:
        self.files, self.settings, self.dtype = list(files), dict(settings), np.dtype(dtype)
        self._kept: dict[Any, np.ndarray] = {}
        self._room = _KEPT
        first = self._read(self.files[0])
        self.shape = (len(self.files), *first.shape)

    def read(self, rows: np.ndarray) -> np.ndarray:
        files = [self.files[row] for row in rows]
        with ThreadPoolExecutor(4) as pool:  # decoding leaves Python's lock
            pictures = list(pool.map(self._read, files))
        strange = next((f for f, a in zip(files, pictures) if a.shape != self.shape[1:]), None)
        if strange is not None:
            raise DataError(
                f"'{strange}' has another size than '{self.files[0]}' and the model takes any",
                "give all one size: --resize 224 --crop 224",
            )
        return np.stack(pictures)

    def part(self, rows: np.ndarray) -> Pictures:
        return Pictures([self.files[row] for row in rows], self.settings, dtype=self.dtype)

    def _read(self, path: Any) -> np.ndarray:
        pixels = self._kept.get(path)
        if pixels is None:
            pixels = open_picture(path, self.settings).astype(self.dtype, copy=False)
            if self._room >= pixels.nbytes:
                self._room -= pixels.nbytes
                self._kept[path] = pixels
        return pixels


def read_images(
    files: Sequence[Any], inputs: Sequence[InputSpec], name: str | None, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], Preprocessing]:
    """Pictures for the model's input with four dimensions, and what is done to them."""
    spec = picture_input(inputs, name)
    if not {"size", "crop_size"} & settings.keys() and not any(_sides(spec)):
        settings = {**settings, **_common_size(files)}
    preprocessing = Preprocessing("image", spec.name, picture_settings(spec, settings))
    return {spec.name: Pictures(files, preprocessing.settings, dtype=spec.dtype)}, preprocessing


def _sides(spec: InputSpec) -> tuple[int | None, int | None]:
    """The height and width that an input of pictures takes; None for any."""
    assert spec.dims is not None
    height, width = spec.dims[1:3] if _is_channels_last(spec) else spec.dims[2:]
    return height, width


def _is_channels_last(spec: InputSpec) -> bool:
    assert spec.dims is not None
    return spec.dims[1] not in (1, 3) and spec.dims[3] in (1, 3)


def _common_size(files: Sequence[Any]) -> dict[str, Any]:
    """The size that all pictures have, as a setting, where a model of any size has no better one."""
    from PIL import Image

    sizes = set()
    for file in files:
        try:
            with Image.open(_opened(file), formats=DECODERS) as picture:
                sizes.add(picture.size)
        except Exception:  # Pillow's readers raise whatever Python does; what is damaged is refused elsewhere
            return {}
        if len(sizes) > 1:
            return {}
    width, height = next(iter(sizes), (0, 0))
    # larger ones take more time and memory than a default may; networks halve smaller ones to nothing
    fits = all(_SMALLEST <= side <= _DEFAULT for side in (width, height))
    return {"size": {"height": height, "width": width}} if fits else {}


# Pictures of more pixels than this are decoded one at a time: a few that unpack to much would take all memory at once.
_LARGE_PIXELS = 1 << 24
_one_at_a_time = threading.Lock()


def decoding(picture: Any) -> contextlib.AbstractContextManager[Any]:
    """Hold this while the pixels of a Pillow image are in memory more than once, beside other threads."""
    return _one_at_a_time if picture.width * picture.height > _LARGE_PIXELS else contextlib.nullcontext()


def upright_size(file: Any) -> tuple[int, int]:
    """The height and width of a picture as people see it; its pixels are not decoded."""
    from PIL import Image

    with Image.open(file, formats=DECODERS) as picture:
        # the EXIF orientations that swap height and width
        turned = picture.getexif().get(0x0112) in (5, 6, 7, 8)
        return (picture.width, picture.height) if turned else (picture.height, picture.width)


def why_unreadable_image(file: Any) -> str | None:
    """Why a picture cannot be decoded to its end; None where it can."""
    from PIL import Image

    try:
        with Image.open(_opened(file), formats=DECODERS) as picture:
            # JPEG decodes an eighth of the size in a fraction of the time, and still reads every byte
            picture.draft("L", (max(1, picture.width // 8), max(1, picture.height // 8)))
            with decoding(picture):
                picture.load()
                # its pixels are gone before another is decoded
                picture.close()
            return None
    except Exception as error:  # Pillow's readers raise whatever Python does over damaged bytes
        return str(error).removesuffix(f" {str(file)!r}")


def _opened(file: Any) -> Any:
    return io.BytesIO(file.content) if isinstance(file, EmbeddedFile) else file


def read_picture(path: Any, *, channels: int | None = 3) -> Any:
    """A Pillow image from a file, a file object, bytes [height, width, 3] or an image: upright, in colours or grey."""
    from PIL import Image

    if isinstance(path, np.ndarray):
        if path.ndim not in (2, 3) or path.dtype != np.uint8:
            raise DataError(
                f"an array of shape {list(path.shape)} and type {path.dtype} is no image",
                "give a path, a Pillow image, or [height, width, channels] bytes",
            )
        path = Image.fromarray(path)
    with _decoded(path, channels) as picture:
        return picture


@contextlib.contextmanager
def _decoded(path: Any, channels: int | None) -> Iterator[Any]:
    """A picture upright, in colours or grey, and the turn to decode where it is large."""
    from PIL import Image, ImageOps

    with contextlib.ExitStack() as stack:
        try:
            # an image that was given stays open: it is its owner's
            given = isinstance(path, Image.Image)
            file = path if given else stack.enter_context(Image.open(_opened(path), formats=DECODERS))
            stack.enter_context(decoding(file))
            picture = ImageOps.exif_transpose(file).convert("L" if channels == 1 else "RGB")
        except Exception as error:  # Pillow's readers raise whatever Python does over damaged bytes
            raise DataError(f"cannot read the image '{path}': {error}", "remove it, or fix it") from error
        yield picture


def open_picture(path: Any, settings: Mapping[str, Any]) -> np.ndarray:
    """One picture, from a file or a file object, as the model takes it."""
    with _decoded(path, settings.get("channels")) as picture:
        try:
            return image(picture, settings)
        except ValueError as error:
            raise DataError(f"'{path}': {error}", "choose other sizes: --resize, --crop") from error


def picture_input(inputs: Sequence[InputSpec], name: str | None) -> InputSpec:
    """The input that takes pictures: the only one with four dimensions, or the one named."""
    fitting = [spec for spec in inputs if spec.dims is not None and len(spec.dims) == 4]
    fitting = [spec for spec in fitting if name is None or spec.name == name]
    if len(fitting) != 1:
        raise DataError(
            "a folder of images needs a model with one input of four dimensions (batch, channels, height, width)",
            "name the input with --data INPUT=FOLDER if there are several",
        )
    return fitting[0]


def picture_settings(spec: InputSpec, stated: Mapping[str, Any]) -> dict[str, Any]:
    """What to do to pictures so that an input can take them: its own size, what is wanted, and 0 to 1 otherwise."""
    assert spec.dims is not None
    last = _is_channels_last(spec)
    channels, (height, width) = spec.dims[3 if last else 1], _sides(spec)
    if channels not in (1, 3, None):
        raise DataError(f"'{spec.name}' takes {spec}: images have 1 or 3 channels")
    settings: dict[str, Any] = {"do_resize": True, "resample": 3, "do_rescale": True, **stated}
    settings |= {"channels": channels or 3, "layout": "NHWC" if last else "NCHW"}
    if spec.dtype == np.uint8:
        settings |= {"do_rescale": False, "do_normalize": False}
    fixed = {"height": height or width or _DEFAULT, "width": width or height or _DEFAULT}
    if height is None and width is None and ("crop_size" in stated or "size" in stated):
        if "crop_size" not in settings and "shortest_edge" in settings["size"]:
            edge = settings["size"]["shortest_edge"]  # any size will do, but all one
            settings |= {"do_center_crop": True, "crop_size": {"height": edge, "width": edge}}
    elif (settings.get("do_center_crop") and "crop_size" in settings) or "shortest_edge" in settings.get(
        "size", {}
    ):
        settings |= {"do_center_crop": True, "crop_size": fixed}
        size = settings.get("size")
        if isinstance(size, dict) and size.get("shortest_edge", 1 << 20) < max(fixed.values()):
            raise DataError(
                f"--resize {size['shortest_edge']} is smaller than the {fixed['height']} × {fixed['width']} pixels "
                f"that '{spec.name}' takes",
                "choose a larger one",
            )
        settings.setdefault("size", {"shortest_edge": max(fixed.values())})
    else:
        settings["size"] = fixed
    if settings["channels"] == 1 and len(settings.get("image_mean", [])) == 3:
        settings |= {key: [float(np.mean(settings[key]))] for key in ("image_mean", "image_std")}
    return settings
