"""The loop that a fit trains, as its options and its plan ask for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from autobatch import InputError
from autobatch.core.knobs import LOADER_WORKERS, PREFETCH
from autobatch.core.units import MiB
from autobatch.device.select import open_device
from autobatch.planning import make_plan
from autobatch.training.build import build_sampler, feed_options, open_loop, stream_workers
from autobatch.training.loop import Loop
from autobatch.workload.contract import Loading
from autobatch.workload.loader import AHEAD
from tests.support.options import as_options
from tests.support.training import (
    Rows,
    apart,
    make_setup,
    make_workload,
    mean_loss,
    reference,
    weights,
)


def opened(
    workload=None, *, seeded_before: bool | None = None, **options: Any
) -> tuple[Loop, list[str], torch.Tensor]:
    """Open a loop and train it; return it with its notes and the trained weights."""
    workload = workload or make_workload()
    asked = as_options("fit", **{"target_batch": 7, "steps": 3, **options})
    plan = make_plan(target_batch=7, micro_batch_limit=3, learning_rate=workload.learning_rate)
    setup = make_setup(workload)
    notes: list[str] = []
    sampler = build_sampler(len(workload.train_data), asked)
    with open_loop(setup, plan, asked, sampler, seeded_before=seeded_before, note=notes.append) as loop:
        assert loop.batches_seen == loop.steps_applied == 0
        assert loop.train_state.model is setup.model
        list(loop.run())
    return loop, notes, weights(setup.model)


def test_a_run_without_a_batch_is_refused_with_both_numbers() -> None:
    options = as_options("fit", target_batch=25, epochs=3, last_batch="drop")
    with pytest.raises(InputError, match="24 training samples do not fill a target batch of 25"):
        build_sampler(24, options)


def test_an_opened_loop_trains_the_plan() -> None:
    workload = make_workload()
    loop, notes, trained = opened(workload)
    batches = [batch.ids for batch in loop.sampler.batches()]
    expected, _ = reference(workload, batches, mean_loss)
    assert apart(trained, expected) < 1e-12
    assert (loop.micro_batch, loop.train_state.precision, notes) == (3, "fp32", [])


def test_options_of_the_run_reach_the_loop() -> None:
    loop, _, _ = opened(warmup_samples=40, on_nonfinite="skip", ema=0.5, max_grad_norm=0.1)
    assert (loop.warmup_samples, loop.on_nonfinite) == (40, "skip")
    assert loop.train_state.max_grad_norm == 0.1
    assert loop.train_state.average.decay == 0.5


def test_every_optimizer_has_a_schedule_of_the_whole_run() -> None:
    seen: list[int] = []

    def schedule(optimizer, steps):
        seen.append(steps)
        return StepLR(optimizer, 1, gamma=0.5)

    def optimizers(params, lr):
        params = list(params)
        return torch.optim.SGD(params[:2], lr=lr), torch.optim.SGD(params[2:], lr=lr)

    loop, _, _ = opened(make_workload(optimizer=optimizers, schedule=schedule))
    assert seen == [3, 3]
    assert [schedule.last_epoch for schedule in loop.schedules] == [3, 3]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda optimizer, steps: ReduceLROnPlateau(optimizer), "ReduceLROnPlateau, which needs a metric"),
        (lambda optimizer, steps: None, r"must return a schedule of torch\.optim, found nothing"),
    ],
)
def test_a_schedule_that_is_none_is_refused(schedule, message: str) -> None:
    with pytest.raises(InputError, match=message):
        opened(make_workload(schedule=schedule))


@pytest.mark.parametrize(
    ("sample_seeds", "seeded_before", "is_seeded", "is_noted"),
    [
        (False, None, False, False),
        (True, None, True, False),
        (False, True, True, False),
        (True, True, True, False),
        (True, False, True, True),
        (False, False, False, False),
    ],
)
def test_samples_stay_seeded_after_a_resume_and_a_change_is_noted(
    sample_seeds: bool, seeded_before: bool | None, is_seeded: bool, is_noted: bool
) -> None:
    loop, notes, _ = opened(sample_seeds=sample_seeds, seeded_before=seeded_before)
    assert loop.feed.seeds_samples == is_seeded
    assert ["use --workers 0 to continue as before" in note for note in notes] == [True] * is_noted


def test_the_first_step_starts_with_an_empty_cache_as_a_probe_does() -> None:
    """Validation before training leaves segments of its own, which training would be packed into."""
    data = torch.zeros(64, 64 * 1024)
    workload = make_workload(
        model=lambda: nn.Linear(64 * 1024, 4),
        train_data=Rows(data),
        validation_data=Rows(data),
        loss=lambda model, batch: model(batch[0]).exp().mean(),
    )
    setup = replace(make_setup(workload), device=open_device("sim:t4", memory_budget="1GiB", environ={}))
    plan = make_plan(target_batch=7, micro_batch_limit=3, learning_rate=workload.learning_rate)
    asked = as_options("fit", target_batch=7, steps=1)
    sampler = build_sampler(64, asked)
    with open_loop(setup, plan, asked, sampler, seeded_before=None, note=lambda _: None) as loop:
        stats = loop.meter.stats()
    assert stats.peak_allocated_bytes > stats.allocated_bytes
    assert stats.reserved_bytes == 2 * MiB  # the segment of small blocks, which holds the model


def options_of(knobs: dict[str, Any], loading: Loading, **given: Any) -> dict[str, Any]:
    plan = msgspec.structs.replace(
        make_plan(target_batch=8, micro_batch_limit=4, learning_rate=0.1), knobs=knobs
    )
    return feed_options(plan, as_options("fit", target_batch=8, **given), loading, None, print)


@pytest.mark.parametrize(
    ("knobs", "of_loader", "given", "workers", "prefetch"),
    [
        ({}, {}, {}, 0, AHEAD),
        ({}, {"workers": 3, "prefetch": 5}, {}, 3, 5),
        ({LOADER_WORKERS: 2, PREFETCH: 4}, {"workers": 3, "prefetch": 5}, {}, 2, 4),
        ({LOADER_WORKERS: 2, PREFETCH: 4}, {}, {"workers": 0, "prefetch": 1}, 0, 1),
    ],
)
def test_the_user_comes_first_then_the_plan_then_the_loader(
    knobs: dict[str, Any], of_loader: dict[str, Any], given: dict[str, Any], workers: int, prefetch: int
) -> None:
    found = options_of(knobs, Loading(**of_loader), **given)
    assert (found["workers"], found["prefetch"]) == (workers, prefetch)
    assert found["sample_seeds"] == (workers > 0), "several workers draw as one"


def test_the_workers_of_a_stream_read_it_and_make_no_micro_batches() -> None:
    loading = Loading(workers=2)
    options = options_of({}, loading)
    of_stream = stream_workers(options, loading)
    assert (of_stream["num_workers"], of_stream["prefetch_factor"]) == (2, AHEAD)
    assert (options["workers"], options["sample_seeds"]) == (0, False)
    assert stream_workers(options, loading) == {}
