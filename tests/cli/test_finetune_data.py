"""Data of one's own, as it comes: words and gaps in tables, numbers as classes, sounds with silence; and mistakes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from PIL import Image

import onward
from cli.test_finetune import draw, published
from onward import checkpoint
from onward.data.augment import Augmentation
from onward.data.images import read_picture
from onward.data.read import Data
from onward.data.sound import read_wave
from onward.data.splits import split
from onward.errors import DataError, NonFiniteError
from onward.train.callbacks import Callback
from trainer_runs import kept

Run = Any


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a published model for tables: five features."""
    monkeypatch.chdir(tmp_path)
    model = published("table")
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    weight = np.random.default_rng(0).normal(0, 0.3, (5, 8)).astype(np.float32)
    next(t for t in model.graph.initializer if t.name == "w").CopyFrom(
        onnx.numpy_helper.from_array(weight, "w")
    )
    onnx.save(model, "model.onnx")
    return tmp_path


def write_people(path: str, count: int = 200) -> None:
    """A table with gaps in numbers and words, words beyond ASCII, and numbers of very different sizes."""
    rng = np.random.default_rng(0)
    lines = ["pay,city,smokes,risk"]
    for index in range(count):
        pay, city, smokes = 1e6 + 10 * rng.normal(), rng.choice(["Köln", "Rio"]), rng.choice(["yes", "no"])
        risk = "very high" if smokes == "yes" else "low" if pay > 1e6 else "mid"
        cells = ["" if index % 20 == 3 else f"{pay:.3f}", "" if index % 25 == 4 else city, smokes, risk]
        lines.append(",".join(map(str, cells)))
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_words_in_a_table_become_categories_that_every_command_knows(desk: Path, run: Run) -> None:
    write_people("people.csv")
    run("artifacts", "model.onnx", "--classes", "low,mid,very high")
    said = run(
        "train", "artifacts", "-d", "people.csv", "--standardize", "--hold-out", 0.2, "-m", "accuracy", "-e", 15,
        "--lr", 0.05,
    )  # fmt: skip
    assert "column 'city' has words: one feature for each of its 2 categories" in said.stderr
    assert "empty cells of 'pay' take the mean of the training rows, 1e+06" in said.stderr
    assert json.loads(Path("run/history.json").read_text())["epochs"][-1]["accuracy"] > 0.85
    run("deploy", "run", "people.onnx")
    done = json.loads(
        {e.key: e.value for e in onnx.load("people.onnx").metadata_props}["onward.preprocessing"]
    )
    assert done["categories"] == {"city": ["Köln", "Rio"], "smokes": ["no", "yes"]}
    assert done["columns"] == ["pay", "city", "smokes"] and len(done["mean"]) == len(done["fill"]) == 5
    answer: Any = onward.load("people.onnx")
    rows = [
        {"smokes": "yes", "pay": 999_990.0, "city": "Köln"},
        {"smokes": "no", "pay": 1_000_020.0, "city": None},
        {"smokes": "no", "pay": 999_980.0, "city": "Atlantis"},  # a city that training had not
    ]
    labels = [one["label"] for one in answer(rows)]
    assert labels == ["very high", "low", "mid"]
    assert answer([999_990.0, "Köln", "yes"])["label"] == "very high"
    # other order of columns, no label, one more column
    Path("new.csv").write_text(
        "note,smokes,city,pay\nx,yes,Köln,999990\ny,no,,1000020\nz,no,Atlantis,999980\n"
    )
    found = run("infer", "people.onnx", "-d", "new.csv", "--json").json["labels"]
    assert [one["label"] for one in found] == labels
    np.testing.assert_allclose([f["score"] for f in found], [a["score"] for a in answer(rows)], rtol=1e-6)
    text = Path("people.csv").read_text(encoding="utf-8").splitlines()
    turned = [",".join([line.rsplit(",", 1)[1], line.rsplit(",", 1)[0]]) for line in text]
    Path("turned.csv").write_text(
        "\n".join(turned), encoding="utf-8"
    )  # the label first: the run knows its name
    same = [
        run("evaluate", "run", "-d", f, "-m", "accuracy", "--json").json["accuracy"]
        for f in ("people.csv", "turned.csv")
    ]
    assert same[0] == same[1] > 0.85
    with pytest.raises(
        DataError, match=r"sample 0 \(from 0\): 'pay' is 'much', and training had numbers there"
    ):
        answer({"smokes": "no", "pay": "much", "city": "Rio"})


