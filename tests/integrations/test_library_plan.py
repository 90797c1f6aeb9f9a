"""Plans in equal micro-batches for loops of other libraries, through the simplest adapter, accelerate's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autobatch import AutobatchError, InputError
from autobatch.integrations import accelerate
from autobatch.integrations.library_plan import rebuilt
from tests.support.libraries import installed
from tests.support.rank_server import RankServer
from tests.support.training import apart, make_workload, mean_loss, reference, weights

ROWS = list(torch.arange(24.0))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(ROWS)


class OwnBatches(BatchSampler):
    pass


def loader_of(rows: Any = ROWS, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(rows, **{"batch_size": 2, **options})  # type: ignore[arg-type]


def plan(loader: Any = None, target_batch: int = 24, *, world: int = 1, **options: Any) -> Any:
    """Plan for an Accelerator, of which its adapter uses a few attributes."""
    device, precision = torch.device(options.pop("where", "cpu")), options.pop("mixed_precision", "no")
    accelerator = SimpleNamespace(mixed_precision=precision, num_processes=world, device=device)
    model = options.pop("model", None) or nn.Linear(1, 1)
    options = {"loss": lambda model, batch: model(batch[:, None]).mean(), "max_micro_batch": 8, **options}
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), loader_of() if loader is None else loader
    found = accelerate.plan(accelerator, model, optimizer, data, target_batch=target_batch, **options)
    assert accelerator.gradient_accumulation_steps == found.accumulation_steps
    return found


def test_the_plan_is_what_the_library_runs() -> None:
    found = plan(None, 20, max_micro_batch=7)
    assert (found.micro_batch, found.accumulation_steps, found.micro_batches) == (5, 4, [5] * 4)
    assert (found.target_batch, found.probe.micro_batch) == (20, 7)
    assert "note: accelerate: the last step of each epoch is smaller, as 4 of 20 samples" in str(found)
    assert "equal micro-batches of at most 1, in 23 accumulation steps" in plan(None, 23).notes[0]
    over_two = plan(None, 20, world=2, max_micro_batch=7)
    assert (over_two.world_size, over_two.micro_batch, over_two.accumulation_steps) == (2, 5, 2)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    library = installed("accelerate")
    yield library.Accelerator(cpu=True)
    library.state.AcceleratorState._reset_state(reset_partial_state=True)
    library.state.GradientState._reset_state()


def test_a_planned_loop_takes_the_step_of_the_whole_batch(accelerator: Any) -> None:
    """The loop is that of the library, as it documents it."""
    workload = make_workload()
    expected, _ = reference(workload, [range(24)], mean_loss)
    torch.manual_seed(0)
    model, loader = workload.model(), loader_of(workload.train_data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"loss": mean_loss, "target_batch": 24, "max_micro_batch": 7}
    found = accelerate.plan(accelerator, model, optimizer, loader, **given)
    assert (found.micro_batches, loader.batch_size) == ([6] * 4, 6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert apart(weights(model), expected) < 1e-12


def test_the_probe_copies_outputs_to_float32_as_the_library_does() -> None:
    """Without the copies the probe would find a larger micro-batch than the loop can run."""
    installed("accelerate")
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[:, None])
        seen.append(outputs.dtype)
        return outputs.float().square().mean()

    model = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 512))
    assert plan(None, 8, model=model, loss=loss, mixed_precision="bf16").precision == "bf16"
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"where": "mps"}, "trains on mps"),
        ({"loss": nn.CrossEntropyLoss()}, "CrossEntropyLoss takes outputs and targets"),
        ({"mixed_precision": "fp8"}, "no, bf16, fp16 of accelerate, found fp8"),
        ({"loader": ROWS}, "batch size of a list cannot be changed"),
        ({"loader": DataLoader(ROWS, batch_sampler=OwnBatches(range(10), 2, False))}, "no batch_sampler"),
        ({"loader": DataLoader(Stream(), batch_size=None)}, "cannot be changed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_plan_cannot_describe_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan(**options)


def test_an_optimizer_is_rebuilt_over_a_copy_by_name() -> None:
    model, copy = (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)) for _ in range(2))
    own = torch.optim.AdamW(
        [{"params": model[1].parameters(), "lr": 0.3}, {"params": model[0].parameters()}],
        lr=0.1,
        amsgrad=True,
    )
    made = rebuilt(own, model, copy)
    assert type(made) is torch.optim.AdamW
    assert [group["lr"] for group in made.param_groups] == [0.3, 0.1]
    assert made.defaults["amsgrad"] is True
    assert made.param_groups[0]["params"] == [*copy[1].parameters()]
    with pytest.raises(InputError, match="AdamW trains parameters that are not the model's"):
        rebuilt(own, nn.Linear(1, 1), copy)


def test_a_loader_keeps_its_order_and_its_end_and_a_stream_its_own() -> None:
    loader = loader_of(sampler=[9, 7, 5, 3, 1], drop_last=True, collate_fn=torch.stack)
    plan(loader, 3)
    assert (loader.batch_size, [batch.tolist() for batch in loader]) == (3, [[9, 7, 5]])
    stream = loader_of(Stream())
    plan(stream, 8)
    assert [batch.tolist() for batch in stream] == [[*range(first, first + 8)] for first in (0, 8, 16)]


@pytest.mark.filterwarnings("default")  # torchdata calls what torch is about to drop
def test_a_stateful_loader_is_resized() -> None:
    installed("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(ROWS, batch_size=2)
    plan(loader, 8)
    assert [len(batch) for batch in loader] == [8, 8, 8]


def plan_of_rank(folder: Path, limits: list[int]) -> str:
    """Plan as all ranks do, with limits of their own; return what the library runs, or the error."""
    torch.set_num_threads(1)
    os.environ["AUTOBATCH_HOME"] = str(folder / os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    limit = limits[int(os.environ["RANK"])]
    options = {"max_micro_batch": limit} if limit else {"max_micro_batch": None, "memory_budget": "16B"}
    try:
        found = plan(world=2, **options)
    except AutobatchError as error:
        return str(error)
    finally:
        torch.distributed.destroy_process_group()
    return f"{found.micro_batch} × {found.accumulation_steps}, {found.notes[0]}"


ALL = "4 × 3, accelerate: all ranks run micro-batches of at most 4, as fit on rank 1"
SAME = "4 × 3, accelerate: each micro-batch has the same weight"
NONE = "rank 1 has no plan: its own message says why"
OWN = "a micro-batch of 1 does not fit in the budget of 16 B"


@pytest.mark.distributed
@pytest.mark.parametrize(("limits", "said"), [([7, 5], [ALL, SAME]), ([7, 0], [NONE, OWN])])
def test_all_ranks_run_what_fits_on_the_smallest(
    server: RankServer, tmp_path: Path, limits: list[int], said: list[str]
) -> None:
    found = server.values(plan_of_rank, tmp_path, limits, world=2, seconds=120)
    assert all(one.startswith(words) for one, words in zip(found, said, strict=True)), found
