"""A LightningModule: three lines more than without autobatch.

python examples/lightning_module.py
"""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autobatch.integrations.lightning import AutobatchFinder  # +


class Classifier(lightning.LightningModule):
    """A network with one hidden layer."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.network = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 2))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a micro-batch."""
        points, labels = batch
        return nn.functional.cross_entropy(self.network(points), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Load points; the sign of their sum is the label."""
        points = torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(points, (points.sum(dim=1) > 0).long())
        return DataLoader(data, batch_size=self.batch_size, shuffle=True)


def main() -> None:
    """Train for two epochs."""
    module = Classifier()
    finder = AutobatchFinder(target_batch=256, memory_budget="300KiB")  # +
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[finder],  # +
    )  # fmt: skip
    trainer.fit(module)
    print(f"{trainer.global_step} steps")


if __name__ == "__main__":
    main()
