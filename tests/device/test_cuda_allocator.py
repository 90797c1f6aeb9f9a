"""The allocator's cap, to the byte, and its switch to expandable segments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from autobatch.core.units import GiB, MiB
from autobatch.device.cuda_allocator import (
    asks_for_expandable,
    capped,
    expandable_segments,
    memory_fraction,
    reason_not_expandable,
    unmodelled_options,
    why_not_expandable,
    workspace_rule,
)
from tests.support.fake_cuda import FakeCuda


@pytest.mark.parametrize("total", [8 * GiB, 15_843_721_216, 25_282_281_472, 85_174_976_512, 150_109_880_320])
def test_fraction_allows_the_budget_and_not_a_segment_more(total: int) -> None:
    for budget in (1, 2 * MiB, 3 * 20 * MiB, total // 3, total // 2, total - 2 * MiB, total - 1):
        fraction = memory_fraction(budget, total)
        assert 0 < fraction < 1
        # What the allocator computes from it: static_cast<size_t>(fraction * double(total)).
        assert budget <= int(fraction * float(total)) <= budget + 1
    assert memory_fraction(total, total) == 1.0
    assert memory_fraction(total + 1, total) == 1.0


def test_the_cap_is_lifted_if_torch_cannot_read_the_former_one(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    with capped(0, limit_bytes=6 * GiB, total_bytes=fake.total):
        assert fake.allowed == 6 * GiB
    assert fake.allowed == 24 * GiB


def test_the_cache_is_freed_before_each_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append, raising=False)
    with expandable_segments(lambda: calls.append("release")):
        assert calls == ["release", "expandable_segments:True"]
        calls.clear()
    assert calls == ["expandable_segments:False", "release"]


def test_a_torch_without_the_setting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    calls: list[str] = []
    with expandable_segments(lambda: calls.append("release")):
        pass
    assert not calls


FIRST_SET: list[tuple[dict[str, str], bool]] = [
    ({}, False),
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : True"}, True),
    ({"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}, True),
    ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
    (
        {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTORCH_ALLOC_CONF": "expandable_segments:False",
        },
        True,
    ),
]


@pytest.mark.parametrize(("environ", "asks"), FIRST_SET)
def test_the_first_variable_that_is_set_counts(environ: dict[str, str], asks: bool) -> None:
    assert asks_for_expandable(environ) is asks


@pytest.mark.slow
@pytest.mark.parametrize(("environ", "asks"), FIRST_SET)
def test_torch_reads_the_same_variable(environ: dict[str, str], asks: bool) -> None:
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings().lower().replace(' ', ''))"
    clean = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environ, capture_output=True, text=True, check=True
    )
    assert ("expandable_segments:true" in done.stdout) is asks


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("expandable_segments:True,pinned_use_cuda_host_register:True", []),
        ("max_split_size_mb : 64, Roundup_Power2_Divisions:[256:1,>:4]", 2),
        ("garbage_collection_threshold:0.8,large_segment_size_mb:40,max_non_split_rounding_mb:2", 3),
    ],
)
def test_options_that_make_it_another_allocator_are_named(text: str, names: list[str] | int) -> None:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        found = unmodelled_options({variable: text})
        assert found == names if isinstance(names, list) else len(set(found)) == names


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"settings": "expandable_segments:False"}, None),
        ({"settings": "max_split_size_mb:20"}, "other code has changed"),
        ({"environ": {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}}, "PYTORCH_ALLOC_CONF is set"),
        ({"environ": {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}}, "PYTORCH_CUDA_ALLOC_CONF is set"),
        ({"platform": "win32"}, "for CUDA on Linux"),
        ({"platform": "HIP"}, "for CUDA on Linux"),
        ({"backend": "cudaMallocAsync"}, "only torch's own allocator"),
        ({"is_configurable": False}, "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
    ],
)
def test_an_allocator_that_cannot_switch_says_why(changes: dict[str, object], said: str | None) -> None:
    given = {"environ": {}, "platform": "linux", "backend": "native", "is_configurable": True, "settings": ""}
    given |= changes
    found = reason_not_expandable(given.pop("environ"), **given)  # type: ignore[arg-type]
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        (
            {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:20"}},
            "other code has changed",
        ),
        ({"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}}, None),
        ({"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""}}, None),
        ({}, None),
    ],
)
def test_settings_of_other_code_are_seen_in_a_snapshot_of_torch_2_11(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, snapshot: dict[str, object], said: str | None
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    found = why_not_expandable()
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(
    ("version", "environ", "rule"),
    [
        ("2.11.0+cu130", {}, "apart"),
        ("2.14.1", {}, "shared"),
        ("2.15.0+cu132", {}, "freed"),
        ("2.15.0", {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}, "shared"),
        ("3.0.0a0", {}, "freed"),
    ],
)
def test_when_each_torch_takes_workspaces(version: str, environ: dict, rule: str) -> None:
    assert workspace_rule(version, environ) == rule
