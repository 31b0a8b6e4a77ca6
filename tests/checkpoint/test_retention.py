"""Keeping older checkpoints and falling back to them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from checkpoint.samples import fingerprint, sample
from onward.checkpoint import SkippedCheckpointWarning, load, load_latest, rotate, save, save_step
from onward.errors import CheckpointError

FIXTURES = Path(__file__).parent / "fixtures"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def epoch(path: Path) -> object:
    return load(path).properties["epoch"]


def step_file(directory: Path, step: int) -> Path:
    return directory / f"checkpoint-{step:012d}"


@pytest.mark.parametrize("threshold", [1 << 30, 0], ids=["inside", "outside"])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_save_keeps_the_last_versions(keep, threshold, tmp_path):
    path = tmp_path / "c"
    for number in range(1, 6):
        save(sample(number), path, keep=keep, external_threshold=threshold)
    expected = {"c": 5} | {f"c.{age}": 5 - age for age in range(1, keep)}
    assert {
        name: epoch(tmp_path / name) for name in names(tmp_path) if not name.endswith(".data")
    } == expected
    links = sorted(f"{name}.data" for name in expected) if not threshold and os.name != "nt" else []
    assert [name for name in names(tmp_path) if name.endswith(".data")] == links
    assert all(os.readlink(tmp_path / link) == link.removesuffix(".data") for link in links)


def test_save_keeps_fewer_when_asked_for_fewer(tmp_path):
    for number in range(1, 5):
        save(sample(number), tmp_path / "c", keep=4)
    save(sample(5), tmp_path / "c", keep=2)
    assert names(tmp_path) == ["c", "c.1"]


def test_a_damaged_file_does_not_push_out_a_good_one(tmp_path):
    path = tmp_path / "c"
    save(sample(1), path, keep=2)
    save(sample(2), path, keep=2)
    damage(path)
    save(sample(3), path, keep=2)
    assert (epoch(path), epoch(tmp_path / "c.1")) == (3, 1)


def test_versions_are_kept_without_hard_links(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refused)
    save(sample(1), tmp_path / "c", keep=2)
    save(sample(2), tmp_path / "c", keep=2)
    assert (epoch(tmp_path / "c"), epoch(tmp_path / "c.1")) == (2, 1)
    assert names(tmp_path) == ["c", "c.1"]


@pytest.mark.filterwarnings("ignore::onward.checkpoint.UncheckedCheckpointWarning")
def test_a_replaced_file_of_the_original_is_kept_with_its_values(tmp_path):
    for suffix in ("", ".data"):
        shutil.copy(FIXTURES / f"original_external.ckpt{suffix}", tmp_path / f"c{suffix}")
    expected = fingerprint(load(tmp_path / "c"))
    save(sample(1), tmp_path / "c", keep=2)
    assert fingerprint(load(tmp_path / "c.1")) == expected
    assert names(tmp_path) == ["c", "c.1", "c.1.data"]


@pytest.mark.filterwarnings("ignore::onward.checkpoint.UncheckedCheckpointWarning")
@pytest.mark.parametrize("threshold", [1 << 30, 0], ids=["inside", "outside"])
def test_the_second_file_of_a_replaced_checkpoint_goes_with_it(threshold, tmp_path):
    for suffix in ("", ".data"):
        shutil.copy(FIXTURES / f"original_external.ckpt{suffix}", tmp_path / f"c{suffix}")
    save(sample(1), tmp_path / "c", external_threshold=threshold)
    assert not (tmp_path / "c.data").is_file() or (tmp_path / "c.data").is_symlink()
    assert epoch(tmp_path / "c") == 1


@pytest.mark.parametrize("keep", [1, 2])
def test_a_file_of_somebody_else_with_that_name_is_left_alone(keep, tmp_path):
    (tmp_path / "c.data").write_bytes(b"external data of a model")
    for number in (1, 2):
        save(sample(number), tmp_path / "c", keep=keep, external_threshold=0)
    assert (tmp_path / "c.data").read_bytes() == b"external data of a model"
    assert epoch(tmp_path / "c") == 2


def test_a_file_falls_back_to_its_older_version(tmp_path):
    path = tmp_path / "c"
    for number in (1, 2, 3):
        save(sample(number), path, keep=3)
    damage(path)
    damage(tmp_path / "c.1")
    with pytest.warns(SkippedCheckpointWarning, match="checksum"):
        latest = load_latest(path)
    assert latest.data.properties["epoch"] == 1
    assert latest.path == tmp_path / "c.2"
    assert [error.path for error in latest.skipped] == [str(path), str(tmp_path / "c.1")]


def test_steps_are_kept_by_number_and_the_newest_is_loaded(tmp_path):
    for step in (5, 50, 500):
        assert save_step(sample(step), tmp_path / "run", step=step) == step_file(tmp_path / "run", step)
    assert names(tmp_path / "run") == [step_file(tmp_path, 50).name, step_file(tmp_path, 500).name]
    assert load_latest(tmp_path / "run").data.properties["epoch"] == 500


def test_a_damaged_step_is_skipped_by_name_and_not_counted(tmp_path):
    for step in (1, 2, 3):
        save_step(sample(step), tmp_path, step=step, keep=3)
    damage(step_file(tmp_path, 3))
    with pytest.warns(SkippedCheckpointWarning, match="checkpoint-000000000003"):
        latest = load_latest(tmp_path)
    assert (latest.path, len(latest.skipped)) == (step_file(tmp_path, 2), 1)
    save_step(sample(4), tmp_path, step=4, keep=2)
    assert names(tmp_path) == [step_file(tmp_path, step).name for step in (2, 3, 4)]


def test_rotate_removes_what_is_older_than_the_last_good_ones(tmp_path):
    for step in range(1, 6):
        save_step(sample(step), tmp_path, step=step, keep=9, external_threshold=0)
    damage(step_file(tmp_path, 4))
    assert rotate(tmp_path, keep=2) == [step_file(tmp_path, 2), step_file(tmp_path, 1)]
    kept = [step_file(tmp_path, step).name for step in (3, 4, 5)]
    assert [name for name in names(tmp_path) if not name.endswith(".data")] == kept
    assert {name.removesuffix(".data") for name in names(tmp_path)} == set(kept)


def test_nothing_is_removed_while_too_few_verify(tmp_path):
    for step in (1, 2, 3):
        save_step(sample(step), tmp_path, step=step, keep=3)
    damage(step_file(tmp_path, 2))
    damage(step_file(tmp_path, 3))
    assert rotate(tmp_path, keep=2) == []
    assert len(names(tmp_path)) == 3


def test_a_lower_step_is_not_removed_by_its_own_save(tmp_path):
    for step in (10, 20, 15):
        save_step(sample(step), tmp_path, step=step, keep=1)
    assert epoch(step_file(tmp_path, 15)) == 15


@pytest.mark.parametrize("damaged", [False, True], ids=["empty", "all damaged"])
def test_an_error_lists_every_reason_when_nothing_verifies(damaged, tmp_path):
    if damaged:
        for step in (1, 2):
            damage(save_step(sample(step), tmp_path, step=step))
    text = "checkpoint-000000000002.*checkpoint-000000000001" if damaged else "no checkpoint is there"
    with pytest.raises(CheckpointError, match=text):
        load_latest(tmp_path)


def test_a_missing_file_and_a_missing_directory_are_the_same_error(tmp_path):
    for path in (tmp_path / "c", tmp_path / "missing" / "c"):
        with pytest.raises(CheckpointError):
            load_latest(path)


@pytest.mark.parametrize("call", [lambda p: save(sample(1), p, keep=0), lambda p: rotate(p, keep=0)])
def test_keeping_nothing_is_refused(call, tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        call(tmp_path / "c")
