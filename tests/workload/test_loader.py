"""The feed that a run opens, and whether workers can serve it."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from autobatch.core.knobs import PIN_MEMORY
from autobatch.device.cpu import CpuDevice
from autobatch.workload.feed import SeededCollate, SeededFeed
from autobatch.workload.loader import gpu_of, open_feed, why_not_sent
from autobatch.workload.loader_parts import Loading
from autobatch.workload.order import GlobalBatch, GlobalBatchSampler
from autobatch.workload.worker_feed import WorkerFeed
from tests.support.feeds import augmented
from tests.support.processes import loader_workers
from tests.support.training import points


def test_the_loop_collates_for_itself_unless_samples_are_seeded() -> None:
    with open_feed(augmented(), lambda _: iter(()), seed=0) as feed:
        assert feed is None
    with open_feed(augmented(), lambda _: iter(()), seed=0, sample_seeds=True) as feed:
        assert isinstance(feed, SeededFeed)


def test_workers_start_with_the_first_batch_and_end_with_the_feed() -> None:
    sampler = GlobalBatchSampler(samples=24, target_batch=10, seed=0, steps=3)
    with open_feed(augmented(), sampler.batches, seed=0, workers=2) as feed:
        assert isinstance(feed, WorkerFeed)
        assert not loader_workers()
        next(feed.collated(next(sampler.batches()), 4))
        assert len(loader_workers()) == 2
    assert not loader_workers()


def test_memory_is_pinned_for_gpus_alone() -> None:
    assert gpu_of(CpuDevice(memory_budget="1GiB"), {PIN_MEMORY: True}, Loading()) is None


def test_samples_that_cannot_be_sent_to_or_from_workers_are_known_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collate = SeededCollate(data=points(), collate=None, seed=0)
    (micro_batch,) = SeededFeed(collate).collated(GlobalBatch(0, 0, list(range(4))), 4)
    assert why_not_sent(collate, micro_batch) is None
    assert "cannot be sent" in (why_not_sent(collate, {"lock": threading.Lock()}) or "")
    assert "on a GPU" in (why_not_sent(collate, torch.empty(1, device="meta")) or "")
    local = SeededCollate(data=points(), collate=lambda samples: samples, seed=0)
    assert why_not_sent(local, micro_batch) is None or sys.platform != "linux"
    monkeypatch.setattr("autobatch.workload.loader.start_method", lambda: None)
    assert "cannot be sent" in (why_not_sent(local, micro_batch) or "")


@pytest.mark.parametrize(
    ("reads", "knobs", "is_gpu"),
    [
        (True, {}, True),
        (True, {"pin_memory": True}, True),
        (True, {"pin_memory": False}, False),
        (False, {}, False),
    ],
)
def test_workers_pin_memory_for_a_gpu_unless_the_knob_forbids_it(reads, knobs, is_gpu) -> None:
    device = SimpleNamespace(reads_pinned_memory=reads, torch_device=torch.device("cuda", 1))
    assert gpu_of(device, knobs, Loading()) == (device.torch_device if is_gpu else None)


def test_a_loader_without_pinning_is_not_pinned_unless_the_knob_asks() -> None:
    device = SimpleNamespace(reads_pinned_memory=True, torch_device=torch.device("cuda", 1))
    assert gpu_of(device, {}, Loading(pin_memory=False)) is None
    assert gpu_of(device, {PIN_MEMORY: True}, Loading(pin_memory=False)) == device.torch_device
