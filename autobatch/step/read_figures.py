"""The transfer of the sums of a batch to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from autobatch.step.loss_share import StepTotals
from autobatch.step.readable import is_readable


def read_figures(totals: StepTotals, norms: list[Tensor | float | None]) -> tuple[list[float], list[float]]:
    """Bring the sums and norms to the host in one transfer, with 0 in place of None.

    Returns:
        The loss, the count, the norm and the count of the first micro-batch, the least count; and the norms.
    """
    figures = [totals.loss, totals.count, totals.first_norm, totals.first_count, totals.least_count, *norms]
    away = [figure for figure in figures if isinstance(figure, Tensor) and not is_readable(figure)]
    if len(away) > 1:
        values = iter(torch.stack([figure.to(away[0].device, torch.float64) for figure in away]).tolist())
        figures = [next(values) if any(figure is one for one in away) else figure for figure in figures]
    found = [0.0 if figure is None else float(figure) for figure in figures]
    return found[:5], found[5:] if totals.norms is None else totals.norms
