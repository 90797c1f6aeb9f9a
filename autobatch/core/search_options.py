"""The options that several commands have in common.

Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from autobatch.core.option_types import (
    AtLeastOne,
    Decay,
    LocalRanks,
    OptionHelp,
    Parallelism,
    Positive,
    Seed,
    ShardedModules,
    ShardReduction,
)


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
    gradient_dtype: Annotated[
        Literal["auto", "fp32", "weights"],
        OptionHelp(
            "Type in which the gradients of 16-bit weights are summed. weights takes half the memory of "
            "float32, and rounds the sum after each micro-batch. auto: fp32.",
            "memory",
        ),
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
    size_multiple: Annotated[
        str | int | None,
        OptionHelp("Pad samples to multiples of N. auto: at most 8 sizes.", "memory", "N|auto"),
    ] = None
    memory_viz: Annotated[
        str | None,
        OptionHelp(
            "Also run a few steps of the result, and write their memory for pytorch.org/memory_viz.",
            "output",
            "FILE",
        ),
    ] = None
    ranks: Annotated[
        LocalRanks | None,
        OptionHelp("Processes on this machine, one per GPU.", "run", "N", common=True),
    ] = None
    grad_sync: Annotated[
        Literal["auto", "overlap", "after"],
        OptionHelp(
            "Over several ranks, sum gradients during the last backward pass (DDP) or after it. auto: during "
            "it above 25 MiB on GPUs, if DDP can.",
            "run",
        ),
    ] = "auto"
    parallel: Parallelism = "auto"
    shard_sync: ShardReduction = "each"
    shard_modules: ShardedModules = None

    @property
    def batch(self) -> int | None:
        """Samples per optimizer step; None if no batch is planned."""
        return None
