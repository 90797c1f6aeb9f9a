"""A loop of one's own around `autobatch.batches`, against one pass over each whole window, in float64."""

from __future__ import annotations

import math
from collections import Counter, namedtuple

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

import autobatch
from autobatch.core.errors import InputError, NonFiniteError
from autobatch.planning import make_plan
from autobatch.workload.contract import Loss
from autobatch.workload.order import GlobalBatchSampler
from tests.support.training import (
    IGNORED,
    Rows,
    apart,
    language_model,
    make_loop,
    make_workload,
    mean_loss,
    network,
    points,
    reference,
    token_loss,
    tokens,
    weights,
)

EXACT = 1e-12
SAMPLES = 24


def a_plan(target: int = SAMPLES, limit: int = 5, *, last_batch: str = "carry", **changes):
    planned = make_plan(target_batch=target, micro_batch_limit=limit, learning_rate=0.1, **changes)
    return msgspec.structs.replace(planned, last_batch=last_batch)


def whole_tokens(model: nn.Module, batch) -> torch.Tensor:
    ids, labels = batch
    return cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


KINDS = {
    "mean": (make_workload(), mean_loss),
    "tokens": (make_workload(model=language_model, train_data=tokens(), loss=token_loss), whole_tokens),
}


def own_loop(workload, windows, *, clip: float | None = None):
    """Ten lines of a user's; weights and losses."""
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    losses = []
    for window in windows:
        for micro in window:
            window.backward(workload.loss(model, micro.batch))
        losses.append(window.step(optimizer, max_grad_norm=clip).loss)
    assert all(p.grad is None for p in model.parameters())
    return weights(model), losses


def walk(windows):
    """All micro-batches, with nothing to train."""
    nothing = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    for window in windows:
        for micro in window:
            yield window, micro
            window.backward(Loss(torch.zeros(()), 0))
        assert not window.step(nothing).applied


def ids_seen(windows) -> list[list[int]]:
    """The samples of every window, where a sample is its own index."""
    seen: dict[int, list[int]] = {}
    for window, micro in walk(windows):
        seen.setdefault(window.index, []).extend(micro.batch.tolist())
    return list(seen.values())


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self):
        return iter(torch.arange(self.samples))


# exactness


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("limit", [1, 5, 7, 24])
def test_steps_are_those_of_whole_windows(kind: str, limit: int, clip: float | None) -> None:
    workload, whole = KINDS[kind]
    sampler = GlobalBatchSampler(samples=SAMPLES, target_batch=10, seed=3, epochs=2)
    expected, losses = reference(workload, [w.ids for w in sampler.batches()], whole, clip=clip)
    windows = autobatch.batches(workload.train_data, a_plan(10, limit), epochs=2, seed=3)
    found, own = own_loop(workload, windows, clip=clip)
    assert len(windows) == len(losses) == 5
    assert apart(found, expected) <= EXACT
    assert own == pytest.approx(losses, rel=EXACT)


def test_the_steps_are_those_of_fit() -> None:
    workload = KINDS["tokens"][0]
    loop = make_loop(workload, target_batch=10, micro_batch=4, steps=5, seed=7)
    records = list(loop.run())
    torch.manual_seed(7)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for window in autobatch.batches(workload.train_data, a_plan(10, 4), steps=5, seed=7):
        for micro in window:
            window.backward(workload.loss(model, micro.batch))
        losses.append(window.step(optimizer).loss)
    assert losses == [record.loss for record in records]
    assert torch.equal(weights(model), weights(loop.train_state.model))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", ["carry", "flush", "drop"])
@pytest.mark.parametrize("batch_size", [1, 7, 24])
def test_a_loader_is_cut_anew(kind: str, last: str, batch_size: int) -> None:
    workload, whole = KINDS[kind]
    order = list(range(SAMPLES)) * 2
    whole_windows = {
        "carry": [order[at : at + 10] for at in range(0, 48, 10)],
        "flush": [order[at : at + 10][: 24 - at] for at in (0, 10, 20)] * 2,
        "drop": [order[0:10], order[10:20]] * 2,
    }[last]
    expected, losses = reference(workload, whole_windows, whole)
    loader = DataLoader(workload.train_data, batch_size=batch_size)
    found, own = own_loop(workload, autobatch.batches(loader, a_plan(10, 4, last_batch=last), epochs=2))
    assert apart(found, expected) <= EXACT
    assert own == pytest.approx(losses, rel=EXACT)


