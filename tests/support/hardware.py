"""Made-up hardware profiles."""

from __future__ import annotations

from autobatch.core.units import GiB
from autobatch.device.profiles import Figure, HardwareProfile


def a_figure(value: int) -> Figure:
    """Return a figure in bytes."""
    return Figure(value=value, unit="B", source="a test", date="2026-11-21", measured=True)


def a_profile(**changes) -> HardwareProfile:
    """Return a profile with 8 GiB and little else."""
    fields = {"schema": 1, "name": "my-gpu", "title": "My GPU", "vendor": "Acme", "capability": "8.6"}
    return HardwareProfile(**(fields | {"total": a_figure(8 * GiB)} | changes))
