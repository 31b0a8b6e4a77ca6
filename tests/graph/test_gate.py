"""Small models that ask for much, or that say one thing and hold another: refused, in little memory."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward import limits
from onward.errors import LimitError, ModelError
from onward.graph.gate import read_proto
from onward.graph.load import load_model

HEAD = '<ir_version: 10, opset_import: ["": 21, "f": 1]> '


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def chain(node: str, length: int, first: str = "c") -> onnx.ModelProto:
    """A constant, and `length` nodes of which each reads the one before."""
    lines = [f"v0 = {node.format(first, first)}"]
    lines += [f"v{i} = {node.format(f'v{i - 1}', f'v{i - 1}')}" for i in range(1, length)]
    return parsed(f"g (float[N] x) => (float[N] y) <float[1] c = {{1}}> {{ {' '.join(lines)} y = Neg(x) }}")


def calling(levels: int, calls: int) -> onnx.ModelProto:
    """Functions of which each calls the next one several times."""
    model = parsed("g (float[N] x) => (float[N] y) { y = f.F0(x) }")
    for level in range(levels):
        names = ["x", *(f"v{i}" for i in range(calls))]
        inner = f"F{level + 1}" if level < levels - 1 else "Neg"
        nodes = [
            helper.make_node(inner, [a], [b], domain="f" if inner[0] == "F" else "")
            for a, b in itertools.pairwise(names)
        ]
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
        model.functions.append(helper.make_function("f", f"F{level}", ["x"], [names[-1]], nodes, imports))
    return model


def sparse(dims: list[int], count: int = 1) -> onnx.ModelProto:
    """A model with sparse initializers of a few numbers."""
    model = parsed("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    for index in range(count):
        values = numpy_helper.from_array(np.ones(1, np.float32), f"s{index}")
        places = numpy_helper.from_array(np.zeros(1, np.int64), f"i{index}")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, dims))
    return model


def doubling_function() -> onnx.ModelProto:
    model = chain("f.Twice({})", 40)
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)]
    imports = [helper.make_opsetid("", 21)]
    model.functions.append(helper.make_function("f", "Twice", ["x"], ["y"], nodes, imports))
    return model


def backwards() -> onnx.ModelProto:
    model = chain("Concat<axis = 0>({}, {})", 36)
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def in_a_branch() -> onnx.ModelProto:
    model = parsed("g (float[N] x, bool c) => (float[N] y) { y = Neg(x) }")
    inner = chain("Concat<axis = 0>({}, {})", 36).graph
    branch = helper.make_graph(
        inner.node[:-1],
        "b",
        [],
        [helper.make_tensor_value_info("v35", 1, None)],
        initializer=inner.initializer,
    )
    branch.initializer[0].name = "cc"
    branch.node[0].input[:] = ["cc", "cc"]
    model.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch))
    return model


def nested(depth: int) -> onnx.ModelProto:
    text = "a = Neg(x)"
    for level in range(depth):
        text = (
            f"a = If(c)<then_branch = t{level} () => (float[N] a{level}) {{ a{level} = Neg(x) }}, "
            f"else_branch = e{level} () => (float[N] a) {{ {text} }}>"
        )
    return parsed(f"g (float[N] x, bool c) => (float[N] a) {{ {text} }}")


DEMANDING: dict[str, tuple[str, Callable[[], onnx.ModelProto]]] = {
    "functions that call each other twice": ("nodes", lambda: calling(30, 2)),
    "functions in many levels": ("nesting", lambda: calling(200, 1)),
    "bodies in many levels": ("nesting", lambda: nested(12)),
    "a constant that doubles": ("folded_bytes", lambda: chain("Concat<axis = 0>({}, {})", 34)),
    "a constant that doubles, nodes backwards": ("folded_bytes", backwards),
    "a constant that doubles, in a branch": ("folded_bytes", in_a_branch),
    "a constant that a function doubles": ("folded_bytes", doubling_function),
    "a constant that is expanded": (
        "folded_bytes",
        lambda: parsed(
            "g (float[N] x) => (float[N] y) <int64[2] n = {100000, 100000}, float[1] c = {1}>"
            "{ e = Expand(c, n) y = Neg(x) }"
        ),
    ),
    "a constant of a computed shape": (
        "folded_bytes",
        lambda: parsed(
            "g (float[N] x) => (float[N] y) <int64[1] n = {100000}>"
            "{ m = Mul(n, n) e = ConstantOfShape(m) y = Neg(x) }"
        ),
    ),
    "a range": (
        "folded_bytes",
        lambda: parsed(
            "g (float[N] x) => (float[N] y) <int64 a = {0}, int64 n = {1000000000000}, int64 d = {1}>"
            "{ e = Range(a, n, d) y = Neg(x) }"
        ),
    ),
    "an outer product": (
        "folded_bytes",
        lambda: parsed(
            "g (float[N] x) => (float[N] y) <int64[2] r = {50000, 1}, int64[2] s = {1, 50000}, float[1] c = {1}>"
            "{ a = Expand(c, r) b = Expand(c, s) e = Add(a, b) y = Neg(x) }"
        ),
    ),
    "a sparse tensor": ("dense_bytes", lambda: sparse([2**20, 2**20])),
    "many sparse tensors": ("dense_bytes", lambda: sparse([2**27], count=20)),
    "an input of a huge shape": (
        "value_bytes",
        lambda: parsed("g (float[1099511627776, 1024] x) => (float[N] y) { y = Neg(x) }"),
    ),
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An error where the test takes a gigabyte more than there is in use."""
    if sys.platform != "linux":
        yield
        return
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", DEMANDING)
def test_a_small_model_that_asks_for_much(name: str) -> None:
    limit, make = DEMANDING[name]
    model = make()
    assert model.ByteSize() < 100_000
    with limits.override(nesting=8) if name == "bodies in many levels" else limits.override():
        for source in (model, model.SerializeToString()):
            with pytest.raises(LimitError) as raised:
                read_proto(source)
            assert raised.value.limit == limit
            assert f"--limit {limit}={raised.value.asked}" in raised.value.hint
            assert f"onward.limits.override({limit}={raised.value.asked})" in str(raised.value)


