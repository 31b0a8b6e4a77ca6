"""Generation chooses the tokens that transformers would: greedily, with beams, and within limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from export.huggingface_types import tiny_of
from export.tiny_tokenizers import KINDS, tokenizer_of
from onward.export import from_transformers
from onward.language.decoding import Decoder, Options, generate
from onward.pipeline import load as load_any

DECODERS = [
    "gpt2",
    "llama",
    "opt",
    "bloom",
    "falcon",
    "gpt_neox",
    "gptj",
    "qwen2",
    "gemma2",
    "phi",
    "mixtral",
    "qwen3_moe",
]
PROMPTS = [
    "the ferry leaves at noon",
    "why",
    "hello there friend",
    "where does the path end",
    "nobody expected a small library to train a network on the phone",
    "prices rose by March",
    "economists had said",
    "the path follows the river for two miles",
    "this example is sport or politics",
    "a bridge",
]


def load(folder: Path) -> Any:
    """A folder's pipeline."""
    return load_any(folder)


def written(model: Any, tokenizer: Any, prompt: str, **options: Any) -> list[int]:
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**encoded, do_sample=False, pad_token_id=0, **options)[0].tolist()
    ids = ids[encoded["input_ids"].shape[1] :]
    return ids[: ids.index(5)] if 5 in ids else ids


def tokens(
    pipeline: Any, prompts: list[str], *, ends: Sequence[int] = (5,), pad: int = 0, **options: Any
) -> list[list[int]]:
    encodings = [pipeline.tokenizer.encode(prompt) for prompt in prompts]
    width = max(len(e.ids) for e in encodings)
    ids = np.asarray([[pad] * (width - len(e.ids)) + e.ids for e in encodings], np.int64)
    mask = np.asarray([[0] * (width - len(e.ids)) + [1] * len(e.ids) for e in encodings], np.int64)
    *_, new = generate(Decoder(pipeline.session, ids, mask), Options(ends=frozenset(ends), **options))
    return new


@pytest.mark.parametrize("kind", DECODERS)
def test_greedy_text_is_token_for_token_that_of_transformers(tmp_path: Path, kind: str) -> None:
    model, tokenizer = tiny_of(kind, "text-generation")
    from_transformers((model, tokenizer), "text-generation", tmp_path / "folder", opset=17)
    pipeline = load(tmp_path / "folder")
    expected = [written(model, tokenizer, prompt, max_new_tokens=10) for prompt in PROMPTS]
    # All ten together, so that all but the longest are padded.
    assert tokens(pipeline, PROMPTS, max_new_tokens=10) == expected


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHATS = [
    [{"role": "user", "content": "Where does the path end?"}],
    [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "The path"}],  # goes on
]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_letter_for_letter_that_of_the_pipeline(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_of(kind, clean_up_tokenization_spaces=True)
    tokenizer.chat_template = TEMPLATE
    model, _ = tiny_of("gpt2", "text-generation", vocab_size=len(tokenizer), eos_token_id=3)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5)
    from_transformers((model, tokenizer), "text-generation", tmp_path / "folder", check=False)
    ours = load(tmp_path / "folder")
    theirs = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts: list[Any] = ["The ferry leaves", " I'm not", "Why? two  spaces ", "日本語", *CHATS]
    for full in (True, False):
        options: dict[str, Any] = {"max_new_tokens": 9, "return_full_text": full}
        expected = [theirs(prompt, do_sample=False, **options)[0]["generated_text"] for prompt in prompts]
        assert ours(prompts, **options) == expected
    assert [ours(prompt, max_new_tokens=9) for prompt in prompts] == expected
    assert ["".join(ours.stream(prompt, max_new_tokens=9)) for prompt in prompts] == expected


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
def test_each_text_of_a_batch_ends_at_its_own_end_token(tmp_path: Path, kind: str) -> None:
    model, tokenizer = tiny_of(kind, "text-generation")
    from_transformers((model, tokenizer), "text-generation", tmp_path / "folder", opset=17)
    pipeline = load(tmp_path / "folder")
    free = [written(model, tokenizer, prompt, max_new_tokens=12) for prompt in PROMPTS]
    # a token that some texts reach early, and others late or never
    ends = Counter(token for text in free for token in dict.fromkeys(text))
    end = next(token for token, count in ends.most_common() if 0 < count < len(free))
    expected = [text[: text.index(end)] if end in text else text for text in free]
    assert len({len(text) for text in expected}) > 1
    assert tokens(pipeline, PROMPTS, ends=(5, end), max_new_tokens=12) == expected
    # what padding holds changes nothing
    assert tokens(pipeline, PROMPTS, ends=(5, end), pad=7, max_new_tokens=12) == expected


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    folder = tmp_path_factory.mktemp("generate") / "gpt2"
    model, tokenizer = tiny_of("gpt2", "text-generation")
    from_transformers((model, tokenizer), "text-generation", folder)
    return load(folder), model, tokenizer


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "length_penalty": 2.0},
        {"num_beams": 3, "early_stopping": True, "length_penalty": 0.5},
        {"num_beams": 2, "no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6},
    ],
    ids=str,
)
def test_beams_and_penalties_choose_what_transformers_chooses(gpt2: Any, options: dict[str, Any]) -> None:
    pipeline, model, tokenizer = gpt2
    for prompt in PROMPTS[:5]:
        expected = written(model, tokenizer, prompt, max_new_tokens=8, **options)
        assert tokens(pipeline, [prompt], max_new_tokens=8, **options) == [expected], prompt


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
@pytest.mark.parametrize("beams", [1, 3])
def test_text_to_text_is_that_of_transformers(tmp_path: Path, kind: str, beams: int) -> None:
    model, tokenizer = tiny_of(kind, "text2text")
    from_transformers((model, tokenizer), "text2text", tmp_path / "folder", opset=17)
    pipeline = load(tmp_path / "folder")
    for prompt in PROMPTS[:4]:
        encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**encoded, do_sample=False, num_beams=beams, max_new_tokens=8)[0, 1:]
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        assert pipeline(prompt, max_new_tokens=8, num_beams=beams) == expected


