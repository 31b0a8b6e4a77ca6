"""A published model, classes and data of one's own: three commands, and what is kept from the first to the last."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onward
from onward.runtime.devices import Device

pytest.importorskip("PIL")
from PIL import Image, ImageDraw

Run = Any


def published(kind: str = "image") -> onnx.ModelProto:
    """A classifier of four classes with batch norm and softmax, as exporters write it; labels of its own."""
    rng = np.random.default_rng(0)
    bodies = {
        "image": (
            "(float[N, 3, 16, 16] pixels) => (float[N, 4] probabilities) { c = Conv<pads=[1, 1, 1, 1]>(pixels, w, b)"
            " n = BatchNormalization(c, gamma, beta, mean, var) r = Relu(n) g = GlobalAveragePool(r) f = Flatten(g)"
            " s = Gemm<transB=1>(f, fc_w, fc_b) probabilities = Softmax(s) }",
            {
                "w": (8, 3, 3, 3),
                "b": (8,),
                "gamma": 1,
                "beta": 0,
                "mean": 0,
                "var": 1,
                "fc_w": (4, 8),
                "fc_b": (4,),
            },
        ),
        "table": (
            "(float[N, 3] x) => (float[N, 4] y) { h = Gemm(x, w, b) r = Relu(h) s = Gemm<transB=1>(r, fc_w, fc_b)"
            " y = Softmax(s) }",
            {"w": (3, 8), "b": (8,), "fc_w": (4, 8), "fc_b": (4,)},
        ),
        "text": (
            "(int64[N, T] input_ids, int64[N, T] attention_mask) => (float[N, 4] y) { e = Gather(w, input_ids)"
            " k = Constant<value_ints=[2]>() m = Cast<to=1>(attention_mask) u = Unsqueeze(m, k) p = Mul(e, u)"
            " t = ReduceSum<keepdims=0>(p, one) s = MatMul(t, fc_w) y = Softmax(s) }",
            {"w": (40, 8), "fc_w": (8, 4), "one": None},
        ),
        "sound": (
            "(float[N, T] wave) => (float[N, 4] y) { k = Constant<value_ints=[1]>() u = Unsqueeze(wave, k)"
            " c = Conv<strides=[8]>(u, w, b) a = Abs(c) g = GlobalAveragePool(a) f = Flatten(g)"
            " s = Gemm<transB=1>(f, fc_w, fc_b) y = Softmax(s) }",
            {"w": (16, 1, 32), "b": (16,), "fc_w": (4, 16), "fc_b": (4,)},
        ),
    }
    text, weights = bodies[kind]
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> net {text}')
    for name, shape in weights.items():
        if shape is None:
            array: np.ndarray = np.asarray([1], np.int64)
        elif isinstance(shape, int):
            array = np.full(8, shape, np.float32)
        else:
            array = rng.normal(0, 0.3, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.metadata_props.add(key="names", value="{0: 'a', 1: 'b', 2: 'c', 3: 'd'}")
    return model


def draw(folder: Path, count: int = 12, *, size: int = 20) -> None:
    """Pictures of three classes that differ in colour."""
    rng = np.random.default_rng(0)
    for name, colour in {"blue": (20, 20, 220), "green": (20, 220, 20), "red": (220, 20, 20)}.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            noise = rng.integers(0, 120, (size, size, 3), dtype=np.uint8)
            picture = Image.fromarray(noise)
            ImageDraw.Draw(picture).rectangle([2, 2, size - 4, size - 4], fill=colour)
            picture.save(folder / name / f"{index}.png")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a published model and pictures."""
    monkeypatch.chdir(tmp_path)
    onnx.save(published(), "model.onnx")
    draw(Path("pictures"))
    return tmp_path


