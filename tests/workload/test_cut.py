"""Collated batches are cut along dimension 0, and concatenated to the same batch."""

from __future__ import annotations

import pytest
import torch

from autobatch.core.errors import InputError
from autobatch.workload.cut import concatenate, cut, samples_along, signature


def batch() -> dict:
    ids = torch.arange(10).view(5, 2)
    return {"pair": (ids, [ids * 2]), "names": list("abcde"), "kind": "train"}


def test_pieces_make_the_whole_again() -> None:
    whole = batch()
    pieces = [cut(whole, slice(0, 3)), cut(whole, slice(3, 5))]
    assert pieces[1]["pair"][1][0].tolist() == [[12, 14], [16, 18]]
    assert (pieces[0]["names"], pieces[0]["kind"]) == (["a", "b", "c"], "train")
    again = concatenate(pieces)
    assert torch.equal(again["pair"][0], whole["pair"][0])
    assert again["names"] == whole["names"]
    assert signature(pieces[0]["pair"]) == signature(pieces[1]["pair"])


def test_every_part_counts_its_samples() -> None:
    assert list(samples_along(batch())) == [5, 5, 5]
    with pytest.raises(InputError, match="a 0-d tensor in a batch of the loader cannot be cut"):
        list(samples_along([torch.zeros(3), torch.tensor(1)]))