def csv(*lines: str) -> str:
    return "a,b,c,d,e,kind\n" + "\n".join(lines) + "\n"


GOOD = ["1,2,3,4,5,x", "2,2,3,4,5,y", "3,2,3,4,5,z"] * 4
TABLES = {
    "one class": (csv(*["1,2,3,4,5,x"] * 3), (), "one class only, 'x': there is nothing to tell apart"),
    "an empty label": (csv(*GOOD, "1,2,3,4,5,"), (), "'d.csv', row 14: the label is empty"),
    "a fraction as label": (csv("1,2,3,4,5,0", "1,2,3,4,5,1.5"), (), "the label is 1.5: classes are words or whole"),
    "as many labels as rows": (csv(*(f"1,2,3,4,5,{n}" for n in range(30))), (), "row 3 of the data (from 0)"),
    "a column of names": (
        csv(*(f"1,2,3,4,id{n},x" for n in range(120))), (), "column 'e' has 120 different words, too many",
    ),
    "a word among numbers": (csv(*GOOD, "1,2,3,4,five,x"), (), "'d.csv', row 14: 'e' is 'five'"),
    "an infinite number": (csv(*GOOD, "1,2,3,4,inf,x"), (), "'d.csv', row 14: 'e' is infinite"),
    "a number too large": (csv(*GOOD, "1,2,3,4,1e300,x"), (), "'e' has 1e+300, which is too large for float32"),
    "an empty column": (csv("1,2,3,4,,x", "1,2,3,4,,y"), (), "column 'e' is empty"),
    "a label that is not there": (csv(*GOOD), ("--label", "knd"), "has no column 'knd'"),
    "dropping what is not there": (csv(*GOOD), ("--drop", "f"), "--drop f: 'd.csv' has no such column"),
    "one feature too few": (csv(*GOOD), ("--drop", "a"), "makes 4 features, and the model's 'x' takes 5"),
    "another class": (csv(*GOOD), ("--eval-data", "other.csv"), "has the class 'w', which the model has not"),
    "nothing held out": (csv(*GOOD), ("--hold-out", "0.001"), "leaves nothing on one side"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "flags", "message"), TABLES.values(), ids=TABLES.keys())
def test_a_table_that_cannot_be_used_says_where_and_why(
    desk: Path, run: Run, text: str, flags: tuple[str, ...], message: str
) -> None:
    run("artifacts", "model.onnx", "--classes", 3)
    Path("d.csv").write_text(text)
    Path("other.csv").write_text(csv("1,2,3,4,5,w"))
    said = run("train", "artifacts", "-d", "d.csv", *flags, code=1).stderr
    assert message in said and said.count("error:") == said.count("hint:") == 1
    assert not Path("run").exists()


