"""Networks of diffusers: exported by the same entry, equal to torch at other sizes, trained on noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.api import CheckpointState, Module, Optimizer
from onward.errors import ExportError
from onward.export import artifacts_from_transformers, from_transformers
from onward.pipeline import load as load_any

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install diffusers")
BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4}


def load(folder: Path) -> Any:
    """A folder's pipeline."""
    return load_any(folder)


def unet(**more: Any) -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, cross_attention_dim=12,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **BLOCKS, **more,
    )  # fmt: skip


def coder() -> Any:
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        latent_channels=4, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        **BLOCKS,
    )  # fmt: skip


SDXL = {
    "addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 40,
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, SDXL], ids=["text", "text, pooled text and sizes"])
def test_a_unet_answers_as_in_torch(tmp_path: Path, more: dict[str, Any]) -> None:
    model = unet(**more).eval()
    pipeline = load(from_transformers(model, "unet", tmp_path / "unet"))
    random = np.random.default_rng(0)
    feed = {
        "sample": random.normal(size=(3, 4, 16, 8)).astype(np.float32),
        "timestep": np.asarray([7, 400, 999]),
        "encoder_hidden_states": random.normal(size=(3, 11, 12)).astype(np.float32),
    }
    added = {}
    if more:
        added = {
            "text_embeds": random.normal(size=(3, 16)).astype(np.float32),
            "time_ids": np.ones((3, 6), np.float32),
        }
    tensors = [torch.tensor(value) for value in feed.values()]
    extra = (
        {"added_cond_kwargs": {name: torch.tensor(value) for name, value in added.items()}} if added else {}
    )
    with torch.no_grad():
        expected = model(*tensors, **extra).sample.numpy()
    np.testing.assert_allclose(pipeline({**feed, **added}), expected, atol=1e-4)
    with pytest.raises(TypeError, match="takes the arrays sample, timestep"):
        pipeline({"sample": feed["sample"]})


def test_both_halves_of_an_autoencoder_from_a_pipelines_folder(tmp_path: Path) -> None:
    model = coder().eval()
    model.save_pretrained(tmp_path / "pipeline" / "vae")
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    random = np.random.default_rng(0)
    picture = random.normal(size=(2, 3, 16, 24)).astype(np.float32)
    with torch.no_grad():
        coded = model.encode(torch.tensor(picture)).latent_dist
        back = model.decode(coded.mean).sample.numpy()
    encode = load(from_transformers(tmp_path / "pipeline", "vae-encoder", tmp_path / "encode"))
    decode = load(from_transformers(tmp_path / "pipeline", "vae-decoder", tmp_path / "decode"))
    parameters = encode(picture)
    np.testing.assert_allclose(parameters, coded.parameters.numpy(), atol=1e-4)
    np.testing.assert_allclose(decode(parameters[:, :4]), back, atol=1e-4)


def test_a_unet_trains_on_noise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), **BLOCKS,
    )  # fmt: skip
    folder = artifacts_from_transformers(model, "denoising", tmp_path / "artifacts")
    module = Module(
        folder / "training_model.onnx",
        CheckpointState.load_checkpoint(folder / "checkpoint"),
        folder / "eval_model.onnx",
    )
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    random = np.random.default_rng(0)
    sample, noise = random.normal(size=(2, 2, 1, 8, 8)).astype(np.float32)
    given = {"sample": sample, "timestep": np.asarray([3, 900]), "labels": noise}
    feeds = [given[name] for name in module.input_names()]
    expected = torch.nn.functional.mse_loss(
        model.train()(torch.tensor(sample), torch.tensor(given["timestep"])).sample, torch.tensor(noise)
    )
    losses = []
    for _ in range(12):
        loss = module(*feeds)
        losses.append(float(np.asarray(loss[0] if isinstance(loss, tuple) else loss).reshape(())))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[0] == pytest.approx(float(expected.detach()), rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("task", "message"), [("auto", "has two halves"), ("image-classification", "has two halves")]
)
def test_an_autoencoder_needs_to_know_which_half(task: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        from_transformers(coder(), task)


def test_a_task_of_diffusers_is_for_its_networks(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is for a network of diffusers"):
        from_transformers(tmp_path, "unet")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ExportError, match="holds a whole pipeline"):
        from_transformers(tmp_path, "auto")
    with pytest.raises(ExportError, match=r"no config\.json"):
        from_transformers(tmp_path, "unet")
