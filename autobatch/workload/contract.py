"""The workload: the user's model, data, loss and optimizer.

A `Workload` holds functions and data. Nothing is built or read until a part of autobatch needs it.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias, TypeGuard, TypeVar

from autobatch.core.errors import InputError
from autobatch.report.words import plural
from autobatch.workload.user_code import check_takes, place_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, Dataset


LONGEST_NAME = 255
"""Bytes of the longest name that file systems allow for a folder."""
Collated: TypeAlias = Any
"""The return value of the workload's collate function, for a list of samples."""
SampleT_co = TypeVar("SampleT_co", covariant=True)


class MapStyle(Protocol[SampleT_co]):
    """Data with a length and one sample per index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> SampleT_co:
        """Return one sample."""


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

    def __post_init__(self) -> None:
        """Check the fields without running anything.

        Raises:
            InputError: a part is not a function.
        """
        for part, batch in {"represent": "batch", "loss": "rows"}.items():
            whose, value = f"WholeBatchLoss({part}=…)", getattr(self, part)
            if not callable(value):
                raise InputError(f"{whose} must be a function, found {kind_of(value)}")
            check_takes(value, whose, "model", batch)

    def __call__(self, model: nn.Module, batch: Collated) -> Tensor:
        """Return the loss of these samples, taken as a whole batch."""
        return self.loss(model, self.represent(model, batch))


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The processes that load samples, as arguments of a ``DataLoader`` name them."""

    workers: int | None = None
    """Loader processes, unless an option or the tuner says otherwise; None for 0."""
    pin_memory: bool = True
    """Copy what the processes load to pinned memory, if the device reads it."""
    init_worker: Callable[[int], object] | None = None
    """Called in each process with its number; None for nothing."""


class BatchFunction:
    """Data that a function of yours makes, the whole batch of an optimizer step at a time.

    ``Workload(train_data=BatchFunction(get_batch))`` calls ``get_batch(size, step)`` once per step, with the
    target batch and the number of the optimizer step, from 0. Its batch is split into micro-batches
    afterwards. The generators of Python and NumPy and that of torch for the CPU are seeded by the run's seed
    and the step, so a run is repeated and resumed bit for bit if the function draws from them.

    Args:
        function: returns a batch of ``size`` samples. Each tensor, array and list has one row per sample.

    Raises:
        InputError: it is no function of two arguments.
    """

    def __init__(self, function: Callable[[int, int], Collated]) -> None:
        if not callable(function):
            raise InputError(
                f"autobatch.BatchFunction takes a function, found {kind_of(function)}: write "
                "BatchFunction(get_batch), which is called as get_batch(size, step)"
            )
        check_takes(function, "the function of autobatch.BatchFunction", "size", "step")
        self.function = function

    def __str__(self) -> str:
        """Return its name for messages, with its line."""
        return f"the batch function{place_of(self.function)}"


