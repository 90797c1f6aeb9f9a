"""The workload: the user's model, data, loss and optimizer.

A `Workload` holds functions and data. Nothing is built or read until a part of autobatch needs it.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeGuard

from autobatch.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader


Collated: TypeAlias = Any
"""The return value of the workload's collate function, for a list of samples."""


class Loss(NamedTuple):
    """A loss whose mean is not over samples, but for example over tokens, masked pixels or weights."""

    total: Tensor
    """0-d: the **sum** of the loss over the counted items."""
    count: int | float | Tensor  # type: ignore[assignment]
    """Number of items that ``total`` sums over; a 0-d tensor may stay on the device."""


LossValue: TypeAlias = "Tensor | Loss | Mapping[str, Tensor | Loss]"
"""The return value of a loss function. The loss of several terms is their sum."""
LossFunction: TypeAlias = "Callable[[Any, Collated], LossValue]"
"""Takes the model, of whatever class, and a batch."""


@dataclass(frozen=True, kw_only=True)
class WholeBatchLoss:
    """A loss in which the samples of a batch depend on each other: InfoNCE, CLIP, SimCLR.

    It splits ``Workload(loss=…)`` in two parts, so that a batch that does not fit can be accumulated exactly.
    Of the whole batch, only the rows of ``represent`` are held at once (`autobatch.step.whole_batch`).
    """

    represent: Callable[[Any, Collated], Any]
    """Returns a tensor, or a tuple, list or dict of tensors, with one row per sample of the batch, labels
    included if the loss needs them. Each row depends on its own sample only."""
    loss: Callable[[Any, Any], Tensor]
    """Maps ``(model, the rows of the whole batch, in the same form)`` to the loss, a 0-d tensor that is used
    unchanged. Parameters that it reads from the model, for example a temperature, are trained too."""

    def __call__(self, model: nn.Module, batch: Collated) -> Tensor:
        """Return the loss of these samples, taken as a whole batch."""
        return self.loss(model, self.represent(model, batch))


