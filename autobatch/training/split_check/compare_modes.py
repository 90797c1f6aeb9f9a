"""Comparison of a batch with its parts, in the first type and mode that the model runs in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.core.records.base import Precision
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.planning import split_evenly
from autobatch.setup.attempt import TrainSetup
from autobatch.step.restore import temporary_weights
from autobatch.training.split_check.compare_parts import UncheckedError, find_fault
from autobatch.training.split_check.sample_gradient import GradientRunner
from autobatch.training.split_check.split_samples import SplitSamples, collate_split

MOST_PARTS = 8
MANY_TENSORS = 1000
"""Parameter tensors from which on there are two parts: a pass over a few samples takes seconds then."""
FLOAT64_BUDGET_SHARE = 0.1
"""Share of the budget below which a loss is compared in float64; model copy and gradient count."""


class Mode(NamedTuple):
    """A type of the model and its batches, and the mode of its modules."""

    dtype: torch.dtype | None
    """None to keep the types that they have."""
    train_mode: bool
    precision: Precision = "fp32"
    """Precision of the forward pass; ``fp32`` for no autocast."""

    @property
    def tolerance(self) -> float:
        """Relative error that splitting a batch stays below."""
        # Each part rounds its gradient, to 8 significant bits in bf16 and 11 in fp16.
        if self.precision == "bf16":
            return 3e-2
        # float32 also stands for models with operations in TF32; float64 for those with some in float32.
        return 1e-5 if self.dtype is torch.float64 else 1e-2


class Finding(NamedTuple):
    """Result of the check; both are None if the loss can be split."""

    fault: str | None = None
    """Reason why the loss cannot be split exactly."""
    unchecked: str | None = None
    """Reason why the check could not be made."""
    is_memory: bool = False
    """True if the check could not be made because memory ran out."""

    def notes(self, *, is_split: bool) -> list[str]:
        """Return what to tell the user about a run whose batches are split, or are one micro-batch each."""
        if self.fault is not None and not is_split:
            return [
                f"{self.fault}. In this run every batch is one micro-batch, which is exact as long as memory "
                "does not run out"
            ]
        if self.unchecked is not None and is_split:
            return [
                f"whether the loss can be split into micro-batches exactly could not be checked: "
                f"{self.unchecked}. Make sure that it is a mean over samples, or return Loss(total, count)"
            ]
        return [] if self.fault is None else [self.fault]


def modes_before_training(setup: TrainSetup) -> list[Mode]:
    """Return the modes to try, in order: eval mode first, because dropout and BatchNorm do nothing in it."""
    modes = [Mode(torch.float32, train_mode=False), Mode(torch.float32, train_mode=True)]
    if _affords_float64(setup):
        modes.insert(0, Mode(torch.float64, train_mode=False))
    return [*modes, *_autocast_mode(setup, train_mode=True)]


def modes_of_training(setup: TrainSetup) -> list[Mode]:
    """Return the modes to try, in order: train mode first, which may add terms to the loss."""
    modes = [Mode(torch.float32, train_mode=True), *_autocast_mode(setup, train_mode=True)]
    if _affords_float64(setup):
        modes.insert(0, Mode(torch.float64, train_mode=True))
    return [*modes, Mode(torch.float32, train_mode=False)]


def compare_samples(
    setup: TrainSetup,
    meter: Meter,
    samples: Sequence[Any],
    modes: Sequence[Mode],
    sizes: Sequence[int] | None = None,
) -> tuple[Finding, Mode | None]:
    """Compare samples as a whole batch with their parts, in the first mode that the model runs in.

    Args:
        setup: the workload and its model, which runs on temporary weights.
        meter: counts the copies.
        samples: as the data returned them.
        modes: the modes to try.
        sizes: samples of each part; None for equal ones.

    Returns:
        The finding, and the mode; None if there was none.
    """
    sizes = sizes or split_evenly(len(samples), _parts(setup, len(samples)))
    with meter.uncounted():
        split = collate_split(setup.workload, samples, sizes)
    finding = Finding()
    for mode in modes:
        try:
            return Finding(_find_fault(setup, meter, split, mode)), mode
        except UncheckedError as error:
            return Finding(unchecked=str(error)), mode
        except InputError:
            raise
        except Exception as error:
            # A model that trains may still fail here (another type, eval mode, memory): no fault of its loss.
            is_memory = classify(error) is not Verdict.NONE
            reason = f"the model or the loss raised {first_line(error)}"
            if is_memory:
                reason = f"memory ran out for {len(samples)} samples"
            finding = Finding(unchecked=reason, is_memory=is_memory)
    return finding, None


def _parts(setup: TrainSetup, samples: int) -> int:
    """Return the number of parts of samples."""
    if sum(1 for _ in setup.model.parameters()) >= MANY_TENSORS:
        return 2
    return max(2, min(MOST_PARTS, samples // 2))


def _find_fault(setup: TrainSetup, meter: Meter, split: SplitSamples, mode: Mode) -> str | None:
    with _converted(setup, meter, mode) as model:
        runner = GradientRunner(setup, model, meter, mode.dtype, mode.precision)
        return find_fault(runner, setup.workload.loss, split, mode.tolerance)


def _affords_float64(setup: TrainSetup) -> bool:
    elements = sum(tensor.numel() for tensor in setup.model.parameters())
    return elements * 16 < setup.device.budget_bytes * FLOAT64_BUDGET_SHARE


def _autocast_mode(setup: TrainSetup, *, train_mode: bool) -> list[Mode]:
    """Return the precision of the run, for models that run in no other; nothing if it is fp32."""
    return [] if setup.precision == "fp32" else [Mode(None, train_mode, setup.precision)]


@contextmanager
def _converted(setup: TrainSetup, meter: Meter, mode: Mode) -> Iterator[nn.Module]:
    """Give the model temporary weights of a type, and a mode, within the block."""
    with temporary_weights(setup.model, setup.device.torch_device) as model:
        for tensor in [*model.parameters(), *model.buffers()]:
            if mode.dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(mode.dtype)
        meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
        model.train(mode.train_mode)
        if mode.train_mode:
            for module in model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
                    module.eval()
        yield model
