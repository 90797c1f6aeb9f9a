"""Every option, declared once: its type, its default, its help, and the commands that take it.

The command line, the config files, the environment variables and the keywords of the library calls are all
checked against these declarations (`autobatch.core.check_options`). The options of a run are one `Options`,
which is handed down as it is; each layer reads the sections that concern it. Nothing here imports torch.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from autobatch.core.records import LearningRateRule, Precision
from autobatch.core.units import parse_duration

COMMANDS = ("fit", "plan", "probe", "tune", "estimate")
"""Commands that open a workload."""
RUNS = ("fit", "plan", "probe", "tune")
PLANS = ("fit", "plan", "tune")
TAKEN_BY = {
    "batch": PLANS,
    "device": COMMANDS,
    "search": RUNS,
    "train": ("fit",),
    "tune": ("fit", "tune"),
    "ranks": COMMANDS,
    "model": ("estimate",),
    "output": COMMANDS,
}
"""Commands that take the options of a section, unless an option names others."""
MOST_WORKERS = 1024
"""Largest number of processes."""
AtLeastZero = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Workers = Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
Positive = Annotated[float, Meta(gt=0)]
Decay = Annotated[float, Meta(gt=0, lt=1)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Seeds that every generator accepts: NumPy's end at 32 bits, and the sampler counts up from here."""
GradientDtypeChoice = Literal["auto", "fp32", "weights"]
ParallelChoice = Literal["auto", "replicate", "shard"]
SplitChoice = Literal["auto", "count", "size"]
SplitCheck = Literal["error", "note", "off"]
TrackerChoice = Literal["tensorboard", "wandb", "mlflow"]


