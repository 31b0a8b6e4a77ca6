"""The gate: what may enter, and what is said of the rest."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.errors import ModelError
from onward.graph.dialect.normalize import normalize
from onward.graph.load import load_model

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX file kinds")


def external(
    dtype: int = TensorProto.FLOAT, dims: tuple[int, ...] = (3, 4), **entries: str
) -> onnx.TensorProto:
    """A reference to external data; `twice` repeats the location."""
    tensor = TensorProto(name="w", data_type=dtype, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key.removesuffix("_"), value=value)
    return tensor


def model_with(tensor: onnx.TensorProto) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        initializer=[tensor],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory `models` with good data, and a secret beside it."""
    models = tmp_path / "models"
    (models / "sub").mkdir(parents=True)
    (models / "w.bin").write_bytes(WEIGHT.tobytes())
    (models / "sub" / "w.bin").write_bytes(b"\0" * 16 + WEIGHT.tobytes() + b"\0" * 4)
    (tmp_path / "secret.bin").write_bytes(WEIGHT.tobytes())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "w.bin").write_bytes(WEIGHT.tobytes())
    return models


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def unix_socket(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # a socket's path may not be long
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("sock")
    finally:
        os.chdir(here)


HOSTILE: dict[str, tuple[onnx.TensorProto, Callable[[Path], object] | None]] = {
    "parent": (external(location="../secret.bin"), None),
    "parent inside": (external(location="sub/../../secret.bin"), None),
    "parent that returns": (external(location="../models/w.bin"), None),
    "parent with backslashes": (external(location="..\\secret.bin"), None),
    "absolute": (external(location="/etc/passwd"), None),
    "drive": (external(location="C:\\secret.bin"), None),
    "network share": (external(location="\\\\host\\share\\w.bin"), None),
    "empty location": (external(location=""), None),
    "no location": (external(offset="0"), None),
    "dot": (external(location="."), None),
    "NUL": (external(location="w.bin\0.txt"), None),
    "missing": (external(location="nothing.bin"), None),
    "directory": (external(location="sub"), None),
    "symlink to a file": (
        external(location="link.bin"),
        lambda folder: (folder / "link.bin").symlink_to(folder.parent / "secret.bin"),
    ),
    "symlink inside": (
        external(location="link.bin"),
        lambda folder: (folder / "link.bin").symlink_to(folder / "w.bin"),
    ),
    "symlink to a directory": (
        external(location="away/w.bin"),
        lambda folder: (folder / "away").symlink_to(folder.parent / "elsewhere"),
    ),
    "symlink to a device": (
        external(location="zero"),
        lambda folder: (folder / "zero").symlink_to("/dev/zero"),
    ),
    "hardlink": (
        external(location="hard.bin"),
        lambda folder: os.link(folder.parent / "secret.bin", folder / "hard.bin"),
    ),
    "fifo": (external(location="pipe"), fifo),
    "socket": (external(location="sock"), unix_socket),
    "negative offset": (external(location="w.bin", offset="-4", length="48"), None),
    "offset past the end": (external(location="w.bin", offset="4096", length="48"), None),
    "offset that overflows": (external(location="w.bin", offset=str(2**64 - 8), length="48"), None),
    "offset that is no number": (external(location="w.bin", offset="0x10", length="48"), None),
    "length past the end": (external(dims=(3, 400), location="w.bin", offset="0", length="4800"), None),
    "length too short": (external(location="w.bin", offset="0", length="4"), None),
    "file longer than the tensor": (external(dims=(1, 4), location="w.bin"), None),
    "unknown key": (external(location="w.bin", run="true"), None),
    "key given twice": (external(location="w.bin", location_="../secret.bin"), None),
    "negative dimension": (external(dims=(-3, -4), location="w.bin"), None),
    "shape that overflows": (external(dims=(2**62, 2**62), location="w.bin"), None),
    "strings": (external(dtype=TensorProto.STRING, location="w.bin"), None),
}


@POSIX
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_external_data_is_refused(name: str, folder: Path) -> None:
    tensor, prepare = HOSTILE[name]
    if prepare is not None:
        prepare(folder)
    model = model_with(tensor)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for attempt in (
        lambda: load_model(path),
        lambda: load_model(model, base_dir=folder),
        lambda: load_model(model.SerializeToString(), base_dir=str(folder)),
    ):
        with pytest.raises(ModelError, match="'w'"):
            attempt()


def test_there_are_at_least_the_required_hostile_cases() -> None:
    assert len(HOSTILE) >= 26


@pytest.mark.parametrize(
    "tensor",
    [external(location="w.bin"), external(location="sub/w.bin", offset="16", length="48")],
    ids=["whole file", "part of a file below"],
)
def test_benign_external_data_loads_and_stays_on_disk(tensor: onnx.TensorProto, folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(model_with(tensor).SerializeToString())
    held = load_model(path).graph.initializers["w"].const_value
    assert isinstance(held, ir.ExternalTensor)
    np.testing.assert_array_equal(held.numpy(), WEIGHT)


@pytest.mark.parametrize("where", ["constant", "branch", "function", "ir model"])
def test_references_are_found_wherever_a_model_holds_tensors(where: str, folder: Path) -> None:
    evil = external(location="../secret.bin")
    model = model_with(numpy_helper.from_array(WEIGHT, "w"))
    held = helper.make_node("Constant", [], ["c"], value=evil)
    if where == "constant":
        model.graph.node.append(held)
    elif where == "branch":
        branch = helper.make_graph(
            [], "b", [], [helper.make_tensor_value_info("w", 1, None)], initializer=[evil]
        )
        model.graph.node.append(helper.make_node("If", ["t"], ["z"], then_branch=branch, else_branch=branch))
        model.graph.input.append(helper.make_tensor_value_info("t", TensorProto.BOOL, []))
    elif where == "function":
        model.functions.append(
            helper.make_function("f", "F", [], ["c"], [held], [helper.make_opsetid("", 21)])
        )
    source: onnx.ModelProto | ir.Model = model
    if where == "ir model":
        source = ir.from_proto(model)
        source.graph.initializers["w"].const_value = ir.ExternalTensor(
            "../secret.bin", 0, 48, ir.DataType.FLOAT, shape=ir.Shape((3, 4)), name="w", base_dir=folder
        )
    with pytest.raises(ModelError, match="external data of tensor 'w' is rejected"):
        load_model(source, base_dir=folder)


def test_a_proto_with_references_says_to_pass_the_path() -> None:
    with pytest.raises(ModelError, match="pass the path"):
        load_model(model_with(external(location="w.bin")))


GOOD = model_with(numpy_helper.from_array(WEIGHT, "w"))
FILES = {
    "empty": (b"", "empty"),
    "text": (b"hello, this is no model\n" * 10, "not an ONNX model"),
    "json": (b'{"irVersion": 8}', "not an ONNX model"),
    "garbage": (bytes(range(256)) * 8, "not an ONNX model"),
    "cut short": (GOOD.SerializeToString()[:-20], "cut short"),
    "zeros": (bytes(512), "not an ONNX model"),
    "pickle": (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07", "not an ONNX model"),
    "ORT format": (b"\x10\0\0\0ORTM" + bytes(100), "ORT format"),
    "a tensor": (numpy_helper.from_array(WEIGHT).SerializeToString(), "not an ONNX model"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_models_give_one_clear_error(name: str, tmp_path: Path) -> None:
    data, message = FILES[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        load_model(path)
    with pytest.raises(ModelError, match=message):
        load_model(data)


@pytest.mark.parametrize("cut", range(1, len(GOOD.SerializeToString()), 7))
def test_no_prefix_of_a_model_enters(cut: int) -> None:
    with pytest.raises(ModelError):
        load_model(GOOD.SerializeToString()[:cut])


@POSIX
def test_paths_that_are_no_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (tmp_path, "not a file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "x", "no model"),
    ]:
        with pytest.raises(ModelError, match=message):
            load_model(path)


@pytest.mark.parametrize("source", [None, 3, ["model.onnx"], GOOD.graph], ids=lambda s: type(s).__name__)
def test_other_types_are_refused_as_the_replaced_api_does(source: object) -> None:
    with pytest.raises(RuntimeError, match="Please pass in either a string or an ONNX ModelProto"):
        load_model(source)  # type: ignore[arg-type]


HEAD = '<ir_version: 10, opset_import: ["": 21]> '
INVALID = {
    "dangling": ("g (float[N] x) => (float[N] y) { y = Add(x, ghost) }", "'ghost', which nothing"),
    "output undefined": ("g (float[N] x) => (float[N] z) { y = Neg(x) }", "'z' is defined by nothing"),
    "defined twice": ("g (float[N] x) => (float[N] y) { y = Neg(x)  y = Abs(x) }", "'y' twice"),
    "input redefined": ("g (float[N] x) => (float[N] x) { x = Neg(x) }", "'x' twice"),
    "cycle": ("g (float[N] x) => (float[N] a) { a = Add(x, b)  b = Neg(a) }", "cycle"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_graphs_are_refused(name: str) -> None:
    text, message = INVALID[name]
    with pytest.raises(ModelError, match=message):
        load_model(onnx.parser.parse_model(HEAD + text))


def test_data_of_the_wrong_length_is_refused() -> None:
    model = model_with(numpy_helper.from_array(WEIGHT, "w"))
    model.graph.initializer[0].raw_data = b"1234"
    with pytest.raises(ModelError, match="holds 4 bytes"):
        load_model(model)


def test_nodes_out_of_order_are_sorted() -> None:
    text = HEAD + "g (float[N] x) => (float[N] y) { y = Neg(a)  a = Abs(x) }"
    assert [node.op_type for node in load_model(onnx.parser.parse_model(text)).graph] == ["Abs", "Neg"]


def test_the_callers_object_is_left_as_it_was() -> None:
    before = GOOD.SerializeToString(deterministic=True)
    changed = load_model(GOOD)
    changed.graph.inputs[0].name = "other"
    changed.graph.initializers["w"].const_value = ir.tensor(WEIGHT + 1)
    assert GOOD.SerializeToString(deterministic=True) == before
    source = ir.from_proto(GOOD)
    load_model(source).graph.inputs[0].name = "other"
    assert source.graph.inputs[0].name == "x"


def test_sparse_initializers_become_dense() -> None:
    dense = np.zeros((3, 4), np.float32)
    dense[1, 2] = 5
    model = model_with(numpy_helper.from_array(WEIGHT, "w"))
    del model.graph.initializer[:]
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(
            numpy_helper.from_array(np.array([5], np.float32), "w"),
            numpy_helper.from_array(np.array([6]), "i"),
            [3, 4],
        )
    )
    np.testing.assert_array_equal(load_model(model).graph.initializers["w"].const_value.numpy(), dense)


@POSIX
def test_models_over_two_gigabytes_load_by_path_without_being_read(folder: Path) -> None:
    with open(folder / "big.bin", "wb") as file:
        file.truncate(3 * 2**30)  # a sparse file: takes no space
    tensor = external(dims=(3, 2**28), location="big.bin", length=str(3 * 2**30))
    path = folder / "model.onnx"
    path.write_bytes(model_with(tensor).SerializeToString())
    held = load_model(path).graph.initializers["w"].const_value
    assert isinstance(held, ir.ExternalTensor) and held.nbytes == 3 * 2**30


def test_damaged_models_give_one_kind_of_error() -> None:
    text = """g (float[2, 3, 4] x, bool c) => (float[2, 3, 4] y) {
        s = Softmax<axis = 1>(x)  m = com.microsoft.FusedMatMul<transB = 1>(s, w)  b = ReduceSum<axes = [1]>(m)
        k = Constant<value_ints = [0, 0, 4]>()  q = Reshape(m, k)
        z = If(c)<then_branch = t () => (float[2, 3, 4] a) { a = Clip(q) },
                  else_branch = e () => (float[2, 3, 4] d) { u = Unsqueeze<axes = [0]>(q)  d = Squeeze<axes = [0]>(u) }>
        y = Add(z, b) }"""
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 12, "com.microsoft": 1]> ' + text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    data = model.SerializeToString()
    normalize(data)
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for place in random.integers(len(data), size=random.integers(1, 4)):
            damaged[place] = random.integers(256)
        try:
            normalize(bytes(damaged))
        except ModelError:
            refused += 1
    assert refused > 200


@POSIX
def test_models_over_two_gigabytes_enter_the_dialect_without_being_read(folder: Path) -> None:
    with open(folder / "big.bin", "wb") as file:
        file.truncate(3 * 2**30)  # a sparse file: takes no space
    model = model_with(external(dims=(3, 2**28), location="big.bin"))
    model.opset_import[0].version = 11
    model.graph.node.append(helper.make_node("ReduceSum", ["y"], ["z"], axes=[1]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N", 1]))
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    graph = normalize(path).graph
    assert isinstance(graph.initializers["w"].const_value, ir.ExternalTensor)
    assert [str(d) for d in graph[0].outputs[0].shape] == ["N", str(2**28)]