def metadata(path: str) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def test_pictures_in_three_commands(shop: Path, run: Run) -> None:
    said = run("artifacts", "model.onnx", "--classes", "pictures")
    assert "makes 3 now: 'head.weight'" in said.stderr and "the Softmax before" in said.stderr
    assert "1 batch norms keep their running statistics" in said.stderr
    assert "next: onward train artifacts --data pictures" in said.stdout
    found = run(
        "train", "artifacts", "-d", "pictures", "--hold-out", 0.25, "-m", "accuracy", "-e", 12, "--lr", 0.05,
        "--normalize", "0.4,0.3", "--augment", "flip,crop=0.1", "-b", 8, "--json",
    ).json  # fmt: skip
    assert found["epochs"][-1]["accuracy"] > 0.9
    before = Path("model.onnx").read_bytes()
    assert "classes: blue, green, red" in run("deploy", "run").stdout
    assert Path("model.onnx").read_bytes() == before
    about = metadata("trained.onnx")
    assert json.loads(about["onward.classes"]) == ["blue", "green", "red"] and "names" not in about
    done = json.loads(about["onward.preprocessing"])
    assert done["image_mean"] == [0.4] * 3 and done["size"] == {"height": 16, "width": 16}
    for model in ("trained.onnx", "run"):
        answers = run("infer", model, "-d", "pictures/red/1.png", "--json").json["labels"]
        assert answers[0]["label"] == "red" and answers[0]["score"] > 0.5
    assert "red" in run("infer", "trained.onnx", "-d", "pictures/red/1.png", "--top-k", 2).stdout
    answer = onward.load("trained.onnx")
    assert answer("pictures/green/2.png")["label"] == "green"  # type: ignore[operator]
    both = answer([Image.open("pictures/blue/0.png"), "pictures/red/0.png"], top_k=None)  # type: ignore[operator]
    assert [one[0]["label"] for one in both] == ["blue", "red"]
    np.testing.assert_allclose(sum(one["score"] for one in both[0]), 1, rtol=1e-6)
    figures = run("evaluate", "run", "-d", "pictures", "-m", "accuracy", "--json").json
    assert figures["accuracy"] > 0.9
    run("infer", "trained.onnx", "-d", "pictures", "-o", "answers.csv")
    assert Path("answers.csv").read_text().splitlines()[0].endswith("label,probability")


def test_what_the_files_beside_a_model_say_is_used(shop: Path, run: Run) -> None:
    Path("preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1], "do_normalize": True, "junk": "x"})
    )
    run("artifacts", "model.onnx", "-c", 3)
    run("train", "artifacts", "-d", "pictures")
    assert json.loads(Path("run/run.json").read_text())["preprocessing"]["image_mean"] == [0.1, 0.2, 0.3]


def test_python_does_it_in_one_call(shop: Path) -> None:
    result = onward.finetune(
        "model.onnx",
        "pictures",
        epochs=12,
        learning_rate=0.05,
        batch_size=8,
        normalize="half",
        device=Device("cpu", memory="device"),
        progress=False,
    )
    assert result.metrics["accuracy"] > 0.9 and result.classes == ["blue", "green", "red"]
    assert result.predict("pictures/red/3.png")["label"] == "red"
    result.export("mine.onnx")
    same = onward.load("mine.onnx")("pictures/red/3.png")  # type: ignore[operator]
    assert same == result.predict("pictures/red/3.png")


