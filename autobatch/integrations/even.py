"""Equal micro-batches: what libraries can run that know one size only, and average means."""

from __future__ import annotations

from autobatch.errors import InputError
from autobatch.records import Plan


def even_split(plan: Plan) -> tuple[int, int]:
    """The largest equal micro-batches that fit, of one rank.

    Args:
        plan: says the target batch, the ranks, and the micro-batch that fits.

    Returns:
        The micro-batch in samples, the largest divisor of the rank's share that is at most the plan's, and
        the accumulation steps: their product is the share exactly. A share with few divisors (a prime) makes
        for small micro-batches; choose another target batch then, or `autobatch.windows`, which splits any.

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
