"""A plan in the words of Lightning.

    adapter = autobatch.integrations.lightning
    trainer = lightning.Trainer(max_epochs=1, **adapter.arguments(plan))
    loader = DataLoader(dataset, batch_size=adapter.batch_size(plan), shuffle=True)

What its ``Trainer`` then does not do exactly:

- Each micro-batch counts the same, whatever it holds: a mean of means. For a mean over tokens that was off by
  0.06 to 0.94 of the gradient on ragged data, in float64.
- Micro-batches are equal (see `even_split`), and the last one of an epoch may be short and counts like a
  whole one: give ``drop_last=True`` to the loader.
- The last window of an epoch may have fewer micro-batches and is still divided by all of them: its gradient
  is too small. ``plan.last_batch`` is not followed.
- The learning rate is the optimizer's: take ``plan.learning_rate`` in ``configure_optimizers``.

`autobatch.batches` has none of these limits.
"""

from __future__ import annotations

from typing import Any

from autobatch.core.records import Plan, Precision
from autobatch.planning import even_split

_PRECISIONS: dict[Precision, str] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def arguments(plan: Plan, *, max_grad_norm: float | None = None) -> dict[str, Any]:
    """Keyword arguments for ``lightning.Trainer``.

    Args:
        plan: of `autobatch.plan`; the number of processes must be its ``world_size``.
        max_grad_norm: clip the gradient of a window to this 2-norm; ``None``: no clipping.

    Raises:
        InputError: the target batch cannot be shared equally among the ranks.
    """
    return {
        "accumulate_grad_batches": even_split(plan)[1],
        "precision": _PRECISIONS[plan.precision],
        "gradient_clip_val": max_grad_norm,
        "gradient_clip_algorithm": None if max_grad_norm is None else "norm",
    }


def batch_size(plan: Plan) -> int:
    """What the ``DataLoader`` of one process must be given, in samples.

    Raises:
        InputError: the target batch cannot be shared equally among the ranks.
    """
    return even_split(plan)[0]
