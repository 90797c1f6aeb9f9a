"""Plans in equal micro-batches, for loops of other libraries."""

from __future__ import annotations

import logging
import os
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

from autobatch import AutobatchError, InputError
from autobatch.integrations.library_plan import (
    ALONE,
    MOST_ITEMS,
    LibraryLoop,
    check_resizable,
    device_option,
    drops_last,
    kept_state,
    plan_for,
    precision_of,
    rebuilt,
    resized,
    tell_plan,
)
from tests.support.libraries import installed
from tests.support.rank_server import RankServer
from tests.support.training import make_workload, points

CPU = torch.device("cpu")


def a_loop(**changes: object) -> LibraryLoop:
    fields = {"name": "Loop", "world_size": 1, "device": CPU, "divides_by_plan": True}
    return LibraryLoop(**fields | changes)  # type: ignore[arg-type]


def test_the_plan_is_what_the_library_runs(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"target_batch": 20, "max_micro_batch": 7}
    plan = plan_for(make_workload(), a_loop(), loader=lambda size: f"of {size}", **options)  # type: ignore[arg-type]
    assert (plan.micro_batch, plan.accumulation_steps, plan.micro_batches) == (5, 4, [5] * 4)
    assert (plan.target_batch, plan.probe.micro_batch, plan.library, plan.loader) == (20, 7, "Loop", "of 5")
    assert [note for note in plan.notes if note.startswith("Loop: the last step of each epoch has 4 of 20")]
    with caplog.at_level(logging.INFO, logger="autobatch"):
        tell_plan(plan, is_first=True)
    assert capsys.readouterr().err == ""
    assert str(plan) == "\n".join(caplog.messages)
    assert caplog.messages[0].startswith("Loop: ")
    assert caplog.messages[-1].startswith("note: Loop: the last step of each epoch has 4 of 20 samples")
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        tell_plan(plan, is_first=False)
        tell_plan(plan, is_first=True)
    assert capsys.readouterr().err == f"{plan}\n", "without a log the first process prints it"


def test_a_split_that_loses_half_the_size_names_better_targets() -> None:
    plan = plan_for(make_workload(), a_loop(), target_batch=23, max_micro_batch=8)
    assert plan.micro_batch == 1
    assert plan.notes[0] == (
        "Loop: a target batch of 23 splits into equal micro-batches of 1 in 23 accumulation steps at most, "
        "although 8 samples fit: a target batch of 21 or 24 needs fewer steps, and autobatch.batches splits "
        "any batch"
    )


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="the plan is for 1 rank, and Loop runs in 2 processes"):
        plan_for(make_workload(), a_loop(world_size=2), target_batch=20, world_size=1)
    plan = plan_for(make_workload(), a_loop(world_size=2), target_batch=20, max_micro_batch=7)
    assert (plan.world_size, plan.micro_batch, plan.accumulation_steps) == (2, 5, 2)


def test_an_optimizer_is_rebuilt_over_a_copy_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    own = torch.optim.AdamW(
        [{"params": model[1].parameters(), "lr": 0.3}, {"params": model[0].parameters()}],
        lr=0.1,
        amsgrad=True,
    )
    copy = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    made = rebuilt(own, model, copy)
    assert type(made) is torch.optim.AdamW
    assert [group["lr"] for group in made.param_groups] == [0.3, 0.1]
    assert made.defaults["amsgrad"] is True
    assert made.param_groups[0]["params"] == [*copy[1].parameters()]
    with pytest.raises(InputError, match="AdamW trains parameters that are not the model's"):
        rebuilt(own, nn.Linear(1, 1), copy)


def test_devices_and_precisions_that_have_no_counterpart_are_refused() -> None:
    assert device_option(torch.device("cuda", 1)) == "cuda:1"
    assert device_option(torch.device("cpu", 0)) == "cpu", "a launcher numbers it"
    with pytest.raises(InputError, match="probes on cpu and cuda, and the library trains on mps"):
        device_option(torch.device("mps"))
    assert precision_of("no", {"no": "fp32"}, "it") == "fp32"
    with pytest.raises(InputError, match="plans for the precisions no of it, found fp8: choose one"):
        precision_of("fp8", {"no": "fp32"}, "it")


SHORT = (
    "the last step of each epoch has 16 of 24 samples in 2 of 3 micro-batches and is still divided by 3, so "
    "its gradient is 33% too small"
)
HEAVY = (
    "the last step of each epoch has 18 of 24 samples; the samples of its last micro-batch "
    "weigh 4 times as much"
)
TRAINER = {"divides_by_plan": False, "averages_means": False}


@pytest.mark.parametrize(
    ("samples", "changes", "words"),
    [
        (48, {}, None),
        (40, {}, SHORT),
        (42, {}, HEAVY),
        (42, TRAINER, "the last step of each epoch has 18 of 24 samples"),
        (42, {"drop_last": True}, SHORT),
        (30, {"drop_last": True}, None),
    ],
)
def test_the_last_step_of_an_epoch(samples: int, changes: dict[str, object], words: str | None) -> None:
    workload = make_workload(train_data=points(samples))
    plan = plan_for(workload, a_loop(**changes), target_batch=24, max_micro_batch=8)
    found = [note for note in plan.notes if "last step" in note]
    end = ": autobatch.batches carries them into the next epoch"
    assert found == ([] if words is None else [f"Loop: {words}{end}"])


