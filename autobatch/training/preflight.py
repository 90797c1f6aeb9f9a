"""Check before training, on a few samples, that splitting a batch does not change its gradient.

The gradient g of a whole batch is compared with the gradients of its parts, each computed alone. If their
mean with the weights of accumulation is g, accumulation is exact. If other weights give g, the loss is a mean
over something else than samples. If no weights do, the loss depends on several samples at once (contrastive
losses, normalisation over the batch). For a `WholeBatchLoss` the two passes over the parts must give g. The
model runs in eval mode, so that dropout and BatchNorm do not change the result.

A few samples are compared first, then more of them if time and memory allow. If they cannot be compared, the
check says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify, first_line
from autobatch.planning import micro_batches, split_evenly
from autobatch.probing.attempt import TrainSetup
from autobatch.probing.child import Session
from autobatch.step.restore import temporary_weights
from autobatch.training.batchnorm import batch_norm_notes, batch_norms, smallest_micro_batch
from autobatch.training.compare_parts import UncheckedError, find_fault
from autobatch.training.sample_choice import SampleChoice
from autobatch.training.sample_gradient import GradientRunner
from autobatch.training.split_samples import collate_split
from autobatch.workload.data import load_micro_batch
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import preserved_random_state

FEW_SAMPLES = 8
MANY_SAMPLES = 64
MOST_MICRO_BATCHES = 4
"""Micro-batches that many samples may be; their memory is enforced."""
MOST_PARTS = 8
SECONDS = 5.0
"""Expected time above which many samples are not compared."""
FLOAT64_BUDGET_SHARE = 0.1
"""Share of the budget below which the check runs in float64; model copy and gradient count."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-2}
"""Relative errors that models with float32 operations, and TF32, stay below."""


class Finding(NamedTuple):
    """Result of the check; both are None if the loss can be split."""

    fault: str | None = None
    """Reason why the loss cannot be split exactly."""
    unchecked: str | None = None
    """Reason why the check could not be made."""

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


class _Kind(NamedTuple):
    dtype: torch.dtype
    train_mode: bool


def check_loss_splits(
    setup: TrainSetup,
    *,
    micro_batch: int,
    sampler: GlobalBatchSampler,
    check: Literal["error", "note", "off"] = "error",
) -> list[str]:
    """Check that splitting a batch changes nothing but the order of sums.

    Args:
        setup: the workload and its model, which trains on temporary weights here.
        micro_batch: the largest micro-batch of the run, in samples.
        sampler: the batches of the run.
        check: raise an error or return a note if batches are split and the loss cannot be; ``off`` skips the
            loss and checks only BatchNorm.

    Returns:
        Notes, one per line.

    Raises:
        InputError: batches are split and the loss cannot be, or a BatchNorm gets a single value.
    """
    notes = batch_norm_notes(setup.model, sampler, micro_batch)
    is_split = len(micro_batches(sampler.target_batch, micro_batch)) > 1
    if batch_norms(setup.model) and smallest_micro_batch(sampler, micro_batch) == 1:
        with preserved_random_state(), setup.device.training() as meter:
            _check_single_sample(setup, meter, sampler)
    finding = Finding() if check == "off" else examine_loss(setup, micro_batch)
    setup.device.release()
    if finding.fault is not None and is_split and check == "error":
        raise InputError(f"{finding.fault}. To train anyway, use --split-check note")
    return [*notes, *finding.notes(is_split=is_split)]


def examine(session: Session, micro_batch: int) -> Finding:
    """Examine the loss of an open setup; see `examine_loss`."""
    return examine_loss(session.setup, micro_batch)


def examine_loss(setup: TrainSetup, micro_batch: int) -> Finding:
    """Examine whether the loss of a workload can be split, and leave its model and generators unchanged.

    Args:
        setup: the workload and its model.
        micro_batch: samples that fit in memory.
    """
    with preserved_random_state():
        choice = SampleChoice(setup)
        few = min(FEW_SAMPLES, len(choice), max(2, micro_batch))
        many = min(MANY_SAMPLES, len(choice), MOST_MICRO_BATCHES * micro_batch)
        if few < 2:
            return Finding(unchecked="it takes 2 samples, and the training data have 1")
        start = setup.clock()
        with setup.device.training() as meter:
            finding, kind = _examine_kinds(setup, meter, choice.ids(few), _kinds(setup))
        expected = (setup.clock() - start) * many / few
        if finding.fault is not None or kind is None or many <= few or expected > SECONDS:
            return finding
        with setup.device.enforced() as meter:
            more, _ = _examine_kinds(setup, meter, choice.ids(many), [kind])
    # The few samples tell already that the loss can be split, if memory is too small for many.
    return finding if more.fault is None and finding.unchecked is None else more


def _kinds(setup: TrainSetup) -> list[_Kind]:
    """Return the types and modes to try, in order."""
    kinds = [_Kind(torch.float32, train_mode=False), _Kind(torch.float32, train_mode=True)]
    elements = sum(tensor.numel() for tensor in setup.model.parameters())
    if elements * 16 < setup.device.budget_bytes * FLOAT64_BUDGET_SHARE:
        kinds.insert(0, _Kind(torch.float64, train_mode=False))
    return kinds


def _examine_kinds(
    setup: TrainSetup, meter: Meter, ids: list[int], kinds: list[_Kind]
) -> tuple[Finding, _Kind | None]:
    """Examine the loss in the first type and mode that the model runs in; return them too, None for none."""
    parts = max(2, min(MOST_PARTS, len(ids) // 2))
    with meter.uncounted():
        samples = collate_split(setup.workload, ids, split_evenly(len(ids), parts))
    reason = ""
    for kind in kinds:
        try:
            with _converted(setup, meter, kind) as model:
                runner = GradientRunner(setup, model, meter, kind.dtype)
                fault = find_fault(runner, setup.workload.loss, samples, TOLERANCES[kind.dtype])
                return Finding(fault), kind
        except UncheckedError as error:
            return Finding(unchecked=str(error)), kind
        except InputError:
            raise
        except Exception as error:
            # A model that trains may still fail here (another type, eval mode, memory): no fault of its loss.
            is_memory = classify(error) is not Verdict.NONE
            reason = (
                f"memory ran out for {len(ids)} samples"
                if is_memory
                else f"the model or the loss raised {first_line(error)}"
            )
    return Finding(unchecked=reason), None


@contextmanager
def _converted(setup: TrainSetup, meter: Meter, kind: _Kind) -> Iterator[nn.Module]:
    """Give the model temporary weights of a type, and a mode, within the block."""
    with temporary_weights(setup.model, setup.device.torch_device) as model:
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(kind.dtype)
        meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
        model.train(kind.train_mode)
        if kind.train_mode:
            for module in model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
                    module.eval()
        yield model


def _check_single_sample(setup: TrainSetup, meter: Meter, sampler: GlobalBatchSampler) -> None:
    """Raise if BatchNorm cannot train on a single sample, rather than in the last step of the run."""
    try:
        with temporary_weights(setup.model, setup.device.torch_device) as model:
            model.train()
            GradientRunner(setup, model, meter, None).run(load_micro_batch(setup.workload, [0]), 1)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            return
        last = sampler.size(sampler.total - 1)
        raise InputError(
            f"BatchNorm needs 2 samples, and this run has a micro-batch of 1 (its last batch has {last} "
            "samples): choose a target batch that leaves no single sample, --last-batch drop, or --steps "
            "instead of --epochs"
        ) from None
    except Exception:  # other errors occur in training too, and are reported there
        return
