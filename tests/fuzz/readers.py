"""Each reader of files from elsewhere as a target: what it reads, and how to make damage that counts.

`corpus/<target>` has the seeds: files that begin with `good` are read, those with `bad` give one of our errors. A
file that broke a reader once stays there.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import typer.main

import onward
from onward import checkpoint
from onward.checkpoint import integrity, portable
from onward.cli.app import app
from onward.cli.command import read_settings
from onward.cli.run_folder import read_run
from onward.data.columns import read_table
from onward.data.conversations import Encoder, read_lines
from onward.data.images import open_picture
from onward.data.read import read_arrays
from onward.data.sound import fit_wave, read_wave
from onward.data.text import text_settings
from onward.export.huggingface.folder import read_card
from onward.federated.update import Update
from onward.graph.gate import read_proto
from onward.graph.load import load_model
from onward.hub.folder_files import read_processor
from onward.hub.model_folder import open_language_model
from onward.info.preprocessing import Preprocessing
from onward.language.chat import read_template
from onward.lora import load_peft
from onward.runtime.sessions import open_session
from onward.train.history import History

CORPUS = Path(__file__).parent / "corpus"
Random = np.random.Generator


# ---- damage ------------------------------------------------------------------------------------------------

_WORDS = [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80", b"\0" * 9]


def damage(data: bytes, random: Random, words: Sequence[bytes] = ()) -> bytes:
    """Bytes changed, cut out, doubled, or exchanged for ones that parsers trip over."""
    made = bytearray(data)
    known = [*_WORDS, *words]
    for _ in range(random.integers(1, 5)):
        place = int(random.integers(len(made) or 1))
        match int(random.integers(6)):
            case 0 if made:
                made[place] = int(random.integers(256))
            case 1:
                del made[place : place + int(random.integers(1, 9))]
            case 2:
                made[place:place] = made[place : place + int(random.integers(1, 33))]
            case 3:
                word = known[int(random.integers(len(known)))]
                made[place : place + len(word)] = word
            case 4:
                word = known[int(random.integers(len(known)))]
                made[place:place] = word
            case _ if random.random() < 0.3:
                del made[place:]
    return bytes(made)


def damage_model(data: bytes, random: Random, words: Sequence[bytes] = ()) -> bytes:
    """Fields of the message changed, so that damage gets past the parser; or bytes, now and then."""
    if random.random() < 0.2:
        return damage(data, random, words)
    model = onnx.ModelProto.FromString(data)
    for _ in range(random.integers(1, 4)):
        _change(model, random)
    return model.SerializeToString()


_NUMBERS = [0, 1, -1, 2, 7, 16, 255, 2**31 - 1, -(2**31)]
_TEXTS = ["", "x", "w", "y", "a/../b", "\0", "\x1b[31m", "Add", "Loop", "ai.onnx.ml", "…" * 50]


def _change(message: Any, random: Random) -> None:
    fields = list(message.DESCRIPTOR.fields)
    for _ in range(20):
        field = fields[int(random.integers(len(fields)))]
        filled = [f for f, _ in message.ListFields()]
        if filled and random.random() < 0.9:
            field = filled[int(random.integers(len(filled)))]
        value = getattr(message, field.name)
        repeated = hasattr(value, "append")
        if field.message_type is not None:
            if repeated and len(value):
                chosen = int(random.integers(len(value)))
                roll = random.random()
                if roll < 0.15:
                    value.append(value[chosen])
                    return
                if roll < 0.3:
                    del value[chosen]
                    return
                if roll < 0.4 and len(value) > 1:
                    value[chosen].CopyFrom(value[int(random.integers(len(value)))])
                    return
                _change(value[chosen], random)
                return
            if not repeated and message.HasField(field.name):
                _change(value, random)
                return
            continue
        new = _scalar(field, random)
        try:
            if not repeated:
                setattr(message, field.name, new)
            elif len(value) and random.random() < 0.6:
                value[int(random.integers(len(value)))] = new
            else:
                value.append(new)
        except (ValueError, TypeError):
            continue
        return


def _scalar(field: Any, random: Random) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING:
        text = _TEXTS[int(random.integers(len(_TEXTS)))]
        return text.encode() if field.type == field.TYPE_BYTES else text
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return float(random.choice([0.0, np.nan, np.inf, -1e30]))
    if field.enum_type is not None:
        return int(random.integers(0, 24))
    wide = [*_NUMBERS, 2**62] if field.cpp_type == field.CPPTYPE_INT64 else _NUMBERS
    return int(wide[int(random.integers(len(wide)))])


def damage_zip(data: bytes, random: Random, words: Sequence[bytes] = ()) -> bytes:
    """A member of the archive damaged, and its checksum right; or the archive's own bytes."""
    if random.random() < 0.3:
        return damage(data, random, words)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        chosen = names[int(random.integers(len(names)))]
        for name in names:
            member = old.read(name)
            new.writestr(name, damage(member, random, words) if name == chosen else member)
    return made.getvalue()


