"""The arithmetic of the batch and of the learning rate: pure functions of numbers.

With limit m, target T and W ranks, the fewest accumulation steps that m allows, and the T samples split as
evenly as they can be. There is no rounding, no hunt for a divisor and no overshoot: an optimizer step always
has exactly T samples.
"""

from __future__ import annotations

import math

from autobatch.core.errors import InputError
from autobatch.core.records import LearningRateRule, Plan, Precision

RULE_SOURCES: dict[LearningRateRule, str] = {
    "none": "no rule was asked for; accumulation by itself changes nothing",
    "linear": "Goyal et al. 2017, arXiv:1706.02677 (SGD): learning rate × (batch ÷ base batch)",
    "sqrt": "Malladi et al. 2022, arXiv:2205.10287 (Adam): learning rate × √(batch ÷ base batch)",
}


def split_evenly(samples: int, parts: int) -> list[int]:
    """Split ``samples`` into ``parts`` sizes that differ by at most one, the larger ones first."""
    small, larger = divmod(samples, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def micro_batches(samples: int, limit: int) -> list[int]:
    """Split ``samples`` into the fewest micro-batches of at most ``limit`` samples, as evenly as can be."""
    return split_evenly(samples, math.ceil(samples / limit)) if samples else []


def rank_share(target_batch: int, world_size: int, rank: int) -> int:
    """How many of a window's samples one rank takes: the shares differ by at most one."""
    return split_evenly(target_batch, world_size)[rank]


def learning_rate_factor(rule: LearningRateRule, *, target_batch: int, base_batch: int | None) -> float:
    """What the learning rate is multiplied by when the batch grows from ``base_batch`` to ``target_batch``.

    Raises:
        InputError: a rule is asked for, but the batch that the learning rate was tuned for is unknown.
    """
    if rule == "none":
        return 1.0
    if base_batch is None:
        raise InputError(
            f"--lr-rule {rule} needs the batch that the learning rate was tuned for, and none is declared: "
            "give --base-batch N, or set base_batch in the workload"
        )
    ratio = target_batch / base_batch
    return ratio if rule == "linear" else math.sqrt(ratio)


def make_plan(
    *,
    target_batch: int,
    micro_batch_limit: int,
    learning_rate: float,
    world_size: int = 1,
    base_batch: int | None = None,
    rule: LearningRateRule = "none",
    precision: Precision = "fp32",
) -> Plan:
    """Plan one optimizer step of exactly ``target_batch`` samples.

    Args:
        target_batch: samples an optimizer step, over all ranks.
        micro_batch_limit: the largest micro-batch that fits on one rank, in samples.
        learning_rate: what the workload declares.
        world_size: data-parallel ranks.
        base_batch: the batch that ``learning_rate`` was tuned for.
        rule: how the learning rate follows the batch.
        precision: what the micro-batches run in.

    Returns:
        The plan; ``micro_batches`` is the split of the largest share (rank 0's).

    Raises:
        InputError: a number is below 1, or the target has less than a sample for each rank.
    """
    for name, value in (
        ("target batch", target_batch),
        ("micro-batch limit", micro_batch_limit),
        ("world size", world_size),
        ("base batch", 1 if base_batch is None else base_batch),
    ):
        if value < 1:
            raise InputError(f"the {name} is {value}: it must be 1 or more")
    if target_batch < world_size:
        raise InputError(
            f"a target batch of {target_batch} over {world_size} ranks leaves a rank without a sample: "
            f"ask for {world_size} or more, or start fewer ranks"
        )
    factor = learning_rate_factor(rule, target_batch=target_batch, base_batch=base_batch)
    sizes = micro_batches(rank_share(target_batch, world_size, 0), micro_batch_limit)
    return Plan(
        target_batch=target_batch,
        effective_batch=target_batch,
        world_size=world_size,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        base_batch=base_batch,
        learning_rate=learning_rate * factor,
        learning_rate_rule=rule,
        learning_rate_factor=factor,
        learning_rate_source=RULE_SOURCES[rule],
        precision=precision,
    )


def even_split(plan: Plan) -> tuple[int, int]:
    """The largest equal micro-batches that fit, of one rank.

    Args:
        plan: says the target batch, the ranks, and the micro-batch that fits.

    Returns:
        The micro-batch in samples, the largest divisor of the rank's share that is at most the plan's, and
        the accumulation steps: their product is the share exactly. A share with few divisors (a prime) makes
        for small micro-batches; choose another target batch then, or `autobatch.batches`, which splits any.

    Raises:
        InputError: the target batch cannot be shared equally among the ranks.
    """
    share, rest = divmod(plan.target_batch, plan.world_size)
    if rest:
        raise InputError(
            f"a target batch of {plan.target_batch} over {plan.world_size} ranks gives unequal shares, which "
            f"this library cannot run: ask for {share * plan.world_size} or {(share + 1) * plan.world_size}"
        )
    micro_batch = next(size for size in range(min(plan.micro_batch, share), 0, -1) if share % size == 0)
    return micro_batch, share // micro_batch
