"""Settings of an estimate, and the GPUs, sizes and precisions that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from autobatch.core.records.base import GradientDtype, Precision, ShardSync
from autobatch.core.records.estimate import Estimate
from autobatch.core.units import GiB
from autobatch.device.hardware_profile import HardwareProfile
from autobatch.device.profiles import list_profiles, load_profile
from autobatch.footprint.predict import gpu_allocator
from autobatch.footprint.remedies import NATIVE_BF16, Spending

LARGEST = 2**31 - 1
"""The largest micro-batch of any search, for a step whose memory does not grow."""
TABLE_GPUS = 3
"""GPUs in the table of ranks, if only one was asked about."""


@dataclass(frozen=True, kw_only=True)
class EstimateSettings:
    """Settings of an estimate: plain values."""

    device: str = "auto"
    """``sim:PROFILE`` names a GPU if ``profiles`` names none."""
    memory_budget: str | int | None = None
    """None for the GPU's memory less a headroom."""
    precision: Precision | Literal["auto"] = "auto"
    gradient_dtype: GradientDtype | Literal["auto"] = "auto"
    seed: int = 0
    profiles: Sequence[str] = ()
    """Names or files of hardware profiles; empty for all."""
    micro_batch: int | None = None
    """The micro-batch to predict; None to search the largest."""
    max_micro_batch: int | None = None
    target_batch: int | None = None
    """None for no plan."""
    scan: int | None = None
    """Samples of a stream to plan from; None for the default."""
    memory_viz: str | None = None
    """File for the memory of steps on the first GPU; None for no file."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The ranks of an estimate: plain values."""

    ranks: int
    parallel: Literal["auto", "replicate", "shard"] = "auto"
    shard_sync: ShardSync = "each"
    shard_modules: str | None = None


def names_of(settings: EstimateSettings) -> Sequence[str]:
    """Return the names of the GPUs to predict for; none for all that are known."""
    simulated = [settings.device.removeprefix("sim:")] if settings.device.startswith("sim:") else []
    return settings.profiles or simulated


def named_gpus(settings: EstimateSettings, home: Path) -> list[HardwareProfile]:
    """Return the GPUs that settings name, or all that are known.

    Raises:
        InputError: a profile is unknown or invalid.
    """
    names = names_of(settings)
    if names:
        return [load_profile(name, user_dir=home) for name in names]
    return list(list_profiles(user_dir=home).profiles)


def larger_gpus(gpu: HardwareProfile, home: Path) -> list[HardwareProfile]:
    """Return the next GPUs with more memory and at least the same operators."""
    others = [
        other
        for other in list_profiles(user_dir=home).profiles
        if other.total_bytes > gpu.total_bytes
        and (other.compute_capability >= NATIVE_BF16) >= (gpu.compute_capability >= NATIVE_BF16)
    ]
    by_memory = {
        other.total_bytes // GiB: other for other in sorted(others, key=lambda o: o.name, reverse=True)
    }
    return [by_memory[size] for size in sorted(by_memory)][: TABLE_GPUS - 1]


def device_notes(settings: EstimateSettings) -> list[str]:
    """Return that a device of this machine is left out, which a config file may name for all commands."""
    if settings.device == "auto" or (settings.device.startswith("sim:") and not settings.profiles):
        return []
    return [
        f"an estimate touches no device, so --device {settings.device} was left out: name a GPU with "
        "--profile or --device sim:PROFILE"
    ]


def cap_of(settings: EstimateSettings) -> int:
    """Return the largest micro-batch to try. The data are no cap: a GPU that is not here may see more."""
    return min(cap for cap in (settings.max_micro_batch, settings.target_batch, LARGEST) if cap is not None)


def cap_notes(estimates: Sequence[Estimate], settings: EstimateSettings) -> list[str]:
    """Return on which GPUs an option bounds the micro-batch, and not memory."""
    cap = cap_of(settings)
    names = [one.profile for one in estimates if one.fits and one.micro_batch == cap]
    if settings.micro_batch is not None or not names:
        return []
    option = "--max-micro-batch" if cap == settings.max_micro_batch else "--target-batch"
    return [f"{option} {cap:,} bounds the micro-batch on {', '.join(names)}: more may fit without it"]


def precision_on(settings: EstimateSettings, capability: tuple[int, int]) -> Precision:
    """Return the precision that was asked for; else bf16 where it is native."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if capability >= NATIVE_BF16 else "fp32"


def spending_on(gpu: HardwareProfile, budget_bytes: int, cap: int) -> Spending:
    """Return the budget of a GPU, and the largest micro-batch to spend it on."""
    return Spending(
        allocator=partial(gpu_allocator, budget_bytes),
        unlimited=partial(gpu_allocator, None),
        cap=cap,
        libraries=gpu.libraries,
    )
