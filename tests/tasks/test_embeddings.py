"""Embeddings are trained on pairs, triplets and scores, as torch would, and load where people use them."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

pytest.importorskip("tokenizers")
import onward
from onward import losses
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import OptimType, generate_artifacts
from onward.errors import DataError, ModelError, OnwardError
from onward.export import from_transformers
from onward.onnxblock import loss as blocks
from onward.tasks import find_task
from onward.tasks.scores import rank_pairs, retrieval_figures, spearman
from small_models import with_weights
from tasks.encoders import THINGS, WORDS, encoder, pairs, write_encoder, write_table
from tasks.stopped_runs import same_weights_when_resumed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The encoder's folder, and pairs.csv beside it."""
    write_table(tmp_path / "pairs.csv", ("anchor", "positive"), pairs())
    return write_encoder(tmp_path / "encoder")


def teach(folder: Path, data: Any = None, **options: Any) -> Any:
    settings = {"epochs": 12, "batch_size": 5, "learning_rate": 0.02, **options}
    return onward.finetune(
        folder, folder.parent / "pairs.csv" if data is None else data, progress=False, **settings
    )


def test_pairs_are_learned_and_a_search_finds_more_than_before(folder: Path) -> None:
    before = teach(folder, epochs=1, learning_rate=0.0, eval_data=folder.parent / "pairs.csv")
    after = teach(folder, eval_data=folder.parent / "pairs.csv")
    assert before.task == after.task == "embeddings"
    assert before.metrics["recall@1"] < 0.5 and after.metrics["recall@1"] > 0.8
    assert set(after.metrics) >= {"recall@1", "recall@10", "mrr", "ndcg@10", "eval_loss"}