NEEDED = {
    "model": "write model=lambda: …, which builds the model",
    "loss": "write loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1])",
    "optimizer": "write optimizer=lambda params, learning_rate: torch.optim.AdamW(params, lr=learning_rate)",
}
"""Fields that are functions and have no default, each with what to write."""
CALLED = {"model": (), "loss": ("model", "batch"), "optimizer": ("parameters", "learning_rate")}
"""What each of them is called with."""
LOSSES_OF_TORCH = ("torch.nn.functional", "torch.nn.modules.loss", "torch", "torch._C._nn")
"""Modules of functions and classes that know no model."""
OPTIONAL = ("collate", "schedule", "metrics", "counts", "size_of", "init_worker")
"""Fields that are functions or None."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Workload:
    """A model, its data and its loss."""

    model: Callable[[], nn.Module]
    """Builds the model."""
    train_data: Any
    """A ``Dataset``, or anything else with ``__getitem__`` and ``__len__`` (map-style). Or a stream that is
    read in its own order: an ``IterableDataset``, another iterable, or a function that returns one (a
    generator function)."""
    loss: LossFunction
    """Returns the mean over the samples of the batch (a 0-d tensor), or a `Loss`. For a loss that is a sum of
    several: a mapping of names to these. Or a `WholeBatchLoss`."""
    optimizer: Callable[
        [Any, float],
        torch.optim.Optimizer | list[torch.optim.Optimizer] | tuple[torch.optim.Optimizer, ...],
    ]
    """Maps ``(parameters, learning_rate)`` to an optimizer, or to several. It gets the model itself if its
    first argument is called ``model``, and pairs of name and parameter if it is called
    ``named_parameters``."""
    learning_rate: float
    base_batch: int | None = None
    """The batch that ``learning_rate`` was tuned for; None if unknown."""
    validation_data: Any = None
    """Map-style; None for no validation."""
    collate: Callable[[list[Any]], Collated] | None = None
    """Makes a batch out of a list of samples; None for torch's default."""
    schedule: Callable[..., torch.optim.lr_scheduler.LRScheduler] | Callable[[int], float] | None = None
    """Maps ``(optimizer, optimizer steps of the run)`` to a schedule that advances once per optimizer step.
    Or maps the number of steps taken to the factor of the learning rate, as for ``LambdaLR``. None to keep
    the learning rate constant."""
    metrics: Callable[[Any, Collated], Mapping[str, Tensor | Loss]] | None = None
    """Returns further figures for validation, each a mean over samples or a `Loss`; None for no metrics."""
    counts: Callable[[Collated], Mapping[str, float | Tensor]] | None = None
    """Returns the count of each `Loss` of a loss of several terms for a collated micro-batch on the host, by
    name; such a loss needs it. None for a loss of one term, or of means."""
    size_of: Callable[[Any], float] | None = None
    """Returns the cost of a sample, for example its length. The probe runs the most expensive samples; None
    to find them by a scan."""
    sampler: Iterable[Any] | None = None
    """Draws the indices of an epoch, or batches of them, in order, for all ranks together; None for a new
    permutation per epoch. A ``DistributedSampler`` becomes the order that all of its ranks have together."""
    workers: int | None = None
    """Processes that load the samples, unless an option or the tuner says otherwise; None for 0."""
    init_worker: Callable[[int], object] | None = None
    """Called in each of these processes with its number; None for nothing."""
    name: str = "workload"
    """Names the folder of the runs and the entries of the cache. The default is replaced by the name of the
    function that ``file.py:function`` refers to, or by that of the file."""

    @classmethod
    def from_loader(
        cls,
        loader: DataLoader[Any],
        *,
        model: Callable[[], nn.Module],
        loss: LossFunction,
        learning_rate: float,
        **others: Any,
    ) -> Self:
        """Build a workload from the parts of a ``DataLoader``.

        Its data, collate function, sampler or batch sampler, and workers are taken. The batch size is not:
        autobatch finds the micro-batch. Batches carry over the end of an epoch, whatever ``drop_last``.

        Args:
            loader: of the training data.
            model: builds the model.
            loss: as in `Workload`.
            learning_rate: of the optimizer.
            others: the other fields of `Workload`. ``validation_data`` may be a ``DataLoader`` too, of which
                only the data are taken.

        Raises:
            InputError: the loader makes no batches, or a field is invalid.
        """
        parts = parts_of(loader)
        validation = others.get("validation_data")
        if _is_loader(validation):
            others["validation_data"] = parts_of(validation)["train_data"]
        return cls(model=model, loss=loss, learning_rate=learning_rate, **(parts | others))

    def __post_init__(self) -> None:
        """Check the fields without running anything.

        Raises:
            InputError: a field is invalid; the message names it.
        """
        if is_model(self.model):
            raise InputError(
                f"Workload(model=…) must be a function that builds the model, found {kind_of(self.model)} "
                "that is already built: write model=lambda: …, so that every probe starts with a new model"
            )
        for name in (*NEEDED, *OPTIONAL):
            value = getattr(self, name)
            if not callable(value) and (name in NEEDED or value is not None):
                advice = NEEDED.get(name, "leave it out")
                raise InputError(f"Workload({name}=…) must be a function, found {kind_of(value)}: {advice}")
        refuse_loss_of_torch(self.loss, "Workload(loss=…)")
        for name, given in CALLED.items():
            _check_call(name, getattr(self, name), given)
        self._check_data("train_data", self.train_data)
        if self.validation_data is not None:
            self._check_data("validation_data", self.validation_data)
        if self.sampler is not None:
            object.__setattr__(self, "sampler", _order_of_all_ranks(self.sampler, self.train_data))
        rate, base = self.learning_rate, self.base_batch
        if not _is_positive(rate):
            raise InputError(f"Workload(learning_rate=…) must be a finite number over 0, found {rate!r}")
        if base is not None and not (isinstance(base, int) and _is_positive(base)):
            raise InputError(f"Workload(base_batch=…) must be 1 or more, or None, found {base!r}")
        if not re.fullmatch(r"(?!\.+$)[^/\\\x00-\x1f]{1,99}", str(self.name)):
            raise InputError(f"Workload(name=…) must be text that can name a folder, found {self.name!r}")

    def _check_data(self, name: str, data: Any) -> None:
        found = f"Workload({name}=…) must be the data, found {kind_of(data)}"
        if _is_loader(data):
            raise InputError(
                f"{found}: write Workload.from_loader(loader, …), which takes its data, collate function, "
                f"sampler and workers, or give {name}=loader.dataset"
            )
        if name == "train_data" and is_stream(data):
            if self.sampler is not None:
                raise InputError(
                    f"Workload(sampler=…) needs data with an index, found {kind_of(data)}, a stream: leave "
                    "it out, and let the stream yield its samples in that order"
                )
            if hasattr(data, "__next__"):
                raise InputError(
                    f"{found}, which can be read only once, and a probe reads the first samples too: give "
                    "the function that makes it, without calling it"
                )
        elif (
            not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
            or isinstance(data, str)
            or (isinstance(data, Mapping) and 0 not in data)
            or (isinstance(data, tuple) and data and all(_is_instance(x, "torch", "Tensor") for x in data))
        ):
            raise InputError(
                f"{found}, which has no samples by their index: give a Dataset, a list of samples, or of "
                "whole tensors torch.utils.data.TensorDataset(inputs, targets)"
            )
        elif not len(data):
            raise InputError(f"Workload({name}=…) has 0 samples: at least 1 is needed")


