"""The page of an estimate."""

from __future__ import annotations

import msgspec

from autobatch.core.units import GiB
from autobatch.report.estimate_page import estimate_page
from autobatch.report.result import Estimates
from tests.support.sample_run import an_estimate

ONE = an_estimate(memory={"activations": GiB, "gradients": 0}, modules={"layers.<0>": GiB})
NONE = msgspec.structs.replace(ONE, profile="t4", fits=False, micro_batch=0, plan=None)
FOUND = Estimates(estimates=[ONE, NONE], notes=["no flash attention on t4"])


def test_every_gpu_has_a_row_with_its_step_and_what_is_left_over() -> None:
    page = estimate_page(FOUND, "digits")
    for wanted in (
        "Predicted to fit on 1 of 2 GPUs", "rtx-4090", "12 micro-batches (4 × 86, 8 × 85)", "1.00 GiB",
        "does not fit", "no flash attention on t4", "layers.&lt;0&gt;",
    ):  # fmt: skip
        assert wanted in page, wanted
    assert "<script" not in page
    assert page.count("<details>") == 2
