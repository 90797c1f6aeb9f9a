"""Answers that follow from running operators on the CPU: precision, compiler, optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autobatch.device.compiler import missing_on_cpu

if TYPE_CHECKING:
    from autobatch.core.records import Precision


class CpuOperators:
    """The part of a `autobatch.device.base.Device` that is common to devices with tensors on the CPU."""

    @property
    def torch_device(self) -> torch.device:
        """``cpu``."""
        return torch.device("cpu")

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """None: no GPU runs the operators."""
        return None

    @property
    def libraries(self) -> None:
        """None: the CPU runs them."""

    @property
    def may_spill(self) -> bool:
        """False: the budget is counted here, so no driver can exceed it."""
        return False

    @property
    def reads_pinned_memory(self) -> bool:
        """False: the tensors are in host memory already."""
        return False

    @property
    def gains_from_compile(self) -> bool:
        """False: on the CPU compiling rarely pays for its time."""
        return False

    def default_precision(self) -> Precision:
        """Return fp32."""
        return "fp32"

    def native_precisions(self) -> tuple[Precision, ...]:
        """Return fp32, and bf16 on processors that compute in it."""
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        native = any(getattr(torch.cpu, name, lambda: False)() for name in names)
        return ("fp32", "bf16") if native else ("fp32",)

    def optimizer_implementations(self) -> tuple[str, ...]:
        """Return all three: the default steps parameter by parameter."""
        return ("default", "foreach", "fused")

    def compiler_missing(self) -> str | None:
        """See `autobatch.device.compiler.missing_on_cpu`."""
        return missing_on_cpu()

    def synchronize(self) -> None:
        """Do nothing: operators on the CPU are done when they return."""
