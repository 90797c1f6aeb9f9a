"""A plan in the words of Hugging Face ``transformers``.

    args = TrainingArguments(output_dir="out", **autobatch.integrations.transformers.arguments(plan))

What its ``Trainer`` then does not do exactly:

- A loss that is a mean over tokens is weighted by the tokens of the whole window only for models that take
  ``num_items_in_batch``; for others, and for a ``compute_loss`` that ignores it, each micro-batch counts the
  same, whatever it holds: a mean of means.
- Micro-batches are equal (see `even_split`), and the last one of an epoch may be short.
- The last window of an epoch is short (``flush``), never carried over; ``plan.last_batch`` is not followed.

`autobatch.batches` has none of these limits.
"""

from __future__ import annotations

from typing import Any

from autobatch.core.records import Plan
from autobatch.planning import even_split


def arguments(plan: Plan, *, max_grad_norm: float | None = None) -> dict[str, Any]:
    """Keyword arguments for ``transformers.TrainingArguments``.

    Args:
        plan: of `autobatch.plan`; the number of processes must be its ``world_size``.
        max_grad_norm: clip the gradient of a window to this 2-norm; ``None``: no clipping, as in autobatch,
            where ``TrainingArguments`` by itself clips at 1.

    Returns:
        Sizes in samples a device, the learning rate, and the precision.

    Raises:
        InputError: the target batch cannot be shared equally among the ranks.
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
