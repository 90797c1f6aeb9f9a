"""A fingerprint of everything that a probe must leave unchanged."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.training import digest


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model that its owner could notice: values, objects, modes and hooks."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        state[f"mode of {name or 'model'}"] = module.training
        state[f"parts of {name or 'model'}"] = (
            list(module._parameters), list(module._buffers), list(module._modules), sorted(vars(module))
        )  # fmt: skip
        state[f"hooks of {name or 'model'}"] = (len(module._forward_hooks), len(module._forward_pre_hooks))
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        gradient = tensor.grad
        state[name] = (id(tensor), tensor.data_ptr(), tensor.device, tensor.dtype, tensor.requires_grad)
        state[f"values of {name}"] = digest(tensor)
        state[f"gradient of {name}"] = None if gradient is None else (id(gradient), digest(gradient))
        state[f"hooks of {name}"] = bool(tensor._backward_hooks), bool(tensor._post_accumulate_grad_hooks)
    return state


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return `model_state`, with the states of all generators and the gradient mode."""
    state = model_state(model)
    numpy_state = np.random.get_state()
    state["python"] = hash(random.getstate())
    state["numpy"] = (digest(torch.from_numpy(numpy_state[1].astype(np.int64))), numpy_state[2:])
    state["torch"] = digest(torch.get_rng_state())
    state["grad mode"] = torch.is_grad_enabled()
    return state


def live_tensors() -> int:
    """Return the number of tensors that Python still holds."""
    gc.collect()
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def with_gradients(model: nn.Module) -> nn.Module:
    """Return a model in the middle of its owner's training: with gradients, and some parts in eval mode."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad and number % 2 == 0:
            parameter.grad = torch.full_like(parameter, 0.5 + number)
    for number, module in enumerate(model.modules()):
        module.training = number % 3 != 1
    return model
