"""Check before training, on a few samples, that splitting a batch does not change its gradient.

The gradient g of a whole batch is compared with the gradients of its parts, each computed alone. If their
mean with the weights of accumulation is g, accumulation is exact. If other weights give g, the loss is a mean
over something else than samples. If no weights do, the loss depends on several samples at once (contrastive
losses, normalisation over the batch). For a `WholeBatchLoss` the two passes over the parts must give g. The
model runs in eval mode, so that dropout and BatchNorm do not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from autobatch.core.errors import InputError
from autobatch.device.base import Meter
from autobatch.device.oom import Verdict, classify
from autobatch.planning import micro_batches, split_evenly
from autobatch.probing.attempt import TrainSetup
from autobatch.step.restore import temporary_weights
from autobatch.training.batchnorm import batch_norm_notes, batch_norms, smallest_micro_batch
from autobatch.training.sample_gradient import GradientRunner, SampleGradient
from autobatch.workload.contract import WholeBatchLoss
from autobatch.workload.order import GlobalBatchSampler
from autobatch.workload.rng import preserved_random_state

SAMPLES = 6
PARTS = 3
FLOAT64_BUDGET_SHARE = 0.1
"""Share of the budget below which the check runs in float64; model copy and gradient count."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-2}
"""Relative errors that models with float32 operations, and TF32, stay below."""


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
    with preserved_random_state(), setup.device.training() as meter:
        if batch_norms(setup.model) and smallest_micro_batch(sampler, micro_batch) == 1:
            _check_single_sample(setup, meter, sampler)
        fault = None if check == "off" else _find_fault(setup, meter, micro_batch)
    setup.device.release()
    if fault is None:
        return notes
    if not is_split:
        fault += (
            ". In this run every batch is one micro-batch, which is exact as long as memory does not run out"
        )
    elif check == "error":
        raise InputError(f"{fault}. To train anyway, use --split-check note")
    return [*notes, fault]


def _find_fault(setup: TrainSetup, meter: Meter, micro_batch: int) -> str | None:
    """Return the fault of the loss; ``None`` if it has none, or if no kind of check runs."""
    size = min(SAMPLES, len(setup.workload.train_data), max(2, micro_batch))  # type: ignore[arg-type]
    if size < 2:
        return None
    kinds: list[tuple[torch.dtype, bool]] = [(torch.float32, False), (torch.float32, True)]
    elements = sum(tensor.numel() for tensor in setup.model.parameters())
    if elements * 16 < setup.device.budget_bytes * FLOAT64_BUDGET_SHARE:
        kinds.insert(0, (torch.float64, False))
    for dtype, training in kinds:
        fault = _find_fault_in(setup, meter, size, dtype, training=training)
        if fault != "":
            return fault
    return None


def _find_fault_in(
    setup: TrainSetup, meter: Meter, size: int, dtype: torch.dtype, *, training: bool
) -> str | None:
    """Check in one type and mode; return the empty text if the model cannot run in them."""
    try:
        with temporary_weights(setup.model, setup.device.torch_device) as model:
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
            meter.count(tensor.data for tensor in [*model.parameters(), *model.buffers()])
            model.train(training)
            if training:
                for module in model.modules():
                    if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
                        module.eval()
            runner = GradientRunner(setup, model, meter, dtype)
            if isinstance(setup.workload.loss, WholeBatchLoss):
                return _compare_cached(runner, _spread_ids(setup, size), TOLERANCES[dtype])
            return _compare_parts(runner, _spread_ids(setup, size), TOLERANCES[dtype])
    except InputError:
        raise
    except Exception as error:
        # A model that trains may still fail here (another type, eval mode, memory): no fault of its loss.
        return None if classify(error) is not Verdict.NONE else ""


