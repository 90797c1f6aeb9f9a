"""Losses that are wrong in micro-batches, each beside its right form; most of them with random draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from autobatch.planning import make_plan
from autobatch.training.split_check import examine_run
from tests.support.steps import weighted, whole_weighted
from tests.support.training import (
    IGNORED,
    Rows,
    language_model,
    make_setup,
    points,
    token_loss,
    whole_tokens,
)


def checked(
    workload: Any,
    *,
    micro_batch: int = 8,
    target_batch: int = 24,
    budget: str = "1GiB",
    precision: str = "fp32",
) -> list[str]:
    """Return what is said of the loss of a run; a difference is an error."""
    setup = make_setup(workload, budget, precision=precision)
    plan = make_plan(target_batch=target_batch, micro_batch_limit=micro_batch, learning_rate=0.1)
    return examine_run(setup, micro_batch, target_batch).notes("error", plan)


def mask_tokens(samples: list[tuple[Tensor]]) -> dict[str, Tensor]:
    """Hide 15 % of the tokens at random, as the collate function of a masked language model does."""
    ids = torch.stack([sample[0] for sample in samples])
    hidden = torch.rand(ids.shape) < 0.15
    return {"ids": ids.masked_fill(hidden, 0), "labels": ids.masked_fill(~hidden, IGNORED)}


def popping(loss):
    """Let a loss of ids and labels take its labels out of the batch, which is a dictionary."""
    return lambda model, batch: loss(model, (batch["ids"], batch.pop("labels")))


def rare_class() -> Rows:
    """Make 400 points, of which 2 % are of class 2."""
    data = points(400)
    labels = data.columns[1] % 2
    labels[23::50] = 2
    return Rows(data.columns[0], labels)


def noisy_mean(model, batch):
    """Return the mean error beside noise, as a diffusion model has it."""
    noise = torch.rand(batch[0].shape, dtype=batch[0].dtype)
    level = torch.randint(1, 5, (len(batch[0]), 1))
    return cross_entropy(model(batch[0] + noise / level), batch[1])


def noisy_sum(model, batch):
    return noisy_mean(model, batch) * len(batch[0])


TEXTS = Rows(torch.randint(1, 7, (200, 12), generator=torch.Generator().manual_seed(3)))
MASKED: dict[str, Any] = {"model": language_model, "train_data": TEXTS, "collate": mask_tokens}
PAIRS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "masked tokens": (MASKED, popping(whole_tokens), popping(token_loss)),
    "class weights": ({"train_data": rare_class()}, whole_weighted, weighted),
    "a sum with noise": ({}, noisy_sum, noisy_mean),
}
"""Fields of a workload, its wrong loss and its right loss."""
