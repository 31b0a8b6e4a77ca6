"""CheckpointState: parameters and properties by name, contiguous buffers, nominal states, saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onward.api import CheckpointState, Module, Optimizer, Parameter
from onward.errors import OnwardError
from small_models import CLASSIFIER, batch, load, one_thread, snapshot, start, write_classifier

SIZES = {"w1": (4, 8), "b1": (8,), "w2": (8, 3), "b2": (3,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classifier with its second bias frozen."""
    return write_classifier(
        tmp_path_factory.mktemp("artifacts"),
        requires_grad=["w1", "b1", "w2"],
        frozen_params=["b2"],
        nominal_checkpoint=True,
    )


@pytest.fixture(params=["before a module", "with a module"])
def state(request: pytest.FixtureRequest, folder: Path) -> CheckpointState:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    if request.param == "with a module":
        Module(folder / "training_model.onnx", state)
    return state


# ---- parameters ----------------------------------------------------------------------------------


def test_parameters_behave_as_a_mapping_that_iterates_over_pairs(state: CheckpointState) -> None:
    assert len(state.parameters) == 4
    assert "w1" in state.parameters and "nope" not in state.parameters and 3 not in state.parameters
    pairs = list(state.parameters)
    assert [name for name, _ in pairs] == CLASSIFIER
    for name, parameter in pairs:
        assert isinstance(parameter, Parameter) and parameter.name == name
        assert parameter.data.shape == SIZES[name] and parameter.data.dtype == np.float32
        assert parameter.requires_grad == (name != "b2")


def test_gradients_are_zeros_before_a_step_and_none_where_frozen(state: CheckpointState) -> None:
    assert state.parameters["b2"].grad is None
    gradient = state.parameters["w1"].grad
    assert gradient is not None and gradient.shape == SIZES["w1"] and not gradient.any()


def test_data_and_gradients_are_copies(state: CheckpointState) -> None:
    before = snapshot(state)
    state.parameters["w1"].data[:] = 7
    gradient = state.parameters["w1"].grad
    assert gradient is not None
    gradient[:] = 7
    assert snapshot(state) == before
    assert not np.any(state.parameters["w1"].grad)


@pytest.mark.parametrize("how", ["item", "attribute"])
@pytest.mark.parametrize("name", CLASSIFIER)
def test_a_parameter_is_set_by_value(state: CheckpointState, name: str, how: str) -> None:
    value = np.arange(np.prod(SIZES[name]), dtype=np.float32).reshape(SIZES[name])
    if how == "item":
        state.parameters[name] = value
    else:
        state.parameters[name].data = value
    expected = value.copy()
    value[:] = -1
    np.testing.assert_array_equal(state.parameters[name].data, expected)


def test_a_parameter_that_is_set_is_what_the_sessions_use(folder: Path) -> None:
    early = CheckpointState.load_checkpoint(folder / "checkpoint")
    value = np.full((4, 8), 0.25, np.float32)
    early.parameters["w1"] = value
    first = Module(folder / "training_model.onnx", early, folder / "eval_model.onnx")
    late, second = load(folder)
    unchanged = second.eval()(*batch())[0]
    late.parameters["w1"].data = value
    assert second(*batch())[0] != unchanged
    np.testing.assert_array_equal(first.eval()(*batch())[0], second(*batch())[0])
    np.testing.assert_array_equal(first.train()(*batch())[0], second.train()(*batch())[0])


def test_fortran_ordered_values_are_set_right(state: CheckpointState) -> None:
    value = np.asfortranarray(np.arange(32, dtype=np.float32).reshape(4, 8))
    state.parameters["w1"].data = value
    np.testing.assert_array_equal(state.parameters["w1"].data, value)


def test_training_shows_in_the_parameters_and_frozen_ones_stay(folder: Path) -> None:
    state, module, optimizer = start(folder)
    before = snapshot(state)
    module(*batch())
    optimizer.step()
    changed = {name for name, data in snapshot(state).items() if data != before[name]}
    assert changed == {"w1", "b1", "w2"}


def test_what_does_not_fit_is_refused(state: CheckpointState) -> None:
    before = snapshot(state)
    with pytest.raises(OnwardError, match=r"Parameter data shape mismatch. Expected: \{8\}, Got: \{9\}"):
        state.parameters["b1"].data = np.zeros(9, np.float32)
    with pytest.raises(OnwardError, match=r"shape mismatch. Expected: \{4,8\}, Got: \{8,4\}"):
        state.parameters["w1"] = np.zeros((8, 4), np.float32)
    with pytest.raises(OnwardError, match=r"Parameter data type mismatch. Expected: float32, Got: float64"):
        state.parameters["b1"] = np.zeros(8)
    for use in (lambda: state.parameters["nope"], lambda: state.parameters.__setitem__("nope", np.zeros(1))):
        with pytest.raises(KeyError, match=r"Parameter nope not found\."):
            use()
    assert snapshot(state) == before


