"""What is known before anything runs reaches the result, and the error where nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from autobatch.api.pipeline import RunContext, run_plan
from autobatch.core.errors import DoesNotFitError
from autobatch.core.options import PlanOptions
from autobatch.core.units import KiB, MiB
from autobatch.device import profiles as hardware
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.cpu import CpuDevice
from autobatch.probing.attempt import attempt
from autobatch.probing.cache import CachedLimit
from autobatch.probing.child import ThisProcess
from autobatch.probing.estimate import EstimateSettings, estimate_limits
from autobatch.probing.find_limit import ProbeLimits, find_limit
from autobatch.probing.limits import predicted_memory, remedies_of, traced_peak
from tests.support.probes import Listener, limit_of
from tests.support.step_workloads import WORKLOADS, Tokens, Transformer, make, setup, token_loss


def deep():
    return make(lambda: Transformer(depth=4), data=Tokens(), loss=token_loss)


def test_a_plan_shows_where_the_memory_goes(tmp_path):
    options = PlanOptions(target_batch=64, memory_budget=2 * MiB, device="cpu")
    environment = RunContext(environ={"AUTOBATCH_HOME": str(tmp_path)})
    found = run_plan(deep(), options, environment)
    assert found.title == deep().name
    ran = {one.micro_batch: one.peak_allocated_bytes for one in found.probe.attempts if one.fits}
    predicted = {point.micro_batch: point.peak_reserved_bytes for point in found.predicted}
    answer = found.probe.micro_batch
    assert predicted[answer] == ran[answer]
    assert predicted[answer + 1] > 2 * MiB
    totals = [sum(sizes) for sizes in zip(*found.memory_curve.categories.values(), strict=True)]
    assert max(totals) == ran[answer]
    # What is confirmed needs no prediction, and pays for none.
    again = run_plan(deep(), options, environment)
    assert again.probe.source != "search"
    assert (again.predicted, again.memory_curve) == ([], None)
    assert predicted_memory(None, None, 1) == ([], None)


def test_nothing_fits_says_what_would(tmp_path):
    options = PlanOptions(target_batch=64, memory_budget=200 * KiB, device="cpu")
    with pytest.raises(DoesNotFitError) as caught:
        run_plan(deep(), options, RunContext(environ={"AUTOBATCH_HOME": str(tmp_path)}))
    text = str(caught.value)
    for words in ("requested", "free", "in the ", "parameters", "larger --memory-budget"):
        assert words in text
    for size in re.findall(r"a micro-batch of ([\d,]+) is predicted to fit", text):
        assert int(size.replace(",", "")) >= 1


class Gpu(CpuDevice):
    """This machine's memory in the place of an L4's."""

    kind = "cuda"
    compute_capability = (8, 9)
    allocator_config = AllocatorConfig()
    is_traceable = False

    def describe(self):
        return msgspec.structs.replace(
            super().describe(), kind="cuda", name="NVIDIA L4", total_bytes=load_profile("l4").total_bytes
        )

    def new_allocator(self):
        return CachingAllocator(self.budget_bytes)


def load_profile(name):
    return hardware.load_profile(name, user_dir=Path("nowhere"))


def test_what_a_trace_says_of_a_gpu_is_what_an_estimate_says(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    workload, size = WORKLOADS["transformer"](), 7
    options = EstimateSettings(profiles=["l4", "a10"], micro_batch=size, precision="fp32")
    here = replace(setup(workload), device=Gpu(memory_budget=64 * MiB), max_grad_norm=None)
    predicted = estimate_limits(workload, options, home=tmp_path).estimates[0].peak_reserved_bytes
    assert traced_peak(here, size) == predicted
    assert traced_peak(setup(workload), size) is None


def test_the_answer_on_a_gpu_is_remembered_with_both_figures(tmp_path):
    here = replace(setup(WORKLOADS["perceptron"]()), device=Gpu(memory_budget=64 * MiB))
    found, path, _ = limit_of(here, tmp_path, max_micro_batch=3)
    saved = msgspec.json.decode(path.read_bytes(), type=CachedLimit)
    assert saved.traced_bytes == traced_peak(here, found.micro_batch)
    assert saved.measured_bytes == found.attempts[-1].peak_reserved_bytes


class Shared(CpuDevice):
    """Memory that others use as well."""

    others = 100 * MiB

    def describe(self):
        return msgspec.structs.replace(super().describe(), other_processes_bytes=self.others)


@pytest.mark.parametrize(("grown", "told"), [(63 * MiB, False), (64 * MiB, True)])
def test_others_that_took_more_meanwhile_are_told(grown, told, tmp_path):
    here = replace(setup(WORKLOADS["perceptron"]()), device=Shared(memory_budget=64 * MiB))
    process, notes = ThisProcess(here), Listener()
    here.device.others += grown
    found = find_limit(process, ProbeLimits(max_micro_batch=3), home=tmp_path, progress=notes).probe
    assert found.other_processes_bytes == 100 * MiB + grown
    assert any("held 100 MiB of the GPU before" in line for line in notes.notes) == told


def test_remedies_come_from_the_bench_as_it_is():
    one = setup(deep(), budget=MiB)
    largest = max(size for size in range(1, 12) if attempt(one, size).attempt.fits)
    for remedy in remedies_of(one, None):
        assert remedy.micro_batch >= largest
    assert remedies_of(setup(WORKLOADS["perceptron"](), budget=10 * MiB), None) == []
