"""Pictures and tokenizers from anyone: one error, no other program, no memory without bounds."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from onward.data.images import read_picture
from onward.data.text import read_tokenizer
from onward.errors import DataError

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for Ghostscript is a shell script")
@pytest.mark.parametrize("name", ["picture.png", "picture.eps", "picture"])
def test_a_picture_starts_no_program(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, trace = tmp_path / "bin", tmp_path / "started"
    programs.mkdir()
    program = programs / "gs"
    program.write_text(f"#!/bin/sh\ntouch '{trace}'\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    picture = tmp_path / name
    picture.write_bytes(EPS)
    with pytest.raises(DataError, match="cannot read the image"):
        read_picture(picture)
    assert not trace.exists()


def tokenizer_file(folder: Path, **parts: object) -> Path:
    path = folder / "tokenizer.json"
    document = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
    }  # fmt: skip
    path.write_text(json.dumps({**document, **parts}))
    return path


def replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize("stage, parts", [("normalizer", "normalizers"), ("decoder", "decoders")])
@pytest.mark.parametrize("pattern", [{"String": "a"}, {"Regex": "a"}, {"Regex": ""}])
def test_a_tokenizer_that_makes_texts_much_longer_is_refused(
    stage: str, parts: str, pattern: dict[str, str], tmp_path: Path
) -> None:
    steps = {"type": "Sequence", parts: [replace(pattern, "aa")] * 33}
    with pytest.raises(DataError, match=f"its {stage} may make a text .* times longer"):
        read_tokenizer(tokenizer_file(tmp_path, **{stage: steps}))


def test_a_tokenizer_that_replaces_a_little_is_read(tmp_path: Path) -> None:
    steps = {
        "type": "Sequence",
        "normalizers": [replace({"String": " "}, "▁"), replace({"Regex": " {2,}"}, " ")],
    }
    tokenizer = read_tokenizer(tokenizer_file(tmp_path, normalizer=steps))
    assert (
        tokenizer.encode("a").ids == [0] and tokenizer.decode([0]) == "a" and tokenizer.get_vocab_size() == 2
    )


def test_a_pattern_that_backtracks_without_end_is_one_error(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = read_tokenizer(tokenizer_file(tmp_path, pre_tokenizer=split))
    with pytest.raises(DataError, match="fails on a text"):
        tokenizer.encode_batch(["a" * 40 + "b"])
