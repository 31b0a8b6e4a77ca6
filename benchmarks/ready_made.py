"""A decoder as model builders publish it: fused operators of onnxruntime, 4-bit weights, a key-value cache.

Random weights, written layer by layer to one data file, so that a model of any size can be made in little memory. The
graph has what published bases have: MatMulNBits with blocks of 32, GroupQueryAttention with rotary tables inside,
SimplifiedLayerNormalization and its form with a skip connection, lengths counted from the attention mask, and the
names of such files. Beside it lie `config.json` and `tokenizer.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

__all__ = ["write_base"]

BLOCK = 32


class _Writer:
    """Nodes and tensors of a model whose tensors lie in one file."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        self.folder, self.location = folder, f"{name}_data"
        self.file = open(folder / self.location, "wb")  # noqa: SIM115 - closed in `save`
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def node(self, kind: str, inputs: list[str], name: str, outputs: int = 1, **attributes: Any) -> list[str]:
        made = [f"{name}/output_{index}" for index in range(outputs)]
        domain = "com.microsoft" if kind in _FUSED else ""
        self.nodes.append(helper.make_node(kind, inputs, made, name, domain=domain, **attributes))
        return made

    def tensor(self, name: str, array: np.ndarray) -> str:
        tensor = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        self.file.write(bytes(-self.file.tell() % 4096))
        entries = {"location": self.location, "offset": str(self.file.tell()), "length": str(array.nbytes)}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        self.file.write(array.tobytes())
        self.tensors.append(tensor)
        return name

    def small(self, name: str, array: np.ndarray) -> str:
        self.tensors.append(onnx.numpy_helper.from_array(array, name))
        return name

    def product(self, x: str, place: str, rows: int, columns: int) -> str:
        """x·wᵀ with w [rows, columns] in 4 bits"""
        weight = place.strip("/").replace("/", ".") + ".weight"
        blocks = columns // BLOCK
        packed = self.random.integers(0, 256, (rows, blocks, BLOCK // 2), np.uint8)
        scales = np.full(rows * blocks, 0.2 / np.sqrt(columns), np.float32)
        inputs = [x, self.tensor(f"{weight}_Q4", packed), self.tensor(f"{weight}_scales", scales)]
        sizes = {"K": columns, "N": rows, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
        return self.node("MatMulNBits", inputs, f"{place}_Q4", **sizes)[0]


_FUSED = {"MatMulNBits", "GroupQueryAttention", "SkipSimplifiedLayerNormalization"}


def write_base(
    folder: Path, sizes: dict[str, int], tokenizer: Any, *, name: str = "model.onnx", seed: int = 0
) -> None:
    """Write the model with its configuration and tokenizer; `sizes` has the names of a Llama configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    width, inner, words = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    heads, stored = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    size = width // heads
    model = _Writer(folder, name, seed)
    inputs = [("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])]
    inputs.append(("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]))
    outputs = [("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", words])]
    lengths, total = _lengths(model)
    angles = np.outer(np.arange(sizes["max_position_embeddings"]), 10000.0 ** (-np.arange(0, size, 2) / size))
    cos, sin = (
        model.tensor(f"{kind}_cache", getattr(np, kind)(angles).astype(np.float32)) for kind in ("cos", "sin")
    )
    table = (model.random.standard_normal((words, width), np.float32) * 0.02).astype(np.float32)
    x = model.node(
        "Gather", [model.tensor("model.embed_tokens.weight", table), "input_ids"], "/model/embed_tokens"
    )[0]
    del table
    skip = ""
    for layer in range(sizes["num_hidden_layers"]):
        at = f"/model/layers.{layer}"
        x, skip = _norm(model, x, skip, f"{at}/input_layernorm", width)
        parts = [
            model.product(x, f"{at}/attn/{which}_proj/MatMul", count * size, width)
            for which, count in (("q", heads), ("k", stored), ("v", stored))
        ]
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        cache = ["batch_size", stored, "past_sequence_length", size]
        inputs += [(given, TensorProto.FLOAT, cache) for given in past]
        whole = ["batch_size", stored, "total_sequence_length", size]
        outputs += [(f"present.{layer}.{kind}", TensorProto.FLOAT, whole) for kind in ("key", "value")]
        attended = f"{at}/attn/GroupQueryAttention/output_0"
        model.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [*parts, *past, lengths, total, cos, sin],
                [attended, *(made for made, _, _ in outputs[-2:])],
                f"{at}/attn/GroupQueryAttention", domain="com.microsoft", num_heads=heads, kv_num_heads=stored,
                scale=size**-0.5, do_rotary=1, rotary_interleaved=0, local_window_size=-1,
            )
        )  # fmt: skip
        x = model.product(attended, f"{at}/attn/o_proj/MatMul", width, heads * size)
        x, skip = _norm(model, x, skip, f"{at}/post_attention_layernorm", width)
        gate, up = (
            model.product(x, f"{at}/mlp/{which}_proj/MatMul", inner, width) for which in ("gate", "up")
        )
        swish = model.node(
            "Mul",
            [gate, model.node("Sigmoid", [gate], f"{at}/mlp/act_fn/Sigmoid")[0]],
            f"{at}/mlp/act_fn/Mul",
        )
        x = model.product(
            model.node("Mul", [swish[0], up], f"{at}/mlp/Mul")[0], f"{at}/mlp/down_proj/MatMul", width, inner
        )
    x, _ = _norm(model, x, skip, f"/model/layers.{sizes['num_hidden_layers']}/final_norm_layernorm", width)
    logits = model.product(x, "/lm_head/MatMul", words, width)
    model.nodes[-1].output[0] = "logits"
    assert logits == "/lm_head/MatMul_Q4/output_0"
    _save(model, folder / name, inputs, outputs)
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 0, **sizes}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


def _lengths(model: _Writer) -> tuple[str, str]:
    """The index of the last key of each row, and the number of keys, as the attention takes them."""
    at = "/model/attn_mask_reformat/attn_mask_subgraph"
    one, axis = model.small("one", np.asarray([1], np.int64)), model.small("axis", np.asarray(1, np.int64))
    counted = model.node("ReduceSum", ["attention_mask", one], f"{at}/ReduceSum", keepdims=0)
    less = model.node("Sub", [counted[0], one], f"{at}/Sub")
    lengths = model.node("Cast", less, f"{at}/Sub/Cast", to=TensorProto.INT32)
    shape = model.node("Shape", ["attention_mask"], f"{at}/Shape")
    last = model.node("Gather", [shape[0], axis], f"{at}/Gather", axis=0)
    return lengths[0], model.node("Cast", last, f"{at}/Gather/Cast", to=TensorProto.INT32)[0]


def _norm(model: _Writer, x: str, skip: str, at: str, width: int) -> tuple[str, str]:
    """The normalized sum of x and the skip connection, and that sum."""
    scale = model.tensor(at.strip("/").replace("/", ".") + ".weight", np.ones(width, np.float32))
    if not skip:
        return model.node(
            "SimplifiedLayerNormalization", [x, scale], f"{at}/LayerNorm", axis=-1, epsilon=1e-5, stash_type=1
        )[0], x
    made = [f"{at}/output_0", "", "", f"{at}/output_3"]
    model.nodes.append(
        helper.make_node(
            "SkipSimplifiedLayerNormalization", [skip, x, scale], made, f"{at}/SkipLayerNorm",
            domain="com.microsoft", epsilon=1e-5,
        )
    )  # fmt: skip
    return made[0], made[3]


def _save(model: _Writer, path: Path, inputs: list[tuple], outputs: list[tuple]) -> None:
    model.file.close()
    graph = helper.make_graph(
        model.nodes, "main_graph",
        [helper.make_tensor_value_info(*given) for given in inputs],
        [helper.make_tensor_value_info(*given) for given in outputs],
        model.tensors,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
