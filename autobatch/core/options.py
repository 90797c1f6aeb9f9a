"""Every option, declared once: its type, its default, its help, and the commands that take it.

Words of the command line, the config file and keywords of library calls all go through `options_from`.
Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE
from autobatch.core.knobs import parse_knobs
from autobatch.core.records import LearningRateRule, Precision
from autobatch.core.text import LONGEST_VALUE, printable, quoted
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
COUNT = "[1-9][0-9]{0,8}"
TEXT = "[^\0\ud800-\udfff]"
"""A character that UTF-8 and the names of files can hold."""
AtLeastZero = Annotated[int, Meta(ge=0, le=MOST, description="a whole number of 0 or more")]
AtLeastOne = Annotated[int, Meta(ge=1, le=MOST, description="a whole number of 1 or more")]
AtLeastTwo = Annotated[int, Meta(ge=2, le=MOST, description="a whole number of 2 or more")]
Processes = Annotated[int, Meta(ge=0, le=1024, description="a whole number from 0 to 1024")]
Ranks = Annotated[int, Meta(ge=1, le=1024, description="a whole number from 1 to 1024")]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1, description="a whole number from 0 to 2147483647")]
"""Seeds that every generator accepts: NumPy's end at 32 bits, and the sampler counts up from here."""
Positive = Annotated[float, Meta(gt=0, description="a number over 0")]
Decay = Annotated[float, Meta(gt=0, lt=1, description="a number over 0 and under 1")]
Text = Annotated[str, Meta(pattern=f"^{TEXT}*$", description="text in UTF-8 without NUL")]
Size = Annotated[str, Meta(pattern=f"^{TEXT}*$", description="a size like 6GiB or 80%")]
_DEVICE = f"^(auto|cpu|cuda(:[0-9]+)?|sim:{TEXT}+)\\Z"
DeviceName = Annotated[str, Meta(pattern=_DEVICE, description="auto, cuda, cuda:N, cpu or sim:PROFILE")]
_TIME = r"^[0-9]{1,9}(\.[0-9]{1,9})?(min|h)\Z"
Duration = Annotated[str, Meta(pattern=_TIME, description="a time like 15min or 2h")]
_COUNTS = f"^{COUNT}(,{COUNT})*\\Z"
RankCounts = Annotated[str, Meta(pattern=_COUNTS, description="several in estimate, like 1,2,4")]
SplitCheck = Literal["error", "note", "off"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
OTHER_NAMES = {
    "batch_size": "target_batch micro_batch",
    "gradient_accumulation_steps": "target_batch",
    "lr": "tune_lr",
    "amp": "precision",
    "gpus": "ranks",
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
    """One option: what `OPTIONS` declares, completed from the field of `Options`."""

    text: str
    metavar: str = "N"
    """Placeholder of the value, unless the option is a switch or lists its choices."""
    commands: tuple[str, ...] = ()
    """Commands that take the option; in a declaration, empty for those of its group."""
    rare: bool = False
    """True if only ``--help-all`` shows the option, not ``--help``."""
    check: Callable[[Any], object] | None = None
    """Raises `InputError` for a value that its type accepts, and that is wrong."""
    group: str = ""
    name: str = ""
    type: Any = None
    """With the ranges of numbers and the patterns of text."""
    default: Any = None

    @property
    def choices(self) -> list[str]:
        """The values that it takes; empty if its type does not list them."""
        return [part for part in _parts(self.type) if isinstance(part, str)]

    @property
    def placeholder(self) -> str:
        """Its value in the help; empty for a switch."""
        listed = f"{{{','.join(self.choices)}}}" if self.choices else self.metavar
        return "" if self.is_switch else listed

    @property
    def is_switch(self) -> bool:
        """True if it is on or off."""
        return bool in _parts(self.type)

    @property
    def is_list(self) -> bool:
        """True if it takes several values."""
        return any(get_origin(part) is list for part in _parts(self.type))

    @property
    def expected(self) -> str:
        """The values that it takes, in words: ``a whole number of 1 or more``."""
        if self.choices:
            return f"one {'or more ' * self.is_list}of {', '.join(self.choices)}"
        words = [str(part.description) for part in _parts(self.type) if isinstance(part, Meta)]
        return "one or more names" if self.is_list else " or ".join(words) or "true or false"

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
                    return msgspec.convert(plain, kind, strict=False)
        shown = ", ".join(map(quoted, value)) if isinstance(value, list) else quoted(value)
        raise InputError(f"{label} must be {self.expected}, found {shown}")


OPTIONS = {
    "batch": {
        "target_batch": Option("Samples per optimizer step, exactly.", commands=(*PLANS, "estimate")),
        "split": Option(
            "Split by count, or by size to save padding. auto: by size if it pays off.", rare=True
        ),
        "split_check": Option(
            "What to do if a loss cannot be split exactly. Without it: error in fit, note in plan.",
            commands=("fit", "plan"),
            rare=True,
        ),
        "lr_rule": Option("Scale the rate with the batch."),
        "base_batch": Option("Batch that the rate was tuned for. Without it: the workload's base_batch."),
    },
    "model": {
        "sequence": Option("hf: tokens of each sequence, else up to 2048."),
        "lora": Option("hf: train adapters of this rank, not the weights.", "RANK"),
        "checkpointing": Option("hf: recompute the activations of each block."),
    },
    "devices": {
        "device": Option("auto, cuda, cuda:N, cpu, sim:PROFILE.", "DEVICE"),
        "memory_budget": Option(
            "Memory that the allocator may hold, as 6GiB or 80%. Without it: what is free, less a headroom.",
            "SIZE",
            check=partial(parse_budget, whole_bytes=TiB),
        ),
        "precision": Option("Precision of the forward pass."),
        "gradient_dtype": Option(
            "Type in which gradients of 16-bit weights are summed. weights: half the memory, but rounded.",
            rare=True,
        ),
        "seed": Option("Seed of the weights, the data order and the trials.", rare=True),
        "ranks": Option("Processes, one per GPU (estimate: also 1,2,4,8)."),
        "parallel": Option(
            "A whole model for each rank (DDP), or a part of it (FSDP2). auto: shard if none fits whole.",
            rare=True,
        ),
        "collective_timeout": Option(
            "End the run if a rank lets the others wait longer.", "SECONDS", ("fit",), rare=True
        ),
    },
    "search": {
        "max_micro_batch": Option("Largest micro-batch."),
        "micro_batch_multiple": Option("Micro-batches are multiples of N.", rare=True),
        "micro_batch": Option("Only look at this micro-batch.", commands=("probe", "estimate")),
        "profile": Option(
            "Hardware profiles. Without it: the GPU of sim:PROFILE, else all.", "NAME", ("estimate",)
        ),
        "snapshot": Option(
            "Memory snapshots, in place of a WORKLOAD: see record.", "[N=]FILE", ("estimate",)
        ),
    },
    "training": {
        "steps": Option("Optimizer steps to train."),
        "epochs": Option("Passes over the data. Without --steps: 1."),
        "max_grad_norm": Option("Clip the gradient of each step to this norm.", "NORM", RUNS, rare=True),
        "ema": Option("Average the weights with this decay, as 0.999.", "DECAY", RUNS, rare=True),
        "on_nonfinite": Option(
            "Stop at a loss or gradient that is not finite, or skip up to 3 such steps in a row.", rare=True
        ),
        "workers": Option("Loader processes. Without it: 0, or as tuned."),
        "validate_every": Option("Validate every N steps, and at the end."),
        "checkpoint_every": Option("Save every N steps, or 15min, and at the end."),
        "log": Option(
            "Also log to this tracker, whose package must be installed; may be repeated.", rare=True
        ),
        "keep_last": Option("Checkpoints to keep.", rare=True),
        "resume": Option("Continue from the newest valid checkpoint."),
        "out": Option("Folder of the run. Without it: runs/NAME/DATE.", "DIR"),
    },
    "tuning": {
        "trials": Option("Configurations to measure, 0 for none. Without it: 8, or fewer in fit."),
        "timeout": Option("Start no trial after this time.", "SECONDS", rare=True),
        "knobs": Option(
            "Knobs to tune, as precision,optimizer. Without it: all that pay off and change no number.",
            "NAMES",
            rare=True,
            check=parse_knobs,
        ),
        "tune_lr": Option("Also try learning rates, and use a better one."),
    },
    "output": {
        "json": Option("Print one JSON object to stdout, all else to stderr."),
        "quiet": Option("Print the result, but no progress.", rare=True),
        "verbose": Option("Print the traceback of an error.", rare=True),
    },
}
"""The options in the groups of the help; `Options` has their types and defaults."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run, which `OPTIONS` describes; those that its command does not take have defaults."""

    command: str = "fit"
    """The command or library call that they were given to."""

    target_batch: AtLeastOne | None = None
    split: Literal["auto", "count", "size"] = "auto"
    split_check: SplitCheck | None = None
    lr_rule: LearningRateRule = "none"
    base_batch: AtLeastOne | None = None

    sequence: AtLeastOne | None = None
    lora: AtLeastOne | None = None
    checkpointing: bool = False

    device: DeviceName = "auto"
    memory_budget: AtLeastOne | Size | None = None
    precision: Precision = "fp32"
    gradient_dtype: Literal["auto", "fp32", "weights"] = "auto"
    seed: Seed = 0
    ranks: Ranks | RankCounts | None = None
    parallel: Literal["auto", "replicate", "shard"] = "auto"
    collective_timeout: Positive = 1800.0

    max_micro_batch: AtLeastOne | None = None
    micro_batch_multiple: AtLeastOne = 1
    micro_batch: AtLeastOne | None = None
    profile: list[Text] = []
    snapshot: list[Text] = []

    steps: AtLeastOne | None = None
    epochs: AtLeastOne | None = None
    max_grad_norm: Positive | None = None
    ema: Decay | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"
    workers: Processes | None = None
    validate_every: AtLeastOne | None = None
    checkpoint_every: AtLeastOne | Duration | None = None
    log: list[Tracker] = []
    keep_last: AtLeastTwo = 3
    resume: bool = False
    out: Text | None = None

    trials: AtLeastZero | None = None
    timeout: Positive | None = None
    knobs: Text | None = None
    tune_lr: bool = False

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    @property
    def rank_counts(self) -> list[int]:
        """The numbers of ranks that were asked for, in order; empty if none was."""
        return [] if self.ranks is None else sorted(set(map(int, str(self.ranks).split(","))))

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

    def with_values(self, **values: Any) -> Self:
        """Return these options with other values, by the names of the options."""
        return msgspec.structs.replace(self, **values)

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
    fields = {field.name: field for field in msgspec.structs.fields(Options)}
    return {
        name: option._replace(
            commands=option.commands or TAKEN_BY[group],
            group=group,
            name=name,
            type=fields[name].type,
            default=[] if fields[name].default is msgspec.NODEFAULT else fields[name].default,
        )
        for group, options in OPTIONS.items()
        for name, option in options.items()
    }


@cache
def fields_of(command: str) -> dict[str, Option]:
    """Return the options of a command by their names."""
    return {name: field for name, field in all_fields().items() if command in field.commands}


def options_from(
    command: str, values: Mapping[str, Any], *, names: Mapping[str, str] | None = None
) -> Options:
    """Check values, plain or as text, and build the options of a command from them.

    Args:
        command: the command.
        values: option names to values; text is converted (``steps="3"``).
        names: what messages call an option, if not by its own name (``--steps``).

    Raises:
        InputError: an option is unknown, missing or has a wrong value; the message names it and the value.
    """
    fields = fields_of(command)
    labels = {name: name for name in (*fields, *values)} | dict(names or {})
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise InputError(unknown_option(labels[name], fields, command=command))
        given[name] = fields[name].convert(value, labels[name])
        try:
            if (check := fields[name].check) and given[name] is not None:
                check(given[name])
        except InputError as error:
            raise InputError(f"{labels[name]}: {error}") from None
    options = Options(command=command, **given)
    if command in PLANS and options.target_batch is None:
        raise InputError(f"{labels['target_batch']} is missing: give {fields['target_batch'].expected}")
    if command != "estimate" and isinstance(options.ranks, str):
        raise InputError(f"{labels['ranks']} must be a whole number from 1 to 1024, found {options.ranks!r}")
    if options.steps is not None and options.epochs is not None:
        steps, epochs = (f"{labels[name]} {given[name]}" for name in ("steps", "epochs"))
        raise InputError(f"{steps} and {epochs} exclude each other: give one")
    return options


def unknown_option(asked: str, names: Iterable[str], *, command: str = "") -> str:
    """Return the message about an option that does not exist, with what replaced it or was probably meant.

    Args:
        asked: as the user wrote it, for example ``--batch-size``.
        names: the options that exist, spelled in the same way.
        command: the command that they are of; empty for those of all commands.
    """

    def plain(name: str) -> str:
        return name.lstrip("-").replace("-", "_").lower()

    if (instead := REMOVED.get(plain(asked).removeprefix("autobatch_"))) is not None:
        return f"the option {asked} is gone: {instead}"
    known = {plain(name): name for name in names}
    if command and plain(asked) in all_fields() and plain(asked) not in known:
        others = " and ".join(all_fields()[plain(asked)].commands)
        see = f"see autobatch {command} --help-all"
        return f"{command} does not take {asked}, which is an option of {others}; {see}"
    near = [*OTHER_NAMES.get(plain(asked), "").split(), *difflib.get_close_matches(plain(asked), known, n=1)]
    hints = [f"did you mean {known[name]}?" for name in near if name in known]
    hints += [f"see autobatch {command} --help-all" if command else f"there are: {', '.join(sorted(names))}"]
    return f"there is no option {printable(asked, limit=LONGEST_VALUE)}; {hints[0]}"