def test_samples_follow_the_probabilities_and_the_seed(gpt2: Any) -> None:
    pipeline, _, _ = gpt2
    options = {"do_sample": True, "max_new_tokens": 8, "temperature": 2.0}
    one, two, other = (tokens(pipeline, PROMPTS[:2], seed=seed, **options) for seed in (1, 1, 2))
    assert one == two and one != other
    # One candidate only: sampling is greedy then.
    greedy = tokens(pipeline, PROMPTS[:2], max_new_tokens=8)
    assert tokens(pipeline, PROMPTS[:2], do_sample=True, top_k=1, max_new_tokens=8) == greedy
    assert tokens(pipeline, PROMPTS[:2], do_sample=True, top_p=1e-9, max_new_tokens=8) == greedy
    first = [
        tokens(pipeline, ["why"], seed=s, do_sample=True, top_k=None, max_new_tokens=1)[0] for s in range(300)
    ]
    ids = np.asarray([[pipeline.tokenizer.encode("why").ids[0]]])
    scores = Decoder(pipeline.session, ids, np.ones_like(ids)).step(None, None)[0].astype(np.float64)
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    best = int(probabilities.argmax())
    share = sum(chosen == [best] for chosen in first) / len(first)
    assert share == pytest.approx(probabilities[best], abs=4 * (0.25 / len(first)) ** 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"num_beams": 2, "do_sample": True}, "exclude each other"),
        ({"warmth": 2}, "unknown option warmth. Known: max_new_tokens"),
    ],
)
def test_a_wrong_option_is_refused_with_the_reason(gpt2: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        gpt2[0]("why", **options)


def test_a_stream_of_something_else_is_refused(tmp_path: Path, gpt2: Any) -> None:
    with pytest.raises(ValueError, match="beams cannot be streamed"):
        list(gpt2[0].stream("why", num_beams=2))
    with pytest.raises(TypeError, match="text or a list of messages"):
        gpt2[0](7)
    assert "".join(gpt2[0].stream("why", max_new_tokens=5)) == gpt2[0]("why", max_new_tokens=5)
