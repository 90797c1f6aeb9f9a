"""Arithmetic of the batch and of the learning rate: pure functions of numbers.

For a limit m, a target T and W ranks, a plan uses the fewest accumulation steps that m allows, and splits the
T samples as evenly as possible. Nothing is rounded and no divisor is needed: a step has exactly T samples.

Samples of unlike sizes are sorted, and cut where the padded area is least. For any cost and any memory that
grow with the padded size, some optimal split is contiguous: of two micro-batches, the one with the largest
sample may take the largest samples of both. Its padded size stays, and that of the other cannot grow. So
dynamic programming over the sorted list finds the optimum:

    best[i] = min over k of  fixed + k · size[i] + best[i + k],   k ≤ limit(size[i])
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from autobatch.core.errors import InputError
from autobatch.core.records import GradientDtype, LearningRateRule, Plan, Precision
from autobatch.core.units import significant

Sizes = NDArray[np.float64]
Counts = NDArray[np.int64]
PlanT = TypeVar("PlanT", bound=Plan)
FIXED_SHARE = 1 / 32
"""Cost of a micro-batch besides its area, as a share of the largest area that fits. Without it, samples of
unlike sizes would all run alone. With it, a micro-batch that fills the memory is cut in two if that saves
more than a thirty-second of it."""
RULE_SOURCES: dict[LearningRateRule, str] = {
    "linear": "Goyal et al. 2017, arXiv:1706.02677 (SGD): learning rate × (batch ÷ base batch)",
    "sqrt": "Malladi et al. 2022, arXiv:2205.10287 (Adam): learning rate × √(batch ÷ base batch)",
}


def split_evenly(samples: int, parts: int) -> list[int]:
    """Split ``samples`` into ``parts`` sizes that differ by at most one, the larger ones first."""
    small, larger = divmod(samples, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def micro_batches(samples: int, limit: int, multiple: int = 1) -> list[int]:
    """Split ``samples`` as evenly as possible into the fewest micro-batches of at most ``limit`` samples.

    All are multiples of ``multiple``, but for the last one if ``samples`` is none.
    """
    units, rest = divmod(samples, multiple)
    parts = math.ceil(units / max(1, limit // multiple))
    whole = [multiple * one for one in split_evenly(units, parts)] if units else []
    return [*whole, rest] if rest else whole


def split_over_ranks(samples: int, world_size: int, multiple: int = 1) -> list[int]:
    """Split samples over ranks as evenly as possible, the larger shares first; a rank may take none.

    All shares are multiples of ``multiple``, but for the last one if ``samples`` is none.
    """
    units, rest = divmod(samples, multiple)
    shares = [multiple * share for share in split_evenly(units, world_size)]
    return [*shares[:-1], shares[-1] + rest]


def cut_by_area(sizes: Sizes, limits: Counts, *, fixed: float, ranks: int = 1) -> list[int]:
    """Cut a sorted list into contiguous micro-batches of the least padded area.

    Args:
        sizes: sizes of the samples, the largest first.
        limits: the largest micro-batch that may begin with each sample.
        fixed: cost of a micro-batch besides its area.
        ranks: ranks that share each micro-batch, and wait for the one with most of its samples.

    Returns:
        The samples of each micro-batch, in order. Among equal costs, the smaller micro-batch comes first.
    """
    count = len(sizes)
    counts = np.ceil(np.arange(1, count + 1, dtype=np.float64) / ranks)
    best = np.zeros(count + 1)
    taken = np.zeros(count, dtype=np.int64)
    for start in range(count - 1, -1, -1):
        most = min(int(limits[start]), count - start)
        totals = sizes[start] * counts[:most] + best[start + 1 : start + most + 1]
        taken[start] = chosen = int(totals.argmin()) + 1
        best[start] = fixed + totals[chosen - 1]
    found: list[int] = []
    start = 0
    while start < count:
        found.append(int(taken[start]))
        start += found[-1]
    return found


def scale_rate(
    rule: LearningRateRule, *, learning_rate: float, target_batch: int, base_batch: int | None
) -> tuple[float, str]:
    """Return the factor of the learning rate for a change of the batch, and the origin of the rate in words.

    Raises:
        InputError: a rule was given, but the batch that the learning rate was tuned for is unknown.
    """
    if base_batch is None:
        if rule == "none":
            return 1.0, "kept as declared; the batch that it was tuned for is unknown (base_batch)"
        raise InputError(
            f"--lr-rule {rule} needs the batch that the learning rate was tuned for, which is unknown: "
            "give --base-batch N, or set base_batch in the workload"
        )
    linear = target_batch / base_batch
    root = math.sqrt(linear)
    if rule != "none":
        return linear if rule == "linear" else root, RULE_SOURCES[rule]
    if base_batch == target_batch:
        return 1.0, "kept as declared: it was tuned for this batch"
    return 1.0, (
        f"kept as declared, but it was tuned for a batch of {base_batch:,}, and this one is "
        f"{target_batch:,}: the linear rule gives {significant(learning_rate * linear)}, the sqrt rule "
        f"{significant(learning_rate * root)}, and --tune-lr measures"
    )


def make_plan(
    *,
    target_batch: int,
    micro_batch_limit: int,
    learning_rate: float,
    world_size: int = 1,
    multiple: int = 1,
    base_batch: int | None = None,
    rule: LearningRateRule = "none",
    precision: Precision = "fp32",
    gradient_dtype: GradientDtype = "fp32",
) -> Plan:
    """Plan one optimizer step of exactly ``target_batch`` samples.

    Its ``micro_batches``, all multiples of ``multiple``, split the largest share, that of rank 0. Each has at
    most ``micro_batch_limit`` samples. The rate was tuned for ``base_batch``; None if that is unknown.

    Raises:
        InputError: there are fewer samples than ranks, the batch is no multiple, or the rule lacks its base.
    """
    if target_batch % multiple:
        raise InputError(
            f"a target batch of {target_batch:,} is no multiple of {multiple}, as micro-batches must be "
            f"(--micro-batch-multiple): use {math.ceil(target_batch / multiple) * multiple:,}"
        )
    if target_batch < world_size * multiple:
        raise InputError(
            f"a target batch of {target_batch:,} over {world_size} ranks leaves a rank without samples: use "
            f"{world_size * multiple:,} or more, or start fewer ranks"
        )
    factor, source = scale_rate(
        rule, learning_rate=learning_rate, target_batch=target_batch, base_batch=base_batch
    )
    sizes = micro_batches(
        split_over_ranks(target_batch, world_size, multiple)[0], micro_batch_limit, multiple
    )
    return Plan(
        target_batch=target_batch,
        effective_batch=target_batch,
        world_size=world_size,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        multiple=multiple,
        base_batch=base_batch,
        learning_rate=learning_rate * factor,
        learning_rate_rule=rule,
        learning_rate_factor=factor,
        learning_rate_source=source,
        precision=precision,
        gradient_dtype=gradient_dtype,
    )


def with_equal_parts(plan: PlanT) -> PlanT:
    """Return a plan in equal micro-batches, the largest that fit, as a program has that knows one size only.

    Their sum is a rank's share. If the share has few divisors (a prime), they are small.

    Raises:
        InputError: the ranks do not divide the target batch into equal parts of the plan's multiple.
    """
    unit = plan.multiple
    units, rest = divmod(plan.target_batch, plan.world_size * unit)
    if rest:
        near = [n * plan.world_size * unit for n in (units, units + 1) if n]
        of = f" in multiples of {unit}" if unit > 1 else ""
        raise InputError(
            f"a target batch of {plan.target_batch} over {plan.world_size} ranks gives unequal shares{of}, "
            f"which equal micro-batches cannot be: ask for {' or '.join(map(str, near))}"
        )
    size = next(size for size in range(min(plan.micro_batch // unit, units), 0, -1) if units % size == 0)
    sizes = [size * unit] * (units // size)
    return replace(plan, micro_batch=sizes[0], accumulation_steps=len(sizes), micro_batches=sizes)


def equal_parts_note(plan: Plan, limit: int) -> str | None:
    """Return a remark if equal micro-batches are at most half of the ``limit`` that fits; None if not."""
    share = plan.target_batch // plan.world_size
    if 2 * plan.micro_batch > min(limit, share):
        return None
    parts = math.ceil(share / limit) * plan.world_size * plan.multiple  # the fewest that a batch may have
    less = plan.target_batch // parts * parts
    near = f"{less:,} or {less + parts:,}" if less else f"{parts:,}"
    return (
        f"{limit:,} samples fit, but {plan.target_batch:,} split into equal micro-batches of at most "
        f"{plan.micro_batch:,}, in {plan.accumulation_steps:,} accumulation steps. Target batches of {near} "
        "take fewer, and autobatch.batches splits any"
    )


def program_plan(target_batch: int, limit: int, *, world_size: int, multiple: int = 1) -> Plan:
    """Plan equal micro-batches for a program as it is. The rate of the plan is 0: the program has its own.

    Raises:
        InputError: the ranks cannot share the batch equally.
    """
    plan = make_plan(
        target_batch=target_batch,
        micro_batch_limit=limit,
        learning_rate=0.0,
        world_size=world_size,
        multiple=multiple,
    )
    source = "the program's own, and so is its precision"
    return replace(with_equal_parts(plan), learning_rate_source=source)
