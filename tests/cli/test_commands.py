"""The other commands: what each does, and what it says when it cannot."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from cli.conftest import contents
from cli.newcomer import make_data
from onward import checkpoint
from onward.data.read import Data
from onward.data.splits import split


def test_help_lists_every_command_with_examples(run: Any) -> None:
    shown = run("--help").stdout
    commands = "export artifacts check train evaluate infer deploy inspect bench gradcheck convert lora distributed web"
    for name in [*commands.split(), "doctor", "conform"]:
        assert name in shown
        assert "onward " + name in run(name, "--help").stdout or name == "lora"


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom onward.cli.app import app\n"
        "try:\n    app(['train', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'numpy', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version(run: Any) -> None:
    assert run("--version").stdout.startswith("onward ")


def test_the_package_runs_as_a_module(run: Any) -> None:
    done = subprocess.run([sys.executable, "-m", "onward", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, run("--version").stdout)


# ---- artifacts and check -------------------------------------------------------------------------------


def test_artifacts_train_weights_and_keep_statistics(place: Path, run: Any) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        net (float[n, 2] x) => (float[n, 2] y) <float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] m = {0, 0},
            float[2] v = {1, 1}, float low = {-3}, float high = {3}> {
            z = BatchNormalization (x, s, b, m, v)  y = Clip (z, low, high) }""")
    onnx.save(model, "bn.onnx")
    found = run("artifacts", "bn.onnx", "--loss", "mse", "--json").json
    assert (found["trainable"], found["frozen"]) == (["s", "b"], ["m", "v"])


def test_artifacts_follow_patterns(place: Path, run: Any) -> None:
    assert run("artifacts", "model.onnx", "-l", "mse", "--train", "w*", "--json").json["trainable"] == [
        "w1",
        "w2",
    ]
    found = run("artifacts", "model.onnx", "-l", "mse", "--freeze", "b?", "-o", "other", "--json").json
    assert (found["trainable"], found["frozen"]) == (["w1", "w2"], ["b1", "b2"])


def test_weights_in_constant_nodes_train_too(place: Path, run: Any) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        net (float[n, 2] x) => (float[n, 1] y) {
            w = Constant <value = float[2, 1] {1, 2}> ()  half = Constant <value = float {0.5}> ()
            a = MatMul (x, w)  y = Mul (a, half) }""")
    onnx.save(model, "constants.onnx")
    assert run("artifacts", "constants.onnx", "-l", "mse", "--json").json["trainable"] == ["w"]


def test_a_loss_after_a_softmax_is_remarked_upon(place: Path, run: Any) -> None:
    model = onnx.load("model.onnx")
    model.graph.node.append(onnx.helper.make_node("Softmax", ["scores"], ["probabilities"]))
    model.graph.output[0].name = "probabilities"
    onnx.save(model, "model.onnx")
    assert "add --loss-input scores" in run("artifacts", "model.onnx", "-l", "cross-entropy").stderr
    checked = run("check", "model.onnx", "-l", "cross-entropy", "--steps", 0, "--json").json
    assert "add --loss-input scores" in checked["remark"]
    mended = run(
        "artifacts", "model.onnx", "-l", "cross-entropy", "--loss-input", "scores", "-o", "mended", "--json"
    )
    assert mended.json["remark"] is None
    run("train", "mended", "-d", "data.npz", "-e", 2)
    assert run("deploy", "run", "m.onnx", "--json").json["outputs"] == ["probabilities"]


def test_check_says_yes_with_sizes(place: Path, run: Any) -> None:
    assert run("check", "model.onnx", "--steps", 0, "--json").json["trainable"]
    found = run("check", "model.onnx", "-l", "cross-entropy", "--batch-size", 8, "--json").json
    values = 16 * 4 + 16 + 3 * 16 + 3
    assert found["trainable"] is True
    assert (found["trainable_values"], found["frozen_values"]) == (values, 0)
    assert (found["parameter_bytes"], found["optimizer_bytes"]) == (4 * values, 8 * values)
    assert found["seconds_per_step"] > 0


def test_check_names_every_operator_in_the_way(place: Path, run: Any) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18, "custom": 1]>
        net (float[n, 2] x) => (float[n, 2] y) <float[2] w = {1, 1}> {
            a = Mul (x, w)  b = custom.First (a)  y = custom.Second (b) }""")
    onnx.save(model, "custom.onnx")
    found = run("check", "custom.onnx", "-l", "mse", "--json", code=2).json
    assert found["trainable"] is False
    assert [row["operator"] for row in found["operators"]] == ["custom.First", "custom.Second"]


