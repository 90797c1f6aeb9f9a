"""A plan whose micro-batches have one size, as ``--static-shapes`` asks for."""

from __future__ import annotations

from autobatch.core.plan_options import PlanOptions
from autobatch.core.progress import Progress
from autobatch.core.records.plan import Plan
from autobatch.planning import even_split_note, in_one_size


def one_size_if_asked(plan: Plan, limit: int, options: PlanOptions, progress: Progress) -> Plan:
    """Return the plan, with one size of micro-batch if ``--static-shapes`` asks for it.

    Args:
        plan: to change.
        limit: the largest micro-batch that fits, in samples.
        options: options of the command.
        progress: receives a note if the size is at most half of what fits.

    Raises:
        InputError: several ranks train.
    """
    if not options.static_shapes:
        return plan
    found = in_one_size(plan)
    note = even_split_note(plan, limit, instead="without this option any batch is split")
    if note is not None:
        progress.note(f"--static-shapes: {note}")
    return found