def test_a_raised_limit_lets_it_in() -> None:
    model = chain("Concat<axis = 0>({}, {})", 12)
    with limits.override(folded_bytes=1000):
        with pytest.raises(LimitError, match="folded_bytes") as raised:
            load_model(model)
        with limits.override(folded_bytes=40_000):
            load_model(model)
    assert raised.value.asked <= 2000
    assert limits.current() == limits.Limits()


@pytest.mark.parametrize("values", [{"nodes": 0}, {"nodes": "many"}, {"nodes": True}, {"wheels": 3}])
def test_limits_that_are_none(values: dict) -> None:
    with pytest.raises(ValueError, match="limit"), limits.override(**values):
        pass


def test_views_over_one_file_count_each_time(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(2**20))
    model = parsed("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    for index in range(40):
        tensor = TensorProto(
            name=f"w{index}", data_type=TensorProto.FLOAT, dims=[2**18], data_location=TensorProto.EXTERNAL
        )
        tensor.external_data.add(key="location", value="w.bin")
        model.graph.initializer.append(tensor)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with limits.override(shared_bytes=40 * 2**20):
        load_model(path)
    with limits.override(shared_bytes=30 * 2**20), pytest.raises(LimitError, match="shared_bytes"):
        load_model(path)


def test_weights_that_are_cast_when_loaded_are_no_bomb() -> None:
    model = parsed("g (float[N, 512] x) => (float[N, 512] y) { f = Cast<to = 1>(w) y = MatMul(x, f) }")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((512, 512), np.float16), "w"))
    with limits.override(folded_bytes=1):
        load_model(model)


def test_functions_that_call_themselves() -> None:
    model = calling(2, 1)
    model.functions[1].node[0].op_type = "F0"
    model.functions[1].node[0].domain = "f"
    with pytest.raises(ModelError, match="calls itself"):
        read_proto(model)


# ---- data that is not what the shape says ------------------------------------------------------------


def with_tensor(**fields: object) -> onnx.ModelProto:
    model = parsed("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    tensor = TensorProto(name="w", **fields)  # type: ignore[arg-type]
    model.graph.initializer.append(tensor)
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {"data_type": 1, "dims": [3], "float_data": [1, 2]},
        {"data_type": 1, "dims": [3], "float_data": [1, 2, 3, 4]},
        {"data_type": 1, "dims": [3], "int32_data": [1, 2, 3]},
        {"data_type": 1, "dims": [3]},
        {"data_type": 1, "dims": [2], "float_data": [1, 2], "raw_data": bytes(8)},
        {"data_type": 7, "dims": [2, 2], "int64_data": [1, 2, 3]},
        {"data_type": 11, "dims": [1], "float_data": [1]},
        {"data_type": 10, "dims": [4], "int32_data": [1]},
        {"data_type": 8, "dims": [2], "string_data": [b"a"]},
        {"data_type": 8, "dims": [-2], "string_data": [b"a"]},
        {"data_type": 22, "dims": [4], "int32_data": [1, 2, 3, 4]},
        {"data_type": 14, "dims": [1], "float_data": [1]},
        {"data_type": 1, "dims": [2**40, 2**40]},
        {"data_type": 99, "dims": [1], "raw_data": b"1"},
        {"data_type": 0, "dims": [1], "raw_data": b"1"},
    ],
    ids=str,
)
def test_data_that_does_not_fit_its_shape(fields: dict) -> None:
    with pytest.raises(ModelError):
        read_proto(with_tensor(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"data_type": 1, "dims": [3], "float_data": [1, 2, 3]},
        {"data_type": 1, "dims": [], "float_data": [1]},
        {"data_type": 1, "dims": [0]},
        {"data_type": 10, "dims": [2], "int32_data": [1, 2]},
        {"data_type": 9, "dims": [2], "int32_data": [0, 1]},
        {"data_type": 8, "dims": [2], "string_data": [b"a", b"b"]},
        {"data_type": 14, "dims": [1], "float_data": [1, 2]},
        {"data_type": 22, "dims": [4], "int32_data": [1, 2]},
        {"data_type": 22, "dims": [3], "raw_data": b"12"},
        {"data_type": 13, "dims": [2], "uint64_data": [1, 2]},
    ],
    ids=str,
)
def test_data_in_each_field_that_onnx_has(fields: dict) -> None:
    read = read_proto(with_tensor(**fields))
    assert list(read.graph.initializer[0].dims) == fields["dims"]