def test_the_comparison_has_teeth() -> None:
    """A mean of means on ragged tokens is off by ten orders of magnitude."""
    workload, whole = KINDS["tokens"]
    expected, _ = reference(workload, [range(SAMPLES)], whole)
    mutant = make_workload(model=language_model, train_data=tokens(), loss=whole_tokens)
    data = DataLoader(workload.train_data, batch_size=SAMPLES)
    found, _ = own_loop(mutant, autobatch.batches(data, a_plan()))
    assert apart(found, expected) > 1e-4


@pytest.mark.parametrize("overflows", [False, True])
def test_a_loss_scale_changes_nothing_and_an_overflow_skips_the_window(overflows: bool) -> None:
    workload = make_workload(model=lambda: network(torch.float32), train_data=points(dtype=torch.float32))
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss, clip=0.01)
    torch.manual_seed(0)
    model = workload.model()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126 if overflows else 2.0**10)
    for window in autobatch.batches(
        workload.train_data, a_plan(), sampler=range(SAMPLES), scaler=scaler, optimizer=optimizer
    ):
        for micro in window:
            window.backward(mean_loss(model, micro.batch) * (1e6 if overflows else 1.0))
        result = window.step(max_grad_norm=0.01)
    assert result.applied is not overflows
    assert scaler.get_scale() == (2.0**125 if overflows else 2.0**10)
    if overflows:
        assert torch.equal(weights(model), before)
    else:
        assert apart(weights(model) - before, expected - before) < 1e-5


def test_a_scaler_that_is_off_lets_no_overflow_through() -> None:
    workload = make_workload()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(NonFiniteError, match=r"the loss \(nan\) of window 0"):
        own_loop(
            make_workload(loss=lambda model, batch: mean_loss(model, batch) * math.nan),
            autobatch.batches(workload.train_data, a_plan(), scaler=scaler),
        )