class Option(NamedTuple):
    """Declaration of an option, in the annotation of its field."""

    text: str
    metavar: str = ""
    """Placeholder of the value; empty for switches and choices."""
    commands: tuple[str, ...] = ()
    """Commands that take the option; empty for those of its section."""
    common: bool = False
    """True if ``--help`` shows the option; ``--help-all`` shows every option."""
    required_by: tuple[str, ...] = ()


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that belong together."""


class BatchOptions(Section, frozen=True, kw_only=True):
    """The batch of an optimizer step, and how it is split."""

    target_batch: Annotated[
        AtLeastOne | None,
        Option(
            "Samples per optimizer step, exactly.", "N", (*PLANS, "estimate"), common=True, required_by=PLANS
        ),
    ] = None
    split: Annotated[
        SplitChoice,
        Option(
            "Split each batch into equal counts, or by the sizes of its samples, which saves padding. auto: "
            "by size if that is faster and changes no result."
        ),
    ] = "auto"
    split_check: Annotated[
        SplitCheck | None,
        Option(
            "What to do if the loss cannot be split into micro-batches exactly: stop, print a note, or skip "
            "the check. Without it: error in fit, note in plan.",
            commands=("fit", "plan"),
        ),
    ] = None
    lr_rule: Annotated[LearningRateRule, Option("Scale the rate with the batch.", common=True)] = "none"
    base_batch: Annotated[
        AtLeastOne | None,
        Option(
            "Batch that the learning rate was tuned for. Without it: base_batch of the workload.",
            "N",
            common=True,
        ),
    ] = None


class DeviceOptions(Section, frozen=True, kw_only=True):
    """The device of the work, its budget and its precision."""

    device: Annotated[str, Option("auto, cuda, cuda:N, cpu, sim:PROFILE.", "DEVICE", common=True)] = "auto"
    memory_budget: Annotated[
        str | int | None,
        Option(
            "Memory that the allocator may hold, for example 6GiB or 80%. Without it: the free memory less a "
            "headroom.",
            "SIZE",
            common=True,
        ),
    ] = None
    precision: Annotated[Precision, Option("Precision of the forward pass.", common=True)] = "fp32"
    gradient_dtype: Annotated[
        GradientDtypeChoice,
        Option(
            "Type in which the gradients of 16-bit weights are summed. weights takes half the memory of "
            "float32, and rounds the sum after each micro-batch. auto: fp32."
        ),
    ] = "auto"
    seed: Annotated[Seed, Option("Seed of the weights, the data order and the trials.", "N")] = 0


class SearchOptions(Section, frozen=True, kw_only=True):
    """The sizes to try, and the GPUs to predict for."""

    max_micro_batch: Annotated[
        AtLeastOne | None, Option("Largest micro-batch to try.", "N", COMMANDS, common=True)
    ] = None
    micro_batch_multiple: Annotated[
        AtLeastOne, Option("Micro-batches are multiples of N.", "N", COMMANDS)
    ] = 1
    micro_batch: Annotated[
        AtLeastOne | None,
        Option(
            "Only look at this micro-batch.",
            "N",
            ("probe", "estimate"),
            common=True,
        ),
    ] = None
    profile: Annotated[
        list[str],
        Option(
            "Names or files of hardware profiles. Without it: the GPU of --device sim:PROFILE, else all.",
            "NAME",
            ("estimate",),
            common=True,
        ),
    ] = []
    snapshot: Annotated[
        list[str],
        Option(
            "Memory snapshots, in place of a WORKLOAD: see record.",
            "[N=]FILE",
            ("estimate",),
            common=True,
        ),
    ] = []


class TrainOptions(Section, frozen=True, kw_only=True):
    """The loop and the files of a run."""

    steps: Annotated[AtLeastOne | None, Option("Optimizer steps to train.", "N", common=True)] = None
    epochs: Annotated[
        AtLeastOne | None, Option("Passes over the training data. Without --steps: 1.", "N", common=True)
    ] = None
    max_grad_norm: Annotated[
        Positive | None,
        Option("Clip the gradient of each step to this norm. Without it: no clipping.", "NORM", RUNS),
    ] = None
    ema: Annotated[
        Decay | None,
        Option(
            "Keep an exponential moving average of the weights with this decay, for example 0.999.",
            "DECAY",
            RUNS,
        ),
    ] = None
    on_nonfinite: Annotated[
        Literal["raise", "skip"],
        Option(
            "Stop at a loss or gradient that is not finite, or skip up to 3 such steps in a row, as fp16 "
            "does."
        ),
    ] = "raise"
    workers: Annotated[
        Workers | None, Option("Data loader processes. Without it: 0, or as tuned.", "N", common=True)
    ] = None
    validate_every: Annotated[
        AtLeastOne | None, Option("Validate every N steps, and at the end.", "N", common=True)
    ] = None
    checkpoint_every: Annotated[
        AtLeastOne | str | None,
        Option("Save every N steps, or 15min, and at the end.", "N", common=True),
    ] = None
    log: Annotated[
        list[TrackerChoice],
        Option("Also log to this tracker, whose package must be installed; may be repeated."),
    ] = []
    keep_last: Annotated[int, Meta(ge=2), Option("Checkpoints to keep.", "N")] = 3
    resume: Annotated[bool, Option("Continue from the newest valid checkpoint.", common=True)] = False
    out: Annotated[
        str | None,
        Option(
            "Folder of the run. Without it: runs/NAME/DATE (fit).",
            "DIR",
            common=True,
            commands=("fit", "tune"),
        ),
    ] = None

    @property
    def checkpoint_seconds(self) -> float | None:
        """Longest time between two checkpoints in seconds; None if they are counted in steps."""
        asked = self.checkpoint_every
        return parse_duration(asked) if isinstance(asked, str) else None


class TuneOptions(Section, frozen=True, kw_only=True):
    """The search for the fastest configuration and for the learning rate."""

    trials: Annotated[
        AtLeastZero | None,
        Option(
            "Configurations to measure, 0 for none. Without it: 8, fewer in fit for a short run.",
            "N",
            common=True,
        ),
    ] = None
    timeout: Annotated[Positive | None, Option("Start no further trial after this time.", "SECONDS")] = None
    storage: Annotated[
        str | None,
        Option(
            "Storage of the study: a database URL or the path of a journal file. Without it: a journal file "
            "in the data directory.",
            "URL",
        ),
    ] = None
    knobs: Annotated[
        str | None,
        Option(
            "Knobs to tune, for example precision,checkpointing. Without it: all that pay off and change no "
            "number.",
            "NAMES",
        ),
    ] = None
    tune_lr: Annotated[bool, Option("Also try learning rates, and use a better one.", common=True)] = False


class ModelOptions(Section, frozen=True, kw_only=True):
    """The training of a model that is named by ``hf:NAME`` in place of a workload."""

    sequence: Annotated[
        AtLeastOne | None,
        Option("hf: tokens of each sequence. Without it: up to 2048.", "N", common=True),
    ] = None
    lora: Annotated[
        AtLeastOne | None,
        Option("hf: train adapters of this rank, not the weights.", "RANK", common=True),
    ] = None
    checkpointing: Annotated[
        bool, Option("hf: recompute the activations of each block in the backward pass.", common=True)
    ] = False


class RankOptions(Section, frozen=True, kw_only=True):
    """Several processes that train together."""

    ranks: Annotated[
        AtLeastOne | str | None,
        Option("Processes, one per GPU (estimate: also 1,2,4,8).", "N", common=True),
    ] = None
    parallel: Annotated[
        ParallelChoice,
        Option(
            "With --ranks: replicate gives each rank a whole model (DDP), shard a part of it (FSDP2). auto: "
            "shard if no whole model fits."
        ),
    ] = "auto"
    collective_timeout: Annotated[
        Positive,
        Option(
            "Over several ranks, end the run if a rank lets the others wait longer.",
            "SECONDS",
            ("fit",),
        ),
    ] = 1800.0


class OutputOptions(Section, frozen=True, kw_only=True):
    """The output of the command line."""

    json: Annotated[bool, Option("Print one JSON object to stdout, all else to stderr.", common=True)] = False
    quiet: Annotated[bool, Option("Print the result, but no progress.")] = False
    verbose: Annotated[bool, Option("Print how long each part took, and the traceback of an error.")] = False


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a run, in sections."""

    command: str = "fit"
    """The command or library call that they were given to."""
    batch: BatchOptions = BatchOptions()
    device: DeviceOptions = DeviceOptions()
    search: SearchOptions = SearchOptions()
    train: TrainOptions = TrainOptions()
    tune: TuneOptions = TuneOptions()
    ranks: RankOptions = RankOptions()
    model: ModelOptions = ModelOptions()
    output: OutputOptions = OutputOptions()

    @property
    def target_batch(self) -> int:
        """Samples per optimizer step, of a command that plans."""
        assert self.batch.target_batch is not None
        return self.batch.target_batch

    @property
    def rank_counts(self) -> list[int]:
        """The numbers of ranks that were asked for, in order; empty if none was."""
        asked = self.ranks.ranks
        return [] if asked is None else sorted({int(one) for one in str(asked).split(",")})

    @property
    def split_check(self) -> SplitCheck:
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
    commands: tuple[str, ...]
    """Commands that take the option."""

    @property
    def unit(self) -> str:
        """Unit of its value; empty if it has none, or if its description names it."""
        return {"SECONDS": "seconds", "MINUTES": "minutes"}.get(self.about.metavar, "")


