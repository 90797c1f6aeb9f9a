"""Streams cut into batches and micro-batches, and batches of a loader that are cut and concatenated."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import autobatch
from autobatch.core.errors import InputError
from autobatch.integrations.stream import Piece, as_piece, cut_into_batches, samples_of, split
from tests.support.custom_loops import EXACT, mean_over_tokens, small_plan, walk
from tests.support.training import IGNORED, apart, language_model, make_workload, token_loss


def samples_in(pieces: list[Piece]) -> list[int]:
    return [sample for piece in pieces for sample in piece.content[piece.first : piece.stop]]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    target=st.integers(1, 20),
    limit=st.integers(1, 20),
    epochs=st.integers(1, 3),
    last=st.sampled_from(["carry", "flush"]),
)
def test_every_sample_is_cut_out_once_and_in_order(sizes, target, limit, epochs, last) -> None:
    numbers = iter(range(sum(sizes)))
    stream = [[next(numbers) for _ in range(size)] for size in sizes]

    def epoch() -> list[Piece]:
        return [Piece(content, 0, len(content)) for content in stream]

    found = list(cut_into_batches(epoch, target, epochs=epochs, last_batch=last))
    assert [sample for pieces in found for sample in samples_in(pieces)] == list(range(sum(sizes))) * epochs
    if last == "carry":
        assert {samples_of(pieces) for pieces in found[:-1]} <= {target}
    for pieces in found:
        size = samples_of(pieces)
        parts = [min(limit, size - at) for at in range(0, size, limit)]
        micro_batches = [samples_in(taken) for taken in split(pieces, parts)]
        assert [len(one) for one in micro_batches] == parts
        assert [sample for one in micro_batches for sample in one] == samples_in(pieces)


def test_a_dropped_rest_is_not_carried_into_the_next_epoch() -> None:
    def epoch() -> list[Piece]:
        return [Piece(list(range(7)), 0, 7)]

    found = list(cut_into_batches(epoch, 5, epochs=2, last_batch="drop"))
    assert [samples_in(pieces) for pieces in found] == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(3), torch.zeros(2)), "sizes along dimension 0: 2, 3"),
        ({"kind": "train"}, "it holds no samples"),
        ([object(), torch.zeros(3)], "an object in a batch"),
        (nn.utils.rnn.pack_sequence([torch.zeros(2)]), "a PackedSequence in a batch"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_piece(batch)


def test_nested_batches_keep_their_containers() -> None:
    Pair = namedtuple("Pair", ["left", "right"])

    def collate(samples):
        ids = torch.tensor(samples)
        return {
            "pair": Pair(ids, [ids * 2, (ids * 3,)]),
            "names": [f"n{i}" for i in samples],
            "kind": "train",
        }

    loader = DataLoader(range(10), batch_size=4, collate_fn=collate)
    found = [micro.data for _, micro in walk(autobatch.batches(loader, small_plan(10, 5)))]
    assert [data["pair"].left.tolist() for data in found] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    for data in found:
        ids = data["pair"].left
        assert isinstance(data["pair"], Pair)
        assert torch.equal(data["pair"].right[0], ids * 2)
        assert torch.equal(data["pair"].right[1][0], ids * 3)
        assert data["names"] == [f"n{i}" for i in ids.tolist()]
        assert data["kind"] == "train"


def test_batches_padded_to_different_lengths_stay_exact() -> None:
    """They are not concatenated: more micro-batches, the same step."""
    lengths = [3, 3, 9, 5, 2, 2, 7, 1, 4, 6]
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(7, (length,), generator=generator) for length in lengths]

    def pad(samples):
        ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        labels = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=IGNORED)
        return ids, labels

    workload = make_workload(model=language_model, train_data=data, loss=token_loss)
    loader = DataLoader(data, batch_size=3, collate_fn=pad)
    batch = next(iter(autobatch.batches(loader, small_plan(10, 5))))
    torch.manual_seed(0)
    model = workload.model()
    mean_over_tokens(model, pad(data)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    found, sizes = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.clone() for p in model.parameters()))
    for micro in batch:
        sizes.append(len(micro))
        batch.backward(token_loss(model, micro.data))
    batch.step(optimizer)
    assert sizes == [3, 2, 1, 3, 1]
    for got, wanted in zip(found, expected, strict=True):
        assert apart(got, wanted) <= EXACT
