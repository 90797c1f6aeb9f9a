"""Opening a setup: device, budget and precision, its description, and the key of its limit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.records import Precision
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.ledger import CountingAllocator
from autobatch.distributed.sharding.layout import ShardLayout
from autobatch.setup.setup import (
    Role,
    Setup,
    budget_of,
    describe_setup,
    emulation_notes,
    new_allocator,
    open_setup,
    placement_notes,
    precision_of,
    with_knobs,
)
from autobatch.workload.contract import WholeBatchLoss
from autobatch.workload.demo import MEMORY_BUDGET
from tests.support.probes import WIDTH, RandomVectors, Sequences, amsgrad, classify, mlp, pad, vectors, work
from tests.support.training import INFO_NCE, make_workload
from tests.support.untouched import fingerprint, with_gradients


def test_a_given_budget_replaces_the_budget_of_the_demo() -> None:
    assert budget_of(Options().with_values(device="cpu"), is_demo=True) == MEMORY_BUDGET["cpu"]
    assert budget_of(Options().with_values(device="sim:t4"), is_demo=True) == MEMORY_BUDGET["sim"]
    assert budget_of(Options().with_values(device="cpu", memory_budget="9MiB"), is_demo=True) == "9MiB"
    assert budget_of(Options().with_values(device="cpu"), is_demo=False) is None


def test_the_demo_has_the_budget_of_the_device_that_auto_finds(monkeypatch) -> None:
    for found, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert budget_of(Options().with_values(device="auto"), is_demo=True) == MEMORY_BUDGET[kind]


def test_the_device_chooses_the_precision_unless_one_is_given() -> None:
    device = SimpleNamespace(native_precisions=lambda: ("bf16", "fp32"))
    assert precision_of(Options(), device) == "bf16"
    assert precision_of(Options().with_values(precision="fp16"), device) == "fp16"


def test_opening_and_describing_draw_nothing_although_model_and_data_do() -> None:
    live = with_gradients(mlp())

    def model() -> nn.Module:
        torch.rand(7)
        return live

    before = fingerprint(live)
    setup = open_setup(
        work(model, train_data=RandomVectors()), Options().with_values(device="cpu", memory_budget="1MiB")
    )
    describe_setup(setup)
    assert fingerprint(live) == before


def test_the_seed_decides_the_weights() -> None:
    def weight(seed: int) -> torch.Tensor:
        return next(open_setup(work(), Options().with_values(device="cpu", seed=seed)).model.parameters())

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


# The key of a limit.


def key_of(workload=None, **options) -> dict:
    asked = {"device": "cpu", "memory_budget": "1MiB"} | options
    return describe_setup(open_setup(workload or work(), Options().with_values(**asked))).key


class Renamed(nn.Sequential):
    """The same parameters in another class."""


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def other_loss(model: nn.Module, batch) -> torch.Tensor:
    return classify(model, batch)


@pytest.mark.parametrize(
    ("field", "workload", "options"),
    [
        ("model", work(lambda: mlp(65)), {}),
        ("model", work(frozen), {}),
        ("model", work(lambda: Renamed(*mlp())), {}),
        ("model", work(lambda: mlp().double()), {}),
        ("optimizer", work(optimizer=amsgrad), {}),
        ("optimizer", work(optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False)), {}),
        ("samples", work(train_data=vectors(width=WIDTH + 1)), {}),
        ("samples", work(train_data=TensorDataset(torch.zeros(9, WIDTH), torch.zeros(9))), {}),
        ("loss", work(loss=other_loss), {}),
        ("precision", work(), {"precision": "bf16"}),
        ("budget_bytes", work(), {"memory_budget": "2MiB"}),
        ("max_grad_norm", work(), {"max_grad_norm": 1.0}),
        ("ema", work(), {"ema": 0.9}),
        ("workload", work(name="another"), {}),
    ],
)
def test_everything_that_changes_the_limit_changes_one_field_of_the_key(
    field: str, workload, options: dict
) -> None:
    before, after = key_of(), key_of(workload, **options)
    assert {name for name in before if before[name] != after[name]} == {field}


def test_the_key_does_not_depend_on_what_leaves_the_limit_unchanged() -> None:
    before = key_of()
    assert key_of(work(learning_rate=0.5), seed=4) | {"optimizer": before["optimizer"]} == before
    assert key_of(work(train_data=vectors(700))) == before


def test_a_description_has_the_values_that_a_plan_needs() -> None:
    setup = open_setup(
        work(base_batch=32), Options().with_values(device="cpu", memory_budget="1MiB", target_batch=9)
    )
    info = describe_setup(setup)
    assert (info.samples, info.base_batch, info.precision) == (600, 32, "fp32")
    assert info.device.budget_bytes == 2**20


@pytest.mark.parametrize("expandable", [False, True])
def test_a_description_makes_the_allocator_of_the_device(expandable: bool) -> None:
    setup = open_setup(work(), Options().with_values(device="sim:t4", memory_budget="64MiB"))
    device = setup.device.expandable() if expandable else setup.device
    info = describe_setup(replace(setup, device=device))
    made = new_allocator(info)
    assert isinstance(made, CachingAllocator)
    assert (made.limit, made.config) == (64 * 2**20, AllocatorConfig(expandable_segments=expandable))
    assert new_allocator(info, capped=False).limit is None
    assert new_allocator(info, expandable=True).config.expandable_segments
    assert (info.compute_capability, info.may_spill) == (None, False)


def test_a_device_that_caches_nothing_has_a_counting_allocator() -> None:
    info = describe_setup(open_setup(work(), Options().with_values(device="cpu", memory_budget="1MiB")))
    assert info.allocator is None
    assert isinstance(new_allocator(info), CountingAllocator)
    assert (new_allocator(info).limit, new_allocator(info, capped=False).limit) == (2**20, None)


@pytest.mark.parametrize(
    ("lengths", "quartiles"), [([1, 2, 3, 4], [1, 2, 3, 4]), ([5, 5, 5, 9], [5, 9]), ([3], [])]
)
def test_a_description_has_the_quartiles_of_different_sizes(lengths: list[int], quartiles: list[int]) -> None:
    made = work(train_data=Sequences(lengths), collate=pad, size_of=lambda sample: len(sample[0]))
    setup = open_setup(made, Options().with_values(device="cpu", memory_budget="1MiB"))
    assert describe_setup(setup).size_quartiles == quartiles


def test_a_configuration_changes_the_precision_the_knobs_and_the_segments() -> None:
    setup = open_setup(work(), Options().with_values(device="sim:t4", memory_budget="64MiB"))
    changed = with_knobs(setup, {"precision": "bf16", "expandable_segments": True, "optimizer": "fused"})
    assert (changed.precision, changed.knobs["optimizer"]) == ("bf16", "fused")
    assert changed.device.new_allocator().config.expandable_segments
    assert (setup.precision, setup.knobs) == ("fp32", {})
    assert not with_knobs(setup, {}).device.new_allocator().config.expandable_segments
    host = open_setup(work(), Options().with_values(device="cpu", memory_budget="64MiB"))
    assert with_knobs(host, {"expandable_segments": True}).device is host.device


def over_whole_batch(**settings: Any) -> Setup:
    loss = WholeBatchLoss(
        represent=lambda model, batch: model(batch[0]), loss=lambda _, rows: rows.square().mean()
    )
    return open_setup(work(loss=loss), Options().with_values(device="cpu", memory_budget="1MiB", **settings))


def test_a_loss_over_a_batch_of_unknown_size_is_noted() -> None:
    unknown, known = over_whole_batch(), over_whole_batch(target_batch=9)
    assert (unknown.whole_batch, known.whole_batch) == (None, 9)
    assert "assumed to be two micro-batches" in describe_setup(unknown).notes[-1]
    assert not any("assumed to be two micro-batches" in note for note in describe_setup(known).notes)
    assert describe_setup(known).key["whole_batch"] == 9


def test_ranks_that_share_a_model_refuse_a_loss_over_the_batch_before_a_probe() -> None:
    contrastive = make_workload(loss=INFO_NCE)
    options, role = Options().with_values(device="cpu", memory_budget="1GiB"), Role(world=2)
    with pytest.raises(
        InputError, match="a WholeBatchLoss runs two passes over a batch, and ranks that share"
    ):
        open_setup(contrastive, options, replace(role, shard=ShardLayout(world=2)))
    assert open_setup(contrastive, options, role).world == 2


def test_a_model_that_was_built_on_a_gpu_is_noted() -> None:
    model = nn.Linear(1024, 256, bias=False)
    assert placement_notes(model) == placement_notes(model.to("meta")) == []
    on_gpu = SimpleNamespace(device=torch.device("cuda", 1), numel=lambda: 1 << 20, element_size=lambda: 4)
    (note,) = placement_notes(SimpleNamespace(parameters=lambda: iter([on_gpu])))
    assert "built on cuda:1, where each attempt holds a copy of its 4.00 MiB" in note


@pytest.mark.parametrize(
    ("precision", "capability", "noted"),
    [
        ("bf16", (7, 5), True),
        ("bf16", (7, 0), True),
        ("bf16", (8, 0), False),
        ("fp16", (7, 5), False),
        ("bf16", None, False),
    ],
)
def test_bf16_is_emulated_before_8_0(
    precision: Precision, capability: tuple[int, int] | None, noted: bool
) -> None:
    """torch runs it there without a word (``is_bf16_supported`` counts emulation)."""
    notes = emulation_notes(precision, capability)
    assert [note.startswith("a GPU of compute capability 7.") for note in notes] == [True] * noted
