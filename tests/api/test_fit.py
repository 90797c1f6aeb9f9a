"""The end of a run: the words that resume it, and a report that cannot be drawn."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from autobatch.api.fit import _resume_hint, _write
from autobatch.core.progress import Progress
from autobatch.report.result import Result, load_run
from tests.support.sample_run import a_device, a_run


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("name", ["$(touch hacked)", "a b", "`id`", "it's", "; id", "--resume", "plain"])
def test_the_words_that_resume_a_run_mean_the_same_in_a_shell(name: str) -> None:
    given = ["autobatch", "fit", f"{name}.py:w", "--target-batch", "8"]
    out = Path("runs", name, "20261121")
    wanted = [*given, "--out", str(out), "--resume"]
    assert shlex.split(_resume_hint(shlex.join(given), out)) == wanted
    assert shlex.split(_resume_hint(shlex.join([*given, "--resume"]), out)) == wanted
    for folder in (["--out", "x y"], ["--out=x y"]):
        hint = _resume_hint(shlex.join([*given, *folder]), Path("x y"))
        assert shlex.split(hint) == [*given, *folder, "--resume"]


def test_a_call_of_the_library_is_resumed_by_a_call() -> None:
    assert _resume_hint("", Path("a'b")) == 'autobatch.fit(…, out="a\'b", resume=True)'


def test_a_report_that_fails_in_any_way_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OverflowError("cannot convert float infinity to integer")

    monkeypatch.setattr("autobatch.report.page.render", fails)
    run, notes = a_run(), Notes()
    result = Result(**{name: getattr(run, name) for name in ("device", "probe", "plan", "training")})
    written = _write(result, tmp_path, notes)
    assert written.report is None
    assert notes.lines == [
        "the report could not be written: OverflowError: cannot convert float infinity to integer"
    ]
    assert load_run(tmp_path).device == a_device()
    assert msgspec.json.decode((tmp_path / "result.json").read_bytes())["report"] is None
