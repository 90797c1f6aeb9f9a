"""What one configuration costs: seconds an optimizer step at the effective batch, on lent tensors."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from autobatch.attempt import Bench, attempt
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.knobs import Value
from autobatch.planning import micro_batches
from autobatch.records import Precision
from autobatch.samples import join
from autobatch.state import lent, preserved_random_state
from autobatch.step import Trainee, accumulate, assemble, finish, tensors_of, to_device
from autobatch.workload import Batch

WARM_UP = 1
"""Micro-batches that are not timed: kernels load, algorithms are chosen."""


class Cost(NamedTuple):
    """What a configuration costs."""

    micro_batch: int
    step_seconds: float
    """An optimizer step of the whole window on one rank; infinite where it does not run."""
    failure: str | None
    """Why it does not run inside the budget."""


def micro_batch_of(limit: int, samples: int, values: Mapping[str, Value]) -> int:
    """The micro-batch of a configuration: the even split at the limit, halved as often as it says."""
    shift = int(values.get("micro_batch_shift") or 0)
    return max(1, micro_batches(samples, limit)[0] >> shift)


def bench_with(bench: Bench, values: Mapping[str, Value]) -> Bench:
    """The bench of a configuration."""
    precision: Precision = values.get("precision") or bench.precision  # type: ignore[assignment]
    return replace(bench, precision=precision, knobs=values)


def outgrows(bench: Bench, *, limit: int, samples: int, values: Mapping[str, Value]) -> str | None:
    """Why a configuration does not fit the budget; ``None``: it ran inside it.

    What only changes the split runs a micro-batch under the limit, and needs no run.
    """
    if set(values) <= {"micro_batch_shift"}:
        return None
    outcome = attempt(bench_with(bench, values), micro_batch_of(limit, samples, values))
    return outcome.attempt.reason


def measure(bench: Bench, *, limit: int, samples: int, values: Mapping[str, Value], seconds: float) -> Cost:
    """Time a configuration: its micro-batches and its optimizer step apart, so that no whole window is run.

    Args:
        bench: the model and the data.
        limit: the largest micro-batch that fits.
        samples: samples of a window on one rank.
        values: the configuration.
        seconds: time to spend, about.
    """
    size = micro_batch_of(limit, samples, values)
    bench = bench_with(bench, values)
    sizes = micro_batches(samples, size)
    failure = None
    micro, step = [float("inf")], [0.0]
    with preserved_random_state(), bench.device.training() as meter:
        try:
            with lent(bench.model, bench.device.torch_device) as model:
                meter.adopt(tensor.data for tensor in [*model.parameters(), *model.buffers()])
                model.train()
                trainee = assemble(
                    bench.workload,
                    model,
                    bench.device.torch_device,
                    precision=bench.precision,
                    learning_rate=bench.workload.learning_rate,
                    max_grad_norm=bench.max_grad_norm,
                    knobs=bench.knobs,
                )
                micro, step = _time(bench, trainee, sizes[0], seconds, meter)
                del trainee
        except Exception as error:
            if classify(error) is Verdict.NONE:
                raise
            failure = first_line(error)
    if failure is not None:
        bench.device.release()
    return Cost(sizes[0], statistics.median(micro) * len(sizes) + statistics.median(step), failure)


def _time(
    bench: Bench, trainee: Trainee, size: int, seconds: float, meter: Meter
) -> tuple[list[float], list[float]]:
    """Seconds of micro-batches and of optimizer steps, after a warm-up."""
    count = len(bench.workload.train_data)  # type: ignore[arg-type]
    ids = torch.randint(count, (size,)).tolist()

    def batches() -> Iterator[tuple[Batch, int]]:
        with meter.aside():
            batch = to_device(join(bench.workload, ids), trainee.device)
        meter.adopt(tensors_of(batch))
        yield batch, size

    micro: list[float] = []
    step: list[float] = []
    start = bench.clock()
    while len(micro) < 3 + WARM_UP or bench.clock() - start < seconds:
        before = bench.clock()
        tally = accumulate(trainee, batches(), size, lambda _: None)
        bench.device.synchronize()
        between = bench.clock()
        finish(trainee, tally, mark=lambda _: None)
        bench.device.synchronize()
        micro.append(between - before)
        step.append(bench.clock() - between)
    return micro[WARM_UP:], step[WARM_UP:]