# ---- evaluate, infer, deploy ---------------------------------------------------------------------------


def test_evaluate_equals_the_runs_own_figures(trained: Path, run: Any) -> None:
    """The best checkpoint, on the samples that were held out."""
    data = make_data()
    _, held = split(Data({name: data[name] for name in ("x", "labels")}), 0.25, seed=0)
    np.savez("held.npz", **(held.arrays or {}))
    found = run("evaluate", "run", "-d", "held.npz", "-m", "accuracy", "--json").json
    history = json.loads((trained / "history.json").read_text(encoding="utf-8"))["epochs"]
    assert found["loss"] == pytest.approx(min(row["eval_loss"] for row in history), rel=1e-5)
    assert found["checkpoint"] == str(Path("run/best"))


def test_infer_from_a_run_equals_its_deployed_model(trained: Path, run: Any) -> None:
    run("deploy", "run", "model-trained.onnx")
    run("infer", "run", "-d", "data.npz", "-o", "one.npz")
    run("infer", "model-trained.onnx", "-d", "data.npz", "-o", "two.npz", "-b", 7)
    one, two = np.load("one.npz")["scores"], np.load("two.npz")["scores"]
    assert one.shape == (96, 3)
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    run("infer", "model-trained.onnx", "-d", "data.npz", "-o", "three.csv")
    header, *rows = Path("three.csv").read_text(encoding="utf-8").splitlines()
    assert header == "scores_0,scores_1,scores_2" and len(rows) == 96


@pytest.mark.parametrize("scheme", [None, "int8", "fp16"])
def test_deploy_proves_what_it_writes(trained: Path, run: Any, scheme: str | None) -> None:
    more = [] if scheme is None else ["--quantize", scheme]
    found = run("deploy", "run", "out/m.onnx", "--data", "data.npz", *more, "--json").json
    assert found["parity"]["passed"] and found["outputs"] == ["scores"]
    assert (found["quantization"] is None) == (scheme is None)
    session = ort.InferenceSession("out/m.onnx")
    assert [value.name for value in session.get_inputs()] == ["x"]
    assert session.run(None, {"x": make_data()["x"]})[0].shape == (96, 3)


def test_deploy_takes_values_inside_the_graph(trained: Path, run: Any) -> None:
    assert run("deploy", "run", "hidden.onnx", "--outputs", "a", "--json").json["outputs"] == ["a"]


def test_debug_shows_the_traceback(place: Path) -> None:
    from typer.testing import CliRunner

    from onward.cli.app import app

    result = CliRunner().invoke(app, ["deploy", "nowhere", "--debug"])
    assert result.exit_code == 1 and "Traceback" in result.stderr


# ---- inspect -------------------------------------------------------------------------------------------


def test_inspect_knows_what_it_sees(trained: Path, run: Any) -> None:
    found = {
        path: run("inspect", path, "--json").json for path in ("model.onnx", "artifacts", "run", "run/best")
    }
    assert [view["kind"] for view in found.values()] == ["model", "artifacts", "run", "checkpoint"]
    assert found["model.onnx"]["operators"] == {"Gemm": 2, "Relu": 1}
    assert {p["name"]: p["shape"] for p in found["model.onnx"]["parameters"]}["w1"] == [16, 4]
    assert found["artifacts"]["models"]["training_model"]["role"] == "training"
    assert found["run/best"]["integrity"] == "checksum verified"
    assert all(p["trainable"] for p in found["run/best"]["parameters"])
    assert [c["integrity"] for c in found["run"]["checkpoints"]] == ["checksum verified"] * 3


def test_inspect_writes_a_page(trained: Path, run: Any) -> None:
    for name in ("model.onnx", "artifacts", "run"):
        run("inspect", name, "--html", "page.html", "--overwrite")
        page = Path("page.html").read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>") and "http" not in page


