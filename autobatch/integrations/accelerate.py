"""A plan in the words of Hugging Face ``accelerate``.

    adapter = autobatch.integrations.accelerate
    accelerator = Accelerator(**adapter.arguments(plan))
    loader = DataLoader(dataset, batch_size=adapter.batch_size(plan), shuffle=True)

What ``with accelerator.accumulate(model):`` then does not do exactly:

- Each micro-batch counts the same, whatever it holds: a mean of means. For a mean over tokens that was off by
  0.06 to 0.94 of the gradient on ragged data, in float64, unless the counts are gathered by hand.
- Micro-batches are equal (see `even_split`), and the last one of an epoch may be short and counts like a
  whole one: give ``drop_last=True`` to the loader.
- The last window of an epoch may have fewer micro-batches and is still divided by all of them: its gradient
  is too small. ``plan.last_batch`` is not followed.
- The learning rate is the optimizer's: take ``plan.learning_rate``. Clipping is a call of yours, only where
  ``accelerator.sync_gradients``.

`autobatch.batches` has none of these limits.
"""

from __future__ import annotations

from typing import Any

from autobatch.core.records import Plan
from autobatch.planning import even_split


def arguments(plan: Plan) -> dict[str, Any]:
    """Keyword arguments for ``accelerate.Accelerator``.

    Args:
        plan: of `autobatch.plan`; the number of processes must be its ``world_size``.

    Raises:
        InputError: the target batch cannot be shared equally among the ranks.
    """
    return {
        "gradient_accumulation_steps": even_split(plan)[1],
        "mixed_precision": "no" if plan.precision == "fp32" else plan.precision,
    }


def batch_size(plan: Plan) -> int:
    """What the ``DataLoader`` of one process must be given, in samples (``split_batches`` off).

    Raises:
        InputError: the target batch cannot be shared equally among the ranks.
    """
    return even_split(plan)[0]
