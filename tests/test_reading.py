"""JSON of files is read within limits: who parses it otherwise is listed here, with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import onward

SOURCE = Path(onward.__file__).parent
ALLOWED = {
    "reading.py": "the reader with limits",
    "checkpoint/interchange.py": "a header of bounded length, with its own checks",
    "info/metadata.py": "behind require_shallow, and what it has just written",
    "web/site.py": "files of packages that are installed",
    "pipeline/finetune.py": "metadata that it has just made",
    "cli/run_folder.py": "settings that it writes",
    "files.py": "a record of its own, of a bounded size, with a digest",
    "cli/worker.py": "an argument of the process that started it",
    "cli/training_run.py": "a report in a folder that it has just made",
    "distributed/secret_store.py": "messages of a bounded size, each with the code of who knows the secret",
    "distributed/agreement.py": "what another rank of the same job sends",
}


def test_json_is_parsed_in_few_places() -> None:
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"\bjson\.loads?\b", path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED.keys(), "read JSON with onward.reading.read_json or parse_json"
