"""Opening the loop of a run: what the options and the plan say, as one `Loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from autobatch.core.errors import InputError
from autobatch.core.knobs import LOADER_WORKERS, PREFETCH
from autobatch.core.records import Plan
from autobatch.device.base import Meter
from autobatch.probing.attempt import TrainSetup
from autobatch.step.gradients import Optimizers
from autobatch.step.train_state import build_train_state
from autobatch.training.batchnorm import batch_norms
from autobatch.training.evaluation import sanity_check_validation
from autobatch.training.loop import Loop
from autobatch.workload.contract import Workload, kind_of
from autobatch.workload.feed import AHEAD
from autobatch.workload.loader import gpu_of, open_feed
from autobatch.workload.order import GlobalBatchSampler, LastBatch
from autobatch.workload.rng import seed_everything
from autobatch.workload.user_code import user_code


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Settings of a training loop: plain values."""

    target_batch: int
    seed: int = 0
    steps: int | None = None
    """Optimizer steps of the run; if both are given, the fewer count."""
    epochs: int | None = None
    last_batch: LastBatch = "carry"
    max_grad_norm: float | None = None
    """None for no clipping."""
    ema: float | None = None
    """Decay of the averaged weights; None for no average."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    warmup_samples: int | None = None
    """None for no warm-up."""
    bn_momentum: Literal["keep", "auto"] = "keep"
    workers: int | None = None
    """Loader workers; None for what the plan says."""
    prefetch: int | None = None
    """Micro-batches per worker; None for what the plan says."""
    sample_seeds: bool = False


def build_sampler(samples: int, options: LoopSettings) -> GlobalBatchSampler:
    """All windows of a run.

    Raises:
        InputError: there is none.
    """
    sampler = GlobalBatchSampler(
        samples=samples,
        target_batch=options.target_batch,
        seed=options.seed,
        steps=options.steps,
        epochs=options.epochs,
        last_batch=options.last_batch,
    )
    if sampler.total == 0:
        raise InputError(
            f"--last-window drop leaves no window: {sampler.samples} samples for a target batch of "
            f"{sampler.target_batch}; carry or flush keeps them"
        )
    return sampler


@contextmanager
def open_loop(
    setup: TrainSetup,
    planned: Plan,
    options: LoopSettings,
    sampler: GlobalBatchSampler,
    *,
    seeded_before: bool | None,
    note: Callable[[str], None],
) -> Iterator[Loop]:
    """A loop at its first window, on the device and with what feeds it; both are let go of afterwards.

    Args:
        setup: the model, which is trained itself, and the device.
        planned: the plan.
        options: of the run.
        sampler: its windows.
        seeded_before: of a run that goes on, whether its samples were seeded one by one; ``None``: it begins.
        note: told what a person should know.

    Raises:
        InputError: a part of the workload cannot be, or raised on two held-out samples.
    """
    feeding = _feeding(planned, options, seeded_before, note)
    with (
        setup.device.training() as meter,
        open_feed(
            setup.workload, sampler.batches, gpu=gpu_of(setup.device, planned.knobs), **feeding
        ) as feed,
    ):
        loop = _build_loop(setup, planned, options, sampler, meter)
        loop.feed = feed
        sanity_check_validation(setup.workload, loop.train_state, device=setup.device, meter=meter)
        yield loop


def _build_loop(
    setup: TrainSetup, planned: Plan, options: LoopSettings, sampler: GlobalBatchSampler, meter: Meter
) -> Loop:
    workload = setup.workload
    seed_everything(options.seed)
    meter.mark("setup")
    model = setup.model.to(setup.device.torch_device)
    meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
    train_state = build_train_state(
        workload,
        model,
        setup.device.torch_device,
        precision=planned.precision,
        learning_rate=planned.learning_rate,
        max_grad_norm=options.max_grad_norm,
        ema=options.ema,
        knobs=planned.knobs,
    )
    return Loop(
        workload=workload,
        train_state=train_state,
        sampler=sampler,
        device=setup.device,
        meter=meter,
        micro_batch=planned.micro_batch,
        schedules=_schedules(workload, train_state.optimizers, sampler),
        on_nonfinite=options.on_nonfinite,
        warmup_samples=options.warmup_samples,
        rescaled_norms=batch_norms(train_state.model) if options.bn_momentum == "auto" else [],
    )


def _schedules(workload: Workload, optimizers: Optimizers, sampler: GlobalBatchSampler) -> list[LRScheduler]:
    """A schedule for each optimizer; none where the workload has none."""
    if workload.schedule is None:
        return []
    with user_code("schedule"):
        schedules = [workload.schedule(optimizer, sampler.total) for optimizer in optimizers]
    for one in schedules:
        if isinstance(one, ReduceLROnPlateau):
            raise InputError(
                "Workload(schedule=…) returned a ReduceLROnPlateau, which follows a figure: schedules are "
                "stepped once an optimizer step, with none"
            )
        if not (hasattr(one, "step") and hasattr(one, "state_dict")):
            raise InputError(f"Workload(schedule=…) returned {kind_of(one)}, not a schedule of torch.optim")
    return schedules


def _feeding(
    planned: Plan, options: LoopSettings, seeded_before: bool | None, note: Callable[[str], None]
) -> dict[str, Any]:
    """How the loop is fed; a run whose samples are seeded goes on so, whatever joins them."""
    workers = options.workers
    if workers is None:
        workers = int(planned.knobs.get(LOADER_WORKERS) or 0)
    seeded = options.sample_seeds or workers > 0
    if seeded and seeded_before is False:
        note(
            "the samples were not seeded one by one so far, and are from here on: where data is drawn at "
            "random, the rest is not what the run would have been; --workers 0 goes on as before"
        )
    seeded = seeded or bool(seeded_before)
    prefetch = options.prefetch or int(planned.knobs.get(PREFETCH) or AHEAD)
    return {"seed": options.seed, "workers": workers, "prefetch": prefetch, "sample_seeds": seeded}
