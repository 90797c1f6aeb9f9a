"""The gradient noise scale: is the target batch sensible? Almost free with accumulation.

A gradient over B samples has E|G_B|² = |G|² + tr(Σ)/B, with the true gradient G and the covariance Σ of the
gradient of one sample. The norms of a window's first micro-batch and of the whole window give both:

    |G|²  =  (B |G_B|² − b |G_b|²) ÷ (B − b)            tr(Σ)  =  (|G_b|² − |G_B|²) ÷ (1/b − 1/B)

Each is unbiased, whatever the two have in common; their ratio is not, so both are averaged over windows first
and then divided: B_simple = tr(Σ) ÷ |G|². At B = B_simple a run takes twice the samples of a tiny batch and
twice the steps of a huge one (McCandlish et al. 2018, arXiv:1812.06162, appendix A and equation 2.11).

After its first micro-batch a window's gradient is that micro-batch's own, so its norm costs one pass over the
gradients, in windows where `NoiseScale.due` says so. Nothing is read from the device until the window's end.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from autobatch.core.records import Record

LEAST_BATCHES = 50
"""Measured windows below which nothing is claimed."""


KEPT_BATCHES = 500
"""Measured windows that an estimate is made of: the noise scale grows while a run goes on."""


NEAR = 4.0
"""Batches within this factor of the noise scale are near it."""


_Z = 1.959964
"""Of the normal distribution, for 95 %."""


Verdict = Literal["unknown", "below", "near", "above", "unclear"]


class NoiseEstimate(Record, frozen=True, kw_only=True):
    """What the measured windows say; in the unit of the sizes that were observed (samples, tokens)."""

    batches: int
    """Measured windows that it rests on."""
    noise_scale: float | None = None
    """B_simple; ``None``: unknown, for too few windows or because the noise hides the gradient."""
    low: float | None = None
    """Lower end of the 95 % band."""
    high: float | None = None
    """Upper end; ``None`` where ``low`` is known: there is none that the measurements could tell."""
    gradient_norm_sq: float | None = None
    """Estimate of |G|²."""
    trace: float | None = None
    """Estimate of tr(Σ)."""

    def verdict(self, batch: float) -> Verdict:
        """Where a batch stands; ``unclear`` where the band is too wide to say."""
        if self.low is None:
            return "unknown"
        high = math.inf if self.high is None else self.high
        if batch * NEAR < self.low:
            return "below"
        if batch > NEAR * high:
            return "above"
        return "near" if high <= batch * NEAR and batch <= NEAR * self.low else "unclear"

    def sentence(self, batch: int) -> str:
        """Say in plain words whether a target batch is sensible."""
        if self.low is None:
            return (
                f"The gradient noise scale is unknown: {self.batches:,} windows were measured, and "
                f"{LEAST_BATCHES} of at least two micro-batches are needed."
            )
        top = "without an upper end" if self.high is None else f"to {_round(self.high)}"
        about = "is not known" if self.noise_scale is None else f"is about {_round(self.noise_scale)}"
        band = f"{_round(self.low)} {top}"
        words = f"The gradient noise scale {about} (95 %: {band}; {self.batches:,} windows)"
        return f"{words}; the target batch of {batch:,} {self._advice(batch)}."

    def _advice(self, batch: int) -> str:
        kind = self.verdict(batch)
        if kind == "unclear":
            return "may or may not suit it: the band is too wide to say"
        if kind == "below":
            return (
                "is much smaller: a larger one would take almost proportionally fewer optimizer steps "
                "for nearly the same samples"
            )
        if kind == "above":
            return "is much larger: a smaller one would need far fewer samples for hardly more steps"
        assert self.noise_scale is not None
        return (
            f"is near it, which is sensible: about {1 + batch / self.noise_scale:.2g} times the samples that "
            f"tiny batches need, and {1 + self.noise_scale / batch:.2g} times the steps of huge ones"
        )


@dataclass(kw_only=True)
class NoiseScale:
    """Collects what windows measured.

    A loop feeds it so, with no more than one extra reading a measured window::

        if noise.due(window.index):  # after the first micro-batch
            first = norm_of(gradients) * divisor / count_of_the_first / loss_scale
        ...                          # after the window, with what its step measured anyway
        noise.observe(first**2, count_of_the_first, result.grad_norm**2, result.count)

    The mathematics is that of plain SGD, with samples drawn at random; for Adam the figure is a guide.
    """

    every: int = 4
    """Windows from one measurement to the next."""
    _pairs: deque[tuple[float, float]] = field(
        init=False, repr=False, default_factory=lambda: deque(maxlen=KEPT_BATCHES)
    )
    """(|G|², tr(Σ)) of each measured window."""

    def due(self, index: int) -> bool:
        """Whether window ``index`` is to be measured."""
        return index % self.every == 0

    def observe(
        self, first_norm_sq: float, first_samples: float, batch_norm_sq: float, batch_samples: float
    ) -> None:
        """Take in one window; what cannot tell anything is passed over.

        Args:
            first_norm_sq: squared 2-norm of the mean gradient over the first micro-batch.
            first_samples: what that mean is over: samples, or the items of a `Loss`.
            batch_norm_sq: squared 2-norm of the mean gradient over the whole window, before clipping.
            batch_samples: what that mean is over, in the same unit.
        """
        known = math.isfinite(first_norm_sq) and math.isfinite(batch_norm_sq)
        if not (known and 0 < first_samples < batch_samples):
            return
        difference = batch_samples - first_samples
        gradient = (batch_samples * batch_norm_sq - first_samples * first_norm_sq) / difference
        trace = (first_norm_sq - batch_norm_sq) * first_samples * batch_samples / difference
        self._pairs.append((gradient, trace))

    def estimate(self) -> NoiseEstimate:
        """What the measured windows say by now."""
        count = len(self._pairs)
        if count < LEAST_BATCHES:
            return NoiseEstimate(batches=count)
        gradients, traces = zip(*self._pairs, strict=True)
        gradient, trace = math.fsum(gradients) / count, math.fsum(traces) / count
        low, high = _band(gradients, traces)
        return NoiseEstimate(
            batches=count,
            noise_scale=max(trace, 0.0) / gradient if gradient > 0 else None,
            low=low,
            high=None if math.isinf(high) else high,
            gradient_norm_sq=gradient,
            trace=trace,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        return {"every": self.every, "pairs": [list(pair) for pair in self._pairs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.every = int(state["every"])
        self._pairs = deque(((float(one), float(two)) for one, two in state["pairs"]), maxlen=KEPT_BATCHES)


def _band(gradients: tuple[float, ...], traces: tuple[float, ...]) -> tuple[float, float]:
    """The 95 % band of the ratio of two means (Fieller 1954): all ratios that the means do not contradict.

    Unlike a delta method it says so where the gradient is not told from 0: its upper end is infinite.
    """
    count = len(gradients)
    g, s = math.fsum(gradients) / count, math.fsum(traces) / count
    scale = _Z * _Z / (count * (count - 1))
    gg = scale * math.fsum((one - g) ** 2 for one in gradients)
    ss = scale * math.fsum((one - s) ** 2 for one in traces)
    gs = scale * math.fsum((one - g) * (two - s) for one, two in zip(gradients, traces, strict=True))
    # The ratios R with (s − R g)² ≤ z² var(s − R g): a quadratic a R² − 2 b R + c ≤ 0.
    a, b, c = g * g - gg, s * g - gs, s * s - ss
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and g > 0:
        return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    # No upper end; 0 is among them unless the noise itself is told from 0.
    if c <= 0 or s <= 0 or b * b <= a * c:
        return 0.0, math.inf
    return max((b - root) / a, (b + root) / a, 0.0), math.inf


def _round(value: float) -> str:
    """Two or three digits are all that is known."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"
