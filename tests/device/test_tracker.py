"""The storage tracker against storages counted by hand, and errors that must leave nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, in frames that then outlive the test
from torch import Tensor, nn

from autobatch.core.units import KiB, MiB
from autobatch.device.allocator import Allocator, CachingAllocator
from autobatch.device.trace import replay
from autobatch.device.tracker import UPDATES, StorageTracker

F32 = 4


@pytest.fixture(autouse=True)
def no_garbage_collection():
    """Frees must come from reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tracker(limit: int | None = None, **options) -> StorageTracker:
    return StorageTracker(Allocator(limit), **options)


def held(meter: StorageTracker) -> int:
    return meter.stats().allocated_bytes


def test_counts_a_small_step_by_hand():
    """Linear(8 -> 16), ReLU, Linear(16 -> 1), mean, on 32 samples: every storage that is alive is listed."""
    torch.manual_seed(0)
    with tracker() as meter:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        parameters = (8 * 16 + 16 + 16 * 1 + 1) * F32
        assert held(meter) == parameters
        x = torch.randn(32, 8)
        data = 32 * 8 * F32
        assert held(meter) == parameters + data
        hidden = model[0](x)
        assert held(meter) == parameters + data + 32 * 16 * F32
        active = model[1](hidden)
        del hidden  # nobody saves it: ReLU keeps its result
        assert held(meter) == parameters + data + 32 * 16 * F32
        loss = model[2](active).mean()
        # The second linear keeps its input, the mean only a shape; the loss is one number.
        assert held(meter) == parameters + data + 32 * 16 * F32 + F32
        loss.backward()
        del loss, active
        assert held(meter) == 2 * parameters + data
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
        # The momentum buffers went with the optimizer.
        assert held(meter) == 2 * parameters + data
        model.zero_grad()
        del x
        assert held(meter) == parameters
        del model
        assert held(meter) == 0


def test_what_was_made_elsewhere_is_counted_once():
    x, y = torch.ones(100), torch.ones(50)
    with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns without it
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 5), (4, 5))
    with tracker() as meter:
        meter.count([x, x[5:], x.detach(), nn.Parameter(x)])
        assert held(meter) == 400
        y.add_(1)  # changes it, but does not count it
        assert held(meter) == 400
        meter.count([sparse])
        assert held(meter) == 400 + 2 * 8 + 10 * F32
        assert torch.tensor([1.0, 2.0]).sum() == 3
        two = torch.tensor([1.0, 2.0])
        assert held(meter) == 400 + 2 * 8 + 10 * F32 + 2 * F32
        del two
    with tracker(399) as meter, pytest.raises(torch.OutOfMemoryError):
        meter.count([x])
    model, ids = nn.Embedding(1000, 8, sparse=True), torch.tensor([1, 2, 2])
    with tracker() as meter:
        meter.count([*model.parameters(), ids])
        model(ids).sum().backward()
        before = held(meter)
        model.weight.grad = None
        assert before - held(meter) == 3 * 8 + 3 * 8 * F32


def test_resized_storages():
    with tracker() as meter:
        x = torch.empty(0)
        x.resize_(256)
        assert held(meter) == KiB
        x.resize_(100)  # torch keeps the storage
        assert held(meter) == KiB
        storage = x.untyped_storage()
        storage.resize_(4 * KiB)
        meter.mark("forward")
        assert held(meter) == 4 * KiB
        storage.resize_(0)
        x.resize_(0)
        assert held(meter) == 0
        del storage, x
        assert held(meter) == 0
        out = torch.empty(0)
        torch.add(torch.ones(512), 1, out=out)
        assert held(meter) == 2 * KiB


@pytest.mark.parametrize(("operator", "limit"), [(torch.unique, 11_000), (torch.sort, 13_000)])
def test_the_error_holds_on_to_nothing_that_did_not_fit(operator, limit):
    """Of a sort, the values fit and the indices do not."""
    with tracker(limit) as meter:
        x = torch.arange(1500.0)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                operator(x)
            assert held(meter) == x.nbytes, "also while its traceback is there"
            assert caught.value.__context__ is None


def test_gradients_that_add_up_are_counted_as_in_place():
    """Without a mode autograd adds into ``.grad``; the tracker must not see a third copy."""
    model = nn.Linear(1000, 100, bias=False)
    weight = 1000 * 100 * F32
    with tracker() as meter:
        meter.count(model.parameters())
        x = torch.ones(1, 1000)
        for _ in range(3):
            model(x).sum().backward()
        # Weight, its gradient, the new gradient; the rest is under 10 kB.
        assert 3 * weight < meter.stats().peak_allocated_bytes < 3 * weight + 10_000
        assert torch.equal(model.weight.grad, torch.full((100, 1000), 3.0))
        assert held(meter) == 2 * weight + x.nbytes


def test_an_addition_whose_summand_stays_alive_is_counted():
    kept: list[tuple[Tensor, Tensor]] = []

    def hook(grad: Tensor) -> Tensor:
        kept.append((grad, grad + grad))
        return kept[-1][1]

    with tracker() as meter:
        x = torch.ones(1000, requires_grad=True)
        meter.count([x])
        x.register_hook(hook)
        (x * 2).sum().backward()
        storages = {each.untyped_storage() for each in (x, x.grad, *kept[0])}
        assert held(meter) == sum(storage.nbytes() for storage in storages)


def test_a_compiled_model_under_the_tracker_compiles_nothing() -> None:
    """torch leaves the model alone under a mode. It compiled the tracker instead, for seconds."""
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    torch._dynamo.utils.counters.clear()
    with StorageTracker(Allocator(None)) as meter:
        for size in (2, 3):
            model(torch.ones(size, 4)).sum().backward()
        assert meter.stats().peak_allocated_bytes > 0
    assert torch._dynamo.utils.counters["frames"]["total"] == 0


def test_an_update_returns_its_first_argument_with_the_same_storage():
    for operator in UPDATES:
        first, *others = operator._schema.arguments
        if str(first.type) != "Tensor":  # an addition to a list
            continue
        x = torch.ones(4)
        before = x.untyped_storage()._cdata, x.untyped_storage().nbytes()
        needed = [str(each.type) for each in others if not each.has_default_value() and not each.kwarg_only]
        values = [torch.ones(()) if kind == "Tensor" else 1 for kind in needed]
        modes = {each.name: "floor" for each in others if each.name == "rounding_mode"}
        assert operator(x, *values, **modes) is x
        assert (x.untyped_storage()._cdata, x.untyped_storage().nbytes()) == before


def test_a_stream_uses_no_free_block_of_another():
    with StorageTracker(CachingAllocator()) as meter:
        with torch.cpu.stream(torch.cpu.Stream()):
            gathered = torch.empty(30 * MiB, dtype=torch.uint8)
        del gathered
        activation = torch.empty(30 * MiB, dtype=torch.uint8)
        del activation
        assert meter.stats().peak_reserved_bytes == 60 * MiB
        trace = meter.trace()
    found = replay(trace, CachingAllocator())
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (30 * MiB, 60 * MiB)
