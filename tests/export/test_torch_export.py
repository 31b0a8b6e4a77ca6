"""onward.export.from_torch: what the exported model is, and that the module is given back as it was."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onward
from export.architectures import ARCHITECTURES
from export.tiny_transformers import tiny_model
from onward.errors import ExportError, ParityError
from onward.export import from_torch

FAST = [
    "mlp",
    "resnet",
    "mobilenet",
    "convnext",
    "unet",
    "lstm",
    "gru",
    "bert",
    "deberta",
    "gpt2",
    "t5",
    "llama",
]


def run(model: onnx.ModelProto, *outputs: str, **feeds) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    arrays = {name: tensor.numpy() for name, tensor in feeds.items()}
    return session.run(list(outputs) or None, arrays)


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def metadata(model: onnx.ModelProto) -> dict:
    return {prop.key: json.loads(prop.value) for prop in model.metadata_props}


def shapes(model: onnx.ModelProto) -> dict[str, list[str | int]]:
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*model.graph.input, *model.graph.output]
    }


def nodes(model: onnx.ModelProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type]


# --- architectures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [14, 18, 21])
@pytest.mark.parametrize("name", FAST)
def test_training_export_agrees_with_torch_at_other_sizes_and_keeps_every_parameter(name, opset):
    architecture = ARCHITECTURES[name]
    module, (args, kwargs) = architecture.module(), architecture.args()

    model = from_torch(module, args, kwargs=kwargs, opset=opset)  # the parity gate is part of the call

    parameters = dict(module.named_parameters())
    found = initializers(model)
    assert set(parameters) <= set(found)
    for parameter_name, parameter in parameters.items():
        np.testing.assert_array_equal(found[parameter_name], parameter.detach().numpy())
    assert model.opset_import[0].version == opset
    assert {
        axis for shape in shapes(model).values() for axis in shape if isinstance(axis, str)
    } >= architecture.axes


@pytest.mark.parametrize("name", ["convnext", "gpt2"])
def test_the_newer_exporter_gives_the_same_interface(name):
    """On two architectures; docs/architectures.md has it on all of them."""
    architecture = ARCHITECTURES[name]
    module, (args, kwargs) = architecture.module(), architecture.args()
    older, newer = (from_torch(module, args, kwargs=kwargs, exporter=e) for e in ("torchscript", "dynamo"))
    assert shapes(older) == shapes(newer)
    assert set(dict(module.named_parameters())) <= set(initializers(newer))
    for key in ("onward.requires_grad", "onward.frozen_params", "onward.buffers"):
        assert metadata(older)[key] == metadata(newer)[key]
    assert len(nodes(older, "Dropout")) == len(nodes(newer, "Dropout"))


@pytest.mark.parametrize("name", ["resnet", "convnext", "lstm", "bert", "whisper", "clip"])
def test_inference_export_has_no_training_left_in_it(name):
    architecture = ARCHITECTURES[name]
    module, (args, kwargs) = architecture.module(), architecture.args()
    model = from_torch(module, args, kwargs=kwargs, training=False, opset=17)
    assert not nodes(model, "Dropout")
    assert not [n for n in model.graph.node if n.op_type.startswith("Random")]
    assert not [n for n in nodes(model, "BatchNormalization") if len(n.output) > 1]


def test_parameters_are_those_of_the_seed_example(tmp_path):
    """The documented export for on-device training: a dummy of batch one, straight to a file."""
    path = from_torch(ARCHITECTURES["resnet"].module(), torch.randn(1, 3, 32, 32), tmp_path / "model.onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model)
    assert shapes(model) == {"input": ["batch", 3, "height", "width"], "output": ["batch", 10]}
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_two_exports_are_byte_identical():
    architecture = ARCHITECTURES["lstm"]
    first, second = (from_torch(architecture.module(), *architecture.args()[1].values()) for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


# --- batch norm --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_batch_norm_trains_and_starts_from_the_modules_statistics(exporter):
    module = nn.Sequential(collections.OrderedDict(fc=nn.Linear(4, 3), bn=nn.BatchNorm1d(3, momentum=0.2)))
    module.bn.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    module.bn.running_var.fill_(0.5)
    model = from_torch(module, torch.randn(6, 4), exporter=exporter)
    (node,) = nodes(model, "BatchNormalization")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["training_mode"] == 1
    assert attributes["momentum"] == pytest.approx(0.8)
    assert list(node.input[1:]) == ["bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"]
    assert len([name for name in node.output if name]) == 3
    found = initializers(model)
    assert found["bn.running_mean"].tolist() == [1.0, 2.0, 3.0]
    assert found["bn.running_var"].tolist() == [0.5, 0.5, 0.5]
    assert metadata(model)["onward.buffers"] == ["bn.running_mean", "bn.running_var"]


def test_batch_norm_output_one_is_torchs_next_running_mean():
    """Output 2 uses the biased variance and is corrected by the artifacts builder; output 1 needs nothing."""
    module = nn.BatchNorm1d(3)
    model = from_torch(module, torch.randn(6, 3))
    (node,) = nodes(model, "BatchNormalization")
    model.graph.output.append(onnx.helper.make_tensor_value_info(node.output[1], 1, [3]))
    x = torch.randn(5, 3)
    module.train()(x)
    np.testing.assert_allclose(run(model, node.output[1], input=x)[0], module.running_mean.numpy(), rtol=1e-6)


def test_a_part_in_eval_mode_stays_so_when_the_module_trains():
    module = nn.Sequential(
        nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
    )
    module.train()
    module[0].eval()
    module[1].eval()
    model = from_torch(module, torch.randn(4, 3))
    assert [len(node.output) for node in nodes(model, "BatchNormalization")] == [1, 3]
    assert len(nodes(model, "Dropout")) == 1


def test_a_module_in_eval_mode_is_exported_in_training_mode_when_asked():
    model = from_torch(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval(), torch.randn(4, 3))
    assert len(nodes(model, "Dropout")) == 1


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_without_statistics_uses_the_batchs_in_either_mode(affine, training):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=affine, track_running_stats=False))
    model = from_torch(module, torch.randn(2, 3, 8, 8), training=training)
    x = torch.randn(5, 3, 6, 7)
    expected = module.train(training)(x).detach().numpy()
    np.testing.assert_allclose(run(model, input=x)[0], expected, rtol=1e-4, atol=1e-5)


# --- dropout -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.call = call

    def forward(self, x):
        q = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return self.call(q, dropout_p=0.5 if self.training else 0.0)


def _masked(q, dropout_p):
    mask = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=dropout_p)


DROPPING = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
    "fused attention": lambda: Attention(lambda q, **k: F.scaled_dot_product_attention(q, q, q, **k)),
    "causal attention": lambda: Attention(
        lambda q, **k: F.scaled_dot_product_attention(q, q, q, is_causal=True, **k)
    ),
    "masked attention": lambda: Attention(_masked),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
    "channel dropout": lambda: nn.Sequential(nn.Dropout1d(0.5), nn.Linear(8, 8)),
    "lstm": lambda: nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True),
    "gru": lambda: nn.GRU(8, 8, 3, dropout=0.5, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(8, 8, 2, dropout=0.5, batch_first=True),
}


# The slow path, on the two kinds that it gets wrong by itself.
DROPPING_WAYS = [(kind, "torchscript") for kind in DROPPING] + [
    ("fused attention", "dynamo"),
    ("lstm", "dynamo"),
]


@pytest.mark.parametrize("kind, exporter", DROPPING_WAYS)
def test_dropout_drops(kind, exporter):
    torch.manual_seed(0)
    model = from_torch(DROPPING[kind](), torch.randn(3, 5, 8), exporter=exporter)
    # The stock runtime's optimizer removes a Dropout whose mask is not used, whatever its training_mode.
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), disabled_optimizers=["EliminateDropout"]
    )
    (name,) = (value.name for value in model.graph.input)
    assert shapes(model)[name] == ["batch", "sequence", 8]
    feeds = {name: torch.randn(4, 7, 8).numpy()}
    first, second = (session.run(None, feeds)[0] for _ in range(2))
    assert np.abs(first - second).max() > 1e-3


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_with_dropout_take_and_return_states(layer, batch_first):
    module = layer(4, 5, 3, dropout=0.2, batch_first=batch_first, bidirectional=True)
    state = torch.randn(6, 2, 5)
    x = torch.randn((2, 7, 4) if batch_first else (7, 2, 4))
    model = from_torch(module, (x, (state, state.clone()) if layer is nn.LSTM else state))
    assert len(model.graph.output) == (3 if layer is nn.LSTM else 2)
    assert set(dict(module.named_parameters())) == set(initializers(model))


def test_stochastic_depth_stays_random():
    model = from_torch(ARCHITECTURES["convnext"].module(), torch.randn(2, 3, 32, 32))
    x = torch.randn(8, 3, 32, 32)
    assert len(nodes(model, "RandomUniform") + nodes(model, "RandomUniformLike")) == 2
    session = onnxruntime.InferenceSession(model.SerializeToString())
    results = [session.run(None, {"input": x.numpy()})[0] for _ in range(4)]
    assert any(np.abs(results[0] - other).max() > 1e-6 for other in results[1:])


def test_layers_that_are_skipped_at_random_are_refused():
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    module = Wav2Vec2Model(Wav2Vec2Config(**small, layerdrop=0.1, num_conv_pos_embedding_groups=2))
    with pytest.raises(ExportError, match=r"layerdrop=0\.1"):
        from_torch(module, torch.randn(1, 400))


# --- names -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class CompiledInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(nn.Linear(3, 3))

    def forward(self, x):
        return self.inner(x)


def _peft(model: nn.Module) -> nn.Module:
    """The shape of a PEFT model: PeftModel.base_model is the tuner, whose .model is the user's."""

    class Forwarding(nn.Module):
        def forward(self, *args, **kwargs):
            return next(iter(self.children()))(*args, **kwargs)

    tuner = type("LoraModel", (Forwarding,), {"__module__": "peft.tuners.lora"})()
    tuner.model = model
    outer = type("PeftModel", (Forwarding,), {"__module__": "peft.peft_model"})()
    outer.base_model = tuner
    return outer


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "torch.compile": torch.compile,
    "both": lambda model: nn.DataParallel(torch.compile(model)),
    "PEFT": _peft,
    "compiled PEFT": lambda model: torch.compile(_peft(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_leave_no_trace_in_names(wrap):
    model = from_torch(wrap(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), torch.randn(4, 3))
    expected = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [*initializers(model)] == [*expected, "1.running_mean", "1.running_var"]
    assert metadata(model)["onward.requires_grad"] == expected


def test_a_distributed_wrapper_leaves_no_trace_in_names(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        model = from_torch(nn.parallel.DistributedDataParallel(nn.Linear(3, 2)), torch.randn(4, 3))
    finally:
        dist.destroy_process_group()
    assert [*initializers(model)] == ["weight", "bias"]


def test_a_compiled_part_leaves_no_trace_in_names():
    assert [*initializers(from_torch(CompiledInside(), torch.randn(4, 3)))] == ["inner.weight", "inner.bias"]


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_tied_weights_are_stored_once_under_their_first_name(exporter):
    model = from_torch(Tied(), torch.randint(10, (2, 5)), exporter=exporter)
    assert [*initializers(model)] == ["embed.weight"]
    assert metadata(model)["onward.requires_grad"] == ["embed.weight"]


def test_equal_parameters_that_are_not_tied_stay_two():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].load_state_dict(module[0].state_dict())
    assert len(initializers(from_torch(module, torch.randn(2, 3)))) == 4


def test_trainable_and_frozen_follow_requires_grad():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    recorded = metadata(from_torch(module, torch.randn(4, 3)))
    assert recorded["onward.requires_grad"] == ["1.weight", "1.bias"]
    assert recorded["onward.frozen_params"] == ["0.weight", "0.bias"]


def test_a_parameter_named_like_an_input_does_not_collide():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.x

    assert shapes(from_torch(Odd(), torch.randn(2, 3)))["x_input"] == ["batch", 3]


# --- the module afterwards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [False, True], ids=["export succeeds", "export fails"])
def test_the_module_and_the_random_state_are_unchanged(training, fails):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(3)
            self.rnn = nn.GRU(3, 3, 2, dropout=0.1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1  # another tensor, not the same one changed
            random.random(), np.random.rand()
            y = self.rnn(self.bn(x))[0]
            return torch.linalg.eigvals(y.T @ y).real if fails else y

    module = Noisy().train()
    module.bn.eval()
    module.bn.weight.grad = torch.ones(3)
    handle = module.bn.register_forward_hook(lambda *_: None)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    tensors = {name: id(value) for name, value in module.state_dict(keep_vars=True).items()}
    flags = [part.training for part in module.modules()]
    attributes = [set(vars(part)) for part in module.modules()]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    if fails:
        with pytest.raises(ExportError):
            from_torch(module, torch.randn(4, 3), training=training)
        torch.manual_seed(3)
    else:
        x = torch.randn(4, 3)
        torch.manual_seed(3)
        from_torch(module, x, training=training)

    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert {name: id(value) for name, value in module.state_dict(keep_vars=True).items()} == tensors
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert [part.training for part in module.modules()] == flags
    assert [set(vars(part)) for part in module.modules()] == attributes
    assert torch.equal(module.bn.weight.grad, torch.ones(3))
    assert list(module.bn._forward_hooks) == [handle.id]


def test_a_transformers_configuration_is_unchanged():
    architecture = ARCHITECTURES["gpt2"]
    module, (args, kwargs) = architecture.module(), architecture.args()
    before = module.config._attn_implementation, module.config.use_cache
    from_torch(module, args, kwargs=kwargs)
    assert (module.config._attn_implementation, module.config.use_cache) == before


# --- arguments and results ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    loss: torch.Tensor | None
    scores: torch.Tensor
    layers: tuple[torch.Tensor, ...]


Pair = collections.namedtuple("Pair", "left right")


class Structured(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.result = result

    def forward(self, batch, *, scale=None, double=False):
        y = self.fc(batch["x"]) + batch["more"][0]
        y = y * scale if scale is not None else y
        return self.result(y * 2 if double else y)


RESULTS = {
    "dataclass": (lambda y: Result(None, y, (y + 1, y + 2)), ["scores", "layers_0", "layers_1"]),
    "dictionary": (lambda y: {"a": y, "b": {"c": y + 1}}, ["a", "c"]),
    "ambiguous keys": (lambda y: {"a": {"c": y}, "b": {"c": y + 1}}, ["a_c", "b_c"]),
    "named tuple": (lambda y: Pair(y, y + 1), ["left", "right"]),
    "tuple": (lambda y: (y, [y + 1]), ["output_0", "output_1_0"]),
    "the same tensor twice": (lambda y: (y, y), ["output_0", "output_1"]),
}


@pytest.mark.parametrize("result, names", RESULTS.values(), ids=RESULTS)
def test_structured_arguments_and_results_become_named_tensors(result, names):
    x = torch.randn(2, 3)
    module = Structured(result)
    model = from_torch(module, {"x": x, "more": [x + 1]}, kwargs={"scale": torch.tensor(2.0), "double": True})
    assert [value.name for value in model.graph.input] == ["x", "more_0", "scale"]
    assert [value.name for value in model.graph.output] == names


def test_a_mapping_of_forward_parameters_means_keyword_arguments():
    class Two(nn.Module):
        def forward(self, first, second):
            return first - second

    x = torch.randn(2, 3)
    model = from_torch(Two(), {"second": x, "first": x + 1})
    np.testing.assert_allclose(run(model, first=x + 1, second=x)[0], np.ones((2, 3)), atol=1e-6)


def test_chosen_names_are_used():
    model = from_torch(nn.Linear(3, 2), torch.randn(4, 3), input_names=["features"], output_names=["logits"])
    assert shapes(model) == {"features": ["batch", 3], "logits": ["batch", 2]}


# --- dynamic axes ------------------------------------------------------------------------------------------


class Baked(nn.Module):
    """Its code turns the sequence length into a number, which a trace keeps."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) / float(len(x[0]))


def test_declared_axes_are_named_as_declared():
    axes = {"input": {0: "N", -2: "T"}, "output": {0: "N"}}
    model = from_torch(nn.Linear(4, 2), torch.randn(3, 5, 4), dynamic_axes=axes)
    assert shapes(model) == {"input": ["N", "T", 4], "output": ["N", "T", 2]}


def test_no_dynamic_axes_when_none_are_wanted():
    model = from_torch(nn.Linear(4, 2), torch.randn(3, 4), dynamic_axes=None)
    assert shapes(model) == {"input": [3, 4], "output": [3, 2]}


def test_an_axis_that_the_trace_has_fixed_is_found_and_not_called_dynamic():
    with pytest.warns(UserWarning, match="fixes sequence"):
        model = from_torch(Baked(), torch.randn(2, 5, 4))
    assert shapes(model)["x"] == ["batch", 5, 4]


def test_an_operator_that_takes_one_size_only_leaves_the_batch_free():
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(4))
    with pytest.warns(UserWarning, match="fixes height, width"):
        model = from_torch(module, torch.randn(2, 3, 16, 16))
    assert shapes(model) == {"input": ["batch", 3, 16, 16], "output": ["batch", 4, 4, 4]}


def test_a_declared_axis_that_the_trace_has_fixed_is_an_error():
    with pytest.raises(ParityError, match=r"(?s)FAIL output.*T 6.*note: .*trace"):
        from_torch(Baked(), torch.randn(2, 5, 4), dynamic_axes={"x": {0: "N", 1: "T"}})


def test_sizes_that_must_be_multiples_are_found():
    class Halves(nn.Module):
        def forward(self, image):
            return image.unflatten(-1, (-1, 4)).sum(-1)

    shape = shapes(from_torch(Halves(), torch.randn(2, 3, 8, 8)))
    assert shape["image"][3] == "width"
    assert shape["output"][3] == "output_dim3"


# --- refusals ----------------------------------------------------------------------------------------------


class Unexportable(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x @ x.T).real


class Text(nn.Module):
    def forward(self, x):
        return {"y": x, "name": "text"}


LINEAR, X = nn.Linear(3, 2), torch.randn(4, 3)

REFUSED = {
    "not a module": (lambda: from_torch(lambda x: x, X), TypeError, "torch.nn.Module, not function"),
    "old opset": (lambda: from_torch(LINEAR, X, opset=6), ValueError, "7 to 22"),
    "future opset": (lambda: from_torch(LINEAR, X, opset=99), ValueError, "not 99"),
    "old opset for dynamo": (lambda: from_torch(LINEAR, X, opset=17, exporter="dynamo"), ValueError, "18 to"),
    "unknown exporter": (lambda: from_torch(LINEAR, X, exporter="fx"), ValueError, "'fx'"),
    "no tensors": (lambda: from_torch(LINEAR, 3), TypeError, "no torch.Tensor"),
    "wrong arguments": (lambda: from_torch(LINEAR, (X, X)), TypeError, r"Linear.forward\(input"),
    "arguments that fail": (lambda: from_torch(LINEAR, torch.randn(4, 5)), ExportError, "fails on the example"),
    "names that do not fit": (lambda: from_torch(LINEAR, X, input_names=["a", "b"]), ValueError, "2 names for 1"),
    "equal names": (lambda: from_torch(Structured(lambda y: (y, y)), {"x": X, "more": [X]}, output_names="ab"),
                    ValueError, "output_names"),
    "unknown axis owner": (lambda: from_torch(LINEAR, X, dynamic_axes={"y": {0: "N"}}), ValueError, "'y'"),
    "axis out of range": (lambda: from_torch(LINEAR, X, dynamic_axes={"input": {2: "N"}}), ValueError, "axis 2"),
    "axis that cannot vary": (lambda: from_torch(LINEAR, X, dynamic_axes={"input": {1: "F"}}), ExportError, "'F'"),
    "axes of another type": (lambda: from_torch(LINEAR, X, dynamic_axes=3), TypeError, "dynamic_axes"),
    "unsupported operator": (
        lambda: from_torch(Unexportable(), X, exporter="torchscript"), ExportError, "linalg_eigvals"
    ),
    "result that is no tensor": (lambda: from_torch(Text(), X), ExportError, "a str in result.name"),
    "parameters without shape": (lambda: from_torch(nn.LazyLinear(2), X), ExportError, "no shape yet"),
    "parameters without values": (lambda: from_torch(nn.Linear(3, 2, device="meta"), X), ExportError, "meta"),
    "external data without a file": (lambda: from_torch(LINEAR, X, external_data=True), ExportError, "give a path"),
}  # fmt: skip


@pytest.mark.parametrize("call, error, message", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_clear_error(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- files -------------------------------------------------------------------------------------------------


def test_a_failed_export_leaves_nothing_and_keeps_what_was_there(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with pytest.raises(ParityError):
        from_torch(Baked(), torch.randn(2, 5, 4), path, dynamic_axes={"x": {1: "T"}}, exporter="torchscript")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onward.export.torch.assemble.os.replace", full)
    with pytest.raises(ExportError, match="No space left"):
        from_torch(LINEAR, X, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, message", [("missing/model.onnx", "does not exist"), (".", "is a directory")])
def test_an_impossible_path_is_refused_before_any_work(tmp_path, name, message):
    with pytest.raises(ExportError, match=message):
        from_torch(nn.Linear(3, 2, device="meta"), X, tmp_path / name)


@pytest.mark.parametrize("training", [True, False])
def test_weights_can_live_beside_the_model(tmp_path, training):
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    path = from_torch(module, X, tmp_path / "model.onnx", external_data=True, training=training)
    assert len(list(tmp_path.glob("model.onnx.*.data"))) == 1 and len(list(tmp_path.iterdir())) == 2
    assert all(
        t.data_location == onnx.TensorProto.EXTERNAL
        for t in onnx.load(path, load_external_data=False).graph.initializer
    )
    onnx.checker.check_model(str(path))
    options = onnxruntime.SessionOptions()  # optimized, it would fuse training batch norm as if it were not
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    got = onnxruntime.InferenceSession(path, options).run(None, {"input": X.numpy()})[0]
    np.testing.assert_allclose(got, module.train(training)(X).detach().numpy(), rtol=1e-5, atol=1e-6)


# --- quiet -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_export_prints_and_warns_nothing(exporter, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_torch(nn.Sequential(nn.GRU(3, 3, 2, dropout=0.1)), torch.randn(4, 2, 3), exporter=exporter)
    assert capfd.readouterr() == ("", "")


def test_a_failing_export_prints_nothing(capfd):
    with pytest.raises(ExportError):
        from_torch(Unexportable(), X)
    assert capfd.readouterr() == ("", "")


def test_importing_the_package_does_not_import_torch():
    code = "import sys, onward.export; assert 'torch' not in sys.modules; assert 'from_torch' in dir(onward.export)"
    source = str(Path(onward.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source})
    assert done.returncode == 0


class Windows(torch.nn.Module):
    """Repeated elements and overlapping windows, along axes counted from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        repeated = torch.repeat_interleave(self.linear(x).repeat_interleave(3, dim=1), 2, -1)
        return repeated.unfold(-1, 4, 2).sum(-1)


def test_repeated_elements_and_windows_follow_the_batch() -> None:
    proto = from_torch(Windows(), torch.randn(3, 5, 4))  # compared with torch at other sizes
    assert isinstance(proto, onnx.ModelProto)
    assert proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"


class Chunks(torch.nn.Module):
    """Overlapping chunks by strides, of a tensor whose axes lie in memory in another order (Longformer's)."""

    def __init__(self, *, beyond: bool = False) -> None:
        super().__init__()
        self.linear, self.beyond = torch.nn.Linear(4, 4), beyond

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).transpose(0, 1)  # batch and time exchanged, not copied
        if self.beyond:
            return y[:, 2:].as_strided((2, 2), (1, 1), 0)
        a, b, c = y.stride()
        return torch.as_strided(y, (y.size(0), 3, 4, 4), (a, 2 * b, b, c))


def test_strides_follow_the_memory_of_a_tensor_and_the_batch() -> None:
    proto = from_torch(Chunks(), torch.randn(8, 3, 4), exporter="torchscript")
    assert isinstance(proto, onnx.ModelProto)
    (shape,) = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input]
    assert isinstance(shape[0], str) and isinstance(shape[1], str)


def test_strides_over_memory_that_is_not_the_tensors_are_refused() -> None:
    with pytest.raises(ExportError, match="as_strided reads memory"):
        from_torch(Chunks(beyond=True), torch.randn(8, 3, 4), exporter="torchscript")


class Packed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return torch.nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]


def test_lengths_of_packed_sequences_stay_in_their_order() -> None:
    with pytest.warns(UserWarning, match="the export fixes sequence"):
        proto = from_torch(Packed(), (torch.randn(3, 5, 4), torch.tensor([5, 3, 2])), exporter="torchscript")
    assert [value.name for value in proto.graph.input] == ["x", "lengths"]


def test_spectral_norm_is_kept() -> None:
    layer = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 5))
    proto = from_torch(layer, torch.randn(3, 6), exporter="torchscript")
    feeds = {"input": np.random.default_rng(0).standard_normal((3, 6), np.float32)}
    # with all of the runtime's optimizations, one of which errs on products with vectors
    got = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)[0]
    np.testing.assert_allclose(
        got, layer.train()(torch.from_numpy(feeds["input"])).detach().numpy(), rtol=1e-4, atol=1e-6
    )


def test_experts_that_the_example_does_not_reach_are_exported() -> None:
    """Two tokens reach a few of the eight experts of a layer; a larger batch reaches all."""
    model = tiny_model("qwen3_moe", "text-generation")
    proto = from_torch(model, kwargs={"input_ids": torch.tensor([[3, 5]])}, training=False)
    words = torch.arange(36).reshape(3, 12)
    got = onnxruntime.InferenceSession(proto.SerializeToString()).run(
        ["logits"], {"input_ids": words.numpy()}
    )
    np.testing.assert_allclose(got[0], model(words).logits.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exporter", ["torchscript", "primitives", "dynamo"])
def test_a_file_does_not_say_where_sources_lie(exporter: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())
    proto = from_torch(model, torch.randn(2, 4), exporter=exporter, check=False)
    content = proto.SerializeToString()
    assert b".py" not in content and os.fsencode(Path(torch.__path__[0]).parent) not in content
