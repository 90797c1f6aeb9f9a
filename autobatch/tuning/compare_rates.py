"""The comparison of learning rates: the rule by which another one replaces the default.

The best of many noisy figures is too good to be true. So it runs again beside the default on batches that
other seeds draw. It replaces the default only if it is better every time, and on average beyond the noise
(Student's t, one-sided, 97.5 %). A gain is a share of the loss reduction, because a loss has no zero of its
own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autobatch.core.records.tuning import LrComparison
from autobatch.tuning.compare import STUDENT
from autobatch.tuning.lr_trial import REACH, LrTrialResult

MINIMUM_GAIN = 0.02
"""Share of the loss reduction that a learning rate must gain over the default to replace it."""
EDGE_FACTOR = 1.5
"""Within this factor of a bound of the range, the best may lie beyond."""


def decide(pairs: Sequence[LrComparison]) -> bool:
    """Return whether the other learning rate is better in every pair, and on average beyond the noise."""
    gains = [pair.gain for pair in pairs]
    if len(gains) < 2 or not all(gain > 0 for gain in gains):
        return False
    mean = statistics.fmean(gains)
    half = STUDENT[len(gains) - 1] * statistics.stdev(gains) / math.sqrt(len(gains))
    return mean > MINIMUM_GAIN and mean - half > 0


def gain_over(default: LrTrialResult, other: LrTrialResult) -> float:
    """Return the share of the loss reduction that a learning rate gains over the default.

    Returns:
        1 if only the default does not train; -1 if the other does not, and never less.
    """
    if other.failure is not None or other.loss is None or other.first is None or other.loss >= other.first:
        return -1.0
    if default.failure is not None or default.loss is None:
        return 1.0
    return max(-1.0, (default.loss - other.loss) / (other.first - other.loss))


def compare(seed: int, default: LrTrialResult, other: LrTrialResult) -> LrComparison:
    """Return the comparison of two learning rates on the data of a seed."""
    return LrComparison(
        seed=seed, default_loss=default.loss, other_loss=other.loss, gain=gain_over(default, other)
    )


def explain(
    default: float,
    finished: Sequence[LrTrialResult],
    best: LrTrialResult | None,
    pairs: Sequence[LrComparison],
) -> list[str]:
    """Return notes for the user on the answer, one per line."""
    kept = f"kept learning rate {default:.3g}"
    known = next((one for one in finished if one.rate == default), None)
    if known is None:
        return [f"{kept}: its own trial was not run"]
    if best is None:
        return [f"{kept}: none of {len(finished)} learning rates trained. The default one: {known.failure}"]
    if best.rate == default:
        return [f"{kept}: no other one reached a lower loss than this default"]
    if not decide(pairs):
        gains = [pair.gain for pair in pairs]
        shown = ", ".join(f"{100 * gain:+.1f} %" for gain in gains)
        is_small = statistics.fmean(gains) <= MINIMUM_GAIN
        reason = f"below the required {100 * MINIMUM_GAIN:+g} %" if is_small else "within noise"
        return [
            f"{kept}: {best.rate:.3g} changed the loss reduction by {shown} on {len(gains)} data orders, "
            f"{reason}"
        ]
    if max(best.rate / default, default / best.rate) > REACH / EDGE_FACTOR:
        return [
            f"learning rate {best.rate:.3g} is at the edge of the tried range, {default / REACH:.3g} to "
            f"{default * REACH:.3g}. A better one may lie beyond it"
        ]
    return []
