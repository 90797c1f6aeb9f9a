"""The traced step of a saved limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from autobatch.core.options import Options
from autobatch.core.progress import Progress
from autobatch.device.allocator.trace import Trace
from autobatch.footprint.predict import footprint
from autobatch.search import kept_trace, questions
from autobatch.search.kept_trace import SUFFIX, Untraced, find_trace, keep_trace, order_of
from autobatch.setup import trace as traced_setup
from autobatch.setup.setup import open_setup
from tests.support.probes import WIDTH, Listener, limit_of, work
from tests.support.step_workloads import WORKLOADS, setting, setup


@pytest.fixture(scope="module")
def step():
    return footprint(setting(setup(WORKLOADS["perceptron"]())), tested=True)


def test_a_trace_is_read_as_it_was_kept(tmp_path: Path, step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "limit.json"
    ran = step.program.at(40)
    assert find_trace(file, 40, ran) is None
    keep_trace(step, file)
    assert find_trace(file, 40, ran) == step
    # What ran differs, was not recorded, or another version traced.
    assert find_trace(file, 41, ran) is None
    assert find_trace(file, 40, None) is None
    monkeypatch.setattr(kept_trace, "__version__", "0.0.0")
    assert find_trace(file, 40, ran) is None


def test_a_damaged_file_is_traced_anew(tmp_path: Path, step: Any) -> None:
    file = tmp_path / "limit.json"
    file.with_suffix(SUFFIX).write_bytes(b"no trace")
    assert find_trace(file, 40, step.program.at(40)) is None


def test_a_confirmed_limit_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = limit_of(setup(WORKLOADS["perceptron"]()), tmp_path, Progress())

    def no_trace(_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(questions, "trace", no_trace)
    again = limit_of(setup(WORKLOADS["perceptron"]()), tmp_path, Progress())
    assert again.probe.source.startswith("saved")
    assert again.footprint == first.footprint is not None


def test_the_reason_of_a_step_that_is_too_long_holds_for_its_order(tmp_path: Path, step: Any) -> None:
    file = tmp_path / "limit.json"
    ran = step.program.at(40)
    keep_trace(Untraced("too long", order_of(ran)), file)
    assert find_trace(file, 40, ran) == find_trace(file, 41, step.program.at(41)) == "too long"
    assert find_trace(file, 40, Trace(ran.events[:-3])) is None


class Changed(nn.Module):
    """A model whose code changes while its parameters do not."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 4)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).tanh() if self.extra else self.body(x)


def test_that_a_step_is_too_long_is_kept_until_its_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced_setup, "MOST_OPERATORS", 10)
    asked, trace = [], questions.trace
    monkeypatch.setattr(questions, "trace", lambda process: asked.append(1) or trace(process))

    def probe(*, extra: bool) -> tuple[str, int, list[str]]:
        made = open_setup(
            work(lambda: Changed(extra)), Options().with_values(device="cpu", memory_budget="20KiB")
        )
        listener = Listener()
        asked.clear()
        found = limit_of(made, tmp_path, listener).probe
        notes = [note for note in listener.notes if "not traced" in note]
        return found.source.partition(" ")[0], len(asked), notes

    note = "the step was not traced, so runs alone tell what fits: the step has more than 10 operators"
    assert probe(extra=False) == ("search", 1, [note])
    assert probe(extra=False) == ("saved", 0, [note])
    _, count, notes = probe(extra=True)
    assert count
    assert set(notes) == {note}
    assert probe(extra=True) == ("saved", 0, [note])
