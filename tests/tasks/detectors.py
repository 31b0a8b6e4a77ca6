"""Small detectors that end as published ones do, written out, and drawn pictures with boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from PIL import Image, ImageDraw

SIDE, BINS, CHANNELS = 64, 8, 16
SHAPES = ("box", "ball")
_BODY = """
    p = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(images, stem_w, stem_b)  q = Relu(p)
    r = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(q, down_w, down_b)  s = Relu(r)
    t = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(s, eight_w, eight_b)  f0 = Relu(t)
    u = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(f0, sixteen_w, sixteen_b)  f1 = Relu(u)
"""
_STEM = {
    "stem_w": (8, 3, 3, 3), "stem_b": (8,), "down_w": (CHANNELS, 8, 3, 3), "down_b": (CHANNELS,),
    "eight_w": (CHANNELS, CHANNELS, 3, 3), "eight_b": (CHANNELS,),
    "sixteen_w": (CHANNELS, CHANNELS, 3, 3), "sixteen_b": (CHANNELS,),
}  # fmt: skip


def yolov8(classes: int = 3) -> onnx.ModelProto:
    """Decoded boxes from distributions, and sigmoid scores, in one output."""
    centres = [
        ((np.stack(np.meshgrid(np.arange(n), np.arange(n)), axis=0).reshape(2, -1)) + 0.5)
        for n in (SIDE // 8, SIDE // 16)
    ]
    anchors = sum(part.shape[1] for part in centres)
    strides = np.repeat([8.0, 16.0], [part.shape[1] for part in centres]).astype(np.float32)
    levels = "".join(
        f" b{i} = Conv(f{i}, box{i}_w, box{i}_b)  c{i} = Conv(f{i}, class{i}_w, class{i}_b)"
        f" j{i} = Concat<axis=1>(b{i}, c{i})  v{i} = Reshape(j{i}, flat)"
        for i in (0, 1)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[n, 3, {SIDE}, {SIDE}] images) => (float[n, {4 + classes}, {anchors}] output0)
        <int64[3] flat = {{0, {4 * BINS + classes}, -1}}, int64[2] parts = {{{4 * BINS}, {classes}}},
         int64[4] bins = {{0, 4, {BINS}, -1}}, int64[3] sides = {{0, 4, -1}}, int64[2] pair = {{2, 2}}> {{
        {_BODY} {levels}
        all = Concat<axis=2>(v0, v1)  dist, logits = Split<axis=1>(all, parts)
        d = Reshape(dist, bins)  o = Transpose<perm=[0, 2, 1, 3]>(d)  m = Softmax<axis=1>(o)
        e = Conv(m, line)  h = Reshape(e, sides)  lt, rb = Split<axis=1>(h, pair)
        x1 = Sub(centres, lt)  x2 = Add(centres, rb)  both = Add(x1, x2)  two = Constant<value_float=2.0>()
        mid = Div(both, two)  size = Sub(x2, x1)  box = Concat<axis=1>(mid, size)  pixels = Mul(box, strides)
        scores = Sigmoid(logits)  output0 = Concat<axis=1>(pixels, scores) }}"""
    )
    heads = {f"box{i}": (4 * BINS, CHANNELS, 1, 1) for i in (0, 1)}
    heads |= {f"class{i}": (classes, CHANNELS, 1, 1) for i in (0, 1)}
    arrays = _weights({**_STEM, **_with_bias(heads)})
    arrays["line"] = np.arange(BINS, dtype=np.float32).reshape(1, BINS, 1, 1)
    arrays["centres"] = np.concatenate(centres, axis=1)[None].astype(np.float32)
    arrays["strides"] = strides[None, None]
    names = str({number: f"old{number}" for number in range(classes)})
    for key, value in (("task", "detect"), ("names", names), ("imgsz", f"[{SIDE}, {SIDE}]")):
        model.metadata_props.add(key=key, value=value)
    return _filled(model, arrays)


