"""The rule by which another learning rate replaces the default."""

from __future__ import annotations

import pytest

from autobatch.core.records.tuning import LrComparison
from autobatch.tuning.compare_rates import MINIMUM_GAIN, decide, gain_over
from autobatch.tuning.lr_trial import LrTrialResult


@pytest.mark.parametrize(
    ("gains", "better"),
    [
        ((0.3, 0.31, 0.29), True),
        ((1.0, 1.0, 1.0), True),
        ((0.3, 0.31, -0.01), False),
        ((0.5, 0.02, 0.01), False),
        ((MINIMUM_GAIN / 2,) * 3, False),
        ((0.3,), False),
        ((), False),
    ],
)
def test_only_a_gain_beyond_the_noise_replaces_the_default(gains: tuple[float, ...], better: bool) -> None:
    pairs = [LrComparison(seed=0, default_loss=1.0, other_loss=1.0, gain=gain) for gain in gains]
    assert decide(pairs) is better


def test_a_gain_is_a_share_of_the_loss_reduction_at_any_scale() -> None:
    for scale, shift in ((1.0, 0.0), (100.0, -500.0)):
        default, other = (
            LrTrialResult(0.1, scale * loss + shift, scale * 4 + shift, None) for loss in (2.0, 1.0)
        )
        assert gain_over(default, other) == pytest.approx(1 / 3)
        assert gain_over(other, default) == pytest.approx(-0.5)
    gone = LrTrialResult(0.1, None, None, "it diverged")
    assert (gain_over(gone, other), gain_over(other, gone)) == (1.0, -1.0)