def test_what_is_written_within_the_block_is_gone_after_it() -> None:
    data = [0] * (MOST_ITEMS + 1)
    model = object()
    figures = {"train": defaultdict(list, loss=[1.0])}
    owner = SimpleNamespace(
        figures=figures, count=3, names={"a"}, last=deque([1], maxlen=2), data=data, model=model
    )
    with kept_state(owner):
        owner.figures["train"]["loss"].append(2.0)
        owner.figures["train"]["entropy"].append(2.0)
        owner.figures["eval"] = {}
        owner.count += 1
        owner.names.add("b")
        owner.last.append(2)
        owner.new = 1
    assert owner.figures == {"train": {"loss": [1.0]}}
    assert owner.figures["train"].default_factory is list
    assert (owner.count, owner.names, list(owner.last), owner.last.maxlen) == (3, {"a"}, [1], 2)
    assert not hasattr(owner, "new")
    assert owner.data is data
    assert owner.model is model


def plan_of_rank(folder: Path, limits: list[int], is_connected: bool) -> Any:
    """Plan as all ranks do, with limits of their own; return what the library runs, or the error."""
    torch.set_num_threads(1)
    os.environ["AUTOBATCH_HOME"] = str(folder / os.environ["RANK"])
    if is_connected:
        torch.distributed.init_process_group("gloo")
    limit = limits[int(os.environ["RANK"])]
    options = {"target_batch": 24, "max_micro_batch": limit or None, "progress": False}
    if not limit:
        options["memory_budget"] = "1KiB"
    try:
        found = plan_for(make_workload(), a_loop(world_size=2), **options)  # type: ignore[arg-type]
    except AutobatchError as error:
        return str(error)
    finally:
        if is_connected:
            torch.distributed.destroy_process_group()
    return found.micro_batch, found.accumulation_steps, [note.removeprefix("Loop: ") for note in found.notes]


@pytest.mark.distributed
def test_all_ranks_run_what_fits_on_the_smallest(server: RankServer, tmp_path: Path) -> None:
    first, second = server.values(plan_of_rank, tmp_path, [7, 5], True, world=2)
    assert first[:2] == second[:2] == (4, 3)
    assert first[2][0] == "all ranks run micro-batches of at most 4, as fit on rank 1"
    assert "all ranks run" not in " ".join(second[2])


@pytest.mark.distributed
def test_a_rank_without_a_plan_ends_the_others(server: RankServer, tmp_path: Path) -> None:
    first, second = server.values(plan_of_rank, tmp_path, [7, 0], True, world=2)
    assert first == "rank 1 has no plan: its own message says why"
    assert second.startswith("a micro-batch of 1 does not fit in the budget of 1.00 KiB")


@pytest.mark.distributed
def test_ranks_that_are_not_connected_say_so(server: RankServer, tmp_path: Path) -> None:
    for _, _, notes in server.values(plan_of_rank, tmp_path, [7, 7], False, world=2):
        assert notes[0] == ALONE


ROWS = list(range(10))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)


def test_a_loader_keeps_its_data_its_order_and_its_end_and_a_stream_its_own() -> None:
    loader = DataLoader(ROWS, batch_size=2, sampler=[9, 7, 5, 3, 1], drop_last=True, collate_fn=list)  # type: ignore[arg-type]
    check_resizable(loader, before="prepare")
    assert list(resized(loader, 3)) == [[9, 7, 5]]
    assert list(loader) == [[9, 7], [5, 3]]
    stream = DataLoader(Stream(), batch_size=2, collate_fn=list)
    assert list(resized(stream, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_random_sampler_and_its_generator_are_taken_along() -> None:
    def weighted() -> DataLoader[int]:
        draw = torch.Generator().manual_seed(1)
        return DataLoader(ROWS, batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 6, generator=draw))  # type: ignore[arg-type]

    assert torch.equal(torch.cat(list(resized(weighted(), 4))), torch.cat(list(weighted())))


def test_a_batch_sampler_tells_whether_a_short_batch_is_left_out() -> None:
    for drop_last in (True, False):
        sampler = BatchSampler(range(10), 4, drop_last)
        assert drops_last(DataLoader(ROWS, batch_sampler=sampler)) is drop_last  # type: ignore[arg-type]
        assert drops_last(DataLoader(ROWS, batch_size=4, drop_last=drop_last)) is drop_last  # type: ignore[arg-type]
    assert not drops_last(DataLoader(Stream(), batch_size=None))


@pytest.mark.filterwarnings("default")  # torchdata calls what torch is about to drop
def test_a_stateful_loader_stays_one() -> None:
    installed("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(ROWS, batch_size=2, collate_fn=list)
    check_resizable(loader, before="prepare")
    made = resized(loader, 5)
    assert isinstance(made, StatefulDataLoader)
    assert list(made) == [ROWS[:5], ROWS[5:]]


def test_what_has_no_batch_size_is_refused_with_the_way_out() -> None:
    class Own(BatchSampler):
        pass

    refused = {
        "must be a torch DataLoader before prepare, found a list: plan first": ROWS,
        "has an Own that makes its batches": DataLoader(ROWS, batch_sampler=Own(range(10), 2, False)),  # type: ignore[arg-type]
        "has batch_size=None, so its data make the batches": DataLoader(Stream(), batch_size=None),
    }
    for message, loader in refused.items():
        with pytest.raises(InputError, match=message):
            check_resizable(loader, before="prepare")
