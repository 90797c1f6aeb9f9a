"""Generated parts of the reference: ``python docs/_hooks/reference.py`` writes them into docs/reference.md.

Each stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. They are read from
the declarations of the options and from the source of the docstrings, without torch.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from autobatch import _MODULES, __all__
from autobatch.cli.main import HELP
from autobatch.core.options import TAKEN_BY, all_fields

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference.md"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
ENTRY = re.compile(r"^(\**\w+): ", re.MULTILINE)
LISTS = ("Args:", "Returns:", "Yields:", "Raises:", "Attributes:")
LONGEST_LINE = 92
"""Of docs/ruff.toml."""


def page_of(text: str) -> str:
    """Return the page with its generated parts made anew."""
    makers = {"commands": commands, "options": options, "python": python, "json": records}
    return PART.sub(lambda part: f"{part[1]}{makers[part[2]]().strip()}\n{part[3]}", text)


def commands() -> str:
    """Return the help of the command line."""
    return f"```text\n{HELP}\n```"


def options() -> str:
    """Return a table of the options for each part of the help."""
    parts = []
    for group, commands in TAKEN_BY.items():
        fields = [field for field in all_fields().values() if field.group == group]
        parts.append(f"### {group.capitalize()}\n")
        parts.append(f"{', '.join(f'`{name}`' for name in commands)}, unless a row names others.\n")
        parts.append("| option | default | effect |\n|---|---|---|")
        for field in fields:
            name = f"--{field.name.replace('_', '-')}"
            placeholder = ("" if field.choices else field.placeholder).replace("|", "\\|")
            written = f"`{name} {placeholder}`" if placeholder else f"`{name}`"
            default = "" if field.default in (None, [], False) else f"`{field.default}`"
            others = "" if field.commands == commands else f" ({', '.join(field.commands)})"
            parts.append(f"| {written} | {default} | {field.text.replace('|', chr(92) + '|')}{others} |")
        parts.append("")
    return "\n".join(parts)


def python() -> str:
    """Return signature and docstring of every public name, by module."""
    parts = []
    for module, names in _MODULES.items():
        if module == "core.records":
            continue  # in the tables of the JSON
        tree = ast.parse((ROOT / f"autobatch/{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        bodies = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        parts += [described(bodies[name]) for name in names if name in __all__]
    return "\n".join(parts)


def described(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return the reference of a class or of a function."""
    if isinstance(node, ast.FunctionDef):
        signature = f"```python\n{wrapped(node)}\n```"
        return f"### `autobatch.{node.name}`\n\n{signature}\n\n{markdown(ast.get_docstring(node))}\n"
    parts = [f"### `autobatch.{node.name}`\n", markdown(ast.get_docstring(node)), ""]
    rows = fields_of(node)
    if rows:
        parts += ["| field | type | meaning |", "|---|---|---|", *rows, ""]
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            doc = " ".join((ast.get_docstring(method) or "").partition("\n\n")[0].split())
            arguments = ast.unparse(method.args).removeprefix("self").removeprefix(", ")
            is_property = any("property" in ast.unparse(decorator) for decorator in method.decorator_list)
            called = "" if is_property else f"({arguments.removeprefix('cls, ')})"
            parts.append(f"- `{node.name}.{method.name}{called}`: {plain(doc)}")
    return "\n".join([*parts, ""])


def fields_of(node: ast.ClassDef) -> list[str]:
    """Return a row for each field of a class, with the text below it."""
    rows = []
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith("_"):
            continue
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = inspect.cleandoc(str(after.value.value)) if is_text else ""  # type: ignore[union-attr]
        kind = ast.unparse(field.annotation).replace("|", "\\|")
        value = f" = {ast.unparse(field.value)}" if field.value and len(ast.unparse(field.value)) < 20 else ""
        rows.append(f"| `{ast.unparse(field.target)}{value}` | `{kind}` | {plain(' '.join(text.split()))} |")
    return rows


def markdown(doc: str | None) -> str:
    """Return a docstring as Markdown: sections become lists."""
    parts = []
    for block in (doc or "").split("\n\n"):
        title, _, rest = block.partition("\n")
        if title not in LISTS:
            parts.append(plain(block))
            continue
        lines = inspect.cleandoc(rest)
        entries = re.split(r"\n(?=\S)", lines)
        found = [" ".join(entry.split()) for entry in entries]
        items = [ENTRY.sub(lambda name: f"`{name[1]}`: ", entry, count=1) for entry in found]
        parts.append(f"**{title[:-1]}**\n\n" + "\n".join(f"- {plain(item)}" for item in items))
    return "\n\n".join(parts)


def plain(text: str) -> str:
    """Return text with Markdown's marks of code, and none that a table would take for its own."""
    return text.replace("``", "`").replace("|", "\\|")


def wrapped(node: ast.FunctionDef) -> str:
    """Return the signature of a function as ruff formats it, with a line for each argument if it is long."""
    arguments, after_star = node.args.args, node.args.kwonlyargs
    defaults = [None] * (len(arguments) - len(node.args.defaults)) + node.args.defaults
    parts = [written(*one) for one in zip(arguments, defaults, strict=True)]
    parts += ["*"] if after_star else []
    parts += [written(*one) for one in zip(after_star, node.args.kw_defaults, strict=True)]
    parts += [f"**{written(node.args.kwarg, None)}"] if node.args.kwarg else []
    returned = ast.unparse(node.returns) if node.returns else "None"
    short = f"def {node.name}({', '.join(parts)}) -> {returned}: ..."
    if len(short) <= LONGEST_LINE:
        return short
    lines = "".join(f"    {part},\n" for part in parts)
    return f"def {node.name}(\n{lines}) -> {returned}: ..."


def written(argument: ast.arg, default: ast.expr | None) -> str:
    """Return an argument with its type and its default."""
    value = "" if default is None else f" = {ast.unparse(default)}".replace("'", '"')
    return f"{ast.unparse(argument)}{value}"


def records() -> str:
    """Return a table for each record of the JSON: every key with its type and what it means."""
    parts, short = [], {"Count": "int", "Positive": "int"}
    own: dict[str, list[str]] = {}
    for record in ast.parse((ROOT / "autobatch/core/records.py").read_text(encoding="utf-8")).body:
        if isinstance(record, ast.Assign) and (value := ast.unparse(record.value)).startswith("Literal"):
            short[ast.unparse(record.targets[0])] = value
        if isinstance(record, ast.ClassDef) and record.name != "Record":
            own[record.name] = [*fields_of(record), *own.get(ast.unparse(record.bases[0]), [])]
            if record.name == "OfRanks":  # in the tables of those that inherit it
                continue
            rows = "\n".join(["| key | type | meaning |", "|---|---|---|", *own[record.name]])
            rows = re.sub(r"(?<=\| `)\w+(?=` \|)", lambda name: short.get(name[0], name[0]), rows)
            parts += [
                f"### {record.name}",
                plain(inspect.cleandoc(ast.get_docstring(record) or "")),
                rows,
            ]
    return re.sub(r"\bNone\b", "null", "\n\n".join(parts))


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
