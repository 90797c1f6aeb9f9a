"""Limits against a plain loop of torch in processes of its own: m runs, and m + 1 does not."""

from __future__ import annotations

import math

import pytest

from benchmarks.gpu.limits import measure
from benchmarks.gpu.workloads import CASES

pytestmark = pytest.mark.gpu
SHORT = ("mlp-no-bias", "residual-fp16", "gpt-checkpointed", "gpt-fused")
"""What fits is not monotone; a loss scale; activations that are computed twice; a fused optimizer."""


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_limit_is_exact(name: str) -> None:
    row = measure(name, CASES[name].budgets_mib[0])
    assert row["exact"], row
    doublings = math.log2(2 * row["found"])  # up to twice the answer, as docs/figures.md says
    assert row["runs"] <= doublings + 3, row["sizes"]
    assert row["errors"] <= doublings / 2 + 2, row["sizes"]
