"""The stage that raises the micro-batch of joined samples to what fits in the order of the run."""

from __future__ import annotations

import msgspec

from autobatch.core.records.plan import Plan, RunOrder
from autobatch.planning import micro_batches
from autobatch.search.questions import ask_or_none
from autobatch.search.sizes.real_batches import Order
from autobatch.search.sizes.run_order import find_in_order
from autobatch.setup.child import SetupProcess


def in_run_order(process: SetupProcess, plan: Plan, order: Order, cap: int) -> Plan:
    """Return a plan with the largest micro-batch that fits in the order of the run, or the same plan.

    Args:
        process: holds the setup.
        plan: a plan for one rank, whose micro-batch fits in any order.
        order: the batches of the run.
        cap: the largest micro-batch to try.
    """
    found = ask_or_none(process, "a look at the order of the run", find_in_order, plan, order, cap)
    if found is None:
        return plan
    sizes = micro_batches(plan.target_batch, found.micro_batch)
    return msgspec.structs.replace(
        plan,
        micro_batch=sizes[0],
        accumulation_steps=len(sizes),
        micro_batches=sizes,
        run_order=RunOrder(
            batches=found.batches,
            by=found.by,
            micro_batch_in_any_order=plan.micro_batch,
            digest=process.info.sizes_digest or "",
        ),
    )