def test_numbers_that_do_not_count_from_0_are_the_names_of_classes(desk: Path, run: Run) -> None:
    run("artifacts", "model.onnx", "--classes", 3)
    Path("d.csv").write_text(csv(*(f"{year},{2 * year},3,4,5,{year}" for year in (2019, 2021, 2024) * 6)))
    said = run("train", "artifacts", "-d", "d.csv", "--standardize", "-e", 30, "--lr", 0.1, "-b", 6)
    assert "3 classes: 2019, 2021, 2024" in said.stderr
    run("deploy", "run", "years.onnx")
    assert onward.load("years.onnx")([2024, 4048, 3, 4, 5])["label"] == "2024"  # type: ignore[operator]
    result = onward.finetune("model.onnx", "d.csv", standardize=True, epochs=1, progress=False)
    assert result.classes == ["2019", "2021", "2024"]
    # numbers that do count from 0 are answered as such
    Path("n.csv").write_text(csv(*(f"{kind},{-kind},3,4,5,{kind}" for kind in (0, 1, 2) * 6)))
    run("train", "artifacts", "-d", "n.csv", "-e", 30, "--lr", 0.1, "-b", 6, "-o", "numbers")
    run("deploy", "numbers", "numbers.onnx")
    assert onward.load("numbers.onnx")([2, -2, 3, 4, 5])["label"] == "2"  # type: ignore[operator]
    assert run("evaluate", "numbers", "-d", "n.csv", "-m", "accuracy", "--json").json["accuracy"] > 0.9
    labels = np.asarray([0, 1] * 8)
    result = onward.finetune("model.onnx", (np.zeros((16, 5), np.float32), labels), epochs=1, progress=False)
    assert result.classes == ["0", "1"] and result.predict(np.zeros(5, np.float32))["label"] in result.classes
    labels = np.asarray([5, 7] * 8)
    result = onward.finetune("model.onnx", (np.zeros((16, 5), np.float32), labels), epochs=1, progress=False)
    assert result.classes == ["5", "7"]


def test_a_classifier_becomes_a_model_that_predicts_numbers(desk: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 5))
    lines = [",".join(f"{cell:.4f}" for cell in [*row, 3 * row[0] + 1]) for row in rows]
    Path("prices.csv").write_text("a,b,c,d,e,price\n" + "\n".join(lines))
    said = run("artifacts", "model.onnx", "--classes", 1, "--loss", "mse")
    assert "the Softmax before 'y' is gone" in said.stderr and "--metric mae" in said.stdout
    found = run(
        "train",
        "artifacts",
        "-d",
        "prices.csv",
        "--hold-out",
        0.2,
        "-m",
        "r2",
        "-e",
        40,
        "--lr",
        0.02,
        "--json",
    ).json
    assert found["epochs"][-1]["r2"] > 0.9
    run("deploy", "run", "price.onnx")
    number = onward.load("price.onnx")([1.0, 0, 0, 0, 0])  # type: ignore[operator]
    assert number == pytest.approx([4.0], abs=0.8)
    result = onward.finetune(
        "model.onnx", "prices.csv", loss="mse", epochs=40, learning_rate=0.02, progress=False
    )
    assert result.predict([1.0, 0, 0, 0, 0]) == pytest.approx([4.0], abs=0.8)


def test_a_result_is_short_in_words_and_a_cell_may_be_long(desk: Path, run: Run) -> None:
    Path("d.csv").write_text(csv(*GOOD))
    result = onward.finetune("model.onnx", "d.csv", epochs=1, progress=False, output_directory="out")
    assert repr(result).startswith("FineTuned(loss ") and repr(result).endswith("3 classes)")
    with pytest.raises(onward.OnwardError, match="'out' has an earlier run: resume it"):
        onward.finetune("model.onnx", "d.csv", epochs=1, progress=False, output_directory="out")
    Path("long.csv").write_text(csv(*GOOD) + f"1,2,3,4,{'9' * 200_000},x\n")
    with pytest.raises(DataError, match=r"row 14: 'e' is infinite"):  # read, whatever its length
        onward.finetune("model.onnx", "long.csv", epochs=1, progress=False)


def test_every_class_is_held_out_in_its_share() -> None:
    labels = np.repeat([0, 1, 2, 3], [100, 40, 4, 2])
    data = Data({"x": np.arange(146), "labels": labels})
    train, evaluation = split(data, 0.25, seed=3)
    assert train.arrays is not None and evaluation.arrays is not None
    counts = np.bincount(evaluation.arrays["labels"], minlength=4)
    assert abs(counts[0] - 25) <= 1 and abs(counts[1] - 10) <= 1 and 1 <= counts[2] <= 2 and counts[3] == 1
    assert sorted([*train.arrays["x"], *evaluation.arrays["x"]]) == list(range(146))
    again, _ = split(data, 0.25, seed=3)
    np.testing.assert_array_equal((again.arrays or {})["x"], train.arrays["x"])


