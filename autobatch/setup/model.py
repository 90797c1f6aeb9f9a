"""The model of a setup: built in memory, or without any."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.units import format_bytes
from autobatch.device.base import Device
from autobatch.device.host import host_memory
from autobatch.workload.contract import Workload
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.user_code import user_code


def build_model(workload: Workload) -> nn.Module:
    """Build the workload's model.

    Raises:
        InputError: ``Workload(model=…)`` returns no module.
    """
    with user_code("model", workload.model):
        model = workload.model()
        if not isinstance(model, nn.Module):
            raise InputError(f"Workload(model=…) returned a {type(model).__name__}, not a torch.nn.Module")
    lazy = [name for name, one in (*model.named_parameters(), *model.named_buffers()) if is_lazy(one)]
    if lazy:
        raise InputError(
            f"{lazy[0]} of the model has no shape before its first forward pass (a lazy module). Run it once "
            "on a sample in Workload(model=…)"
        )
    return model


def build_shared_model(
    workload: Workload, modules: str | None, *, holds_model: bool, trains: bool
) -> nn.Module:
    """Build a model that ranks share: without memory, unless this process has its first values.

    That process builds it without memory too if it does not fit in that of the host.

    Args:
        workload: what to train.
        modules: regular expression for the modules to gather at a time; None for the repeated blocks.
        holds_model: whether the ranks get the first values from this process.
        trains: whether this process trains.

    Raises:
        InputError: the model cannot be shared, or is too large to be built and cannot draw its first values.
    """
    on_meta = built_on_meta(workload)
    if on_meta is None:
        return build_model(workload)
    # Only here: a run without FSDP saves its import.
    from autobatch.distributed.sharding.build import check_resets
    from autobatch.distributed.sharding.layout import check_sharding

    check_sharding(on_meta, modules)
    if not holds_model:
        return on_meta
    available = host_memory().available_bytes
    size = sum(tensor.nbytes for tensor in [*on_meta.parameters(), *on_meta.buffers()])
    if available is not None and size > available:
        check_resets(on_meta)
        return on_meta
    return build_model(workload) if trains else on_meta


def check_whole(workload: Workload, device: Device) -> None:
    """Check, without any memory, that weights and gradients of a whole model may fit on one rank.

    Raises:
        DoesNotFitError: they take more than the budget, or the weights more than the memory of the host.
    """
    model = built_on_meta(workload)
    if model is None:
        return
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    both = weights + sum(p.nbytes for p in model.parameters() if p.requires_grad)
    available = host_memory().available_bytes
    if both > device.budget_bytes:
        raise DoesNotFitError(
            f"the weights and gradients of a whole model take {format_bytes(both)}, and the budget of a rank "
            f"is {format_bytes(device.budget_bytes)}"
        )
    if available is not None and weights > available:
        raise DoesNotFitError(
            f"the weights of a whole model take {format_bytes(weights)}, and the host has "
            f"{format_bytes(available)}"
        )


def built_on_meta(workload: Workload) -> nn.Module | None:
    """Build the workload's model without memory; None if its constructor or its state needs values."""
    try:
        with preserved_random_state(), torch.device("meta"):
            model = build_model(workload)
    except InputError:
        raise
    except Exception:  # whatever a constructor raises without values, it may run with them
        return None
    known = {id(one) for one in [*model.parameters(), *model.buffers()]}
    others = (value for module in model.modules() for value in vars(module).values())
    # A tensor that is no buffer gets no value later.
    has_others = any(one.is_meta and id(one) not in known for one in tensors_of(list(others)))
    return None if has_others else model
