"""A ``LightningModule`` outside of ``fit``: its hooks run as in ``fit``, and what it logs goes nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autobatch.core.errors import InputError
from autobatch.workload.contract import Collated, kind_of
from autobatch.workload.rng import preserved_random_state

_BATCH_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")


@contextmanager
def outside_of_fit(module: Any, trainer: Any, datamodule: Any = None) -> Iterator[None]:
    """Let the hooks of a module run within the block although no ``fit`` does.

    The data are prepared and the layers of ``configure_model`` are built, as ``fit`` does first. Attributes
    that this sets are restored: ``fit`` sets them again. So are the random states.

    Args:
        module: the ``LightningModule``.
        trainer: that is going to fit it.
        datamodule: the ``LightningDataModule``; None if there is none.
    """
    before = vars(module).copy()
    outside = _NoFit(trainer, datamodule)
    module._trainer = outside
    module.log = module.log_dict = module.print = _ignore
    module.optimizers = lambda use_pl_optimizer=True: _one_or_all(outside.optimizers)
    module.lr_schedulers = lambda: _one_or_all(outside.schedules) or None
    try:
        with preserved_random_state():
            _set_up(module, trainer, datamodule)
            outside.optimizers, outside.schedules = configured(module)
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)


def configured(module: Any) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Return optimizers and schedules among the many forms that ``configure_optimizers`` may return.

    Raises:
        InputError: there is no optimizer.
    """
    found = module.configure_optimizers()
    schedules: list[Any] = []
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        found, schedules = found[0], list(found[1])
    several = found if isinstance(found, list | tuple) else [found]
    made = [one["optimizer"] if isinstance(one, dict) else one for one in several]
    if not made or not all(isinstance(one, torch.optim.Optimizer) for one in made):
        raise InputError(f"configure_optimizers must return an optimizer, found {kind_of(found)}")
    schedules += [one["lr_scheduler"] for one in several if isinstance(one, dict) and "lr_scheduler" in one]
    return made, [one["scheduler"] if isinstance(one, dict) else one for one in schedules]


def transferred(module: Any, batch: Collated) -> Collated:
    """Return a batch after the hooks around its transfer to the device, which may augment it."""
    datamodule = getattr(getattr(module, "_trainer", None), "datamodule", None)
    for hook in _BATCH_HOOKS:
        owner = datamodule if _overrides(datamodule, hook) else module
        batch = getattr(owner, hook)(batch, 0)
    return batch


class _NoFit:
    """A trainer outside of ``fit``, which logs nothing and is not copied with its module.

    Args:
        trainer: whose other attributes are passed on.
        datamodule: the data module of the coming ``fit``.
    """

    estimated_stepping_batches = 1000
    barebones = True

    def __init__(self, trainer: Any, datamodule: Any) -> None:
        self._trainer = trainer
        self.datamodule = datamodule
        self.logger = None if trainer.logger is None else _Silent()
        self.loggers = [_Silent() for _ in trainer.loggers]
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedules: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def __deepcopy__(self, _: Any) -> _NoFit:
        return self


class _Silent:
    """A logger that ignores every call."""

    def __getattr__(self, name: str) -> _Silent:
        if name.startswith("__"):  # such as __deepcopy__, which callers only use if it is there
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Silent:
        """Do nothing."""
        return self


def _set_up(module: Any, trainer: Any, datamodule: Any) -> None:
    """Run the hooks that ``fit`` runs before it asks for data; within ``fit``, those that are to come."""
    runs = trainer.state.status == "running"
    if datamodule is not None and not runs:
        datamodule.prepare_data()
        datamodule.setup("fit")
    if not runs:
        module.prepare_data()
    module.setup("fit")
    module.configure_model()


def _one_or_all(several: list[Any]) -> Any:
    return several[0] if len(several) == 1 else several


def _overrides(owner: Any, hook: str) -> bool:
    """Check that a class defines a hook again, which its last base class defines to do nothing."""
    return len([one for one in type(owner).__mro__ if hook in vars(one)]) > 1


def _ignore(*_: Any, **__: Any) -> None:
    """Log and print nothing."""