def test_gradients_of_16_bit_parameters_add_up() -> None:
    """1024 times 1/1024 is 1, and 0.25 where bf16 adds up in bf16."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))

    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = a_plan(1024, 1)
    for window in autobatch.batches(Rows(torch.ones(1024)), plan, optimizer=[optimizer]):
        for micro in window:
            window.backward((model.weight * micro.batch[0].bfloat16()).mean())
        window.step()
    assert model.weight.item() == -1.0
    assert not model.weight._post_accumulate_grad_hooks
    window = next(iter(autobatch.batches(Rows(torch.ones(1024)), plan)))
    for micro in window:
        window.backward((model.weight * micro.batch[0].bfloat16()).mean())
    with pytest.raises(InputError, match="parameters in bfloat16"):
        window.step(optimizer)


def test_several_optimizers_step_together_and_are_clipped_by_one_norm() -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss, clip=0.01)
    torch.manual_seed(0)
    model = workload.model()
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    for window in autobatch.batches(workload.train_data, a_plan()):
        for micro in window:
            window.backward(mean_loss(model, micro.batch))
        result = window.step(*pair, max_grad_norm=0.01)
    assert result.stepped == (True, True)
    assert apart(weights(model), expected) <= EXACT


def test_gradients_from_before_do_not_count_where_the_optimizer_is_known() -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss)
    torch.manual_seed(0)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_loss(model, next(iter(DataLoader(workload.train_data, batch_size=9)))).backward()
    for window in autobatch.batches(workload.train_data, a_plan(), optimizer=optimizer):
        for micro in window:
            window.backward(mean_loss(model, micro.batch))
        window.step()
    assert apart(weights(model), expected) <= EXACT


def test_a_window_that_counts_nothing_takes_no_step() -> None:
    data = tokens()
    data.columns[1].fill_(IGNORED)
    workload = make_workload(model=language_model, train_data=data, loss=token_loss)
    torch.manual_seed(0)
    before = weights(workload.model())
    found, losses = own_loop(workload, autobatch.batches(data, a_plan()))
    assert torch.equal(found, before)
    assert math.isnan(losses[0])


# the data


@pytest.mark.parametrize("last", ["carry", "flush", "drop"])
def test_samples_come_in_windows_of_the_target(last: str) -> None:
    plan = a_plan(10, 4, last_batch=last)
    sizes = {"carry": [10] * 4 + [6], "flush": [10, 10, 3] * 2, "drop": [10, 10] * 2}[last]
    for data in (torch.arange(23), Stream(23), DataLoader(torch.arange(23), batch_size=3)):
        seen = ids_seen(autobatch.batches(data, plan, epochs=2))
        assert [len(window) for window in seen] == sizes
        if last != "drop":
            assert Counter(i for window in seen for i in window) == dict.fromkeys(range(23), 2)


def test_micro_batches_are_those_of_the_plan() -> None:
    windows = autobatch.batches(torch.arange(17), a_plan(10, 4), epochs=1)
    seen = [(window.index, window.samples, len(micro)) for window, micro in walk(windows)]
    assert seen == [(0, 10, 4), (0, 10, 3), (0, 10, 3), (1, 7, 4), (1, 7, 3)]


@pytest.mark.parametrize("make", [lambda: torch.arange(23), lambda: Stream(23)])
def test_a_run_goes_on_from_any_window(make) -> None:
    plan = a_plan(10, 4)
    full = ids_seen(autobatch.batches(make(), plan, steps=6, seed=5))
    windows = autobatch.batches(make(), plan, steps=6, start=2, seed=5)
    assert len(windows) == 4
    assert ids_seen(autobatch.batches(make(), plan, steps=6, start=2, seed=5)) == full[2:]


def test_an_order_of_ones_own() -> None:
    data, plan = torch.arange(6), a_plan(4, 2)
    assert ids_seen(autobatch.batches(data, plan, sampler=range(6))) == [[0, 1, 2, 3], [4, 5]]
    assert ids_seen(autobatch.batches(data, plan, sampler=[5, 5, 0, 1])) == [[5, 5, 0, 1]]


def test_samples_are_fetched_when_their_micro_batch_comes() -> None:
    fetched = []

    class Watched:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            fetched.append(index)
            return torch.tensor(index)

    micros = iter(next(iter(autobatch.batches(Watched(), a_plan(8, 2)))))
    assert fetched == []
    next(micros)
    assert len(fetched) == 2


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
    batches = [micro.batch for _, micro in walk(autobatch.batches(loader, a_plan(10, 5)))]
    assert [batch["pair"].left.tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    for batch in batches:
        ids = batch["pair"].left
        assert isinstance(batch["pair"], Pair)
        assert torch.equal(batch["pair"].right[0], ids * 2)
        assert torch.equal(batch["pair"].right[1][0], ids * 3)
        assert batch["names"] == [f"n{i}" for i in ids.tolist()]
        assert batch["kind"] == "train"


def test_batches_padded_to_their_own_length_stay_exact() -> None:
    """What cannot be joined follows one another: more micro-batches, the same step."""
    lengths = [3, 3, 9, 5, 2, 2, 7, 1, 4, 6]
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(7, (length,), generator=generator) for length in lengths]

    def pad(samples):
        ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        labels = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=IGNORED)
        return ids, labels

    workload = make_workload(model=language_model, train_data=data, loss=token_loss)
    window = next(iter(autobatch.batches(DataLoader(data, batch_size=3, collate_fn=pad), a_plan(10, 5))))
    torch.manual_seed(0)
    model = workload.model()
    whole_tokens(model, pad(data)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    seen, sizes = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    for micro in window:
        sizes.append(len(micro))
        window.backward(token_loss(model, micro.batch))
    window.step(optimizer)
    assert sizes == [3, 2, 1, 3, 1]
    for got, wanted in zip(seen, expected, strict=True):
        assert apart(got, wanted) <= EXACT


# what is refused


def a_window(**options):
    return next(iter(autobatch.batches(points(), a_plan(), **options)))


def test_backward_that_was_not_called_is_named() -> None:
    micros = iter(a_window())
    next(micros)
    with pytest.raises(
        InputError, match=r"not called for micro-batch 1 of window 0.*in place of loss\.backward"
    ):
        next(micros)


def test_a_step_before_the_end_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = a_window()
    with pytest.raises(InputError, match="after 0 of 24 samples of window 0"):
        window.step(optimizer)
    for micro in window:
        with pytest.raises(InputError, match=r"not called for micro-batch|after \d+ of 24"):
            window.step(optimizer)
        window.backward(mean_loss(model, micro.batch))
        with pytest.raises(InputError, match="no micro-batch to count for"):
            window.backward(mean_loss(model, micro.batch))
    with pytest.raises(InputError, match="needs an optimizer"):
        window.step()
    with pytest.raises(InputError, match="found a Sequential"):
        window.step(model)
    assert window.step(optimizer).applied
    with pytest.raises(InputError, match="taken already"):
        window.step(optimizer)


def test_a_window_without_a_step_does_not_leak_into_the_next() -> None:
    model = network()
    windows = iter(autobatch.batches(points(), a_plan(8), steps=2))
    window = next(windows)
    for micro in window:
        window.backward(mean_loss(model, micro.batch))
    with pytest.raises(InputError, match="no step was taken for window 0"):
        next(windows)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda found: found.expand(3), r"a tensor of shape \(3,\)"),
        (lambda found: found.item(), "found a float"),
        (lambda found: Loss(found.expand(3), 3), "total of a Loss"),
    ],
)
def test_what_is_no_loss_is_named(loss, said: str) -> None:
    window, model = a_window(), network()
    micro = next(iter(window))
    with pytest.raises(InputError, match=said):
        window.backward(loss(mean_loss(model, micro.batch)))


def test_a_loss_that_is_detached_is_named() -> None:
    workload = make_workload(loss=lambda model, batch: mean_loss(model, batch).detach())
    with pytest.raises(InputError, match="no gradient"):
        own_loop(workload, autobatch.batches(points(), a_plan()))


def ragged(samples):
    return [torch.zeros(3, 4 + i) for i in samples], [torch.zeros(i) for i in samples]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: autobatch.batches(3, a_plan()), "found a int"),
        (lambda: autobatch.batches(points(), 24), "plan of autobatch.plan"),
        (lambda: autobatch.batches(points(), a_plan(world_size=2)), "2 ranks"),
        (lambda: autobatch.batches(points(), a_plan(), steps=0), "steps is 0: it must be 1"),
        (lambda: autobatch.batches(points(), a_plan(), start=-1), "start is -1: it must be 0"),
        (lambda: autobatch.batches([], a_plan()), "0 samples"),
        (lambda: autobatch.batches(points(), a_plan(30, last_batch="drop")), "no window: 24 samples"),
        (lambda: autobatch.batches(Stream(9), a_plan(30, last_batch="drop")), "no window: 9 samples"),
        (lambda: autobatch.batches(Stream(0), a_plan()), "no sample at all"),
        (lambda: autobatch.batches(iter(Stream(30)), a_plan(8), steps=9), "no sample in epoch 2"),
        (lambda: autobatch.batches(Stream(9), a_plan(), sampler=[1]), "needs map-style data"),
        (lambda: autobatch.batches(DataLoader(points()), a_plan(), collate=list), "give it to the loader"),
        (
            lambda: autobatch.batches(DataLoader(range(9), batch_size=3, collate_fn=ragged), a_plan()),
            "dimension 0: .*hand over the data set itself",
        ),
        (
            lambda: autobatch.batches(DataLoader(range(9), collate_fn=lambda _: torch.tensor(1)), a_plan()),
            "a 0-d tensor in a batch",
        ),
        (
            lambda: autobatch.batches([torch.zeros(2), torch.zeros(3)], a_plan(2, 2)),
            "give collate= to autobatch.windows",
        ),
    ],
)
def test_what_cannot_be_is_named(make, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(walk(make()))


def test_windows_are_iterated_once() -> None:
    windows = autobatch.batches(torch.arange(6), a_plan(4, 2))
    assert ids_seen(windows)
    with pytest.raises(InputError, match=r"begun already.*epochs=N"):
        ids_seen(windows)


def test_workers_of_a_loader_change_nothing() -> None:
    plan = a_plan(10, 4)
    alone, many = (DataLoader(torch.arange(23), batch_size=3, num_workers=workers) for workers in (0, 2))
    assert ids_seen(autobatch.batches(many, plan)) == ids_seen(autobatch.batches(alone, plan))


def test_how_long_a_stream_is_is_not_known() -> None:
    with pytest.raises(TypeError, match="give steps="):
        len(autobatch.batches(Stream(9), a_plan(), epochs=1))
    assert len(autobatch.batches(Stream(9), a_plan(), steps=7)) == 7