def test_inspect_finds_damage(trained: Path, run: Any) -> None:
    best = trained / "best"
    data = bytearray(best.read_bytes())
    data[len(data) // 2] ^= 1
    best.write_bytes(data)
    assert "run/best" in run("inspect", Path("run/best"), code=1).stderr.replace("\\", "/")
    checkpoints = run("inspect", "run", "--json").json["checkpoints"]
    assert [c["integrity"].startswith("DAMAGED") for c in checkpoints] == [False, False, True]


# ---- gradcheck, bench, convert, lora, export ------------------------------------------------------------


def test_gradcheck_measures(place: Path, run: Any) -> None:
    found = run("gradcheck", "model.onnx", "--wrt", "w1", "--json").json
    assert found["passed"] and found["wrt"] == ["w1"] and found["finite_difference"] < 1e-4


def test_gradcheck_runs_the_gradients_on_a_device(
    place: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a provider's options, which the CPU's takes as well."""
    import onnxruntime

    from onward.runtime.devices import CPU, Device

    asked, real = [], onnxruntime.InferenceSession
    there = [(CPU, {})]
    monkeypatch.setattr(Device, "providers", lambda self, capture=False: there)
    monkeypatch.setattr(
        onnxruntime, "InferenceSession",
        lambda *args, providers, **kwargs: (asked.append(providers), real(*args, providers=providers, **kwargs))[1],
    )  # fmt: skip
    found = run("gradcheck", "model.onnx", "--device", "cpu", "--json").json
    assert found["passed"] and found["device"] == "cpu" and asked == [there]


def test_gradcheck_refuses_what_is_random(place: Path, run: Any) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        net (float[n, 2] x) => (float[n, 2] y) <float rate = {0.5}, bool on = {1}> { y = Dropout (x, rate, on) }""")
    onnx.save(model, "random.onnx")
    assert "draws random numbers (Dropout)" in run("gradcheck", "random.onnx", code=1).stderr


def test_bench_measures_every_part(artifacts: Path, run: Any) -> None:
    found = run("bench", "artifacts", "--steps", 3, "--json").json
    for part in ("step", "gradients", "update", "evaluation"):
        assert 0 < found[part]["fastest"] <= found[part]["median"] <= found[part]["slowest"]


def test_convert_goes_to_safetensors_and_back(trained: Path, run: Any) -> None:
    run("convert", "run/best", "w.safetensors")
    run("convert", "w.safetensors", "again", "--into", "artifacts/checkpoint")
    one, two = checkpoint.load("run/best"), checkpoint.load("again")
    assert list(one.trainable) == list(two.trainable)
    for name, array in one.trainable.items():
        np.testing.assert_array_equal(array, two.trainable[name])


def test_convert_goes_to_a_state_file_and_back(trained: Path, run: Any) -> None:
    made = run("artifacts", "model.onnx", "--loss", "cross-entropy", "--portable", "--json").json
    assert {"train_step.onnx", "state.bin", "inference_model.onnx"} <= made["files"].keys()
    last = max(trained.glob("checkpoint-*"))
    run("convert", last, "new.bin", "--into", "artifacts/state.bin")
    run("convert", "new.bin", "again")
    one, two = checkpoint.load(last), checkpoint.load("again")
    for name, array in one.trainable.items():
        np.testing.assert_array_equal(array, two.trainable[name])
        for slot, state in one.optimizer[0].slots[name].items():
            np.testing.assert_array_equal(state, two.optimizer[0].slots[name][slot])
    assert one.optimizer[0].step == two.optimizer[0].step > 0
    assert one.extras["learning_rate"] == two.extras["learning_rate"]
    assert (
        run("inspect", "new.bin", "--json").json["parameters"]
        == run("inspect", "again", "--json").json["parameters"]
    )


def test_convert_adds_a_checksum_to_checkpoints_of_the_original(place: Path, run: Any) -> None:
    original = Path(__file__).parents[1] / "checkpoint" / "fixtures" / "original.ckpt"
    run("convert", original, "ours")
    assert run("inspect", original, "--json").json["integrity"].startswith("no checksum")
    assert run("inspect", "ours", "--json").json["integrity"] == "checksum verified"


def test_adapters_are_trained_extracted_and_merged(place: Path, run: Any) -> None:
    made = run(
        "artifacts", "model.onnx", "-l", "cross-entropy", "--lora", 2, "--lora-target", "w1", "--json"
    ).json
    assert made["trainable"] == ["w1.lora_a", "w1.lora_b"]
    run("train", "artifacts", "-d", "data.npz", "-e", 3)
    assert run("lora", "extract", "run/best", "a.safetensors", "--json").json["adapters"] == made["trainable"]
    run("deploy", "run", "adapted.onnx")
    run("lora", "merge", "adapted.onnx", "merged.onnx")
    x = make_data()["x"]
    one, two = (ort.InferenceSession(name).run(None, {"x": x})[0] for name in ("adapted.onnx", "merged.onnx"))
    np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=1e-5, atol=1e-5)
    assert len(onnx.load("merged.onnx").graph.node) < len(onnx.load("adapted.onnx").graph.node)