def test_python_takes_arrays_and_names_of_classes(shop: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 64)
    x = rng.normal(size=(64, 3, 16, 16)).astype(np.float32) + 2 * labels[:, None, None, None]
    words = np.asarray(["night", "day"])[labels]
    result = onward.finetune("model.onnx", (x, words), epochs=8, learning_rate=0.05, progress=False)
    assert result.classes == ["day", "night"] and result.metrics["accuracy"] > 0.9
    assert result.predict(x[0])["label"] == words[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss": "cross"}, "loss is 'cross': it is one of cross-entropy"),
        ({"optimizer": "sdg"}, "no optimizer is called 'sdg'.*did you mean 'sgd'"),
        ({"schedule": "cosin"}, "no schedule 'cosin'.*did you mean 'cosine'"),
        ({"augment": ["flop"]}, "no augmentation is called 'flop'"),
        ({"normalize": "imagent"}, "no normalization 'imagent'"),
        ({"standardize": True}, "standardize is no option of image-classification"),
    ],
)
def test_wrong_words_are_refused_with_the_list(shop: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        onward.finetune("model.onnx", "pictures", progress=False, **options)


def test_a_table_with_gaps_is_filled_and_standardised_alike(
    tmp_path: Path, monkeypatch: Any, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(published("table"), "model.onnx")
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 3, 90)
    rows = [[50 + 20 * k + rng.normal(), 1000 * rng.normal(), -k + 0.1 * rng.normal()] for k in kinds]
    with open("train.csv", "w") as file:
        file.write("height,noise,depth,species\n")
        for index, (row, kind) in enumerate(zip(rows, kinds)):
            cells = [f"{value:.4f}" for value in row]
            if index % 10 == 0:
                cells[1] = ""
            file.write(",".join([*cells, ["fir", "oak", "yew"][kind]]) + "\n")
    run("artifacts", "model.onnx", "--classes", "fir,oak,yew")
    said = run(
        "train", "artifacts", "-d", "train.csv", "--standardize", "--hold-out", 0.2, "-m", "accuracy", "-e", 20,
        "--lr", 0.05,
    )  # fmt: skip
    assert "empty cells of 'noise' take the mean of the training rows" in said.stderr
    run("deploy", "run", "trees.onnx")
    answer = onward.load("trees.onnx")
    tree = {"height": 90.0, "noise": None, "depth": -2.0}
    assert answer(tree)["label"] == "yew"  # type: ignore[operator]
    assert answer([50.0, 0.0, 0.0])["label"] == "fir"  # type: ignore[operator]
    Path("new.csv").write_text("depth,height,noise\n-1,70,0\n0,50,\n")  # other order, no label, a gap
    labels = [one["label"] for one in run("infer", "trees.onnx", "-d", "new.csv", "--json").json["labels"]]
    assert labels == ["oak", "fir"]
    assert run("evaluate", "run", "-d", "train.csv", "-m", "accuracy", "--json").json["accuracy"] > 0.9
    Path("few.csv").write_text("depth,height\n-1,70\n")
    assert (
        "no column 'noise', which the model was trained with"
        in run("infer", "trees.onnx", "-d", "few.csv", code=1).stderr
    )


def test_texts_by_the_tokenizer_beside_the_model(tmp_path: Path, monkeypatch: Any, run: Run) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    onnx.save(published("text"), "model.onnx")
    good, bad = ["great", "lovely", "fine"], ["awful", "bad", "dull"]
    words = ["[PAD]", "[UNK]", "the", "film", "was", *good, *bad]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("tokenizer.json")
    rng = np.random.default_rng(0)
    with open("reviews.jsonl", "w") as file:
        for _ in range(60):
            mood = int(rng.integers(2))
            text = f"the film was {rng.choice([bad, good][mood])}"
            file.write(json.dumps({"text": text, "mood": ["bad", "good"][mood]}) + "\n")
    run("artifacts", "model.onnx", "--classes", 2)
    assert Path("artifacts/tokenizer.json").is_file()
    run(
        "train",
        "artifacts",
        "-d",
        "reviews.jsonl",
        "--label",
        "mood",
        "-e",
        12,
        "--lr",
        0.1,
        "--hold-out",
        0.2,
    )
    run("deploy", "run", "out/moods.onnx")
    assert sorted(os.listdir("out")) == ["moods.onnx", "moods.tokenizer.json"]
    assert onward.load("out/moods.onnx")("the film was lovely")["label"] == "good"  # type: ignore[operator]
    assert "bad" in run("infer", "out/moods.onnx", "--text", "the film was dull").stdout
    found = run("infer", "out/moods.onnx", "-d", "reviews.jsonl", "--json").json
    assert {one["label"] for one in found["labels"]} == {"good", "bad"}
    Path("tokenizer.json").unlink()
    Path("artifacts/tokenizer.json").unlink()
    refused = run("train", "artifacts", "-d", "reviews.jsonl", "-o", "other", code=1).stderr
    assert "no tokenizer.json beside it" in refused and "--tokenizer" in refused


def test_sounds_of_other_rates_and_lengths(tmp_path: Path, monkeypatch: Any, run: Run) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(published("sound"), "model.onnx")
    rng = np.random.default_rng(0)
    for name, pitch in {"high": 2000, "low": 200}.items():
        Path("sounds", name).mkdir(parents=True)
        for index in range(12):
            rate = [8000, 16000][index % 2]
            time = np.arange(int(rate * rng.uniform(0.06, 0.1))) / rate
            samples = 0.5 * np.sin(2 * np.pi * pitch * time) + 0.05 * rng.normal(size=len(time))
            with wave.open(f"sounds/{name}/{index}.wav", "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(rate)
                file.writeframes((samples * 32767).clip(-32768, 32767).astype("<i2").tobytes())
    run("artifacts", "model.onnx", "--classes", "sounds")
    run("train", "artifacts", "-d", "sounds", "--sample-rate", 8000, "-e", 25, "--lr", 0.05, "-b", 8)
    run("deploy", "run", "pitch.onnx")
    answer = onward.load("pitch.onnx")
    assert [answer(f"sounds/{name}/3.wav")["label"] for name in ("low", "high")] == ["low", "high"]  # type: ignore[operator]
    wave_of = np.sin(2 * np.pi * 2000 * np.arange(700) / 8000)
    assert answer((wave_of, 8000))["label"] == "high"  # type: ignore[operator]


def test_nothing_of_the_users_is_overwritten(trained: Path, run: Run) -> None:
    assert "onward deploy run trained.onnx" in run(
        "train", "artifacts", "-d", "data.npz", "-o", "second"
    ).stdout.replace("second", "run")
    before = Path("model.onnx").read_bytes()
    for line in (
        "deploy run model.onnx", "infer model.onnx -d data.npz -o {}", "inspect run --html {}",
        "convert run/best {}", "lora inject model.onnx {}",
    ):  # fmt: skip
        mine = "mine.npz" if "infer" in line else "mine.onnx"
        Path(mine).write_text("mine")
        command = line.format(mine).split()
        target = "model.onnx" if "deploy" in line else mine
        refused = run(*command, code=1).stderr
        assert f"'{target}' already exists" in refused and "--overwrite" in refused
        assert Path(mine).read_text() == "mine"
        run(*command, "--overwrite") if "deploy" not in line else None
    assert Path("model.onnx").read_bytes() == before
    Path("own").mkdir()
    Path("own/checkpoint").write_text("mine")
    assert "Onward did not make it" in run("artifacts", "model.onnx", "-l", "mse", "-o", "own", code=1).stderr
    assert Path("own/checkpoint").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
def test_files_get_the_mode_of_the_umask(artifacts: Path, run: Run) -> None:
    before = os.umask(0o027)
    try:
        run("train", "artifacts", "-d", "data.npz", "-o", "run")
        run("deploy", "run", "new.onnx")
        files = [path for path in [*Path("run").iterdir(), Path("new.onnx")] if path.is_file()]
        assert len(files) >= 5
        assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
            path.name: "0o640" for path in files
        }
    finally:
        os.umask(before)


def test_a_second_process_is_told_who_writes_a_run(artifacts: Path, run: Run) -> None:
    code = (
        "import sys, time, pathlib; from onward.train.lock import run_lock\n"
        "with run_lock(pathlib.Path('run')): print('held', flush=True); time.sleep(60)"
    )
    Path("run").mkdir()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            refused = run("train", "artifacts", "-d", "data.npz", "-o", "run", code=1).stderr
            assert f"'run' is being written by process {holder.pid} on " in refused
        finally:
            holder.kill()
    run("train", "artifacts", "-d", "data.npz", "-o", "run")  # the lock of a dead process is none


def test_lr_auto_finds_a_rate_and_shows_its_curve(artifacts: Path, run: Run) -> None:
    run("train", "artifacts", "-d", "data.npz", "--lr", "auto", "-e", 3, "-b", 16)
    history = json.loads(Path("run/history.json").read_text())
    rates = [row["learning_rate"] for row in history["range_test"]]
    assert rates[0] == 1e-6 and rates == sorted(rates) and len(rates) > 20
    assert 1e-4 < history["steps"][-1]["learning_rate"] < 0.5
    assert "Learning rate trial" in Path("run/report.html").read_text()
    run("train", "run", "--resume", "-e", 4)
    again = json.loads(Path("run/history.json").read_text())
    assert again["range_test"] == history["range_test"]
    assert again["steps"][-1]["learning_rate"] == history["steps"][-1]["learning_rate"]


def test_a_published_model_trains_with_care(shop: Path, run: Run) -> None:
    """A low rate, warm-up and clipping, and the body a tenth as fast as the head, without being asked."""
    run("artifacts", "model.onnx", "--classes", 3)
    about = metadata("artifacts/training_model.onnx")
    assert json.loads(about["onward.defaults"]) == {"learning_rate": 1e-3, "warmup": 0.1, "clip_norm": 1.0}
    optimizer = json.loads(metadata("artifacts/optimizer_model.onnx")["onward.optimizer"])
    assert optimizer["groups"][0]["learning_rate_scale"] == 0.1
    assert "head.weight" not in optimizer["groups"][0]["parameters"]
    run("train", "artifacts", "-d", "pictures", "-e", 4, "-b", 8)
    steps = json.loads(Path("run/history.json").read_text())["steps"]
    assert steps[0]["learning_rate"] < steps[-1]["learning_rate"] == pytest.approx(1e-3)


def test_batch_norm_follows_the_data_or_stays(shop: Path, run: Run) -> None:
    for mode, moves in (("train", True), ("frozen", False)):
        run("artifacts", "model.onnx", "-c", 3, "--batch-norm", mode, "-o", mode)
        run("train", mode, "-d", "pictures", "-o", f"run-{mode}", "-e", 2)
        run("deploy", f"run-{mode}", f"{mode}.onnx")
        session = onnx.load(f"{mode}.onnx")
        mean = next(onnx.numpy_helper.to_array(t) for t in session.graph.initializer if t.name == "mean")
        assert bool(np.abs(mean).max() > 1e-3) is moves


def test_class_counts_that_do_not_fit_name_the_way_out(shop: Path, run: Run) -> None:
    run("artifacts", "model.onnx", "-c", 4)
    refused = run("train", "artifacts", "-d", "pictures", code=1).stderr
    assert "the data has 3 classes (blue, green, red), the model 4" in refused
    assert "onward artifacts MODEL --classes 3" in refused


def test_a_bad_label_is_named_by_its_row(place: Path, run: Run) -> None:
    run("artifacts", "model.onnx", "-l", "cross-entropy")
    data = dict(np.load("data.npz"))
    data["labels"][57] = 7
    np.savez("bad.npz", **data)
    refused = run("train", "artifacts", "-d", "bad.npz", "--hold-out", 0.2, code=1).stderr
    assert "row 57 of the data (from 0): 'labels' has label 7" in refused
    trainer = onward.Trainer("artifacts", progress=False)
    with pytest.raises(ValueError, match="label 7 in row 57 of the training data"):
        trainer.fit((data["x"], data["labels"]))
    data["labels"][57] = 1
    data["x"][23, 1] = np.nan
    np.savez("nan.npz", **data)
    assert (
        "row 23 of 'x' in the data is not finite" in run("train", "artifacts", "-d", "nan.npz", code=1).stderr
    )
    with pytest.raises(onward.OnwardError, match="'x' itself is not finite in row 23"):
        trainer.fit((data["x"], data["labels"]))


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ("[1, 2]", "this version does not know its preprocessing"),
        ("{", "not valid JSON"),
        (
            '{"kind": "image", "input": "x", "size": {"height": 10000000, "width": 4}}',
            "its preprocessing has the size",
        ),
        ('{"kind": "image", "input": "x", "image_mean": "0"}', "wrong 'image_mean'"),
        ('{"kind": "image", "input": "x", "image_mean": [NaN]}', "wrong 'image_mean'"),
        ('{"kind": "text", "input": "x", "tokenizer": "../../etc/passwd"}', "its tokenizer is not beside it"),
        ('{"kind": "code", "input": "x"}', "this version does not know its preprocessing"),
    ],
)
def test_hostile_metadata_is_refused_in_one_line(shop: Path, run: Run, about: str, text: str) -> None:
    model = published()
    model.metadata_props.add(key="onward.preprocessing", value=about)
    onnx.save(model, "hostile.onnx")
    with pytest.raises(onward.OnwardError, match=text):
        onward.load("hostile.onnx")
    assert text in run("infer", "hostile.onnx", "-d", "pictures/red/1.png", code=1).stderr


