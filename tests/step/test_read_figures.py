"""The sums of a batch on the host: what is missing is 0, and norms that ranks share come as they are."""

from __future__ import annotations

import torch

from autobatch.step.loss_share import StepTotals
from autobatch.step.read_figures import read_figures


def test_figures_are_read_in_their_order_and_what_is_missing_is_0() -> None:
    totals = StepTotals(samples=4, loss=torch.tensor(1.5), first_norm=2.0, first_count=torch.tensor(3))
    norms = [torch.tensor(4.0, dtype=torch.float64), None, 5.0]
    assert read_figures(totals, norms) == ([1.5, 0.0, 2.0, 3.0, 0.0], [4.0, 0.0, 5.0])


def test_norms_of_all_ranks_take_the_place_of_those_of_one() -> None:
    totals = StepTotals(samples=4, count=7.0, least_count=torch.tensor(1.0), norms=[6.0])
    assert read_figures(totals, [None]) == ([0.0, 7.0, 0.0, 0.0, 1.0], [6.0])
