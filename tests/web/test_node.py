"""Node.js trains what Python trains, from the same files, to the same losses; any onnxruntime can be given to it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from checkpoint.samples import encoded, sample
from onward.api import CheckpointState, Module
from onward.artifacts import LossType, generate_artifacts
from onward.graph import save
from web import decoder
from web.browser import MODULES
from web.models import MODELS, OPTIMIZERS, make_data
from web.test_training import RATE, python_curve

WEB = MODULES.parent
Node = Callable[..., Any]


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """Runs a command of node.mjs in a project that has onward-web installed."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("needs Node.js (https://nodejs.org)")
    if not (MODULES / "onnxruntime-node").is_dir():
        pytest.skip("needs npm packages (make test gets them; by hand: npm ci --prefix web --ignore-scripts)")
    project = tmp_path_factory.mktemp("node")
    (project / "node_modules").mkdir()
    for name in ("onnxruntime-node", "onnxruntime-web"):
        (project / "node_modules" / name).symlink_to(MODULES / name)
    (project / "node_modules" / "onward-web").symlink_to(WEB)
    shutil.copy(Path(__file__).with_name("node.mjs"), project)

    def run(command: str, preexec_fn: Callable[[], object] | None = None, **given: Any) -> Any:
        words = [program, "node.mjs", json.dumps({"command": command, **given})]
        done = subprocess.run(words, cwd=project, capture_output=True, text=True, preexec_fn=preexec_fn)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Where the batches of each model are, and their shape."""
    places = {}
    for name in MODELS:
        folder, made = tmp_path_factory.mktemp(name), make_data(name)
        (folder / "x.bin").write_bytes(made.x.tobytes())
        (folder / "labels.bin").write_bytes(made.labels.tobytes())
        places[name] = {"data": str(folder), "dims": list(made.x.shape[1:]), "kind": str(made.x.dtype)}
    return places


CASES: list[dict[str, Any]] = [
    *({"name": name} for name in MODELS if name != "wide"),
    {"name": "cnn", "accumulate": 2, "total": 40},
    *({"name": "mlp", "optimizer": f"{prefix}optimizer_model.onnx"} for prefix in OPTIMIZERS),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_hundred_steps_give_the_losses_of_python(
    node: Node, models: dict[str, Path], data: dict[str, Any], case: dict[str, Any]
) -> None:
    name = case["name"]
    losses, evaluation = python_curve(models[name], **case)
    found = node("curve", folder=str(models[name]), count=100, rate=RATE, seed=7, **data[name], **case)
    assert found["provider"] == "cpu"
    np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["evaluation"], evaluation, rtol=0, atol=1e-5)


@pytest.mark.parametrize("runtime", ["node", "wasm"])
def test_any_onnxruntime_can_be_given(
    node: Node, models: dict[str, Path], data: dict[str, Any], runtime: str
) -> None:
    losses, _ = python_curve(models["mlp"], "mlp", count=20)
    found = node(
        "curve", folder=str(models["mlp"]), count=20, rate=RATE, seed=7, runtime=runtime, **data["mlp"]
    )
    np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=1e-5)
    assert found["provider"] == {"node": "cpu", "wasm": "wasm in Node.js"}[runtime]


def test_training_goes_on_in_the_other_language(
    node: Node, models: dict[str, Path], data: dict[str, Any], tmp_path: Path
) -> None:
    whole, _ = python_curve(models["cnn"], "cnn")
    middle = tmp_path / "middle"
    node("curve", folder=str(models["cnn"]), count=60, rate=RATE, seed=7, save=str(middle), **data["cnn"])
    state = CheckpointState.load_checkpoint(middle)
    module = Module(models["cnn"] / "training_model.onnx", state)
    made = make_data("cnn")
    loss = module(made.x[960:976], made.labels[960:976])
    np.testing.assert_allclose(float(loss), whole[60], rtol=0, atol=1e-5)
    rest = node("curve", folder=str(models["cnn"]), checkpoint=str(middle), first=60, count=40, **data["cnn"])
    np.testing.assert_allclose(rest["losses"], whole[60:], rtol=0, atol=1e-5)


# ---- bad input ------------------------------------------------------------------------------------------

MISTAKES = {
    "shape": ("RangeError", "input 'x' has shape [16,63], the model takes [batch,64]"),
    "label": ("RangeError", "'labels' has label 10 at 0: the model has 10 classes"),
    "count": ("RangeError", "the model takes 2 inputs (x, labels), got 1"),
    "nan": ("NonFiniteError", "parameters are unchanged"),
    "no folder": ("CheckpointError", "not committed, the old one is kept: ENOENT"),
    "a folder": ("CheckpointError", "not committed, the old one is kept: "),
    "missing": ("CheckpointError", "cannot be read: ENOENT"),
    "another model": ("OnwardError", "do they belong together?"),
    "no onnxruntime": ("TypeError", "Runtime.use takes an onnxruntime"),
    "unpaired": ("ModelError", "is not an optimizer model of Onward"),
}


def test_mistakes_are_explained_and_leave_the_state_as_it_was(
    node: Node, models: dict[str, Path], data: dict[str, Any]
) -> None:
    other = str(models["cnn"] / "checkpoint")
    answer = node("mistakes", folder=str(models["mlp"]), other=other, **data["mlp"])
    assert answer["unchanged"]
    assert answer["found"].keys() == MISTAKES.keys()
    for name, (kind, part) in MISTAKES.items():
        said = answer["found"][name]
        assert said["error"] == kind, (name, said)
        assert part in said["message"], name
    assert not [path for path in models["mlp"].iterdir() if "onward-tmp" in path.name]


def test_damaged_checkpoints_are_refused(node: Node, tmp_path: Path) -> None:
    whole = encoded(sample(0))
    bad = {f"cut{size}": whole[:size] for size in range(0, len(whole), max(1, len(whole) // 20))}
    for place in range(0, len(whole), max(1, len(whole) // 20)):
        bad[f"changed{place}"] = whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :]
    bad["longer"] = whole + b"\0"
    for name, content in {"good": whole, **bad}.items():
        (tmp_path / name).write_bytes(content)
    found = node("load", files=[str(tmp_path / name) for name in ["good", *bad]])
    assert found.pop(str(tmp_path / "good")) is None
    for file, said in found.items():
        assert said is not None and said[0] == "CheckpointError", file


def test_a_full_disk_leaves_the_old_checkpoint(node: Node, models: dict[str, Path], tmp_path: Path) -> None:
    import signal

    resource = pytest.importorskip("resource")
    target = tmp_path / "checkpoint"
    target.write_bytes(b"the old one")

    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    said = node(
        "save", checkpoint=str(models["mlp"] / "checkpoint"), target=str(target), preexec_fn=little_room
    )
    assert said["error"] == "CheckpointError"
    assert "not committed, the old one is kept: EFBIG" in said["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert target.read_bytes() == b"the old one"


# ---- weights in a second file -----------------------------------------------------------------------------


def test_constants_in_a_second_file_are_read(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "_SHARED", 0)  # as if the constants took 128 MiB
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        net (float[n, 4] x) => (float[n, 2] scores)
        { h = MatMul (x, base) t = Tanh (h) scores = MatMul (t, head) }""")
    rng = np.random.default_rng(0)
    for name, shape in (("base", (4, 300)), ("head", (300, 2))):
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    generate_artifacts(
        model, requires_grad=["head"], loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    (constants,) = tmp_path.glob("constants.*.data")
    (tmp_path / "linked.data").symlink_to(constants)
    (tmp_path / "folder").mkdir()
    places = {"hostile": f"../{constants.name}", "link": "linked.data", "folder": "folder"}
    for name, location in places.items():
        hostile = onnx.load(tmp_path / "training_model.onnx", load_external_data=False)
        for tensor in hostile.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        onnx.save(hostile, tmp_path / f"{name}.onnx")
    hostile = onnx.load(tmp_path / "training_model.onnx", load_external_data=False)
    hostile.graph.input[0].name = "__proto__"
    onnx.save(hostile, tmp_path / "prototype.onnx")
    found = node("external", folder=str(tmp_path), file=constants.name)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    x = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
    loss = float(Module(tmp_path / "training_model.onnx", state)(x, np.array([0, 1])))
    for way in ("beside", "given"):
        np.testing.assert_allclose(found[way]["answer"], loss, rtol=0, atol=1e-6)
    assert f'pass it, externalData: {{ "{constants.name}"' in found["neither"]["message"]
    assert "only a file beside the model is read" in found["elsewhere"]["message"]
    for name in ("through a link", "no file"):
        assert found[name]["error"] == "ModelError" and "not a regular file" in found[name]["message"]
    assert found["a prototype"]["error"] == "ModelError" and "rename it" in found["a prototype"]["message"]


@pytest.mark.parametrize("runtime", ["wasm", "node"])
def test_adapters_of_a_4_bit_decoder_train(node: Node, tmp_path: Path, runtime: str) -> None:
    folder = tmp_path / "artifacts"
    files = decoder.write_decoder(tmp_path / "base", folder)
    (constants,) = folder.glob("constants.*.data")
    models = {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"}
    assert {path.name for path in files} == models | {"checkpoint", constants.name}
    # every number once, however many products and slices read it
    stored = sum(path.stat().st_size for path in (tmp_path / "base").glob("model.onnx*"))
    assert constants.stat().st_size < stored
    found = node(
        "language", folder=str(folder), rows=decoder.ROWS.tolist(), rate=decoder.RATE, runtime=runtime
    )
    np.testing.assert_allclose(found, decoder.decoder_losses(folder), rtol=1e-4)


def test_norms_whose_gradients_accumulate_as_one_vector(tmp_path: Path) -> None:
    program = shutil.which("node")
    if program is None:
        pytest.skip("needs Node.js (https://nodejs.org)")
    norms = "\n".join(
        f"a{i + 1}, m{i}, v{i} = BatchNormalization <training_mode = 1> (a{i}, s{i}, b{i}, mean{i}, var{i})"
        for i in range(5)
    )
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> net (float[n, 4] a0) => (float[n, 4] a5) {' + norms + "}"
    )
    for i in range(5):
        for name, number in ((f"s{i}", 1), (f"b{i}", 0), (f"mean{i}", 0), (f"var{i}", 1)):
            array = np.full(4, number, np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    trained = [f"{kind}{i}" for i in range(5) for kind in "sb"]
    frozen = [f"{kind}{i}" for i in range(5) for kind in ("mean", "var")]
    generate_artifacts(
        model,
        requires_grad=trained,
        frozen_params=frozen,
        loss=LossType.MSELoss,
        artifact_directory=tmp_path,
    )
    file, special = tmp_path / "training_model.onnx", tmp_path / "special.onnx"
    assert sum(node.op_type == "Where" for node in onnx.load(file).graph.node) == 1
    script = (
        "import fs from 'node:fs'; const { specializeReset } = await import(process.argv[1]);"
        "fs.writeFileSync(process.argv[3], specializeReset(new Uint8Array(fs.readFileSync(process.argv[2]))))"
    )
    place = (WEB / "src" / "runtime" / "protobuf.js").as_uri()
    words = [program, "--input-type=module", "-e", script, place, str(file), str(special)]
    subprocess.run(words, check=True, capture_output=True)
    made = onnx.load(special)
    onnx.checker.check_model(made)  # nothing reads a buffer that is gone
    assert not [v.name for v in made.graph.input if "accumulation" in v.name or v.name == "lazy_reset_grad"]
    x, target = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(special)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(file, state)
    feeds = {name: np.asarray(p.data) for name, p in state.parameters}
    module(x, target)
    names = [v.name for v in session.get_outputs() if v.name.endswith("accumulation.out")]
    found = session.run(names, {**feeds, **dict(zip(module.input_names(), (x, target)))})
    assert len(names) == len(trained)
    for name, gradient in zip(names, found):
        own = state.parameters[name.removesuffix("_grad.accumulation.out")].grad
        np.testing.assert_allclose(gradient, own, rtol=1e-6, atol=1e-7)
