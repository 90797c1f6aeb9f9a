"""A plan as arguments of Lightning.

    from lightning import Trainer

    adapter = autobatch.integrations.lightning
    trainer = Trainer(max_epochs=1, **adapter.arguments(plan))
    loader = DataLoader(dataset, batch_size=adapter.batch_size(plan), shuffle=True)

Its ``Trainer`` is then less exact than autobatch:

- Each micro-batch has the same weight, whatever it holds: a mean of means. For a mean over tokens of ragged
  data, the gradient was off by 0.06 to 0.94 (in float64).
- Micro-batches are equal (see `even_split`). The last one of an epoch may be short and has the weight of a
  whole one: give ``drop_last=True`` to the loader.
- The last batch of an epoch may have fewer micro-batches and is still divided by the full number, so its
  gradient is too small. ``plan.last_batch`` is ignored.
- The learning rate belongs to the optimizer: use ``plan.learning_rate`` in ``configure_optimizers``.

`autobatch.batches` has none of these limits.
"""

from __future__ import annotations

from typing import Any

from autobatch.core.records import Plan, Precision
from autobatch.planning import even_split

_PRECISIONS: dict[Precision, str] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def arguments(plan: Plan, *, max_grad_norm: float | None = None) -> dict[str, Any]:
    """Return keyword arguments for ``lightning.Trainer``.

    Args:
        plan: of `autobatch.plan`; its ``world_size`` must be the number of processes.
        max_grad_norm: the 2-norm to clip the gradient of a batch to; None for no clipping.

    Raises:
        InputError: the target batch does not divide equally among the ranks.
    """
    return {
        "accumulate_grad_batches": even_split(plan)[1],
        "precision": _PRECISIONS[plan.precision],
        "gradient_clip_val": max_grad_norm,
        "gradient_clip_algorithm": None if max_grad_norm is None else "norm",
    }


def batch_size(plan: Plan) -> int:
    """Return the ``batch_size`` for the ``DataLoader`` of one process, in samples.

    Raises:
        InputError: the target batch does not divide equally among the ranks.
    """
    return even_split(plan)[0]
