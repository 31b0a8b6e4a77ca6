"""Old names of arguments and options still work, and warn."""

from __future__ import annotations

import warnings

import pytest
from typer.main import get_command

from onward import checkpoint
from onward.autodiff import registry
from onward.cli.app import app
from onward.distributed.settings import RunnerSettings
from onward.export.huggingface.from_transformers import from_transformers
from onward.export.huggingface.save_pipeline import save_pipeline
from onward.export.inference import for_inference
from onward.export.quantize.quantizer import quantize
from onward.renamed import renamed_arguments
from onward.train.trainer import Trainer

RENAMED = [
    (from_transformers, "output", "path"),
    (quantize, "output", "path"),
    (save_pipeline, "folder", "directory"),
    (for_inference, "quantize_to", "quantize"),
    (Trainer, "accumulation", "gradient_accumulation_steps"),
    (RunnerSettings, "schedule", "pipeline_schedule"),
]


@pytest.mark.parametrize("function, old, new", RENAMED, ids=lambda value: getattr(value, "__name__", value))
def test_an_old_name_warns(function, old, new):
    with pytest.warns(DeprecationWarning, match=rf"\({old}=…\) is now {new}=…"), pytest.raises(TypeError):
        function(**{old: "given", "no_such_argument": 1})
    with pytest.raises(TypeError, match=f"twice: as {new} and by its old name, {old}"):
        function(**{old: "given", new: "given"})


def test_an_old_name_is_the_new_argument():
    with pytest.warns(DeprecationWarning, match=r"RunnerSettings\(schedule=…\)"):
        assert RunnerSettings(schedule="gpipe").pipeline_schedule == "gpipe"

    @renamed_arguments(output="path")
    def write(model, path=None):
        return model, path

    with pytest.warns(DeprecationWarning, match="write"):
        assert write("m", output="p") == ("m", "p")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert write("m", path="p") == write("m", "p") == ("m", "p")


def test_old_names_of_a_module_warn():
    with pytest.warns(DeprecationWarning, match="UncheckedCheckpointWarning"):
        assert checkpoint.UnsealedCheckpointWarning is checkpoint.UncheckedCheckpointWarning
    with pytest.warns(DeprecationWarning, match="gradient_rule"):
        assert registry.gradient is registry.gradient_rule


@pytest.mark.parametrize("command", ["train", "distributed", "finetune"])
def test_options_of_the_command_line_have_the_names_of_the_api(command):
    named = {name for option in get_command(app).commands[command].params for name in option.opts}  # type: ignore[attr-defined]
    assert {"--gradient-accumulation-steps", "--accumulation", "--learning-rate", "--lr", "--output"} <= named
