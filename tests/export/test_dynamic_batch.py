"""Models of a fixed batch size are opened for any: each sample as before, or a clear refusal."""

from __future__ import annotations

import io
import os

import numpy as np
import onnx
import onnx.backend.test
import onnx.parser
import onnxruntime as ort
import pytest

from onward.errors import ModelError, ParityError
from onward.export import dynamic_batch

torch = pytest.importorskip("torch")
nn = torch.nn


class VisionTransformer(nn.Module):
    """A class token joined to patches, and torch's own attention, which merges batch and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), y], 1)
        return self.head(self.layer(y)[:, 0])


class Recurrent(nn.Module):
    """Initial states are constants of the batch size; the second layer has the batch in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(4, 8, 2, bidirectional=True, batch_first=True)
        self.second = nn.GRU(16, 5)

    def forward(self, x):
        y, _ = self.first(x)
        y, _ = self.second(y.transpose(0, 1))
        return y[-1]


class Windows(nn.Module):
    """Windows of a picture become samples for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        b, c, h, w = x.shape
        x = x.permute(0, 2, 3, 1).reshape(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5)
        x = self.linear(x.reshape(-1, 16, c))
        return x.reshape(b, h // 4, w // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)


class Upsampled(nn.Module):
    """A resize to fixed sizes, two outputs, and a squeeze without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        y = nn.functional.interpolate(self.conv(x), size=(9, 11), mode="bilinear")
        return y.reshape(x.shape[0], -1), y


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.linear = nn.Linear(11, 3)

    def forward(self, tokens, x):
        return self.linear(torch.cat([self.table(tokens).mean(1), x], -1))


def exported(module: nn.Module, *shapes: tuple[int, ...], batch: int) -> onnx.ModelProto:
    torch.manual_seed(0)
    inputs = tuple(
        torch.randint(0, 2, (batch, *shape)) if len(shape) == 1 and len(shapes) > 1 and index == 0
        else torch.randn(batch, *shape)
        for index, shape in enumerate(shapes)
    )  # fmt: skip
    file = io.BytesIO()
    torch.onnx.export(module.eval(), inputs, file, opset_version=17, dynamo=False)
    return onnx.load_from_string(file.getvalue())


MODULES = {
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)),
        [(3, 8, 8)],
    ),
    "attention": (VisionTransformer, [(3, 16, 16)]),
    "recurrent": (Recurrent, [(6, 4)]),
    "windows": (Windows, [(3, 8, 8)]),
    "resize": (Upsampled, [(3, 5, 5)]),
    "two inputs": (TwoInputs, [(4,), (3,)]),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore")
def test_each_sample_of_a_larger_batch_is_as_before(name: str, batch: int) -> None:
    make, shapes = MODULES[name]
    model = exported(make(), *shapes, batch=batch)
    before = ort.InferenceSession(model.SerializeToString())
    after = ort.InferenceSession(dynamic_batch(model).SerializeToString())
    rng = np.random.default_rng(3)
    feeds = [
        {
            value.name: rng.integers(0, 9, value.shape)
            if "int" in value.type
            else rng.normal(size=value.shape).astype(np.float32)
            for value in before.get_inputs()
        }
        for _ in range(3)
    ]
    wanted = [before.run(None, feed) for feed in feeds]
    got = after.run(None, {key: np.concatenate([feed[key] for feed in feeds]) for key in feeds[0]})
    for parts, whole in zip(zip(*wanted), got):
        np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-4, atol=1e-5)
    assert all(value.shape[0] == "batch" for value in after.get_outputs())


@pytest.mark.parametrize("network", ["squeezenet", "shufflenet"])
def test_published_networks_that_list_weights_as_inputs(network: str) -> None:
    folder = os.path.join(os.path.dirname(onnx.backend.test.__file__), "data", "light")
    session = ort.InferenceSession(
        dynamic_batch(os.path.join(folder, f"light_{network}.onnx")).SerializeToString()
    )
    (given,) = session.get_inputs()
    scores = session.run(None, {given.name: np.ones((3, 3, 224, 224), np.float32)})[0]
    assert isinstance(scores, np.ndarray) and scores.shape[:2] == (3, 1000)


def parsed(body: str, shape: str = "1, 4") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> net (float[{shape}] x) => (float[{shape}] y) {body}'
    )


def test_samples_that_depend_on_each_other_are_refused() -> None:
    mean = parsed("<int64[1] axis = {0}> { m = ReduceMean(x, axis) y = Sub(x, m) }")
    with pytest.raises(ParityError, match="depend on each other"):
        dynamic_batch(mean)


def test_a_node_that_rules_a_batch_out_is_named() -> None:
    joined = parsed("{ y = Concat <axis = 0> (x) }")
    with pytest.raises(ModelError, match=r"fixed to 1 and cannot be opened: Concat .* joins along the batch"):
        dynamic_batch(joined)


def test_rows_that_differ_between_samples_are_refused() -> None:
    added = parsed("<float[2, 1] rows = {1, 2}> { y = Add(x, rows) }", "2, 4")
    with pytest.raises(ModelError, match="'rows' has other numbers for each of 2 samples"):
        dynamic_batch(added)
    same = dynamic_batch(parsed("<float[2, 1] rows = {3, 3}> { y = Add(x, rows) }", "2, 4"))
    got = ort.InferenceSession(same.SerializeToString()).run(None, {"x": np.zeros((5, 4), np.float32)})[0]
    np.testing.assert_array_equal(got, np.full((5, 4), 3, np.float32))


def test_an_open_batch_stays_as_it_is() -> None:
    model = parsed("{ y = Relu(x) }", "N, 4")
    assert dynamic_batch(model).graph.input == model.graph.input


def test_finetune_opens_a_fixed_batch(tmp_path) -> None:
    import onward

    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[1, 4] x) => (float[1, 3] y) <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}>
        { y = MatMul(x, w) }""")
    onnx.save(model, tmp_path / "one.onnx")
    rows = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    tuned = onward.finetune(
        tmp_path / "one.onnx",
        {"x": rows, "labels": (rows[:, 0] > 0).astype(np.int64)},
        batch_size=8,
        epochs=1,
    )
    assert any("fixed to batches of 1; for training it takes any" in note for note in tuned.notes)
