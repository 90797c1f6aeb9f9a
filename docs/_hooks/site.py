"""Hooks of the documentation site: the README begins it, and files of the repository are not linked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

README = Path(__file__).parents[2] / "README.md"
OUTSIDE = re.compile(
    r"(?<!!)\[([^\]]+)\]\((?:\.\./)*(?:examples|benchmarks|README|CONTRIBUTING|CHANGELOG|NOTICE|tests)[^)]*\)"
)
CODE_OF_A_ROW = re.compile(r"`[^`\n]*\\\|[^`\n]*`")


def on_files(files: Any, *, config: Any) -> Any:
    """Begin the site with the README."""
    text = README.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Unlink files of the repository, and unescape the code in tables."""
    unlinked = OUTSIDE.sub(r"\1", markdown)
    return CODE_OF_A_ROW.sub(lambda code: code[0].replace("\\|", "|"), unlinked)