def test_the_written_folder_gives_the_same_vectors_to_everyone_who_pools(
    folder: Path, tmp_path: Path
) -> None:
    result = teach(folder, epochs=2)
    result.export(tmp_path / "mine")
    texts = ["history of the volcano", "a tea"]
    vectors = onward.load(tmp_path / "mine")(texts)
    np.testing.assert_allclose(vectors, result.predict(texts), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    # what fastembed and sentence-transformers do: the first output, pooled and brought to length 1 by themselves
    session = ort.InferenceSession(tmp_path / "mine" / "model.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_outputs()] == ["last_hidden_state", "sentence_embedding"]
    feed = {
        "input_ids": np.array([[6, 4, 2, 8], [3, 10, 0, 0]]),
        "attention_mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    states = session.run(None, feed)[0]
    pooled = np.stack([states[0].mean(axis=0), states[1, :2].mean(axis=0)])
    np.testing.assert_allclose(pooled / np.linalg.norm(pooled, axis=1, keepdims=True), vectors, atol=1e-6)


def test_the_folder_says_in_sentence_transformers_words_how_to_pool(folder: Path, tmp_path: Path) -> None:
    teach(folder, epochs=1, pooling="cls", unit_length="no").export(tmp_path / "mine")
    pooling = json.loads((tmp_path / "mine" / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_cls_token"] and not pooling["pooling_mode_mean_tokens"]
    assert pooling["word_embedding_dimension"] == 12
    modules = json.loads((tmp_path / "mine" / "modules.json").read_text())
    assert [module["type"].rsplit(".", 1)[1] for module in modules] == ["Transformer", "Pooling"]
    names = [path.name for path in (tmp_path / "mine").iterdir()]
    assert {"sentence_bert_config.json", "tokenizer.json", "model.onnx", "model.tokenizer.json"} <= set(names)


@pytest.mark.parametrize("mode", ["mean", "cls", "last", "max"])
@pytest.mark.parametrize("masked", [True, False])
def test_each_pooling_is_what_its_name_says(mode: str, masked: bool, tmp_path: Path) -> None:
    model = encoder()
    if not masked:
        del model.graph.input[1:]
    onnx.save(model, tmp_path / "model.onnx")
    source = onward.pipeline.evaluate.open_source(tmp_path / "model.onnx")
    task = find_task("embeddings")
    options = task.options({"pooling": mode, "unit_length": "no"})
    data = onward.data.read.Data({"anchor": np.zeros(1), "positive": np.zeros(1)})
    adapted = task.functions.adapt(source, data, options)
    session = ort.InferenceSession(adapted.model.SerializeToString(), providers=["CPUExecutionProvider"])
    original = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"input_ids": np.array([[5, 6, 7, 9], [8, 11, 0, 0]])}
    lengths = [4, 2 if masked else 4]
    if masked:
        feed["attention_mask"] = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    states = original.run(None, feed)[0]
    rows = [states[row, :length] for row, length in enumerate(lengths)]
    expected = {"mean": [r.mean(0) for r in rows], "cls": [r[0] for r in rows], "last": [r[-1] for r in rows],
                "max": [r.max(0) for r in rows]}[mode]  # fmt: skip
    np.testing.assert_allclose(session.run(None, feed)[0], np.stack(expected), atol=1e-6)


def test_the_loss_follows_torch_over_twenty_updates(folder: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    source = onward.pipeline.evaluate.open_source(folder)
    task = find_task("embeddings")
    options = task.options({"batch_size": 5})
    triplets = [(a, b, f"a {THINGS[i % 10]}") for i, (a, b) in enumerate(pairs())]
    data = task.functions.read(triplets, source, options)
    adapted = task.functions.adapt(source, data, options)
    generate_artifacts(
        adapted.model, loss=task.functions.loss(options, data, adapted), loss_input_names=["sentence_embedding"],
        optimizer=onward.optim.sgd(), artifact_directory=tmp_path / "a",
    )  # fmt: skip
    state = CheckpointState.load_checkpoint(tmp_path / "a" / "checkpoint")
    module = Module(tmp_path / "a" / "training_model.onnx", state, tmp_path / "a" / "eval_model.onnx")
    optimizer = Optimizer(tmp_path / "a" / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.2)
    weights = {
        t.name: torch.tensor(onnx.numpy_helper.to_array(t), requires_grad=True)
        for t in encoder().graph.initializer
    }
    names = module.input_names()
    specs = [onward.data.match_inputs.InputSpec(name, np.dtype(np.int64), (None, None)) for name in names]
    batches = task.functions.batches(data, specs, options, training=True)
    for epoch in range(5):
        for batch in batches.epoch(epoch):
            ids, mask = (torch.tensor(batch[names.index(n)]) for n in ("input_ids", "attention_mask"))
            states = torch.tanh(weights["table"][ids] @ weights["w"] + weights["b"])
            pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            views = torch.nn.functional.normalize(pooled, dim=1).reshape(-1, 3, pooled.shape[1])
            candidates = torch.cat([views[:, 1], views[:, 2]])
            scores = views[:, 0] @ candidates.T * 20.0
            expected = torch.nn.functional.cross_entropy(scores, torch.arange(len(views)))
            module.train()
            value = module(*batch)
            assert float(value) == pytest.approx(float(expected.detach()), abs=1e-4)
            optimizer.step()
            module.lazy_reset_grad()
            expected.backward()
            with torch.no_grad():
                for weight in weights.values():
                    weight -= 0.2 * weight.grad
                    weight.grad = None


def _scored(tmp_path: Path) -> Path:
    rows = [(a, b, 1.0) for a, b in pairs()] + [
        (a, pairs()[(i + 7) % 20][1], 0.0) for i, (a, _) in enumerate(pairs())
    ]
    return write_table(tmp_path / "scored.csv", ("sentence1", "sentence2", "score"), rows)


@pytest.mark.parametrize("loss", [None, "cosine"])
def test_pairs_with_scores_are_put_into_their_order(loss: str | None, folder: Path, tmp_path: Path) -> None:
    table = _scored(tmp_path)
    options = {} if loss is None else {"loss": loss}
    before = teach(folder, table, epochs=1, learning_rate=0.0, eval_data=table, **options).metrics["spearman"]
    after = teach(folder, table, eval_data=table, **options).metrics["spearman"]
    assert before < 0.6 < 0.8 < after


def test_cosent_is_the_formula_of_its_paper() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 6, 4)).astype(np.float32)
    scores = np.array([0, 0.2, 0.2, 0.9, 1, 0.5], np.float32)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    op = onward.graph.builder.Builder(graph)
    values = [op.input(n, ir.DataType.FLOAT, s) for n, s in (("x", [6, 4]), ("y", [6, 4]), ("s", [6]))]
    op.add_output(losses.functions.cosent(op, *values))
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    value = session.run(None, {"x": x, "y": y, "s": scores})[0]
    cos = torch.nn.functional.cosine_similarity(torch.tensor(x), torch.tensor(y)) * 20
    terms = [torch.zeros(1)] + [
        cos[i : i + 1] - cos[j : j + 1] for i in range(6) for j in range(6) if scores[i] < scores[j]
    ]
    assert float(value) == pytest.approx(float(torch.logsumexp(torch.cat(terms), 0)), rel=1e-5)


def test_a_triplet_is_learned_with_its_margin(folder: Path) -> None:
    triplets = [(a, b, pairs()[(i + 2) % 20][1]) for i, (a, b) in enumerate(pairs())]
    result = teach(folder, triplets, task="embeddings", loss="triplet", margin=0.5, hold_out=0.0)
    assert result.history.epochs[-1]["loss"] < 0.2 * result.history.epochs[0]["loss"]


def test_matryoshka_teaches_the_first_numbers_to_do_alone(folder: Path) -> None:
    def recall(vectors: np.ndarray) -> float:
        return retrieval_figures(*rank_pairs(vectors, 2))["recall@1"]

    texts = [text for pair in pairs() for text in pair]
    plain, nested = (teach(folder, matryoshka=sizes).predict(texts) for sizes in ("12", "12,4"))
    assert recall(nested[:, :4]) > recall(plain[:, :4])


def test_an_encoder_with_the_ranking_loss_trains_both_sides(tmp_path: Path) -> None:
    model = with_weights("net (float[N, 3] x) => (float[N, 4] y) { y = MatMul(x, w) }", w=(3, 4))
    rng = np.random.default_rng(1)
    for name, loss in (
        ("block", blocks.MultipleNegativesRankingLoss()),
        ("function", losses.multiple_negatives),
    ):
        generate_artifacts(model, loss=loss, optimizer=OptimType.AdamW, artifact_directory=tmp_path / name)
        path = tmp_path / name / "training_model.onnx"
        assert [value.name for value in onnx.load(path).graph.input][:1] == ["x"]
        state = CheckpointState.load_checkpoint(tmp_path / name / "checkpoint")
        module = Module(path, state)
        assert module.input_names() == ["x"]
        x = rng.normal(size=(6, 3)).astype(np.float32)
        weights = {entry: parameter.data.copy() for entry, parameter in state.parameters}
        y = x @ weights["w"]
        y /= np.linalg.norm(y, axis=1, keepdims=True)
        scores = 20 * y[::2] @ y[1::2].T
        expected = np.mean(np.log(np.exp(scores).sum(1)) - np.diag(scores))
        module.train()
        assert float(module(x)) == pytest.approx(expected, rel=1e-4)


def test_states_that_nobody_pooled_are_no_embeddings(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="embeddings are \\[texts, size\\]"):
        generate_artifacts(encoder(), loss=losses.multiple_negatives, artifact_directory=tmp_path)


def test_figures_of_a_search_are_those_of_their_definitions() -> None:
    vectors = np.array([[1, 0], [0.9, 0.1], [0, 1], [1, 0.2], [-1, 0.1], [0.1, 1]], float)
    ranks, counts = rank_pairs(vectors, 2)
    # the second's own is behind (-1, 0.1), which is nearer to its direction
    assert ranks[:, 0].tolist() == [0, 1, 0] and counts.tolist() == [1, 1, 1]
    figures = retrieval_figures(ranks, counts)
    assert figures["recall@1"] == pytest.approx(2 / 3) and figures["mrr"] == pytest.approx(5 / 6)
    assert figures["ndcg@10"] == pytest.approx((2 + 1 / np.log2(3)) / 3)


def test_answers_that_several_questions_share_are_right_for_each() -> None:
    vectors = np.array([[1, 0], [1, 0], [1, 0], [0.5, 0.5], [0, 1], [1, 0]], float)
    keys = np.array([[1], [7], [1], [8], [2], [7]])  # the first and second question are one; 7 is one answer
    ranks, counts = rank_pairs(vectors, 2, keys)
    assert counts.tolist() == [2, 2, 1]
    # the third has one right answer: what fills its row lies behind every answer, however few there are
    assert ranks.tolist() == [[0, 1], [0, 1], [1, 10]]
    figures = retrieval_figures(ranks, counts)
    assert figures["recall@10"] == 1 and figures["recall@1"] == pytest.approx(1 / 3)
    assert figures["ndcg@10"] == pytest.approx((2 + 1 / np.log2(3)) / 3)


def test_spearman_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 6, (2, 40)).astype(float)
    assert spearman(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)


@pytest.mark.parametrize(
    ("header", "rows", "options", "message"),
    [
        (("anchor", "positive"), [("the tea", "a tea"), ("the comet", "")], {}, "row 3: 'positive' is empty"),
        (("anchor", "positive"), [], {}, "no row below its header"),
        (("text",), [("the tea",), ("a tea",)], {}, "1 columns of text"),
        (("a", "b", "c"), [("the", "a", "of")] * 2, {}, "which columns are the pair"),
        (("a", "b"), [("the", "a")] * 4, {"columns": ["a", "z"]}, "no column 'z'"),
        (("a", "b"), [("the", "a")] * 4, {"loss": "cosent"}, "needs scores"),
        (("a", "b"), [("the", "a")] * 4, {"loss": "triplet"}, "negative"),
        (
            ("sentence1", "sentence2", "score"),
            [("the", "a", 4), ("a", "of", 0)],
            {"loss": "cosine"},
            "from 0 to 4",
        ),
        (
            ("sentence1", "sentence2", "score"),
            [("the", "a", 4), ("a", "of", "")],
            {},
            "row 3: 'score' is no number",
        ),
        (("a", "b"), [("the", "a")] * 4, {"matryoshka": "99"}, "vectors have 12 numbers"),
    ],
)
def test_wrong_pairs_are_one_error_that_says_where(
    header: Any, rows: Any, options: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "wrong.csv", header, rows)
    with pytest.raises((DataError, OnwardError), match=message):
        teach(folder, table, task="embeddings", **options)


def test_a_line_without_a_partner_is_named(folder: Path, tmp_path: Path) -> None:
    lines = tmp_path / "pairs.jsonl"
    lines.write_text('{"anchor": "the tea", "positive": "a tea"}\n{"anchor": "the comet"}\n')
    with pytest.raises(DataError, match="line 2: 'positive' is not in every line"):
        teach(folder, lines, task="embeddings")


def test_a_run_that_was_stopped_ends_in_the_same_weights(folder: Path, tmp_path: Path) -> None:
    same_weights_when_resumed(teach, folder, None, tmp_path)


def test_an_encoder_for_int8_follows_its_float_self(folder: Path, tmp_path: Path) -> None:
    result = teach(folder, epochs=6, quantize="int8")
    exported = result.export(tmp_path / "mine")
    assert exported.integers is not None and result.metrics["recall@10"] > 0.5
    texts = ["history of the volcano", "a tea"]
    vectors = onward.load(tmp_path / "mine")(texts)
    np.testing.assert_allclose(vectors, result.predict(texts), atol=1e-5)
    operators = {node.op_type for node in onnx.load(tmp_path / "mine" / "model.onnx").graph.node}
    assert "MatMulInteger" in operators


def test_fastembed_and_sentence_transformers_load_the_folder_as_it_is(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = write_encoder(tmp_path / "words")  # its tokenizer: BERT's own would want a vocabulary
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.BertModel(config).eval().save_pretrained(tmp_path / "bert")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(words / "tokenizer.json"),
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=32,
    )
    tokenizer.save_pretrained(tmp_path / "bert")
    from_transformers(tmp_path / "bert", "feature-extraction", tmp_path / "bert")
    data = write_table(tmp_path / "pairs.csv", ("anchor", "positive"), pairs())
    folder = tmp_path / "mine"
    teach(tmp_path / "bert", data, epochs=1).export(folder)
    texts = ["history of the volcano", "a tea"]
    vectors = onward.load(folder)(texts)
    others = {name: read(folder, texts) for name, read in READERS.items() if find_spec(name) is not None}
    if not others:
        pytest.skip("neither fastembed nor optimum is installed")
    for name, answers in others.items():
        np.testing.assert_allclose(answers, vectors, atol=1e-6, err_msg=name)


def read_with_fastembed(folder: Path, texts: list[str]) -> np.ndarray:
    fastembed = importlib.import_module("fastembed")
    described = importlib.import_module("fastembed.common.model_description")
    source = described.ModelSource(hf="mine/mine")  # which is not read: the path below is
    fastembed.TextEmbedding.add_custom_model(
        model="mine", pooling=described.PoolingType.MEAN, normalization=True, sources=source, dim=16,
        model_file="model.onnx",
    )  # fmt: skip
    loaded = fastembed.TextEmbedding("mine", specific_model_path=str(folder), local_files_only=True)
    return np.stack(list(loaded.embed(texts)))


def read_with_sentence_transformers(folder: Path, texts: list[str]) -> np.ndarray:
    sentence_transformers = importlib.import_module("sentence_transformers")
    return sentence_transformers.SentenceTransformer(str(folder), backend="onnx", device="cpu").encode(texts)


# by the package without which neither works
READERS = {"fastembed": read_with_fastembed, "optimum": read_with_sentence_transformers}