def test_int8_of_convolutions_takes_ranges_from_the_data_of_the_run(shop: Path, run: Run) -> None:
    run("artifacts", "model.onnx", "--classes", "pictures")
    run("train", "artifacts", "-d", "pictures", "-e", 12, "--lr", 0.05, "-b", 8)
    run("deploy", "run")
    report = run("deploy", "run", "small.onnx", "--quantize", "int8", "--json").json
    assert report["quantization"]["cosine_min"] > 0.98
    scored = run("evaluate", "trained.onnx", "small.onnx", "-d", "pictures", "--json").json["models"]
    assert [report["metric_before"], report["metric"]] == [one["accuracy"] for one in scored]
    operators = {node.op_type for node in onnx.load("small.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators
    assert metadata("small.onnx") == metadata("trained.onnx")
    answer = onward.load("small.onnx")
    assert [answer(f"pictures/{name}/1.png")["label"] for name in ("red", "blue")] == ["red", "blue"]  # type: ignore[operator]


def test_auto_tries_what_fits_and_never_takes_what_is_larger(shop: Path, run: Run) -> None:
    run("artifacts", "model.onnx", "--classes", "pictures")
    run("train", "artifacts", "-d", "pictures", "-e", 1, "-b", 8)
    report = run("deploy", "run", "best.onnx", "--quantize", "auto", "--json").json
    refusals = {one["name"]: one["refusal"] for one in report["candidates"]}
    assert report["chosen"] == "float" and refusals["int8"] == "larger than float"
    assert "in convolutions" in refusals["int4"]
    assert all(one["metric"] is not None for one in report["candidates"] if one["size"])
    run("deploy", "run", "whole.onnx")
    assert Path("best.onnx").read_bytes() == Path("whole.onnx").read_bytes()


def test_slow_quantization_is_refused(shop: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.export import inference

    run("artifacts", "model.onnx", "--classes", "pictures")
    real = inference.measure

    def slow(*args: Any, **options: Any) -> Any:
        import dataclasses

        return dataclasses.replace(real(*args, **options), speedup=1 / 9, bytes_before=1 << 30)

    monkeypatch.setattr(inference, "measure", slow)
    command = ("deploy", "artifacts", "int8.onnx", "--quantize", "int8", "-d", "pictures")
    said = run(*command, code=1).stderr
    assert "int8 is 9.0 times as slow as the float model" in said and "--force" in said
    assert not Path("int8.onnx").exists()
    run(*command, "--force")
    said = run("deploy", "artifacts", "other.onnx", "--quantize", "int8-static", code=1).stderr
    assert "int8-static needs samples" in said and "--data" in said


def test_finetune_for_int8_writes_a_file_with_integer_convolutions(shop: Path, run: Run) -> None:
    said = run(
        "finetune", "model.onnx", "-d", "pictures", "-o", "small.onnx", "-e", 8, "--lr", 0.05, "-b", 8,
        "--quantize", "int8", "--run", "qat",
    ).stderr  # fmt: skip
    assert "trained for int8; integer kernels:" in said and "rows equal the training graph's" in said
    kinds = [node.op_type for node in onnx.load("small.onnx").graph.node]
    assert kinds.count("QuantizeLinear") >= 2 and "BatchNormalization" not in kinds
    answer = onward.load("small.onnx")
    assert [answer(f"pictures/{name}/1.png")["label"] for name in ("red", "blue")] == ["red", "blue"]  # type: ignore[operator]


def test_finetune_says_what_fewer_bits_changed(shop: Path, run: Run) -> None:
    """A head that has learned is a teacher, and the float model's figures stand beside the new ones."""
    run("finetune", "model.onnx", "-d", "pictures", "-o", "whole.onnx", "-e", 8, "--lr", 0.05, "-b", 8)
    more = ("-d", "pictures", "-e", 1, "-b", 8, "--hold-out", 0.5, "--quantize")
    figures = run("finetune", "whole.onnx", *more, "int8", "-o", "small.onnx", "--json").json
    assert figures["before"]["bytes"] == Path("whole.onnx").stat().st_size
    assert figures["after"]["bytes"] == Path("small.onnx").stat().st_size
    assert (
        figures["before"]["accuracy"] == 1.0
        and figures["after"]["accuracy"] == figures["metrics"]["accuracy"]
    )
    said = run("finetune", "whole.onnx", *more, "fp16", "-o", "half.onnx").stderr
    assert "fp16: quantized after training, not trained for: " in said


def test_artifacts_for_int8_with_a_teacher_train_without_labels(shop: Path, run: Run) -> None:
    onnx.save(published(), "teacher.onnx")
    np.savez("pixels.npz", images=np.random.default_rng(0).normal(size=(24, 3, 16, 16)).astype(np.float32))
    run("artifacts", "model.onnx", "--quantize", "int8", "-d", "pixels.npz", "--teacher", "teacher.onnx")
    said = run("train", "artifacts", "-d", "pixels.npz", "-e", 1, "-b", 8, "--json").json
    assert said is not None
    shown = run("deploy", "run", "small.onnx")
    assert "rows equal the training graph's" in shown.stdout and "parity was not checked" not in shown.stderr
    deployed = run("deploy", "run", "small.onnx", "--json", "--overwrite").json
    assert deployed["bytes"] and "QuantizeLinear" in {n.op_type for n in onnx.load("small.onnx").graph.node}


def test_resuming_a_finished_run_says_so(artifacts: Path, run: Run) -> None:
    run("train", "artifacts", "-d", "data.npz", "-e", 2)
    assert "nothing is left to do: the run has its 2 epochs" in run("train", "run", "--resume").stderr
    assert "nothing is left" not in run("train", "run", "--resume", "-e", 3).stderr


def test_a_full_disk_is_one_line(artifacts: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    said = run("train", "artifacts", "-d", "data.npz", "-e", 40, code=1).stderr
    monkeypatch.undo()
    assert "no space is left on the disk of 'run'" in said and "onward train run --resume" in said
    os.chdir(artifacts.parent)
    run("train", "run", "--resume", "-e", 20)


def test_check_keeps_to_a_budget_of_time(shop: Path, run: Run) -> None:
    found = run("check", "model.onnx", "-b", 4096, "--seconds", 0.1, "--json").json
    assert "samples at a time and multiplied" in found["measurement"]
    assert found["seconds_per_step"] > 0


def test_a_value_called_as_the_next_statistic_does_no_harm() -> None:
    text = (
        "(float[N, 3, 4, 4] x) => (float[N, 3] y) { c = Relu(x)"
        " n = BatchNormalization(c, gamma, beta, mean, var) mean.next = GlobalAveragePool(n) y = Flatten(mean.next) }"
    )
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net {text}'.replace("mean.next", "mean_next")
    )
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == "mean_next":
                    names[index] = "mean.next"
    for name, number in {"gamma": 1, "beta": 0, "mean": 0, "var": 1}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(3, number, np.float32), name))
    made = onward.build_artifacts(
        model, requires_grad=["gamma"], loss="cross-entropy", optimizer="sgd", batch_norm="train"
    )
    trainer = onward.Trainer(made, progress=False)
    x = np.random.default_rng(0).normal(size=(8, 3, 4, 4)).astype(np.float32) + 3
    trainer.fit((x, np.zeros(8, np.int64)))
    assert np.asarray(trainer.state.parameters["mean"].data).max() > 0.1
