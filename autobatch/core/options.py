"""The options of every command.

Each command has one frozen structure. The command line, the config files, the environment variables and the
keywords of the library calls are all checked against it (`autobatch.core.check_options`).
Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from autobatch.core.option_types import (
    AtLeastOne,
    OptionHelp,
    Parallelism,
    Positive,
    Prefetch,
    ShardedModules,
    ShardReduction,
    Workers,
)
from autobatch.core.plan_options import RankPlanOptions, TuneOptions
from autobatch.core.search_options import Options, SearchOptions


class ProbeOptions(SearchOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch probe``."""

    micro_batch: Annotated[
        AtLeastOne | None, OptionHelp("Only check whether this micro-batch fits.", "memory", "N", common=True)
    ] = None


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
        bool, OptionHelp("All known GPUs, even if --profile names some.", "memory", common=True)
    ] = False
    report: Annotated[
        str | None,
        OptionHelp("Also write a page with the table and the memory.", "output", "FILE", common=True),
    ] = None
    memory_viz: Annotated[
        str | None,
        OptionHelp(
            "Also write the memory of steps on the first GPU for pytorch.org/memory_viz.",
            "output",
            "FILE",
        ),
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
    ranks: Annotated[
        AtLeastOne | None,
        OptionHelp(
            "Predict for one of N ranks, each with a GPU of its own.", "what to train", "N", common=True
        ),
    ] = None
    parallel: Parallelism = "auto"
    shard_sync: ShardReduction = "each"
    shard_modules: ShardedModules = None


COMMANDS: dict[str, type[Options]] = {
    "fit": FitOptions,
    "plan": RankPlanOptions,
    "probe": ProbeOptions,
    "tune": TuneOptions,
    "estimate": EstimateOptions,
}