_FUNCTIONS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "model": ((), "model=lambda: …, which builds the model"),
    "loss": (("model", "batch"), "loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1])"),
    "optimizer": (
        ("parameters", "learning_rate"),
        "optimizer=lambda params, learning_rate: torch.optim.AdamW(params, lr=learning_rate)",
    ),
    "collate": (("samples",), None),
    "schedule": ((), None),
    "after_step": (("model",), None),
    "metrics": (("model", "batch"), None),
    "counts": (("batch",), None),
    "size_of": (("sample",), None),
}
"""Fields that are functions: what they are called with, and an example of each that is needed. A schedule is
called as the names of its own arguments tell."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data and its loss."""

    model: Callable[[], nn.Module]
    """Builds the model."""
    train_data: Dataset[Any] | MapStyle[Any] | Iterable[Any] | Callable[[], Iterable[Any]] | BatchFunction
    """Map-style: has ``__getitem__`` and ``__len__``. Or a stream that is read in its own order: an
    ``IterableDataset``, another iterable, or a function that returns one (a generator function). Or a
    `BatchFunction`."""
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
    validation_data: Dataset[Any] | MapStyle[Any] | None = None
    """Map-style; None for no validation."""
    collate: Callable[[list[Any]], Collated] | None = None
    """Makes a batch out of a list of samples; None for torch's default."""
    schedule: Callable[..., torch.optim.lr_scheduler.LRScheduler] | Callable[[int], float] | None = None
    """Maps ``(optimizer, optimizer steps of the run)`` to a schedule that advances once per optimizer step; a
    third argument ``steps_per_epoch`` gets that number. Or maps the number of steps taken to the factor of
    the learning rate, as for ``LambdaLR``. None to keep the learning rate constant."""
    after_step: Callable[[Any], object] | None = None
    """Called with the model after each optimizer step, without gradients, on every rank: a teacher follows,
    weights are clipped. Not called after a step that was skipped. What it remembers must be in buffers or
    parameters of the model. None for nothing."""
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
    loading: Loading = field(default_factory=Loading)
    """Processes that load the samples."""
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

        Its data, collate function, sampler or batch sampler, workers and pinning are taken. The batch size is
        not: autobatch finds the micro-batch. Batches carry over the end of an epoch, whatever ``drop_last``.

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
        if is_loader(validation):
            others["validation_data"] = parts_of(validation)["train_data"]
        return cls(model=model, loss=loss, learning_rate=learning_rate, **(parts | others))

    def __post_init__(self) -> None:
        """Check the fields without running anything.

        Raises:
            InputError: a field is invalid; the message names it.
        """
        self._check_functions()
        self._check_data("train_data", self.train_data)
        if self.validation_data is not None:
            self._check_data("validation_data", self.validation_data)
        if self.sampler is not None:
            object.__setattr__(self, "sampler", _order_of_all_ranks(self.sampler, self.train_data))
        if not _is_number(self.learning_rate) or not 0 < self.learning_rate < math.inf:
            raise InputError(
                f"Workload(learning_rate=…) must be a finite number over 0, found {self.learning_rate!r}"
            )
        if self.base_batch is not None and not (_is_number(self.base_batch, int) and self.base_batch >= 1):
            raise InputError(f"Workload(base_batch=…) must be 1 or more, or None, found {self.base_batch!r}")
        # A name is no path, is short, and has no characters that a terminal would obey.
        is_plain = isinstance(self.name, str) and self.name.isprintable() and not set(self.name) & set("/\\")
        if not is_plain or self.name in ("", ".", "..") or len(self.name.encode()) > LONGEST_NAME:
            raise InputError(f"Workload(name=…) must be text that can name a folder, found {self.name!r}")

    def __repr__(self) -> str:
        data, count = self.train_data, None
        with suppress(Exception):  # the user's own __len__
            count = len(data)  # type: ignore[arg-type]
        amount = "a stream" if is_stream(data) or count is None else plural(count, "sample")
        return f"<Workload {self.name}: {amount}, learning rate {self.learning_rate:g}>"

    def _check_functions(self) -> None:
        check_loss(self.loss, "Workload(loss=…)")
        if _is_instance(self.model, "torch.nn", "Module"):
            raise InputError(
                f"Workload(model=…) must be a function that builds the model, found {kind_of(self.model)} "
                "that is already built: write model=lambda: …, so that every probe starts with a new model"
            )
        for name, (arguments, example) in _FUNCTIONS.items():
            function, whose = getattr(self, name), f"Workload({name}=…)"
            if function is None and example is None:
                continue
            if not callable(function):
                advice = f": write {example}" if example else ", or leave it out"
                raise InputError(f"{whose} must be a function, found {kind_of(function)}{advice}")
            takes = list(arguments) if name != "schedule" else schedule_arguments(function) or ["step"]
            check_takes(function, whose, *takes)
        once = inspect.isgenerator(self.sampler)  # a later epoch would draw nothing
        if self.sampler is not None and (once or not hasattr(self.sampler, "__iter__")):
            raise InputError(
                "Workload(sampler=…) must draw the indices of an epoch whenever it is iterated, found "
                f"{kind_of(self.sampler)}: give a list or a sampler"
            )

    def _check_data(self, name: str, data: Any) -> None:
        if is_loader(data) or (not hasattr(data, "__getitem__") and is_loader(getattr(data, "loader", None))):
            raise InputError(
                f"Workload({name}=…) must be the data, found {kind_of(data)}: write "
                "Workload.from_loader(loader, model=…, loss=…, …), which takes its data, collate "
                f"function, sampler and workers, or give {name}=loader.dataset and collate=loader.collate_fn"
            )
        if name == "train_data" and is_stream(data):
            if self.sampler is not None:
                raise InputError(
                    f"Workload(sampler=…) needs data with an index, found {kind_of(data)}, a stream: leave "
                    "it out, and let the stream yield its samples in that order"
                )
            if inspect.isroutine(data):
                check_takes(data, "Workload(train_data=…), unless it is a BatchFunction that makes batches,")
            if hasattr(data, "__next__"):
                raise InputError(
                    f"Workload(train_data=…) is {kind_of(data)}, which can be read only once, and a probe "
                    "reads the first samples too: give the function that makes it, without calling it"
                )
        elif not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise InputError(
                f"Workload({name}=…) must have __getitem__ and __len__ (map-style), found {kind_of(data)}"
            )
        elif not len(data):
            raise InputError(f"Workload({name}=…) has 0 samples: at least 1 is needed")


