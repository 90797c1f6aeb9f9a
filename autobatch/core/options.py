"""Every option: its type, its default, its help, and the commands that take it.

Words of the command line, the config file and keywords of library calls all go through `options_from`.
Editors and type checkers read `Keywords`, and a test compares them with the options. Nothing here imports
torch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE
from autobatch.core.records import KNOBS, LearningRateRule, Precision
from autobatch.core.text import LONGEST_VALUE, listed, printable, quoted
from autobatch.core.units import TiB, parse_budget

COMMANDS = ("fit", "plan", "probe", "tune", "estimate")
"""Commands that open a workload."""
RUNS = ("fit", "plan", "probe", "tune")
PLANS = ("fit", "plan", "tune")
TAKEN_BY = {
    "batch": PLANS,
    "model": ("estimate",),
    "devices": COMMANDS,
    "search": COMMANDS,
    "training": ("fit",),
    "tuning": ("fit", "tune"),
    "output": COMMANDS,
}
"""Commands that take the options of a group of the help, unless an option names others."""
MOST = 2**63 - 1
"""Largest whole number of an option: torch and the files count in 64 bits."""
TEXT = "[^\0\ud800-\udfff]"
"""A character that UTF-8 and the names of files can hold."""
AtLeastZero = Annotated[int, Meta(ge=0, le=MOST, description="a whole number of 0 or more")]
AtLeastOne = Annotated[int, Meta(ge=1, le=MOST, description="a whole number of 1 or more")]
AtLeastTwo = Annotated[int, Meta(ge=2, le=MOST, description="a whole number of 2 or more")]
Processes = Annotated[int, Meta(ge=0, le=1024, description="a whole number from 0 to 1024")]
Ranks = Annotated[int, Meta(ge=1, le=1024, description="a whole number from 1 to 1024")]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1, description="a whole number from 0 to 2147483647")]
"""Seeds that every generator accepts: NumPy's end at 32 bits, and the sampler counts up from here."""
Seconds = Annotated[float, Meta(gt=0, le=1e9, title="SECONDS", description="a number over 0, up to 1e9")]
"""No timer takes many more."""
Norm = Annotated[float, Meta(gt=0, title="NORM", description="a number over 0")]
Decay = Annotated[float, Meta(gt=0, lt=1, title="DECAY", description="a number over 0 and under 1")]
Text = Annotated[str, Meta(pattern=f"^{TEXT}*$", title="NAME", description="text in UTF-8 without NUL")]
File = Annotated[str, Meta(pattern=f"^{TEXT}*$", title="[N=]FILE")]
Folder = Annotated[str, Meta(pattern=f"^{TEXT}+$", title="DIR", description="a folder in UTF-8")]
Size = Annotated[str, Meta(pattern=f"^{TEXT}*$", title="SIZE", description="a size like 6GiB or 80%")]
_DEVICE = f"^(auto|cpu|cuda(:[0-9]+)?|sim:{TEXT}+)\\Z"
DeviceName = Annotated[
    str, Meta(pattern=_DEVICE, title="DEVICE", description="auto, cuda, cuda:N, cpu or sim:PROFILE")
]
_TIME = r"^[0-9]{1,9}(\.[0-9]{1,9})?(min|h)\Z"
Duration = Annotated[str, Meta(pattern=_TIME, description="a time like 15min or 2h")]
SplitCheck = Literal["error", "note", "off"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
OTHER_NAMES = {
    "batch_size": "target_batch micro_batch",
    "gradient_accumulation_steps": "target_batch",
    "amp": "precision",
    "gpus": "profile ranks",
    "nproc_per_node": "ranks",
    "output_dir": "out",
}
"""Names of options in other tools, and the options here; the first that a command takes is named."""
REMOVED = {
    "all": "estimate without --profile names all known GPUs",
    "bn_momentum": "BatchNorm keeps its momentum; set it in the model, as the note of a run says",
    "checkpoint_minutes": "--checkpoint-every takes a time too, for example 15min",
    "last_batch": "batches carry over the end of an epoch, and the rest of the data is the run's last batch",
    "lr_steps": "--tune-lr runs 40 optimizer steps for each learning rate",
    "lr_trials": "--tune-lr tries 10 learning rates; --timeout limits its time",
    "memory_viz": "autobatch record --out FILE -- COMMAND writes a snapshot for pytorch.org/memory_viz",
    "on_failed_save": "a checkpoint that cannot be written ends the run, and the earlier ones are intact",
    "optimizer": "the optimizer is that of Workload(optimizer=…)",
    "own_loop": "plan is for a loop of your own, and fit plans for its own loop",
    "prefetch": "each loader process reads 2 micro-batches ahead",
    "sample_seeds": "samples are seeded one by one with --workers N",
    "scan": "a stream is planned from its first 1,000 samples",
    "shard_modules": "the repeated blocks of a shared model are gathered one at a time",
    "shard_sync": "gradients of a shared model are reduced after each micro-batch",
    "storage": "studies are kept in the data folder",
    "study": "a study is named after what it tunes, so the same command goes on with it",
    "time_limit": "a search takes few runs",
    "validation_micro_batch": "validation takes the micro-batch of the training, or a smaller one that fits",
    "warmup_samples": "a schedule warms up: Workload(schedule=…)",
    "world_size": "a command plans for --ranks N, and autobatch.plan(…, world_size=N) for another launcher",
}
"""Options of earlier versions, and what is in their place."""


class Option(NamedTuple):
    """One option, as a field of `Options` declares it."""

    text: str
    default: Any = None
    group: str = ""
    """Its group in the help."""
    commands: tuple[str, ...] = ()
    """Commands that take it."""
    rare: bool = False
    """True if only ``--help-all`` shows it, not ``--help``."""
    check: Callable[[Any], object] | None = None
    """Raises `InputError` for a value that its type accepts, and that is wrong."""
    name: str = ""
    type: Any = None
    """With the ranges of numbers, the patterns of text, and their words."""

    @property
    def choices(self) -> list[str]:
        """The values that it takes; empty if its type does not list them."""
        return [part for part in _parts(self.type) if isinstance(part, str)]

    @property
    def limits(self) -> list[Meta]:
        """The limits of its type, with their words."""
        return [part for part in _parts(self.type) if isinstance(part, Meta)]

    @property
    def placeholder(self) -> str:
        """Its value in the help; empty for a switch."""
        titles = [limit.title for limit in self.limits if limit.title]
        listed = f"{{{','.join(self.choices)}}}" if self.choices else [*titles, "N"][0]
        return "" if self.is_switch else listed

    @property
    def is_switch(self) -> bool:
        """True if it is on or off."""
        return self.type is bool

    @property
    def is_list(self) -> bool:
        """True if it takes several values."""
        return get_origin(self.type) is list

    @property
    def expected(self) -> str:
        """The values that it takes, in words: ``a whole number of 1 or more``."""
        if self.choices:
            return f"one {'or more ' * self.is_list}of {', '.join(self.choices)}"
        words = " or ".join(limit.description or "" for limit in self.limits)
        return "one or more names" if self.is_list else words or "true or false"

    def convert(self, value: Any, label: str) -> Any:
        """Return a value, plain or as text, in the type of the option.

        Raises:
            InputError: it is no value of the option, which the message calls by the label.
        """
        if value is None and self.default is None:
            return None
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        with suppress(ValueError, RuntimeError):  # several numbers
            plain = plain.item() if hasattr(plain, "item") else plain  # of NumPy or torch
        plain = [plain] if self.is_list and isinstance(plain, str) else plain
        is_union = get_origin(self.type) in (Union, UnionType)
        for kind in get_args(self.type) if is_union else (self.type,):
            with suppress(*UNREADABLE):
                if kind is not NoneType:
                    converted = msgspec.convert(plain, kind, strict=False)
                    break
        else:
            shown = ", ".join(map(quoted, value)) if isinstance(value, list) else quoted(value)
            raise InputError(f"{label} must be {self.expected}, found {shown}")
        try:
            if self.check is not None:
                self.check(converted)
        except InputError as error:
            raise InputError(f"{label}: {error}") from None
        return converted


def option(group: str, text: str, default: Any = None, **more: Any) -> Any:
    """Return a field of `Options` with its `Option`, which the commands of its group take by default."""
    declared = Option(text, default, group, **{"commands": TAKEN_BY[group], **more})
    return field(default_factory=lambda: [] if default == [] else default, metadata={"option": declared})


def parse_knobs(text: str) -> list[str]:
    """Split the value of ``--knobs`` (``micro_batch_shift,precision``) into names.

    Raises:
        InputError: no knob has this name; the message lists them.
    """
    names = [name.strip().replace("-", "_") for name in text.split(",")]
    if unknown := [name for name in names if name not in KNOBS]:
        raise InputError(f"there is no knob {unknown[0]!r}; there are: {', '.join(KNOBS)}")
    return names


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run; those that its command does not take have their defaults."""

    command: str = "fit"
    """The command or library call that they were given to."""

    target_batch: AtLeastOne | None = option(
        "batch", "Samples per optimizer step, exactly.", commands=(*PLANS, "estimate")
    )
    split: Literal["auto", "count", "size"] = option(
        "batch",
        "Split by count, or by size to save padding. auto: by size if it pays off.",
        "auto",
        rare=True,
    )
    split_check: SplitCheck | None = option(
        "batch",
        "What to do if a loss cannot be split exactly. Without it: error in fit, note in plan.",
        commands=("fit", "plan"),
        rare=True,
    )
    lr_rule: LearningRateRule = option("batch", "Scale the rate with the batch.", "none")
    base_batch: AtLeastOne | None = option(
        "batch", "Batch that the rate was tuned for. Without it: the workload's base_batch."
    )

    sequence: AtLeastOne | None = option("model", "hf: tokens of each sequence, else up to 2048.")
    lora: AtLeastOne | None = option("model", "hf: train adapters of this rank, not the weights.")
    checkpointing: bool = option("model", "hf: recompute the activations of each block.", False)

    device: DeviceName = option("devices", "auto, cuda, cuda:N, cpu, sim:PROFILE.", "auto")
    memory_budget: AtLeastOne | Size | None = option(
        "devices",
        "Memory that the allocator may hold, as 6GiB or 80%. Without it: what is free, less a headroom.",
        check=partial(parse_budget, whole_bytes=TiB),
    )
    precision: Precision = option("devices", "Precision of the forward pass.", "fp32")
    gradient_dtype: Literal["auto", "fp32", "weights"] = option(
        "devices",
        "Type in which gradients of 16-bit weights are summed. weights: half the memory, but rounded.",
        "auto",
        rare=True,
    )
    seed: Seed = option("devices", "Seed of the weights, the data order and the trials.", 0, rare=True)
    ranks: Ranks | None = option("devices", "Processes, one per GPU.")
    parallel: Literal["auto", "replicate", "shard"] = option(
        "devices",
        "A whole model for each rank (DDP), or a part of it (FSDP2). auto: shard if none fits whole.",
        "auto",
        rare=True,
    )
    collective_timeout: Seconds = option(
        "devices", "End the run if a rank lets the others wait longer.", 1800.0, commands=("fit",), rare=True
    )

    max_micro_batch: AtLeastOne | None = option("search", "Largest micro-batch.")
    micro_batch_multiple: AtLeastOne = option("search", "Micro-batches are multiples of N.", 1, rare=True)
    micro_batch: AtLeastOne | None = option(
        "search", "Only look at this micro-batch.", commands=("probe", "estimate")
    )
    profile: list[Text] = option(
        "search",
        "Hardware profiles. Without it: the GPU of sim:PROFILE, else all.",
        [],
        commands=("estimate",),
    )
    snapshot: list[File] = option(
        "search", "Memory snapshots, in place of a WORKLOAD: see record.", [], commands=("estimate",)
    )

    steps: AtLeastOne | None = option("training", "Optimizer steps to train.")
    epochs: AtLeastOne | None = option("training", "Passes over the data. Without --steps: 1.")
    max_grad_norm: Norm | None = option(
        "training", "Clip the gradient of each step to this norm.", commands=RUNS, rare=True
    )
    ema: Decay | None = option(
        "training", "Average the weights with this decay, as 0.999.", commands=RUNS, rare=True
    )
    on_nonfinite: Literal["raise", "skip"] = option(
        "training",
        "Stop at a loss or gradient that is not finite, or skip up to 3 such steps in a row.",
        "raise",
        rare=True,
    )
    workers: Processes | None = option("training", "Loader processes. Without it: 0, or as tuned.")
    validate_every: AtLeastOne | None = option("training", "Validate every N steps, and at the end.")
    checkpoint_every: AtLeastOne | Duration | None = option(
        "training", "Save every N steps, or 15min, and at the end."
    )
    log: list[Tracker] = option(
        "training",
        "Also log to this tracker, whose package must be installed; may be repeated.",
        [],
        rare=True,
    )
    keep_last: AtLeastTwo = option("training", "Checkpoints to keep.", 3, rare=True)
    resume: bool = option("training", "Continue from the newest valid checkpoint.", False)
    out: Folder | None = option("training", "Folder of the run. Without it: runs/NAME/DATE.")

    trials: AtLeastZero | None = option(
        "tuning", "Configurations to measure, 0 for none. Without it: 8, or fewer in fit."
    )
    timeout: Seconds | None = option("tuning", "Start no trial after this time.", rare=True)
    knobs: Text | None = option(
        "tuning",
        "Knobs to tune, as precision,optimizer. Without it: all that pay off and change no number.",
        rare=True,
        check=parse_knobs,
    )
    tune_lr: bool = option("tuning", "Also try learning rates, and use a better one.", False)

    json: bool = option("output", "Print one JSON object to stdout, all else to stderr.", False)
    quiet: bool = option("output", "Print the result, but no progress.", False, rare=True)
    verbose: bool = option("output", "Print the traceback of an error.", False, rare=True)

    @property
    def on_inexact_split(self) -> SplitCheck:
        """The reaction to a loss that cannot be split: as asked, else an error in a training, else a note."""
        return self.split_check or ("error" if self.command == "fit" else "note")

    @property
    def checkpoint_seconds(self) -> float | None:
        """Longest time between two checkpoints in seconds; None if they are counted in steps."""
        asked = self.checkpoint_every
        if not isinstance(asked, str):
            return None
        return float(asked.rstrip("minh")) * (3600 if asked.endswith("h") else 60)

    def by_name(self) -> dict[str, Any]:
        """Return the value of each option that the command takes."""
        return {name: getattr(self, name) for name in fields_of(self.command)}


def _parts(kind: Any) -> Iterator[Any]:
    """Yield a type and all that it is made of: its members, its choices, its limits."""
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


@cache
def all_fields() -> dict[str, Option]:
    """Return every option by its name."""
    types = get_type_hints(Options, include_extras=True)
    return {
        one.name: one.metadata["option"]._replace(name=one.name, type=types[one.name])
        for one in fields(Options)
        if one.metadata
    }


@cache
def fields_of(command: str) -> dict[str, Option]:
    """Return the options of a command by their names."""
    return {name: field for name, field in all_fields().items() if command in field.commands}


def options_from(command: str, values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Options:
    """Check values, plain or as text, and build the options of a command from them.

    Args:
        command: the command.
        values: option names to values; text is converted (``steps="3"``).
        names: what messages call an option, if not by its own name (``--steps``).

    Raises:
        InputError: an option is unknown, missing or has a wrong value; the message names it and the value.
    """
    known = fields_of(command)
    labels = {name: name for name in (*known, *values)} | dict(names or {})
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise InputError(unknown_option(labels[name], known, command=command))
        given[name] = known[name].convert(value, labels[name])
    options = Options(command=command, **given)
    if command in PLANS and options.target_batch is None:
        raise InputError(f"{labels['target_batch']} is missing: give {known['target_batch'].expected}")
    if options.steps is not None and options.epochs is not None:
        steps, epochs = (f"{labels[name]} {given[name]}" for name in ("steps", "epochs"))
        raise InputError(f"{steps} and {epochs} exclude each other: give one")
    if (size := options.micro_batch) is not None:
        most, multiple = options.max_micro_batch or size, options.micro_batch_multiple
        asked = f"{labels['micro_batch']} {size}"
        if size > most:
            raise InputError(f"{asked} exceeds {labels['max_micro_batch']} {most}: give one")
        if size % multiple:
            raise InputError(f"{asked} is no multiple of {labels['micro_batch_multiple']} {multiple}")
    return options


def refuse(options: Options, names: Iterable[str], why: str) -> None:
    """Refuse options that have no effect.

    Raises:
        InputError: one of them was given; says why it is refused.
    """
    given = [name for name in names if getattr(options, name) != all_fields()[name].default]
    if given:
        raise InputError(f"{', '.join(f'{spelled(name)} {getattr(options, name)}' for name in given)}: {why}")


def spelled(option: str) -> str:
    """Return an option as the command line has it: ``--target-batch``."""
    return f"--{option.replace('_', '-')}"


def unknown_option(asked: str, names: Iterable[str], *, command: str = "") -> str:
    """Return the message about an option that does not exist, with what replaced it or was probably meant.

    Args:
        asked: as the user wrote it, for example ``--batch-size``.
        names: the options that exist, spelled in the same way.
        command: the command that they are of; empty for those of all commands.
    """

    def plain(name: str) -> str:
        return name.lstrip("-").replace("-", "_").lower()

    if (instead := REMOVED.get(plain(asked))) is not None:
        return f"the option {asked} is gone: {instead}"
    known = {plain(name): name for name in names}
    words = command.split()
    see = " ".join(["see autobatch", *words[:1], "--help-all", *words[1:]])
    if command and plain(asked) in all_fields() and plain(asked) not in known:
        others = listed(all_fields()[plain(asked)].commands)
        return f"{command} does not take {asked}, which is an option of {others}; {see}"
    near = [*OTHER_NAMES.get(plain(asked), "").split(), *difflib.get_close_matches(plain(asked), known, n=1)]
    hints = [f"did you mean {known[name]}?" for name in near if name in known]
    hints += [see if command else f"there are: {', '.join(sorted(names))}"]
    return f"there is no option {printable(asked, limit=LONGEST_VALUE)}; {hints[0]}"


class Keywords(TypedDict, total=False):
    """Keywords of all calls. A call refuses those that its command does not take."""

    split: Literal["auto", "count", "size"]
    split_check: SplitCheck | None
    lr_rule: LearningRateRule
    base_batch: int | None
    device: str
    memory_budget: str | int | None
    precision: Precision
    gradient_dtype: Literal["auto", "fp32", "weights"]
    seed: int
    max_micro_batch: int | None
    micro_batch_multiple: int
    micro_batch: int | None
    profile: str | Sequence[str]
    snapshot: str | Sequence[str]
    steps: int | None
    epochs: int | None
    max_grad_norm: float | None
    ema: float | None
    on_nonfinite: Literal["raise", "skip"]
    workers: int | None
    validate_every: int | None
    checkpoint_every: int | str | None
    log: Tracker | Sequence[Tracker]
    keep_last: int
    resume: bool
    out: str | os.PathLike[str] | None
    trials: int | None
    timeout: float | None
    knobs: str | None
    tune_lr: bool
    sequence: int | None
    lora: int | None
    checkpointing: bool
    ranks: int | None
    parallel: Literal["auto", "replicate", "shard"]
    collective_timeout: float
