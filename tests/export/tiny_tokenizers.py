"""Small tokenizers of the kinds that published models have, trained on a few sentences: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
_SENTENCES = [
    "The ferry leaves at noon. Nobody expected a small library to train a network on the phone.",
    "Where does the path end? The path follows the river for two miles, and ends at a bridge. Why?",
    "Prices rose by March, economists had said. Hello there, friend! I'm not sure it's done; isn't it?",
    "Ünïcödé wörds and 日本語 too.  Two  spaces.",
    "They've said \"don't\" ( twice ) .",
]
_begun = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 2)])
_closed = processors.TemplateProcessing(
    single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
)
_from_marks = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _trained(
    model: Any, trainer: Any, pre: Any = None, *, normal: Any = None, decoder: Any = None, post: Any = None
) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in (("normalizer", normal), ("pre_tokenizer", pre)):
        if part is not None:
            setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    for name, part in (("decoder", decoder), ("post_processor", post)):
        if part is not None:
            setattr(tokenizer, name, part)
    return tokenizer


def _bpe(**more: Any) -> Any:
    return trainers.BpeTrainer(special_tokens=SPECIAL, show_progress=False, **{"vocab_size": 200, **more})


def _bytes(*, prefix: bool) -> Tokenizer:
    split = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    trainer = _bpe(vocab_size=320, initial_alphabet=split.alphabet())
    return _trained(models.BPE(), trainer, split, decoder=decoders.ByteLevel())


def _unigram(pre: Any, **more: Any) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        special_tokens=SPECIAL, show_progress=False, vocab_size=120, unk_token="<unk>"
    )
    return _trained(models.Unigram(), trainer, pre, decoder=decoders.Metaspace(), **more)


def _pieces(*, lowercase: bool, cleanup: bool, post: Any = None) -> Tokenizer:
    return _trained(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer(special_tokens=SPECIAL, show_progress=False, vocab_size=200),
        pre_tokenizers.BertPreTokenizer(),
        normal=normalizers.BertNormalizer(lowercase=lowercase),
        decoder=decoders.WordPiece(cleanup=cleanup),
        post=post,
    )


def _fallback() -> Any:
    return models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes (GPT-2)": lambda: _bytes(prefix=False),
    "bytes with a first space (RoBERTa)": lambda: _bytes(prefix=True),
    "SentencePiece BPE (Llama)": lambda: _trained(
        _fallback(),
        _bpe(),
        normal=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence([*_from_marks, decoders.Strip(" ", 1, 0)]),
        post=_begun,
    ),
    "SentencePiece BPE without a first space (Gemma)": lambda: _trained(
        _fallback(),
        _bpe(),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        normal=normalizers.Replace(" ", "▁"),
        decoder=decoders.Sequence(_from_marks),
        post=_begun,
    ),
    "Metaspace BPE": lambda: _trained(
        models.BPE(unk_token="<unk>"), _bpe(), pre_tokenizers.Metaspace(), decoder=decoders.Metaspace()
    ),
    "unigram (T5)": lambda: _unigram(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    ),
    "unigram, lower case (ALBERT)": lambda: _unigram(
        pre_tokenizers.Metaspace(),
        normal=normalizers.Sequence(
            [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        ),
        post=_closed,
    ),
    "pieces of words (BERT)": lambda: _pieces(lowercase=True, cleanup=True, post=_closed),
    "pieces of words as they are": lambda: _pieces(lowercase=False, cleanup=False),
    "whole words": lambda: _trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False),
        pre_tokenizers.Whitespace(),
    ),
    "ends of words (CLIP)": lambda: _trained(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        _bpe(end_of_word_suffix="</w>"),
        pre_tokenizers.BertPreTokenizer(),
        normal=normalizers.Lowercase(),
        decoder=decoders.BPEDecoder("</w>"),
    ),
}


def tokenizer_of(kind: str, **settings: Any) -> Any:
    """A tokenizer of a kind, as transformers has it."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](),
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        mask_token="<mask>",
        model_max_length=60,
        model_input_names=["input_ids", "attention_mask"],
        **settings,
    )