@cache
def all_fields() -> dict[str, Field]:
    """Return every option by its name."""
    found = {}
    for section, commands in TAKEN_BY.items():
        for field in msgspec.structs.fields(get_type_hints(Options)[section]):
            about = next(one for one in get_args(field.type) if isinstance(one, Option))
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            found[field.name] = Field(
                field.name, section, field.type, default, about, about.commands or commands
            )
    return found


@cache
def fields_of(command: str) -> dict[str, Field]:
    """Return the options of a command by their names."""
    return {name: field for name, field in all_fields().items() if command in field.commands}


def options_schema() -> dict[str, Any]:
    """Return the JSON schema of ``autobatch.toml``, from the declarations of all options."""
    about = "What to train: file.py, file.py:function or module:function. Without it: the demo."
    fields: list[tuple[str, Any, Any]] = [
        ("workload", Annotated[str | None, Meta(description=f"{about} ({', '.join(COMMANDS)})")], None)
    ]
    for field in all_fields().values():
        kind = field.type
        if get_origin(get_args(kind)[0]) is list:  # one may stand without brackets
            kind = kind | get_args(get_args(kind)[0])[0]
        unit = f" In {field.unit}." if field.unit else ""
        text = f"{field.about.text}{unit} ({', '.join(field.commands)})"
        fields.append((field.name, Annotated[kind, Meta(description=text)], field.default))
    table = msgspec.defstruct("autobatch", fields, kw_only=True, forbid_unknown_fields=True)
    (found,) = msgspec.json.schema_components([table])[1].values()
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "autobatch.toml"}
    return head | {name: one for name, one in found.items() if name != "title"}
