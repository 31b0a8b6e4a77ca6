"""For the site: pages from elsewhere in the repository, links to what is not on the site, lists of messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))  # mkdocs loads a hook from its file alone

import list_messages  # noqa: E402

OUTSIDE = {
    "src/onward/checkpoint/SPEC.md": "checkpoint-format.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links to where the pages are on the site."""
    markdown = list_messages.fill(markdown)
    for source, name in OUTSIDE.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    if page.file.src_uri in OUTSIDE.values():  # written for the repository's root
        markdown = (
            markdown.replace("](docs/", "](")
            .replace("](CHANGELOG.md)", "](changes.md)")
            .replace("[Apache-2.0](LICENSE)", "Apache-2.0")
        )
    return markdown
