"""The probe: caps, errors, cached limits, and the memory of other processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autobatch
from autobatch import DoesNotFitError
from autobatch.api.pipeline import run_command
from autobatch.api.run import Run
from autobatch.core.options import Options
from autobatch.rehearsal.rehearsal import attempt
from autobatch.rehearsal.setup import open_setup
from tests.support.options import as_options
from tests.support.probes import WIDTH, Listener, probed, vectors, work
from tests.support.training import mean_loss

# Caps, and sizes that do not fit.


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def test_a_model_with_batch_statistics_is_never_probed_with_one_sample() -> None:
    probe = Options(device="cpu", memory_budget="1GiB")
    least = attempt(open_setup(work(normalised), probe), 2).attempt.peak_allocated_bytes
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
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


def test_a_check_of_one_size_runs_only_that_size() -> None:
    result, listener = probed(work(), micro_batch=5)
    assert (result.probe.micro_batch, listener.sizes, result.profile) == (5, [5], None)
    assert result.probe.source == "asked"
    with pytest.raises(DoesNotFitError, match=r"micro-batch of 500 does not fit in the budget of 80"):
        probed(work(), micro_batch=500)


# Refusals that the budget did not cause.


def refused_above(most: int, asked: str, times: int = 1000):
    """Return a loss that fails so often as on a GPU whose memory others hold."""
    left = [times]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if len(batch[1]) > most and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked}. GPU 0 …")
        return mean_loss(model, batch)

    return loss


def test_a_refusal_below_the_budget_is_said_and_its_limit_is_not_saved() -> None:
    result, listener = probed(work(loss=refused_above(9, "20.00 MiB")), memory_budget="900MiB")
    assert (result.probe.micro_batch, result.profile) == (9, None)
    assert any("not the budget, refused a micro-batch of 10" in note for note in listener.notes)
    refused = [one for one in result.probe.attempts if one.micro_batch == 10]
    assert all(one.is_below_budget for one in refused)
    # The same text at the budget is the budget's.
    result, listener = probed(work(loss=refused_above(9, "2.00 GiB")), memory_budget="900MiB")
    assert result.profile is not None
    assert not any("refused" in note for note in listener.notes)


def test_a_transient_refusal_changes_nothing() -> None:
    loss = refused_above(9, "2.00 MiB", times=1)
    found, listener = probed(work(loss=loss), memory_budget="64MiB", max_micro_batch=20)
    assert (found.probe.micro_batch, found.probe.upper_bound_by) == (20, "cap")
    assert listener.notes == []