@pytest.mark.parametrize("given", [None, "checkpoint", {}, 3])
def test_a_state_is_made_by_loading(given: Any) -> None:
    with pytest.raises(TypeError, match="Invalid argument for CheckpointState received"):
        CheckpointState(given)
    with pytest.raises(TypeError, match="Invalid argument for CheckpointState received"):
        CheckpointState.save_checkpoint(given, "nowhere")


# ---- properties ----------------------------------------------------------------------------------


def test_properties_keep_int_float_and_str_through_a_file(state: CheckpointState, tmp_path: Path) -> None:
    given = {"epoch": 3, "accuracy": 0.5, "note": "größer", "done": True, "big": 2**62, "np": np.float32(2)}
    for name, value in given.items():
        state.properties[name] = value
    state.properties["gone"] = 1
    del state.properties["gone"]
    CheckpointState.save_checkpoint(state, tmp_path / "later")
    for found in (state.properties, CheckpointState.load_checkpoint(tmp_path / "later").properties):
        assert dict(found) == {**given, "done": 1} and len(found) == 6
        assert {name: type(value) for name, value in found} == {
            "epoch": int, "accuracy": float, "note": str, "done": int, "big": int, "np": float,
        }  # fmt: skip
        assert "epoch" in found and "gone" not in found


@pytest.mark.parametrize("value", [[1, 2], None, np.zeros(2), b"x", {"a": 1}])
def test_other_properties_are_type_errors(state: CheckpointState, value: Any) -> None:
    with pytest.raises(TypeError, match="'p'"):
        state.properties["p"] = value
    assert "p" not in state.properties


def test_a_missing_property_is_a_key_error(state: CheckpointState) -> None:
    with pytest.raises(KeyError, match=r"Property nope not found\."):
        state.properties["nope"]
    with pytest.raises(KeyError, match=r"Property nope not found\."):
        del state.properties["nope"]


# ---- contiguous buffers --------------------------------------------------------------------------


def test_sizes_count_numbers(folder: Path) -> None:
    _, module = load(folder)
    assert module.get_parameters_size() == module.get_parameters_size(True) == 64
    assert module.get_parameters_size(trainable_only=False) == 67


@pytest.mark.parametrize("trainable_only", [True, False])
def test_the_contiguous_buffer_is_in_the_order_of_the_training_model(
    folder: Path, trainable_only: bool
) -> None:
    state, module = load(folder)
    buffer = module.get_contiguous_parameters(trainable_only)
    names = [name for name in CLASSIFIER if not trainable_only or name != "b2"]
    expected = np.concatenate([state.parameters[name].data.ravel() for name in names])
    assert isinstance(buffer, ort.OrtValue) and buffer.numpy().dtype == np.float32
    np.testing.assert_array_equal(buffer.numpy(), expected)


@pytest.mark.parametrize("wrap", [np.asarray, ort.OrtValue.ortvalue_from_numpy], ids=["numpy", "OrtValue"])
def test_a_buffer_goes_from_one_client_to_another(folder: Path, wrap: Any) -> None:
    state, module, optimizer = start(folder)
    module(*batch())
    optimizer.step()
    buffer = module.get_contiguous_parameters(trainable_only=True)
    kept = buffer.numpy().copy()
    other_state, other = load(folder)
    other.copy_buffer_to_parameters(wrap(buffer.numpy()))
    assert snapshot(other_state) == snapshot(state)
    np.testing.assert_array_equal(other.eval()(*batch())[1], module.eval()(*batch())[1])
    module.train()(*batch())
    optimizer.step()
    np.testing.assert_array_equal(buffer.numpy(), kept)  # a copy, not a view


def test_a_buffer_that_does_not_fit_is_refused(folder: Path) -> None:
    state, module = load(folder)
    before = snapshot(state)
    with pytest.raises(OnwardError, match=r"Parameters buffer size incorrect. Expected:64, Actual:3"):
        module.copy_buffer_to_parameters(ort.OrtValue.ortvalue_from_numpy(np.zeros(3, np.float32)))
    with pytest.raises(OnwardError, match=r"Parameters buffer size incorrect. Expected:67, Actual:64"):
        module.copy_buffer_to_parameters(np.zeros(64, np.float32), trainable_only=False)
    with pytest.raises(OnwardError, match="must be float32, got float64"):
        module.copy_buffer_to_parameters(np.zeros(64))
    assert snapshot(state) == before


# ---- nominal states ------------------------------------------------------------------------------


