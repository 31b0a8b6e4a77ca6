"""Models that mean harm, or that a broken tool wrote: each by name, as something that puts it at a path.

Most are small changes of a good classifier, so that what is wrong is one thing. Some bring files beside the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper

from cli.newcomer import make_model
from onward import contract

__all__ = ["MODELS", "NotHere"]

Put = Callable[[Path], None]
MODELS: dict[str, Put] = {}
CONTROL = "\x1b[31mred\x07\r\n=1+1\x9b2J\u202e"
HEAD = '<ir_version: 10, opset_import: ["": 21, "f": 1]> '


def put(name: str) -> Callable[[Put], Put]:
    """Register what writes a model at a path."""

    def register(function: Put) -> Put:
        assert name not in MODELS
        MODELS[name] = function
        return function

    return register


class NotHere(Exception):
    """A change of something that a model does not have."""


def good(path: Path) -> ModelProto:
    """The good model that is there already, or the classifier."""
    return onnx.load(path, load_external_data=False) if path.is_file() else make_model()


def change(name: str) -> Callable[[Callable[[ModelProto], object]], None]:
    """Register a change of the good model that is there."""

    def register(function: Callable[[ModelProto], object]) -> None:
        @put(name)
        def write(path: Path) -> None:
            model = good(path)
            try:
                function(model)
            except IndexError:
                raise NotHere(f"the model has nothing that '{name}' changes") from None
            path.unlink(missing_ok=True)
            path.write_bytes(model.SerializeToString())

    return register


def text(name: str, body: str, head: str = HEAD) -> None:
    """Register a model in ONNX's text form."""

    @put(name)
    def write(path: Path) -> None:
        path.write_bytes(onnx.parser.parse_model(head + body).SerializeToString())


def data(name: str, content: bytes) -> None:
    put(name)(lambda path: path.write_bytes(content) and None)


def instead(function: Put) -> Put:
    """What was at the path goes first."""

    def write(path: Path) -> None:
        path.unlink(missing_ok=True)
        function(path)

    return write


# ---- not a file, or not a model ----------------------------------------------------------------------------

