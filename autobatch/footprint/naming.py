"""Which module is running, so that a recorder can say who made what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autobatch.footprint.recording import Recorder


class named:  # noqa: N801 - a context manager
    """Inside, the recorder knows which module's forward is running."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._model = model
        self._recorder = recorder
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._recorder.modules.append(name)

    def _leave(self, *_: object) -> None:
        if self._recorder.modules:
            self._recorder.modules.pop()