def test_an_image_that_cannot_be_read_is_named_before_training(desk: Path, run: Run) -> None:
    onnx.save(published(), "images.onnx")
    draw(Path("pictures"), 2)
    for name in ("blue/7.png", "red/8.png"):
        Path("pictures", name).write_bytes(b"no picture")
    run("artifacts", "images.onnx", "--classes", "pictures")
    said = run("train", "artifacts", "-d", "pictures", code=1).stderr
    assert "cannot read 2 images: pictures/blue/7.png" in said.replace("\\", "/")
    assert "pictures/red/8.png" in said.replace("\\", "/") and "--skip-bad" in said
    said = run("train", "artifacts", "-d", "pictures", "--skip-bad").stderr
    assert "2 of 8 images cannot be read and are left out" in said


def test_a_folder_with_train_and_val_is_split_so_and_evaluated_so(desk: Path, run: Run) -> None:
    onnx.save(published(), "images.onnx")
    for part in ("train", "val"):
        draw(Path("ds", part), 4)
    run("artifacts", "images.onnx", "--classes", "ds")
    told = run("train", "artifacts", "-d", "ds", "--metric", "accuracy", "--json")
    assert told.json["samples"] == 12 and "accuracy" in told.json["epochs"][0]
    assert json.loads(Path("run/run.json").read_text())["classes"] == ["blue", "green", "red"]
    assert (
        "has a part for evaluation already"
        in run("train", "artifacts", "-d", "ds", "--hold-out", 0.5, "-o", "other", code=1).stderr
    )
    assert "evaluated on the" in run("evaluate", "run", "-d", "ds").stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--classes", "nosuch"), "is one class, and there is no such folder"),
        (("--classes", "1"), "cross-entropy tells two or more apart"),
        (("--classes", "cat,"), "has an empty name"),
        (("--classes", "cat,cat"), "two classes are called 'cat'"),
    ],
)
def test_classes_that_are_none(desk: Path, run: Run, flags: tuple[str, ...], message: str) -> None:
    assert message in run("artifacts", "model.onnx", *flags, code=1).stderr
    assert not Path("artifacts").exists()


