"""The digits of the demo."""

from __future__ import annotations

from collections import Counter

import torch

from autobatch.workload.demo import digits

PER_DIGIT = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
"""As published for this dataset: https://doi.org/10.24432/C50P49, the file ``optdigits.tes``."""


def test_the_digits_are_those_of_the_published_dataset() -> None:
    training, held_out = digits()
    assert (len(training) + len(held_out), len(held_out)) == (1797, 360)
    labels = Counter(int(label) for part in (training, held_out) for _, label in part)
    assert [labels[digit] for digit in range(10)] == PER_DIGIT
    images = torch.stack([image for image, _ in training])
    assert images.shape[1:] == (1, 8, 8)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert torch.equal(images * 16, (images * 16).round())
