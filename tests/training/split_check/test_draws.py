"""Draws of a sample are the same in the whole batch and in its part."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from autobatch.training.split_check.passes import NoDropout, SameDraws


def uniform(samples: int) -> torch.Tensor:
    return torch.empty(samples, 3).uniform_()


def rows_of_own_generator(samples: int) -> torch.Tensor:
    return torch.randn((samples, 2), generator=torch.Generator())


KINDS = {
    "fill": uniform,
    "factory": lambda samples: torch.rand(samples, 3),
    "integers": lambda samples: torch.randint(1, 99, (samples,)),
    "like": lambda samples: torch.randn_like(torch.zeros(samples, 2)),
    "map": lambda samples: torch.bernoulli(torch.full((samples, 9), 0.5)),
    "mean": lambda samples: torch.normal(torch.zeros(samples, 2), torch.ones(samples, 2)),
    "heads": lambda samples: torch.rand(samples * 4, 3).view(samples, 4, 3),
    "time first": lambda samples: torch.rand(5, samples).T,
    "own generator": rows_of_own_generator,
}


def passes(draw) -> tuple[torch.Tensor, torch.Tensor, SameDraws]:
    """Return the draws of a pass over 6 samples, and of three passes over 2 of them each."""
    with SameDraws(6) as draws:
        draws.record()
        whole = draw(6)
        draws.end()
        parts = []
        for first in (0, 2, 4):
            draws.replay(first, 2)
            parts.append(draw(2))
            draws.end()
    return whole, torch.cat(parts), draws


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_gets_the_same_draws_in_any_part(kind: str) -> None:
    whole, parts, draws = passes(KINDS[kind])
    assert torch.equal(whole, parts)
    assert len(whole.unique(dim=0)) > 1, "samples have draws of their own"
    assert not draws.doubts
    assert draws.is_flat == (kind == "heads")


@pytest.mark.parametrize(
    ("draw", "doubt"),
    [
        (torch.randperm, "randperm"),
        (lambda samples: torch.rand(samples - 1), "rand"),
        (lambda samples: torch.tensor([random.random() for _ in range(samples)]), "numbers from Python or"),
    ],
)
def test_other_draws_are_doubts(draw, doubt: str) -> None:
    _, _, draws = passes(draw)
    (found,) = draws.doubts
    assert found.startswith(doubt)


@pytest.mark.parametrize(
    ("layer", "run"),
    [
        (nn.MultiheadAttention(8, 2, dropout=0.5), lambda layer, x: layer(x, x, x, need_weights=False)[0]),
        (nn.MultiheadAttention(8, 2, dropout=0.5), lambda layer, x: layer(x, x, x)[0]),
        (nn.LSTM(8, 4, 2, dropout=0.5), lambda layer, x: layer(x)[0]),
        (nn.GRU(8, 4, 2, dropout=0.5), lambda layer, x: layer(pack_padded_sequence(x, [5, 5, 5]))[0].data),
        (nn.RNN(8, 4, 2, dropout=0.5), lambda layer, x: layer(x)[0]),
    ],
    ids=["attention", "attention with weights", "LSTM", "packed GRU", "RNN"],
)
def test_layers_that_call_dropout_themselves_do_without_it(layer, run) -> None:
    x = torch.ones(5, 3, 8)
    with NoDropout():
        without = run(layer, x)
    assert not torch.equal(run(layer, x), without)
    layer.eval()
    assert torch.equal(run(layer, x), without)