def yolox(classes: int = 1) -> onnx.ModelProto:
    """The raw grid: boxes as layers give them, objectness and classes after their sigmoids; a batch of one."""
    anchors = (SIDE // 8) ** 2 + (SIDE // 16) ** 2
    levels = "".join(
        f" b{i} = Conv(f{i}, box{i}_w, box{i}_b)  o{i} = Conv(f{i}, object{i}_w, object{i}_b)"
        f" c{i} = Conv(f{i}, class{i}_w, class{i}_b)  so{i} = Sigmoid(o{i})  sc{i} = Sigmoid(c{i})"
        f" j{i} = Concat<axis=1>(b{i}, so{i}, sc{i})  v{i} = Reshape(j{i}, flat)"
        for i in (0, 1)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 6, opset_import: ["": 11]>
        net (float[1, 3, {SIDE}, {SIDE}] images) => (float[1, {anchors}, {5 + classes}] output)
        <int64[3] flat = {{1, {5 + classes}, -1}}> {{
        {_BODY} {levels}  all = Concat<axis=2>(v0, v1)  output = Transpose<perm=[0, 2, 1]>(all) }}"""
    )
    heads = {f"box{i}": (4, CHANNELS, 1, 1) for i in (0, 1)}
    heads |= {f"object{i}": (1, CHANNELS, 1, 1) for i in (0, 1)}
    heads |= {f"class{i}": (classes, CHANNELS, 1, 1) for i in (0, 1)}
    arrays = _weights({**_STEM, **_with_bias(heads)})
    arrays["stem_w"] /= 128  # it takes bytes as they are
    for level in "01":  # as YOLOX starts: few anchors see an object, and boxes are about as large as a cell
        arrays[f"object{level}_b"] -= 4
        arrays[f"box{level}_w"] *= 0.1
        arrays[f"object{level}_w"] *= 0.1
    return _filled(model, arrays)


def picodet(classes: int = 3) -> onnx.ModelProto:
    """Scores and distributions of distances, an output for each level; one layer has the rows of both."""
    cells = [(SIDE // 8) ** 2, (SIDE // 16) ** 2]
    levels = "".join(
        f" h{i} = Conv(f{i}, both{i}_w, both{i}_b)  l{i}, d{i} = Split<axis=1>(h{i}, parts)  g{i} = Sigmoid(l{i})"
        f" s{i} = Reshape(g{i}, classes{i})  scores{i} = Transpose<perm=[0, 2, 1]>(s{i})"
        f" e{i} = Reshape(d{i}, sides{i})  boxes{i} = Transpose<perm=[0, 2, 1]>(e{i})"
        for i in (0, 1)
    )
    outputs = [f"float[1, {n}, {classes}] scores{i}" for i, n in enumerate(cells)]
    outputs += [f"float[1, {n}, {4 * BINS}] boxes{i}" for i, n in enumerate(cells)]
    sizes = [f"int64[3] classes{i} = {{1, {classes}, {n}}}" for i, n in enumerate(cells)]
    sizes += [f"int64[3] sides{i} = {{1, {4 * BINS}, {n}}}" for i, n in enumerate(cells)]
    model = onnx.parser.parse_model(
        f"""<ir_version: 7, opset_import: ["": 13]>
        net (float[1, 3, {SIDE}, {SIDE}] images) => ({", ".join(outputs)})
        <int64[2] parts = {{{classes}, {4 * BINS}}}, {", ".join(sizes)}> {{ {_BODY} {levels} }}"""
    )
    heads = {f"both{i}": (classes + 4 * BINS, CHANNELS, 1, 1) for i in (0, 1)}
    names = "\n".join(f"old{number}" for number in range(classes))
    model.metadata_props.add(key="character", value=names)
    return _filled(model, _weights({**_STEM, **_with_bias(heads)}))


def detr(classes: int = 3) -> onnx.ModelProto:
    """Scores of classes and of nothing, and boxes in shares of the picture, of queries that begin at a map's cells."""
    cells = SIDE // 16
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[n, 3, {SIDE}, {SIDE}] images) => (float[n, {cells**2}, {classes + 1}] logits,
            float[n, {cells**2}, 4] pred_boxes) <int64[3] flat = {{0, {CHANNELS}, -1}}> {{
        {_BODY} m = Reshape(f1, flat)  k = Transpose<perm=[0, 2, 1]>(m)
        c = MatMul(k, class_w)  logits = Add(c, class_b)
        b = MatMul(k, box_w)  e = Add(b, cell)  pred_boxes = Sigmoid(e) }}"""
    )
    arrays = _weights({**_STEM, "box_w": (CHANNELS, 4), "class_w": (CHANNELS, classes + 1)})
    arrays["class_b"] = np.zeros(classes + 1, np.float32)
    y, x = np.divmod(np.arange(cells**2), cells)
    start = np.stack([(x + 0.5) / cells, (y + 0.5) / cells, *np.full((2, cells**2), 0.3)], axis=1)[None]
    arrays["cell"] = np.log(start / (1 - start)).astype(np.float32)
    return _filled(model, arrays)


def _with_bias(layers: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}_{part}": shape if part == "w" else shape[:1]
        for name, shape in layers.items()
        for part in "wb"
    }


def _weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (
            rng.normal(0, (2 / np.prod(shape[1:])) ** 0.5, shape) if len(shape) > 1 else np.zeros(shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def _filled(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.checker.check_model(model)
    return model


def drawn(folder: Path, pictures: int, seed: int = 0, size: tuple[int, int] = (SIDE, SIDE)) -> Path:
    """One or two shapes on dark noise for each picture, with YOLO's lines; the names are in classes.txt."""
    rng = np.random.default_rng(seed)
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    width, height = size
    for number in range(pictures):
        picture = Image.fromarray(rng.integers(0, 60, (height, width, 3), np.uint8))
        pen, lines = ImageDraw.Draw(picture), []
        for slot in range(rng.integers(1, 3)):  # one in each half: they never cover each other
            w, h = (int(n) for n in rng.integers(14, 26, 2))
            x, y = int(rng.integers(0, width - w)), slot * height // 2 + int(rng.integers(0, height // 2 - h))
            kind = int(rng.integers(0, 2))
            colour = (250, 60, 60) if kind == 0 else (60, 60, 250)
            (pen.rectangle, pen.ellipse)[kind]((x, y, x + w - 1, y + h - 1), fill=colour)
            numbers = ((x + w / 2) / width, (y + h / 2) / height, w / width, h / height)
            lines.append(f"{kind} " + " ".join(map(str, numbers)))
        picture.save(folder / "images" / f"{number}.png")
        (folder / "labels" / f"{number}.txt").write_text("\n".join(lines))
    (folder / "classes.txt").write_text("\n".join(SHAPES))
    return folder
