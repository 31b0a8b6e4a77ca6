"""The programs of examples/languages train what Python trains, go on where it stopped, and refuse what it refuses."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from cpp.test_cpp import convolutional, encoder
from languages import matrix
from languages.programs import LANGUAGES, MissingError, Program
from onward import checkpoint
from onward.api import CheckpointState, Module, Optimizer
from onward.artifacts import LossType, OptimType, generate_artifacts
from onward.checkpoint import from_portable, to_portable
from onward.lora import LoRA
from small_models import CLASSIFIER, classifier, one_thread, start

SIZE, RATE, STEPS, MORE = 6, 0.01, 20, 5
Arrays = tuple[np.ndarray, ...]


def numbers() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(8 * SIZE, 4)).astype(np.float32)


def images() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(8 * SIZE, 1, 8, 8)).astype(np.float32)


def sentences() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 50, (8 * SIZE, 7))


def encoder_of_seven() -> onnx.ModelProto:
    model = encoder()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 7  # a file of samples has one shape
    return model


TRAINABLE = {
    "CNN": ["c1", "c2", "w", "bias", "s1", "o1", "s2", "o2"],
    "encoder": ["table", "wq", "wk", "wv", "w1", "w2", "wo", "ls", "lb"],
}
Case = tuple[Callable[[], onnx.ModelProto], dict[str, object], Callable[[], np.ndarray]]
MODELS: dict[str, Case] = {
    "MLP with dropout": (lambda: classifier(0.3), {"requires_grad": CLASSIFIER}, numbers),
    "CNN with batch norm": (convolutional, {"requires_grad": TRAINABLE["CNN"]}, images),
    "encoder with dropout": (encoder_of_seven, {"requires_grad": TRAINABLE["encoder"]}, sentences),
    "LoRA": (lambda: classifier(0.3), {"lora": LoRA(rank=2, targets=["w1", "w2"])}, numbers),
}


@dataclass
class Reference:
    """What Python makes of a model: artifacts, data, and the numbers that a program should print."""

    folder: Path
    data: Path
    batches: list[Arrays]
    losses: list[float] = field(default_factory=list)
    evaluation: float = 0.0
    answer: list[float] = field(default_factory=list)


def train(module: Module, optimizer: Optimizer, batches: Iterator[Arrays], steps: int) -> list[float]:
    optimizer.set_learning_rate(RATE)
    losses = []
    for inputs in itertools.islice(batches, steps):
        losses.append(float(module(*inputs)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @cache
    def make(name: str) -> Reference:
        model, options, inputs = MODELS[name]
        folder = tmp_path_factory.mktemp("model")
        generate_artifacts(
            model(), loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, portable=True,
            artifact_directory=folder, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        samples, labels = inputs(), np.random.default_rng(2).integers(0, 3, 8 * SIZE)
        data = tmp_path_factory.mktemp("data")
        session = ort.InferenceSession(folder / "train_step.onnx", one_thread())
        for value, array in zip(session.get_inputs(), (samples, labels)):
            array.tofile(data / f"{value.name}.bin")
        batches = [(samples[at : at + SIZE], labels[at : at + SIZE]) for at in range(0, 8 * SIZE, SIZE)]
        made = Reference(folder, data, batches)
        _, module, optimizer = start(folder)
        endless = itertools.cycle(batches)
        made.losses = train(module, optimizer, endless, STEPS)
        made.evaluation = float(module.eval()(*batches[0]))
        module.export_model_for_inferencing(data / "model.onnx", ["scores"])
        exported = ort.InferenceSession(data / "model.onnx", one_thread())
        answers = exported.run(["scores"], {exported.get_inputs()[0].name: batches[0][0]})[0]
        made.answer = np.asarray(answers)[0].tolist()
        module.train()
        made.losses += train(module, optimizer, endless, 2 * MORE)
        return made

    return make


@cache
def build(language: str) -> Program | str:
    try:
        return LANGUAGES[language]()
    except MissingError as error:
        return str(error)


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def program(language: str) -> Program:
    made = build(language)
    if isinstance(made, str):
        matrix.record(language, missing=made)
        pytest.skip(f"{language} is not tested: {made}")
    return made


def copy_of(reference: Reference, target: Path) -> Path:
    return Path(shutil.copytree(reference.folder, target / "artifacts"))


def printed(program: Program, *words: object) -> dict[str, list[float]]:
    """What a program printed, by the word that its lines begin with."""
    done = program.run(*words)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    lines: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        name, *values = line.split()
        lines.setdefault(name, []).extend(map(float, values))
    return lines


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_python_and_each_goes_on_from_the_state_of_the_other(
    name: str, program: Program, language: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    expected = reference(name)
    folder = copy_of(expected, tmp_path)
    found = printed(program, folder, expected.data, STEPS, SIZE, RATE)
    assert len(found["loss"]) == STEPS
    np.testing.assert_allclose(found["loss"], expected.losses[:STEPS], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["evaluation"], [expected.evaluation], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["answer"], expected.answer, rtol=1e-4, atol=1e-5)

    # Python goes on with the program's state …
    checkpoint.save(from_portable(folder / "state.bin"), folder / "resumed")
    state, module, optimizer = start(folder, "resumed")
    endless = itertools.islice(itertools.cycle(expected.batches), STEPS % 8, None)
    losses = train(module, optimizer, endless, MORE)
    np.testing.assert_allclose(losses, expected.losses[STEPS : STEPS + MORE], rtol=1e-5, atol=1e-5)

    # … and the program with Python's.
    CheckpointState.save_checkpoint(state, folder / "handed", include_optimizer_state=True)
    to_portable(checkpoint.load(folder / "handed"), folder / "state.bin", layout=folder / "state.bin")
    again = printed(program, folder, expected.data, MORE, SIZE, RATE)
    np.testing.assert_allclose(again["loss"], expected.losses[STEPS + MORE :], rtol=1e-5, atol=1e-5)
    apart = np.abs(np.array(found["loss"]) - expected.losses[:STEPS]).max()
    matrix.record(language, **{name: float(apart)})


def test_two_batches_an_update_are_one_batch_of_both(program: Program, language: str, tmp_path: Path) -> None:
    generate_artifacts(
        classifier(), requires_grad=CLASSIFIER, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        portable=True, artifact_directory=tmp_path,
    )  # fmt: skip
    numbers().tofile(tmp_path / "x.bin")
    np.random.default_rng(2).integers(0, 3, 8 * SIZE).tofile(tmp_path / "labels.bin")
    start = (tmp_path / "state.bin").read_bytes()
    whole = printed(program, tmp_path, tmp_path, 3, 2 * SIZE, RATE)
    (tmp_path / "state.bin").write_bytes(start)
    halves = printed(program, tmp_path, tmp_path, 3, SIZE, RATE, 2)
    means = np.reshape(halves["loss"], (3, 2)).mean(axis=1)
    np.testing.assert_allclose(means, whole["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(halves["answer"], whole["answer"], rtol=1e-4, atol=1e-6)
    matrix.record(language, accumulates=True)


def damage(folder: Path, _: Path) -> None:
    content = bytearray((folder / "state.bin").read_bytes())
    content[100] ^= 1
    (folder / "state.bin").write_bytes(content)


def take_the_state_of_another_model(folder: Path, _: Path) -> None:
    generate_artifacts(
        classifier(), requires_grad=["w1"], loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW,
        portable=True, artifact_directory=folder / "other",
    )  # fmt: skip
    shutil.copy(folder / "other" / "state.bin", folder)


def write_a_wrong_label(_: Path, data: Path) -> None:
    labels = np.fromfile(data / "labels.bin", np.int64)
    labels[3] = 3
    labels.tofile(data / "labels.bin")


def write_a_wrong_shape(_: Path, data: Path) -> None:
    np.ones((8 * SIZE, 3), np.float32)[:-1].tofile(data / "x.bin")


MISTAKES = {
    "a damaged state": (damage, "state.bin' is damaged: its content does not match its checksum"),
    "the state of another model": (
        take_the_state_of_another_model,
        "state.bin' is the state of another model",
    ),
    "a label that is no class": (write_a_wrong_label, "'labels' has classes from 0 to 2, and not 3"),
    "samples of another shape": (
        write_a_wrong_shape,
        "x.bin' has 564 bytes, not 96 or more in samples of 16",
    ),
}


def test_it_refuses_what_it_cannot_train_on_with_one_clear_line(
    program: Program, language: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    expected = reference("MLP with dropout")
    for name, (spoil, message) in MISTAKES.items():
        folder = copy_of(expected, tmp_path / name)
        data = Path(shutil.copytree(expected.data, tmp_path / name / "data"))
        spoil(folder, data)
        before = (folder / "state.bin").read_bytes()
        done = program.run(folder, data, 3, SIZE, RATE)
        lines = done.stderr.replace('"', "'").splitlines()
        assert done.returncode == 1 and len(lines) == 1, (name, done.stderr)
        assert lines[0].startswith("error: ") and message in lines[0]
        assert (folder / "state.bin").read_bytes() == before, name
    matrix.record(language, refuses=True)


@pytest.mark.skipif("ONWARD_ALL_CASES" not in os.environ, reason="takes minutes: set ONWARD_ALL_CASES=1")
def test_memory_is_flat_over_ten_thousand_steps(
    program: Program, language: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    expected = reference("MLP with dropout")
    folder = copy_of(expected, tmp_path)
    few = program.peak_memory(folder, expected.data, 1_500, SIZE, RATE)
    many = program.peak_memory(folder, expected.data, 11_500, SIZE, RATE)
    # 10,000 states that are not freed are 12 MB and more, losses 4 MB; the collectors' own heaps vary by some
    collected = language.split(",")[0] in ("Java", "Kotlin", "C#", "Go", "Node.js")
    assert many - few < (10 if collected else 2) * 2**20, (few, many)
    matrix.record(language, grows=many - few)
