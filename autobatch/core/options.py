"""The options of every command, and the check that all of their values go through.

Each command has one frozen structure. The command line, the config files, the environment variables and the
keywords of the library calls are all checked against it (`autobatch.cli.config_files` sets their precedence).
Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_origin

import msgspec
from msgspec import Meta

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE
from autobatch.core.knobs import parse_knobs
from autobatch.core.option_types import (
    LARGEST_INTEGER,
    AtLeastOne,
    AtLeastZero,
    Decay,
    OptionHelp,
    Positive,
    Prefetch,
    Seed,
    Workers,
    expected,
    plain_type,
    unknown_option,
)
from autobatch.core.records import LearningRateRule
from autobatch.core.text import is_text, quoted
from autobatch.core.units import TiB, parse_budget


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every command."""

    device: Annotated[
        str, OptionHelp("auto, cuda, cuda:N, cpu, sim:PROFILE.", "memory", "DEVICE", common=True)
    ] = "auto"
    memory_budget: Annotated[
        str | int | None,
        OptionHelp(
            "Memory that the allocator may hold, for example 6GiB or 80%. Without it: the free memory "
            "less a headroom.",
            "memory",
            "SIZE",
            common=True,
        ),
    ] = None
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        OptionHelp("auto: bf16 if native, else fp32.", "memory", common=True),
    ] = "auto"
    scan: Annotated[
        AtLeastOne | None,
        OptionHelp("Samples at the start of a stream to plan from. Without it: 1000.", "what to train", "N"),
    ] = None
    seed: Annotated[Seed, OptionHelp("Seed of the weights, the data order and the trials.", "run", "N")] = 0
    json: Annotated[
        bool, OptionHelp("Print one JSON object to stdout, all else to stderr.", "output", common=True)
    ] = False
    quiet: Annotated[bool, OptionHelp("Print the result, but no progress.", "output")] = False
    verbose: Annotated[bool, OptionHelp("Print the traceback of an error.", "output")] = False


class SearchOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the commands that search for the largest micro-batch."""

    max_micro_batch: Annotated[
        AtLeastOne | None, OptionHelp("Largest micro-batch to try.", "memory", "N", common=True)
    ] = None
    time_limit: Annotated[
        Positive | None,
        OptionHelp(
            "Stop the search after this time. The answer is then the largest size that is known to fit.",
            "memory",
            "SECONDS",
        ),
    ] = None
    max_grad_norm: Annotated[
        Positive | None,
        OptionHelp(
            "Clip the gradient of each step to this norm. Without it: no clipping.", "what to train", "NORM"
        ),
    ] = None
    ema: Annotated[
        Decay | None,
        OptionHelp(
            "Keep an exponential moving average of the weights with this decay, for example 0.999.",
            "what to train",
            "DECAY",
        ),
    ] = None


class ProbeOptions(SearchOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch probe``."""

    micro_batch: Annotated[
        AtLeastOne | None, OptionHelp("Only check whether this micro-batch fits.", "memory", "N", common=True)
    ] = None