# ---- checksums, so that damage reaches what is behind them -------------------------------------------------


def _sealed_checkpoint(data: bytes) -> bytes:
    body = data[: -integrity.TRAILER_SIZE] if len(data) > integrity.TRAILER_SIZE else data
    head = body + struct.pack("<8sQ", integrity.MAGIC, len(body))
    return head + sha256(head).digest()


def _sealed_state(data: bytes) -> bytes:
    return data[:-32] + sha256(data[:-32]).digest() if len(data) > 32 else data


def _sealed_png(data: bytes) -> bytes:
    made, place = data[:8], 8
    while place + 12 <= len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        chunk = data[place + 4 : place + 8 + size]
        if len(chunk) < 4 + size:
            break
        made += struct.pack(">I", size) + chunk + struct.pack(">I", zlib.crc32(chunk))
        place += 12 + size
    return made + data[place:]


# ---- targets -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Target:
    """A reader: the name of its file, what reads it, and how damage is made."""

    file: str
    read: Callable[[Path], object]
    damage: Callable[[bytes, Random, Sequence[bytes]], bytes] = damage
    seal: Callable[[bytes], bytes] | None = None
    words: Sequence[bytes] = ()

    def make(self, data: bytes, random: Random) -> bytes:
        made = self.damage(data, random, self.words)
        return self.seal(made) if self.seal is not None and random.random() < 0.8 else made


JSON_WORDS = [
    b"null", b"[", b"]", b"{", b"}", b'"', b"1e999", b"-1", b"NaN", b"[[[[[[[[", b'"\\ud800"', b"true", b"{}", b"[]",
    b"0.5", b'""', b"9" * 40, b"\\", b",", b":", b"[" * 300, b"-0",
]  # fmt: skip
TOML_WORDS = [
    *JSON_WORDS,
    b"[train]\n",
    b"[[train]]\n",
    b"=",
    b"'''",
    b'"""',
    b".a" * 90,
    b"1979-05-27",
    b"#",
    b"\n",
]
CSV_WORDS = [
    b",",
    b"\n",
    b'"',
    b"\r",
    b"\t",
    b"1e999",
    b"nan",
    b";",
    b"\xef\xbb\xbf",
    b"9" * 400,
    b"-",
    b"=1+1",
]


@functools.cache
def _train_command() -> Any:
    return typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]


def _settings(path: Path) -> object:
    return read_settings(path, _train_command(), "train")


def _picture(path: Path) -> object:
    return open_picture(path, {"size": {"height": 4, "width": 4}, "channels": 3})


def _sound(path: Path) -> object:
    return fit_wave(*read_wave(path), {"sampling_rate": 16000, "length": 16, "layout": "T"})


def _preprocessing(path: Path) -> object:
    made = Preprocessing.from_json(path.read_text("utf-8", "surrogateescape"))
    pixels = np.zeros((5, 6, 3), np.uint8)
    if made.kind == "image":
        from onward.data.preprocess import image

        return image(pixels, made.settings)
    if made.kind == "sound":
        return fit_wave(np.zeros(50, np.float32), 16000, made.settings)
    return made


def _beside(path: Path) -> object:
    from PIL import Image

    from onward.data.images import picture_settings
    from onward.data.match_inputs import InputSpec

    settings = read_processor(path.parent)
    spec = InputSpec("x", np.dtype(np.float32), (None, 3, None, None))
    picture = path.parent / "seen.png"
    Image.new("RGB", (6, 5)).save(picture)
    return open_picture(picture, picture_settings(spec, settings))


