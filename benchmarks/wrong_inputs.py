"""Seeded random wrong inputs for the command line: words, files, variables, profiles and workloads.

Each case runs in this process through ``autobatch.cli.main.run``, in a folder of its own. Nothing is trained.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from autobatch.api import stages
from autobatch.cli import main as cli
from autobatch.core.options import COMMANDS, PLANS, Field, fields_of
from benchmarks.report import Findings
from benchmarks.wrong_files import PROFILES, RUNS, TABLES, WORKLOADS

LONGEST_LINE = 2100
"""Characters of a message, with the name of the program."""
NUMBERS = (
    *("x", "nan", "-inf", "-1", "0x10", "1_0_", "--1", "½", "true", "null", "[]", "{}", "1,5", "$(id)", "%s"),
    *("{0}", "", " ", "1 2", "\x1b[31m", "\udcff", "9" * 5000, "1e400", "x" * 100_000),
)
"""Texts that are no number, or none that an option takes."""
WHOLE = ("1.5", "9e99", "9" * 40)
"""Numbers that only an option with a fraction takes."""
TEXTS = ("nul\0", "\udcff", "\ud800x")
BUDGETS = ("0", "-1", "6XiB", "120%", "0%", "nan", "1e9", "%", "GiB", "6 6", "", "9" * 40, "\x1b", "1TiBB")
DEVICES = ("tpu", "cuda:x", "cuda:-1", "sim:", "sim:no-such-gpu", "CPU ", "cpu:0", "", "\x1b[2J")
OTHER_WORDS = (
    ["pla"], ["\x1b[31m"], ["x" * 100_000], ["--conquer"], ["profiles", "shwo"], ["profiles", "show"],
    ["profiles", "show", "no-such"], ["profiles", "show", "\x1b"], ["profiles", "show", "nul\0"],
    ["profiles", "show", "../x.toml"], ["profiles", "save", "no gpu"], ["profiles", "--x"],
    ["profiles", "show", "x" * 5000], ["report"], ["report", "gone"], ["report", "nul\0"],
    ["report", "x" * 5000], ["report", "a", "b"], ["doctor", "now"], ["doctor", "--what\x1b"], ["plan"],
    ["plan", "--target-batch"], ["fit", "a:b", "c:d", "--target-batch=8"], ["fit", "--target-batch=8", "-x"],
    ["fit", "--target-batch", "8", "--steps", "1", "--epochs", "1"], ["probe", "--target-batch", "8"],
    ["fit", "--target-batch", "8", "--json=yes"], ["fit", "--target-batch", "8", "--resume"],
    ["fit", "--target-batch=8", "--resume", "--out", "x" * 300], ["tune", "--target-batch=8", "--", "a", "b"],
    ["fit", "--target-batch", "8", "--out", "/dev/null/x"], ["fit", "--target-batch", "8", "--knobs", "x,y"],
    ["fit", "--target-batch", "8", "--storage", "nosuch://x"], ["estimate", "--profile", "no-such", "nul\0"],
)  # fmt: skip
REFERENCES = (
    "", ":", "a:", ":b", "gone.py:w", "gone:w", "os:path", "a b:c", "nul\0:w", "nul\0.py:w", "\x1b.py:\x1b",
    "x" * 5000 + ".py:w", "..:w", "os.path:nothing", "\udcff:w", "1:2:3", ".py:w", "json:loads", "math:pi",
)  # fmt: skip


@dataclass(frozen=True)
class WrongInput:
    """One call of the command that must be refused."""

    kind: str
    words: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


def _command(dice: random.Random) -> tuple[str, list[str]]:
    name = dice.choice(COMMANDS)
    return name, [name, *(["--target-batch", "8"] if name in PLANS else [])]


def _wrong_value(field: Field, dice: random.Random) -> str:
    """Return a text that is no value of an option."""
    known = {"memory_budget": BUDGETS, "device": DEVICES, "knobs": ("x", ",", "\x1b", "precision;compile")}
    if field.name in known:
        return dice.choice(known[field.name])
    if field.choices or field.is_switch:
        return dice.choice(["", "maybe", "\x1b[31m", "x" * 100_000, "None", "nul\0", "\udcff", "fp8"])
    if field.is_list or field.expected.startswith("text"):
        return dice.choice(TEXTS)
    numbers = NUMBERS if field.expected.startswith("a number") else (*NUMBERS, *WHOLE)
    return dice.choice(numbers)


def _option(dice: random.Random) -> tuple[list[str], str, str]:
    """Return the words of a command, and an option that it takes with a wrong value."""
    name, words = _command(dice)
    one = dice.choice(list(fields_of(name).values()))
    value = _wrong_value(one, dice)
    return words, one.name, value


def wrong_option(dice: random.Random) -> WrongInput:
    """Return an option with a wrong value, an unknown option, or odd words."""
    if dice.random() < 0.3:
        return WrongInput("option", list(dice.choice(OTHER_WORDS)))
    words, name, value = _option(dice)
    spelled = f"--{name.replace('_', '-')}"
    if dice.random() < 0.15:
        place = dice.randrange(2, len(spelled))
        spelled = spelled[:place] + dice.choice(["x", "\x1b", "ü", "", "--"]) + "q" + spelled[place:]
    return WrongInput("option", [*words, f"{spelled}={value}"])


def wrong_variable(dice: random.Random) -> WrongInput:
    """Return a variable with an unknown name, or with a wrong value."""
    words, name, value = _option(dice)
    value = value.replace("\0", "\udcff").replace("\ud800", "\udcff") or "\x1b"
    if dice.random() < 0.2:
        name += dice.choice(["s", "\x1b[31m", "-", "x" * 5000])
    elif name == "target_batch":
        words = words[:1]
    return WrongInput("variable", words, environ={f"AUTOBATCH_{name.upper()}": value})


def wrong_table(dice: random.Random) -> WrongInput:
    """Return a config file that is no TOML, or that has wrong keys or values."""
    text = dice.choice(TABLES)
    if dice.random() < 0.3:
        content = bytes(dice.randrange(256) for _ in range(dice.randrange(1, 60))) + b"\n= \xff"
    else:
        content = text.encode()
    if dice.random() < 0.3:
        return WrongInput("table", ["fit"], files={"pyproject.toml": b"[tool.autobatch]\n" + content})
    return WrongInput("table", ["fit"], files={"autobatch.toml": content})


def wrong_profile(dice: random.Random) -> WrongInput:
    """Return a hardware profile that is none, under each way to name it."""
    ways = ("profiles show p.toml", "estimate --profile p.toml", "probe --device sim:p.toml")
    return WrongInput("profile", dice.choice(ways).split(), files={"p.toml": dice.choice(PROFILES)})


def wrong_run(dice: random.Random) -> WrongInput:
    """Return a folder that is no run."""
    return WrongInput("run", ["report", "run"], files={"run/result.json": dice.choice(RUNS)})


def wrong_workload(dice: random.Random) -> WrongInput:
    """Return a reference to no workload, or a workload that is wrong."""
    name = dice.choice(["probe", "plan", "fit", "tune"])
    words = [name, *(["--target-batch", "8"] if name != "probe" else [])]
    if dice.random() < 0.3:
        return WrongInput("workload", [*words, dice.choice(REFERENCES)])
    stem = f"w{dice.randrange(10**12)}"
    text = dice.choice(WORKLOADS)
    return WrongInput("workload", [*words, f"{stem}.py:w"], files={f"{stem}.py": text.encode()})


MAKERS = (wrong_option, wrong_variable, wrong_table, wrong_profile, wrong_run, wrong_workload)


def wrong_inputs(number: int, seed: int) -> Iterator[WrongInput]:
    """Yield so many wrong inputs, the kinds in turn."""
    dice = random.Random(seed)
    for index in range(number):
        yield MAKERS[index % len(MAKERS)](dice)


def ask(asked: WrongInput, folder: Path) -> tuple[int, str]:
    """Run the command in a folder; return its exit code, and what is wrong with its one line, if anything."""
    for name, content in asked.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AUTOBATCH_")}
    own = {"AUTOBATCH_HOME": str(folder / "home"), "XDG_CONFIG_HOME": str(folder / "config")}
    out, err = io.StringIO(), io.StringIO()

    def in_this_process(*given: object, **_: object) -> object:
        return open_process(*given, isolated=False)  # type: ignore[arg-type]

    open_process = stages.open_process
    with (
        mock.patch.dict(os.environ, inherited | own | asked.environ, clear=True),
        mock.patch.object(stages, "open_process", in_this_process),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = cli.run(list(asked.words))
    faults = ", ".join(_faults(code, out.getvalue(), err.getvalue()))
    shown = (asked.words, asked.environ, {name: text[-300:] for name, text in asked.files.items()})
    return code, f"{faults}: {str(shown)[:900]} {err.getvalue()[:900]!r}" if faults else ""


def _faults(code: int, out: str, err: str) -> Iterator[str]:
    if code not in (2, 3):
        yield f"exit code {code}"
    if err.count("\n") != 1 or not err.startswith("autobatch: "):
        yield f"{err.count(chr(10))} lines on stderr"
    if not err.rstrip("\n").isprintable():
        yield "control characters on stderr"
    if len(err) > LONGEST_LINE:
        yield f"{len(err)} characters on stderr"
    if "Traceback" in out + err or "bug in autobatch" in err:
        yield "a traceback, or a bug told"


def ask_all(root: Path, number: int, seed: int) -> Findings:
    """Ask so many wrong inputs, each in an empty folder."""
    findings = Findings()
    for index, asked in enumerate(wrong_inputs(number, seed)):
        (root / str(index)).mkdir()
        code, fault = ask(asked, root / str(index))
        findings.add(asked.kind, f"exit {code}", fault)
    return findings
