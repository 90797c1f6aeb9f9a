"""A plan as arguments of Hugging Face ``accelerate``.

    from accelerate import Accelerator

    adapter = autobatch.integrations.accelerate
    accelerator = Accelerator(**adapter.arguments(plan))
    loader = DataLoader(dataset, batch_size=adapter.batch_size(plan), shuffle=True)

``with accelerator.accumulate(model):`` is then less exact than autobatch:

- Each micro-batch has the same weight, whatever it holds: a mean of means. For a mean over tokens of ragged
  data, the gradient was off by 0.06 to 0.94 (in float64), unless the counts were gathered by hand.
- Micro-batches are equal (see `even_split`). The last one of an epoch may be short and has the weight of a
  whole one: give ``drop_last=True`` to the loader.
- The last batch of an epoch may have fewer micro-batches and is still divided by the full number, so its
  gradient is too small. ``plan.last_batch`` is ignored.
- The learning rate belongs to the optimizer: use ``plan.learning_rate``. Clip the gradient yourself, only if
  ``accelerator.sync_gradients``.

`autobatch.batches` has none of these limits.
"""

from __future__ import annotations

from typing import Any

from autobatch.core.records import Plan
from autobatch.planning import even_split


def arguments(plan: Plan) -> dict[str, Any]:
    """Return keyword arguments for ``accelerate.Accelerator``.

    Args:
        plan: of `autobatch.plan`; its ``world_size`` must be the number of processes.

    Raises:
        InputError: the target batch does not divide equally among the ranks.
    """
    return {
        "gradient_accumulation_steps": even_split(plan)[1],
        "mixed_precision": "no" if plan.precision == "fp32" else plan.precision,
    }


def batch_size(plan: Plan) -> int:
    """Return the ``batch_size`` for the ``DataLoader`` of one process, in samples (``split_batches`` off).

    Raises:
        InputError: the target batch does not divide equally among the ranks.
    """
    return even_split(plan)[0]
