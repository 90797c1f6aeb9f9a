"""Reasons against a split by size: results that would change, or nothing to gain.

Sorting the samples of a batch keeps Σ totals ÷ Σ counts. It changes results if a layer or a loss sees more
than one sample at a time, or sees the padding. Such a workload depends on the micro-batch in any split, but a
split by size makes the error systematic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.knobs import COMPILE
from autobatch.core.units import format_share
from autobatch.rehearsal.rehearsal import on_copies
from autobatch.rehearsal.setup import Setup
from autobatch.step.loss import terms_of
from autobatch.workload.contract import Loss, WholeBatchLoss
from autobatch.workload.data import collate_samples, fetch, shallow_copies
from autobatch.workload.nested import tensors_of, to_device
from autobatch.workload.rng import preserved_random_state, seed_everything
from autobatch.workload.split import Sizes

PADDED_SHARE = 0.25
"""Share of the room beside a short sample that must be filled for samples to count as padded."""
TOLERANCE = 0.01
"""Share of a sample's loss that may depend on its neighbours: rounding stays far below."""
ROUNDING = 1e-3
"""Share of its neighbour's loss that rounding may add, in TF32."""


def hazard(setup: Setup, sizes: Sizes) -> str | None:
    """Return why a split by size would change results; None if nothing shows that it would.

    The weights and the random states of the setup stay.

    Raises:
        Exception: whatever the workload raises on two samples.
    """
    if any(isinstance(module, _BatchNorm) for module in setup.model.modules()):
        return "BatchNorm computes its statistics over a micro-batch, and those of samples of one size differ"
    with preserved_random_state():
        change = _change_beside_another(setup, _short_and_longest(setup, sizes))
    if change <= TOLERANCE:
        return None
    return (
        f"the loss of a short sample changes by {format_share(change)} beside the longest, so it depends on "
        "padding or on other samples: let the model ignore padding with a mask, and return "
        "Loss(total, count) if the loss is a mean over something else than samples"
    )


def nothing_to_gain(setup: Setup, sizes: Sizes) -> str | None:
    """Return why a split by size would save no time; None if it may. See `hazard`."""
    if hasattr(setup.model, "_orig_mod") or setup.knobs.get(COMPILE, "off") != "off":
        return "a compiled model compiles anew for most micro-batches of other shapes"
    with preserved_random_state():
        samples = _short_and_longest(setup, sizes)
        short, longest, both = (
            sum(tensor.numel() for tensor in tensors_of(_collated(setup, chosen)))
            for chosen in (samples[:1], samples[1:], samples)
        )
    is_padded = short < longest and both - short - longest >= PADDED_SHARE * (longest - short)
    # What holds no tensors tells nothing.
    return None if is_padded or not both else "the collate function does not pad, so there is nothing to save"


def check_smallest(setup: Setup, sizes: Sizes) -> None:
    """Collate the smallest sample alone, as a split by size may leave it.

    Raises:
        Exception: whatever the workload raises, for example for a sample that is empty.
    """
    with preserved_random_state():
        _collated(setup, fetch(setup.workload.train_data, [int(sizes.argmin())]))


def _short_and_longest(setup: Setup, sizes: Sizes) -> list[Any]:
    """Read a sample of the shortest quarter, and the longest one."""
    order = np.argsort(sizes, kind="stable")
    return fetch(setup.workload.train_data, [int(order[len(order) // 4]), int(order[-1])])


def _collated(setup: Setup, samples: Sequence[Any]) -> Any:
    return collate_samples(shallow_copies(samples), setup.workload.collate)


def _change_beside_another(setup: Setup, samples: Sequence[Any]) -> float:
    """Return the share by which what a sample adds to a loss changes beside another; 0 if it is random."""
    loss: Any = setup.workload.loss
    # In float32, because rounding is no effect of the padding.
    setup = replace(setup, precision="fp32")
    with setup.device.training() as meter, torch.no_grad(), on_copies(setup, meter) as train_state:
        train_state.model.eval()

        def values(chosen: Sequence[Any], seed: int = 1) -> list[Tensor]:
            """Return totals and counts of the samples, or the row of the first of them."""
            seed_everything(seed)
            batch = to_device(_collated(setup, chosen), setup.device.torch_device)
            if isinstance(loss, WholeBatchLoss):
                rows = tensors_of(train_state.call(loss.represent, batch))
                return [torch.cat([row[0].double().flatten().cpu() for row in rows])]
            terms = terms_of(train_state.call(loss, batch)).values()
            pairs = [
                (term.total, term.count) if isinstance(term, Loss) else (term * len(chosen), len(chosen))
                for term in terms
            ]
            return list(torch.tensor(pairs, dtype=torch.float64, device="cpu").flatten())

        alone, other, both = values(samples[:1]), values(samples[1:]), values(samples)
        again = values(samples, 2)
    if isinstance(loss, WholeBatchLoss):
        other = [torch.zeros_like(row) for row in both]
    if [value.shape for value in alone] != [value.shape for value in both]:
        return 1.0  # rows of two forms make no batch
    if any(not torch.equal(value, repeated) for value, repeated in zip(both, again, strict=True)):
        return 0.0
    shares = [
        float(((together - rest - own).norm() - ROUNDING * rest.norm()) / own.norm())
        for together, rest, own in zip(both, other, alone, strict=True)
        if own.norm()
    ]
    return max(shares, default=0.0)