class PlanOptions(SearchOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the commands that plan a batch."""

    target_batch: Annotated[
        AtLeastOne, OptionHelp("Samples per optimizer step, exactly.", "what to train", "N", common=True)
    ]
    split: Annotated[
        Literal["auto", "count", "size"],
        OptionHelp(
            "Split each batch into equal counts, or by the sizes of its samples, which saves padding. auto: "
            "by size if that is faster and changes no result.",
            "memory",
        ),
    ] = "auto"
    lr_rule: Annotated[
        LearningRateRule,
        OptionHelp("Scale the rate with the batch.", "learning rate", common=True),
    ] = "none"
    base_batch: Annotated[
        AtLeastOne | None,
        OptionHelp(
            "Batch that the learning rate was tuned for. Without it: base_batch of the workload.",
            "learning rate",
            "N",
            common=True,
        ),
    ] = None


class RankPlanOptions(PlanOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch plan``, which plans for other launchers too."""

    world_size: Annotated[
        AtLeastOne | None,
        OptionHelp(
            "Data-parallel ranks that share a batch. Without it: WORLD_SIZE of the environment, else 1.",
            "what to train",
            "N",
        ),
    ] = None


class TuneOptions(PlanOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch tune``."""

    trials: Annotated[
        AtLeastZero | None,
        OptionHelp(
            "Configurations to measure, 0 for none. Without it: 8, fewer in fit if they cannot pay back.",
            "tuning",
            "N",
            common=True,
        ),
    ] = None
    timeout: Annotated[
        Positive | None, OptionHelp("Start no further trial after this time.", "tuning", "SECONDS")
    ] = None
    storage: Annotated[
        str | None,
        OptionHelp(
            "Storage of the study: a database URL or the path of a journal file. Without it: a journal file "
            "in the data directory.",
            "tuning",
            "URL",
        ),
    ] = None
    study: Annotated[
        str | None,
        OptionHelp(
            "Name of the study. Runs with the same storage and name share their trials.", "tuning", "NAME"
        ),
    ] = None
    knobs: Annotated[
        str | None,
        OptionHelp(
            "Knobs to tune, for example precision,checkpointing. Without it: all that usually pay off here.",
            "tuning",
            "NAMES",
        ),
    ] = None
    tune_lr: Annotated[
        bool,
        OptionHelp(
            "Also try learning rates in short runs, and use the best if it is better beyond the noise.",
            "learning rate",
            common=True,
        ),
    ] = False
    lr_trials: Annotated[
        AtLeastOne, OptionHelp("Learning rates to try, the plan's own first.", "learning rate", "N")
    ] = 10
    lr_steps: Annotated[
        int, Meta(ge=4), OptionHelp("Optimizer steps of each short run.", "learning rate", "N")
    ] = 40


class FitOptions(TuneOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch fit``."""

    steps: Annotated[
        AtLeastOne | None, OptionHelp("Optimizer steps to train.", "what to train", "N", common=True)
    ] = None
    epochs: Annotated[
        AtLeastOne | None,
        OptionHelp("Passes over the training data. Without --steps: 1.", "what to train", "N", common=True),
    ] = None
    last_batch: Annotated[
        Literal["carry", "flush", "drop"],
        OptionHelp(
            "At the end of an epoch: carry the samples that are left into the next epoch, flush them as a "
            "short batch, or drop them.",
            "what to train",
        ),
    ] = "carry"
    checkpoint_every: Annotated[
        AtLeastOne | None,
        OptionHelp("Save a checkpoint every N steps, and at the end.", "run", "N", common=True),
    ] = None
    checkpoint_minutes: Annotated[
        Positive | None,
        OptionHelp("Save a checkpoint if the last one is older than this.", "run", "MINUTES"),
    ] = None
    on_failed_save: Annotated[
        Literal["stop", "continue"],
        OptionHelp(
            "Stop or continue when a periodic checkpoint cannot be written. A failed final checkpoint always "
            "stops.",
            "run",
        ),
    ] = "stop"
    validate_every: Annotated[
        AtLeastOne | None, OptionHelp("Validate every N steps, and at the end.", "run", "N", common=True)
    ] = None
    validation_micro_batch: Annotated[
        AtLeastOne | None,
        OptionHelp(
            "Micro-batch of validation. Without it: that of training, or a larger one that fits.", "run", "N"
        ),
    ] = None
    warmup_samples: Annotated[
        AtLeastOne | None,
        OptionHelp("Raise the learning rate linearly over the first N samples.", "learning rate", "N"),
    ] = None
    on_nonfinite: Annotated[
        Literal["raise", "skip"],
        OptionHelp(
            "Stop at a loss or gradient that is not finite, or skip up to 3 such steps in a row, as fp16 "
            "does.",
            "run",
        ),
    ] = "raise"
    split_check: Annotated[
        Literal["error", "note", "off"],
        OptionHelp(
            "What to do if the loss cannot be split into micro-batches exactly: stop, print a note, or skip "
            "the check.",
            "what to train",
        ),
    ] = "error"
    bn_momentum: Annotated[
        Literal["keep", "auto"],
        OptionHelp(
            "auto rescales the momentum of BatchNorm, so that its running averages move per batch and not "
            "per micro-batch.",
            "what to train",
        ),
    ] = "keep"
    keep_last: Annotated[int, Meta(ge=2), OptionHelp("Checkpoints to keep.", "run", "N")] = 3
    workers: Annotated[
        Workers | None,
        OptionHelp("Data loader processes. Without it: 0, or as tuned.", "run", "N", common=True),
    ] = None
    prefetch: Annotated[
        Prefetch | None,
        OptionHelp("Micro-batches that each worker loads ahead. Without it: 2, or as tuned.", "run", "N"),
    ] = None
    sample_seeds: Annotated[
        bool,
        OptionHelp(
            "Seed the augmentation of each sample separately, so that the micro-batch does not change it. "
            "Always on with workers.",
            "run",
        ),
    ] = False
    grad_sync: Annotated[
        Literal["auto", "overlap", "after"],
        OptionHelp(
            "Over several ranks, sum gradients during the last backward pass (DDP) or after it. auto: during "
            "it above 25 MiB, if DDP can.",
            "run",
        ),
    ] = "auto"
    collective_timeout: Annotated[
        Positive,
        OptionHelp(
            "Over several ranks, end the run if a rank lets the others wait longer.", "run", "SECONDS"
        ),
    ] = 600.0
    resume: Annotated[bool, OptionHelp("Continue from the newest valid checkpoint.", "run", common=True)] = (
        False
    )
    out: Annotated[
        str | None, OptionHelp("Folder of the run. Without it: runs/NAME/DATE.", "output", "DIR", common=True)
    ] = None


class EstimateOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch estimate``."""

    profile: Annotated[
        list[str],
        OptionHelp(
            "Names or files of hardware profiles. Without it: the GPU of --device sim:PROFILE, else all.",
            "memory",
            "NAME",
            common=True,
        ),
    ] = []
    all: Annotated[
        bool, OptionHelp("All GPUs that are known, whatever --profile names.", "memory", common=True)
    ] = False
    report: Annotated[
        str | None,
        OptionHelp("Also write a page with the table and the memory.", "output", "FILE", common=True),
    ] = None
    micro_batch: Annotated[
        AtLeastOne | None,
        OptionHelp(
            "Predict the memory of this micro-batch instead of searching for the largest.",
            "memory",
            "N",
            common=True,
        ),
    ] = None
    max_micro_batch: Annotated[
        AtLeastOne | None, OptionHelp("Largest micro-batch to try.", "memory", "N", common=True)
    ] = None
    target_batch: Annotated[
        AtLeastOne | None,
        OptionHelp("Also plan this many samples per optimizer step.", "what to train", "N", common=True),
    ] = None


COMMANDS: dict[str, type[Options]] = {
    "fit": FitOptions,
    "plan": RankPlanOptions,
    "probe": ProbeOptions,
    "tune": TuneOptions,
    "estimate": EstimateOptions,
}
_Kind = TypeVar("_Kind", bound=Options)
_DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?|sim:.+")


def options_from(
    kind: type[_Kind], values: Mapping[str, Any], *, names: Mapping[str, str] | None = None
) -> _Kind:
    """Check values, plain or as text, and build the options of a command from them.

    Args:
        kind: the structure of the command.
        values: option names to values; text is converted (``steps="3"``).
        names: what messages call an option, if not by its own name (``--steps``).

    Raises:
        InputError: an option is unknown, missing or has a wrong value; the message names it and the value.
    """
    names = names or {}
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in values:
        if name not in fields:
            raise InputError(unknown_option(names.get(name, name), fields))
    checked: dict[str, Any] = {}
    for name, value in values.items():
        annotation = fields[name].type
        try:
            is_single = isinstance(value, str) and get_origin(plain_type(annotation)) is list
            checked[name] = msgspec.convert([value] if is_single else _plain(value), annotation, strict=False)
            is_valid = value is None or checked[name] is not None  # msgspec reads the text null as None
        except UNREADABLE:
            is_valid = False
        if not is_valid:
            raise InputError(f"{names.get(name, name)} must be {expected(annotation)}, found {quoted(value)}")
    for name, value in checked.items():
        _check_plain(names.get(name, name), value)
    for name, field in fields.items():
        if field.required and name not in checked:
            raise InputError(f"{names.get(name, name)} is missing: give {expected(field.type)}")
    _check(checked, names)
    return kind(**checked)


def _check_plain(name: str, value: object) -> None:
    """Check that a number fits the arithmetic, and that a text can be a file name and be printed as JSON.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, int) and value > LARGEST_INTEGER:
        raise InputError(f"{name} must be at most {LARGEST_INTEGER}, found {quoted(value)}")
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and not is_text(text):
            raise InputError(f"{name} must be text in UTF-8 without NUL, found {quoted(text)}")


def _plain(value: object) -> object:
    """Convert a path to text and a number of NumPy to Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def _check(values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check what the types cannot express and no device or workload is needed for."""
    called = {name: names.get(name, name) for name in values}
    device = values.get("device")
    if device is not None and not _DEVICES.fullmatch(device):
        raise InputError(
            f"{called['device']} {quoted(device)} names no device: "
            "write auto, cuda, cuda:N, cpu or sim:PROFILE"
        )
    for name, parse in (
        ("memory_budget", lambda budget: parse_budget(budget, whole_bytes=TiB)),
        ("knobs", parse_knobs),
    ):
        if values.get(name) is not None:
            try:
                parse(values[name])
            except InputError as error:
                raise InputError(f"{called[name]}: {error}") from None
    if values.get("steps") is not None and values.get("epochs") is not None:
        raise InputError(
            f"{called['steps']} {values['steps']} and {called['epochs']} {values['epochs']} exclude each "
            "other: give one"
        )
