"""Micro-batches that are padded to multiples, against the shapes that the collate function makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

import autobatch
from autobatch.core.errors import InputError
from autobatch.workload.contract import Workload
from autobatch.workload.data import WorstCaseSampler, load_micro_batch
from autobatch.workload.size_multiple import MOST_SIZES, in_multiples, multiple_for, multiple_of
from tests.support.probes import Listener, work

LENGTHS = [3, 4, 9, 16, 17, 31, 40, 64, 5, 12]


def collate(samples: list[Tensor], pad_to_multiple_of: int = 1) -> Tensor:
    found = pad_sequence(samples, batch_first=True)
    return pad(found, (0, -found.shape[1] % pad_to_multiple_of))


class Collator:
    """A collator as those of transformers."""

    pad_to_multiple_of: int | None = None

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return collate(samples, self.pad_to_multiple_of or 1)


def ragged(**fields: Any) -> Workload:
    data = [torch.ones(length) for length in LENGTHS]
    return work(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch.unsqueeze(2)).square().mean(),
        **({"train_data": data, "collate": collate, "size_of": len} | fields),
    )


@pytest.mark.parametrize("made", [collate, Collator()], ids=["argument", "attribute"])
def test_micro_batches_and_sizes_are_multiples(made: Any) -> None:
    padded = in_multiples(ragged(collate=made), 16)
    assert multiple_of(padded) == 16
    sizes = WorstCaseSampler(padded).sizes()
    assert sizes is not None
    assert sizes.tolist() == [16, 16, 16, 16, 32, 32, 48, 64, 16, 16]
    for ids in ([0], [4, 2], [6, 0, 7]):
        assert load_micro_batch(padded, ids).shape[1] == max(sizes[ids])
    assert multiple_of(ragged(collate=made)) is None
    assert getattr(made, "pad_to_multiple_of", None) is None


@pytest.mark.parametrize("longest", [7, 60, 64, 65, 512, 9_000])
def test_auto_leaves_few_sizes_and_no_fewer_than_needed(longest: int) -> None:
    sizes = np.arange(1.0, longest + 1)
    multiple = multiple_for(sizes)
    assert len(np.unique(np.ceil(sizes / multiple))) <= MOST_SIZES
    assert multiple == 8 or len(np.unique(np.ceil(2 * sizes / multiple))) > MOST_SIZES


@pytest.mark.parametrize(
    ("fields", "asked", "message"),
    [
        ({"size_of": None}, 8, "needs Workload"),
        ({"collate": None}, 8, "needs a collate function with an argument"),
        ({"collate": lambda samples: pad_sequence(samples, batch_first=True)}, 8, "needs a collate function"),
        (
            {"collate": lambda samples, pad_to_multiple_of: pad_sequence(samples, batch_first=True)},
            8,
            "samples 0 and 1 of one padded size, 8, make micro-batches of 3 and 4 numbers",
        ),
    ],
)
def test_what_cannot_be_padded_is_named(fields: dict[str, Any], asked: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        in_multiples(ragged(**fields), asked)


def test_a_plan_says_to_what_it_pads() -> None:
    heard = Listener()
    options: dict[str, Any] = {"device": "cpu", "memory_budget": "1MiB", "target_batch": 8, "progress": heard}
    autobatch.plan(ragged(), size_multiple="auto", **options)
    assert "micro-batches are padded to multiples of 8: 6 different sizes up to 64" in heard.notes
    with pytest.raises(InputError, match=r"size_multiple: '0' is invalid: write auto, or a whole number"):
        autobatch.plan(ragged(), size_multiple=0, **options)