class StopAfter(Callback):
    """Ctrl-C after an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: onward.Trainer, row: dict[str, Any]) -> bool:
        if row["step"] == self.step:
            raise KeyboardInterrupt
        return False


def test_a_resumed_run_with_augmentation_is_the_run_that_never_stopped(desk: Path, run: Run) -> None:
    """Flip, crop, colour and mixup draw the same numbers again, also within an epoch: equal to the last bit."""
    onnx.save(published(), "images.onnx")
    run("artifacts", "images.onnx", "--classes", 3, "--batch-norm", "train")
    rng = np.random.default_rng(0)
    pictures, labels = rng.random((18, 3, 16, 16), np.float32), rng.integers(0, 3, 18)
    every = Augmentation(
        picture=0, label=1, flip=0.5, crop=0.2, colour=0.2, mixup=0.4, mean=(0.5,), spread=(0.5,)
    )

    def fit(folder: str, *callbacks: Callback, transform: Augmentation | None = every) -> None:
        trainer = onward.Trainer(
            "artifacts", output_directory=folder, callbacks=callbacks, seed=3, progress=False
        )
        trainer.fit((pictures, labels), epochs=3, batch_size=4, transform=transform, resume=bool(callbacks))

    fit("whole")
    for step in (2, 8):  # of five in each epoch
        with pytest.raises(KeyboardInterrupt):
            fit("parts", StopAfter(step))
    fit("parts", StopAfter(-1))
    assert kept(Path("parts")) == kept(Path("whole"))
    fit("plain", transform=None)
    assert kept(Path("plain")) != kept(Path("whole"))


def test_the_same_augmentation_by_commands(desk: Path, run: Run) -> None:
    onnx.save(published(), "images.onnx")
    draw(Path("pictures"), 4)
    run("artifacts", "images.onnx", "--classes", "pictures")
    flags = ("-d", "pictures", "-b", 4, "--augment", "flip,crop,colour,mixup", "--warmup", 2, "--seed", 3)
    run("train", "artifacts", *flags, "-e", 2, "-o", "whole")
    run("train", "artifacts", *flags, "-e", 1, "-o", "parts")
    run("train", "parts", "--resume", "-e", 2)
    states = [checkpoint.load(sorted(Path(f).glob("checkpoint-*"))[-1]) for f in ("whole", "parts")]
    for name, array in states[0].parameters().items():
        np.testing.assert_array_equal(
            np.asarray(array), np.asarray(states[1].parameters()[name]), err_msg=name
        )


SPECTROGRAM = """<ir_version: 8, opset_import: ["": 17]> net (float[N, 1, 64] wave) => (float[N, 4] y) {
    re = Conv<strides=[8]>(wave, cosines) im = Conv<strides=[8]>(wave, sines) rr = Mul(re, re) ii = Mul(im, im)
    power = Add(rr, ii) magnitude = Sqrt(power) m = GlobalAveragePool(magnitude) f = Flatten(m)
    h = Gemm(f, body, bias) r = Relu(h) s = MatMul(r, last) y = Softmax(s) }"""


def spectrogram() -> onnx.ModelProto:
    """A model of waves with the filters of its spectrogram among its weights."""
    model = onnx.parser.parse_model(SPECTROGRAM)
    rng = np.random.default_rng(0)
    turn = 2 * np.pi * np.outer(np.arange(1, 7), np.arange(16)) / 16
    weights = {
        "cosines": np.cos(turn)[:, None], "sines": np.sin(turn)[:, None], "body": rng.normal(size=(6, 8)),
        "bias": np.zeros(8), "last": rng.normal(size=(8, 4)),
    }  # fmt: skip
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def test_silence_does_not_stop_the_training_of_a_model_with_a_spectrogram(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The filters stay as they are unless they are asked for; then the error names the operator and the sample."""
    model = onward.replace_head(spectrogram(), classes=2)
    made = onward.build_artifacts(model, loss="cross-entropy", optimizer="adamw")
    assert set(made.trainable) == {"body", "bias", "head.weight"}
    assert (
        "2 weights before Sqrt 'magnitude' do not train: they are the filters of a spectrogram" in caplog.text
    )
    waves = np.random.default_rng(0).normal(size=(8, 1, 64)).astype(np.float32)
    waves[5] = 0  # silence
    data = (waves, np.arange(8) % 2)
    history = onward.Trainer(made, progress=False).fit(data, epochs=3)
    assert np.isfinite([row["loss"] for row in history.steps]).all()
    everything = onward.build_artifacts(model, requires_grad=["*"], loss="cross-entropy", optimizer="adamw")
    with pytest.raises(
        NonFiniteError, match=r"Sqrt 'magnitude' has the input 0, in row 5 .* Freeze the weights"
    ):
        onward.Trainer(everything, progress=False).fit(data, epochs=3)


def test_a_root_in_the_middle_of_a_network_freezes_nothing() -> None:
    """Only linear operators and squares between the input and the root make a spectrogram."""
    model = onnx.parser.parse_model(
        SPECTROGRAM.replace("re = Conv<strides=[8]>(wave", "t = Tanh(wave) re = Conv<strides=[8]>(t")
    )
    model.graph.initializer.extend(spectrogram().graph.initializer)
    assert "cosines" in onward.build_artifacts(model, loss="cross-entropy", loss_input_names=["s"]).trainable