class _Tokenizer:
    """What conversations need of a tokenizer: a token for each character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        spans = [(i, i + 1) for i in range(len(text))]
        return type("Encoding", (), {"ids": [ord(c) % 90 for c in text], "offsets": spans})


def _conversations(path: Path) -> object:
    def render(messages, *, prompt):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + ("<assistant>" if prompt else "")

    return Encoder(_Tokenizer(), render, 0, 64, 100).examples(read_lines(path))


def _chat(path: Path) -> object:
    return read_template(path.parent).render([{"role": "user", "content": "hello"}], prompt=True)


def _module(path: Path) -> object:
    from onward.api import CheckpointState, Module

    return Module(path, CheckpointState.load_checkpoint(CORPUS / "module" / "checkpoint"))


MODEL = {"damage": damage_model}
TARGETS: dict[str, Target] = {
    "gate": Target("m.onnx", read_proto, **MODEL),
    "model": Target("m.onnx", load_model, **MODEL),
    "session": Target("m.onnx", open_session, **MODEL),
    "gradient": Target("m.onnx", lambda path: onward.gradient(path, cotangent="seed"), **MODEL),
    "module": Target("training_model.onnx", _module, **MODEL),
    "checkpoint": Target("checkpoint", checkpoint.load, seal=_sealed_checkpoint),
    "state": Target("state.bin", portable.from_portable, seal=_sealed_state, words=[b"\t", b"\n", b"slot", b"-1"]),
    "update": Target("update", lambda path: Update.from_bytes(path.read_bytes()), seal=_sealed_checkpoint),
    "safetensors": Target("w.safetensors", checkpoint.from_safetensors, words=JSON_WORDS),
    "csv": Target("t.csv", read_table, words=CSV_WORDS),
    "tsv": Target("t.tsv", read_table, words=CSV_WORDS),
    "jsonl": Target("t.jsonl", read_table, words=JSON_WORDS),
    "conversations": Target("t.jsonl", _conversations, words=JSON_WORDS),
    "parquet": Target("t.parquet", read_table),
    "npy": Target("a.npy", read_arrays, words=[b"(", b")", b"9" * 12, b"'O'", b"|", b","]),
    "npz": Target("a.npz", read_arrays, damage=damage_zip, words=[b"9" * 12, b"'|O'", b"'<f8'"]),
    "png": Target("p.png", _picture, seal=_sealed_png, words=[b"IDAT", b"IHDR", b"iCCP", b"eXIf", b"zTXt"]),
    "jpeg": Target("p.jpg", _picture, words=[b"\xff\xd8", b"\xff\xe1", b"\xff\xc0", b"Exif\0\0"]),
    "wav": Target("s.wav", _sound, words=[b"data", b"fmt ", b"RIFF", b"\xfe\xff"]),
    "run": Target("run.json", lambda path: read_run(path.parent), words=JSON_WORDS),
    "config": Target("onward.toml", _settings, words=TOML_WORDS),
    "preprocessing": Target("p.json", _preprocessing, words=JSON_WORDS),
    "preprocessor_config": Target("preprocessor_config.json", _beside, words=JSON_WORDS),
    "card": Target("onward.json", lambda path: read_card(path.parent), words=JSON_WORDS),
    "tokenizer": Target("tokenizer.json", text_settings, words=JSON_WORDS),
    "chat": Target("tokenizer_config.json", _chat, words=[*JSON_WORDS, b"{{", b"}}", b"{%", b"%}"]),
    "language": Target("config.json", lambda path: open_language_model(path.parent), words=JSON_WORDS),
    "peft": Target("adapter_config.json", lambda path: load_peft(path.parent, ["a.weight"]), words=JSON_WORDS),
    "history": Target("history.json", History.load, words=JSON_WORDS),
}  # fmt: skip


def seeds(name: str, kind: str = "good") -> list[Path]:
    """The seeds of a target."""
    return sorted((CORPUS / name).glob(f"{kind}*"))
