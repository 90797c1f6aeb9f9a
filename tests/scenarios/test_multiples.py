"""Workloads that insist on a multiple of samples, from the probe to the trained steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import autobatch
from autobatch import InputError
from tests.support.probes import probed, work
from tests.support.training import mean_loss

SEEN: list[int] = []
BUDGET: dict[str, Any] = {"device": "cpu", "memory_budget": "80KiB"}


def in_multiples_of(multiple: int):
    """Return a loss that asserts a multiple of samples, as timm's mixup does, and notes their number."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        count = len(batch[1])
        assert count % multiple == 0, "the batch must be even"
        SEEN.append(count)
        return mean_loss(model, batch)

    return loss


@pytest.fixture(scope="module", name="largest")
def probed_once() -> int:
    """Return what fits without the assertion."""
    return autobatch.probe(work(), **BUDGET).micro_batch


def test_a_multiple_that_is_given_is_kept(largest: int) -> None:
    multiple = 4
    asked = {**BUDGET, "micro_batch_multiple": multiple}
    found = autobatch.probe(work(loss=in_multiples_of(multiple)), **asked)
    assert (found.micro_batch, found.multiple) == (largest // multiple * multiple, multiple)
    assert found.upper_bound_by in ("run", "replay")
    assert f"; {found.micro_batch + multiple} " in str(found), "the next size is the next multiple"
    again = autobatch.probe(work(loss=in_multiples_of(multiple)), **asked)
    assert (again.micro_batch, again.multiple, len(again.attempts)) == (found.micro_batch, multiple, 1)


def test_an_error_at_odd_sizes_names_the_option() -> None:
    """``max_micro_batch`` is odd, so that an odd size runs."""
    result, listener = probed(work(loss=in_multiples_of(2)), memory_budget="1MiB", max_micro_batch=77)
    assert result.probe.micro_batch == 76
    assert (result.probe.upper_bound_by, result.probe.oom_count) == ("error", 0)
    assert any("77" in note and "--micro-batch-multiple 2" in note for note in listener.notes)


def test_a_plan_has_multiples_only_and_trains(largest: int, tmp_path: Path) -> None:
    target = 2 * largest + 8
    options = {**BUDGET, "target_batch": target, "micro_batch_multiple": 2}
    plan = autobatch.plan(work(loss=in_multiples_of(2)), **options)
    assert sum(plan.micro_batches) == target
    assert all(size % 2 == 0 and size <= largest for size in plan.micro_batches)
    SEEN.clear()
    result = autobatch.fit(work(loss=in_multiples_of(2)), **options, steps=3, trials=0, out=tmp_path)
    assert result.training.optimizer_steps == 3
    assert SEEN
    assert all(size % 2 == 0 for size in SEEN)


def test_a_size_or_target_that_is_no_multiple_is_refused_before_anything_has_run() -> None:
    SEEN.clear()
    asked = {"device": "cpu", "micro_batch_multiple": 4}
    with pytest.raises(InputError, match=r"25 is no multiple of 4.*use 28"):
        autobatch.plan(work(loss=in_multiples_of(4)), target_batch=25, **asked)
    with pytest.raises(InputError, match=r"multiple of 4.*at most 3"):
        autobatch.probe(work(loss=in_multiples_of(4)), max_micro_batch=3, **asked)
    assert not SEEN
