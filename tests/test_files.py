"""Files written together: the old set or the new one, whole, wherever the writer is killed or the disk is full."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from file_events import Events, Killed
from onward import checkpoint, files
from onward.checkpoint.content import CheckpointData
from onward.errors import OnwardError
from onward.export.huggingface.folder import staged
from onward.lora import LoRA, load_peft, save_peft
from onward.reading import read_bytes
from onward.runtime.inference_model import write_inference_model


def write_plain(folder: Path, value: int) -> None:
    with files.write_set(folder) as staging:
        for name in ("a", "b", "sub/c"):
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_text(str(value))


def read_plain(folder: Path) -> int:
    first = read_bytes(folder / "a", limit="text_bytes")
    assert (folder / "b").read_bytes() == (folder / "sub/c").read_bytes() == first
    return int(first)


def write_one(folder: Path, value: int) -> None:
    files.write_bytes(folder / "report.html", str(value).encode() * 9)


def read_one(folder: Path) -> int:
    text = (folder / "report.html").read_text()
    assert len(text) == 9
    return int(text[0])


def write_site(folder: Path, value: int) -> None:
    with files.replace_folder(folder / "site") as staging:
        (staging / "index.html").write_text(str(value))
        (staging / "site.json").write_text(str(value))


def read_site(folder: Path) -> int:
    values = [(folder / "site" / name).read_text() for name in ("index.html", "site.json")]
    assert values[0] == values[1]
    return int(values[0])


def write_deployed(folder: Path, value: int) -> None:
    write_inference_model(_model(value), folder / "model.onnx", external_data=True)


def _model(value: int) -> ir.Model:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["x", "w"], ["y"])], "n",
        [onnx.helper.make_tensor_value_info("x", 1, [1024])], [onnx.helper.make_tensor_value_info("y", 1, [1024])],
        [onnx.numpy_helper.from_array(np.full(1024, value, np.float32), "w")], doc_string=str(value),
    )  # fmt: skip
    return ir.from_proto(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    )


def read_deployed(folder: Path) -> int:
    """By the stock runtime, which knows nothing of ours."""
    path = folder / "model.onnx"
    outputs = onnxruntime.InferenceSession(path).run(None, {"x": np.ones(1024, np.float32)})
    assert str(int(outputs[0][0])) == onnx.load(path, load_external_data=False).graph.doc_string
    return int(outputs[0][0])


def write_adapters(folder: Path, value: int) -> None:
    adapters = {f"w.lora_{part}": np.full((2, 2), value, np.float32) for part in "ab"}
    save_peft(adapters, LoRA(rank=2, alpha=float(value)), folder)


def read_adapters(folder: Path) -> int:
    lora, adapters = load_peft(folder, ["w"])
    assert {float(array.flat[0]) for array in adapters.values()} == {lora.alpha}
    return int(lora.alpha)


def write_exported(folder: Path, value: int) -> None:
    torch = pytest.importorskip("torch")
    from onward.export.torch import assemble

    model = ir.to_proto(_model(value))
    model.graph.initializer.pop()
    weights = {"w": torch.full((1024,), float(value))}
    assemble.save(model, weights, folder / "model.onnx", external=True)


def write_checkpoint(folder: Path, value: int) -> None:
    data = CheckpointData(trainable={"w": np.full(64, value, np.float32)}, properties={"value": value})
    checkpoint.save(data, folder / "checkpoint")


def read_checkpoint(folder: Path) -> int:
    data = checkpoint.load(folder / "checkpoint")
    assert set(np.asarray(data.trainable["w"]).tolist()) == {data.properties["value"]}
    return int(data.properties["value"])


def write_safetensors(folder: Path, value: int) -> None:
    arrays = {name: np.full(64, value, np.float32) for name in ("w", "v")}
    checkpoint.to_safetensors(CheckpointData(trainable=arrays), folder / "weights.safetensors")


def read_safetensors(folder: Path) -> int:
    data = checkpoint.from_safetensors(folder / "weights.safetensors")
    (value,) = {float(x) for array in data.trainable.values() for x in np.asarray(array)}
    return int(value)


SETS = {
    "set": (write_plain, read_plain),
    "file": (write_one, read_one),
    "site": (write_site, read_site),
    "deployed": (write_deployed, read_deployed),
    "exported": (write_exported, read_deployed),
    "adapters": (write_adapters, read_adapters),
    "checkpoint": (write_checkpoint, read_checkpoint),
    "safetensors": (write_safetensors, read_safetensors),
}


@pytest.mark.skipif(
    os.name != "posix", reason="an open file cannot be left behind by the same process on Windows"
)
@pytest.mark.parametrize("failure", ["killed", "one error", "full disk", "read-only"])
@pytest.mark.parametrize("name", SETS)
def test_old_or_new_whole_at_every_event(name: str, failure: str, tmp_path: Path):
    write, read = SETS[name]
    number, done, seen = 0, False, set()
    while not done:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, 1)
        names = len(list(folder.rglob("*")))
        with pytest.MonkeyPatch.context() as patch:
            events = Events(patch, number, failure)
            with contextlib.suppress(Killed, OSError, OnwardError):
                write(folder, 2)
            done = events.count < number
        seen.add(read(folder))
        write(folder, 3)
        assert read(folder) == 3
        assert len(list(folder.rglob("*"))) == names, sorted(folder.rglob("*"))
    assert seen == {1, 2} and number > 4


def test_a_living_writer_elsewhere_keeps_its_folder(tmp_path: Path):
    """Its process number means nothing here: as in another container, only the lock tells."""
    program = (
        "import sys; from onward import files\n"
        "with files.write_set(sys.argv[1]) as f:\n"
        "  (f / 'theirs').write_text('x'); print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline().strip() == b"ready"
    write_plain(tmp_path, 1)
    child.communicate(b"")
    assert child.returncode == 0 and (tmp_path / "theirs").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "sub", "theirs"]


# Two containers that share a volume see each other's files and locks, and none of each other's process numbers.
_CONTAINER = """
import sys; from pathlib import Path; from onward import files
volume, name, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(times):
    with files.write_set(volume) as staging:
        for part in "ab":
            (staging / f"{name}.{part}").write_text(str(number))
        assert sorted(path.name for path in staging.iterdir()) == [f"{name}.a", f"{name}.b"]
    texts = {(volume / f"{name}.{part}").read_text() for part in "ab"}
    assert texts == {str(number)}, texts