@pytest.mark.parametrize(
    "index, dims", [([12], [3, 4]), ([-1], [3, 4]), ([[0, 4]], [3, 4]), ([[0, 0, 0]], [3, 4])]
)
def test_sparse_indices_outside_of_the_shape(index: list, dims: list[int]) -> None:
    model = sparse(dims)
    model.graph.sparse_initializer[0].indices.CopyFrom(
        numpy_helper.from_array(np.array(index, np.int64), "i")
    )
    with pytest.raises(ModelError, match="sparse tensor 's0'"):
        read_proto(model)


# ---- operators -------------------------------------------------------------------------------------------

OPERATORS = {
    "too few inputs": ("y = Add(x)", "has 1 inputs; the operator takes 2"),
    "too many inputs": ("y = Neg(x, x)", "has 2 inputs; the operator takes 1"),
    "an input left out": ("y = Add(, x)", "lacks its input 0"),
    "too many outputs": ("y, z = Neg(x)", "has 2 outputs; the operator takes 1"),
    "an unknown attribute": ("y = Neg<alpha = 1>(x)", "has the attribute 'alpha'"),
    "an attribute of another type": ("y = Softmax<axis = 1.5>(x)", "attribute 'axis' is FLOAT, not INT"),
    "a missing attribute": ("y = Concat(x, x)", "lacks the attribute 'axis'"),
    "a kernel that no image has": ("y = MaxPool<kernel_shape = [99999999, 99999999]>(x)", "limit nodes"),
    "more outputs than anyone reads": ("y = Split<num_outputs = 1000000000>(x)", "limit nodes"),
    "a domain that is not imported": ("y = com.acme.Thing(x)", "which the model does not import"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_nodes_that_are_not_as_onnx_says(name: str) -> None:
    text, message = OPERATORS[name]
    with pytest.raises(ModelError, match=message):
        read_proto(parsed(f"g (float[N] x) => (float[N] y) {{ {text} }}"))


def test_more_dimensions_than_an_array_can_have() -> None:
    model = parsed("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1] * 1000))
    with pytest.raises(ModelError, match="'x' has 1,000 dimensions, and 32 is the most"):
        read_proto(model)
    model = parsed("g (float[N] x) => (float[N] y) <float[1] c = {1}> { y = Add(x, c) }")
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([1] * 33)
    with pytest.raises(ModelError, match="'c' has 33 dimensions"):
        read_proto(model)


def test_an_attribute_that_refers_to_nothing() -> None:
    model = parsed("g (float[N, 2] x) => (float[N, 2] y) { y = Softmax<axis = 1>(x) }")
    model.graph.node[0].attribute[0].ref_attr_name = "nothing"
    with pytest.raises(ModelError, match="'axis' refers to 'nothing', which no function around it has"):
        read_proto(model)


def test_an_attribute_twice() -> None:
    model = parsed("g (float[N] x) => (float[N] y) { y = Softmax<axis = 0>(x) }")
    model.graph.node[0].attribute.append(model.graph.node[0].attribute[0])
    with pytest.raises(ModelError, match="an attribute twice"):
        read_proto(model)


def test_names_that_are_no_text() -> None:
    data = parsed("g (float[N] x) => (float[N] y) { y = Neg(x) }").SerializeToString()
    with pytest.raises(ModelError, match="not UTF-8"):
        read_proto(data.replace(b"Neg", b"N\xffg"))


def test_metadata_twice() -> None:
    model = parsed("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    for value in ("1", "2"):
        model.metadata_props.add(key="onward.role", value=value)
    with pytest.raises(ModelError, match="metadata key twice"):
        read_proto(model)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX devices")
def test_devices_and_sparse_files_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a regular file"):
        read_proto("/dev/zero")
    large = tmp_path / "large.onnx"
    with open(large, "wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(ModelError, match="more than 2 GB"):
        read_proto(large)
    with limits.override(model_bytes=10):
        large.write_bytes(bytes(11))
        with pytest.raises(LimitError, match="model_bytes"):
            read_proto(large)
