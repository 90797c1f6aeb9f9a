"""Hooks of the documentation site: help texts, tables of the JSON, links and escapes of the repository."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
from pathlib import Path
from typing import Any

HELP = re.compile(r"<!-- help: (\w*) -->")
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:examples|benchmarks|README|CONTRIBUTING|CHANGELOG|tests)[^)]*\)"
)


RECORDS = "<!-- records -->"
KEYWORDS = re.compile(r"<!-- keywords: (\w+) -->")
FOUND_FIRST = {"options.md": 4000, "meaning.md": 1000}
"""Weight in the search, where a word of a title counts 1,000, of pages that define what the others use."""
OPTION_OF_A_ROW = re.compile(r"^\| `(--[a-z-]+) ([^`]*)`", re.MULTILINE)
CODE_OF_A_ROW = re.compile(r"`[^`\n]*\\\|[^`\n]*`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in help texts and records; unlink files of the repository; unescape the code in tables."""
    markdown = HELP.sub(lambda found: f"```text\n{help_of(found[1])}```", OUTSIDE.sub(r"\1", markdown))
    if page.file.src_path in FOUND_FIRST:
        page.meta["search"] = {"boost": FOUND_FIRST[page.file.src_path]}
    if RECORDS in markdown:
        markdown = markdown.replace(RECORDS, tables_of_records())
    markdown = KEYWORDS.sub(lambda found: table_of_keywords(found[1]), markdown)
    markdown = OPTION_OF_A_ROW.sub(r"| `\1` `\2`", markdown)
    return CODE_OF_A_ROW.sub(lambda found: found[0].replace("\\|", "|"), markdown)


def table_of_keywords(call: str) -> str:
    """Return a table of the keywords that a library call takes besides those in its signature."""
    from autobatch.core.keywords import keywords_of

    rows = ["| keyword | type | unit | default | effect |", "|---|---|---|---|---|"]
    for one in keywords_of(call):
        about = one.about.replace("|", "\\|").replace("*", "\\*")
        rows.append(f"| `{one.name}` | {one.type_words} | {one.unit} | `{one.default!r}` | {about} |")
    return "\n".join(rows)


def tables_of_records() -> str:
    """Return a table for each record of the JSON: every key with its type and what it means."""
    source = Path(__file__).parents[2] / "autobatch/core/records.py"
    parts, short = [], {"Count": "int", "Positive": "int"}
    for record in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(record, ast.Assign) and (value := ast.unparse(record.value)).startswith("Literal"):
            short[ast.unparse(record.targets[0])] = value
        if not isinstance(record, ast.ClassDef) or record.name == "Record":
            continue
        rows = ["| key | type | meaning |", "|---|---|---|"]
        for field, after in zip(record.body, [*record.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                meaning = inspect.cleandoc(after.value.value) if is_text else ""
                kind = re.sub(r"\w+", lambda name: short.get(name[0], name[0]), ast.unparse(field.annotation))
                rows.append(f"| `{ast.unparse(field.target)}` | `{kind}` | {' '.join(meaning.split())} |")
        doc = inspect.cleandoc(ast.get_docstring(record) or "")
        parts += [f"## {record.name}", doc, "\n".join(rows)]
    return re.sub(r"\bNone\b", "null", "\n\n".join(parts).replace("``", "`"))


def help_of(command: str) -> str:
    """Return the help of a command with all its options; of autobatch itself for an empty name."""
    from autobatch.cli.main import run

    os.environ["COLUMNS"] = "80"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run([command, "--help-all"] if command else ["--help"])
    return printed.getvalue()
