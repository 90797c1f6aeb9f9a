"""`autobatch.batches` in a loop of one's own, against one pass over each whole batch in float64."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import autobatch
from autobatch import InputError, NonFiniteError, WholeBatchLoss
from autobatch.workload.order import GlobalBatchSampler
from tests.support.custom_loops import Sam, ids_by_batch, small_plan, train_in_own_loop
from tests.support.ragged import ragged_split, ragged_workload
from tests.support.steps import EXACT, KINDS, SAMPLES
from tests.support.training import (
    Rows,
    apart,
    make_loop,
    make_workload,
    mean_loss,
    network,
    points,
    reference,
    token_loss,
    weights,
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["mean", "tokens", "terms"])
@pytest.mark.parametrize(("limit", "clip"), [(1, 0.01), (5, None)])
def test_steps_equal_those_of_whole_batches(kind: str, limit: int, clip: float | None) -> None:
    fields, whole_loss = KINDS[kind]
    workload = make_workload(**fields)
    sampler = GlobalBatchSampler(samples=SAMPLES, target_batch=10, seed=3, epochs=2)
    expected, losses = reference(workload, [b.ids for b in sampler.batches()], whole_loss, clip=clip)
    found, own = train_in_own_loop(workload, small_plan(10, limit), epochs=2, seed=3, clip=clip)
    assert apart(found, expected) <= EXACT
    assert own == pytest.approx(losses, rel=EXACT)


@pytest.mark.parametrize(
    "data", [torch.arange(23), lambda: iter(torch.arange(23))], ids=["with an index", "stream"]
)
def test_a_run_resumes_at_any_batch(data: Any) -> None:
    plan = small_plan(10, 4)
    full = ids_by_batch(data, plan, steps=6, seed=5)
    assert [len(ids) for ids in full] == [10] * 6
    if callable(data):
        assert [index for ids in full for index in ids] == [*range(23), *range(23), *range(14)]
    assert ids_by_batch(data, plan, steps=6, start=2, seed=5) == full[2:]


def test_batches_are_iterated_once() -> None:
    found = autobatch.batches(
        make_workload(train_data=points(1024)), small_plan(512), optimizer=sgd(network()), epochs=3
    )
    assert len(found) == 6
    batch = next(iter(found))
    micro = next(iter(batch))
    assert (batch.index, batch.samples) == (0, 512)
    with pytest.raises(InputError, match=r"already iterated.*epochs=N"):
        next(iter(found))
    for part in (batch, micro):
        with pytest.raises(AttributeError, match=r"micro\.data"):
            _ = part.inputs


PLAN = small_plan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": 24}, r"batches\(workload, autobatch.plan\(workload, …\).*found an int"),
        ({"plan": small_plan(world_size=2)}, "the plan is for 2 ranks, and .* in 1 process"),
        ({"plan": msgspec.structs.replace(PLAN, parallel="shard")}, "parallel='replicate'"),
        ({"workload": points()}, "must be an autobatch.Workload"),
        ({"workload": make_workload(loss=WholeBatchLoss(represent=mean_loss, loss=mean_loss))}, "fit"),
        ({"workload": make_workload(train_data=lambda: iter(points()))}, "stream .* --steps N"),
        ({"steps": 0}, "steps must be a whole number of 1 or more, found 0"),
        ({"start": -1}, "start must be a whole number of 0 or more, found -1"),
        ({"optimizer": torch.optim.SGD}, "optimizers of torch.optim, found a type"),
    ],
)
def test_an_invalid_option_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"workload": make_workload(), "plan": PLAN, "optimizer": sgd(network()), **options}
    with pytest.raises(InputError, match=message):
        autobatch.batches(given.pop("workload"), given.pop("plan"), **given)


# the step of a batch


@pytest.mark.parametrize("overflows", [False, True])
def test_a_loss_scale_changes_nothing_and_an_overflow_skips_the_step(overflows: bool) -> None:
    workload = make_workload(model=lambda: network(torch.float32), train_data=points(dtype=torch.float32))
    expected, _ = reference(workload, [range(SAMPLES)], mean_loss, clip=0.01)
    torch.manual_seed(0)
    model = workload.model()
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126 if overflows else 2.0**10)
    for batch in autobatch.batches(workload, small_plan(), scaler=scaler, optimizer=sgd(model)):
        for micro in batch:
            batch.backward(mean_loss(model, micro.data) * (1e6 if overflows else 1.0))
        result = batch.step(max_grad_norm=0.01)
    assert result.applied is not overflows
    assert scaler.get_scale() == (2.0**125 if overflows else 2.0**10)
    off = weights(model) - (before if overflows else expected)
    assert float(off.norm()) < 1e-5 * float((expected - before).norm())


def test_a_micro_batch_is_held_by_the_variables_of_the_loop_alone() -> None:
    workload = make_workload(**KINDS["terms"][0])
    model = workload.model()
    for batch in autobatch.batches(workload, PLAN, optimizer=sgd(model)):
        for micro in batch:
            held = weakref.ref(micro.data[0])
            loss = workload.loss(model, micro.data)
            del micro
            batch.backward(loss)
            del loss
            gc.collect()
            assert held() is None
        batch.step()


def test_a_step_before_the_end_is_refused() -> None:
    model = network()
    batch, other = (
        next(iter(autobatch.batches(make_workload(), PLAN, optimizer=sgd(model)))) for _ in range(2)
    )
    with pytest.raises(InputError, match="after 0 of 24 samples"):
        batch.step()
    micros = iter(other)
    next(micros)
    with pytest.raises(InputError, match=r"not called for micro-batch 1.*of loss\.backward"):
        next(micros)
    for micro in batch:
        with pytest.raises(InputError, match=r"not called for micro-batch|after \d+ of 24"):
            batch.step()
        batch.backward(mean_loss(model, micro.data))
        with pytest.raises(InputError, match="called without a micro-batch"):
            batch.backward(mean_loss(model, micro.data))
    assert batch.step().applied
    with pytest.raises(InputError, match="already taken"):
        batch.step()
    with pytest.raises(InputError, match=r"asked for again.*zip"):
        iter(batch)
    batches = iter(autobatch.batches(make_workload(), small_plan(8), optimizer=sgd(model)))
    assert next(iter(next(batches))).samples == 4
    with pytest.raises(InputError, match="batch 0: no step was taken"):
        next(batches)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, optimizer: optimizer.step(),
    ],
)
@pytest.mark.parametrize("is_at_end", [True, False])
def test_what_another_loop_does_between_micro_batches_is_refused(
    change: Callable[[nn.Module, torch.optim.Optimizer], object], is_at_end: bool
) -> None:
    model = network()
    optimizer = sgd(model)
    batch = next(iter(autobatch.batches(make_workload(), PLAN, optimizer=optimizer)))

    def train() -> None:
        for micro in batch:
            with pytest.raises(TypeError, match=r"micro\.data"):
                _, _ = micro
            batch.backward(mean_loss(model, micro.data))
            if not is_at_end:
                change(model, optimizer)
        change(model, optimizer)
        batch.step()

    with pytest.raises(InputError, match=r"leave out optimizer\.zero_grad"):
        train()


def test_a_disabled_scaler_lets_no_overflow_through() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    workload = make_workload(loss=lambda model, batch: mean_loss(model, batch) * math.nan)
    with pytest.raises(NonFiniteError, match="of batch 0 is not finite"):
        train_in_own_loop(workload, PLAN, scaler=scaler)


# several steps on the same samples


Step = tuple[nn.Module, Callable[..., Tensor], torch.optim.Optimizer]


class Half(torch.optim.Optimizer):
    def __init__(self, sam: Sam, step: Callable[[], None]) -> None:
        super().__init__(sam.param_groups, {})
        self.step = step


def halves() -> list[Step]:
    """Return the steps of sharpness-aware minimization; the second has its gradient where the first ended."""
    torch.manual_seed(0)
    model = network()
    sam = Sam(model.parameters(), lr=0.1)

    def loss(inputs: Tensor, _: Tensor) -> Tensor:
        return model(inputs).square().mean()

    return [(model, loss, Half(sam, step)) for step in (sam.first_step, sam.second_step)]


def gan() -> list[Step]:
    """Return a discriminator and a generator with their losses and optimizers."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    discriminator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def judge(real: Tensor, noise: Tensor) -> Tensor:
        """Return a loss that also reaches the generator, whose gradient must not count."""
        return (softplus(-discriminator(real)) + softplus(discriminator(generator(noise)))).mean()

    def fool(_: Tensor, noise: Tensor) -> Tensor:
        return softplus(-discriminator(generator(noise))).mean()

    pairs = ((discriminator, judge), (generator, fool))
    return [(model, loss, torch.optim.Adam(model.parameters(), lr=0.01)) for model, loss in pairs]


