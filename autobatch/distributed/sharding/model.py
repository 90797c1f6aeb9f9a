"""A train state whose parameters, gradients and optimizer state are sharded over ranks by FSDP2.

The repeated blocks of a model are sharded one by one, and everything else with the loss, which is the root.
The root is the loss and not the model, because a loss may call any method of a model. Each rank holds one
part of every parameter. A block is gathered before its forward and its backward pass, and freed after each.
The rest is gathered before a forward pass and freed after its backward pass. If it is small, it is gathered
once per step and stays until the last backward pass, because each message costs time however short it is.

Ranks sum their gradients and do not average them: one divisor for the whole batch is in the loss already
(`autobatch.step.train_step`). In 16 bits the weights of blocks are gathered in 16 bits, and autocast runs the
rest; parameters and sums of gradients stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.core.errors import InputError
from autobatch.core.records import Precision
from autobatch.distributed.sharding.layout import check_sharding
from autobatch.step.gradients import EXCHANGE_BYTES, low_precision_parameters
from autobatch.step.loss import ONE, terms_of
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import Collated, Loss, LossValue
from autobatch.workload.nested import Passes

T = TypeVar("T")
_LOW_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
KEPT_BYTES = EXCHANGE_BYTES
"""Most bytes of the gathered root that stay between two micro-batches of a step."""


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
        blocks, root, low = check_sharding(model), _Root(model), _LOW_DTYPES.get(precision)
        is_low = bool(low_precision_parameters(model))
        whole = MixedPrecisionPolicy(
            reduce_dtype=torch.float32 if is_low else None, cast_forward_inputs=False
        )
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)] if low else []
        for norm in norms:
            # Their kernels need weights in the type of the running statistics.
            fully_shard(norm, mesh=self.mesh, mp_policy=whole)
        inner = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32) if low else whole
        for block in (block for block in blocks if block not in norms):
            fully_shard(block, mesh=self.mesh, mp_policy=inner)
        held = {id(module) for block in (*blocks, *norms) for module in block.modules()}
        rest = {p for m in model.modules() if id(m) not in held for p in m.parameters(recurse=False)}
        fully_shard(root, mesh=self.mesh, mp_policy=whole)
        keeps_root = sum(parameter.nbytes for parameter in rest) <= KEPT_BYTES
        made = ShardedModel(root, self.mesh, keeps_root=keeps_root, sums_once=is_low)
        for module in made.parts():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return made


class ShardedModel:
    """A model that is sharded, with the loss as the root of its modules.

    Args:
        root: the model, called by functions of it.
        mesh: the ranks.
        keeps_root: whether the gathered root stays until the last backward pass of a step.
        sums_once: whether gradients are reduced after the last micro-batch only, because the weights have 16
            bits, and sums of many micro-batches need more.
    """

    def __init__(self, root: _Root, mesh: DeviceMesh, *, keeps_root: bool, sums_once: bool) -> None:
        self._root: Any = root
        self._keeps_root = keeps_root
        self._sums_once = sums_once
        self.mesh = mesh
        self.rounds = 0
        """Micro-batches of the step that runs, as many on every rank."""
        self.weight = 1.0
        """Weight of a micro-batch in the loss; 0 for one that only keeps the other ranks company."""

    def attach(self, train_state: TrainState) -> None:
        """Let the loss of a train state run through the root.

        Raises:
            InputError: its optimizers do not train all parameters that require a gradient.
        """
        trained = {id(parameter) for parameter in train_state.parameters}
        left = [
            name
            for name, parameter in train_state.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in trained
        ]
        if left:
            raise InputError(
                f"--parallel shard needs an optimizer for every parameter that requires a gradient, and "
                f"{len(left)} have none, for example {left[0]}: freeze them (requires_grad_(False)), or give "
                "them to the optimizer"
            )
        loss = train_state.loss
        train_state.loss = lambda _, batch: self._weighted(self.run(loss, batch))
        train_state.shared = self

    def run(self, function: Callable[[nn.Module, Collated], T], batch: Collated) -> T:
        """Call a function of the model and a micro-batch; all ranks call it together."""
        return self._root(function, batch)  # type: ignore[no-any-return]

    def begin_step(self, micro_batches: Iterable[tuple[Collated, int]], count: int) -> Passes:
        """Return the micro-batches of a step, and reduce gradients after each of them or after the last.

        Every backward pass counts as the last one (``set_is_last_backward``). Otherwise the buffer of its
        last reduction would live through the next forward pass, and a step of three micro-batches would take
        more memory than the two of a probe.
        """
        return Passes(lambda: self._pass(iter(micro_batches), count))

    def _pass(self, fetched: Iterator[tuple[Collated, int]], count: int) -> Iterator[tuple[Collated, int]]:
        """Yield the micro-batches of a pass; see `begin_step`."""
        root, self.rounds = self._root, count
        # After the last micro-batch too, for the same reason: it takes the memory of any other.
        keeps_root = self._keeps_root and count > 1
        root.set_reshard_after_backward(not keeps_root, recurse=False)
        for number in range(1, count + 1):
            if self._sums_once:
                root.set_requires_gradient_sync(number == count)
            # Not bound to a name, which would hold it until the next one is fetched.
            yield next(fetched)
        if keeps_root:
            root.reshard()

    def forget_gathered(self) -> None:
        """Free all gathered parameters, so that changed weights are gathered anew."""
        for module in self.parts():
            module.reshard()

    def parts(self) -> Iterator[FSDPModule]:
        """Yield the modules that are gathered one at a time, with the root."""
        return (module for module in self._root.modules() if isinstance(module, FSDPModule))

    def materialize(self, device: torch.device) -> None:
        """Take memory for the parts of this rank of tensors on ``meta``: any parameters, and buffers of 0."""
        made: dict[Tensor, Tensor] = {}
        for module in self._root.modules():
            own: list[Mapping[str, Tensor | None]] = [module._parameters, module._buffers]
            for name, tensor in [item for registry in own for item in registry.items()]:
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        made[tensor] = _materialized(tensor, device)
                    setattr(module, name, made[tensor])
        # FSDP looks for new parameters when a function is applied to them.
        self._root._apply(lambda tensor: tensor)

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


def _materialized(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        made = torch.empty_like(tensor, device=device)
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return torch.zeros_like(tensor, device=device)
