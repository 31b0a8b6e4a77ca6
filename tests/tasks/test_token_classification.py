"""Words and characters are tagged: alignment, the F1 of seqeval, training as torch does it, and wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("tokenizers")
import onward
from onward.errors import DataError
from onward.tasks.scores import entities_of, score_entities
from small_models import with_weights
from tasks.encoders import THINGS, WORDS, write_encoder, write_tokenizer
from tasks.stopped_runs import same_weights_when_resumed

PLACES = THINGS[:5]


def sentences(count: int = 40, seed: int = 0) -> list[tuple[list[str], list[str]]]:
    """A thing is a PLACE or a TOOL; `of` between two words of it continues it."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        words, tags = ["the"], ["O"]
        for thing in rng.choice(THINGS, 2):
            kind = "PLACE" if thing in PLACES else "TOOL"
            words += ["about", str(thing), "of"] if rng.random() < 0.5 else ["a", str(thing)]
            tags += ["O", f"B-{kind}", f"I-{kind}"] if words[-1] == "of" else ["O", f"B-{kind}"]
        made.append((words, tags))
    return made


def write_conll(path: Path, data: Any) -> Path:
    lines = ["-DOCSTART- -X- O", ""]
    for words, tags in data:
        lines += [*(f"{word} NN {tag}" for word, tag in zip(words, tags)), ""]
    path.write_text("\n".join(lines))
    return path


def teach(model: Path, data: Any, **options: Any) -> Any:
    return onward.finetune(
        model, data, progress=False, **{"epochs": 12, "batch_size": 8, "learning_rate": 0.05, **options}
    )


def contextual(folder: Path) -> Path:
    """The encoder, whose states see the word before: `of` has the kind of its thing."""
    write_encoder(folder, pooling=None)
    model = with_weights(
        """net (int64[N, T] input_ids, int64[N, T] attention_mask) => (float[N, T, 12] last_hidden_state) {
            e = Gather(table, input_ids) c = Transpose<perm=[0, 2, 1]>(e) k = Conv<pads=[1, 1]>(c, w, b)
            t = Transpose<perm=[0, 2, 1]>(k) last_hidden_state = Tanh(t) }""",
        table=(len(WORDS), 8), w=(12, 8, 3), b=(12,),
    )  # fmt: skip
    onnx.save(model, folder / "model.onnx")
    (folder / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    return folder


def test_names_are_learned_from_conll_and_said_with_their_place(tmp_path: Path) -> None:
    folder = contextual(tmp_path / "encoder")
    result = teach(folder, write_conll(tmp_path / "train.conll", sentences(80)), epochs=25)
    assert result.task == "token-classification" and result.metrics["f1"] == 1.0
    assert result.classes == ["B-PLACE", "B-TOOL", "I-PLACE", "I-TOOL", "O"]
    result.export(tmp_path / "mine.onnx")
    answer = onward.load(tmp_path / "mine.onnx")("the about volcano of a chess")
    assert [(one["label"], one["text"], one["start"]) for one in answer] == [
        ("PLACE", "volcano of", 10),
        ("TOOL", "chess", 23),
    ]
    assert answer == result.predict(["the about volcano of a chess"])[0]
    from onward.data.read import DataOptions
    from onward.pipeline.evaluate import evaluate_model

    test = write_conll(tmp_path / "test.conll", sentences(seed=5))
    evaluation = evaluate_model(tmp_path / "mine.onnx", test, None, options=DataOptions())
    assert evaluation.figures["f1"] == 1.0 and [row[0] for row in evaluation.classes] == ["PLACE", "TOOL"]


def test_a_word_of_several_tokens_is_judged_at_its_first(tmp_path: Path) -> None:
    from onward.pipeline.evaluate import open_source
    from onward.tasks import find_task

    folder = contextual(tmp_path / "encoder")
    task = find_task("token-classification")
    options = task.options({"batch_size": 2})
    # a hyphen makes three tokens of one word
    data = task.functions.read(
        [(["tea-chess", "the"], ["B-X", "O"]), (["a"], ["O"])], open_source(folder), options
    )
    specs = [onward.data.match_inputs.InputSpec(n, np.dtype(np.int64), None) for n in ("input_ids", "labels")]
    ids, labels = next(task.functions.batches(data, specs, options, training=False).epoch(0))
    assert ids.shape == (2, 4) and labels.tolist() == [[0, -100, -100, 1], [1, -100, -100, -100]]


def test_training_is_that_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = contextual(tmp_path / "encoder")
    data, test = sentences(24), sentences(30, seed=3)
    result = teach(folder, data, task="token-classification", eval_data=test, epochs=3, batch_size=24, optimizer="sgd",
                   schedule="constant", warmup=0, clip_norm=0, learning_rate=0.5)  # fmt: skip
    labels = result.classes
    arrays = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(folder / "model.onnx").graph.initializer
    }
    bound = 1 / np.sqrt(12)
    arrays["head"] = np.random.default_rng(0).uniform(-bound, bound, (12, len(labels))).astype(np.float32)
    arrays["bias"] = np.zeros(len(labels), np.float32)
    w = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    body = {"table", "w", "b"}

    def scores(batch: Any) -> Any:
        width = max(len(words) for words, _ in batch)
        ids = torch.tensor(
            [[WORDS.index(word) for word in words] + [0] * (width - len(words)) for words, _ in batch]
        )
        states = torch.nn.functional.conv1d(w["table"][ids].transpose(1, 2), w["w"], w["b"], padding=1)
        return torch.tanh(states.transpose(1, 2)) @ w["head"] + w["bias"]

    for _ in range(3):
        numbers = scores(data)
        width = numbers.shape[1]
        target = torch.tensor(
            [[labels.index(t) for t in tags] + [-100] * (width - len(tags)) for _, tags in data]
        )
        torch.nn.functional.cross_entropy(numbers.reshape(-1, len(labels)), target.reshape(-1)).backward()
        with torch.no_grad():
            for name, weight in w.items():
                weight -= (0.05 if name in body else 0.5) * weight.grad
                weight.grad = None
    called = scores(test).argmax(-1)
    predicted = [[labels[int(n)] for n in row[: len(tags)]] for row, (_, tags) in zip(called, test)]
    expected, _ = score_entities([tags for _, tags in test], predicted)
    trained = {**result.state.trainable}
    np.testing.assert_allclose(trained["head.weight"], w["head"].detach().numpy(), atol=1e-5)
    assert 0 <= expected["f1"] <= 1 and len(labels) == 5