def check_loss(loss: object, whose: str) -> None:
    """Check that a loss is no loss of torch, which knows no model: ``cross_entropy``, ``CrossEntropyLoss()``.

    Raises:
        InputError: it is one; the message says what to write.
    """
    module = getattr(loss, "__module__", None)
    of_python = {"torch.nn.functional", "torch.nn.modules.loss"}
    if module in {*of_python, "torch", "torch._C._nn"} or type(loss).__module__ in of_python:
        raise InputError(
            f"{whose} is called as loss(model, batch), but {getattr(loss, '__name__', type(loss).__name__)} "
            f"takes outputs and targets: write {_FUNCTIONS['loss'][1]}"
        )


def is_stream(data: object) -> bool:
    """Check for data that are read in their own order, without importing torch."""
    if isinstance(data, BatchFunction) or _is_instance(data, "torch.utils.data", "IterableDataset"):
        return True
    return not hasattr(data, "__getitem__") and (hasattr(data, "__iter__") or inspect.isroutine(data))


def schedule_arguments(schedule: Callable[..., object]) -> list[str]:
    """Return what ``Workload(schedule=…)`` takes, by the names of its arguments.

    That is ``optimizer``, ``steps`` and ``steps_per_epoch``, or a part of them; nothing if it takes a step.
    """
    try:
        parameters = inspect.signature(schedule).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return ["optimizer", "steps"]
    named = ["steps_per_epoch"] if "steps_per_epoch" in parameters else []
    others = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in named
    ]
    if len(others) != 1:
        return ["optimizer", "steps", *named]
    return ["optimizer", *named] if named or others[0].startswith("opt") else []


def is_loader(value: object) -> TypeGuard[DataLoader[Any]]:
    """Check for a ``DataLoader`` without importing torch."""
    return _is_instance(value, "torch.utils.data", "DataLoader")


def is_model(value: object) -> bool:
    """Check for a ``torch.nn.Module``, or a class of them, without importing torch."""
    if not isinstance(value, type):
        return _is_instance(value, "torch.nn", "Module")
    return any(kind.__module__ == "torch.nn.modules.module" for kind in value.mro())


def kind_of(value: object) -> str:
    """Describe the type of a value for a message, for example ``a list``."""
    if value is None:
        return "nothing (None)"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _is_number(value: object, kind: type | UnionType = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_instance(value: object, module: str, name: str) -> bool:
    """Check for an instance of a class of torch; if nothing has imported its module, there is none."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def parts_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the fields of a `Workload` that a loader fills: its data, collate function, order and processes.

    Raises:
        InputError: it is no ``DataLoader``, or it yields what its data yield, without making batches.
    """
    from torch.utils.data import DataLoader, default_collate

    if not isinstance(loader, DataLoader):
        raise InputError(
            f"Workload.from_loader takes a torch DataLoader, found {kind_of(loader)}: give its data as "
            "Workload(train_data=…)"
        )
    if loader.batch_sampler is None and loader.batch_size is None:
        raise InputError(
            "this loader has batch_size=None, so its items may be batches already, whose size no plan can "
            "change: let its data yield samples, and give it any batch_size, which is not used"
        )
    return {
        "train_data": loader.dataset,
        "collate": None if loader.collate_fn is default_collate else _collate_of(loader),
        "sampler": _sampler_of(loader),
        "loading": Loading(
            workers=loader.num_workers, pin_memory=loader.pin_memory, init_worker=loader.worker_init_fn
        ),
    }


def _collate_of(loader: Any) -> Callable[[list[Any]], Collated]:
    """Return the collate function, with what a loader of torch_geometric does to its result outside of it."""
    collate: Callable[[list[Any]], Collated] = loader.collate_fn
    if callable(getattr(loader, "filter_fn", None)) and not getattr(loader, "filter_per_worker", True):
        return partial(_filtered, collate, loader.filter_fn)
    return collate


def _filtered(
    collate: Callable[[list[Any]], Any], join: Callable[[Any], Collated], samples: list[Any]
) -> Collated:
    """Return the subgraph of some nodes with its features, which NodeLoader joins after ``collate_fn``."""
    return join(collate(samples))


def _sampler_of(loader: DataLoader[Any]) -> Iterable[Any] | None:
    """Return what draws the samples of an epoch, or batches of them; None for a stream."""
    from torch.utils.data import BatchSampler, IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return None
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else batches
    if type(sampler).__name__ == "_RepeatSampler":
        # Loaders that keep their workers between epochs repeat it for ever (timm, YOLO).
        sampler = batches = sampler.sampler
    return batches.sampler if type(batches) is BatchSampler else sampler


def _order_of_all_ranks(sampler: Any, data: Any) -> Iterable[Any] | None:
    """Return the order of an epoch that a sampler means for all ranks; None for a permutation per epoch.

    Raises:
        InputError: it draws the part of one rank, in an order of its own.
    """
    from torch.utils.data import RandomSampler
    from torch.utils.data.distributed import DistributedSampler

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
