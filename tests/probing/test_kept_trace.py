"""The traced step of a saved limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autobatch.core.progress import Progress
from autobatch.footprint.predict import footprint
from autobatch.probing import kept_trace, questions
from autobatch.probing.kept_trace import SUFFIX, find_trace, keep_trace
from tests.support.probes import limit_of
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