def test_a_nominal_state_has_names_only(folder: Path, tmp_path: Path) -> None:
    state, module, optimizer = start(folder, "nominal_checkpoint")
    assert state.is_nominal and len(state.parameters) == 4 and "w1" in state.parameters
    assert module.get_parameters_size() == 64 and module.get_parameters_size(False) == 67
    load_first = {
        "get a parameter": (lambda: state.parameters["w1"], "Please load the parameter states first"),
        "read one by iterating": (lambda: dict(state.parameters)["w1"].data, "Please load the parameter states first"),
        "set a parameter": (
            lambda: state.parameters.__setitem__("w1", np.zeros((4, 8), np.float32)),
            "Please load all the parameter states first",
        ),
        "contiguous": (module.get_contiguous_parameters, "Please load the model parameters first."),
        "train": (lambda: module.train()(*batch()), "Please load the model parameters first."),
        "eval": (lambda: module.eval()(*batch()), "Please load the model parameters first."),
        "optimizer": (optimizer.step, "Please load the model parameters first."),
        "export": (lambda: module.export_model_for_inferencing(tmp_path / "m.onnx", ["scores"]),
                   "Please load the model parameters first."),
        "copy of the trainable": (
            lambda: module.copy_buffer_to_parameters(np.zeros(64, np.float32), trainable_only=True),
            "For nominal checkpoint state, all parameters need to be loaded",
        ),
        "copy of a wrong size": (
            lambda: module.copy_buffer_to_parameters(np.zeros(3, np.float32), trainable_only=False),
            "Expected:67, Actual:3",
        ),
    }  # fmt: skip
    for use, message in load_first.values():
        with pytest.raises(OnwardError, match=message):
            use()
    CheckpointState.save_checkpoint(state, tmp_path / "nominal", include_optimizer_state=True)
    assert CheckpointState.load_checkpoint(tmp_path / "nominal").is_nominal
    assert list(tmp_path.iterdir()) == [tmp_path / "nominal"]


def test_a_nominal_state_trains_once_its_parameters_are_there(folder: Path, tmp_path: Path) -> None:
    full_state, full, full_optimizer = start(folder)
    state, module, optimizer = start(folder, "nominal_checkpoint")
    module.copy_buffer_to_parameters(full.get_contiguous_parameters(), trainable_only=False)
    assert not state.is_nominal
    for seed in range(3):
        np.testing.assert_array_equal(module(*batch(seed))[0], full(*batch(seed))[0])
        optimizer.step(), full_optimizer.step()
    assert snapshot(state) == snapshot(full_state)
    for name, one in (("a", state), ("b", full_state)):
        CheckpointState.save_checkpoint(one, tmp_path / name, include_optimizer_state=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- saving --------------------------------------------------------------------------------------


def test_optimizer_state_is_saved_only_when_asked_for(folder: Path, tmp_path: Path) -> None:
    state, module, optimizer = start(folder)
    module(*batch())
    optimizer.set_learning_rate(0.03)
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "without")
    CheckpointState.save_checkpoint(state, tmp_path / "with", include_optimizer_state=True)
    assert not CheckpointState.load_checkpoint(tmp_path / "without")._data.optimizer
    (group,) = CheckpointState.load_checkpoint(tmp_path / "with")._data.optimizer
    assert group.step == 1 and set(group.slots["w1"]) == {"momentum0", "momentum1"}
    _, _, resumed = start(folder, tmp_path / "with")
    assert resumed.get_learning_rate() == 0.03
    _, _, fresh = start(folder, tmp_path / "without")
    assert fresh.get_learning_rate() == 1e-3


def test_saving_without_a_module_keeps_the_optimizer_state(folder: Path, tmp_path: Path) -> None:
    state, module, optimizer = start(folder)
    module(*batch())
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "a", include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(tmp_path / "a")
    CheckpointState.save_checkpoint(again, tmp_path / "b", include_optimizer_state=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    Module(folder / "training_model.onnx", again, session_options=one_thread())  # a module, but no optimizer
    CheckpointState.save_checkpoint(again, tmp_path / "c", include_optimizer_state=True)
    resumed = CheckpointState.load_checkpoint(tmp_path / "c")._data
    assert resumed.optimizer[0].step == 1 and resumed.extras["learning_rate"] == 1e-3


def test_state_of_another_optimizer_is_warned_of(folder: Path, tmp_path: Path) -> None:
    state, module, optimizer = start(folder)
    module(*batch())
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "adam", include_optimizer_state=True)
    from onward.artifacts import OptimType

    other = write_classifier(tmp_path / "sgd", requires_grad=["w1", "b1", "w2"], frozen_params=["b2"],
                             optimizer=OptimType.SGD)  # fmt: skip
    _, sgd = load(other, tmp_path / "adam")
    with pytest.warns(UserWarning, match="saved with another optimizer"):
        Optimizer(other / "optimizer_model.onnx", sgd)
