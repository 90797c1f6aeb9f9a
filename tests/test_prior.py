"""What is known before anything runs reaches the result, and the error where nothing fits."""

from __future__ import annotations

import re

import pytest

from autobatch.attempt import attempt
from autobatch.config import PlanOptions
from autobatch.errors import DoesNotFitError
from autobatch.prior import pictures, remedies_of
from autobatch.stages import Environment, run_plan_command
from autobatch.units import KiB, MiB
from tests.footprint.test_recorder import bench
from tests.footprint.workloads import WORKLOADS, Tokens, Transformer, make, token_loss


def deep():
    return make(lambda: Transformer(depth=4), data=Tokens(), loss=token_loss)


def test_a_plan_shows_where_the_memory_goes(tmp_path):
    options = PlanOptions(target_batch=64, memory_budget=2 * MiB, device="cpu")
    environment = Environment(environ={"AUTOBATCH_HOME": str(tmp_path)})
    found = run_plan_command(deep(), options, environment)
    assert found.title == deep().name
    ran = {one.micro_batch: one.peak_allocated_bytes for one in found.probe.attempts if one.fits}
    predicted = {point.micro_batch: point.peak_reserved_bytes for point in found.predicted}
    answer = found.probe.micro_batch
    assert predicted[answer] == ran[answer]
    assert predicted[answer + 1] > 2 * MiB
    totals = [sum(sizes) for sizes in zip(*found.memory_curve.categories.values(), strict=True)]
    assert max(totals) == ran[answer]
    # What is confirmed needs no prediction, and pays for none.
    again = run_plan_command(deep(), options, environment)
    assert again.probe.source != "search"
    assert (again.predicted, again.memory_curve) == ([], None)
    assert pictures(None, None, 1) == ([], None)


def test_nothing_fits_says_what_would(tmp_path):
    options = PlanOptions(target_batch=64, memory_budget=200 * KiB, device="cpu")
    with pytest.raises(DoesNotFitError) as caught:
        run_plan_command(deep(), options, Environment(environ={"AUTOBATCH_HOME": str(tmp_path)}))
    text = str(caught.value)
    for words in ("asked for", "free", "in the ", "parameters", "larger --memory-budget"):
        assert words in text
    for size in re.findall(r"a micro-batch of ([\d,]+) is predicted to fit", text):
        assert int(size.replace(",", "")) >= 1


def test_remedies_come_from_the_bench_as_it_is():
    one = bench(deep(), budget=MiB)
    largest = max(size for size in range(1, 12) if attempt(one, size).attempt.fits)
    for remedy in remedies_of(one, None):
        assert remedy.micro_batch >= largest
    assert remedies_of(bench(WORKLOADS["perceptron"](), budget=10 * MiB), None) == []