def test_deploy_says_what_is_wrong_in_words_of_its_own(trained: Path, run: Run) -> None:
    """Nobody has to regenerate an eval graph: a wrong name is a wrong name."""
    said = run("deploy", "run", "x.onnx", "--outputs", "nope", code=1).stderr
    assert (
        "nope could not be found: the eval model has no value of that name" in said
        and "onward inspect" in said
    )
    Path("artifacts/eval_model.onnx").rename("kept.onnx")
    gone = run("deploy", "run", "x.onnx", code=1).stderr
    assert "no eval_model.onnx in" in gone and "make the artifacts again" in gone
    assert "regenerate the eval graph" not in said + gone and not Path("x.onnx").exists()


def test_a_run_that_another_process_writes_is_left_alone(trained: Path, run: Run) -> None:
    """--overwrite removes an earlier run only while nobody writes it; `distributed` holds the folder too."""
    code = (
        "import time, pathlib; from onward.train.lock import run_lock\n"
        "with run_lock(pathlib.Path('run')): print('held', flush=True); time.sleep(60)"
    )
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            for command in ("train", "distributed"):
                refused = run(
                    command, "artifacts", "-d", "data.npz", "-o", "run", "--overwrite", code=1
                ).stderr
                assert f"'run' is being written by process {holder.pid} on " in refused
        finally:
            holder.kill()
    after = {
        path.name: path.read_bytes()
        for path in Path("run").iterdir()
        if path.name not in (".lock", ".holder")
    }
    assert after == before


