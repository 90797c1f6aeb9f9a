"""Gradient noise scale: a guide to the target batch, at almost no cost with accumulation.

A gradient over B samples has E|G_B|² = |G|² + tr(Σ)/B, with the true gradient G and the covariance Σ of the
gradient of one sample. The gradient norms of a first micro-batch (b samples) and of its batch give both:

    |G|²  =  (B |G_B|² − b |G_b|²) ÷ (B − b)            tr(Σ)  =  (|G_b|² − |G_B|²) ÷ (1/b − 1/B)

Each is unbiased, although the two norms are correlated. Their ratio is biased, so both are averaged over
batches before they are divided: B_simple = tr(Σ) ÷ |G|². At B = B_simple a run takes twice the samples of a
tiny batch and twice the steps of a huge one (McCandlish et al. 2018, arXiv:1812.06162, appendix A and
equation 2.11).

After the first micro-batch the accumulated gradient is its own, so its norm costs one pass over the
gradients. Nothing is read from the device before the end of the step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from autobatch.core.records import Record

MIN_BATCHES = 50
"""Fewest measured batches that give an estimate."""
EARLY_BATCHES = 256
"""Batches after which the scale is measured less often, because it changes slowly then."""
LATE_FACTOR = 4
"""Factor by which it is then measured less often."""
KEPT_BATCHES = 500
"""Most recent measured batches that an estimate uses; the noise scale grows during a run."""
NEAR_FACTOR = 4.0
"""Largest ratio of a target batch and a noise scale that are near each other."""
_Z = 1.959964
"""Quantile of the normal distribution for a 95 % interval."""


class NoiseEstimate(Record, frozen=True, kw_only=True):
    """Estimate from the measured batches, in the unit of their sizes (samples or tokens)."""

    batches: int
    """Measured batches that the estimate uses."""
    noise_scale: float | None = None
    """B_simple; None if unknown: too few batches, or the noise hides the gradient."""
    low: float | None = None
    """Lower end of the 95 % interval; None if unknown."""
    high: float | None = None
    """Upper end of the 95 % interval; None if unbounded, or if ``low`` is unknown."""

    def sentence(self, target_batch: int) -> str:
        """Describe the noise scale and what it means for a target batch; empty if it is unknown."""
        if self.low is None:
            return ""
        top = "without an upper end" if self.high is None else f"to {_round(self.high)}"
        about = "is unknown" if self.noise_scale is None else f"is about {_round(self.noise_scale)}"
        high = math.inf if self.high is None else self.high
        is_near = high <= target_batch * NEAR_FACTOR and target_batch <= NEAR_FACTOR * self.low
        advice = "may or may not be near it: the interval is too wide"
        if target_batch * NEAR_FACTOR < self.low:
            advice = (
                "is much smaller: a larger one would take almost proportionally fewer optimizer steps "
                "for nearly the same samples"
            )
        elif target_batch > NEAR_FACTOR * high:
            advice = (
                "is much larger: a smaller one would take far fewer samples for hardly more optimizer steps"
            )
        elif is_near and self.noise_scale is not None:
            advice = (
                f"is near it: it takes about {1 + target_batch / self.noise_scale:.2g} times the samples of "
                f"a tiny batch and {1 + self.noise_scale / target_batch:.2g} times the steps of a huge one"
            )
        return (
            f"The gradient noise scale {about} (95 %: {_round(self.low)} {top}, from {self.batches:,} "
            f"batches). The target batch of {target_batch:,} {advice}."
        )


@dataclass(kw_only=True)
class NoiseScale:
    """Measurements of the gradient noise, one pair per measured batch.

    The theory holds for plain SGD on samples drawn at random. For Adam the value is a guide.
    """

    every: int = 4
    """Batches from one measurement to the next, at first."""
    _pairs: deque[tuple[float, float]] = field(
        init=False, repr=False, default_factory=lambda: deque(maxlen=KEPT_BATCHES)
    )
    """(|G|², tr(Σ)) of each measured batch."""

    def is_due(self, index: int) -> bool:
        """Return whether to measure batch ``index``."""
        return index % (self.every if index < EARLY_BATCHES else LATE_FACTOR * self.every) == 0

    def observe(
        self, first_norm_sq: float, first_samples: float, batch_norm_sq: float, batch_samples: float
    ) -> None:
        """Add a batch; norms that are not finite and batches of one micro-batch are ignored.

        Args:
            first_norm_sq: squared 2-norm of the mean gradient over the first micro-batch.
            first_samples: number of samples of that mean, or of the items that a `Loss` counts.
            batch_norm_sq: squared 2-norm of the mean gradient over the whole batch, before clipping.
            batch_samples: number of samples or items of that mean, in the same unit.
        """
        is_finite = math.isfinite(first_norm_sq) and math.isfinite(batch_norm_sq)
        if not (is_finite and 0 < first_samples < batch_samples):
            return
        difference = batch_samples - first_samples
        gradient = (batch_samples * batch_norm_sq - first_samples * first_norm_sq) / difference
        trace = (first_norm_sq - batch_norm_sq) * first_samples * batch_samples / difference
        self._pairs.append((gradient, trace))

    def estimate(self) -> NoiseEstimate:
        """Estimate the noise scale from the measured batches."""
        count = len(self._pairs)
        if count < MIN_BATCHES:
            return NoiseEstimate(batches=count)
        gradient, trace = (math.fsum(values) / count for values in zip(*self._pairs, strict=True))
        low, high = _interval([*self._pairs], gradient, trace)
        noise_scale = max(trace, 0.0) / gradient if gradient > 0 else None
        return NoiseEstimate(batches=count, noise_scale=noise_scale, low=low, high=high)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run continues from."""
        return {"every": self.every, "pairs": [list(pair) for pair in self._pairs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.every = int(state["every"])
        pairs = ((float(gradient), float(trace)) for gradient, trace in state["pairs"])
        self._pairs = deque(pairs, maxlen=KEPT_BATCHES)


def _interval(pairs: list[tuple[float, float]], g: float, s: float) -> tuple[float, float | None]:
    """Return the 95 % interval of the ratio of the means ``s`` and ``g`` of pairs (Fieller 1954).

    Unlike the delta method, it has no upper end if the gradient does not differ significantly from 0.
    """
    scale = _Z * _Z / (len(pairs) * (len(pairs) - 1))
    gg = scale * math.fsum((gradient - g) ** 2 for gradient, _ in pairs)
    ss = scale * math.fsum((trace - s) ** 2 for _, trace in pairs)
    gs = scale * math.fsum((gradient - g) * (trace - s) for gradient, trace in pairs)
    # The ratios R with (s − R g)² ≤ z² var(s − R g): a quadratic a R² − 2 b R + c ≤ 0.
    a, b, c = g * g - gg, s * g - gs, s * s - ss
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and g > 0:
        return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    # No upper end. The interval holds 0 unless the noise differs significantly from 0.
    if c <= 0 or s <= 0 or b * b <= a * c:
        return 0.0, None
    return max((b - root) / a, (b + root) / a, 0.0), None


def _round(value: float) -> str:
    """Format a value with two or three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"