"""


def test_containers_on_one_volume_sweep_nobody(tmp_path: Path):
    times = 2_000 if "ONWARD_FUZZ" in os.environ else 60
    isolate: list[str] = []
    if shutil.which("unshare") and not subprocess.call(["unshare", "-rpf", "true"]):
        isolate = ["unshare", "-rpf"]  # each has process 1; else processes of one machine stand in for them
    writers = [
        subprocess.Popen(
            [*isolate, sys.executable, "-c", _CONTAINER, tmp_path, name, str(times)],
            stderr=subprocess.PIPE, text=True,
        )
        for name in ("one", "two", "three")
    ]  # fmt: skip
    messages = [writer.communicate(timeout=600)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], messages
    assert len(os.listdir(tmp_path)) == 6


def leave_record(folder: Path, **moves) -> None:
    """What a writer leaves that dies just after its commit."""
    (folder / files._RECORD).write_bytes(files._Moves(**moves).line())


def test_a_writer_that_died_elsewhere_is_waited_for(tmp_path: Path):
    """Where hosts do not see each other's locks, a folder of another host stays for a day."""
    other = tmp_path / ".onward-0123456789abcdef"
    other.mkdir()
    (other / "lock").touch()
    write_plain(tmp_path, 1)
    assert other.is_dir()
    os.utime(other, (0, 0))
    write_plain(tmp_path, 2)
    assert not other.exists()


@pytest.mark.skipif(os.name != "posix", reason="links need a privilege on Windows")
@pytest.mark.parametrize("link", ["", "files", "old"])
def test_a_record_never_leads_out_of_its_folder(link: str, tmp_path: Path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for part in ("files", "old"):
        (outside / part).mkdir(parents=True)
    (outside / "secret").write_text("secret")
    (outside / "files" / "secret").write_text("secret")
    folder.mkdir()
    staging = folder / ".onward-0123456789abcdef"
    if link:
        staging.mkdir()
        (staging / ("old" if link == "files" else "files")).mkdir()
    (staging / link).symlink_to(outside)
    (folder / "a").write_text("1")
    leave_record(folder, staging=staging.name, names=["secret"], removed=["a"])
    with pytest.raises(OSError, match="a writer was interrupted"):
        read_bytes(folder / "a", limit="text_bytes")
    assert sorted(path.name for path in outside.iterdir()) == ["files", "old", "secret"]
    assert (folder / "a").is_file() and not (folder / "secret").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["../a"]},
        {"removed": [".."]},
        {"names": ["C:a"]},
        {"staging": "../x"},
        {"staging": "."},
        {"source": ".."},
        {"names": [1]},
    ],
    ids=str,
)
def test_a_record_that_is_not_ours_is_no_commit(change: dict, tmp_path: Path):
    (tmp_path / "a").write_text("1")
    moves = {"staging": ".onward-0123456789abcdef", "names": ["b"], "removed": []}
    leave_record(tmp_path, **(moves | change))
    assert read_bytes(tmp_path / "a", limit="text_bytes") == b"1"
    assert not (tmp_path / files._RECORD).exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_another_users_record_in_a_shared_folder_is_ignored(tmp_path: Path):
    (tmp_path / "a").write_text("1")
    staging = tmp_path / ".onward-0123456789abcdef"
    (staging / "files").mkdir(parents=True)
    (staging / "old").mkdir()
    (staging / "files" / "a").write_text("hostile")
    leave_record(tmp_path, staging=staging.name, names=["a"], removed=[])
    os.chown(tmp_path / files._RECORD, 12345, 12345)
    assert read_bytes(tmp_path / "a", limit="text_bytes") == b"1"
    write_one(tmp_path, 2)
    assert (tmp_path / "a").read_text() == "1" and read_one(tmp_path) == 2


def test_scratch_folders_of_dead_processes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        "import os, sys, tempfile; from onward import files\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "with files.scratch_folder() as f: (f / 'part').write_text('x'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    stale = os.listdir(tmp_path)
    with files.scratch_folder() as folder:
        assert len(stale) == 1 and len(os.listdir(tmp_path)) == 1 and folder.is_dir()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("place", ["/.onward-0123456789abcdef/files", "/.onward-0123456789abcdef"])
def test_a_command_names_the_folder_and_not_where_its_files_wait(place: str):
    from onward.cli.errors import explain

    assert explain(OnwardError(f"cannot write '/out{place}'"))[0] == "cannot write '/out'"
    assert explain(OSError(28, "full", f"/out{place}/m.onnx"))[0] == "no space is left for '/out/m.onnx'"


def test_what_an_older_export_left_is_not_read_beside_the_new_one(tmp_path: Path):
    """A chat template of another base would be; what is not read by its name stays."""
    for names in (
        ("onward.json", "chat_template.jinja", "tokenizer.json"),
        ("onward.json", "tokenizer.json"),
    ):
        (tmp_path / "notes.json").write_text("{}")
        with staged(tmp_path, single=False) as stage:
            for name in names:
                (stage / name).write_text("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.json", "onward.json", "tokenizer.json"]