def write_wave(
    path: str, samples: np.ndarray, *, kind: int, bits: int, channels: int = 1, extensible: bool = False
) -> None:
    types = {(1, 8): "u1", (1, 16): "<i2", (1, 32): "<i4", (3, 32): "<f4", (3, 64): "<f8"}
    scale = {8: 127, 16: 32767, 24: 2**23 - 1, 32: 2**31 - 1}[bits] if kind == 1 else 1
    numbers = samples * scale + (128 if (kind, bits) == (1, 8) else 0)
    data = (
        b"".join(int(n).to_bytes(3, "little", signed=True) for n in numbers)
        if bits == 24
        else numbers.astype(types[kind, bits]).tobytes()
    )
    width = bits // 8 * channels
    fmt = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, 8000, 8000 * width, width, bits)
    if extensible:
        fmt += struct.pack("<HHIH", 22, bits, 0, kind) + bytes(14)
    parts = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(fmt)) + fmt
    parts += b"data" + struct.pack("<I", len(data)) + data
    Path(path).write_bytes(b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WAVE" + parts)


@pytest.mark.parametrize(("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
@pytest.mark.parametrize("extensible", [False, True])
def test_wav_files_of_whole_numbers_and_of_floats(desk: Path, kind: int, bits: int, extensible: bool) -> None:
    wave = 0.5 * np.sin(np.arange(64))
    stereo = np.stack([wave, np.zeros(64)], axis=1).reshape(-1)
    write_wave("a.wav", stereo, kind=kind, bits=bits, channels=2, extensible=extensible)
    samples, rate = read_wave("a.wav")
    assert rate == 8000 and samples.dtype == np.float32
    np.testing.assert_allclose(samples, wave / 2, atol=0.01 if bits == 8 else 1e-4)


def test_sounds_that_cannot_be_read_are_named(desk: Path) -> None:
    write_wave("cut.wav", np.ones(4), kind=1, bits=16)
    whole = Path("cut.wav").read_bytes()
    for content, message in (
        (whole[:20], "no sound in it, or is cut off"), (whole[:16], "cut off"), (b"ID3", "it is no WAV file"),
        (whole.replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 85, 1)), "format 85 with 16 bits"),
        (whole.replace(struct.pack("<HHI", 1, 1, 8000), struct.pack("<HHI", 1, 0, 8000)), "0 channels"),
    ):  # fmt: skip
        Path("cut.wav").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_wave("cut.wav")
    with pytest.raises(DataError, match="No such file"):
        read_wave("nosuch.wav")


def test_answers_name_the_files_and_wrong_inputs_are_refused(desk: Path, run: Run) -> None:
    onnx.save(published("sound"), "sound.onnx")
    for name, pitch in {"high": 2.0, "low ♪": 0.2}.items():
        Path("sounds", name).mkdir(parents=True)
        for index in range(3):
            write_wave(f"sounds/{name}/{index}.wav", 0.5 * np.sin(pitch * np.arange(400)), kind=3, bits=32)
    said = run(
        "finetune",
        "sound.onnx",
        "-d",
        "sounds",
        "-o",
        "tone.onnx",
        "-e",
        12,
        "-b",
        4,
        "--lr",
        0.05,
        "--sample-rate",
        8000,
    )
    assert "classes: high, low ♪" in said.stdout and "next: onward infer tone.onnx" in said.stdout
    shown = run("infer", "tone.onnx", "-d", "sounds").stdout.replace("\\", "/")
    assert "sounds/low ♪/2.wav" in shown
    run("infer", "tone.onnx", "-d", "sounds", "-o", "answers.csv")
    first, second = Path("answers.csv").read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith("file,") and "high" in second and first.endswith("label,probability")
    answer: Any = onward.load("tone.onnx")
    assert answer("sounds/low ♪/1.wav")["label"] == "low ♪"
    for wrong in (None, 3, "nosuch.wav"):
        with pytest.raises(DataError, match=r"is no sound|No such file"):
            answer(wrong)
    run("artifacts", "sound.onnx", "--classes", "sounds")
    run("train", "artifacts", "-d", "sounds", "--sample-rate", 8000)
    assert "within tolerance" in run("deploy", "run", "other.onnx").stdout  # compared on the training data
    Path("mp3/a").mkdir(parents=True)
    Path("mp3/a/x.mp3").write_bytes(b"ID3")
    said = run("train", "artifacts", "-d", "mp3", "-o", "new", code=1).stderr
    assert "no image and no WAV file in 'mp3' (it has .mp3)" in said
    run("finetune", "sound.onnx", "-d", "sounds", "-o", "new.onnx", "--lora", "--rank", 2, "--run", "beside")
    trained = onward.CheckpointState.load_checkpoint("beside/best").to_data().trainable
    assert "head.weight" in trained and any("lora" in name for name in trained) and "w" not in trained


def test_a_model_of_a_fixed_batch_trains_and_deploys_with_that_size(desk: Path, run: Run) -> None:
    model = onnx.load("model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, "one.onnx")
    rows = np.random.default_rng(0).normal(size=(12, 5))
    Path("d.csv").write_text(
        "a,b,c,d,e,kind\n"
        + "".join(f"{','.join(map(str, r))},{'yes' if r[0] > 0 else 'no'}\n" for r in rows.round(3))
    )
    said = run("artifacts", "one.onnx", "--classes", "2", "--keep-batch").stderr
    assert "batches of 1" not in said
    said = run("train", "artifacts", "-d", "d.csv", "--label", "kind", code=1).stderr
    assert "the model takes batches of 1 alone: --batch-size 1" in said
    run("train", "artifacts", "-d", "d.csv", "--label", "kind", "-b", "1")
    run("deploy", "run", "mine.onnx")
    assert Path("mine.onnx").is_file()
    said = run("artifacts", "one.onnx", "--classes", "2", "-o", "any").stderr
    assert "the model is fixed to batches of 1; for training it takes any" in said
    run("train", "any", "-d", "d.csv", "--label", "kind", "-b", "4", "-o", "any_run")
    run("deploy", "any_run", "any.onnx")
    assert onnx.load("any.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_a_picture_that_is_given_stays_open(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), (80 * index, 0, 0)) for index in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "a.gif") as picture:
        assert read_picture(picture).size == (4, 4)
        picture.seek(1)
