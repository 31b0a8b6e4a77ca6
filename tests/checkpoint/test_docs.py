"""The examples in docs/checkpoint.md run, in order, as one program."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint.md"


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile("\n".join(examples), str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "checkpoint-000000000300 []\n"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint-000000000200",
        "checkpoint-000000000300",
    ]
