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

from collections.abc import Callable
from typing import Literal

from autobatch.core.errors import InputError
from autobatch.device.base import Meter
from autobatch.planning import micro_batches
from autobatch.setup.attempt import TrainSetup
from autobatch.setup.child import Session
from autobatch.step.restore import temporary_weights
from autobatch.training.batchnorm import batch_norm_notes, batch_norms, smallest_micro_batch
from autobatch.training.forward_writes import forward_write_notes
from autobatch.training.split_check.compare_modes import Finding, compare_samples, modes_before_training
from autobatch.training.split_check.sample_choice import SampleChoice
from autobatch.training.split_check.sample_gradient import GradientRunner
from autobatch.workload.data import COLLATE, fetch, load_micro_batch
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import failed_part

FEW_SAMPLES = 8
MANY_SAMPLES = 64
MOST_MICRO_BATCHES = 4
"""Micro-batches that many samples may be; their memory is enforced."""
SECONDS = 5.0
"""Expected time above which many samples are not compared."""


def check_loss_splits(
    setup: TrainSetup,
    *,
    micro_batch: int,
    sampler: GlobalBatchSampler,
    check: Literal["error", "note", "off"] = "error",
    share_of: Callable[[int], int] = lambda samples: samples,
) -> tuple[list[str], Finding]:
    """Check that splitting a batch changes nothing but the order of sums.

    Args:
        setup: the workload and its model, which trains on temporary weights here.
        micro_batch: the largest micro-batch of the run, in samples.
        sampler: the batches of the run.
        check: raise an error or return a note if batches are split and the loss cannot be; ``off`` skips the
            loss and checks only BatchNorm.
        share_of: returns the samples that this process takes of a batch of a given size.

    Returns:
        Notes, one per line; and what was found about the loss.

    Raises:
        InputError: batches are split and the loss cannot be, or a BatchNorm gets a single value.
    """
    notes = batch_norm_notes(setup.model, sampler, micro_batch)
    notes += forward_write_notes(setup, len(micro_batches(share_of(sampler.target_batch), micro_batch)))
    is_split = min(micro_batch, share_of(sampler.target_batch)) < sampler.target_batch
    if batch_norms(setup.model) and smallest_micro_batch(sampler, micro_batch, share_of) == 1:
        with preserved_random_state(), setup.device.training() as meter:
            _check_single_sample(setup, meter, sampler)
    finding = Finding() if check == "off" else examine_loss(setup, micro_batch)
    setup.device.release()
    if finding.fault is not None and is_split and check == "error":
        raise InputError(f"{finding.fault}. To train anyway, use --split-check note")
    return [*notes, *finding.notes(is_split=is_split)], finding


def name_writes(session: Session, micro_batches: int) -> list[str]:
    """Name what the forward pass of an open setup writes; see `forward_write_notes`."""
    return forward_write_notes(session.setup, micro_batches)


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
        samples = fetch(setup.workload.train_data, choice.ids(few))
        with setup.device.training() as meter:
            finding, mode = compare_samples(setup, meter, samples, modes_before_training(setup))
        expected = (setup.clock() - start) * many / few
        if finding.fault is not None or mode is None or many <= few or expected > SECONDS:
            return finding
        samples = fetch(setup.workload.train_data, choice.ids(many))
        with setup.device.enforced() as meter:
            try:
                more, _ = compare_samples(setup, meter, samples, [mode])
            except Exception as error:
                # A model may refuse more samples than a micro-batch has. That is no fault of the loss.
                if failed_part(error) != COLLATE:
                    raise
                return finding
    # If memory is too small for many samples, the few show already that the loss can be split.
    return finding if more.fault is None and finding.unchecked is None else more


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
