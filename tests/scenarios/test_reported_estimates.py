"""Estimates for several GPUs: each has the answer that it has alone."""

from __future__ import annotations

import pytest

import autobatch
from tests.support.step_workloads import transformer


@pytest.mark.program
def test_the_answer_for_a_gpu_does_not_depend_on_the_others() -> None:
    """Only one of these GPUs has flash attention."""

    def limits(*gpus: str) -> dict[str, tuple[int, int]]:
        options = {"memory_budget": "64MiB", "max_micro_batch": 4096, "precision": "bf16"}
        found = autobatch.estimate(transformer(), profile=list(gpus), **options)
        return {one.profile: (one.micro_batch, one.peak_reserved_bytes) for one in found.estimates}

    gpus = ("a100-40gb", "t4")
    alone = limits(gpus[0]) | limits(gpus[1])
    assert alone[gpus[0]] != alone[gpus[1]], "the attention of these GPUs takes the same memory"
    assert limits(*gpus) == alone
