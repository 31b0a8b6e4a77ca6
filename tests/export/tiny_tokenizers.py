"""Small tokenizers of the kinds that published models have, trained on a few sentences: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

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


# special tokens around one text and around a pair, as the tokenizers of published models place them
_MARKS = [("<s>", 2), ("</s>", 3)]


def _around(single: str, pair: str) -> Any:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=_MARKS)


_begins_each = _around("<s> $A", "<s> $A <s> $B:1")
_ends_each = _around("$A </s>", "$A </s> $B </s>")
_doubled = _around("<s> $A </s>", "<s> $A </s> </s> $B </s>")
_typed = _around("<s> $A </s>", "<s> $A </s> $B:1 </s>:1")
_mark_last = _around("$A </s> <s>:2", "$A </s> $B:1 </s>:1 <s>:2")
# the split of GPT-4 and Llama 3, without its look-ahead over several kinds of letters
_WORDS_AND_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


def _bytes_after(*parts: Any, post: Any = None, normal: Any = None, prefix: bool = False) -> Tokenizer:
    """Bytes of what other rules have split."""
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not parts)
    return _trained(
        models.BPE(), _bpe(vocab_size=320, initial_alphabet=last.alphabet()), pre_tokenizers.Sequence([*parts, last]),
        normal=normal, decoder=decoders.ByteLevel(), post=post,
    )  # fmt: skip


def _regex_split() -> Any:
    return pre_tokenizers.Split(Regex(_WORDS_AND_DIGITS), "isolated")


def _cased(post: Any, **normalizing: Any) -> Tokenizer:
    tokenizer = _pieces(lowercase=False, cleanup=True, post=post)
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizing)
    return tokenizer


# further ways of the same kinds, of models that are asked questions, tag or chat
FURTHER: dict[str, Callable[[], Tokenizer]] = {
    "bytes, begun (OPT)": lambda: _bytes_after(post=_around("</s> $A", "</s> $A </s> $B")),
    "bytes, offsets trimmed (RoBERTa)": lambda: _bytes_after(
        post=processors.RobertaProcessing(("</s>", 3), ("<s>", 2), trim_offsets=True, add_prefix_space=False)
    ),
    "bytes, offsets whole (BART)": lambda: _bytes_after(
        prefix=True,
        post=processors.RobertaProcessing(("</s>", 3), ("<s>", 2), trim_offsets=False, add_prefix_space=True),
    ),
    "bytes after a split (Llama 3)": lambda: _bytes_after(_regex_split(), post=_begins_each),
    "bytes, normalized (Qwen)": lambda: _bytes_after(_regex_split(), normal=normalizers.NFC()),
    "bytes, single digits (StarCoder)": lambda: _bytes_after(
        pre_tokenizers.Digits(individual_digits=True), post=_ends_each
    ),
    "bytes, punctuation apart (Falcon)": lambda: _bytes_after(
        pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits(individual_digits=False)
    ),
    "bytes with marks (ModernBERT)": lambda: _bytes_after(post=_typed),
    "bytes, white space apart (BLOOM)": lambda: _bytes_after(
        pre_tokenizers.Split(Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "isolated")
    ),
    "Metaspace before the first word (Mistral)": lambda: _trained(
        _fallback(), _bpe(), pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        decoder=decoders.Sequence([*_from_marks, decoders.Strip(" ", 1, 0)]), post=_begins_each,
    ),
    "Metaspace never before (Phi-3)": lambda: _trained(
        _fallback(), _bpe(), pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
        decoder=decoders.Sequence(_from_marks),
    ),
    "unigram, ended (T5)": lambda: _unigram(pre_tokenizers.Metaspace(), post=_ends_each),
    "unigram, doubled marks (XLM-R)": lambda: _unigram(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]), post=_doubled
    ),
    "unigram, punctuation apart (DeBERTa)": lambda: _unigram(
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation("isolated"), pre_tokenizers.Metaspace()]), post=_typed
    ),
    "unigram, marks last (XLNet)": lambda: _unigram(pre_tokenizers.Metaspace(), post=_mark_last),
    "unigram, language first (NLLB)": lambda: _unigram(
        pre_tokenizers.Metaspace(), normal=normalizers.NFKC(), post=_around("<s> $A </s>", "<s> $A $B </s>")
    ),
    "pieces, cased (BERT)": lambda: _cased(
        processors.BertProcessing(("</s>", 3), ("<s>", 2)), lowercase=False, strip_accents=False
    ),
    "pieces, Chinese together (multilingual)": lambda: _cased(
        _typed, lowercase=False, handle_chinese_chars=False, strip_accents=True
    ),
    "pieces, doubled marks (MPNet)": lambda: _pieces(lowercase=True, cleanup=True, post=_doubled),
    "ends of words, closed (CLIP)": lambda: _trained(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"), _bpe(end_of_word_suffix="</w>"),
        pre_tokenizers.Sequence([_regex_split(), pre_tokenizers.WhitespaceSplit()]),
        normal=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
        decoder=decoders.BPEDecoder("</w>"), post=_closed,
    ),
    "letters (CANINE's way)": lambda: _trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False),
        pre_tokenizers.Split(Regex("."), "isolated"), decoder=decoders.Fuse(), post=_closed,
    ),
}  # fmt: skip


def tokenizer_of(kind: str, **settings: Any) -> Any:
    """A tokenizer of a kind, as transformers has it."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object={**KINDS, **FURTHER}[kind](),
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
