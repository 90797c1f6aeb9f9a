"""Your own loop over exact batches.

python examples/own_loop.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from train import build_model, workload

import autobatch


def loss_of(model: torch.nn.Module, data: list[torch.Tensor]) -> torch.Tensor:
    """Compute the loss in a function, so that no variable holds the data in the backward pass."""
    points, labels = data
    return cross_entropy(model(points), labels)


def main() -> None:
    """Plan the batch, then train for two epochs."""
    plan = autobatch.plan(workload(), target_batch=256, device="cpu", memory_budget="300KiB")
    print(f"{plan.target_batch} samples per step, in micro-batches of {plan.micro_batches}")

    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate)
    for batch in autobatch.batches(workload, plan, optimizer=optimizer, epochs=2):
        for micro in batch:
            batch.backward(loss_of(model, micro.data))
        step = batch.step(max_grad_norm=1.0)
        print(f"step {batch.index}: {batch.samples} samples, loss {step.loss:.4f}")


if __name__ == "__main__":
    main()
