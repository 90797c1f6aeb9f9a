"""The module whose forward pass runs, told to a meter, so that a peak is explained by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle

from autobatch.device.base import Meter


@contextmanager
def followed_modules(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Tell a meter which module of a model runs, the innermost one, within the block.

    ``torch.utils.module_tracker.ModuleTracker`` does not serve. It has a set of names in place of a stack. A
    submodule that the loss calls directly is named after its class, so two towers share a name. Its hooks on
    gradients change what a recomputing model frees.
    """
    running: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        def run(*_: object) -> None:
            running.append(name)
            meter.enter_module(name)

        return run

    def leave(*_: object) -> None:
        if running:
            running.pop()
            meter.enter_module(running[-1] if running else "")

    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
