"""The page of an estimate."""

from __future__ import annotations

import msgspec

from autobatch.core.records.plan import SizeCut
from autobatch.core.records.probe import LengthLimit
from autobatch.core.units import GiB
from autobatch.report.estimate_page import estimate_page
from autobatch.report.estimate_table import size_lines
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


def by_size(**changes):
    lengths = [
        LengthLimit(size=size, micro_batch=m, upper_bound_by="replay", padded_size=size * m)
        for size, m in ((16.0, 90), (32.0, 90), (512.0, 4))
    ]
    cut = SizeCut(
        sizes=[512.0], micro_batches=[4], limits_by="replay", padding=1.25, padding_by_count=2.5, steps=9.5,
        steps_by_count=12.0,
    )  # fmt: skip
    return an_estimate(lengths=lengths, size_unit="tokens", size_cut=cut, **changes)


def test_samples_of_different_sizes_have_a_curve_and_the_padding_of_both_splits() -> None:
    page = estimate_page(Estimates(estimates=[by_size()], notes=[]), "text")
    for wanted in ("Tokens per micro-batch", "2,880", "Padded and real", "2.50"):
        assert wanted in page, wanted


def test_lines_name_the_largest_size_of_each_limit_and_the_padding() -> None:
    lines = list(size_lines(by_size()))
    assert len(lines) == 4
    assert lines[1].split() == ["90", "up", "to", "32", "2,880", "tokens", "per", "micro-batch"]
    assert "1.25" in lines[-1]
    assert "2.50" in lines[-1]
    assert list(size_lines(an_estimate())) == []
