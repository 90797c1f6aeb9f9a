"""The probe: caps, errors, cached limits, and the memory of other processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import autobatch
from autobatch import DoesNotFitError, Probe
from autobatch.api.pipeline import run_command
from autobatch.api.run import Run
from autobatch.core.options import Options
from autobatch.core.records import RealBatches
from autobatch.core.units import GiB, KiB
from autobatch.device.cpu import CpuDevice
from autobatch.device.host import HostMemory
from autobatch.rehearsal.attempt import attempt
from autobatch.rehearsal.process import ThisProcess
from autobatch.rehearsal.setup import Setup, open_setup
from autobatch.search.find_limit import limit_of_plan
from benchmarks.workloads import WORKLOADS as TEST_WORKLOADS
from tests.support.options import as_options
from tests.support.probes import (
    WIDTH,
    Listener,
    classify,
    limit_of,
    mlp,
    probed,
    vectors,
    work,
)
from tests.support.step_workloads import WORKLOADS, setup

# Caps, and sizes that do not fit.


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def test_a_model_with_batch_statistics_is_never_probed_with_one_sample() -> None:
    """The error names the reason if two samples do not fit."""
    probe = Options().with_values(device="cpu", memory_budget="1GiB")
    least = attempt(open_setup(work(normalised), probe), 2).attempt.peak_allocated_bytes
    with pytest.raises(DoesNotFitError, match=r"micro-batch of 2 does not fit.*1 cannot run.*Expected more"):
        autobatch.probe(work(normalised), device="cpu", memory_budget=str(least - 1))
    found = autobatch.probe(work(normalised), device="cpu", memory_budget=str(least))
    assert found.micro_batch >= 2
    assert 1 not in [one.micro_batch for one in found.attempts]


@pytest.mark.parametrize(
    ("samples", "options", "answer"),
    [
        (5, {}, (5, "dataset")),
        (1, {}, (1, "dataset")),
        (9, {"max_micro_batch": 1}, (1, "max_micro_batch")),
        (9, {"max_micro_batch": 7, "target_batch": 8}, (7, "max_micro_batch")),
        (9, {"max_micro_batch": 10, "target_batch": 3}, (3, "target_batch")),
    ],
)
def test_the_smallest_cap_is_reached_and_not_exceeded(samples: int, options: dict, answer: tuple) -> None:
    command = "plan" if "target_batch" in options else "probe"
    asked = as_options(command, device="cpu", memory_budget="1GiB", **options)
    listener = Listener()
    probe = run_command(
        Run(workload=work(train_data=vectors(samples)), options=asked, progress=listener)
    ).probe
    assert (probe.micro_batch, probe.limited_by) == answer
    assert probe.upper_bound_by == "cap"
    assert max(listener.sizes) == answer[0]


@pytest.mark.parametrize(
    ("device", "budget", "words"),
    [
        ("cpu", "9KiB", ("Tried to allocate", "is free", "9.00 KiB allowed")),
        ("sim:t4", "2MiB", ("Tried to allocate", "is free", "2.00 MiB allowed")),
    ],
)
def test_the_error_names_phase_bytes_and_budget_if_nothing_fits(device: str, budget: str, words) -> None:
    workload = work(mlp if device == "cpu" else lambda: mlp(6000))
    phases = r"micro-batch of 1 does not fit.*\(in the (setup|forward|backward|optimizer)\)"
    with pytest.raises(DoesNotFitError, match=phases) as caught:
        autobatch.probe(workload, device=device, memory_budget=budget)
    assert all(one in str(caught.value) for one in words)


def test_a_check_of_one_size_runs_only_that_size() -> None:
    result, listener = probed(work(), micro_batch=5)
    assert (result.probe.micro_batch, listener.sizes, result.profile) == (5, [5], None)
    assert result.probe.source == "asked"
    with pytest.raises(DoesNotFitError, match="micro-batch of 500 does not fit in 80"):
        probed(work(), micro_batch=500)


# Saved limits.


def test_a_budget_that_follows_free_memory_may_vary_by_a_few_percent(tmp_path: Path) -> None:
    def probe(kib: int, **limits: str) -> Probe:
        device = CpuDevice(memory_budget=kib * KiB, memory=HostMemory(GiB, GiB, "made up"))
        made = replace(setup(WORKLOADS["perceptron"]()), device=device)
        return limit_of(made, tmp_path, **limits).probe

    probe(1000)
    assert probe(1020).source.startswith("saved")
    assert probe(1030, memory_budget="1GiB").source == "search"
    assert probe(1100).source == "search"


# Micro-batches of a plan that do not fit although a larger one does.

BATCH = 2048


@pytest.fixture(scope="module", name="near")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, Any]:
    made = open_setup(
        TEST_WORKLOADS["mlp-heavy"](), Options().with_values(device="sim:t4", memory_budget="6MiB")
    )
    return made, limit_of(made, tmp_path_factory.mktemp("home"), target_batch=BATCH)


def test_a_batch_is_split_into_more_if_its_micro_batches_do_not_fit(near: tuple[Setup, Any]) -> None:
    made, limit = near
    fits = {size: attempt(made, size).attempt.fits for size in (697, 683, 682, 512)}
    assert fits == {697: True, 683: False, 682: True, 512: True}
    listener = Listener()
    found = limit_of_plan(ThisProcess(made), limit, BATCH, listener)
    assert 512 <= found.planned < 683
    assert listener.sizes == [683]
    assert any("683 does not fit although 697 does" in note for note in listener.notes)
    assert found.probe.micro_batch == limit.probe.micro_batch == 697
    assert found.probe.oom_count == limit.probe.oom_count + 1


def test_micro_batches_that_fit_or_are_not_known_to_fail_are_not_run(near: tuple[Setup, Any]) -> None:
    """What no replay knows is not doubted, nor what real batches have shown."""
    made, limit = near
    real = RealBatches(batches=3, micro_batch_alone=697)
    checked = limit._replace(probe=msgspec.structs.replace(limit.probe, real_batches=real))
    cases = [(limit, batch) for batch in (697, 2 * 697, 1200, 5)]
    for known, batch in [*cases, (limit._replace(programs=()), BATCH), (checked, BATCH)]:
        listener = Listener()
        assert limit_of_plan(ThisProcess(made), known, batch, listener) == known
        assert listener.sizes == []


# Refusals that the budget did not cause.


def refused_above(most: int, budget_of_gpu: str):
    """Return a loss that fails as on a GPU whose memory others hold, far below the budget."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if len(batch[1]) > most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {budget_of_gpu}. GPU 0 …")
        return classify(model, batch)

    return loss


