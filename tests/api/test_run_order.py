"""A run of joined samples: the plan in its order, the run, and a resume that goes beyond it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autobatch.api.context import RunContext
from autobatch.api.pipeline import prepare
from autobatch.api.pipeline import run as run_command
from autobatch.core.check_options import options_from
from autobatch.core.options import Options
from autobatch.report.facts import describe_run_order
from autobatch.search.sizes import real_batches
from autobatch.training.build import order_changes
from tests.api.test_split import Noting
from tests.support.ragged import joined_workload


@pytest.fixture(autouse=True)
def _without_traces(monkeypatch) -> None:
    monkeypatch.setattr(real_batches, "trace_setup", lambda *_: None)


def context_of(folder: Path) -> RunContext:
    return RunContext(environ={"AUTOBATCH_HOME": str(folder / "home")}, progress=Noting())


def options_of(folder: Path, **values: Any) -> Options:
    asked = {"target_batch": 32, "device": "cpu", "memory_budget": "2MiB", "steps": 3, "trials": 0}
    return options_from("fit", {**asked, "split": "count", "out": str(folder / "run"), **values})


def fit(folder: Path, **values: Any):
    context = context_of(folder)
    return run_command(joined_workload(), options_of(folder, **values), context), context.progress.notes


def test_a_run_takes_what_fits_in_its_order(tmp_path: Path) -> None:
    context, options = context_of(tmp_path), options_of(tmp_path)
    with ExitStack() as held:
        ready = prepare(joined_workload(), options, context, held)
    plan, run = ready.result.plan, ready.run
    assert plan.run_order.micro_batch_in_any_order == ready.result.probe.micro_batch < plan.micro_batch
    assert (sum(plan.micro_batches), max(plan.micro_batches)) == (32, plan.micro_batch)
    assert (plan.run_order.batches, plan.run_order.by) == (3, "run")
    assert describe_run_order(plan) in context.progress.notes
    assert order_changes(run.setup, plan, run.sampler) == []
    longer = replace(run.sampler, steps=4)
    assert order_changes(run.setup, plan, longer) == ["number of optimizer steps"]
    run.setup.worst_case.take_sizes(run.setup.worst_case.sizes() + 1)
    assert order_changes(run.setup, plan, run.sampler) == ["sizes of the samples"]


@pytest.mark.slow
def test_a_longer_resume_is_planned_again(tmp_path: Path) -> None:
    found, notes = fit(tmp_path, checkpoint_every=3)
    plan = found.plan
    assert plan.run_order.micro_batch_in_any_order < plan.micro_batch
    assert sum(plan.micro_batches) == 32
    assert max(plan.micro_batches) == plan.micro_batch
    assert (plan.run_order.batches, plan.run_order.by) == (3, "run")
    assert any("fits in the order of this run" in line for line in notes)
    assert "fits in the order of this run" in (tmp_path / "run" / "report.html").read_text()

    _, notes = fit(tmp_path, resume=True)
    assert any("bit for bit" in line for line in notes)
    again, notes = fit(tmp_path, resume=True, steps=5)
    assert any("another number of optimizer steps" in line for line in notes)
    assert again.plan.run_order is None or again.plan.run_order.batches == 5
