"""A train state whose parameters, gradients and optimizer state are sharded over ranks by FSDP2.

The repeated blocks of a model are sharded one by one, and everything else with the loss, which is the root.
The root is the loss and not the model, because a loss may call any method of a model. Each rank holds one
part of every parameter. A block is gathered before its forward and its backward pass, and freed after each.
The rest is gathered before a forward pass and freed after its backward pass. If it is small, it is gathered
once per step and stays until the last backward pass, because each message costs time however short it is.

Ranks sum their gradients and do not average them: one divisor for the whole batch is in the loss already
(`autobatch.step.train_step`). In 16 bits the gathered weights and the activations have 16 bits, in place of
autocast; parameters, gradients of a rank and the outputs of the model stay in float32.
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
from torch.utils._pytree import tree_map_only

from autobatch.core.errors import InputError
from autobatch.core.records import Precision, ShardSync
from autobatch.distributed.sharding.layout import check_sharding, sync_of
from autobatch.step.gradients import EXCHANGE_BYTES, LOW_PRECISION
from autobatch.step.loss import ONE, terms_of
from autobatch.step.train_state import TrainState
from autobatch.workload.contract import Collated, Loss, LossValue
from autobatch.workload.nested import Passes

T = TypeVar("T")
_LOW_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
KEPT_BYTES = EXCHANGE_BYTES
"""Most bytes of the gathered root that stay between two micro-batches of a step."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The ranks over which a model is sharded, and the way in which it is."""

    mesh: DeviceMesh
    sync: ShardSync = "each"
    modules: str | None = None
    """Regular expression that the full names of modules to gather at a time match; None for the blocks."""

    def __call__(self, model: nn.Module, precision: Precision) -> ShardedModel:
        """Shard a model in place, before its optimizer is built: its blocks, then the loss with the rest.

        Args:
            model: on the device of the mesh, on ``meta``, or of fake tensors.
            precision: the type of gathered weights and of activations.

        Raises:
            InputError: the model cannot be sharded; the message says why.
        """
        blocks = check_sharding(model, self.modules)
        policy = _policy_of(model, precision)
        root = _Root(model)
        inner = {id(module) for block in blocks for module in block.modules()}
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and policy.param_dtype is not None]
        inner |= {id(norm) for norm in norms}
        for norm in norms:
            # Their kernels need weights in the type of the running statistics.
            fully_shard(norm, mesh=self.mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        for block in (one for one in blocks if one not in norms):
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        rest = {p for m in model.modules() if id(m) not in inner for p in m.parameters(recurse=False)}
        gathered = sum(p.numel() * (policy.param_dtype or p.dtype).itemsize for p in rest)
        fully_shard(root, mesh=self.mesh, mp_policy=_without_casts(policy))
        made = ShardedModel(root, self, keeps_root=gathered <= KEPT_BYTES)
        for module in made.parts():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if policy.param_dtype is not None:
            _cast_inputs([m for m in model.modules() if id(m) not in inner], policy.param_dtype)
            model.register_forward_hook(lambda _, __, out: _cast(out, torch.float32))
        return made


class ShardedModel:
    """A model that is sharded, with the loss as the root of its modules.

    Args:
        root: the model, called by functions of it.
        sharding: the ranks.
        keeps_root: whether the gathered root stays until the last backward pass of a step.
    """

    def __init__(self, root: _Root, sharding: Sharding, *, keeps_root: bool) -> None:
        self._root: Any = root
        self._sync = sync_of(root, sharding.sync)
        self._keeps_root = keeps_root
        self._is_reducing = True
        self.mesh = sharding.mesh
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
        # The gathered weights replace autocast.
        train_state.precision = "fp32"
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
            self._reduce(number == count or self._sync == "each")
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

    def _reduce(self, is_reducing: bool) -> None:
        # Each call walks through all modules.
        if is_reducing != self._is_reducing:
            self._is_reducing = is_reducing
            self._root.set_requires_gradient_sync(is_reducing)

    def _weighted(self, found: LossValue) -> LossValue:
        weight = self.weight
        if weight == 1.0:
            return found
        terms: dict[str, Tensor | Loss] = {
            name: Loss(one.total * weight, one.count * weight) if isinstance(one, Loss) else one * weight
            for name, one in terms_of(found).items()
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


def _policy_of(model: nn.Module, precision: Precision) -> MixedPrecisionPolicy:
    """Return the types of gathered weights and of reductions."""
    is_low = any(p.dtype in LOW_PRECISION for p in model.parameters() if p.requires_grad)
    low = _LOW_DTYPES.get(precision)
    if low is None and not is_low:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)


def _without_casts(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy of the root: the batch keeps its types, because targets are part of it."""
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False
    )


def _cast_inputs(modules: list[nn.Module], dtype: torch.dtype) -> None:
    """Let modules with parameters of their own receive inputs in the type of their weights."""
    for module in modules:
        if any(p.is_floating_point() for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: _cast((args, kwargs), dtype), with_kwargs=True
            )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if eligible else tensor

    return tree_map_only(Tensor, one, values)
