"""Files of data, settings and state that mean harm: by kind and name, as something that puts one at a path.

Made of the good file that is there, where that matters. `KINDS` says which kind a path is of, by its ending.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hostile_models import CONTROL, Put
from readers import JSON_WORDS, damage

__all__ = [
    "anything", "arrays", "conversations", "documents", "json_lines", "pictures", "settings", "sounds", "tables",
    "templates", "tokenizers",
]  # fmt: skip


def content(data: bytes | str) -> Put:
    """Exactly these bytes."""

    def write(path: Path) -> None:
        path.write_bytes(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)

    return write


def changed(function: Callable[[bytes], bytes]) -> Put:
    """The good file, changed."""

    def write(path: Path) -> None:
        path.write_bytes(function(path.read_bytes()))

    return write


def special(make: Callable[[Path], object]) -> Put:
    """Something else in place of the file."""

    def write(path: Path) -> None:
        path.unlink()
        make(path)

    return write


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(80 << 30)


def anything() -> dict[str, Put]:
    """What any reader of a file may meet."""
    found: dict[str, Put] = {
        "missing": special(lambda path: None),
        "empty": content(b""),
        "words": content(b"neither this nor that\n" * 20),
        "zeros": content(bytes(4096)),
        "ones": content(b"\xff" * 4096),
        "control": content(CONTROL * 50),
        "folder": special(Path.mkdir),
        "fifo": special(os.mkfifo),
        "device": special(lambda path: path.symlink_to("/dev/zero")),
        "link-to-itself": special(lambda path: path.symlink_to(path.name)),
        "80-gb-of-nothing": special(_sparse),
        "half": changed(lambda data: data[: len(data) // 2]),
        "without-its-end": changed(lambda data: data[:-1]),
        "longer": changed(lambda data: data + b"\0" * 64),
    }
    for seed in range(12):
        random = np.random.default_rng(seed)
        found[f"damaged-{seed}"] = changed(lambda data, random=random: damage(data, random, JSON_WORDS))
    return found


# ---- JSON and TOML -----------------------------------------------------------------------------------------

_WRONG: dict[str, Any] = {
    "null": None,
    "text": "x",
    "control": CONTROL,
    "number": -1,
    "fraction": 0.5,
    "huge": 10**40,
    "list": [],
    "table": {},
    "nested": [[{"a": []}]],
    "up": "../../../etc/passwd",
    "nul": "a\0b",
    "entry": "evil:go",
    "true": True,
    "long": "x" * 100_000,
    "many": [1] * 5000,
}


def documents() -> dict[str, Put]:
    """JSON files: broken ones, and the good one with a value of another kind at each place."""
    found = {
        "list": content("[]"),
        "null": content("null"),
        "table": content("{}"),
        "number": content("1e999"),
        "deep": content("[" * 100_000),
        "deep-tables": content('{"a":' * 5000 + "1" + "}" * 5000),
        "digits": content('{"a": ' + "9" * 100_000 + "}"),
        "not-a-number": content('{"a": NaN}'),
        "surrogate": content('{"a": "\\ud800"}'),
        "twice": content('{"a": 1, "a": 2}'),
        "utf-16": content('{"a": 1}'.encode("utf-16")),
        "bom": content(b"\xef\xbb\xbf{}"),
    }

    def put_in(keys: int, name: str) -> Put:
        def write(path: Path) -> None:
            document = json.loads(path.read_text("utf-8"))
            places = list(_places(document))
            holder, key = places[keys % len(places)]
            holder[key] = _WRONG[name]
            path.write_text(json.dumps(document), "utf-8")

        return write

    for name in _WRONG:
        for place in range(6):
            found[f"{name}-at-{place}"] = put_in(place * 7 + len(name), name)
    return found


def _places(document: Any) -> Any:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items):
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)


def settings() -> dict[str, Put]:
    """TOML files."""
    return {
        "deep": content("a = " + "[" * 5000 + "]" * 5000),
        "dotted": content(".".join(["a"] * 20_000) + " = 1"),
        "tables": content("".join(f"[a{'.b' * i}]\n" for i in range(500))),
        "unknown": content('[train]\nevil = "x"\n'),
        "control": content('[train]\n"\\u001b[2J" = "\\u001b[2J"\n'),
        "entry": content('[train]\ndata = ["evil:go"]\n[artifacts]\n[export]\nsource = "evil:go"\n'),
        "types": content(
            '[train]\nepochs = "many"\nseed = 1979-05-27\n[artifacts]\nloss = 3\n[check]\nsteps = inf\n'
        ),
        "not-utf-8": content(b"[train]\nprefix = '\xff'\n"),
        "nul": content('[train]\noutput = "a\\u0000b"\n'),
        "digits": content("[train]\nepochs = " + "9" * 10_000 + "\n"),
        "writes": content('[train]\ntensorboard = "/tmp/evil"\noutput = "/tmp/evil"\n'),
    }


# ---- tables and arrays -------------------------------------------------------------------------------------


def tables() -> dict[str, Put]:
    """CSV files of the columns a, b, c, d and label."""
    head, row = "a,b,c,d,label\n", "1,2,3,4,x\n"
    return {
        "header-only": content(head),
        "one-row": content(head + row),
        "no-header": content(row * 20),
        "ragged": content(head + row * 20 + "1,2\n"),
        "quotes": content(head + '"1,2,3,4,x\n' * 20),
        "nul": content(head + row * 20 + "1,2,3,\0,x\n"),
        "huge-number": content(head + row * 20 + f"{'9' * 5000},1,1,1,x\n"),
        "not-finite": content(head + row * 20 + "nan,inf,-inf,1e999,x\n"),
        "text": content(head + row * 20 + "q,w,e,r,x\n"),
        "control": content(head + f'1,2,3,4,"{CONTROL}"\n' * 20),
        "control-head": content(f'"{CONTROL}",b,c,d,label\n' + row * 20),
        "formula": content(head + "1,2,3,4,=1+1\n" * 10 + "1,2,3,4,@x\n" * 10),
        "long-cell": content(head + f'1,2,3,4,"{"x" * 300_000}"\n' * 3),
        "wide": content(",".join(f"c{i}" for i in range(20_000)) + "\n" + ",".join("1" * 20_000) + "\n"),
        "many-classes": content(head + "".join(f"1,2,3,4,w{i}\n" for i in range(15_000))),
        "same-column-twice": content("a,a,c,d,label\n" + row * 20),
        "utf-16": content((head + row * 9).encode("utf-16")),
        "latin-1": content((head + "1,2,3,4,é\n" * 20).encode("latin-1")),
        "semicolons": content((head + row * 9).replace(",", ";")),
    }


def json_lines() -> dict[str, Put]:
    """JSON lines of the columns a, b, c, d and label."""
    good = '{"a": 1, "b": 2, "c": 3, "d": 4, "label": "x"}\n' * 20
    lines = {
        "deep": '{"a": ' + "[" * 100_000,
        "number": '{"a": 1e999, "label": "x"}',
        "digits": '{"a": ' + "9" * 5000 + "}",
        "list": "[1, 2]",
        "null": "null",
        "table-in-it": '{"a": {"b": 1}, "label": null}',
        "ragged": '{"a": [1, [2]]}',
        "control": '{"a": "\\u001b[2J", "label": "\\u0007"}',
        "surrogate": '{"a": 1, "label": "\\ud800"}',
        "messages": '{"messages": [{"role": 3}]}',
        "prompt": '{"prompt": null, "completion": []}',
        "empty": "{}",
    }
    return {name: content(good + line + "\n") for name, line in lines.items()}


def conversations() -> dict[str, Put]:
    """JSON lines of messages, prompts and texts."""
    good = '{"prompt": "w1 w2", "completion": "w3"}\n' * 4
    lines = {
        "deep": '{"messages": ' + "[" * 100_000,
        "no-role": '{"messages": [{"content": "w1"}]}',
        "role-of-another-kind": '{"messages": [{"role": ["user"], "content": "w1"}]}',
        "content-of-another-kind": '{"messages": [{"role": "user", "content": {"a": 1}}]}',
        "control": '{"messages": [{"role": "\\u001b[2J", "content": "\\u001b[2J"}]}',
        "surrogate": '{"text": "\\ud800"}',
        "nothing-to-learn": '{"prompt": "w1", "completion": ""}',
        "no-assistant": '{"messages": [{"role": "user", "content": "w1"}]}',
        "unknown-words": '{"text": "nobody knows these"}',
        "long": '{"text": "' + "w1 " * 100_000 + '"}',
        "one-long-word": '{"text": "' + "w" * 1_000_000 + '"}',
        "other-columns": '{"a": 1, "b": 2}',
        "both": '{"text": "w1", "prompt": "w1", "completion": "w2"}',
        "tools": '{"messages": [{"role": "assistant", "content": null, "tool_calls": [1]}]}',
        "number": '{"text": 1e999}',
        "list": '["w1"]',
        "null": "null",
    }
    alone = {f"{name}-alone": content(line + "\n") for name, line in lines.items()}
    return alone | {name: content(good + line + "\n") for name, line in lines.items()}


def templates() -> dict[str, Put]:
    """Chat templates."""
    texts = {
        "not-closed": "{% for message in messages %}",
        "no-such-name": "{{ nothing.of.this }}",
        "python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "code": "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "format": "{{ '{0.__class__}'.format(messages) }}",
        "import": "{% import 'evil.py' as evil %}",
        "include": "{% include '../../etc/passwd' %}",
        "long": "{{ 'x' * 1000000000 }}",
        "wide": "{{ '%1000000000d' % 1 }}",
        "width-given": "{{ '%*d' % (1000000000, 1) }}",
        "wide-format": "{{ '{:1000000000}'.format(1) }}",
        "centred-less": "{{ 'x'.center(1000000000) }}",
        "centred": "{{ 'x'.center(10000000000) }}",
        "range": "{% for a in range(100000000) %}x{% endfor %}",
        "power": "{{ 9 ** 9 ** 9 }}",
        "raises": "{{ raise_exception('\x1b[2J') }}",
        "recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "deep": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "loops": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
        "empty": "",
        "divide": "{{ 1 // 0 }}",
        "changes": "{% for m in messages %}{{ m.update({'role': 1}) }}{% endfor %}",
    }
    return {name: content(text) for name, text in texts.items()}


def tokenizers() -> dict[str, Put]:
    """The good tokenizer with steps, tokens or words that ask for much, or for what is not there."""

    def replace(pattern: dict[str, str], text: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": text}

    def split(pattern: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}

    def template(ids: list[int]) -> dict[str, Any]:
        special = {"id": "x", "ids": ids, "tokens": ["x"] * len(ids)}
        pieces = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        return {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": pieces,
            "special_tokens": {"x": special},
        }

    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    changes: dict[str, dict[str, Any]] = {
        "doubles": {"normalizer": {"type": "Sequence", "normalizers": [replace({"String": "t"}, "tt")] * 33}},
        "long-replacement": {"normalizer": replace({"String": "t"}, "t" * 5000)},
        "replaces-nothing": {"normalizer": replace({"Regex": ""}, "x" * 5000)},
        "prepends": {"normalizer": {"type": "Prepend", "prepend": "x" * 100_000}},
        "backtracks": {"pre_tokenizer": split("(e+)+$")},
        "backtracks-longer": {"pre_tokenizer": split("(.*)*(.*)*(.*)*x$")},
        "nested-repeats": {"pre_tokenizer": split("((((((t{1,99}){1,99}){1,99}){1,99}){1,99}){1,99})")},
        "not-a-pattern": {"pre_tokenizer": split("(")},
        "references": {"pre_tokenizer": split(r"(t|e)\1\1\1(?<=x)")},
        "beyond-the-vocabulary": {"added_tokens": [{"id": 2**31, "content": "text", **added}]},
        "just-beyond": {"added_tokens": [{"id": 100_000, "content": "text", **added}]},
        "empty-token": {"added_tokens": [{"id": 3, "content": "", **added}]},
        "special-ids-beyond": {"post_processor": template([2**31])},
        "many-special-ids": {"post_processor": template([1] * 50_000)},
        "no-special-ids": {"post_processor": template([])},
        "decoder-doubles": {"decoder": {"type": "Sequence", "decoders": [replace({"String": "w"}, "ww")] * 33}},
        "unknown-step": {"pre_tokenizer": {"type": "Nothing"}},
        "deep-sequence": {"normalizer": _nested({"type": "NFC"}, 60)},
        "ids-beyond": {"model": {"type": "WordLevel", "vocab": {"text": 2**31, "[UNK]": 99}, "unk_token": "[UNK]"}},
        "negative-id": {"model": {"type": "WordLevel", "vocab": {"text": -1}, "unk_token": "text"}},
        "no-unknown": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        "merges-of-nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b", "b c"]}},
        "unigram-of-nothing": {"model": {"type": "Unigram", "vocab": [], "unk_id": 7}},
        "unigram-not-finite": {"model": {"type": "Unigram", "vocab": [["a", 1e999], ["t", -1e999]], "unk_id": 0}},
        "control": {"added_tokens": [{"id": 1, "content": "\x1b[2Jtext", **added}]},
    }  # fmt: skip

    def put(parts: dict[str, Any]) -> Put:
        return changed(lambda data: json.dumps({**json.loads(data), **parts}).encode())

    return {name: put(parts) for name, parts in changes.items()}


def _nested(step: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


def pictures() -> dict[str, Put]:
    """PNG files, and what is called so."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def png(width: int, height: int, data: bytes = zlib.compress(bytes(64)), extra: bytes = b"") -> bytes:
        head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        end = chunk(b"IDAT", data) + chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + end

    return {
        "huge": content(png(1 << 30, 1 << 30)),
        "large": content(png(60_000, 60_000)),
        "none": content(png(0, 0)),
        "bomb": content(png(9000, 9000, zlib.compress(bytes(27_000 * 9000 + 9000)))),
        "text-bomb": content(png(4, 4, extra=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 28))))),
        "colour-profile": content(png(4, 4, extra=chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 24))))),
        "gif": content(b"GIF89a" + struct.pack("<HHBBB", 60_000, 60_000, 0, 0, 0) + b";"),
        "bmp": content(
            b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 9999, -9999, 1, 24, 0, 0, 1, 1, 0, 0)
        ),
        "svg": content('<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'),
        "postscript": content("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(ran) (w) file\n"),
    }


