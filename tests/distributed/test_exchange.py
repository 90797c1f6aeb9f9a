"""The buffer in which ranks sum their gradients, with ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from autobatch.distributed.exchange import Exchange
from autobatch.distributed.figures import table_size
from autobatch.step.gradients import Gradients, exchange_buffer

SIZES = [(3, 2), (40,), (2,), (5, 5), (1,)]
WORLD = 3


class Sums:
    """A reduction over threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(WORLD)
        self.given: list[Tensor] = [torch.empty(0)] * WORLD
        self.count = [0] * WORLD

    def of(self, rank: int) -> Callable[[Tensor], None]:
        def reduce(tensor: Tensor) -> None:
            self.given[rank] = tensor.clone()
            self.barrier.wait(20)
            tensor.copy_(torch.stack(self.given).sum(0))
            self.count[rank] += 1
            self.barrier.wait(20)

        return reduce


def gradients_of(rank: int, dtypes: Sequence[torch.dtype]) -> tuple[list[nn.Parameter], Gradients]:
    """Make parameters with gradients; rank 1 lacks one, and all lack the last."""
    generator = torch.Generator().manual_seed(rank)
    parameters = [
        nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in zip(SIZES, dtypes, strict=True)
    ]
    for number, parameter in enumerate(parameters[:-1]):
        if (rank, number) != (1, 2):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    return parameters, Gradients(nn.ParameterList(parameters), (optimizer,))


def run_ranks(capacity: int, rows: list[list[float]], dtypes: Sequence[torch.dtype]) -> tuple[list, Sums]:
    sums = Sums()
    found: list = [None] * WORLD

    def run(rank: int) -> None:
        parameters, gradients = gradients_of(rank, dtypes)
        buffer = exchange_buffer(parameters, torch.device("cpu"), world=WORLD)
        header = table_size(WORLD, 2, buffer.dtype) + len(parameters)
        exchange = Exchange(buffer[: header + capacity], parameters, world=WORLD, columns=2)
        assert exchange.fits(parameters)
        assert not exchange.fits(parameters[1:])
        found[rank] = exchange.run(rows[rank], rank, gradients, sums.of(rank)), [p.grad for p in parameters]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, sums


FLOATS = [torch.float32] * 5


@pytest.mark.parametrize(("capacity", "reductions"), [(74, 1), (40, 3), (30, 3), (4, 6), (0, 6)])
def test_gradients_are_summed_in_any_capacity(capacity: int, reductions: int) -> None:
    rows = [[0.0, 0.1 * rank] for rank in range(WORLD)]
    found, sums = run_ranks(capacity, rows, FLOATS)
    own = [[p.grad for p in gradients_of(rank, FLOATS)[0]] for rank in range(WORLD)]
    for of_rank, gradients in found:
        assert of_rank == rows
        assert gradients[-1] is None, "no rank has one"
        for number in range(4):
            expected = sum(one[number] for one in own if one[number] is not None)
            torch.testing.assert_close(gradients[number], expected)
            assert torch.equal(gradients[number], found[0][1][number])
    assert set(sums.count) == {reductions}


def test_nothing_is_summed_if_a_rank_failed() -> None:
    rows = [[0.0, 1.0], [1.0, 2.0], [0.0, 3.0]]
    found, sums = run_ranks(4, rows, FLOATS)
    assert set(sums.count) == {1}
    for rank, (of_rank, gradients) in enumerate(found):
        assert of_rank == rows
        for gradient, before in zip(gradients, gradients_of(rank, FLOATS)[0], strict=True):
            assert gradient is before.grad is None or torch.equal(gradient, before.grad)


def test_a_large_float64_gradient_keeps_its_precision() -> None:
    dtypes = [torch.float64, *FLOATS[1:]]
    found, _ = run_ranks(74, [[0.0, 0.0]] * WORLD, dtypes)
    expected = sum(gradients_of(rank, dtypes)[0][0].grad for rank in range(WORLD))
    assert torch.equal(found[0][1][0], expected)
