"""The sum of a batch over ranks that are threads, against sums that torch makes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autobatch import InputError
from autobatch.distributed.reduce import Reduction, read_numbers, write_numbers
from autobatch.step.gradients import Gradients
from autobatch.step.loss import StepTotals

WORLD = 3
SIZES = [(3, 2), (40,), (2,), (5, 5), (6, 2), (1,)]
HEADER = WORLD * 7 * 8 + len(SIZES)
"""Elements with ten numbers of each rank, a byte in each, and a flag for each parameter."""
DTYPES = [torch.float32, torch.float64]
NUMBERS = st.one_of(
    st.integers(-(2**53), 2**53).map(float),
    st.floats(1e-20, 1e30),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1 / 3, -2.5, 5e-324]),
)


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=4))
def test_every_rank_reads_the_rows_of_all_bit_for_bit(dtype: torch.dtype, rows: list[list[float]]) -> None:
    whole = torch.zeros(len(rows) * 3 * 8, dtype=dtype)
    for rank, row in enumerate(rows):
        cells = torch.full_like(whole, 7.0)
        write_numbers(cells, rank, [row[0], torch.tensor(row[1], dtype=torch.float64), row[2]])
        whole += cells
    assert list(map(repr, read_numbers(whole, len(rows)))) == list(map(repr, rows))


class Threads:
    """Ranks that are threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(WORLD)
        self.given: list[Any] = [None] * WORLD
        self.sums = [0] * WORLD

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait(20)
        found = list(self.given)
        self.barrier.wait(20)
        return found


class Rank:
    """One of them, with what a reduction uses of `Group`."""

    world = WORLD

    def __init__(self, threads: Threads, rank: int) -> None:
        self.rank = rank
        self._threads = threads

    def gather(self, value: Any) -> list[Any]:
        return self._threads.exchange(self.rank, value)

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        self._threads.sums[self.rank] += 1
        tensor.copy_(torch.stack(self._threads.exchange(self.rank, tensor.clone())).sum(0))
        return lambda: None

    def waiting(self, act: str) -> AbstractContextManager[None]:
        return nullcontext()


def gradients_of(rank: int, dtypes: Sequence[torch.dtype]) -> tuple[list[nn.Parameter], Gradients]:
    """Make parameters with gradients; rank 1 lacks one, and all lack the last."""
    generator = torch.Generator().manual_seed(rank)
    parameters = [nn.Parameter(torch.zeros(size, dtype=one)) for size, one in zip(SIZES, dtypes, strict=True)]
    for number, parameter in enumerate(parameters[:-1]):
        if (rank, number) != (1, 2):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return parameters, Gradients(nn.ParameterList(parameters), (torch.optim.SGD(parameters, lr=1.0),))


def run_ranks(
    capacity: int, outcomes: list[Any], dtypes: Sequence[torch.dtype], *, is_sparse: bool = False
) -> tuple[list[Any], Threads]:
    threads = Threads()
    found: list[Any] = [None] * WORLD

    def run(rank: int) -> None:
        reduction = Reduction(Rank(threads, rank))  # type: ignore[arg-type]
        parameters, gradients = gradients_of(rank, dtypes)
        if is_sparse and rank == 1:
            parameters[0].grad = parameters[0].grad.to_sparse(1)  # type: ignore[union-attr]
        state: Any = SimpleNamespace(
            gradients=gradients,
            exchange=torch.zeros(HEADER + capacity, dtype=max(dtypes, key=lambda one: one.itemsize)),
            scaler=None,
            items_per_sample=None,
        )
        try:
            rows = reduction.run(state, outcomes[rank])
        except InputError as error:
            found[rank] = error
            return
        found[rank] = rows, [parameter.grad for parameter in parameters]

    started = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return found, threads


def means() -> list[StepTotals]:
    return [StepTotals(samples=9, divisor=9.0, loss=0.1 * rank, sizes=[3]) for rank in range(WORLD)]


FLOATS = [torch.float32] * len(SIZES)


@pytest.mark.parametrize(("capacity", "alone"), [(200, 0), (46, 1), (21, 2), (3, 4), (0, 5)])
@pytest.mark.parametrize("first", DTYPES)
def test_gradients_are_summed_in_any_capacity(capacity: int, alone: int, first: torch.dtype) -> None:
    """One reduction has the figures and the small gradients."""
    dtypes = [first, *FLOATS[1:]]
    found, threads = run_ranks(capacity, means(), dtypes)
    own = [[p.grad for p in gradients_of(rank, dtypes)[0]] for rank in range(WORLD)]
    for rows, gradients in found:
        assert [row.loss for row in rows] == [0.0, 0.1, 0.2]
        assert gradients[-1] is None, "no rank has one"
        for number in range(len(SIZES) - 1):
            ours = [one[number] for one in own if one[number] is not None]
            torch.testing.assert_close(gradients[number], sum(ours), rtol=1e-12, atol=1e-6)
            assert torch.equal(gradients[number], found[0][1][number])
        if first is torch.float64:
            assert torch.equal(gradients[0], own[0][0] + own[1][0] + own[2][0])
    assert set(threads.sums) == {1 + alone}


def test_nothing_is_summed_if_a_rank_failed() -> None:
    outcomes: list[Any] = [*means()[:2], None]
    found, threads = run_ranks(9, outcomes, FLOATS)
    assert set(threads.sums) == {1}
    for rank, (rows, gradients) in enumerate(found):
        assert [row.failed for row in rows] == [0, 0, 1]
        for gradient, before in zip(gradients, gradients_of(rank, FLOATS)[0], strict=True):
            assert gradient is before.grad is None or torch.equal(gradient, before.grad)


def test_a_sparse_gradient_on_one_rank_is_refused_on_every_rank() -> None:
    found, _ = run_ranks(200, means(), FLOATS, is_sparse=True)
    assert all("use sparse=False" in str(error) for error in found)


def test_losses_of_two_kinds_are_refused_on_every_rank() -> None:
    outcomes = means()
    outcomes[1].count = 4.0
    found, _ = run_ranks(200, outcomes, FLOATS)
    assert {str(one) for one in found} == {
        "the workload's loss returned a Loss on one rank and a tensor on another: return one kind"
    }
