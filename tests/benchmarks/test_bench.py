"""The benchmark measures, keeps what was not run again, and makes its page of what is stored alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnx.parser
import pytest

ROOT = Path(__file__).parents[2]
ABOUT = {
    "processor": "a processor",
    "cores": 2,
    "system": "Linux",
    "threads": 2,
    "python": "3.11",
    "versions": {"onnxruntime": "1.31"},
}


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the benchmark, which are scripts beside the package; forgotten afterwards."""
    before = set(sys.modules)
    for folder in ("benchmarks/step", "benchmarks"):
        monkeypatch.syspath_prepend(ROOT / folder)
    import bench
    import products
    from suite import figures, interleave, page, profile, results, settings

    yield SimpleNamespace(
        bench=bench,
        products=products,
        figures=figures,
        interleave=interleave,
        page=page,
        profile=profile,
        results=results,
        settings=settings,
    )
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("bench", "products", "suite"):
            del sys.modules[name]


def track(*rounds: float) -> dict[str, Any]:
    return {"wall": {"step": list(rounds)}, "processor": {"step": list(rounds)}, "peak_mb": 100.0}


def stored(**engines: dict[str, Any]) -> dict[str, Any]:
    return {"steps": {"about": ABOUT, "cases": {"mlp": engines}}}


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        # a busy second round hits both engines, and leaves the ratio as it is
        ([1.0, 5.0, 1.0], [2.0, 10.0, 2.0], "**0.50**"),
        ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], "**2.00** (1.50–2.50)"),
        ([3.0], [2.0], "**1.50**"),
    ],
)
def test_a_ratio_is_the_median_of_rounds(code: SimpleNamespace, ours, theirs, shown) -> None:
    assert str(code.figures.ratio_of_rounds(ours, theirs)) == shown


def test_no_rounds_have_no_ratio(code: SimpleNamespace) -> None:
    assert code.figures.ratio_of_rounds([1.0], []) is None


def test_a_case_that_is_run_again_replaces_only_itself(code: SimpleNamespace) -> None:
    before = {
        "steps": {"about": ABOUT, "cases": {"mlp": 1, "lstm": 2}},
        "start": {"about": ABOUT, "cases": {}},
    }
    after = code.results.merge(before, "steps", cases={"mlp": 3}, about=ABOUT)
    assert after["steps"]["cases"] == {"mlp": 3, "lstm": 2}
    assert after["start"] == before["start"]


def test_results_come_back_as_they_were_saved(code: SimpleNamespace, tmp_path: Path) -> None:
    results = stored(onward=track(1.5, 2.25), torch=track(3.0))
    code.results.save(tmp_path / "results.json", results)
    assert code.results.load(tmp_path / "results.json") == results


def test_the_page_has_times_ratios_and_problems(code: SimpleNamespace) -> None:
    results = stored(
        onward=track(1.0, 1.0), torch=track(2.0, 2.0), **{"ort-training": {"problem": "no such"}}
    )
    page = code.page.page(results, code.bench.SECTIONS)
    assert "| mlp | 1.00 | 2.00<br>**0.50** |" in page
    assert "- ort-training could not run mlp: `no such`" in page
    assert "## Cold start" not in page


def test_the_picture_has_a_bar_for_each_peer(code: SimpleNamespace) -> None:
    results = stored(onward=track(1.0), torch=track(2.0), **{"torch-fused": track(0.8)})
    root = ElementTree.fromstring(code.page.picture(results))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(map(str, titles)) == ["torch-fused: 1.25", "torch: 0.50"]


@pytest.mark.parametrize(
    ("line", "sections", "models"),
    [
        (["mlp", "lstm"], ["steps"], ["mlp", "lstm"]),
        (["start", "mlp"], ["start"], ["mlp"]),
        (["checkpoint", "memory"], ["checkpoint", "memory"], []),
    ],
)
def test_names_are_sections_or_models(code: SimpleNamespace, line, sections, models) -> None:
    arguments = code.bench.arguments_of(line)
    assert (arguments.sections, arguments.models) == (sections, models)


