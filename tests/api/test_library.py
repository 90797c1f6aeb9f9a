"""The library calls: keywords become options, and results carry what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import autobatch
from autobatch.api import library
from autobatch.core.errors import InputError
from autobatch.core.options import COMMANDS
from autobatch.core.records import Plan, Probe
from autobatch.report.result import Estimates, PlanResult, ProbeResult, Result
from tests.support.options import all_changed, as_options, required
from tests.support.probes import mlp, work
from tests.support.sample_run import a_device, a_probe, a_run


class Call(NamedTuple):
    """The arguments of a stage."""

    workload: Any
    options: Any
    context: Any


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Collect the calls of the stages, which return a sample run."""
    found: list[Call] = []

    def stage(*given: Any) -> Result:
        found.append(Call(*given))
        return Result(device=a_device(), probe=a_probe(), plan=a_run().plan)

    monkeypatch.setattr(library, "run", stage)
    monkeypatch.setattr(library, "run_estimate", stage)
    return found


def as_text(value: Any) -> Any:
    return value if isinstance(value, bool | list) else str(value)


@pytest.mark.parametrize("convert", [lambda value: value, as_text], ids=["plain", "text"])
@pytest.mark.parametrize(("command", "length"), [*((name, "steps") for name in COMMANDS), ("fit", "epochs")])
def test_each_keyword_reaches_its_option(command: str, length: str, convert: Any, calls: list[Call]) -> None:
    keywords = all_changed(command, length=length)
    getattr(autobatch, command)("train.py:workload", **{k: convert(v) for k, v in keywords.items()})
    (call,) = calls
    assert call.workload == "train.py:workload"
    values = call.options.by_name()
    assert call.options.command == command
    assert {name: value for name, value in values.items() if name in keywords} == keywords


@pytest.mark.parametrize("command", COMMANDS)
def test_a_call_without_a_workload_or_keywords_is_the_demo_with_defaults(
    command: str, calls: list[Call]
) -> None:
    getattr(autobatch, command)(**required(command))
    assert calls[0].workload is None
    keeps = {"own_loop": True} if command == "plan" else {}
    assert calls[0].options == as_options(command, **required(command), **keeps)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_keyword_is_an_input_error_before_anything_runs(command: str, calls: list[Call]) -> None:
    with pytest.raises(InputError, match="max_microbatch"):
        getattr(autobatch, command)(max_microbatch=3, **required(command))
    assert not calls


@pytest.mark.parametrize("command", ["probe", "plan", "tune", "fit"])
def test_a_library_call_tries_the_workload_in_this_process_without_output(
    command: str, calls: list[Call], capfd: pytest.CaptureFixture[str]
) -> None:
    getattr(autobatch, command)(work(), **required(command))
    assert not calls[0].context.isolated
    calls[0].context.progress.note("a note")
    assert capfd.readouterr() == ("", "")


def test_a_probe_and_a_plan_have_the_fields_of_their_records_and_the_device() -> None:
    options: dict[str, Any] = {"device": "cpu", "memory_budget": "80KiB"}
    found = autobatch.probe(work(), **options)
    assert isinstance(found, ProbeResult)
    assert isinstance(found.probe, Probe)
    assert found.device.budget_bytes == 80 * 1024
    assert found.micro_batch == max(one.micro_batch for one in found.attempts if one.fits)
    plan = autobatch.plan(work(), target_batch=100, **options)
    assert isinstance(plan, PlanResult)
    assert isinstance(plan.plan, Plan)
    assert (sum(plan.micro_batches), plan.device) == (100, found.device)
    # A loop by hand keeps its micro-batch.
    assert max(plan.micro_batches) <= plan.probe.micro_batch <= found.micro_batch
    freed = autobatch.plan(work(), target_batch=100, own_loop=False, **options)
    assert freed.probe.micro_batch == found.micro_batch


def test_an_estimate_has_one_prediction_for_each_profile(own_home: Path) -> None:
    found = autobatch.estimate(work(lambda: mlp(8)), profile=["t4", "l4"], max_micro_batch=2)
    assert isinstance(found, Estimates)
    assert [one.profile for one in found.estimates] == ["t4", "l4"]
    assert not own_home.exists()
