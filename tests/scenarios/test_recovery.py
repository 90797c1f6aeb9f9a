"""Out of memory in training: the batch runs again in smaller micro-batches, as if nothing had happened."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobatch import DoesNotFitError, RestartSmallerError
from autobatch.device.cpu import SimulatedDevice
from autobatch.device.profiles import load_profile
from autobatch.workload.order import Split
from tests.support.faults import FAULTY_STEP, Fault, Quick, Watching, plain
from tests.support.kinds import run_of, stateful
from tests.support.training import (
    HOST,
    INFO_NCE,
    apart,
    fingerprint,
    make_loop,
    mean_loss,
    points,
    weights,
)
from tests.support.untouched import live_tensors


def train(
    workload, fault: Fault | None, *, device: Any = None, shrink_to: int | None = None, micro_batch=4, **more
):
    """Train three steps with a fault in `FAULTY_STEP`, or with another micro-batch from that step on."""
    device = device or Quick(HOST, "1GiB")
    with device.session(is_probe=False) as inner, fault or nullcontext():
        loop = make_loop(
            workload, target_batch=8, micro_batch=micro_batch, steps=3, meter=Watching(fault, inner),
            device=device, **more,
        )  # fmt: skip
        run = loop.run()
        records = [next(run) for _ in range(FAULTY_STEP)]
        if fault is not None:
            fault.watch(loop.train_state.optimizers)
            fault.armed, fault.phase = True, "data"
        loop.micro_batch = shrink_to or loop.micro_batch
        records.append(next(run))
        if fault is not None:
            fault.armed = False
        return loop, [*records, *run]


def operators(workload, *, of_step: bool = False, **options: Any) -> list[tuple[int, str]]:
    """Return the numbers and phases of the operators of a step before its optimizer, or of that alone."""
    fault = Fault()
    train(workload, fault, **options)
    sites = enumerate(fault.phases)
    return [(number, phase) for number, phase in sites if (phase in ("optimizer", "step")) == of_step]


contrastive, terms = (lambda kind=kind: run_of(kind)[0] for kind in ("whole batch", "several terms"))
EVERY = pytest.mark.slow
"""Every operator of the longer steps; the default run takes some of them."""


@pytest.mark.parametrize(
    ("make", "gpu", "precision", "each"),
    [
        (plain, None, "fp32", 11),
        (contrastive, None, "fp32", 31),
        (terms, None, "fp32", 43),
        (terms, None, "fp16", 43),
        # Every storage goes through the simulated allocator, where the failed attempt must leave nothing.
        (plain, "rtx-4090", "fp32", 13),
        (stateful, "rtx-4090", "fp32", 29),
        *(pytest.param(make, None, "fp32", 1, marks=EVERY) for make in (plain, contrastive, terms)),
    ],
)
def test_out_of_memory_at_any_operator_is_as_if_planned_smaller(
    make, gpu: str | None, precision: str, each: int, monkeypatch
) -> None:
    options: dict[str, Any] = {"precision": precision}
    if gpu is not None:
        # Memory is freed at once here, and a collection takes longer than all the rest.
        monkeypatch.setattr(gc, "collect", lambda *_: 0)
        options["device"] = SimulatedDevice(load_profile(gpu), memory_budget="1GiB")
    undisturbed = weights(train(make(), None, **options)[0].train_state.model)
    smaller, planned = train(make(), None, shrink_to=2, **options)
    expected = fingerprint(smaller.train_state.model)
    struck = operators(make(), precision=precision)
    assert len(struck) > 60
    for index, phase in struck[::each]:
        loop, records = train(make(), Fault(index), **options)
        assert fingerprint(loop.train_state.model) == expected, f"operator {index} ({phase})"
        assert make is not plain or apart(weights(loop.train_state.model), undisturbed) <= 1e-12
        assert ["Tried to allocate" in (record.recovered or "") for record in records] == [False, True, False]
        assert [record.micro_batch for record in records] == [4, 2, 2]
        assert [record.oom_recoveries for record in records] == [0, 1, 1]
        assert (loop.steps_applied, loop.batches_seen) == (smaller.steps_applied, 3)
        assert records[-1].peak_reserved_bytes == planned[-1].peak_reserved_bytes
        assert loop.train_state.scaler.state_dict() == smaller.train_state.scaler.state_dict()


def test_there_is_no_recovery_inside_the_optimizer_step() -> None:
    struck = operators(plain(), of_step=True)
    assert len(struck) > 5
    for index, _ in struck[::3]:
        with pytest.raises(RestartSmallerError, match="inside the optimizer step") as caught:
            train(plain(), Fault(index))
        assert caught.value.exit_code == 77
    with pytest.raises(DoesNotFitError, match="inside the optimizer step"):  # a restart would be no smaller
        train(plain(), Fault(operators(plain(), of_step=True, micro_batch=1)[0][0]), micro_batch=1)


@pytest.mark.parametrize(("fits", "ran"), [(7, [54, 27, 14, 7]), (1, [54, 27, 14, 7, 4, 2, 1])])
def test_a_batch_goes_on_at_whatever_fits(fits: int, ran: list[int]) -> None:
    """Three errors in a row once ended the run, though far smaller micro-batches would have run."""
    tried: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        tried.append(len(batch[0]))
        if len(batch[0]) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return mean_loss(model, batch)

    data = points(54)
    loop = make_loop(plain(loss=loss, train_data=data), target_batch=54, micro_batch=54, steps=2)
    first, second = loop.run()
    assert list(dict.fromkeys(tried))[: len(ran)] == ran
    assert (first.oom_recoveries, second.oom_recoveries) == (len(ran) - 1, len(ran) - 1)
    assert second.micro_batch <= fits
    whole = make_loop(plain(train_data=data), target_batch=54, micro_batch=54, steps=2)
    list(whole.run())
    assert apart(weights(loop.train_state.model), weights(whole.train_state.model)) <= 1e-12


@pytest.mark.parametrize(
    ("loss", "split", "message"),
    [
        (mean_loss, Split(), "micro-batch of 1"),
        (mean_loss, Split(multiple=8), "micro-batch of 8"),
        (INFO_NCE, Split(), "smaller --target-batch"),
    ],
)
def test_where_nothing_smaller_can_run_the_run_ends(loss: Any, split: Split, message: str) -> None:
    loop = make_loop(plain(loss=loss), target_batch=8, micro_batch=8, steps=1, split=split)
    with Fault(*range(40, 10_000)) as fault:
        fault.armed = True
        with pytest.raises(DoesNotFitError, match=message):
            next(loop.run())


def test_a_suspected_memory_error_is_tried_smaller_once_and_then_raised_unchanged() -> None:
    suspect = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    _, records = train(plain(), Fault(10, error=suspect))
    assert [record.micro_batch for record in records] == [4, 2, 2]
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
        train(plain(), Fault(10, 30, error=suspect))


def test_forty_recoveries_leak_no_tensor() -> None:
    quick = Quick(HOST, "1GiB")
    loop = make_loop(stateful(), target_batch=8, micro_batch=4, steps=44, meter=Watching(None), device=quick)
    run = loop.run()

    with Fault(25) as fault:
        for number in range(42):
            fault.armed, fault.count = True, 0
            fault.phases.clear()
            loop.micro_batch = 4
            next(run)
            fault.armed = False
            if number == 1:
                before = live_tensors()
            assert all(p.grad is None for p in loop.train_state.model.parameters())
    assert live_tensors() == before
    assert loop.oom_recoveries == 42
