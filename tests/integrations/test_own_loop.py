"""`autobatch.batches` in a loop of one's own, against one pass over each whole batch in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autobatch
from autobatch import InputError, Loss, NonFiniteError
from autobatch.planning import make_plan
from autobatch.workload.order import GlobalBatchSampler
from tests.support.custom_loops import (
    EXACT,
    KINDS,
    SAMPLES,
    Sam,
    Stream,
    gan_data,
    gan_parts,
    ids_by_batch,
    small_plan,
    train_gan,
    train_gan_on_whole_batches,
    train_in_own_loop,
    walk,
)
from tests.support.ragged import pad, ragged_split, ragged_workload
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("limit", [1, 5, 7, 24])
def test_steps_equal_those_of_whole_batches(kind: str, limit: int, clip: float | None) -> None:
    workload, whole_loss = KINDS[kind]
    sampler = GlobalBatchSampler(samples=SAMPLES, target_batch=10, seed=3, epochs=2)
    expected, losses = reference(workload, [b.ids for b in sampler.batches()], whole_loss, clip=clip)
    batches = autobatch.batches(
        workload.train_data, small_plan(10, limit), epochs=2, seed=3, counts=workload.counts
    )
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
    batches = autobatch.batches(loader, small_plan(10, 4, last_batch=last), epochs=2, counts=workload.counts)
    found, own = train_in_own_loop(workload, batches)
    assert apart(found, expected) <= EXACT
    assert own == pytest.approx(losses, rel=EXACT)


def test_terms_need_counts_unless_a_batch_is_one_micro_batch() -> None:
    workload, whole_loss = KINDS["terms"]
    expected, _ = reference(workload, [range(SAMPLES)], whole_loss)
    order = {"sampler": range(SAMPLES), "steps": 1}
    found, _ = train_in_own_loop(
        workload, autobatch.batches(workload.train_data, small_plan(SAMPLES, SAMPLES), **order)
    )
    assert apart(found, expected) <= EXACT
    with pytest.raises(
        InputError,
        match=r"batch 0 has several micro-batches.*counts=lambda data: \{'boxes': …, "
        r"'classes': …\}\), with the count of each Loss",
    ):
        train_in_own_loop(workload, autobatch.batches(workload.train_data, small_plan(), **order))
    others = autobatch.batches(workload.train_data, small_plan(), **order, counts=lambda _: {"boxes": 1})
    with pytest.raises(
        InputError, match="counts=… counts boxes, and the terms of the loss that have a count are"
    ):
        train_in_own_loop(workload, others)


@pytest.mark.parametrize("batch_size", [1, 7, 24])
def test_time_major_batches_are_cut_along_their_samples(batch_size: int) -> None:
    def time_major(samples: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        ids, labels = (torch.stack(column, 1) for column in zip(*samples, strict=True))
        return ids, labels, (labels != IGNORED).sum(0)

    seen = []
    plan = small_plan(10, 4)
    loader = DataLoader(tokens(), batch_size=batch_size, collate_fn=time_major)
    for _, micro in walk(autobatch.batches(loader, plan, epochs=2, batch_dim=1)):
        ids, labels, counts = micro.data
        assert ids.shape[1] == labels.shape[1] == len(counts) == micro.samples
        assert ids.is_contiguous()
        assert torch.equal((labels != IGNORED).sum(0), counts)
        seen.append(ids)
    assert torch.equal(torch.cat(seen, 1).T, tokens().columns[0].repeat(2, 1))
    with pytest.raises(InputError, match=r"sizes along dimension 0: .* or batch_dim=1 if time comes first"):
        list(walk(autobatch.batches(DataLoader(tokens(23), 7, collate_fn=time_major), plan)))
    with pytest.raises(InputError, match=r"batch_dim=1 is for data that yield batches"):
        autobatch.batches(tokens(), plan, batch_dim=1)


class Prefetcher:
    """A loader around a loader."""

    loader = DataLoader(torch.arange(23), batch_size=3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.loader)


@pytest.mark.parametrize("make", [lambda: torch.arange(23), lambda: Stream(23), Prefetcher])
def test_a_run_resumes_at_any_batch_and_is_iterated_once(make) -> None:
    plan = small_plan(10, 4)
    full = ids_by_batch(autobatch.batches(make(), plan, steps=6, seed=5))
    assert [len(ids) for ids in full] == [10] * 6
    batches = autobatch.batches(make(), plan, steps=6, start=2, seed=5)
    assert len(batches) == 4
    assert ids_by_batch(batches) == full[2:]
    with pytest.raises(InputError, match=r"already iterated.*epochs=N"):
        ids_by_batch(batches)


def test_loops_show_their_sizes_and_not_their_tensors() -> None:
    found = autobatch.batches(points(1024), small_plan(512), epochs=3)
    batch = next(iter(found))
    assert [repr(found), repr(batch)] == ["<Batches: 6 batches of 512 samples>", "<Batch 0: 512 samples>"]
    assert repr(next(iter(batch))).startswith("<MicroBatch: ")
    stream = autobatch.batches(iter([1]), small_plan(2048))
    assert repr(stream) == "<Batches: batches of 2,048 samples>"
    with pytest.raises(TypeError, match="give steps="):
        len(stream)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: autobatch.batches(points(), 24), "takes a plan of autobatch.plan, found an int"),
        (lambda: autobatch.batches(points(), small_plan(world_size=2)), "the plan is for 2 ranks"),
        (lambda: autobatch.batches(points(), small_plan(), steps=0), "steps is 0: it must be 1 or more"),
        (lambda: autobatch.batches(points(), small_plan(), epochs=0), "epochs is 0: it must be 1 or more"),
        (lambda: autobatch.batches(points(), small_plan(), start=-1), "start is -1: it must be 0 or more"),
        *[
            (partial(autobatch.batches, points(), small_plan(), **{name: value}), message)  # type: ignore[arg-type]
            for name, value, message in (
                ("steps", 2.5, "steps must be a whole number, found a float"),
                ("start", None, "start must be a whole number, found nothing"),
                ("seed", "x", "seed must be a whole number, found a str"),
                ("counts", "boxes", "be a function, found a str"),
                ("counts", lambda: {}, r"counts=….*\(data\).*test_own_loop.py:\d+\) that does not take"),
                ("collate", 3, r"collate=…\) must be a function, found an int"),
                ("size_of", lambda: 1, r"size_of=….*\(sample\).*test_own_loop.py:\d+\) that does not take"),
                ("sampler", 3, r"sampler=…\) must draw the indices of an epoch, found an int"),
                ("scaler", True, r"scaler=…\) must be a torch.amp.GradScaler, found a bool"),
                *[
                    ("optimizer", one, f"optimizers of torch.optim, found {found}")
                    for one, found in (
                        (3, "an int"),
                        ("x", "a str"),
                        (torch.optim.SGD, "a type"),
                        ([None], "nothing"),
                    )
                ],
            )
        ],
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


# the step of a batch


def first_batch():
    return next(iter(autobatch.batches(points(), small_plan())))


@pytest.mark.parametrize("overflows", [False, True])
def test_a_loss_scale_changes_nothing_and_an_overflow_skips_the_step(overflows: bool) -> None:
    workload = make_workload(model=lambda: network(torch.float32), train_data=points(dtype=torch.float32))
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss, clip=0.01)
    torch.manual_seed(0)
    model = workload.model()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126 if overflows else 2.0**10)
    for batch in autobatch.batches(
        workload.train_data, small_plan(), sampler=range(SAMPLES), scaler=scaler, optimizer=optimizer
    ):
        for micro in batch:
            batch.backward(mean_loss(model, micro.data) * (1e6 if overflows else 1.0))
        result = batch.step(max_grad_norm=0.01)
    assert result.applied is not overflows
    assert scaler.get_scale() == (2.0**125 if overflows else 2.0**10)
    if overflows:
        assert torch.equal(weights(model), before)
    else:
        assert apart(weights(model) - before, expected - before) < 1e-5


def test_a_disabled_scaler_lets_no_overflow_through() -> None:
    workload = make_workload()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(NonFiniteError, match=r"the loss \(nan\) of batch 0 is not finite"):
        train_in_own_loop(
            make_workload(loss=lambda model, batch: mean_loss(model, batch) * math.nan),
            autobatch.batches(workload.train_data, small_plan(), scaler=scaler),
        )


def test_gradients_of_16_bit_parameters_add_up() -> None:
    """1024 times 1/1024 is 1, but 0.25 if bf16 adds up in bf16."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))

    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = small_plan(1024, 1)
    for batch in autobatch.batches(Rows(torch.ones(1024)), plan, optimizer=[optimizer]):
        for micro in batch:
            batch.backward((model.weight * micro.data[0].bfloat16()).mean())
        batch.step()
    assert model.weight.item() == -1.0
    assert not model.weight._post_accumulate_grad_hooks
    batch = next(iter(autobatch.batches(Rows(torch.ones(1024)), plan)))
    for micro in batch:
        batch.backward((model.weight * micro.data[0].bfloat16()).mean())
    with pytest.raises(InputError, match="parameters in bfloat16"):
        batch.step(optimizer)


