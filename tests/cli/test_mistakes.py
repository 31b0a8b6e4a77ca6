"""Every mistake that a command can be given: one line and a hint, an exit code, and nothing left behind."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from cli.conftest import contents
from onward.cli.app import app

# A file that cannot be read as what it should be, by ending, and what is said about it.
MODELS = {
    "missing.onnx": "no model at 'missing.onnx'",
    "folder.onnx": "no model at 'folder.onnx': it is a folder",
    "empty.onnx": "'empty.onnx' is not an ONNX model: it is empty",
    "cut.onnx": "'cut.onnx' is not an ONNX model, or is cut short",
    "garbage.onnx": "'garbage.onnx' is not an ONNX model, or is cut short",
    "data.npz": "'data.npz' is not an ONNX model, or is cut short",
}
DATA = {
    "missing.npz": "no data at 'missing.npz'",
    "empty.npz": "cannot read 'empty.npz'",
    "cut.npz": "cannot read 'cut.npz'",
    "garbage.npz": "cannot read 'garbage.npz'",
    "model.onnx": "'model.onnx' has an unknown ending",
    "cut.safetensors": "cut.safetensors",
    "garbage.safetensors": "garbage.safetensors",
    "no_such_module:batches": "there is no module 'no_such_module'",
    "os:no_such_function": "the module has no 'no_such_function'",
}
CHECKPOINTS = {
    "missing.ckpt": "missing.ckpt",
    "folder": "'folder'",
    "empty.ckpt": "checkpoint 'empty.ckpt'",
    "cut.ckpt": "checkpoint 'cut.ckpt'",
    "garbage.ckpt": "checkpoint 'garbage.ckpt': not a checkpoint",
    "model.onnx": "checkpoint 'model.onnx': not a checkpoint",
}
ARTIFACTS = {
    "missing": "'missing'",
    "file": "'file' is a file, not a folder of artifacts",
    "model.onnx": "'model.onnx' is a file, not a folder of artifacts",
    "folder": "'folder'",
}
FILE_TARGETS = {
    "file/new": "'file/new' cannot be written: 'file' is a file, not a folder",
    "folder": "'folder' is a folder, and a file is to be written",
}
FOLDER_TARGETS = {
    "file": "'file' is a file, and a folder is to be written",
    "file/new": "'file/new' cannot be written: 'file' is a file, not a folder",
}
# Commands by what they take, `{}` in its place.
TAKES: list[tuple[dict[str, str], list[str]]] = [
    (MODELS, [
        "artifacts {} -l mse -o new", "check {} -l mse", "gradcheck {}", "lora inject {} new.onnx",
        "lora merge {} new.onnx",
    ]),
    ({name: text for name, text in MODELS.items() if not name.startswith("folder")}, [
        "infer {} -d data.npz", "finetune {} -d data.npz -o new.onnx",
    ]),
    (DATA, [
        "train artifacts -d {} -o new", "train artifacts -d data.npz --eval-data {} -o new",
        "evaluate run -d {}", "infer model.onnx -d {}", "deploy run new.onnx -d {}",
    ]),
    ({name: text for name, text in DATA.items() if ":" not in name}, [
        "gradcheck model.onnx -d {}", "distributed artifacts -d {} -o new",
        "distributed artifacts -d data.npz --eval-data {} -o new", "finetune model.onnx -d {} -o new.onnx",
    ]),
    (CHECKPOINTS, [
        "evaluate run -d data.npz -c {}", "deploy run new.onnx -c {}", "lora extract {} new.safetensors",
        "convert weights.safetensors new --into {}",
    ]),
    ({name: text for name, text in CHECKPOINTS.items() if name != "folder"}, ["convert {} new.safetensors"]),
    ({name: text for name, text in CHECKPOINTS.items() if name not in ("folder", "model.onnx")}, ["inspect {}"]),
    ({"cut.onnx": MODELS["cut.onnx"], "empty.onnx": MODELS["empty.onnx"], "garbage.onnx": MODELS["garbage.onnx"],
      "cut.safetensors": "cut.safetensors", "garbage.safetensors": "garbage.safetensors",
      "folder": "'folder' holds neither artifacts nor a run"}, ["inspect {}"]),
    ({"cut.safetensors": "cut.safetensors", "garbage.safetensors": "garbage.safetensors",
      "empty.safetensors": "empty.safetensors"}, ["convert {} new"]),
    (ARTIFACTS, ["train {} -d data.npz -o new", "deploy {} new.onnx", "bench {}", "web {} new"]),
    ({name: message for name, message in ARTIFACTS.items() if name != "model.onnx"}, ["evaluate {} -d data.npz"]),
    ({"cut-model": "training_model.onnx' is not", "cut-checkpoint": "checkpoint '"}, [
        "train {} -d data.npz -o new", "evaluate {} -d data.npz", "bench {}", "web {} new", "inspect {}",
    ]),
    ({"cut-evaluation": "eval_model.onnx' is not"}, [
        "train {} -d data.npz -o new", "evaluate {} -d data.npz", "bench {}", "web {} new", "inspect {}",
        "deploy {} new.onnx", "infer {} -d data.npz",
    ]),
    (dict.fromkeys(ARTIFACTS, "no artifacts in"), ["distributed {} -d data.npz -o new"]),
    (FILE_TARGETS, [
        "deploy run {}", "lora inject model.onnx {}", "lora merge adapted.onnx {}",
        "lora extract adapting/checkpoint {}", "convert run/best {}", "convert weights.safetensors {}",
        "inspect model.onnx --html {}", "export os:getcwd -o {}",
    ]),
    ({"file/new.npz": "'file' is a file", "file/new.csv": "'file' is a file",
      "folder.npz": "'folder.npz' is a folder"}, ["infer model.onnx -d data.npz -o {}"]),
    (FOLDER_TARGETS, [
        "artifacts model.onnx -l mse -o {}", "train artifacts -d data.npz -o {}",
        "train artifacts -d data.npz -o new --tensorboard {}", "distributed artifacts -d data.npz -o {}",
        "web artifacts {}", "convert artifacts {}", "export folder -o {}",
    ]),
]  # fmt: skip

# What is wrong with this command alone: line, exit code, part of the error, part of the hint.
ALONE: list[tuple[str, int, str, str]] = [
    # names
    ("artifacts model.onnx -l mse -o new --train w3", 1, "w3 is not found", "onward inspect"),
    ("artifacts model.onnx -l mse -o new --freeze nothing", 1, "nothing is not found", "onward inspect"),
    ("artifacts model.onnx -l mse -o new --train w1 --freeze w1", 1, "cannot be frozen and", "--freeze"),
    ("artifacts model.onnx -l mse -o new --loss-input z", 1, "'z' is not found", "onward inspect"),
    ("artifacts model.onnx -l mse -o new --extra-output z", 1, "'z' is not found", "onward inspect"),
    ("artifacts model.onnx -l mse -o new --lora 2 --lora-target z", 1, "'z' matches no weight", "patterns"),
    ("artifacts model.onnx -l mse -o new --lora-target w1", 1, "needs --lora RANK", "--lora 8"),
    ("artifacts model.onnx -l mse -o new --prefix ../x", 1, "would lead into another folder", "beginning"),
    ("artifacts model.onnx -l none -o new", 1, "training needs a single number", "--loss"),
    ("convert run/best new.bin", 1, "needs the layout of its portable step", "--into artifacts/state.bin"),
    ("convert run/best new.bin --into run/best", 1, "not a state file of a portable step", ""),
    ("check model.onnx -l mse --train z", 1, "z is not found", "onward inspect"),
    ("check model.onnx -l mse --freeze z", 1, "z is not found", "onward inspect"),
    ("check model.onnx -l none", 1, "training needs a single number", "--loss"),
    ("gradcheck model.onnx --wrt z", 1, "'z' is not found", "onward inspect"),
    ("gradcheck model.onnx --of z", 1, "'z' is not found", "onward inspect"),
    ("gradcheck model.onnx -d other.npz", 1, "'other.npz' has 'y', which is no input", "there are x"),
    ("gradcheck model.onnx -d wide.npz", 1, "'x' has shape [2, 9]", "change the data"),
    ("infer model.onnx -d data.npz --outputs score", 1, "no output 'score'", "did you mean 'scores'?"),
    ("infer run -d data.npz --outputs z", 1, "z could not be found", "onward inspect"),
    ("deploy run new.onnx --outputs z", 1, "z could not be found", "onward inspect"),
    ("train artifacts -d data.npz -o new --map y=x", 1, "the model has no input 'y'", "it takes x"),
    ("train artifacts -d data.npz -o new --map x=z", 1, "the data has no 'z'", "it has x"),
    ("train artifacts -d data.npz -o new --best nothing --hold-out 0.2", 1, "best_metric is 'nothing'", ""),
    ("lora inject model.onnx new.onnx -t z", 1, "'z' matches no weight", "patterns"),
    ("lora inject adapted.onnx new.onnx", 1, "has a 'w1.lora_a' already", ""),
    ("lora merge model.onnx new.onnx", 1, "has no adapters to merge", "onward deploy"),
    ("lora extract artifacts/checkpoint new.ckpt", 1, "no adapters", "--lora 8"),
    ("convert weights.safetensors new --freeze z", 1, "does not have: ['z']", ""),
    ("convert weights.safetensors new --into adapting/checkpoint", 1, "w1", ""),
    ("convert run/best new --into run/best", 1, "for safetensors sources", "leave them away"),
    ("convert artifacts new --freeze w1", 1, "for safetensors sources", "leave them away"),
    ("convert artifacts new", 1, "holds artifacts of Onward already", "onward train artifacts"),
    ("convert run new", 1, "'run' lacks eval_model.onnx and checkpoint", "run/best"),
    ("convert folder new", 1, "'folder' lacks eval_model.onnx", "onnxruntime-training"),
    ("convert missing new", 1, "nothing at 'missing'", "path"),
    ("inspect missing", 1, "nothing at 'missing'", "name a model"),
    ("inspect artifacts --prefix x-", 1, "neither artifacts nor a run", "--prefix"),
    ("bench artifacts --prefix x-", 1, "no x-training_model.onnx", "--prefix"),
    ("deploy artifacts new.onnx --prefix x-", 1, "no x-training_model.onnx", "--prefix"),
    ("web artifacts new --prefix x-", 1, "no x-training_model.onnx", "--prefix"),
    ("web artifacts run", 1, "is not a site of Onward", "another folder"),
    ("web artifacts new --packages missing", 1, "no folder 'missing'", "node_modules"),
    ("web artifacts new --packages folder", 1, "'folder' lacks flatbuffers", "node_modules"),
    # shapes and types of data
    ("train artifacts -d wide.npz -o new", 1, "'x' has shape [2, 9]", "change the data"),
    ("train artifacts -d short.npz -o new", 1, "different numbers of samples: x 4, labels 3", "one row"),
    ("train artifacts -d words.npz -o new", 1, "not numbers", "takes"),
    ("train artifacts -d classes.npz -o new", 1, "label", ""),
    ("train artifacts -d nan.npz -o new", 1, "of 'x' in the data is not finite", "fix these rows"),
    ("train artifacts -d nothing.npz -o new", 1, "has no sample", "right file"),
    ("train artifacts -d folder -o new", 1, "no image and no WAV file in 'folder'", "one folder for each class"),
    ("evaluate run -d wide.npz", 1, "'x' has shape [2, 9]", "change the data"),
    ("infer model.onnx -d wide.npz", 1, "has shape [2, 9]", ""),
    ("deploy run new.onnx -d wide.npz", 1, "has shape [2, 9]", ""),
    ("distributed artifacts -d wide.npz -o new", 1, "'x' has shape [2, 9]", "change the data"),
    ("train artifacts -d hole.csv -o new", 1, "'hole.csv', row 3: the label is empty", "fill it, or drop"),
    ("train artifacts -d semicolons.csv -o new", 1, "separate its columns by ';'", "commas"),
    ("train artifacts -d failing_net:build -o new", 1, "no weights here", "--debug"),
    ("train artifacts -d failing_net:number -o new", 1, "cannot make batches of int", "docs/cli.md"),
    ("train artifacts -d failing_net:wide -o new", 1, "the model fixes axis 1 of 'x' at 4", "any size of that axis"),
    ("artifacts outside.onnx -l mse -o new", 1, "cannot open 'outside.bin'", "beside the model"),
    ("check outside.onnx -l mse", 1, "cannot open 'outside.bin'", "beside the model"),
    ("gradcheck outside.onnx", 1, "cannot open 'outside.bin'", "beside the model"),
    ("lora inject outside.onnx new.onnx", 1, "cannot open 'outside.bin'", "beside the model"),
    ("infer outside.onnx -d data.npz", 1, "outside.bin", "beside the model"),
    ("evaluate no-evaluation -d data.npz", 1, "no eval_model.onnx", "onward artifacts"),
    ("deploy no-evaluation new.onnx", 1, "no eval_model.onnx", "make the artifacts again"),
    ("train spoilt-run --resume", 1, "run.json' is damaged", "name the artifacts"),
    ("evaluate spoilt-run -d data.npz", 1, "run.json' is damaged", "name the artifacts"),
    # what a shell variable without a value leaves
    ("train artifacts -d data.npz -o ''", 2, "the value of -o is empty", "variable"),
    ("artifacts model.onnx -l mse --output=", 2, "the value of --output is empty", "variable"),
    ("deploy run ''", 2, "an argument is empty", "variable"),
    # what is missing, or there already
    ("train -o new", 1, "which artifacts?", "onward train ARTIFACTS"),
    ("train artifacts -o new", 1, "no data was given", "--data"),
    ("evaluate run", 1, "no data was given", "--data"),
    ("infer model.onnx", 1, "no data was given", "--data"),
    ("distributed artifacts -o new", 1, "no data was given", "--data"),
    ("train artifacts -d data.npz", 1, "'run' holds an earlier run", "--overwrite"),
    ("distributed artifacts -d data.npz", 1, "'run' holds an earlier run", "--overwrite"),
    ("train artifacts -d missing.npz --overwrite", 1, "no data at", "data is"),
    ("distributed artifacts -d missing.npz --overwrite", 1, "no data at", "data is"),
    ("train artifacts -o new --resume", 1, "no run to resume in 'new'", "without --resume"),
    ("train run -d data.npz -o new", 1, "'run' is a run, not a folder of artifacts", "--resume"),
    ("evaluate artifacts -d data.npz -c best", 1, "'artifacts' is no run", "name a file"),
    ("infer folder -d data.npz", 1, "holds neither a run nor artifacts", "onward artifacts"),
    ("infer folder --text hello", 1, "no onward.json", "onward export"),
    ("infer model.onnx --text hello", 1, "--text needs a folder", "--data"),
    ("infer folder --text hello -d data.npz", 1, "--text goes without", "one after the other"),
    ("infer model.onnx -d data.npz -o new.txt", 1, "must end in .npz or .csv", "choose"),
    # numbers
    ("artifacts model.onnx -l mse -o new --weight-decay -1", 1, "--weight-decay is -1.0", "0 turns it off"),
    ("artifacts model.onnx -l mse -o new --weight-decay nan", 1, "--weight-decay is nan", "0 turns it off"),
    ("artifacts model.onnx -l mse -o new --optimizer sgd --momentum 2", 1, "--momentum is 2.0", "0.9"),
    ("artifacts model.onnx -l mse -o new --momentum 0.5", 1, "adamw does not take --momentum", "another"),
    ("artifacts model.onnx -l mse -o new --lora 0", 2, "'--lora'", "onward artifacts --help"),
    ("check model.onnx -l mse -b 0", 2, "'--batch-size'", "onward check --help"),
    ("train artifacts -d data.npz -o new --epochs 0", 2, "'--epochs'", "onward train --help"),
    ("train artifacts -d data.npz -o new --epochs many", 2, "'--epochs'", "onward train --help"),
    ("train artifacts -d data.npz -o new --lr -1", 2, "'--learning-rate'", "onward train --help"),
    ("train artifacts -d data.npz -o new --lr inf", 2, "'inf' is not a learning rate", "onward train --help"),
    ("train artifacts -d data.npz -o new --seed -1", 2, "'--seed'", "onward train --help"),
    ("train artifacts -d data.npz -o new --hold-out 0", 1, "--hold-out is 0.0", "--hold-out 0.1"),
    ("train artifacts -d data.npz -o new --hold-out 0.001", 1, "leaves nothing on one side", "another share"),
    ("train artifacts -d data.npz -o new --clip-norm -1", 2, "greater than or equal to 0", ""),
    ("train artifacts -d data.npz -o new -m accuracy", 1, "need data to evaluate on", "--hold-out"),
    ("train artifacts -d data.npz -o new --map x", 1, "--map takes NAME=VALUE, got 'x'", "--map image=x"),
    ("gradcheck model.onnx --rtol -1", 2, "'--rtol'", "onward gradcheck --help"),
    ("gradcheck model.onnx --rtol 0 --atol 0", 1, "both tolerances are 0", "rounded"),
    ("gradcheck model.onnx --rtol 1e-14 --atol 1e-30", 1, "", ""),
    ("bench artifacts --steps 0", 2, "'--steps'", "onward bench --help"),
    ("deploy run new.onnx --atol -1", 2, "'--atol'", "onward deploy --help"),
    ("lora inject model.onnx new.onnx --rank 0", 2, "'--rank'", "onward lora inject --help"),
    ("lora inject model.onnx new.onnx --alpha nan", 1, "--alpha is nan", "--alpha 16"),
    ("lora inject model.onnx new.onnx --dropout 2", 2, "'--dropout'", "onward lora inject --help"),
    ("distributed artifacts -d data.npz -o new -p 3 --stages 2", 1, "cannot be divided", "--processes"),
    ("distributed artifacts -d data.npz -o new -p 0", 2, "'--processes'", "onward distributed --help"),
    ("chat missing", 1, "'missing'", "folder"),
    ("conform --runtime missing", 1, "no runtime 'missing'", "reference"),
    ("conform --only Tanh -o new.txt", 1, "'new.txt' is no report", ".json"),
    ("mobile missing -o new", 1, "no folder 'missing'", "path"),
    ("distributed artifacts -d data.npz -o new --nodes 2", 1, "need --master", "host0:29500"),
    ("distributed artifacts -d data.npz -o new --nodes 2 --master a:b", 1, "not HOST:PORT", "host0:29500"),
    ("distributed artifacts -d data.npz -o new --nodes 2 --master a --node-rank 2", 1, "0 to 1", "from 0"),
    ("distributed artifacts -d data.npz -o new --master a:1", 1, "for several machines", "--nodes"),
    ("web artifacts new --port 70000", 2, "'--port'", "onward web --help"),
    ("finetune model.onnx -d data.npz -o new.onnx --lr -1", 2, "'--lr'", "onward finetune --help"),
    ("finetune model.onnx -d data.npz -o new.onnx --lr nan", 2, "'--lr'", "onward finetune --help"),
    ("finetune model.onnx -d data.npz -o new.onnx --lr inf", 2, "'--lr'", "onward finetune --help"),
    ("finetune folder --lora -d data.npz -o new --alpha nan", 2, "'--alpha'", "onward finetune --help"),
    ("finetune model.onnx -d data.npz -o new.onnx --hold-out 2", 2, "'--hold-out'", "onward finetune --help"),
    ("finetune model.onnx -d data.npz -o model.onnx", 1, "'model.onnx' already exists", "--overwrite"),
    ("finetune model.onnx -d data.npz", 2, "Missing option '--output'", "onward finetune --help"),
    ("finetune model.onnx -d data.npz -o folder", 1, "'folder' already exists", "--overwrite"),
    ("finetune model.onnx -d data.npz -o new.onnx --packing", 1, "packing is no option of tabular-", "epochs"),
    ("finetune model.onnx -d data.npz -o new.onnx --normalize half", 1, "normalize is no option of", "image-"),
    ("finetune model.onnx -d data.npz -o new.onnx --task tabular-clas", 1, "no task", "tabular-classification"),
    ("finetune model.onnx -d data.npz -o new.onnx --rank 3", 1, "rank is for adapters", "--lora"),
    ("finetune model.onnx -d data.npz -o new.onnx --drop y", 1, "--drop is for tables", "leave"),
    ("finetune folder --lora -d data.npz -o new", 1, "no model.onnx", "onward export"),
    ("finetune folder --lora -d data.npz -o run", 1, "'run' already exists", "--overwrite"),
    ("finetune folder --lora -d data.npz -o new --adapters file", 1, "'file' is a file", "another path"),
    ("deploy run new.onnx --keep-accuracy 1", 1, "--keep-accuracy goes with --quantize int8 or auto", "add it"),
    ("finetune model.onnx -d wide.npz -o new.onnx", 1, "'x' has shape [2, 9]", "change the data"),
    ("distributed artifacts -d data.npz -o new --warmup inf", 1, "--warmup is inf", "give a number"),
    ("distributed artifacts -d data.npz -o new --lr inf", 2, "'inf' is not a learning rate", "--help"),
    ("artifacts folder --lora 2 -o new --quantize int8", 1, "--quantize does not go with a language", "are set"),
    ("artifacts folder -o new", 1, "it is a folder", "--lora RANK"),
    # words that are nearly right
    ("finetune model.onnx -d data.npz -o new.onnx --quantize int7", 2, "'int7' is unknown", "'int8'?"),
    ("artefacts model.onnx", 2, "No such command 'artefacts'", "did you mean 'artifacts'?"),
    ("lora injct model.onnx new.onnx", 2, "No such command 'injct'", "did you mean 'inject'?"),
    ("artifacts model.onnx -l msee -o new", 2, "'msee' is unknown", "did you mean 'mse'?"),
    ("artifacts model.onnx -l mse -o new --optimizer sdg", 2, "'sdg' is unknown", "did you mean 'sgd'?"),
    ("artifacts model.onnx -l mse -o new --optimiser sgd", 2, "No such option", "did you mean --optimizer?"),
    ("check model.onnx -l crossentropy", 2, "'crossentropy' is unknown", "did you mean 'cross-entropy'?"),
    ("train artifacts -d data.npz -o new --schedule cosin", 2, "'cosin' is unknown", "'cosine'?"),
    ("train artifacts -d data.npz -o new -m acc", 2, "'acc' is unknown", "did you mean 'accuracy'?"),
    ("evaluate run -d data.npz -m zzz", 2, "'zzz' is unknown", "it is one of accuracy, top3, top5, f1"),
    ("train artifacts -d data.npz -o new -m top", 2, "'top' is unknown", "did you mean 'top3' or 'top5'?"),
    ("deploy run new.onnx --quantize int7", 2, "'int7' is unknown", "did you mean 'int8'?"),
    ("export folder -o new --quantize int9", 2, "'int9' is unknown", "did you mean 'int8'?"),
    ("bench", 2, "Missing argument", "onward bench --help"),
    ("export folder", 2, "Missing option '--output'", "onward export --help"),
    ("convert run/best", 2, "Missing argument 'target'", "onward convert --help"),
    ("train artifacts more -d data.npz", 2, "unexpected extra argument", "onward train --help"),
    ("train artifacts --epochs", 2, "requires an argument", "--help"),
    # configuration files
    ("train artifacts --config missing.toml", 2, "cannot read 'missing.toml'", "path"),
    ("train artifacts --config folder", 2, "cannot read 'folder'", "path"),
    ("train artifacts --config data.npz", 2, "'data.npz' is not valid TOML", "one option a line"),
    ("train artifacts --config broken.toml", 2, "'broken.toml' is not valid TOML", "one option a line"),
    ("train artifacts --config typo.toml", 2, "unknown option 'epoch'", "did you mean 'epochs'?"),
    ("train artifacts --config flat.toml", 2, "[train] must be a table", "[train]"),
    ("train artifacts --config kind.toml", 2, "'--epochs'", "onward train --help"),
    ("bench artifacts --config bench.toml", 2, "'--steps'", "onward bench --help"),
    # sources of an export
    ("export file -o new", 1, "'file' is a file", "module:function"),
    ("export ./missing -o new", 1, "no folder './missing'", "path"),
    ("doctor now", 2, "unexpected extra argument", "onward doctor --help"),
    ("export no_such_module:build -o new.onnx", 1, "there is no module 'no_such_module'", "module:function"),
    ("export os.py:getcwd -o new.onnx", 1, "there is no module 'os.py'", "without .py: os:getcwd"),
    ("export sub/net.py:build -o new.onnx", 1, "is not module:function", "net:build"),
    ("export os:getcwd -o new.onnx", 1, "must return (module, example inputs)", "return Net()"),
    ("export os:getcwd -o new.onnx --artifacts", 1, "for Hugging Face models", "onward artifacts"),
    ("export os:getcwd -o new.onnx --quantize int8", 1, "for Hugging Face models", "onward deploy"),
    ("export broken_net:build -o new.onnx", 1, "broken_net.py", ""),
    ("export failing_net:build -o new.onnx", 1, "no weights here", "--debug"),
    ("export needy_net:build -o new.onnx", 1, "'no_such_package' is not there", "installed"),
]  # fmt: skip


def all_cases() -> Iterator[tuple[str, int, str, str]]:
    for takes, commands in TAKES:
        for command in commands:
            for name, message in takes.items():
                yield command.format(name), 1, message, ""
    yield from ALONE


CASES = list(all_cases())


@pytest.fixture(scope="module")
def desk(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for all cases: each of them has to leave it as it was."""
    folder = tmp_path_factory.mktemp("desk") / "desk"
    shutil.copytree(finished, folder)
    x, labels = np.zeros((4, 4), np.float32), np.zeros(4, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        np.savez("other.npz", y=x)
        np.savez("wide.npz", x=np.zeros((2, 9), np.float32), labels=labels[:2])
        np.savez("short.npz", x=x, labels=labels[:3])
        np.savez("words.npz", x=np.full((4, 4), "a"), labels=labels)
        np.savez("classes.npz", x=x, labels=labels + 7)
        np.savez("nan.npz", x=x * np.nan, labels=labels)
        np.savez("nothing.npz", x=x[:0], labels=labels[:0])
        texts = {
            "broken.toml": "[train\nepochs = 3\n", "typo.toml": "[train]\nepoch = 3\n", "flat.toml": "train = 3\n",
            "kind.toml": '[train]\nepochs = "many"\n', "bench.toml": "[bench]\nsteps = 0\n",
            "broken_net.py": "def build(:\n", "needy_net.py": "import no_such_package\n",
            "failing_net.py": "import numpy as np\nnumber = 3\nwide = [(np.zeros((4, 9), 'f'), np.zeros(4, 'q'))]\n"
            "def build():\n    raise RuntimeError('no weights here')\n",
            "hole.csv": "a,b,c,d,kind\n1,2,3,4,x\n1,2,,4,\n", "semicolons.csv": "a;b;c;d;kind\n1;2;3;4;x\n",
        }  # fmt: skip
        for name, file in (
            ("cut-model", "training_model.onnx"), ("cut-evaluation", "eval_model.onnx"),
            ("cut-checkpoint", "checkpoint"),
        ):  # fmt: skip
            shutil.copytree("artifacts", name)
            whole = Path(name, file).read_bytes()
            Path(name, file).write_bytes(whole[: len(whole) // 2])
        shutil.copytree("artifacts", "no-evaluation")
        Path("no-evaluation/eval_model.onnx").unlink()
        shutil.copytree("run", "spoilt-run")
        Path("spoilt-run/run.json").write_text("{", encoding="utf-8")
        model = onnx.load("model.onnx")
        onnx.save(model, "outside.onnx", save_as_external_data=True, location="outside.bin", size_threshold=0)
        Path("outside.bin").unlink()
        for name, text in texts.items():
            Path(name).write_text(text, encoding="utf-8")
        yield folder


@pytest.mark.parametrize(("line", "code", "message", "hint"), CASES, ids=[case[0] for case in CASES])
def test_a_mistake_is_one_line_and_a_hint(desk: Path, line: str, code: int, message: str, hint: str) -> None:
    before = contents(desk)
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    said = result.stderr.replace("\\", "/").splitlines()
    assert [text.split(":")[0] for text in said] == ["error", "hint"], result.stderr
    assert message in said[0]
    assert hint in said[1]
    assert contents(desk) == before


FOR_MACHINES = [
    ("deploy missing --json", 1),
    ("train artifacts -d missing.npz -o new --json", 1),
    ("artifacts model.onnx -l msee --json", 2),
    ("bench --json", 2),
]


@pytest.mark.parametrize(("line", "code"), FOR_MACHINES, ids=[line for line, _ in FOR_MACHINES])
def test_machines_get_the_same_as_json(desk: Path, line: str, code: int) -> None:
    result = CliRunner().invoke(app, shlex.split(line))
    plain = CliRunner().invoke(app, shlex.split(line.replace(" --json", "")))
    assert (result.exit_code, plain.exit_code) == (code, code)
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert plain.stderr == f"error: {found['error']}\nhint: {found['hint']}\n"


def test_every_command_is_in_the_table() -> None:
    from typer.main import get_command

    group = get_command(app)
    names = set(group.commands) - {"lora"} | {f"lora {name}" for name in group.commands["lora"].commands}  # type: ignore[attr-defined]
    tried = {name for name in names if any(line.startswith(f"{name} ") for line, *_ in CASES)}
    assert tried == names
