"""The options of every command, and the one check that all of their values go through.

One frozen structure a command; the command line, the config files, the variables and the keywords of the
library calls are all checked against it (`autobatch.cli.config_files` says where values come from).
Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import os
import re
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from autobatch.core.errors import InputError
from autobatch.core.knobs import parse_knobs
from autobatch.core.records import LearningRateRule
from autobatch.core.units import TiB, parse_budget

AtLeastOne = Annotated[int, Meta(ge=1)]


AtLeastZero = Annotated[int, Meta(ge=0)]


Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""What all generators take: NumPy's end at 32 bits, and the sampler counts up from here."""


Positive = Annotated[float, Meta(gt=0)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every command takes."""

    device: str = "auto"
    """auto, cuda, cuda:N, cpu or sim:PROFILE."""
    memory_budget: str | int | None = None
    """What the allocator may hold: 6GiB, 512MiB, 80%. Without it: what is free, less a headroom."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the micro-batches; auto is bf16 where the card is built for it, else fp32."""
    seed: Seed = 0
    """Seed of the weights, the order of the data and the trials."""
    json: bool = False
    """Print one JSON object on standard output, and everything for people on standard error."""
    quiet: bool = False
    """No progress, only the result."""
    verbose: bool = False
    """Show the whole traceback of an error."""


class SearchOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the largest micro-batch is searched."""

    max_micro_batch: AtLeastOne | None = None
    """Search no further than this many samples."""
    time_limit: Positive | None = None
    """Seconds after which the best certified size so far is the answer."""
    max_grad_norm: Positive | None = None
    """Clip the gradient of the whole window to this norm; without it: no clipping."""
    ema: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Also keep an average of the weights with this decay, 0.999 say; without it: none."""


class ProbeOptions(SearchOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch probe``."""

    micro_batch: AtLeastOne | None = None
    """Only ask whether this micro-batch fits."""


class PlanOptions(SearchOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch plan``."""

    target_batch: AtLeastOne
    """Samples an optimizer step, exactly."""
    lr_rule: LearningRateRule = "none"
    """How the learning rate follows the batch; a rule needs the batch that it was tuned for."""
    base_batch: AtLeastOne | None = None
    """The batch that the learning rate was tuned for; overrides the workload's."""


class TuneOptions(PlanOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch tune``."""

    trials: AtLeastZero = 8
    """Configurations to measure; 0: no tuning."""
    timeout: Positive | None = None
    """Seconds after which no further trial starts."""
    storage: str | None = None
    """Where the study is kept: a database URL, or the path of a journal file."""
    study: str | None = None
    """Name of the study; runs that share storage and name share the trials."""
    knobs: str | None = None
    """What to tune, such as precision,checkpointing; without it: all that applies here by itself."""
    tune_lr: bool = False
    """Also try learning rates, in short runs at the target batch; one that is surely better is taken."""
    lr_trials: AtLeastOne = 10
    """Learning rates to try, the plan's own first."""
    lr_steps: Annotated[int, Meta(ge=4)] = 40
    """Optimizer steps of a short run."""


class FitOptions(TuneOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch fit``."""

    steps: AtLeastOne | None = None
    """Optimizer steps to train."""
    epochs: AtLeastOne | None = None
    """Passes over the training data; 1 where neither steps nor epochs are given."""
    last_batch: Literal["carry", "flush", "drop"] = "carry"
    """carry windows over the end of an epoch, flush a short one, or drop it."""
    checkpoint_every: AtLeastOne | None = None
    """Write a checkpoint every this many optimizer steps, besides the one at the end."""
    checkpoint_minutes: Positive | None = None
    """Write a checkpoint when this many minutes have passed since the last one."""
    on_failed_save: Literal["stop", "continue"] = "stop"
    """What a checkpoint on the way that cannot be written does to the run; one at the end always stops it."""
    validate_every: AtLeastOne | None = None
    """Validate every this many optimizer steps, besides the end."""
    validation_micro_batch: AtLeastOne | None = None
    """Samples at a time in validation; without it: the training's, and more while they fit."""
    warmup_samples: AtLeastOne | None = None
    """Let the learning rate grow in proportion over the first so many samples."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """Stop at a loss or gradient that is not finite, or skip up to 3 such windows in a row (fp16 does)."""
    split_check: Literal["error", "note", "off"] = "error"
    """What a loss is that cannot be split into micro-batches exactly; off: not looked at."""
    bn_momentum: Literal["keep", "auto"] = "keep"
    """auto: let the running averages of BatchNorm move by the batch, not by its micro-batches."""
    keep_last: Annotated[int, Meta(ge=2)] = 3
    """Checkpoints to keep."""
    workers: AtLeastZero | None = None
    """Processes that fetch and join micro-batches; without it: 0, or what the tuner finds fastest."""
    prefetch: AtLeastOne | None = None
    """Micro-batches that each of the workers is ahead by; without it: 2, or what the tuner finds fastest."""
    sample_seeds: bool = False
    """Augment each sample by a seed of its own, whatever the micro-batch; always so with workers."""
    resume: bool = False
    """Go on from the newest valid checkpoint."""
    out: str | None = None
    """Folder of the run; without it: runs/NAME/DATE."""


class EstimateOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch estimate``."""

    profile: list[str] = []
    """Names or files of hardware profiles; without it: the card of a device sim:PROFILE, else all."""
    micro_batch: AtLeastOne | None = None
    """Predict the footprint of this micro-batch instead of searching the largest."""
    max_micro_batch: AtLeastOne | None = None
    """Search no further than this many samples."""
    target_batch: AtLeastOne | None = None
    """Also plan this many samples an optimizer step."""


COMMANDS: dict[str, type[Options]] = {
    "fit": FitOptions,
    "plan": PlanOptions,
    "probe": ProbeOptions,
    "tune": TuneOptions,
    "estimate": EstimateOptions,
}


_Kind = TypeVar("_Kind", bound=Options)


_DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?|sim:.+")


def options_from(
    kind: type[_Kind], values: Mapping[str, Any], *, names: Mapping[str, str] | None = None
) -> _Kind:
    """Build and check the options of a command from plain values or text.

    Args:
        kind: the structure of the command.
        values: option names to values; text is converted (``steps="3"``).
        names: what an option is called in messages, where that is not its own name (``--steps``).

    Raises:
        InputError: an unknown option, or a value that cannot be; names it and what was found.
    """
    names = names or {}
    for name in values:
        if name not in kind.__struct_fields__:
            raise InputError(unknown_option(names.get(name, name), kind.__struct_fields__))
    types_of = get_type_hints(kind, include_extras=True)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        try:
            is_one = isinstance(value, str) and get_origin(types_of[name]) is list
            plain = [value] if is_one else _plain(value)
            checked[name] = msgspec.convert(plain, types_of[name], strict=False)
        except msgspec.ValidationError:
            raise InputError(
                f"{names.get(name, name)} must be {expected(types_of[name])}, found {value!r}"
            ) from None
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in checked:
            what = expected(types_of[field.name])
            raise InputError(f"{names.get(field.name, field.name)} is needed and was not given: {what}")
    _check(checked, names)
    return kind(**checked)


def expected(annotation: Any) -> str:
    """What a value of an option must be, in words: ``a whole number of 1 or more``."""
    if get_origin(annotation) is Annotated:
        kind, *limits = get_args(annotation)
        return _limited(kind, limits[0])
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is not None:
        parts = [part for part in get_args(annotation) if part is not type(None)]
        if get_origin(annotation) is list:
            return "a list"
        return " or ".join(expected(part) for part in parts)
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[annotation]


def unknown_option(asked: str, names: Iterable[str]) -> str:
    """The complaint about an option that does not exist, with the nearest one that does."""
    names = sorted(names)
    near = difflib.get_close_matches(asked, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
    return f"there is no option {asked}; {hint}"


def _limited(kind: type, meta: Meta) -> str:
    number = "a whole number" if kind is int else "a number"
    if meta.le is not None:
        return f"{number} from {meta.ge} to {meta.le}"
    if meta.lt is not None:
        return f"{number} over {meta.gt} and under {meta.lt}"
    return f"{number} of {meta.ge} or more" if meta.ge is not None else f"{number} over {meta.gt}"


def _plain(value: object) -> object:
    """Paths as text, and the numbers of NumPy as Python's, for the keywords of library calls."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def _check(values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """What the types cannot say, and can be said before anything is opened."""
    called = {name: names.get(name, name) for name in values}
    device, budget = values.get("device"), values.get("memory_budget")
    if device is not None and not _DEVICES.fullmatch(device):
        raise InputError(
            f"{called['device']} {device!r} names no device: write auto, cuda, cuda:N, cpu or sim:PROFILE"
        )
    if budget is not None:
        try:
            parse_budget(budget, whole_bytes=TiB)
        except InputError as error:
            raise InputError(f"{called['memory_budget']}: {error}") from None
    if values.get("knobs") is not None:
        try:
            parse_knobs(values["knobs"])
        except InputError as error:
            raise InputError(f"{called['knobs']}: {error}") from None
    if values.get("steps") is not None and values.get("epochs") is not None:
        raise InputError(
            f"{called['steps']} {values['steps']} and {called['epochs']} {values['epochs']} exclude each "
            "other: give one"
        )