def test_several_optimizers_step_together_and_are_clipped_by_one_norm() -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss, clip=0.01)
    torch.manual_seed(0)
    model = workload.model()
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    for batch in autobatch.batches(workload.train_data, small_plan()):
        for micro in batch:
            batch.backward(mean_loss(model, micro.data))
        result = batch.step(*pair, max_grad_norm=0.01)
    assert result.stepped == (True, True)
    assert apart(weights(model), expected) <= EXACT


def test_earlier_gradients_do_not_count_if_the_optimizer_is_known() -> None:
    workload = make_workload()
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss)
    torch.manual_seed(0)
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_loss(model, next(iter(DataLoader(workload.train_data, batch_size=9)))).backward()
    for batch in autobatch.batches(workload.train_data, small_plan(), optimizer=optimizer):
        for micro in batch:
            batch.backward(mean_loss(model, micro.data))
        batch.step()
    assert apart(weights(model), expected) <= EXACT


def test_a_batch_that_counts_nothing_takes_no_step() -> None:
    data = tokens()
    data.columns[1].fill_(IGNORED)
    workload = make_workload(model=language_model, train_data=data, loss=token_loss)
    torch.manual_seed(0)
    before = weights(workload.model())
    found, losses = train_in_own_loop(workload, autobatch.batches(data, small_plan()))
    assert torch.equal(found, before)
    assert math.isnan(losses[0])


