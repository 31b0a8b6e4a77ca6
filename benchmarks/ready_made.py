"""A decoder as model builders publish it: fused operators of onnxruntime, 4-bit weights, a key-value cache.

Random weights, written layer by layer to one data file, so that a model of any size can be made in little memory. The
graph has what published bases have: MatMulNBits with blocks of 32, GroupQueryAttention with rotary tables inside,
SimplifiedLayerNormalization and its form with a skip connection, lengths counted from the attention mask, and the
names of such files. Beside it lie `config.json` and `tokenizer.json`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

__all__ = ["Form", "write_base"]

BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Form:
    """What published bases differ in: float16, bits of a weight, zero points, one product for queries, keys and
    values, rotary embedding in nodes of its own, with `position_ids` as an input, one table of a few bits for
    embeddings and the output layer, and the size at which data goes on in another file."""

    half: bool = False
    bits: int = 4
    zeros: bool = False
    packed: bool = False
    rotary_apart: bool = False
    tied: bool = False
    part_bytes: int | None = None


class _Writer:
    """Nodes and tensors of a model whose tensors lie in one file."""

    def __init__(self, folder: Path, name: str, seed: int, form: Form) -> None:
        self.form, self.kind = form, np.float16 if form.half else np.float32
        self.folder, self.location, self.parts = folder, f"{name}_data", 1
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
        if self.form.part_bytes is not None and self.file.tell() + array.nbytes > self.form.part_bytes:
            self.file.close()
            self.location = f"{self.location.removesuffix(f'_{self.parts - 1}')}_{self.parts}"
            self.parts += 1
            self.file = open(self.folder / self.location, "wb")  # noqa: SIM115 - closed in `save`
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

    def weight(self, place: str, rows: int, columns: int) -> list[str]:
        """Names of w [rows, columns] in a few bits, its scales and zero points"""
        weight = place.strip("/").replace("/", ".") + ".weight"
        blocks = columns // BLOCK
        bits = self.form.bits
        packed = self.random.integers(0, 256, (rows, blocks, BLOCK * bits // 8), np.uint8)
        scales = np.full((rows, blocks), 3.2 / 2**bits / np.sqrt(columns), self.kind)
        names = [self.tensor(f"{weight}_Q{bits}", packed), self.tensor(f"{weight}_scales", scales)]
        if self.form.zeros:
            zeros = self.random.integers(100, 160, (rows, -(-blocks * bits // 8)), np.uint8)
            names.append(self.tensor(f"{weight}_zero_points", zeros))
        return names

    def product(self, x: str, place: str, rows: int, columns: int, weight: list[str] | None = None) -> str:
        """x·wᵀ with w [rows, columns] in a few bits"""
        bits = self.form.bits
        inputs = [x, *(weight or self.weight(place, rows, columns))]
        sizes = {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
        return self.node("MatMulNBits", inputs, f"{place}_Q{bits}", **sizes)[0]

    def embedding(self, weight: list[str], rows: int, columns: int) -> str:
        """Rows of the output layer's weight, as it is stored"""
        bits, at = self.form.bits, "/model/embed_tokens"
        shape = self.small(f"{at}/shape", np.asarray([rows, columns * bits // 8], np.int64))
        table = self.node("Reshape", [weight[0], shape], f"{at}/Reshape")
        sizes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        return self.node("GatherBlockQuantized", [*table, "input_ids", *weight[1:]], f"{at}/Gather", **sizes)[
            0
        ]


_FUSED = {
    "MatMulNBits", "GroupQueryAttention", "SkipSimplifiedLayerNormalization", "RotaryEmbedding",
    "GatherBlockQuantized",
}  # fmt: skip


def write_base(
    folder: Path, sizes: dict[str, int], tokenizer: Any, *, name: str = "model.onnx", seed: int = 0,
    form: Form | None = None,
) -> None:  # fmt: skip
    """Write the model with its configuration and tokenizer; `sizes` has the names of a Llama configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    form = form or Form()
    width, inner, words = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    heads, stored = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    size = width // heads
    model = _Writer(folder, name, seed, form)
    kind = TensorProto.FLOAT16 if form.half else TensorProto.FLOAT
    inputs = [("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])]
    inputs.append(("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]))
    if form.rotary_apart:
        inputs.append(("position_ids", TensorProto.INT64, ["batch_size", "sequence_length"]))
    outputs = [("logits", kind, ["batch_size", "sequence_length", words])]
    lengths, total = _lengths(model)
    angles = np.outer(np.arange(sizes["max_position_embeddings"]), 10000.0 ** (-np.arange(0, size, 2) / size))
    cos, sin = (
        model.tensor(f"{turn}_cache", getattr(np, turn)(angles).astype(model.kind)) for turn in ("cos", "sin")
    )
    output = model.weight("/lm_head/MatMul", words, width) if form.tied else None
    if output is not None:
        x = model.embedding(output, words, width)
    else:
        table = (model.random.standard_normal((words, width), np.float32) * 0.02).astype(model.kind)
        name_of_table = model.tensor("model.embed_tokens.weight", table)
        x = model.node("Gather", [name_of_table, "input_ids"], "/model/embed_tokens")[0]
        del table
    skip = ""
    for layer in range(sizes["num_hidden_layers"]):
        at = f"/model/layers.{layer}"
        x, skip = _norm(model, x, skip, f"{at}/input_layernorm", width)
        if form.packed:
            parts = [
                model.product(x, f"{at}/attn/qkv_proj/MatMul", (heads + 2 * stored) * size, width),
                "",
                "",
            ]
        else:
            parts = [
                model.product(x, f"{at}/attn/{which}_proj/MatMul", count * size, width)
                for which, count in (("q", heads), ("k", stored), ("v", stored))
            ]
        if form.rotary_apart:
            for index, which in enumerate("qk"):
                turned = f"{at}/attn/{which}_rotary/RotaryEmbedding"
                parts[index] = model.node(
                    "RotaryEmbedding", [parts[index], "position_ids", cos, sin], turned, interleaved=0
                )[0]
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        cache = ["batch_size", stored, "past_sequence_length", size]
        inputs += [(given, kind, cache) for given in past]
        whole = ["batch_size", stored, "total_sequence_length", size]
        outputs += [(f"present.{layer}.{part}", kind, whole) for part in ("key", "value")]
        attended = f"{at}/attn/GroupQueryAttention/output_0"
        model.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [*parts, *past, lengths, total, *(() if form.rotary_apart else (cos, sin))],
                [attended, *(made for made, _, _ in outputs[-2:])],
                f"{at}/attn/GroupQueryAttention", domain="com.microsoft", num_heads=heads, kv_num_heads=stored,
                scale=size**-0.5, do_rotary=int(not form.rotary_apart), rotary_interleaved=0, local_window_size=-1,
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
    logits = model.product(x, "/lm_head/MatMul", words, width, output)
    model.nodes[-1].output[0] = "logits"
    assert logits == f"/lm_head/MatMul_Q{form.bits}/output_0"
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
    scale = model.tensor(at.strip("/").replace("/", ".") + ".weight", np.ones(width, model.kind))
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