def sounds() -> dict[str, Put]:
    """WAV files."""

    def wav(channels: int, rate: int, width: int, said: int, data: bytes = bytes(64)) -> bytes:
        rest = struct.pack(
            "<HHIIHH", 1, channels, rate, min(rate * channels * width, 2**32 - 1), width, width * 8
        )
        body = b"WAVEfmt " + struct.pack("<I", 16) + rest + b"data" + struct.pack("<I", said) + data
        return b"RIFF" + struct.pack("<I", len(body)) + body

    return {
        "no-channels": content(wav(0, 16000, 2, 64)),
        "many-channels": content(wav(65_535, 16000, 1, 64)),
        "no-rate": content(wav(1, 0, 2, 64)),
        "fast": content(wav(1, 2**32 - 1, 2, 64)),
        "slow": content(wav(1, 1, 2, 8000, bytes(8000))),
        "no-width": content(wav(1, 16000, 0, 64)),
        "wide": content(wav(1, 16000, 255, 64)),
        "lies": content(wav(1, 16000, 2, 2**32 - 1)),
        "nothing": content(wav(1, 16000, 2, 0, b"")),
        "half-a-sample": content(wav(2, 16000, 2, 63, bytes(63))),
    }


def arrays() -> dict[str, Put]:
    """.npz files of x and labels."""

    def saved(**given: Any) -> Put:
        def write(path: Path) -> None:
            good = dict(np.load(path))
            np.savez(
                path, **{name: (make(good[name]) if callable(make) else make) for name, make in given.items()}
            )

        return write

    def same(array: Any) -> Any:
        return array

    def member(name: str, data: bytes, times: int = 1) -> Put:
        def write(path: Path) -> None:
            with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as file:
                for _ in range(times):
                    file.write(data)

        return write

    return {
        "objects": saved(x=lambda x: x.astype(object), labels=same),
        "text": saved(x=lambda x: x.astype("U10"), labels=same),
        "times": saved(x=lambda x: x.astype("M8[s]"), labels=same),
        "complex": saved(x=lambda x: x.astype(complex), labels=same),
        "records": saved(x=np.zeros((96, 4), [("a", "f4"), ("b", "i4")]), labels=same),
        "not-finite": saved(x=lambda x: x * np.inf, labels=same),
        "none": saved(x=lambda x: x[:0], labels=lambda y: y[:0]),
        "fewer": saved(x=lambda x: x[:5], labels=same),
        "labels-too-large": saved(x=same, labels=lambda y: y + 2**40),
        "labels-negative": saved(x=same, labels=lambda y: y - 7),
        "labels-fractions": saved(x=same, labels=lambda y: y + 0.5),
        "axes": saved(x=np.zeros((96,) + (1,) * 20), labels=same),
        "wrong-width": saved(x=np.zeros((96, 5)), labels=same),
        "control": saved(**{"x": same, "labels": same, CONTROL: np.zeros(96)}),
        "x-only": saved(x=same),
        "nothing": saved(),
        "scalar": saved(x=np.float32(1), labels=same),
        "large-numbers": saved(x=lambda x: x * 1e38, labels=same),
        "bomb": member("z.npy", _header((1 << 28,)) + bytes(1 << 22), 64),
        "lies": member("z.npy", _header((1 << 45,)) + b"1234"),
        "empty-and-huge": member("z.npy", _header((0, 1 << 45, 1 << 45))),
        "not-an-array": member("z.npy", b"neither"),
        "path": member("../../evil.npy", _header((1,)) + bytes(4)),
        "code": member("z.npy", _header_text("__import__('os')")),
    }


def _header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _header_text(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