def test_a_step_before_the_end_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = first_batch()
    with pytest.raises(InputError, match="after 0 of 24 samples of batch 0"):
        batch.step(optimizer)
    micros = iter(first_batch())
    next(micros)
    with pytest.raises(InputError, match=r"not called for micro-batch 1 of batch 0.*of loss\.backward"):
        next(micros)
    for micro in batch:
        with pytest.raises(InputError, match=r"not called for micro-batch|after \d+ of 24"):
            batch.step(optimizer)
        batch.backward(mean_loss(model, micro.data))
        with pytest.raises(InputError, match="called without a micro-batch in batch 0"):
            batch.backward(mean_loss(model, micro.data))
    with pytest.raises(InputError, match="has no optimizer"):
        batch.step()
    with pytest.raises(InputError, match="found a Sequential"):
        batch.step(model)
    assert batch.step(optimizer).applied
    with pytest.raises(InputError, match="already taken"):
        batch.step(optimizer)


def test_a_batch_without_a_step_does_not_leak_into_the_next() -> None:
    model = network()
    batches = iter(autobatch.batches(points(), small_plan(8), steps=2))
    batch = next(batches)
    for micro in batch:
        batch.backward(mean_loss(model, micro.data))
    with pytest.raises(InputError, match="no step was taken for batch 0"):
        next(batches)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda found: found.expand(3), r"a tensor of shape \(3,\)"),
        (lambda found: found.item(), "found a float"),
        (lambda found: Loss(found.expand(3), 3), "total of a Loss"),
    ],
)
def test_a_value_that_is_not_a_loss_is_refused(loss, message: str) -> None:
    batch, model = first_batch(), network()
    micro = next(iter(batch))
    with pytest.raises(InputError, match=message):
        batch.backward(loss(mean_loss(model, micro.data)))


def test_a_detached_loss_is_refused() -> None:
    workload = make_workload(loss=lambda model, batch: mean_loss(model, batch).detach())
    with pytest.raises(InputError, match="no gradient"):
        train_in_own_loop(workload, autobatch.batches(points(), small_plan()))


