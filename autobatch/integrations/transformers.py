"""A plan as arguments of Hugging Face ``transformers``.

    from transformers import TrainingArguments

    args = TrainingArguments(output_dir="out", **autobatch.integrations.transformers.arguments(plan))

Its ``Trainer`` is then less exact than autobatch:

- A mean over tokens is weighted by the tokens of the whole batch only if the model takes
  ``num_items_in_batch``. For other models, and for a ``compute_loss`` that ignores it, each micro-batch has
  the same weight, whatever it holds: a mean of means.
- Micro-batches are equal (see `even_split`), and the last one of an epoch may be short.
- The last batch of an epoch is short (``flush``) and is never carried over. ``plan.last_batch`` is ignored.

`autobatch.batches` has none of these limits.
"""

from __future__ import annotations

from typing import Any

from autobatch.core.records import Plan
from autobatch.planning import even_split


def arguments(plan: Plan, *, max_grad_norm: float | None = None) -> dict[str, Any]:
    """Return keyword arguments for ``transformers.TrainingArguments``.

    Args:
        plan: of `autobatch.plan`; its ``world_size`` must be the number of processes.
        max_grad_norm: the 2-norm to clip the gradient of a batch to; None for no clipping, as in autobatch.
            (The default of ``TrainingArguments`` clips at 1.)

    Returns:
        Sizes in samples per device, the learning rate, and the precision.

    Raises:
        InputError: the target batch does not divide equally among the ranks.
    """
    micro_batch, steps = even_split(plan)
    return {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": steps,
        "learning_rate": plan.learning_rate,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "max_grad_norm": 0.0 if max_grad_norm is None else max_grad_norm,
    }
