"""The noise scale of problems with a known answer."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from autobatch.training.noise_scale import NoiseEstimate, NoiseScale


def of_norms(rows) -> NoiseEstimate:
    noise = NoiseScale()
    for row in rows:
        noise.observe(*row)
    return noise.estimate()


def drawn(generator, *, truth: torch.Tensor, spread: float, first: int, batch: int, batches: int):
    """Draw norms for Gaussian sample gradients, whose noise scale is dimensions × spread² ÷ |truth|²."""
    shape = (batches, truth.numel())
    head = truth + spread / math.sqrt(first) * torch.randn(shape, dtype=torch.float64, generator=generator)
    rest = batch - first
    tail = truth + spread / math.sqrt(rest) * torch.randn(shape, dtype=torch.float64, generator=generator)
    whole = (first * head + rest * tail) / batch
    norms = zip(head.square().sum(1).tolist(), whole.square().sum(1).tolist(), strict=True)
    return [(one, first, other, batch) for one, other in norms]


def test_the_estimate_is_unbiased_over_all_possible_batches() -> None:
    """Over every ordered batch of 4 of 3 samples, drawn with replacement, the mean is exact."""
    samples = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]], dtype=torch.float64)
    truth = samples.mean(0)
    trace = (samples - truth).square().sum(1).mean().item()
    rows = []
    for ids in itertools.product(range(3), repeat=4):
        batch = samples[list(ids)]
        rows.append((batch[0].square().sum().item(), 1, batch.mean(0).square().sum().item(), 4))
    found = of_norms(rows)
    assert found.noise_scale == pytest.approx(trace / truth.square().sum().item(), rel=1e-12)


@pytest.mark.parametrize(("first", "batch"), [(8, 32), (64, 512), (2, 1024)])
@pytest.mark.parametrize("batches", [50, 200])
def test_the_interval_holds_the_truth_in_95_of_100_runs(first: int, batch: int, batches: int) -> None:
    generator = torch.Generator().manual_seed(first + batches)
    truth = torch.full((40,), 0.25, dtype=torch.float64)
    exact = 40 * 2.0**2 / truth.square().sum().item()
    held = 0
    for _ in range(300):
        found = of_norms(drawn(generator, truth=truth, spread=2.0, first=first, batch=batch, batches=batches))
        held += found.low <= exact <= (math.inf if found.high is None else found.high)
    # 285 expected, with a standard deviation of 3.8; skewed estimates of 50 batches cost a little.
    assert 268 <= held <= 298


def test_a_gradient_that_the_noise_hides_has_no_upper_end() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = drawn(
        generator, truth=torch.zeros(40, dtype=torch.float64), spread=1.0, first=4, batch=16, batches=100
    )
    found = of_norms(rows)
    assert found.high is None
    assert found.low > 16
    assert "without an upper end" in found.sentence(16)
    assert "is much smaller" in found.sentence(1)
    assert "the interval is too wide" in found.sentence(10**9)


def test_too_few_batches_give_no_estimate() -> None:
    rows = [(78.0, 8, 12.375, 64)] * 49
    found = of_norms(rows)
    assert found == NoiseEstimate(batches=49)
    assert found.sentence(64) == ""


@pytest.mark.parametrize(
    "row", [(1.0, 8, 1.0, 8), (math.nan, 8, 1.0, 64), (1.0, 8, math.inf, 64), (1.0, 0, 1.0, 64)]
)
def test_norms_without_information_are_ignored(row) -> None:
    assert of_norms([row] * 60).batches == 0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (40, "is much smaller: a larger one"),
        (100, "about 1.5 times the samples of a tiny batch and 3 times the steps of a huge"),
        (200, "about 2 times the samples of a tiny batch and 2 times the steps of"),
        (1200, "is much larger: a smaller one"),
    ],
)  # fmt: skip
def test_the_sentence_compares_the_target_batch_with_the_noise_scale(batch: int, words: str) -> None:
    found = NoiseEstimate(batches=80, noise_scale=200.0, low=180.0, high=230.0)
    sentence = found.sentence(batch)
    assert sentence.startswith(
        "The gradient noise scale is about 200 (95 %: 180 to 230, from 80 batches). The target"
    )
    assert words in sentence


def test_a_restored_state_continues_the_same_estimate() -> None:
    generator = torch.Generator().manual_seed(4)
    rows = drawn(
        generator, truth=torch.ones(5, dtype=torch.float64), spread=3.0, first=4, batch=16, batches=700
    )
    noise, other = NoiseScale(every=2), NoiseScale()
    for row in rows[:350]:
        noise.observe(*row)
    other.load_state_dict(noise.state_dict())
    assert [index for index in range(5) if other.is_due(index)] == [0, 2, 4]
    for one in (noise, other):
        for row in rows[350:]:
            one.observe(*row)
    assert other.estimate() == noise.estimate() == of_norms(rows[-500:])
