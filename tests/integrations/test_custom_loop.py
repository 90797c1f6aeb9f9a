"""`autobatch.batches`, against one pass over each whole batch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import autobatch
from autobatch.core.errors import InputError
from autobatch.workload.order import GlobalBatchSampler
from tests.support.custom_loops import (
    EXACT,
    KINDS,
    SAMPLES,
    Stream,
    ids_by_batch,
    mean_over_tokens,
    small_plan,
    train_in_own_loop,
    walk,
)
from tests.support.training import (
    apart,
    language_model,
    make_loop,
    make_workload,
    points,
    reference,
    tokens,
    weights,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("limit", [1, 5, 7, 24])
def test_steps_equal_those_of_whole_batches(kind: str, limit: int, clip: float | None) -> None:
    workload, whole_loss = KINDS[kind]
    sampler = GlobalBatchSampler(samples=SAMPLES, target_batch=10, seed=3, epochs=2)
    expected, losses = reference(workload, [b.ids for b in sampler.batches()], whole_loss, clip=clip)
    batches = autobatch.batches(workload.train_data, small_plan(10, limit), epochs=2, seed=3)
    found, own = train_in_own_loop(workload, batches, clip=clip)
    assert len(batches) == len(losses) == 5
    assert apart(found, expected) <= EXACT
    assert own == pytest.approx(losses, rel=EXACT)


def test_steps_equal_those_of_fit() -> None:
    workload = KINDS["tokens"][0]
    loop = make_loop(workload, target_batch=10, micro_batch=4, steps=5, seed=7)
    records = list(loop.run())
    torch.manual_seed(7)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in autobatch.batches(workload.train_data, small_plan(10, 4), steps=5, seed=7):
        for micro in batch:
            batch.backward(workload.loss(model, micro.data))
        losses.append(batch.step(optimizer).loss)
    assert losses == [record.loss for record in records]
    assert torch.equal(weights(model), weights(loop.train_state.model))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", ["carry", "flush", "drop"])
@pytest.mark.parametrize("batch_size", [1, 7, 24])
def test_batches_of_a_loader_are_cut_again(kind: str, last: str, batch_size: int) -> None:
    workload, whole_loss = KINDS[kind]
    order = list(range(SAMPLES)) * 2
    whole_batches = {
        "carry": [order[at : at + 10] for at in range(0, 48, 10)],
        "flush": [order[at : at + 10][: 24 - at] for at in (0, 10, 20)] * 2,
        "drop": [order[0:10], order[10:20]] * 2,
    }[last]
    expected, losses = reference(workload, whole_batches, whole_loss)
    loader = DataLoader(workload.train_data, batch_size=batch_size)
    batches = autobatch.batches(loader, small_plan(10, 4, last_batch=last), epochs=2)
    found, own = train_in_own_loop(workload, batches)
    assert apart(found, expected) <= EXACT
    assert own == pytest.approx(losses, rel=EXACT)


def test_a_mean_of_means_fails_the_comparison() -> None:
    """On ragged tokens it is off by ten orders of magnitude."""
    workload, whole_loss = KINDS["tokens"]
    expected, _ = reference(workload, [range(SAMPLES)], whole_loss)
    mutant = make_workload(model=language_model, train_data=tokens(), loss=mean_over_tokens)
    data = DataLoader(workload.train_data, batch_size=SAMPLES)
    found, _ = train_in_own_loop(mutant, autobatch.batches(data, small_plan()))
    assert apart(found, expected) > 1e-4


def test_micro_batches_are_those_of_the_plan() -> None:
    batches = autobatch.batches(torch.arange(17), small_plan(10, 4), epochs=1)
    found = [(batch.index, batch.samples, len(micro)) for batch, micro in walk(batches)]
    assert found == [(0, 10, 4), (0, 10, 3), (0, 10, 3), (1, 7, 4), (1, 7, 3)]


@pytest.mark.parametrize("make", [lambda: torch.arange(23), lambda: Stream(23)])
def test_a_run_resumes_at_any_batch(make) -> None:
    plan = small_plan(10, 4)
    full = ids_by_batch(autobatch.batches(make(), plan, steps=6, seed=5))
    batches = autobatch.batches(make(), plan, steps=6, start=2, seed=5)
    assert len(batches) == 4
    assert ids_by_batch(autobatch.batches(make(), plan, steps=6, start=2, seed=5)) == full[2:]


def test_batches_are_iterated_once() -> None:
    batches = autobatch.batches(torch.arange(6), small_plan(4, 2))
    assert ids_by_batch(batches)
    with pytest.raises(InputError, match=r"already iterated.*epochs=N"):
        ids_by_batch(batches)


def test_the_number_of_batches_in_a_stream_is_unknown() -> None:
    with pytest.raises(TypeError, match="give steps="):
        len(autobatch.batches(Stream(9), small_plan(), epochs=1))
    assert len(autobatch.batches(Stream(9), small_plan(), steps=7)) == 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: autobatch.batches(points(), 24), "takes a plan of autobatch.plan, found an int"),
        (lambda: autobatch.batches(points(), small_plan(world_size=2)), "the plan is for 2 ranks"),
        (lambda: autobatch.batches(points(), small_plan(), steps=0), "steps is 0: it must be 1 or more"),
        (lambda: autobatch.batches(points(), small_plan(), epochs=0), "epochs is 0: it must be 1 or more"),
        (lambda: autobatch.batches(points(), small_plan(), start=-1), "start is -1: it must be 0 or more"),
    ],
)
def test_an_invalid_option_is_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_plan_for_one_process_is_refused_among_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would take the whole batch."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"the plan is for 1 rank, and autobatch\.batches runs in 2 process"):
        autobatch.batches(points(), small_plan(), epochs=1)
