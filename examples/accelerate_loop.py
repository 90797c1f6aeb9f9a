"""A loop with accelerate, planned by autobatch.

python examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from train import build_model, dataset, loss

from autobatch.integrations.accelerate import plan


def main() -> None:
    """Train for two epochs."""
    accelerator = Accelerator(cpu=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(dataset(1024), batch_size=8, shuffle=True)

    print(plan(accelerator, model, optimizer, loader, loss=loss, target_batch=256, memory_budget="300KiB"))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    steps = 0
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
    print(f"{steps} steps")


if __name__ == "__main__":
    main()
