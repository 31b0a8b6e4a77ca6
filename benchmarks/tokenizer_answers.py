"""Thirty-two kinds of tokenizers: do question answering, tagging and chat answer as transformers does?

    python benchmarks/tokenizer_answers.py

Tiny random models, tokenizers trained on a few sentences. Question answering is compared with transformers' own
pipeline where transformers 4 is installed, and with its rules where version 5 is, which has no such pipeline.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "tasks")]


def main() -> None:
    """Print a line for each kind, and at the end how many answer alike."""
    import transformers
    from test_tokenizers import CHECKS

    from export.tiny_tokenizers import FURTHER, KINDS

    print(f"transformers {transformers.__version__}")
    kinds = [*KINDS, *FURTHER]
    for name, (make, check) in CHECKS.items():
        different = []
        with tempfile.TemporaryDirectory() as folder:
            exported = make(Path(folder))
            for kind in kinds:
                try:
                    check(exported, kind)
                except AssertionError as error:
                    different.append(kind)
                    print(f"{name}, {kind}: {str(error)[:300]}")
        print(f"{name}: {len(kinds) - len(different)} of {len(kinds)} kinds answer as transformers does")


if __name__ == "__main__":
    main()