def test_injected_adapters_change_nothing_yet(place: Path, run: Any) -> None:
    found = run("lora", "inject", "model.onnx", "adapted.onnx", "--rank", 2, "--json").json
    assert found["adapters"] == ["w1.lora_a", "w1.lora_b", "w2.lora_a", "w2.lora_b"]
    x = make_data()["x"]
    one, two = (ort.InferenceSession(name).run(None, {"x": x})[0] for name in ("model.onnx", "adapted.onnx"))
    np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=1e-6, atol=1e-6)


def test_export_takes_a_torch_entry_point(place: Path, run: Any) -> None:
    Path("my_net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 2), torch.randn(3, 4)\n"
        "def wide():\n    return torch.nn.Linear(4, 2), torch.randn(3, 5)\n",
        encoding="utf-8",
    )
    assert "linear.onnx" in run("export", "my_net:build", "-o", "linear.onnx").stdout
    again = run("export", "my_net:build", "-o", "linear.onnx", "--json", "--overwrite").json
    assert again["files"] == {"linear.onnx": Path("linear.onnx").stat().st_size}
    assert [tensor.name for tensor in onnx.load("linear.onnx").graph.initializer] == ["weight", "bias"]
    assert run("artifacts", "linear.onnx", "-l", "mse", "--json").json["trainable"] == ["weight", "bias"]
    for entry, more, message in (
        ("wide", [], "fails on the example arguments"),
        ("build", ["--opset", 3], "opset must be"),
    ):
        refused = run("export", f"my_net:{entry}", "-o", "x/x.onnx", *more, code=1).stderr.splitlines()
        assert message in refused[0] and refused[1].startswith("hint: ") and len(refused) == 2
        assert not Path("x").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_an_interrupted_export_leaves_nothing(
    place: Path, run: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    Path("my_net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 2), torch.randn(3, 4)\n", encoding="utf-8"
    )
    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: signal.raise_signal(number))
        assert "interrupted" in run("export", "my_net:build", "-o", "new/linear.onnx", code=130).stderr
    assert contents() == before


def test_a_hugging_face_folder_is_exported_and_answers(place: Path, run: Any) -> None:
    from export.tiny_transformers import tiny_pair

    for part in tiny_pair("bert", "pooling"):
        part.save_pretrained("bert")
    run("export", "bert", "--task", "pooling", "-o", "sentences")
    found = run("infer", "sentences", "--text", "The ferry leaves at noon.", "--json").json
    assert found["task"] == "pooling" and len(found["answers"][0]) == 16


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "artifacts", "--data", "data.npz"),
        ("evaluate", "artifacts", "--data", "data.npz"),
        ("bench", "artifacts", "--steps", 1),
        ("infer", "model.onnx", "--data", "data.npz"),
        ("inspect", "artifacts"),
        ("check", "model.onnx"),
        ("gradcheck", "model.onnx"),
        ("deploy", "artifacts"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_device_that_is_not_there_is_refused(
    artifacts: Path, run: Any, arguments: tuple[object, ...]
) -> None:
    result = run(*arguments, "--device", "openvino", code=1)
    assert "device='openvino' cannot be used" in result.stderr
    assert not (artifacts.parent / "run").exists() and not (artifacts.parent / "trained.onnx").exists()


def test_every_node_of_the_cpu_runs_there(artifacts: Path, run: Any) -> None:
    assert "every node runs on the CPU" in run("inspect", "artifacts", "--device", "cpu", code=1).stderr


def test_a_run_in_float16_trains_and_is_deployed(place: Path, run: Any) -> None:
    run("artifacts", "model.onnx", "--loss", "cross-entropy", "--precision", "fp16")
    run("train", "artifacts", "--data", "data.npz", "--epochs", 2, "--hold-out", 0.25, "--lr", 0.01)
    run("deploy", "run", "trained.onnx", "--data", "data.npz")
    assert Path("trained.onnx").exists()
    run("train", "run", "--resume", "--epochs", 3)
    history = json.loads(Path("run/history.json").read_text(encoding="utf-8"))
    assert [row["epoch"] for row in history["epochs"]] == [1, 2, 3]
