"""Samples, losses and optimizers that several workloads of other libraries share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from autobatch import Workload

SAMPLES, LENGTH, WORDS = 256, 32, 199
DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=DRAW)
IMAGES = torch.randn(SAMPLES, 3, 32, 32, generator=DRAW)
LABELS = torch.randint(0, 10, (SAMPLES,), generator=DRAW)
NARROW = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
Build = Callable[[], Workload]
"""Builds a workload; raises ImportError if a package is missing."""
WORDS_OF = {"vocab_size": WORDS, **NARROW, **ENDS}


def words_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss that a model of words computes itself."""
    return model(input_ids=batch[0], labels=batch[0]).loss


def pictures_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a classifier of pictures."""
    return model(pixel_values=batch[0], labels=batch[1]).loss


def classes_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean cross-entropy of a classifier of torch."""
    return cross_entropy(model(batch[0]), batch[1])


def adamw(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    """Build AdamW."""
    return torch.optim.AdamW(parameters, lr=learning_rate)


def workload(
    name: str, model: Callable[[], nn.Module], data: list[Tensor], loss: Any, optimizer: Any = adamw
) -> Workload:
    """Build a workload whose samples are rows of tensors."""
    return Workload(
        name=name,
        model=model,
        train_data=TensorDataset(*data),
        loss=loss,
        optimizer=optimizer,
        learning_rate=1e-3,
    )
