"""An option that would do nothing is refused: one that is ignored looks as if it had been followed.

`test_task_options.py` has the options of tasks. Here is every other option of every command: those that apply whatever
the command is given are named in `ALWAYS`, each of the others has a line in which it does nothing.
"""

from __future__ import annotations

import itertools
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.main import get_command

from onward.cli.app import app
from onward.cli.commands.finetune import ALL_OPTIONS
from onward.data.match_inputs import InputSpec
from onward.data.read import DataOptions, prepare, read_data
from onward.errors import DataError

# the rest of a line, the option, and what is said
LINES = [
    ("export nets:build -o net.onnx", "--task pooling", "Hugging Face"),
    ("export nets:build -o net.onnx", "--pooling mean", "Hugging Face"),
    ("export nets:build -o net.onnx", "--quantize int8", "Hugging Face"),
    ("export nets:build -o net.onnx", "--artifacts", "Hugging Face"),
    ("export folder --artifacts -o out", "--quantize int8", "--quantize is for a model"),
    ("export folder --artifacts -o out", "--inference", "--training is for a model"),
    ("export folder --artifacts -o out", "--no-check", "--no-check is for a model"),
    ("artifacts model.onnx -l mse", "--head fc", "--head needs --classes"),
    ("artifacts model.onnx -l mse", "--lora-target fc", "--lora-target needs --lora"),
    ("artifacts model.onnx -l mse", "--data data.npz", "--data is for --quantize"),
    ("artifacts model.onnx -l mse", "--batch-norm frozen", "--batch-norm is for models with batch norm"),
    ("artifacts model.onnx -l mse", "--momentum 0.9", "momentum"),
    ("artifacts model.onnx -l mse --optimizer adafactor", "--momentum 0.9", "momentum"),
    ("artifacts folder --lora 2", "--loss mse", "--loss does not go with"),
    ("artifacts folder --lora 2", "--portable", "--portable does not go with"),
    ("train artifacts -o new -d data.npz", "--best accuracy", "need data to evaluate on"),
    ("train artifacts -o new -d data.npz", "--metric accuracy", "need data to evaluate on"),
    ("train artifacts -o new -d data.npz --eval-data data.npz", "--hold-out 0.2", "--hold-out is for data without"),
    ("train artifacts -o new -d data.npz", "--shard-optimizer", "--shard-optimizer is for several processes"),
    ("train artifacts -o new -d data.npz", "--stages 2", "cannot be divided"),
    ("train artifacts -o new -d data.npz --schedule one-cycle", "--warmup 3", "--warmup is for schedules"),
    ("train artifacts -o new -d data.npz", "--tokenizer data.npz", "--tokenizer is for texts"),
    ("train artifacts -o new -d data.npz", "--label y", "--label is for tables and folders"),
    ("train artifacts -o new -d data.npz", "--augment flip", "augmentation needs data with one array of pictures"),
    ("distributed artifacts -o new -d data.npz", "--node-rank 1", "several machines"),
    ("distributed artifacts -o new -d data.npz", "--master host0:29500", "several machines"),
    ("finetune model.onnx -d data.csv -o out.onnx", "--adapters more", "--adapters is no option of"),
    ("finetune model.onnx -d data.csv -o out.onnx", "--no-merge", "--no-merge is no option of"),
    ("finetune model.onnx -d data.csv -o out.onnx", "--resume", "name it"),
    ("evaluate run -d data.npz", "--task image-classification", "--task is for models for inference"),
    ("evaluate model.onnx -d data.npz", "--checkpoint best", "are for a run"),
    ("evaluate model.onnx -d data.npz", "--prefix a", "are for a run"),
    ("infer model.onnx -d data.npz", "--max-new-tokens 3", "the options of text are for --prompt"),
    ("infer model.onnx -d data.npz", "--temperature 2", "the options of text are for --prompt"),
    ("infer model.onnx -d data.npz", "--top-p 0.5", "the options of text are for --prompt"),
    ("infer model.onnx -d data.npz", "--repetition-penalty 2", "the options of text are for --prompt"),
    ("infer model.onnx -d data.npz", "--seed 2", "the options of text are for --prompt"),
    ("infer model.onnx -d data.npz", "--stop w", "the options of text are for --prompt"),
    ("infer model.onnx -d data.npz", "--adapter a", "the options of text are for --prompt"),
    ("infer model.onnx -d data.npz", "--save drawn", "--save draws"),
    ("infer folder --text words", "--top-k 3", "--top-k is for"),
    ("infer folder --text words", "--device cuda", "--text runs on the CPU"),
    ("infer folder --text words", "--data data.npz", "--text goes without --data"),
    ("infer folder --text words", "--output a.csv", "--text goes without --data and --output"),
    ("infer folder --text words", "--outputs scores", "--outputs is for data"),
    ("infer folder --text words", "--map a=b", "--map is for data"),
    ("infer folder --text words", "--label a", "--label is for data"),
    ("infer folder --text words", "--batch-size 2", "--batch-size is for data"),
    ("infer folder --text words", "--overwrite", "--overwrite is for"),
    ("infer folder --prompt words", "--text words", "--prompt goes without --text"),
    ("deploy run out.onnx", "--keep-accuracy 1", "--keep-accuracy goes with"),
    ("deploy run out.onnx", "--force", "--force is for --quantize"),
    ("deploy run out.onnx", "--samples 3", "--samples is for --data"),
    ("deploy run out.onnx", "--map a=b", "--map is for --data"),
    ("inspect model.onnx", "--batch-size 3", "--batch-size is for --device"),
    ("inspect model.onnx", "--prefix a", "--prefix is for a folder"),
    ("inspect model.onnx", "--overwrite", "--overwrite is for --html"),
    ("inspect model.onnx --device cuda", "--html page.html", "--html is for contents"),
    ("inspect model.onnx --device cuda", "--all", "--all is for contents"),
    ("convert run/best w.safetensors", "--prefix a", "--prefix is for folders"),
    ("convert run/best w.safetensors", "--into run/best", "are for safetensors sources"),
    ("convert run/best w.safetensors", "--freeze w1", "are for safetensors sources"),
    ("web artifacts site", "--port 80", "--port is for --serve"),
]  # fmt: skip
# What a command does with any model and any data. Of train and distributed, how data is read is tried below.
ALWAYS = {
    "export": "output opset overwrite training",
    "artifacts": "output optimizer train freeze weight-decay loss-input extra-output prefix ort-format nominal "
    "precision keep-batch quantize teacher overwrite classes lora",
    "check": "loss optimizer train freeze batch-size steps seconds device",
    "train": "data eval-data map device epochs batch-size learning-rate schedule gradient-accumulation-steps clip-norm "
    "patience save-every keep seed no-shuffle prefix tensorboard mlflow wandb processes output resume overwrite",
    "distributed": "nodes",
    "finetune": "data output task quantize run overwrite",
    "chat": "system top-k max-new-tokens temperature top-p repetition-penalty seed stop adapter",
    "evaluate": "data metric map label batch-size device",
    "infer": "prompt",
    "deploy": "checkpoint outputs quantize data rtol atol external-data prefix overwrite device",
    "inspect": "device",
    "bench": "batch-size steps warmup threads device prefix",
    "gradcheck": "data of wrt rtol atol seed size device",
    "convert": "overwrite",
    "web": "title webgpu prefix packages serve",
    "mobile": "output data prefix",
    "conform": "device runtime only output overwrite",
}
OF_DATA = {
    "normalize": ({"image"}, {"image": {"image_mean": [0.5], "image_std": [0.5]}}),
    "sample-rate": ({"sound"}, {"sampling_rate": 16000}),
    "skip-bad": ({"image", "sound"}, {"skip_bad": True}),
    "drop": ({"table", "text"}, {"drop": ("a",)}),
    "text-column": ({"text"}, {"text_column": "words"}),
    "max-length": ({"text"}, {"max_length": 4}),
    "standardize": ({"table"}, {}),
}
KINDS = ["image", "sound", "table", "text", "arrays"]


