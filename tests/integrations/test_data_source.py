"""Every kind of data that `autobatch.batches` takes: which samples come when, and what is refused."""

from __future__ import annotations

from collections import Counter, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import autobatch
from autobatch import InputError
from tests.support.custom_loops import EXACT, Stream, ids_by_batch, small_plan, walk
from tests.support.training import (
    IGNORED,
    apart,
    language_model,
    make_workload,
    points,
    token_loss,
    whole_tokens,
)


@pytest.mark.parametrize("last", ["carry", "flush", "drop"])
def test_every_batch_has_the_target_and_every_sample_comes_once_an_epoch(last: str) -> None:
    plan = small_plan(10, 4, last_batch=last)
    sizes = {"carry": [10] * 4 + [6], "flush": [10, 10, 3] * 2, "drop": [10, 10] * 2}[last]
    for data in (torch.arange(23), Stream(23), DataLoader(torch.arange(23), batch_size=3)):
        found = ids_by_batch(autobatch.batches(data, plan, epochs=2))
        assert [len(ids) for ids in found] == sizes
        if last != "drop":
            assert Counter(i for ids in found for i in ids) == dict.fromkeys(range(23), 2)


def test_a_sampler_sets_the_order_and_samples_are_collated_by_the_given_function() -> None:
    data, plan = torch.arange(6), small_plan(4, 2)
    assert ids_by_batch(autobatch.batches(data, plan, sampler=range(6))) == [[0, 1, 2, 3], [4, 5]]
    found = walk(autobatch.batches(range(6), plan, sampler=[5, 5, 0, 1], collate=tuple))
    assert [micro.data for _, micro in found] == [(5, 5), (0, 1)]


def test_samples_are_fetched_when_their_micro_batch_is_drawn() -> None:
    fetched = []

    class Watched:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            fetched.append(index)
            return torch.tensor(index)

    micros = iter(next(iter(autobatch.batches(Watched(), small_plan(8, 2)))))
    assert fetched == []
    next(micros)
    assert len(fetched) == 2


# torch warns if a loader asks for more workers than the machine has CPUs.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_of_a_loader_change_nothing() -> None:
    plan = small_plan(10, 4)
    alone, many = (DataLoader(torch.arange(23), batch_size=3, num_workers=workers) for workers in (0, 2))
    assert ids_by_batch(autobatch.batches(many, plan)) == ids_by_batch(autobatch.batches(alone, plan))


def number(_):
    return torch.tensor(1)


def ragged(samples):
    return [torch.zeros(3, 4 + i) for i in samples], [torch.zeros(i) for i in samples]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: autobatch.batches(3, small_plan()), "found an int"),
        (lambda: autobatch.batches([], small_plan()), "the data has 0 samples: at least 1"),
        (
            lambda: autobatch.batches(points(), small_plan(30, last_batch="drop")),
            "no batch, because an epoch has 24 samples and the target batch is 30",
        ),
        (
            lambda: autobatch.batches(Stream(9), small_plan(30, last_batch="drop")),
            "no batch, because an epoch has 9 samples and the target batch is 30",
        ),
        (lambda: autobatch.batches(Stream(0), small_plan()), "the data has 0 samples: at least 1"),
        (lambda: autobatch.batches(iter(Stream(30)), small_plan(8), steps=9), "no sample in epoch 2"),
        (lambda: autobatch.batches(Stream(9), small_plan(), sampler=[1]), "needs map-style data"),
        (lambda: autobatch.batches(DataLoader(points()), small_plan(), collate=list), "to the loader"),
        (
            lambda: autobatch.batches(DataLoader(range(9), batch_size=3, collate_fn=ragged), small_plan()),
            "dimension 0: .*give autobatch.batches the dataset itself",
        ),
        (
            lambda: autobatch.batches(DataLoader(range(9), collate_fn=number), small_plan()),
            "a 0-d tensor in a batch",
        ),
        (
            lambda: autobatch.batches([torch.zeros(2), torch.zeros(3)], small_plan(2, 2)),
            r"give autobatch.batches\(collate=…\)",
        ),
    ],
)
def test_data_that_cannot_be_used_is_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(walk(make()))


def test_a_loader_that_makes_no_batches_is_taken_as_it_is_told() -> None:
    """Batches of a data set that batches itself would else count as samples."""
    plan = small_plan(4, 2)
    parts = [torch.arange(first, first + 2) for first in range(0, 8, 2)]
    with pytest.raises(InputError, match="has batch_size=None, so its items may be samples or batches"):
        autobatch.batches(DataLoader(parts, batch_size=None), plan)  # type: ignore[arg-type]
    whole = autobatch.batches(DataLoader(parts, batch_size=None), plan, batched=True)  # type: ignore[arg-type]
    assert ids_by_batch(whole) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    single = autobatch.batches(DataLoader(torch.arange(8), batch_size=None), plan, batched=False)  # type: ignore[arg-type]
    assert ids_by_batch(single) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_batch_function_is_called_once_per_batch_of_the_target() -> None:
    data = autobatch.BatchFunction(lambda size, step: torch.arange(size) + 10 * step)
    found = autobatch.batches(data, small_plan(4, 2), steps=3)
    assert ids_by_batch(found) == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    target=st.integers(1, 20),
    limit=st.integers(1, 20),
    epochs=st.integers(1, 3),
    last=st.sampled_from(["carry", "flush", "drop"]),
)
def test_every_sample_is_cut_out_once_and_in_order(sizes, target, limit, epochs, last) -> None:
    numbers = torch.arange(sum(sizes))
    whole = len(numbers) // target * target if last == "drop" else len(numbers)
    made = autobatch.batches(
        numbers.split(sizes), small_plan(target, limit, last_batch=last), epochs=epochs, batched=True
    )
    if not whole:
        with pytest.raises(InputError, match="last_batch='drop' leaves no batch"):
            list(walk(made))
        return
    found = ids_by_batch(made)
    assert [sample for ids in found for sample in ids] == list(range(whole)) * epochs
    per_epoch = whole * epochs if last == "carry" else whole
    of_epoch = [target] * (per_epoch // target) + [per_epoch % target] * (per_epoch % target > 0)
    assert [len(ids) for ids in found] == of_epoch * (whole * epochs // per_epoch)


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
        list(walk(autobatch.batches([batch], small_plan(), batched=True)))


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
    whole_tokens(model, pad(data)).backward()
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