@pytest.mark.parametrize(
    ("tags", "names"),
    [
        ("B-A I-A O B-B", [("A", 0, 1), ("B", 3, 3)]),
        ("I-A I-A I-B", [("A", 0, 1), ("B", 2, 2)]),
        ("B-A B-A I-A", [("A", 0, 0), ("A", 1, 2)]),
        ("B-A I-A E-A S-A", [("A", 0, 2), ("A", 3, 3)]),
        ("U-A B-A L-A O", [("A", 0, 0), ("A", 1, 2)]),
        ("O O", []),
        ("O I-A O", [("A", 1, 1)]),
    ],
)
def test_names_in_every_scheme(tags: str, names: Any) -> None:
    assert entities_of(tags.split()) == names


def test_f1_is_seqevals() -> None:
    # by seqeval 1.2.2: f1_score, precision_score and recall_score of these lists
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG", "I-ORG", "I-ORG"], ["B-PER", "O"]]
    called = [["B-PER", "I-PER", "O", "O"], ["O", "B-ORG", "I-ORG", "O"], ["B-PER", "I-LOC"]]
    figures, rows = score_entities(true, called)
    assert figures == pytest.approx({"precision": 0.5, "recall": 0.5, "f1": 0.5})
    assert rows[2] == ["PER", 1.0, 1.0, 1.0, 2]


def characters(folder: Path) -> Path:
    """A model of characters without a mask, and a table from each character to its number beside it."""
    folder.mkdir()
    table = {"": 0, **{character: number for number, character in enumerate("abcdefgh ", start=1)}}
    (folder / "tokenizer.json").write_text(json.dumps(table))
    model = with_weights(
        """net (int64[N, T] letters) => (float[N, T, 2] marks) {
            e = Gather(table, letters) c = Transpose<perm=[0, 2, 1]>(e) k = Conv<pads=[1, 1]>(c, w, b)
            r = Relu(k) t = Transpose<perm=[0, 2, 1]>(r) marks = MatMul(t, v) }""",
        table=(10, 6), w=(16, 6, 3), b=(16,), v=(16, 2),
    )  # fmt: skip
    onnx.save(model, folder / "model.onnx")
    return folder


def test_characters_are_tagged_by_what_stands_beside_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh "), 12)) for _ in range(120)]
    rows = [
        {"text": text, "tags": ["long" if c in "ae" and text[i + 1 : i + 2] in ("b", "c", "d") else "short"
                                for i, c in enumerate(text)]}
        for text in texts
    ]  # fmt: skip
    data = tmp_path / "letters.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    result = teach(characters(tmp_path / "letters"), data, epochs=30)
    assert result.task == "token-classification" and result.metrics["accuracy"] > 0.98
    result.export(tmp_path / "mine.onnx")
    answer = onward.load(tmp_path / "mine.onnx")("abaa d", group=False)
    assert [(one["text"], one["label"]) for one in answer] == [
        ("a", "long"), ("b", "short"), ("a", "short"), ("a", "short"), (" ", "short"), ("d", "short")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.conll", "the O\ntea\n", "line 2: 'tea' has no tag"),
        ("a.conll", "\n\n", "no tagged sequence"),
        ("a.jsonl", '{"tokens": ["the", "tea"], "tags": ["O"]}\n', "line 1: 2 words and 1 tags"),
        ("a.jsonl", '{"tokens": ["the"], "tags": ["O"]}\n{"tokens": []\n', "line 2"),
        ("a.jsonl", '{"words": 3, "tags": ["O"]}\n', "line 1: there are no words with tags"),
        ("a.conll", "the O\ntea O\n", "the tag 'O' alone"),
    ],
)
def test_a_wrong_file_is_one_error_that_names_the_line(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        teach(contextual(tmp_path / "encoder"), tmp_path / name, task="token-classification")


def test_a_tag_that_training_has_not_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "test.conll").write_text("the O\n\ntea B-DRINK\n")
    with pytest.raises(DataError, match=r"test.conll', line 3: the tag 'B-DRINK' is none of"):
        teach(
            contextual(tmp_path / "encoder"),
            sentences(8),
            task="token-classification",
            eval_data=tmp_path / "test.conll",
        )


def test_a_model_without_a_tokenizer_says_what_to_name(tmp_path: Path) -> None:
    folder = contextual(tmp_path / "encoder")
    write_tokenizer(folder).unlink()
    with pytest.raises(DataError, match=r"no tokenizer\.json beside it"):
        teach(folder, sentences(8), task="token-classification")


def test_a_run_that_was_stopped_ends_in_the_same_weights(tmp_path: Path) -> None:
    data = write_conll(tmp_path / "train.conll", sentences(20))
    same_weights_when_resumed(teach, contextual(tmp_path / "encoder"), data, tmp_path)