_GOOD = make_model().SerializeToString()
data("empty", b"")
data("words", b"neither this nor that\n" * 20)
data("zeros", bytes(4096))
data("ones", b"\xff" * 4096)
data("ort-format", b"\x18\0\0\0ORTM" + bytes(64))
data("length-of-2-gb", b"\x3a\xff\xff\xff\xff\x07" + b"x" * 100)
data("deep-protobuf", b"")  # replaced below
for _cut in (1, 7, len(_GOOD) // 3, len(_GOOD) // 2, len(_GOOD) - 1):
    data(f"cut-at-{_cut}", _GOOD[:_cut])
data("twice", _GOOD + _GOOD)
data("trailing", _GOOD + b"\x0a\xff")


def _nested(levels: int) -> bytes:
    """A graph in a graph in a graph, as bytes: the parser would recurse, making it by messages would too."""

    def field(number: int, body: bytes) -> bytes:
        size, length = b"", len(body)
        while length > 127:
            size, length = size + bytes([length & 127 | 128]), length >> 7
        return bytes([number << 3 | 2]) + size + bytes([length]) + body

    graph = b""
    for _ in range(levels):
        attribute = field(1, b"body") + field(6, graph) + b"\xa0\x01\x05"
        graph = field(1, field(5, attribute) + field(4, b"Loop"))
    return b"\x08\x0a" + field(7, graph) + field(8, b"\x10\x15")


MODELS["deep-protobuf"] = lambda path: path.write_bytes(_nested(3000)) and None
MODELS["deep-protobuf-40"] = lambda path: path.write_bytes(_nested(40)) and None


@put("fifo")
@instead
def _(path: Path) -> None:
    os.mkfifo(path)


@put("folder")
@instead
def _(path: Path) -> None:
    path.mkdir()


@put("endless-device")
@instead
def _(path: Path) -> None:
    path.symlink_to("/dev/zero")


@put("link-to-itself")
@instead
def _(path: Path) -> None:
    path.symlink_to(path.name)


@put("dangling-link")
@instead
def _(path: Path) -> None:
    path.symlink_to("nowhere")


@put("sparse-file")
def _(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(3 << 30)


# ---- names -------------------------------------------------------------------------------------------------


def rename(model: ModelProto, old: str, new: str) -> None:
    """Rename a value everywhere."""
    graph = model.graph
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in [*graph.input, *graph.output, *graph.initializer]:
        if value.name == old:
            value.name = new


for _old, _what in {"x": "input", "scores": "output", "w1": "weight", "a": "value"}.items():
    for _name, _new in {
        "control": CONTROL,
        "nul": "a\0b",
        "path": "../../../tmp/evil",
        "long": "n" * 100_000,
        "markup": "[bold]</script><script>alert(1)</script>",
        "format": "{0.__class__}%s%n{name!r}",
        "empty": "",
        "surrogate-like": "\ufffe\uffff",
    }.items():
        change(f"{_what}-named-{_name}")(lambda model, old=_old, new=_new: rename(model, old, new))
    for _new in (
        "lazy_reset_grad", "w1_grad.accumulation.buffer", "w1_grad.accumulation.out", "w1.next", "__metadata__",
        "labels", "loss", "onward.seed", "learning_rate", "step",
    ):  # fmt: skip
        change(f"{_what}-named-{_new}")(lambda model, old=_old, new=_new: rename(model, old, new))


@change("nodes-named-by-control-characters")
def _(model: ModelProto) -> None:
    for node in model.graph.node:
        node.name = CONTROL
    model.graph.name = model.producer_name = model.doc_string = model.domain = CONTROL


@put("names-not-utf-8")
def _(path: Path) -> None:
    model = make_model()
    rename(model, "w1", "QQQQ")
    path.write_bytes(model.SerializeToString().replace(b"QQQQ", b"\xff\xfe\xfdQ"))


@put("metadata-not-utf-8")
def _(path: Path) -> None:
    model = make_model()
    model.metadata_props.add(key="QQQQ", value="QQQQ")
    path.write_bytes(model.SerializeToString().replace(b"QQQQ", b"\xff\xfe\xfdQ"))


change("two-nodes-of-one-output")(lambda model: model.graph.node.append(model.graph.node[0]))
change("two-initializers-of-one-name")(
    lambda model: model.graph.initializer.append(model.graph.initializer[0])
)
change("two-inputs-of-one-name")(lambda model: model.graph.input.append(model.graph.input[0]))
change("two-outputs-of-one-name")(lambda model: model.graph.output.append(model.graph.output[0]))
change("input-that-nothing-reads")(
    lambda model: model.graph.input.append(helper.make_tensor_value_info("unread", 1, [3]))
)
change("output-that-nothing-makes")(
    lambda model: model.graph.output.append(helper.make_tensor_value_info("nowhere", 1, [3]))
)
change("output-is-an-input")(
    lambda model: model.graph.output.append(helper.make_tensor_value_info("x", 1, ["batch", 4]))
)
change("output-is-a-weight")(
    lambda model: model.graph.output.append(helper.make_tensor_value_info("w1", 1, [16, 4]))
)
change("weight-is-an-input-too")(
    lambda model: model.graph.input.append(helper.make_tensor_value_info("w1", 1, [16, 4]))
)

# ---- structure ---------------------------------------------------------------------------------------------

change("cycle")(lambda model: model.graph.node[0].input.__setitem__(0, "scores"))
change("node-reads-itself")(lambda model: model.graph.node[1].input.__setitem__(0, "a"))
change("nodes-in-reverse")(lambda model: reverse(model.graph.node))
change("node-without-inputs")(lambda model: model.graph.node[0].ClearField("input"))
change("node-without-outputs")(lambda model: model.graph.node[1].ClearField("output"))
change("too-many-inputs")(lambda model: model.graph.node[0].input.extend(["x"] * 9))
change("input-left-out")(lambda model: model.graph.node[0].input.__setitem__(1, ""))
change("reads-what-is-not-there")(lambda model: model.graph.node[0].input.__setitem__(1, "nothing"))
change("no-graph")(lambda model: model.ClearField("graph"))
change("no-nodes")(lambda model: model.graph.ClearField("node"))
change("no-outputs")(lambda model: model.graph.ClearField("output"))
change("no-inputs")(lambda model: model.graph.ClearField("input"))
change("no-opset")(lambda model: model.ClearField("opset_import"))
change("opset-twice")(lambda model: model.opset_import.append(model.opset_import[0]))
for _version in (0, -5, 1, 6, 99, 2**60):
    change(f"opset-{_version}")(lambda model, v=_version: setattr(model.opset_import[0], "version", v))
for _version in (0, -1, 2, 99, 2**40):
    change(f"ir-version-{_version}")(lambda model, v=_version: setattr(model, "ir_version", v))
change("operator-without-name")(lambda model: setattr(model.graph.node[1], "op_type", ""))
change("unknown-operator")(lambda model: setattr(model.graph.node[1], "op_type", "Reluu"))
change("operator-of-control-characters")(lambda model: setattr(model.graph.node[1], "op_type", CONTROL))
change("domain-not-imported")(lambda model: setattr(model.graph.node[1], "domain", "evil.domain"))


@change("domain-imported")
def _(model: ModelProto) -> None:
    model.graph.node[1].domain = "evil.domain"
    model.opset_import.add(domain="evil.domain", version=1)


@change("training-operators")
def _(model: ModelProto) -> None:
    model.graph.node[1].op_type, model.graph.node[1].domain = "SoftmaxCrossEntropyGrad", "com.microsoft"
    model.opset_import.add(domain="com.microsoft", version=1)


def reverse(nodes: Any) -> None:
    kept = list(nodes)[::-1]
    del nodes[:]
    nodes.extend(kept)


@change("attribute-of-another-type")
def _(model: ModelProto) -> None:
    model.graph.node[0].attribute[0].type = AttributeProto.STRING
    model.graph.node[0].attribute[0].s = b"1"


@change("attribute-without-type")
def _(model: ModelProto) -> None:
    model.graph.node[0].attribute[0].type = AttributeProto.UNDEFINED


change("attribute-twice")(
    lambda model: model.graph.node[0].attribute.append(model.graph.node[0].attribute[0])
)
change("attribute-unknown")(
    lambda model: model.graph.node[0].attribute.append(helper.make_attribute("evil", 1))
)
change("attribute-by-reference")(
    lambda model: setattr(model.graph.node[0].attribute[0], "ref_attr_name", "nothing")
)
change("training-info")(lambda model: model.training_info.add().algorithm.CopyFrom(model.graph))
change("quantization-annotation")(lambda model: model.graph.quantization_annotation.add(tensor_name=CONTROL))

# ---- declared shapes and types -----------------------------------------------------------------------------


def dim(model: ModelProto, index: int = 0) -> Any:
    return model.graph.input[0].type.tensor_type.shape.dim[index]


for _size in (0, -3, 2**31, 2**61, 2**63 - 1):
    change(f"batch-of-{_size}")(lambda model, size=_size: setattr(dim(model), "dim_value", size))
change("features-of-5")(lambda model: setattr(dim(model, 1), "dim_value", 5))
change("dim-named-by-control-characters")(lambda model: setattr(dim(model), "dim_param", CONTROL))
change("dims-of-one-name")(lambda model: setattr(dim(model, 1), "dim_param", "batch"))
change("a-thousand-dims")(
    lambda model: model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", 1, [1] * 1000))
)
for _kind in (0, 7, 8, 9, 10, 14, 16, 22, 99, -1):
    change(f"input-of-type-{_kind}")(
        lambda model, kind=_kind: setattr(model.graph.input[0].type.tensor_type, "elem_type", kind)
    )
    change(f"output-of-type-{_kind}")(
        lambda model, kind=_kind: setattr(model.graph.output[0].type.tensor_type, "elem_type", kind)
    )
change("input-without-type")(lambda model: model.graph.input[0].ClearField("type"))
change("output-without-type")(lambda model: model.graph.output[0].ClearField("type"))
change("output-of-another-shape")(
    lambda model: model.graph.output[0].CopyFrom(helper.make_tensor_value_info("scores", 1, [7, 7, 7]))
)
change("input-is-a-sequence")(
    lambda model: model.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", 1, None))
)


@change("input-is-a-map")
def _(model: ModelProto) -> None:
    kind = model.graph.input[0].type
    kind.map_type.key_type = TensorProto.STRING
    kind.map_type.value_type.tensor_type.elem_type = 1


@change("value-declared-otherwise")
def _(model: ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.INT64, [99, 99]))


# ---- data of tensors ---------------------------------------------------------------------------------------


def weight(model: ModelProto) -> TensorProto:
    return model.graph.initializer[0]


change("weight-cut")(lambda model: setattr(weight(model), "raw_data", weight(model).raw_data[:-4]))
change("weight-too-long")(lambda model: setattr(weight(model), "raw_data", weight(model).raw_data + bytes(4)))
change("weight-without-data")(lambda model: weight(model).ClearField("raw_data"))
change("weight-in-two-fields")(lambda model: weight(model).float_data.append(1.0))
change("weight-of-negative-size")(lambda model: weight(model).dims.__setitem__(0, -16))
change("weight-of-huge-size")(lambda model: weight(model).dims.__setitem__(0, 2**61))
change("weight-of-another-shape")(lambda model: weight(model).dims.__setitem__(slice(None), [4, 16]))
change("weight-of-no-type")(lambda model: setattr(weight(model), "data_type", 0))
change("weight-of-type-99")(lambda model: setattr(weight(model), "data_type", 99))
change("weight-of-int32")(lambda model: setattr(weight(model), "data_type", TensorProto.INT32))
change("weight-in-segments")(lambda model: setattr(weight(model).segment, "end", 9))


@change("weight-of-double")
def _(model: ModelProto) -> None:
    array = numpy_helper.to_array(weight(model)).astype(np.float64)
    weight(model).CopyFrom(numpy_helper.from_array(array, "w1"))


@change("weight-of-text")
def _(model: ModelProto) -> None:
    weight(model).CopyFrom(helper.make_tensor("w1", TensorProto.STRING, [16, 4], [b"\xff\x1b"] * 64))


@change("weight-in-float-data-too-short")
def _(model: ModelProto) -> None:
    weight(model).ClearField("raw_data")
    weight(model).float_data.extend([1.0] * 63)


@change("weights-not-finite")
def _(model: ModelProto) -> None:
    array = numpy_helper.to_array(weight(model)) * np.nan
    weight(model).CopyFrom(numpy_helper.from_array(array, "w1"))


@change("weights-enormous")
def _(model: ModelProto) -> None:
    array = np.full((16, 4), 3e38, np.float32)
    weight(model).CopyFrom(numpy_helper.from_array(array, "w1"))


def external(name: str, prepare: Callable[[Path], object] | None = None, **entries: str) -> None:
    """The first weight in a file beside the model; `prepare` gets the model's folder."""

    @put(f"external-{name}")
    def write(path: Path) -> None:
        model = good(path)
        if not model.graph.initializer:
            raise NotHere("the model has no weights of its own")
        tensor = weight(model)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        if prepare is not None:
            prepare(path.parent)
        path.write_bytes(model.SerializeToString())


def hold(name: str, size: int = 256) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(bytes(size))


external("absolute", location="/etc/passwd")
external("above", location="../../../../../../etc/passwd")
external("above-inside", hold("w.bin"), location="sub/../w.bin")
external("backslashes", location="..\\..\\etc\\passwd")
external("nul", location="w.bin\0.txt")
external("control", location=CONTROL)
external("overlong", location="w" * 5000)
external("empty-location", location="")
external("no-location", offset="0")
external("missing", location="nowhere.bin")
external("folder", lambda folder: (folder / "w.bin").mkdir(), location="w.bin")
external("dot", location=".")
external("fifo", lambda folder: os.mkfifo(folder / "w.bin"), location="w.bin")
external("device", location="/dev/zero", length="256")
external("link-out", lambda folder: (folder / "w.bin").symlink_to("/etc/passwd"), location="w.bin")
external("link-to-device", lambda folder: (folder / "w.bin").symlink_to("/dev/zero"), location="w.bin")
external("hard-link", lambda folder: linked(folder), location="w.bin")
external("itself", location="model.onnx", length="256")
external("too-short", hold("w.bin", 255), location="w.bin")
external("negative-offset", hold("w.bin"), location="w.bin", offset="-1")
external("huge-offset", hold("w.bin"), location="w.bin", offset=str(2**63))
external("huge-length", hold("w.bin"), location="w.bin", length="9" * 40)
external("length-not-a-number", hold("w.bin"), location="w.bin", length="0x100")
external("length-of-other-digits", hold("w.bin"), location="w.bin", length="٢٥٦")
external("unknown-key", hold("w.bin"), location="w.bin", evil="1")
external("checksum", hold("w.bin"), location="w.bin", checksum="0" * 40)
external(
    "sparse-file",
    lambda folder: os.truncate(made(folder / "w.bin"), 3 << 30),
    location="w.bin",
    length="256",
)


def made(path: Path) -> Path:
    path.touch()
    return path


def linked(folder: Path) -> None:
    outside = folder.parent / "outside-of-the-model"
    outside.write_bytes(bytes(256))
    os.link(outside, folder / "w.bin")


@put("views-over-one-file")
def _(path: Path) -> None:
    """256 weights, each the same 40 MB."""
    model = make_model()
    with open(path.parent / "w.bin", "wb") as file:
        file.truncate(40 << 20)
    for index in range(256):
        tensor = model.graph.initializer.add(name=f"v{index}", data_type=1, dims=[10 << 20])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
    path.write_bytes(model.SerializeToString())


def sparse(name: str, dims: list[int], values: int = 1, indices: Any = (0,)) -> None:
    @change(f"sparse-{name}")
    def _(model: ModelProto) -> None:
        entry = model.graph.sparse_initializer.add(dims=dims)
        entry.values.CopyFrom(numpy_helper.from_array(np.ones(values, np.float32), "s"))
        entry.indices.CopyFrom(numpy_helper.from_array(np.asarray(indices, np.int64), "i"))


sparse("fits", [3, 3])
sparse("of-8-gb", [1 << 31])
sparse("of-huge-size", [1 << 40, 1 << 40])
sparse("index-outside", [3, 3], 1, [9])
sparse("index-negative", [3, 3], 1, [-1])
sparse("indices-too-few", [3, 3], 3, [0])
sparse("indices-twice", [3, 3], 2, [0, 0])
sparse("indices-of-three-axes", [3, 3], 1, [[0, 0, 0]])
sparse("negative-dim", [-3, 3])

# ---- small files, large work -------------------------------------------------------------------------------

text("functions-double", "g (float[2] x) => (float[2] y) { y = f.F60(x) }" + "".join(
    f'<domain: "f", opset_import: ["": 21, "f": 1]> F{i} (x) => (y) {{ a = {f"f.F{i - 1}" if i else "Neg"}(x)'
    f' b = {f"f.F{i - 1}" if i else "Neg"}(x) y = Add(a, b) }}' for i in range(61)))  # fmt: skip
text("functions-double-within-nesting", "g (float[2] x) => (float[2] y) { y = f.F25(x) }" + "".join(
    f'<domain: "f", opset_import: ["": 21, "f": 1]> F{i} (x) => (y) {{ a = {f"f.F{i - 1}" if i else "Neg"}(x)'
    f' b = {f"f.F{i - 1}" if i else "Neg"}(x) y = Add(a, b) }}' for i in range(26)))  # fmt: skip
text("function-calls-itself", "g (float[2] x) => (float[2] y) { y = f.F(x) }"
     '<domain: "f", opset_import: ["": 21, "f": 1]> F (x) => (y) { y = f.F(x) }')  # fmt: skip
text("functions-call-each-other", "g (float[2] x) => (float[2] y) { y = f.F(x) }"
     '<domain: "f", opset_import: ["": 21, "f": 1]> F (x) => (y) { y = f.G(x) }'
     '<domain: "f", opset_import: ["": 21, "f": 1]> G (x) => (y) { y = f.F(x) }')  # fmt: skip
text("function-takes-the-place-of-an-operator", "g (float[2] x) => (float[2] y) <float[2] w={1,2}> {"
     " a = Mul(x, w) y = Neg(a) }"
     '<domain: "", opset_import: ["": 21]> Neg (x) => (y) { y = Exp(x) }')  # fmt: skip
text("function-with-too-few-inputs", "g (float[2] x) => (float[2] y) <float[2] w={1,2}> { a = Mul(x, w) y = f.F(a) }"
     '<domain: "f", opset_import: ["": 21]> F (x, z) => (y) { y = Add(x, z) }')  # fmt: skip
text("self-concats", "g (float[N] x) => (float[A] y) <float[2] a0={1,2}> {"
     + "".join(f" a{i + 1} = Concat<axis=0>(a{i}, a{i})" for i in range(34)) + " y = Mul(a34, x) }")  # fmt: skip
text("self-concats-of-the-input", "g (float[2] a0) => (float[A] y) <float[1] w={1}> {"
     + "".join(f" a{i + 1} = Concat<axis=0>(a{i}, a{i})" for i in range(40)) + " y = Mul(a40, w) }")  # fmt: skip
text("chain-of-20000", "g (float[2] a0) => (float[2] y) <float[2] w={1,2}> {"
     + "".join(f" a{i + 1} = Sin(a{i})" for i in range(20000)) + " y = Mul(a20000, w) }")  # fmt: skip
_BODY = "<body = b (int64 i, bool ci, float[K] a) => (bool co, float[L] o) {{ co = Identity(ci) o = {0} }}>"


def loop(name: str, count: str, body: str, declared: str = "float[A]") -> None:
    text(
        f"loop-{name}",
        f"g (float[2] x) => ({declared} y) <int64 n = {{{count}}}, bool c = {{1}}, float[2] w = {{1, 2}}> {{"
        f" k = Mul(x, w) y = Loop(n, c, k) {_BODY.format(body)} }}",
    )


loop("without-end", str(2**62), "Neg(a)", "float[2]")
loop("that-doubles", "60", "Concat<axis=0>(a, a)")
loop("of-negative-count", "-5", "Neg(a)", "float[2]")
loop("that-grows-slowly", str(2**40), "Concat<axis=0>(a, w)")
text("loop-that-gathers", "g (float[2] x) => (float[A, B] y) <int64 n = {4611686018427387904}, bool c = {1}, "
     "float[2] w = {1, 2}> { k = Mul(x, w) y = Loop(n, c) <body = b (int64 i, bool ci) => (bool co, float[2] o) "
     "{ co = Identity(ci) o = Neg(k) }> }")  # fmt: skip
for _name, _line in {
    "expand": "s = Constant<value = int64[2] {300000, 300000}>() e = Expand(k, s) y = ReduceSum<keepdims=0>(e)",
    "constant-of-shape": "s = Constant<value = int64[1] {100000000000}>() c = ConstantOfShape(s) "
    "y = ReduceSum<keepdims=0>(c)",
    "tile": "s = Constant<value = int64[1] {10000000000}>() c = Tile(k, s) y = ReduceSum<keepdims=0>(c)",
    "tile-of-a-constant": "s = Constant<value = int64[1] {10000000000}>() c = Tile(w, s) "
    "y = ReduceSum<keepdims=0>(c)",
    "range": "a = Constant<value_float = 0.0>() b = Constant<value_float = 1e12>() d = Constant<value_float = 1.0>() "
    "c = Range(a, b, d) y = ReduceMax<keepdims=0>(c)",
    "pad": "p = Constant<value = int64[2] {0, 10000000000}>() y = Pad(k, p)",
    "one-hot": "i = Constant<value = int64[1] {1}>() d = Constant<value = int64 {100000000000}>() y = OneHot(i, d, w)",
    "random": "r = RandomNormal<shape=[100000, 100000]>() z = ReduceSum<keepdims=0>(r) y = Add(k, z)",
    "split": "y = Split<num_outputs=1000000000>(k)",
    "trilu": "n = Constant<value = int64 {9223372036854775807}>() m = Unsqueeze(k, n) y = Trilu(m, n)",
    "resize": "s = Constant<value = int64[1] {1000000000000}>() y = Resize(k, , , s)",
    "top-k": "n = Constant<value = int64[1] {9223372036854775807}>() y, z = TopK(k, n)",
    "reshape-to-huge": "s = Constant<value = int64[2] {9223372036854775807, 9223372036854775807}>() y = Reshape(k, s)",
    "reshape-twice-unknown": "s = Constant<value = int64[2] {-1, -1}>() y = Reshape(k, s)",
    "gather-outside": "i = Constant<value = int64[2] {5, -9}>() y = Gather(k, i)",
    "transpose-twice-the-same": "y = Transpose<perm=[0, 0]>(k)",
    "cast-to-77": "y = Cast<to=77>(k)",
    "slice-step-0": "z = Constant<value = int64[1] {0}>() e = Constant<value = int64[1] {9}>() "
    "y = Slice(k, z, e, z, z)",
    "reduce-axis-99": "i = Constant<value = int64[1] {99}>() y = ReduceSum(k, i)",
    "einsum-of-nothing": 'y = Einsum<equation="">(k)',
    "einsum-bad": 'y = Einsum<equation="ab,..->zz!">(k)',
    "mod-by-zero": "i = Cast<to=7>(k) z = Constant<value = int64[1] {0}>() m = Mod(i, z) y = Cast<to=1>(m)",
    "div-by-zero": "i = Cast<to=7>(k) z = Constant<value = int64[1] {0}>() m = Div(i, z) y = Cast<to=1>(m)",
    "string-normalizer": "t = Cast<to=8>(k) y = StringNormalizer(t)",
    "regex": 't = Cast<to=8>(k) m = RegexFullMatch<pattern="(a*)*(a*)*(a*)*b{999}{999}{999}">(t) y = Cast<to=1>(m)',
    "sequence-at-99": "s = SequenceConstruct(k, k) i = Constant<value = int64 {99}>() y = SequenceAt(s, i)",
    "if-of-two-types": "c = Constant<value = bool {1}>() y = If(c) <then_branch = t () => (float[2] p) { p = Neg(k) }, "
    "else_branch = e () => (int64[2] q) { q = Cast<to=7>(k) }>",
    "scan-of-none": "y = Scan<num_scan_inputs=0, body = b (float[2] i) => (float[2] o) { o = Neg(i) }>(k)",
}.items():  # fmt: skip
    text(f"bomb-{_name}", f"g (float[2] x) => (float[A] y) <float[2] w={{1,2}}> {{ k = Mul(x, w) {_line} }}")
for _name, _attributes in {
    "kernel": "kernel_shape=[99999999, 99999999]", "pads": "pads=[1000000, 1000000, 1000000, 1000000]",
    "negative-pads": "pads=[-9, -9, -9, -9]", "group-0": "group=0", "strides-0": "strides=[0, 0]",
    "dilations": "dilations=[2147483647, 2147483647]", "auto-pad": 'auto_pad="sideways"',
}.items():  # fmt: skip
    text(f"conv-{_name}", "g (float[1, 1, 4, 4] x) => (float[A, B, C, D] y) <float[1, 1, 2, 2] w={1, 2, 3, 4}> "
         f"{{ y = Conv<{_attributes}>(x, w) }}")  # fmt: skip
text("lstm-hidden-size", "g (float[2, 1, 2] x) => (float[A, B, C, D] y) <float[1, 8, 2] w={1, 2, 3, 4, 5, 6, 7, 8, 9,"
     " 10, 11, 12, 13, 14, 15, 16}> { y = LSTM<hidden_size=99999999, direction=\"sideways\">(x, w, w) }")  # fmt: skip


@put("ifs-inside-ifs")
def _(path: Path) -> None:
    """Each level names the one below twice: 4,000 nodes, 12 levels."""
    inner: onnx.GraphProto | None = None
    for level in range(11):
        nodes = [helper.make_node("Identity", ["x"], [f"o{level}"])]
        if inner is not None:
            nodes = [helper.make_node("If", ["c"], [f"o{level}"], then_branch=inner, else_branch=inner)]
        inner = helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info(f"o{level}", 1, [2])])
    top = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)], "top",
        [helper.make_tensor_value_info("x", 1, [2]), helper.make_tensor_value_info("c", 9, [])],
        [helper.make_tensor_value_info("y", 1, [2])],
    )  # fmt: skip
    path.write_bytes(helper.make_model(top, opset_imports=[helper.make_opsetid("", 21)]).SerializeToString())


