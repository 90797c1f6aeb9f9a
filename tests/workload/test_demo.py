"""The demo: its digits, and a network that learns them."""

from __future__ import annotations

from collections import Counter

import torch

from autobatch.workload.demo import digits, workload

PER_DIGIT = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
"""As published for this dataset: https://doi.org/10.24432/C50P49, the file ``optdigits.tes``."""


def test_the_digits_are_those_of_the_published_dataset() -> None:
    training, held_out = digits()
    assert len(training) + len(held_out) == 1797
    assert len(held_out) == 360
    labels = Counter(int(label) for part in (training, held_out) for _, label in part)
    assert [labels[digit] for digit in range(10)] == PER_DIGIT
    images = torch.stack([image for image, _ in training])
    assert images.shape[1:] == (1, 8, 8)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert torch.equal(images * 16, (images * 16).round())


def test_the_network_learns_the_digits_in_a_few_steps() -> None:
    demo = workload()
    torch.manual_seed(0)
    model = demo.model()
    assert sum(p.numel() for p in model.parameters()) == 38_282
    optimizer = demo.optimizer(model.parameters(), demo.learning_rate)
    schedule = demo.schedule(optimizer, 10)
    training, held_out = (
        torch.utils.data.default_collate(list(data)) for data in (demo.train_data, demo.validation_data)
    )
    before = demo.metrics(model, held_out)["accuracy"]
    for _ in range(10):
        optimizer.zero_grad()
        demo.loss(model, training).backward()
        optimizer.step()
        schedule.step()
    after = demo.metrics(model, held_out)["accuracy"]
    assert before < 0.3 < 0.6 < after
    assert optimizer.param_groups[0]["lr"] < demo.learning_rate / 2