@pytest.mark.parametrize(("line", "option", "message"), LINES)
def test_an_option_that_does_nothing_is_refused(
    line: str, option: str, message: str, workshop: Path, run: Any
) -> None:
    Path("data.csv").write_text("a,b,c,d,label\n" + "1,2,3,4,x\n2,3,4,5,y\n" * 9, encoding="utf-8")
    result = run(*line.split(), *option.split(), code=1)
    assert message in result.stderr


def test_every_option_of_every_command_applies_always_or_is_refused() -> None:
    tried: dict[str, set[str]] = {}
    for line, option, _ in LINES:
        tried.setdefault(line.split()[0], set()).add(option.split()[0])
    tried["train"] |= {f"--{name}" for name in [*OF_DATA, "resize", "crop"]}
    tried["finetune"] |= {f"--{name.replace('_', '-')}" for name in ALL_OPTIONS}
    shared = {"json", "quiet", "debug", "limit", "config"}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        if name in ("doctor", "lora"):  # no options of their own, and three commands with one use each
            continue
        always = {f"--{option}" for option in {*ALWAYS[name].split(), *shared}}
        if name == "distributed":  # the options of train besides
            always |= tried["train"] | {f"--{option}" for option in ALWAYS["train"].split()}
        for parameter in command.params:
            spellings = {
                text for text in (*parameter.opts, *parameter.secondary_opts) if text.startswith("-")
            }
            covered = spellings & (always | tried.get(name, set()))
            assert covered or not spellings, f"onward {name}: where is {max(spellings, key=len)} refused?"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind of data."""
    folder = tmp_path_factory.mktemp("kinds")
    for label in "ab":
        for kind in ("image", "sound"):
            (folder / kind / label).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "image" / label / "1.png")
        with wave.open(str(folder / "sound" / label / "1.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 64, "NONE", ""))
            file.writeframes(bytes(128))
    (folder / "table").with_suffix(".csv").write_text("a,b,label\n1,2,x\n2,3,y\n3,4,x\n", encoding="utf-8")
    (folder / "text").with_suffix(".csv").write_text("a,words,label\n1,w,x\n2,v,y\n", encoding="utf-8")
    np.savez(folder / "arrays.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    reader = Tokenizer(models.WordLevel({"[UNK]": 0, "w": 1, "v": 2}, unk_token="[UNK]"))
    reader.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    reader.save(str(folder / "tokenizer.json"))
    return folder


INPUTS = {
    "image": [InputSpec("x", np.dtype(np.float32), (None, 3, 8, 8))],
    "sound": [InputSpec("x", np.dtype(np.float32), (None, None))],
    "table": [InputSpec("x", np.dtype(np.float32), (None, 2))],
    "text": [InputSpec("input_ids", np.dtype(np.int64), (None, None))],
    "arrays": [InputSpec("x", np.dtype(np.float32), (None, 2))],
}


@pytest.mark.parametrize(("option", "kind"), list(itertools.product(OF_DATA, KINDS)))
def test_options_of_data_are_refused_for_every_other_kind(option: str, kind: str, sources: Path) -> None:
    kinds, settings = OF_DATA[option]
    path = sources / {"image": "image", "sound": "sound", "arrays": "arrays.npz"}.get(kind, f"{kind}.csv")
    inputs = [*INPUTS[kind], InputSpec("y", np.dtype(np.int64), (None,))]

    def read() -> None:
        if option == "drop" and kind == "table":
            inputs[0] = InputSpec("x", np.dtype(np.float32), (None, 1))
        data = read_data([(None, path)], inputs, DataOptions(near=[sources], **settings))
        prepare(data, [], standardize=option == "standardize")

    if kind in kinds:
        read()
    else:
        with pytest.raises(DataError, match=f"--{option.replace('sample', 'sampling')}"):
            read()