@put("three-thousand-inputs")
def _(path: Path) -> None:
    names = [f"i{index}" for index in range(3000)]
    graph = helper.make_graph(
        [helper.make_node("Sum", names, ["y"])], "g",
        [helper.make_tensor_value_info(name, 1, [2]) for name in names],
        [helper.make_tensor_value_info("y", 1, [2])],
    )  # fmt: skip
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]).SerializeToString()
    )


# ---- metadata that Onward reads ----------------------------------------------------------------------------

KEYS = [value for value in vars(contract).values() if isinstance(value, str) and value.startswith("onward.")]
VALUES = {
    "nothing": "", "null": "null", "number": "1e999", "list": "[[]]", "deep": "[" * 100_000, "table": '{"kind": 3}',
    "control": f'["{CONTROL!r}"]', "digits": "9" * 5000, "surrogate": '"\\ud800"',
}  # fmt: skip


def describe(model: ModelProto, key: str, value: str) -> None:
    """Set a metadata entry."""
    for entry in [entry for entry in model.metadata_props if entry.key == key]:
        model.metadata_props.remove(entry)
    model.metadata_props.add(key=key, value=value)


for _index, _key in enumerate(KEYS):
    for _name, _value in [*VALUES.items(), *VALUES.items()][_index % len(VALUES) :][
        :3
    ]:  # each value with some key
        change(f"{_key}-is-{_name}")(lambda model, key=_key, value=_value: describe(model, key, value))
change("metadata-twice")(lambda model: [model.metadata_props.add(key="a", value="b") for _ in range(2)])
change("metadata-named-by-control-characters")(
    lambda model: model.metadata_props.add(key=CONTROL, value=CONTROL)
)