@pytest.mark.parametrize("made", [halves, gan])
def test_two_batches_of_the_same_samples_are_two_steps(made: Callable[[], list[Step]]) -> None:
    data = Rows(points().columns[0], torch.randn(SAMPLES, 3, dtype=torch.float64))
    workload, found, expected = make_workload(train_data=data, sampler=range(SAMPLES)), made(), made()
    of_both = [autobatch.batches(workload, small_plan(10, 4), optimizer=of, epochs=2) for *_, of in found]
    for pair in zip(*of_both, strict=True):
        for batch, (_, loss, _) in zip(pair, found, strict=True):
            for micro in batch:
                batch.backward(loss(*micro.data))
            batch.step(max_grad_norm=0.01)
    for ids in torch.arange(2 * SAMPLES).split(10):
        for model, loss, optimizer in expected:
            model.zero_grad()
            loss(*(column[ids % SAMPLES] for column in data.columns)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    for (model, *_), (whole, *_) in zip(found, expected, strict=True):
        assert apart(weights(model), weights(whole)) <= EXACT


# batches cut by size


def test_batches_are_cut_by_size_and_keep_their_gradient() -> None:
    workload = ragged_workload()
    cut = ragged_split(workload, 4).cut
    plan = msgspec.structs.replace(small_plan(24, 4), split="size", size_cut=cut)
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), 0.01)
    sizes: list[list[tuple[int, int]]] = []
    for batch in autobatch.batches(workload, plan, optimizer=optimizer, steps=4):
        sizes.append([])
        for micro in batch:
            batch.backward(token_loss(model, micro.data))
            sizes[-1].append((micro.samples, micro.data[0].shape[1]))
        batch.step()
    loop = make_loop(workload, target_batch=24, micro_batch=24, steps=4)
    list(loop.run())
    assert apart(weights(model), weights(loop.train_state.model)) <= 1e-12
    for of_batch in sizes:
        assert sum(samples for samples, _ in of_batch) == 24
        assert all(samples * padded <= cut.micro_batch * cut.longest for samples, padded in of_batch)
    others = ragged_workload(size_of=lambda sample: 1.0)
    with pytest.raises(InputError, match="sizes of the training samples are not those"):
        autobatch.batches(others, plan, optimizer=optimizer)
