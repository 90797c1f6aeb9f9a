"""Every option, declared once: its type, its default, its help, and the commands that take it.

The command line, the config files, the environment variables and the keywords of the library calls are all
checked against these declarations (`autobatch.core.check_options`). The options of a run are one `Options`,
which is handed down as it is; each layer reads the sections that concern it. Nothing here imports torch.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_type_hints

import msgspec
from msgspec import Meta

from autobatch.core.records import LearningRateRule

COMMANDS = ("fit", "plan", "probe", "tune", "estimate")
"""Commands that open a workload."""
RUNS = ("fit", "plan", "probe", "tune")
PLANS = ("fit", "plan", "tune")
TUNES = ("fit", "tune")
MOST_WORKERS = 1024
"""Largest number of processes, and of micro-batches that each loads ahead."""
AtLeastZero = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Workers = Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
Prefetch = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
Positive = Annotated[float, Meta(gt=0)]
Decay = Annotated[float, Meta(gt=0, lt=1)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Seeds that every generator accepts: NumPy's end at 32 bits, and the sampler counts up from here."""
Group = Literal["what to train", "memory", "learning rate", "run", "tuning", "output"]
"""Groups of the help, in the order in which it shows them."""


class Option(NamedTuple):
    """Declaration of an option, kept in the annotation of its field."""

    text: str
    group: Group
    commands: tuple[str, ...]
    """Commands that take the option."""
    metavar: str = ""
    """Placeholder of the value; empty for switches and choices."""
    common: bool = False
    """True if ``--help`` shows the option; ``--help-all`` shows every option."""
    required_by: tuple[str, ...] = ()


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that belong together."""


class DeviceOptions(Section, frozen=True, kw_only=True):
    """The device of the work, its budget and its precision."""

    device: Annotated[
        str, Option("auto, cuda, cuda:N, cpu, sim:PROFILE.", "memory", COMMANDS, "DEVICE", common=True)
    ] = "auto"
    memory_budget: Annotated[
        str | int | None,
        Option(
            "Memory that the allocator may hold, for example 6GiB or 80%. Without it: the free memory less a "
            "headroom.",
            "memory",
            COMMANDS,
            "SIZE",
            common=True,
        ),
    ] = None
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        Option("auto: bf16 if native, else fp32.", "memory", COMMANDS, common=True),
    ] = "auto"
    gradient_dtype: Annotated[
        Literal["auto", "fp32", "weights"],
        Option(
            "Type in which the gradients of 16-bit weights are summed. weights takes half the memory of "
            "float32, and rounds the sum after each micro-batch. auto: fp32.",
            "memory",
            COMMANDS,
        ),
    ] = "auto"
    seed: Annotated[
        Seed, Option("Seed of the weights, the data order and the trials.", "run", COMMANDS, "N")
    ] = 0


class SearchOptions(Section, frozen=True, kw_only=True):
    """The sizes to try, and the GPUs to predict for."""

    max_micro_batch: Annotated[
        AtLeastOne | None, Option("Largest micro-batch to try.", "memory", COMMANDS, "N", common=True)
    ] = None
    micro_batch_multiple: Annotated[
        Literal["auto"] | AtLeastOne,
        Option(
            "Micro-batches are multiples of N. auto: of what the workload insists on.",
            "memory",
            RUNS,
            "N|auto",
        ),
    ] = "auto"
    micro_batch: Annotated[
        AtLeastOne | None,
        Option(
            "Only look at this micro-batch instead of searching for the largest.",
            "memory",
            ("probe", "estimate"),
            "N",
            common=True,
        ),
    ] = None
    time_limit: Annotated[
        Positive | None,
        Option(
            "Stop the search after this time. The answer is then the largest size that is known to fit.",
            "memory",
            RUNS,
            "SECONDS",
        ),
    ] = None
    scan: Annotated[
        AtLeastOne | None,
        Option(
            "Samples at the start of a stream to plan from. Without it: 1000.", "what to train", COMMANDS, "N"
        ),
    ] = None
    own_loop: Annotated[
        bool,
        Option(
            "Plan for a loop that keeps each micro-batch in a variable until the next one is there, where "
            "autobatch fit frees it after the forward pass.",
            "memory",
            ("plan",),
        ),
    ] = False
    memory_viz: Annotated[
        str | None,
        Option(
            "Also write the memory of a few steps for pytorch.org/memory_viz.",
            "output",
            tuple(command for command in COMMANDS if command != "estimate"),
            "FILE",
        ),
    ] = None
    profile: Annotated[
        list[str],
        Option(
            "Names or files of hardware profiles. Without it: the GPU of --device sim:PROFILE, else all.",
            "memory",
            ("estimate",),
            "NAME",
            common=True,
        ),
    ] = []
    all: Annotated[
        bool,
        Option("All known GPUs, even if --profile names some.", "memory", ("estimate",), common=True),
    ] = False


class BatchOptions(Section, frozen=True, kw_only=True):
    """The batch of an optimizer step, and how it is split."""

    target_batch: Annotated[
        AtLeastOne | None,
        Option(
            "Samples per optimizer step, exactly.",
            "what to train",
            (*PLANS, "estimate"),
            "N",
            common=True,
            required_by=PLANS,
        ),
    ] = None
    split: Annotated[
        Literal["auto", "count", "size"],
        Option(
            "Split each batch into equal counts, or by the sizes of its samples, which saves padding. auto: "
            "by size if that is faster and changes no result.",
            "memory",
            PLANS,
        ),
    ] = "auto"
    split_check: Annotated[
        Literal["error", "note", "off"] | None,
        Option(
            "What to do if the loss cannot be split into micro-batches exactly: stop, print a note, or skip "
            "the check. Without it: error in fit, note in plan.",
            "what to train",
            ("fit", "plan"),
        ),
    ] = None
    lr_rule: Annotated[
        LearningRateRule, Option("Scale the rate with the batch.", "learning rate", PLANS, common=True)
    ] = "none"
    base_batch: Annotated[
        AtLeastOne | None,
        Option(
            "Batch that the learning rate was tuned for. Without it: base_batch of the workload.",
            "learning rate",
            PLANS,
            "N",
            common=True,
        ),
    ] = None
    world_size: Annotated[
        AtLeastOne | None,
        Option(
            "Data-parallel ranks that share a batch. Without it: WORLD_SIZE of the environment, else 1.",
            "what to train",
            ("plan",),
            "N",
        ),
    ] = None


class TuneOptions(Section, frozen=True, kw_only=True):
    """The search for the fastest configuration and for the learning rate."""

    trials: Annotated[
        AtLeastZero | None,
        Option(
            "Configurations to measure, 0 for none. Without it: 8, fewer in fit if they cannot pay back.",
            "tuning",
            TUNES,
            "N",
            common=True,
        ),
    ] = None
    timeout: Annotated[
        Positive | None, Option("Start no further trial after this time.", "tuning", TUNES, "SECONDS")
    ] = None
    storage: Annotated[
        str | None,
        Option(
            "Storage of the study: a database URL or the path of a journal file. Without it: a journal file "
            "in the data directory.",
            "tuning",
            TUNES,
            "URL",
        ),
    ] = None
    study: Annotated[
        str | None,
        Option(
            "Name of the study. Runs with the same storage and name share their trials.",
            "tuning",
            TUNES,
            "NAME",
        ),
    ] = None
    knobs: Annotated[
        str | None,
        Option(
            "Knobs to tune, for example precision,checkpointing. Without it: all that usually pay off here.",
            "tuning",
            TUNES,
            "NAMES",
        ),
    ] = None
    tune_lr: Annotated[
        bool, Option("Also try learning rates, and use a better one.", "learning rate", TUNES, common=True)
    ] = False
    lr_trials: Annotated[
        AtLeastOne, Option("Learning rates to try, the plan's own first.", "learning rate", TUNES, "N")
    ] = 10
    lr_steps: Annotated[
        int, Meta(ge=4), Option("Optimizer steps of each short run.", "learning rate", TUNES, "N")
    ] = 40


class TrainOptions(Section, frozen=True, kw_only=True):
    """The loop and the files of a run."""

    steps: Annotated[
        AtLeastOne | None, Option("Optimizer steps to train.", "what to train", ("fit",), "N", common=True)
    ] = None
    epochs: Annotated[
        AtLeastOne | None,
        Option(
            "Passes over the training data. Without --steps: 1.", "what to train", ("fit",), "N", common=True
        ),
    ] = None
    last_batch: Annotated[
        Literal["carry", "flush", "drop"],
        Option(
            "At the end of an epoch: carry the samples that are left into the next epoch, flush them as a "
            "short batch, or drop them.",
            "what to train",
            ("fit",),
        ),
    ] = "carry"
    max_grad_norm: Annotated[
        Positive | None,
        Option(
            "Clip the gradient of each step to this norm. Without it: no clipping.",
            "what to train",
            RUNS,
            "NORM",
        ),
    ] = None
    ema: Annotated[
        Decay | None,
        Option(
            "Keep an exponential moving average of the weights with this decay, for example 0.999.",
            "what to train",
            RUNS,
            "DECAY",
        ),
    ] = None
    warmup_samples: Annotated[
        AtLeastOne | None,
        Option("Raise the learning rate linearly over the first N samples.", "learning rate", ("fit",), "N"),
    ] = None
    on_nonfinite: Annotated[
        Literal["raise", "skip"],
        Option(
            "Stop at a loss or gradient that is not finite, or skip up to 3 such steps in a row, as fp16 "
            "does.",
            "run",
            ("fit",),
        ),
    ] = "raise"
    bn_momentum: Annotated[
        Literal["keep", "auto"],
        Option(
            "auto rescales the momentum of BatchNorm, so that its running averages move per batch and not "
            "per micro-batch.",
            "what to train",
            ("fit",),
        ),
    ] = "keep"
    workers: Annotated[
        Workers | None,
        Option("Data loader processes. Without it: 0, or as tuned.", "run", ("fit",), "N", common=True),
    ] = None
    prefetch: Annotated[
        Prefetch | None,
        Option(
            "Micro-batches that each worker loads ahead. Without it: 2, or as tuned.", "run", ("fit",), "N"
        ),
    ] = None
    sample_seeds: Annotated[
        bool,
        Option(
            "Seed the augmentation of each sample separately, so that the micro-batch does not change it. "
            "Always on with workers.",
            "run",
            ("fit",),
        ),
    ] = False
    validate_every: Annotated[
        AtLeastOne | None,
        Option("Validate every N steps, and at the end.", "run", ("fit",), "N", common=True),
    ] = None
    validation_micro_batch: Annotated[
        AtLeastOne | None,
        Option(
            "Micro-batch of validation. Without it: that of training, or a larger one that fits.",
            "run",
            ("fit",),
            "N",
        ),
    ] = None
    checkpoint_every: Annotated[
        AtLeastOne | None,
        Option("Save a checkpoint every N steps, and at the end.", "run", ("fit",), "N", common=True),
    ] = None
    checkpoint_minutes: Annotated[
        Positive | None,
        Option("Save a checkpoint if the last one is older than this.", "run", ("fit",), "MINUTES"),
    ] = None
    on_failed_save: Annotated[
        Literal["stop", "continue"],
        Option(
            "Stop or continue when a periodic checkpoint cannot be written. A failed final checkpoint always "
            "stops.",
            "run",
            ("fit",),
        ),
    ] = "stop"
    keep_last: Annotated[int, Meta(ge=2), Option("Checkpoints to keep.", "run", ("fit",), "N")] = 3
    resume: Annotated[
        bool, Option("Continue from the newest valid checkpoint.", "run", ("fit",), common=True)
    ] = False
    out: Annotated[
        str | None,
        Option("Folder of the run. Without it: runs/NAME/DATE.", "output", ("fit",), "DIR", common=True),
    ] = None


class RankOptions(Section, frozen=True, kw_only=True):
    """Several processes that train together."""

    ranks: Annotated[
        AtLeastOne | None,
        Option("Processes on this machine, one per GPU.", "run", COMMANDS, "N", common=True),
    ] = None
    parallel: Annotated[
        Literal["auto", "replicate", "shard"],
        Option(
            "With --ranks: replicate gives each rank a whole model (DDP), shard a part of it (FSDP2). auto: "
            "shard if no whole model fits.",
            "what to train",
            COMMANDS,
        ),
    ] = "auto"
    shard_sync: Annotated[
        Literal["each", "once"],
        Option(
            "With --parallel shard: reduce gradients after each micro-batch, or once per step, which takes "
            "memory for all of them.",
            "what to train",
            COMMANDS,
        ),
    ] = "each"
    shard_modules: Annotated[
        str | None,
        Option(
            "With --parallel shard: regular expression for the names of the modules to gather one at a time. "
            "Without it: the repeated blocks of the model.",
            "what to train",
            COMMANDS,
            "REGEX",
        ),
    ] = None
    collective_timeout: Annotated[
        Positive,
        Option(
            "Over several ranks, end the run if a rank lets the others wait longer.",
            "run",
            ("fit",),
            "SECONDS",
        ),
    ] = 600.0


class OutputOptions(Section, frozen=True, kw_only=True):
    """The output of the command line."""

    json: Annotated[
        bool, Option("Print one JSON object to stdout, all else to stderr.", "output", COMMANDS, common=True)
    ] = False
    quiet: Annotated[bool, Option("Print the result, but no progress.", "output", COMMANDS)] = False
    verbose: Annotated[bool, Option("Print the traceback of an error.", "output", COMMANDS)] = False


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a run, in sections."""

    command: str = "fit"
    """The command or library call that they were given to."""
    device: DeviceOptions = DeviceOptions()
    search: SearchOptions = SearchOptions()
    batch: BatchOptions = BatchOptions()
    tune: TuneOptions = TuneOptions()
    train: TrainOptions = TrainOptions()
    ranks: RankOptions = RankOptions()
    output: OutputOptions = OutputOptions()

    @property
    def target_batch(self) -> int:
        """Samples per optimizer step, of a command that plans."""
        assert self.batch.target_batch is not None
        return self.batch.target_batch

    @property
    def multiple(self) -> int | None:
        """Number whose multiples micro-batches are; None to find out whether there is one."""
        asked = self.search.micro_batch_multiple
        return None if asked == "auto" else asked

    @property
    def split_check(self) -> Literal["error", "note", "off"]:
        """The reaction to a loss that cannot be split: as asked, else an error in a training, else a note."""
        return self.batch.split_check or ("error" if self.command == "fit" else "note")

    def with_values(self, **values: Any) -> Self:
        """Return these options with other values, by the names of the options."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            changes.setdefault(all_fields()[name].section, {})[name] = value
        sections = {
            section: msgspec.structs.replace(getattr(self, section), **given)
            for section, given in changes.items()
        }
        return msgspec.structs.replace(self, **sections)

    def by_name(self) -> dict[str, Any]:
        """Return the value of each option that the command takes."""
        return {
            name: getattr(getattr(self, field.section), name)
            for name, field in fields_of(self.command).items()
        }


class Field(NamedTuple):
    """One option, as its section declares it."""

    name: str
    section: str
    type: Any
    """Its type, with the ranges of numbers."""
    default: Any
    about: Option


@cache
def all_fields() -> dict[str, Field]:
    """Return every option by its name."""
    found = {}
    for section, kind in get_type_hints(Options).items():
        for field in msgspec.structs.fields(kind) if section != "command" else ():
            about = next(one for one in get_args(field.type) if isinstance(one, Option))
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            found[field.name] = Field(field.name, section, field.type, default, about)
    return found


@cache
def fields_of(command: str) -> dict[str, Field]:
    """Return the options of a command by their names."""
    return {name: field for name, field in all_fields().items() if command in field.about.commands}