def _check_call(name: str, function: Callable[..., object], given: Sequence[str]) -> None:
    """Check that a function of a workload takes what it is called with."""
    try:
        inspect.signature(function).bind(*given)
    except ValueError:  # a built-in without a signature
        pass
    except TypeError as error:
        raise InputError(
            f"Workload({name}=…) is called as {name}({', '.join(given)}), and cannot be: {error}"
        ) from None


def refuse_loss_of_torch(loss: object, whose: str) -> None:
    """Refuse a loss that knows no model: ``cross_entropy``, ``CrossEntropyLoss()``.

    Raises:
        InputError: it is one; the message says what to write.
    """
    made_by: Any = loss if hasattr(loss, "__name__") else type(loss)
    if made_by.__module__ in LOSSES_OF_TORCH:
        raise InputError(
            f"{whose} is called as loss(model, batch), but {made_by.__name__} takes outputs and targets: "
            f"{NEEDED['loss']}"
        )


def is_stream(data: object) -> bool:
    """Check for data that are read in their own order, without importing torch."""
    if _is_instance(data, "torch.utils.data", "IterableDataset"):
        return True
    return not hasattr(data, "__getitem__") and (hasattr(data, "__iter__") or inspect.isroutine(data))


def schedule_arguments(schedule: Callable[..., object]) -> list[str]:
    """Return what ``Workload(schedule=…)`` takes, by the names of its arguments.

    That is ``optimizer`` and ``steps``, or the first alone; nothing if it takes a step.

    Raises:
        InputError: it takes the steps of an epoch.
    """
    try:
        parameters = inspect.signature(schedule).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return ["optimizer", "steps"]
    if "steps_per_epoch" in parameters:
        raise InputError(
            "Workload(schedule=…) gets the optimizer and the optimizer steps of the run, and no "
            "steps_per_epoch: compute them as len(train_data) / target_batch"
        )
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(names) != 1:
        return ["optimizer", "steps"]
    return ["optimizer"] if names[0].startswith("opt") else []


def is_model(value: object) -> bool:
    """Check for a ``torch.nn.Module`` without importing torch."""
    return _is_instance(value, "torch.nn", "Module")


def kind_of(value: object) -> str:
    """Describe a value for a message: ``a list``, or ``a tensor of shape (3,)``."""
    if value is None:
        return "nothing (None)"
    if _is_instance(value, "torch", "Tensor"):
        return f"a tensor of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_loader(value: object) -> TypeGuard[DataLoader[Any]]:
    return _is_instance(value, "torch.utils.data", "DataLoader")


def _is_instance(value: object, module: str, name: str) -> bool:
    """Check for an instance of a class of torch; if nothing has imported its module, there is none."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def parts_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the fields of a `Workload` that a loader fills: its data, collate function, order and processes.

    Raises:
        InputError: it is no ``DataLoader``, or it yields what its data yield, without making batches.
    """
    from torch.utils.data import BatchSampler, DataLoader, default_collate

    if not isinstance(loader, DataLoader):
        raise InputError(
            f"Workload.from_loader takes a torch DataLoader, found {kind_of(loader)}: give its data as "
            "Workload(train_data=…)"
        )
    batches: Any = loader.batch_sampler
    if batches is None:
        raise InputError(
            "this loader has batch_size=None, so its items may be batches already, whose size no plan can "
            "change: let its data yield samples, and give it any batch_size, which is not used"
        )
    order = batches.sampler if type(batches) is BatchSampler else batches
    return {
        "train_data": loader.dataset,
        "collate": None if loader.collate_fn is default_collate else loader.collate_fn,
        "sampler": None if is_stream(loader.dataset) else order,
        "workers": loader.num_workers,
        "init_worker": loader.worker_init_fn,
    }


def _order_of_all_ranks(sampler: Any, data: Any) -> Iterable[Any] | None:
    """Return the order of an epoch that a sampler means for all ranks; None for a permutation per epoch.

    Raises:
        InputError: it cannot be iterated in every epoch, or draws the part of one rank.
    """
    from torch.utils.data import RandomSampler
    from torch.utils.data.distributed import DistributedSampler

    if not hasattr(sampler, "__iter__") or inspect.isgenerator(sampler):
        raise InputError(
            "Workload(sampler=…) must draw the indices of an epoch whenever it is iterated, found "
            f"{kind_of(sampler)}: give a list or a sampler"
        )
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(data):
        return None
    if type(sampler) is DistributedSampler:
        # A plan splits each batch over the ranks itself, so it needs all samples.
        return None if sampler.shuffle else range(len(data))
    for drawing in (sampler, getattr(sampler, "sampler", None)):
        ranks = getattr(drawing, "num_replicas", 1)
        if ranks > 1:
            raise InputError(
                f"Workload(sampler=…) is {kind_of(drawing)} that draws the part of 1 of {ranks} ranks, but a "
                "plan splits each batch over the ranks itself: make it with num_replicas=1 and rank=0, or "
                "leave it out"
            )
    return sampler  # type: ignore[no-any-return]
