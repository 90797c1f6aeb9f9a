"""What the user hands over, and whose fault an error is.

A `Workload` names functions and data; nothing is built or touched until a part of autobatch needs it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from autobatch.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset


Collated: TypeAlias = Any
"""What the workload's collate makes of a list of samples."""


class Loss(NamedTuple):
    """A loss whose mean is over something else than samples: tokens that count, masked pixels, weights."""

    total: Tensor
    """0-d: the **sum** of the loss over what is counted."""
    count: int | float | Tensor  # type: ignore[assignment]
    """How many items ``total`` sums over; a 0-d tensor may stay on the device."""


@dataclass(frozen=True, kw_only=True)
class WholeBatchLoss:
    """A loss in which the samples of a batch see each other: InfoNCE, CLIP, SimCLR.

    A ``Workload(loss=…)`` in two parts, so that a batch that does not fit can be accumulated exactly: of all
    of it, only the rows that ``represent`` gives are held at once (`autobatch.step.whole_batch`).
    """

    represent: Callable[[nn.Module, Collated], Any]
    """A tensor, or a tuple, list or dict of some, with a row for each sample of the batch (labels too, if the
    loss needs them). Each row follows from its own sample."""
    loss: Callable[[nn.Module, Any], Tensor]
    """``(model, the rows of the whole optimizer step, in the same form)`` to its loss, a 0-d tensor that is
    used as it stands. What it takes of the model itself, a temperature say, is trained too."""

    def __post_init__(self) -> None:
        """Check what can be checked without running anything.

        Raises:
            InputError: a part is no function.
        """
        for part in ("represent", "loss"):
            if not callable(getattr(self, part)):
                found = kind_of(getattr(self, part))
                raise InputError(f"WholeBatchLoss({part}=…) must be a function, found {found}")

    def __call__(self, model: nn.Module, batch: Collated) -> Tensor:
        """The loss of these samples, as the whole of a batch."""
        return self.loss(model, self.represent(model, batch))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data and its loss."""

    model: Callable[[], nn.Module]
    """Builds the model."""
    train_data: Dataset[Any]
    """Map-style: has ``__getitem__`` and ``__len__``."""
    loss: Callable[[nn.Module, Collated], Tensor | Loss]
    """The mean over the samples of the batch (a 0-d tensor), or a `Loss`; or else a `WholeBatchLoss`."""
    optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    """``(parameters, learning_rate)`` to an optimizer."""
    learning_rate: float
    base_batch: int | None = None
    """The batch that ``learning_rate`` was tuned for; ``None``: unknown."""
    validation_data: Dataset[Any] | None = None
    collate: Callable[[list[Any]], Collated] | None = None
    """Joins samples to a batch; ``None``: torch's default."""
    schedule: Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler] | None = None
    """``(optimizer, optimizer steps of the run)`` to a schedule, stepped once an optimizer step."""
    metrics: Callable[[nn.Module, Collated], Mapping[str, Tensor | Loss]] | None = None
    """More figures for validation, each like a loss: a mean over samples, or a `Loss`."""
    size_of: Callable[[Any], float] | None = None
    """A sample's cost, its length say; the probe runs the worst_case. ``None``: found by a scan."""
    name: str = "workload"
    """Of the folder of its runs, and of what is remembered; without one, that of the function behind a
    ``file.py:function``."""

    def __post_init__(self) -> None:
        """Check what can be checked without running anything.

        Raises:
            InputError: a field is not what it must be; the message names it.
        """
        for field in ("model", "loss", "optimizer"):
            if not callable(getattr(self, field)):
                raise InputError(
                    f"Workload({field}=…) must be a function, found {kind_of(getattr(self, field))}"
                )
        if _is_module(self.model):
            raise InputError(
                f"Workload(model=…) must be a function that builds the model, found {kind_of(self.model)} "
                "that is built already: write model=lambda: …, for a probe starts from scratch"
            )
        for field in ("collate", "schedule", "metrics", "size_of"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise InputError(f"Workload({field}=…) must be a function or None, found {kind_of(value)}")
        for field in ("train_data", "validation_data"):
            data = getattr(self, field)
            if data is None and field == "validation_data":
                continue
            if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
                raise InputError(
                    f"Workload({field}=…) must have __getitem__ and __len__ (map-style), "
                    f"found {kind_of(data)}"
                )
            if not len(data):
                raise InputError(f"Workload({field}=…) has 0 samples: at least 1 is needed")
        if not _is_number(self.learning_rate) or not 0 < self.learning_rate < math.inf:
            raise InputError(
                f"Workload(learning_rate=…) must be a finite number over 0, found {self.learning_rate!r}"
            )
        if self.base_batch is not None and not (_is_number(self.base_batch, int) and self.base_batch >= 1):
            raise InputError(f"Workload(base_batch=…) must be 1 or more, or None, found {self.base_batch!r}")
        if not isinstance(self.name, str) or self.name in ("", ".", "..") or set(self.name) & set("/\\\0\n"):
            raise InputError(f"Workload(name=…) must be text that can name a folder, found {self.name!r}")


def kind_of(value: object) -> str:
    """What a value is, for a message: ``a list``."""
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def _is_number(value: object, kind: type | UnionType = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_module(value: object) -> bool:
    """Whether this is a ``torch.nn.Module``: not so where torch was never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)