def test_a_refusal_below_the_budget_is_said_and_its_limit_is_not_saved() -> None:
    loss = refused_above(9, "20.00 MiB")
    result, listener = probed(work(loss=loss), memory_budget="900MiB")
    assert (result.probe.micro_batch, result.profile) == (9, None)
    assert any("not the budget, refused a micro-batch of 10" in note for note in listener.notes)
    refused = [one for one in result.probe.attempts if one.micro_batch == 10]
    assert all(one.is_below_budget for one in refused)
    # The same text at the budget is the budget's.
    result, listener = probed(work(loss=refused_above(9, "2.00 GiB")), memory_budget="900MiB")
    assert result.profile is not None
    assert not any("refused" in note for note in listener.notes)


def test_a_transient_refusal_changes_nothing() -> None:
    raised: list[int] = []

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        # The trace runs without memory.
        if len(batch[1]) > 8 and not raised and type(batch[1]) is torch.Tensor:
            raised.append(len(batch[1]))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 …")
        return classify(model, batch)

    budget = "80KiB"
    known = autobatch.probe(work(), device="cpu", memory_budget=budget).micro_batch
    found, _ = probed(work(loss=loss), memory_budget="64MiB", max_micro_batch=known)
    assert raised
    assert (found.probe.micro_batch, found.probe.upper_bound_by) == (known, "cap")