# several passes over a batch


@pytest.mark.parametrize("form", ["data", "loader"])
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("limit", [1, 4, 24])
def test_two_passes_are_the_two_steps_of_a_gan(limit: int, clip: float | None, form: str) -> None:
    data = gan_data()
    order = list(range(SAMPLES)) * 2
    whole = [order[at : at + 10] for at in range(0, 48, 10)]
    source, more = (data, {"sampler": range(SAMPLES)}) if form == "data" else (DataLoader(data, 7), {})
    found = train_gan(
        lambda both: autobatch.batches(source, small_plan(10, limit), epochs=2, optimizer=both, **more),
        clip=clip,
    )
    assert apart(found, train_gan_on_whole_batches(whole, clip=clip)) <= EXACT


def test_a_further_pass_sees_the_same_draws_and_moves_no_generator() -> None:
    """Samples are augmented at random when they are read."""

    class Augmented(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return (self.columns[0][index] + torch.randn(()) + random.random() + np.random.rand(),)

    def walk(passes: int) -> list[list[torch.Tensor]]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        model = nn.Linear(1, 1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[list[torch.Tensor]] = []
        for batch in autobatch.batches(Augmented(torch.zeros(9, 1).double()), small_plan(9, 2), epochs=2):
            for _ in range(passes):
                found.append([])
                for micro in batch:
                    found[-1].append(micro.data[0])
                    batch.backward(model(micro.data[0]).square().mean())
                batch.step(optimizer)
        return found

    once, twice = walk(1), walk(2)
    for first, second, alone in zip(twice[::2], twice[1::2], once, strict=True):
        assert len(first) == 5
        assert all(map(torch.equal, first, second))
        assert all(map(torch.equal, first, alone))
    assert not torch.equal(once[0][0], once[1][0])


def test_sharpness_aware_minimization_takes_two_passes() -> None:
    """The gradient of the second pass is taken at the weights that the first one moved."""

    class Half(torch.optim.Optimizer):
        def __init__(self, sam: Sam, step: Callable[[], None]) -> None:
            super().__init__(sam.param_groups, {})
            self.step = step

    workload = make_workload()
    torch.manual_seed(0)
    model = workload.model()
    sam = Sam(model.parameters(), lr=0.1)
    halves = Half(sam, sam.first_step), Half(sam, sam.second_step)
    for batch in autobatch.batches(workload.train_data, small_plan(), epochs=3):
        for half in halves:
            for micro in batch:
                batch.backward(mean_loss(model, micro.data))
            batch.step(half)

    torch.manual_seed(0)
    whole = workload.model()
    parameters = list(whole.parameters())

    def gradient() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(mean_loss(whole, workload.train_data.columns), parameters)

    for _ in range(3):
        before, first = [p.detach().clone() for p in parameters], gradient()
        norm = torch.cat([one.flatten() for one in first]).norm()
        for p, one in zip(parameters, first, strict=True):
            p.data += 0.05 * one / norm
        for p, start, one in zip(parameters, before, gradient(), strict=True):
            p.data.copy_(start - 0.1 * one)
    assert apart(weights(model), weights(whole)) <= EXACT


def test_each_pass_adds_up_the_16_bit_gradients_of_its_own_parameters() -> None:
    """Each loss reaches both parameters, of which one steps."""
    first, second = (nn.Parameter(torch.zeros((), dtype=torch.bfloat16)) for _ in range(2))
    both = [torch.optim.SGD([one], lr=1.0) for one in (first, second)]
    for batch in autobatch.batches(Rows(torch.ones(1024)), small_plan(1024, 1), epochs=2, optimizer=both):
        for factor, optimizer in zip((1.0, 2.0), both, strict=True):
            for micro in batch:
                batch.backward(((first + second) * factor * micro.data[0].bfloat16()).mean())
            assert batch.step(optimizer).stepped == (True,)
    assert (first.item(), second.item()) == (-2.0, -4.0)
    assert first.grad is None
    assert second.grad is None


def test_each_pass_has_its_own_check_of_finite_gradients() -> None:
    generator, discriminator, (first, second) = gan_parts()
    before = weights(generator)
    batch = next(iter(autobatch.batches(gan_data(), small_plan(), optimizer=[first, second])))
    for micro in batch:
        batch.backward(discriminator(generator(micro.data[1])).mean())
    assert batch.step(first).stepped == (True,)
    for micro in batch:
        batch.backward(discriminator(generator(micro.data[1])).mean() * math.nan)
    with pytest.raises(NonFiniteError, match=r"the loss .* of batch 0 is not finite"):
        batch.step(second)
    assert torch.equal(weights(generator), before)


def test_a_pass_is_refused_before_the_step_of_the_one_before() -> None:
    model = network()
    batch = first_batch()
    for micro in batch:
        batch.backward(mean_loss(model, micro.data))
    with pytest.raises(InputError, match=r"batch 0 were asked for again before its step was taken"):
        iter(batch)


def test_an_optimizer_that_comes_late_is_refused() -> None:
    """What it reads may hold gradients of the passes before it was known."""
    generator, discriminator, (first, second) = gan_parts()
    batch = next(iter(autobatch.batches(gan_data(), small_plan())))
    for optimizer in (first, second):
        for micro in batch:
            batch.backward(discriminator(generator(micro.data[1])).mean())
        if optimizer is first:
            batch.step(first)
    with pytest.raises(InputError, match=r"given an Adam that no pass .* optimizer=\[first, second\]"):
        batch.step(second)


# batches cut by size


RAGGED = ragged_workload()
CUT = ragged_split(RAGGED, 4).cut
BY_SIZE = msgspec.structs.replace(
    make_plan(target_batch=24, micro_batch_limit=4, learning_rate=0.01),
    split="size",
    size_cut=msgspec.structs.replace(CUT, by_size_of=True),
)


def length(sample) -> int:
    return len(sample[0])


def train_by_size(data, **options):
    """Train in a loop of one's own; return the weights and the samples of each micro-batch."""
    torch.manual_seed(0)
    model = RAGGED.model()
    optimizer = RAGGED.optimizer(model.parameters(), 0.01)
    counts = []
    for batch in autobatch.batches(data, BY_SIZE, steps=4, **options):
        counts.append([])
        for micro in batch:
            batch.backward(token_loss(model, micro.data))
            counts[-1].append((micro.samples, micro.data[0].shape[1]))
        batch.step(optimizer)
    return weights(model), counts


def by_whole_batches() -> torch.Tensor:
    loop = make_loop(RAGGED, target_batch=24, micro_batch=24, steps=4)
    list(loop.run())
    return weights(loop.train_state.model)


def test_batches_are_cut_by_size_and_keep_their_gradient() -> None:
    found, counts = train_by_size(RAGGED.train_data, collate=pad, size_of=length)
    assert apart(found, by_whole_batches()) <= 1e-12
    for batch in counts:
        assert sum(samples for samples, _ in batch) == 24
        assert [padded for _, padded in batch] == sorted((padded for _, padded in batch), reverse=True)
        for samples, padded in batch:
            assert samples * padded <= CUT.micro_batch * CUT.longest


def test_a_stream_is_cut_too() -> None:
    data = RAGGED.train_data
    _, counts = train_by_size((data[i % len(data)] for i in range(96)), collate=pad, size_of=length)
    assert all(batch[0][1] > batch[-1][1] for batch in counts)


@pytest.mark.parametrize("is_loader", [False, True])
def test_without_sizes_batches_are_split_by_count(is_loader: bool) -> None:
    if is_loader:
        data = DataLoader(RAGGED.train_data, batch_size=8, collate_fn=pad)
        _, counts = train_by_size(data, size_of=length)
    else:
        found, counts = train_by_size(RAGGED.train_data, collate=pad)
        assert apart(found, by_whole_batches()) <= 1e-12
    assert all(sum(samples for samples, _ in batch) == 24 for batch in counts)
    assert max(samples for batch in counts for samples, _ in batch) <= 4


def test_an_invalid_size_is_an_error() -> None:
    with pytest.raises(InputError, match="returned nan for sample 0"):
        train_by_size(RAGGED.train_data, collate=pad, size_of=lambda sample: float("nan"))
