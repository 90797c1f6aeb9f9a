"""A shared model in a process that runs the steps of one rank without the others.

A rank allocates the same there as beside real ranks (`autobatch.distributed.fake_group`). In place of the
parts of other ranks it uses its own, so that all values are finite and a loss can be computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autobatch.core.records import Precision
from autobatch.distributed.fake_group import ALONE
from autobatch.distributed.sharding.build import fill, on_meta
from autobatch.distributed.sharding.model import ShardedModel, Sharding


def sharded_copy(
    model: nn.Module, sharding: Sharding, precision: Precision, device: torch.device
) -> tuple[nn.Module, ShardedModel]:
    """Return a copy of a model with the parts of one rank on its device; their values are not the model's.

    Args:
        model: on ``meta`` or in host memory; left unchanged.
        sharding: the ranks, which may exchange nothing.
        precision: of the forward pass.
        device: of the rank.

    Raises:
        InputError: the model cannot be sharded; the message says why.
    """
    made = on_meta(model)
    sharded = sharding(made, precision)
    sharded.materialize(device)
    # Over real ranks, their parts arrive.
    for one in sharded.parts() if sharding.mesh.mesh_dim_names == ALONE else ():
        one.set_custom_all_gather(_Repeated())  # type: ignore[arg-type]
        one.set_custom_reduce_scatter(_OwnSum())  # type: ignore[arg-type]
    fill(made)
    return made, sharded


class _Repeated:
    """An all-gather that takes the part of this rank for that of every rank."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory, as FSDP's own collective does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the output."""
        del async_op
        parts, rank = output_tensor.view(group.size(), -1), group.rank()
        # The input is the part of this rank in the output.
        parts[:rank] = input_tensor
        parts[rank + 1 :] = input_tensor


class _OwnSum:
    """A reduce-scatter that takes the gradient of this rank for the sum."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory, as FSDP's own collective does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Fill the output."""
        del op, async_op
        output_tensor.copy_(input_tensor.view(group.size(), -1)[0])
