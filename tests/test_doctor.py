"""`onward.doctor`: what is missing is found, with the command that gets it; nothing else is called wrong."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import onnxruntime
import pytest

from onward import doctor
from onward.doctor import Finding, State, diagnose


def findings(title: str) -> dict[str, Finding]:
    section = next(section for section in diagnose() if section.title == title)
    return {finding.name: finding for finding in section.findings}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that packages have other versions, or that they are not there (None)."""

    def pretend(**versions: str | None) -> None:
        real = metadata.version

        def version(name: str) -> str:
            found = versions.get(name.replace("-", "_"), "as it is")
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return real(name) if found == "as it is" else found

        monkeypatch.setattr("onward.doctor.metadata.version", version)

    return pretend


def test_nothing_is_wrong_where_the_tests_run() -> None:
    assert [f for section in diagnose() for f in section.findings if f.state is State.WRONG] == []


def test_versions_are_those_installed() -> None:
    found = findings("versions")
    assert found["onnxruntime"].value == onnxruntime.__version__
    assert {"python", "onward", "onnx", "numpy"} <= set(found)


@pytest.mark.parametrize(("version", "words"), [(None, "not installed"), ("1.2.3", "1.2.3: Onward needs")])
def test_a_package_that_is_missing_or_old_is_wrong(installed: Any, version: str | None, words: str) -> None:
    installed(onnx=version)
    found = findings("versions")["onnx"]
    assert (found.state, words in found.value) == (State.WRONG, True)
    assert found.fix.startswith("pip install 'onnx>=")


def test_two_runtimes_in_one_folder_are_wrong(installed: Any) -> None:
    installed(onnxruntime_gpu="1.23.0")
    found = findings("versions")["onnxruntime"]
    assert found.state is State.WRONG and "onnxruntime and onnxruntime-gpu" in found.value
    expected = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'onnxruntime-gpu[cuda,cudnn]'"
    assert found.fix == expected == findings("providers")["cuda"].fix


def test_another_distribution_of_the_runtime_is_enough(installed: Any) -> None:
    installed(onnxruntime=None, onnxruntime_gpu="1.23.0")
    found = findings("versions")
    assert "onnxruntime" not in found and found["onnxruntime-gpu"].value == "1.23.0"


def test_providers_say_why_they_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    found = findings("providers")
    assert found["cpu"] == Finding("cpu", "CPUExecutionProvider")
    assert (
        found["cuda"].state is State.ABSENT and "built without CUDAExecutionProvider" in found["cuda"].value
    )
    assert found["cuda"].fix.endswith("pip install 'onnxruntime-gpu[cuda,cudnn]'")
    assert (found["dml"].value, found["dml"].fix) == ("not on Linux", "")


def test_a_provider_that_is_listed_but_does_not_start_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("libcudnn.so.9: cannot open shared object file\nand more")

    listed = ["OpenVINOExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", refuses)
        assert "libcudnn.so.9" in doctor._does_not_start("OpenVINOExecutionProvider")  # type: ignore[operator]
    if "OpenVINOExecutionProvider" not in onnxruntime.capi._pybind_state.get_available_providers():
        assert findings("providers")["openvino"].state is State.WRONG


def test_an_extra_that_is_not_whole_names_what_installs_it(installed: Any) -> None:
    installed(pyarrow=None)
    found = findings("optional packages")
    assert found["data"].state is State.ABSENT and found["data"].fix == "pip install 'onward[data]'"
    assert "pyarrow not installed" in found["data"].value
    assert found["text"].state is State.OK
    assert not {"dev", "docs", "all"} & set(found)


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken() -> doctor.Section:
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "CHECKS", (_broken,))
    assert findings("broken")["broken"] == Finding("broken", "OSError: no such thing", State.WRONG)


def test_something_wrong_is_exit_code_1(installed: Any) -> None:
    from typer.testing import CliRunner

    from onward.cli.app import app

    installed(onnx="1.2.3")
    told = CliRunner().invoke(app, ["doctor"])
    assert (
        told.exit_code == 1 and "1 wrong: onnx" in told.stdout and "onnx: pip install 'onnx>=" in told.stdout
    )