def _spread_ids(setup: TrainSetup, size: int) -> list[int]:
    """Return evenly spaced samples of the training data."""
    count = len(setup.workload.train_data)  # type: ignore[arg-type]
    return [index * (count - 1) // (size - 1) for index in range(size)]


def _whole_gradient(runner: GradientRunner, ids: Sequence[int], tolerance: float) -> SampleGradient | None:
    """Return the gradient over all samples; ``None`` if it is zero or changes from run to run."""
    torch.manual_seed(1)
    whole = runner.run(ids)
    torch.manual_seed(2)
    again = runner.run(ids)
    length = float(whole.elements.norm())
    if not length > 0.0 or float((again.elements - whole.elements).norm()) > tolerance * length:
        return None
    return whole


def _compare_cached(runner: GradientRunner, ids: Sequence[int], tolerance: float) -> str | None:
    """Compare the gradient of a `WholeBatchLoss` over all samples with that of its two passes."""
    whole = _whole_gradient(runner, ids, tolerance)
    if whole is None:
        return None
    cached = runner.run_cached(ids, split_evenly(len(ids), min(PARTS, len(ids))))
    error = float((cached.elements - whole.elements).norm() / whole.elements.norm())
    if error <= tolerance:
        return None
    return (
        f"the gradient of {whole.samples} samples at once and by their cached rows differs by {error:.1%}: "
        "WholeBatchLoss(represent=…) must compute each row from its own sample alone. Move what depends on "
        "several samples to WholeBatchLoss(loss=…)"
    )


def _compare_parts(runner: GradientRunner, ids: Sequence[int], tolerance: float) -> str | None:
    """Compare the gradient over all samples with the weighted mean over its parts."""
    whole = _whole_gradient(runner, ids, tolerance)
    if whole is None:
        return None
    parts, first = [], 0
    for size in split_evenly(len(ids), min(PARTS, len(ids))):
        parts.append(runner.run(ids[first : first + size]))
        first += size
    total = sum(part.weight for part in parts)
    if not total:
        return None
    if whole.count is not None and abs(whole.count - total) > tolerance * abs(total):
        return (
            f"the count of the workload's Loss is {whole.count:g} for {whole.samples} samples at once and "
            f"{total:g} for the same samples in parts: count must be the number of items that total sums over"
        )
    columns = torch.stack([part.elements for part in parts], dim=1)
    mean = columns @ torch.tensor([part.weight / total for part in parts], dtype=torch.float64)
    length = float(whole.elements.norm())
    error = float((mean - whole.elements).norm()) / length
    if error <= tolerance:
        return None
    weights = torch.linalg.lstsq(columns, whole.elements[:, None]).solution[:, 0]
    residual = float((columns @ weights - whole.elements).norm()) / length
    start = f"the gradient of {whole.samples} samples at once and in parts differs by {error:.1%}: "
    return start + _cause(whole, weights.tolist(), mixes_samples=residual > tolerance)


def _cause(whole: SampleGradient, weights: list[float], *, mixes_samples: bool) -> str:
    """Name the likely cause of a fault, and its remedy."""
    if mixes_samples:
        return (
            "the loss depends on several samples at once (a contrastive loss, batch statistics, a penalty on "
            "the whole batch), so the batch cannot be split. Use WholeBatchLoss(represent=…, loss=…), which "
            "is accumulated exactly, a target batch that fits in one micro-batch, or a loss that treats each "
            "sample alone"
        )
    if whole.count is not None:
        return "the total of the workload's Loss must be the sum over the items that count counts"
    if sum(weights) > 1.5:
        return (
            "the workload's loss is a sum over the batch: return the mean over its samples, or "
            "Loss(total, count) with the sum and the number of its items"
        )
    return (
        "the workload's loss is a mean over something else than samples (counted tokens, class weights, "
        "pixels): return Loss(total, count) with the sum and the number of its items"
    )


def _check_single_sample(setup: TrainSetup, meter: Meter, sampler: GlobalBatchSampler) -> None:
    """Raise if BatchNorm cannot train on a single sample, rather than in the last step of the run."""
    try:
        with temporary_weights(setup.model, setup.device.torch_device) as model:
            model.train()
            GradientRunner(setup, model, meter, None).run([0])
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
