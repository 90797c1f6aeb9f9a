"""The options of the commands that plan and tune a batch.

Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from autobatch.core.option_types import AtLeastOne, AtLeastZero, OptionHelp, Positive
from autobatch.core.records.plan import LearningRateRule
from autobatch.core.search_options import SearchOptions


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
    static_shapes: Annotated[
        bool,
        OptionHelp(
            "Give all micro-batches one size, the largest divisor of the batch that fits: for CUDA graphs.",
            "memory",
        ),
    ] = False
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

    @property
    def batch(self) -> int | None:
        """See `SearchOptions.batch`."""
        return self.target_batch


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
    own_loop: Annotated[
        bool,
        OptionHelp(
            "Plan for a loop that keeps each micro-batch in a variable until the next one is there, where "
            "autobatch fit frees it after the forward pass.",
            "memory",
        ),
    ] = False
    split_check: Annotated[
        Literal["note", "off"],
        OptionHelp(
            "Print a note if the loss cannot be split into micro-batches exactly, or skip the check.",
            "what to train",
        ),
    ] = "note"


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
        OptionHelp("Also try learning rates, and use a better one.", "learning rate", common=True),
    ] = False
    lr_trials: Annotated[
        AtLeastOne, OptionHelp("Learning rates to try, the plan's own first.", "learning rate", "N")
    ] = 10
    lr_steps: Annotated[
        int, Meta(ge=4), OptionHelp("Optimizer steps of each short run.", "learning rate", "N")
    ] = 40