def test_an_unknown_name_is_refused(code: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        code.bench.arguments_of(["mpl"])
    assert "no section or model is called mpl" in capsys.readouterr().err


def test_products_are_those_of_the_forward_pass_and_two_gradients_each(
    code: SimpleNamespace, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]> net (float[2, 3, 4] x, float[2, 4, 3] z) => (float[6, 7] y)
        <int64[2] flat = {6, 5}> {
            [first] a = MatMul (x, w)
            [second] b = MatMul (z, a)
            [last] c = MatMul (x, b)
            d = Reshape (c, flat)
            [gemm] y = Gemm <transB = 1> (d, v) }""")
    for name, shape in (("w", (4, 5)), ("v", (7, 5))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(model, tmp_path / "forward.onnx")
    np.savez(tmp_path / "inputs.npz", x=np.ones((2, 3, 4), np.float32), z=np.ones((2, 4, 3), np.float32))
    found = code.products.products_of(tmp_path)
    forward = {(p.batch, p.rows, p.inner, p.columns): n for p, n in found.items() if p.form == "forward"}
    assert forward == {(1, 6, 4, 5): 1, (2, 4, 3, 5): 1, (2, 3, 4, 5): 1, (1, 6, 5, 7): 1}
    assert sum(found.values()) == 3 * 4
    for product in found:
        first, second = (np.zeros(shape) for shape in product.shapes)
        first = np.swapaxes(first, -1, -2) if product.form == "right" else first
        second = np.swapaxes(second, -1, -2) if product.form == "left" else second
        assert (first @ second).shape == product.result
    code.products.run_products(tmp_path, 1)()


def test_a_profile_counts_what_loops_run_once(code: SimpleNamespace) -> None:
    def event(name: str, operator: str, ts: int, dur: int) -> dict[str, Any]:
        return {
            "cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": {"op_name": operator},
        }  # fmt: skip

    events = []
    for start in (0, 10_000):
        events += [event("loop", "Scan", start, 5_000)]
        events += [event("inner", "Mul", start + 100 + 1_000 * i, 500) for i in range(4)]
        events += [
            event("after", "Mul", start + 6_000, 1_000),
            {"cat": "Session", "name": "run", "ts": start},
        ]
    assert code.profile.by_operator(events, 2) == {"Scan": [3.0, 1], "Mul": [3.0, 5]}


def test_steps_are_measured_and_written(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench.py", "mlp", "--engines", "onward", "--rounds", "2"]
    places = ["--cache", str(tmp_path / "cache"), "--docs", str(tmp_path), "--threads", "1"]
    subprocess.run([*command, *places, "--write"], cwd=ROOT, check=True, capture_output=True)
    measured = json.loads((tmp_path / "benchmarks.json").read_text(encoding="utf-8"))["steps"]["cases"]["mlp"]
    assert {phase: len(rounds) for phase, rounds in measured["onward"]["wall"].items()} == {
        "step": 2, "gradients": 1, "optimizer": 1, "eval": 1,
    }  # fmt: skip
    assert min(rounds[0] for rounds in measured["onward"]["wall"].values()) > 0
    assert "| mlp |" in (tmp_path / "benchmarks.md").read_text(encoding="utf-8")


def test_an_engine_that_fails_says_why_and_is_left_out(code: SimpleNamespace, tmp_path: Path) -> None:
    settings = code.settings.Settings(threads=1)
    found = code.interleave.compare(
        tmp_path, engines=["onward"], phases=["step"], rounds=1, settings=settings
    )
    assert found["onward"].wall == {}
    assert "No such file or directory" in found["onward"].problem


@pytest.mark.skipif(
    not (ROOT / "docs" / "benchmarks.json").exists(), reason="the benchmark has stored no results yet"
)
def test_the_page_in_the_docs_is_what_the_stored_results_make(code: SimpleNamespace) -> None:
    docs = ROOT / "docs"
    results = code.results.load(docs / code.page.RESULTS)
    assert (docs / "benchmarks.md").read_text(encoding="utf-8") == code.page.page(
        results, code.bench.SECTIONS
    )
    assert (docs / code.page.PICTURE).read_text(encoding="utf-8") == code.page.picture(results)
