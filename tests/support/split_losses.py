"""Losses that are wrong in micro-batches, each beside its right form; most of them with random draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from autobatch import Loss, WholeBatchLoss
from autobatch.training.split_check import examine, first_samples
from autobatch.workload.order import GlobalBatchSampler
from tests.support.ragged import pad
from tests.support.training import (
    IGNORED,
    Rows,
    language_model,
    network,
    points,
    token_loss,
    whole_tokens,
)


def examined(setup: Any, micro_batch: int = 8) -> Any:
    """Return what the check finds about batches of three micro-batches."""
    count = len(setup.workload.train_data)
    sampler = GlobalBatchSampler(samples=count, target_batch=3 * micro_batch, seed=0, steps=3)
    return examine(setup, micro_batch, first_samples(sampler))


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 9.0])


def texts(short: int) -> list[tuple[Tensor, Tensor]]:
    """Make 300 texts of 12 tokens, of which 2 % have fewer."""
    draw = torch.Generator().manual_seed(5)
    rows = [torch.randint(1, 7, (short if at % 50 == 17 else 12,), generator=draw) for at in range(300)]
    return [(ids, ids.roll(1)) for ids in rows]


def mask_tokens(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Hide 15 % of the tokens at random, as the collate function of a masked language model does."""
    ids = torch.stack([sample[0] for sample in samples])
    hidden = torch.rand(ids.shape) < 0.15
    return [ids.masked_fill(hidden, 0), ids.masked_fill(~hidden, IGNORED)]


def taking(loss: Any) -> Any:
    """Return a loss that takes its labels out of the batch, as some do."""
    return lambda model, batch: loss(model, (batch[0], batch.pop()))


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


class Views(Rows):
    """Two augmented views of each point, drawn by Python, NumPy and torch."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        point = self.columns[0][index]
        noise = torch.randn(2, 5) / 9 + float(np.random.normal()) / 9
        return tuple(point * random.uniform(0.8, 1.2) + noise)


def both_views(model, batch):
    return torch.cat([model(view) for view in batch], 1)


def info_nce(_, rows):
    one, other = (normalize(view) for view in rows.chunk(2, 1))
    return cross_entropy(one @ other.T * 5, torch.arange(len(one)))


def noisy_error(model, batch):
    """Return the error of each sample beside noise, as a diffusion model has it."""
    noise = torch.rand(batch[0].shape, dtype=batch[0].dtype)
    level = torch.randint(1, 5, (len(batch[0]), 1))
    return cross_entropy(model(batch[0] + noise / level), batch[1], reduction="none")


SCALE, MIXED, SUMMED = (
    "a mean over something else than samples",
    "several samples at once",
    "a sum over the batch",
)
PAIRS: dict[str, tuple[dict[str, Any], Any, Any, str]] = {
    "masked tokens": (
        {"model": language_model, "train_data": texts(12), "collate": mask_tokens},
        taking(whole_tokens),
        taking(token_loss),
        SCALE,
    ),
    "few short texts": (
        {"model": language_model, "train_data": texts(3), "collate": pad},
        whole_tokens,
        token_loss,
        SCALE,
    ),
    "class weights": ({"train_data": rare_class()}, weighted_mean, weighted_sum, SCALE),
    "augmented views": (
        {
            "model": lambda: network(torch.float32),
            "train_data": Views(points(60, dtype=torch.float32).columns[0]),
        },
        lambda model, batch: info_nce(model, both_views(model, batch)),
        WholeBatchLoss(represent=both_views, loss=info_nce),
        MIXED,
    ),
    "a sum with noise": (
        {},
        lambda model, batch: noisy_error(model, batch).sum(),
        lambda model, batch: noisy_error(model, batch).mean(),
        SUMMED,
    ),
}
"""Fields of a workload, its wrong loss, its right loss, and the cause that a message names."""
