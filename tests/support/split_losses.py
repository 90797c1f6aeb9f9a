"""Losses that are wrong in micro-batches, each beside its right form; most of them with random draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, normalize

from autobatch import Loss, WholeBatchLoss
from autobatch.training.split_check import examine, first_samples
from autobatch.workload.order import GlobalBatchSampler
from tests.support.training import IGNORED, Rows, language_model, network, points


def examined(setup: Any, micro_batch: int = 8) -> Any:
    """Return what the check finds about batches of three micro-batches."""
    count = len(setup.workload.train_data)
    sampler = GlobalBatchSampler(samples=count, target_batch=3 * micro_batch, seed=0, steps=3)
    return examine(setup, micro_batch, first_samples(sampler))


MASK = 0
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 9.0])


def texts(samples: int = 200) -> Rows:
    generator = torch.Generator().manual_seed(3)
    return Rows(torch.randint(1, 7, (samples, 12), generator=generator))


def mask_tokens(samples: list[tuple[Tensor]]) -> dict[str, Tensor]:
    """Hide 15 % of the tokens at random, as the collate function of a masked language model does."""
    ids = torch.stack([sample[0] for sample in samples])
    hidden = torch.rand(ids.shape) < 0.15
    return {"ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, IGNORED)}


def masked_mean(model, batch):
    """Return the mean over the hidden tokens of the batch, and take an entry out of the batch."""
    labels = batch.pop("labels")
    return cross_entropy(model(batch["ids"]).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def masked_sum(model, batch):
    labels = batch.pop("labels")
    scores = model(batch["ids"]).flatten(0, 1)
    total = cross_entropy(scores, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return Loss(total, (labels != IGNORED).sum())


def few_short_texts() -> list[tuple[Tensor, Tensor]]:
    """Make 300 texts of 12 tokens, of which 2 % have 3."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index in range(300):
        length = 3 if index % 50 == 17 else 12
        ids = torch.randint(1, 7, (length,), generator=generator)
        found.append((ids, ids.roll(1)))
    return found


def pad(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    ids, labels = zip(*samples, strict=True)
    pad_one = nn.utils.rnn.pad_sequence
    return {
        "ids": pad_one(list(ids), batch_first=True),
        "labels": pad_one(list(labels), batch_first=True, padding_value=IGNORED),
    }


def rare_class() -> Rows:
    """Make 400 points, of which 2 % are of class 2."""
    data = points(400)
    labels = data.columns[1] % 2
    labels[23::50] = 2
    return Rows(data.columns[0], labels)


def weighted_mean(model, batch):
    scores = model(batch[0])
    return cross_entropy(scores, batch[1], weight=CLASS_WEIGHTS.to(scores.dtype))


def weighted_sum(model, batch):
    scores = model(batch[0])
    weight = CLASS_WEIGHTS.to(scores.dtype)
    return Loss(cross_entropy(scores, batch[1], weight=weight, reduction="sum"), weight[batch[1]].sum())


def dropped(model, batch):
    """Return a batch with dropout on its inputs, which does not end in eval mode."""
    return dropout(batch[0], 0.3), batch[1]


def weighted_mean_with_dropout(model, batch):
    return weighted_mean(model, dropped(model, batch))


def weighted_sum_with_dropout(model, batch):
    return weighted_sum(model, dropped(model, batch))


class Views(Rows):
    """Two augmented views of each point, drawn by Python, NumPy and torch."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = self.columns[0][index]
        return self._view(point), self._view(point)

    def _view(self, point: Tensor) -> Tensor:
        return point * random.uniform(0.8, 1.2) + float(np.random.normal()) / 9 + torch.randn(5) / 9


def info_nce(_, rows):
    one, other = normalize(rows[0]), normalize(rows[1])
    return cross_entropy(one @ other.T * 5, torch.arange(len(one)))


def both_views(model, batch):
    return model(batch[0]), model(batch[1])


def contrast(model, batch):
    return info_nce(model, both_views(model, batch))


def noisy_views(model, batch):
    """Draw two views in the forward pass."""
    return tuple(model(batch[0] + torch.randn_like(batch[0]) / 9) for _ in range(2))


def contrast_noisy_views(model, batch):
    return info_nce(model, noisy_views(model, batch))


def noisy_error(model, batch):
    """Return the error of each sample beside noise, as a diffusion model has it."""
    noise = torch.rand(batch[0].shape, dtype=batch[0].dtype)
    level = torch.randint(1, 5, (len(batch[0]), 1))
    return cross_entropy(model(batch[0] + noise / level), batch[1], reduction="none")


def noisy_sum(model, batch):
    return noisy_error(model, batch).sum()


def noisy_mean(model, batch):
    return noisy_error(model, batch).mean()


MASKED: dict[str, Any] = {"model": language_model, "train_data": texts(), "collate": mask_tokens}
SHORT: dict[str, Any] = {"model": language_model, "train_data": few_short_texts(), "collate": pad}
RARE: dict[str, Any] = {"train_data": rare_class()}
VIEWS: dict[str, Any] = {"train_data": Views(points(60, dtype=torch.float32).columns[0])}
VIEWS["model"] = lambda: network(torch.float32)

SCALE, MIXED, SUMMED = (
    "a mean over something else than samples",
    "several samples at once",
    "a sum over the batch",
)
PAIRS: dict[str, tuple[dict[str, Any], Any, Any, str]] = {
    "masked tokens": (MASKED, masked_mean, masked_sum, SCALE),
    "class weights": (RARE, weighted_mean, weighted_sum, SCALE),
    "few short texts": (SHORT, masked_mean, masked_sum, SCALE),
    "augmented views": (VIEWS, contrast, WholeBatchLoss(represent=both_views, loss=info_nce), MIXED),
    "views drawn in the forward pass": (
        {},
        contrast_noisy_views,
        WholeBatchLoss(represent=noisy_views, loss=info_nce),
        MIXED,
    ),
    "a sum with noise": ({}, noisy_sum, noisy_mean, SUMMED),
    "class weights with dropout": (RARE, weighted_mean_with_dropout, weighted_sum_with_dropout, SCALE),
}
"""Fields of a workload, its wrong loss, its right loss, and the cause that a message names."""
