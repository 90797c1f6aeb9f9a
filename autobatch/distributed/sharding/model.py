"""A train state whose parameters, gradients and optimizer state are sharded over ranks by FSDP2.

The repeated blocks of a model are sharded one by one, and everything else with the loss, which is the root.
The root is the loss and not the model, because a loss may call any method of a model. Each rank holds one
part of every parameter. A block is gathered before its forward and its backward pass, and freed after each.
The rest is gathered before a forward pass and freed after its backward pass.

Ranks sum their gradients and do not average them: one divisor for the whole batch is in the loss already
(`autobatch.step.train_step`). In 16 bits the weights of blocks are gathered in 16 bits, and autocast runs the
rest; parameters and sums of gradients stay in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import InputError
from autobatch.core.records import Precision
from autobatch.step.apply_knobs import find_blocks
from autobatch.step.gradients import low_precision_parameters
from autobatch.step.loss import ONE, terms_of
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import Collated, Loss, LossValue

T = TypeVar("T")
_LOW_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_sharding(model: nn.Module, precision: Precision) -> None:
    """Check that FSDP2 can share a model, in the user's words.

    Raises:
        InputError: it cannot; the message says why.
    """
    trained = {p.dtype: f"{name} is {p.dtype}" for name, p in model.named_parameters() if p.requires_grad}
    wrong = [f"has parameters of several types ({', '.join(trained.values())})"] if len(trained) > 1 else []
    wrong += [
        f"has {name}, a parameter without a dimension: give it the shape (1,)"
        for name, parameter in model.named_parameters()
        if not parameter.dim()
    ]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            wrong.append(f"has a sparse gradient, of {name}: use sparse=False")
        if isinstance(module, nn.SyncBatchNorm) or (isinstance(module, _BatchNorm) and precision != "fp32"):
            wrong.append(f"has {type(module).__name__} ({name}) in {precision}: use GroupNorm")
    if wrong:
        raise InputError(
            f"--parallel shard cannot share a model that {wrong[0]}, or use --parallel replicate"
        )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks that are gathered one at a time; their parameters are all their own."""

    def uses(module: nn.Module) -> Counter[Tensor]:
        return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))

    of_model = uses(model)
    return [
        block
        for block in find_blocks(model)
        if all(of_model[parameter] == count for parameter, count in uses(block).items())
    ]


@dataclass(frozen=True)
class Sharding:
    """The ranks over which a model is sharded."""

    mesh: DeviceMesh

    def __call__(self, model: nn.Module, precision: Precision) -> ShardedModel:
        """Shard a model in place, before its optimizer is built: its blocks, then the loss with the rest.

        Args:
            model: on the device of the mesh, on ``meta``, or of fake tensors.
            precision: the type of gathered weights of blocks.

        Raises:
            InputError: the model cannot be sharded; the message says why.
        """
        check_sharding(model, precision)
        low, wide = _LOW_DTYPES.get(precision), torch.float32
        is_low = low is not None or bool(low_precision_parameters(model))
        inner = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=wide if is_low else None)
        for block in blocks_of(model):
            fully_shard(block, mesh=self.mesh, mp_policy=inner)
        root = _Root(model)
        whole = MixedPrecisionPolicy(reduce_dtype=inner.reduce_dtype, cast_forward_inputs=False)
        fully_shard(root, mesh=self.mesh, mp_policy=whole)
        made = ShardedModel(root, self.mesh)
        for module in made.parts():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return made


class ShardedModel:
    """A model that is sharded, with the loss as the root of its modules.

    Args:
        root: the model, called by functions of it.
        mesh: the ranks.
    """

    def __init__(self, root: _Root, mesh: DeviceMesh) -> None:
        self._root = root
        self.mesh = mesh
        self.weight = 1.0
        """Weight of a micro-batch in the loss; 0 for one that only keeps the other ranks company."""

    def attach(self, train_state: TrainState) -> None:
        """Let the loss of a train state run through the root."""
        loss = train_state.loss
        train_state.loss = lambda _, batch: self._weighted(self.run(loss, batch))
        train_state.shared = self

    def run(self, function: Callable[[nn.Module, Collated], T], batch: Collated) -> T:
        """Call a function of the model and a micro-batch; all ranks call it together."""
        return self._root(function, batch)  # type: ignore[no-any-return]

    def forget_gathered(self) -> None:
        """Free all gathered parameters, so that changed weights are gathered anew."""
        for module in self.parts():
            module.reshard()

    def parts(self) -> Iterator[FSDPModule]:
        """Yield the modules that are gathered one at a time, with the root."""
        return (module for module in self._root.modules() if isinstance(module, FSDPModule))

    def _weighted(self, loss: LossValue) -> LossValue:
        weight = self.weight
        if weight == 1.0:
            return loss
        terms: dict[str, Tensor | Loss] = {
            name: Loss(term.total * weight, term.count * weight) if isinstance(term, Loss) else term * weight
            for name, term in terms_of(loss).items()
        }
        return terms.get(ONE, terms)


class _Root(nn.Module):
    """A call of a function of the model as the forward pass of a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module, Collated], Any], batch: Collated) -> Any:
        return function(self.model, batch)
