"""A small LightningModule and its data module. Importing this needs Lightning."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.support.libraries import installed

library = installed("lightning")


class Classifier(library.LightningModule):  # type: ignore[misc]
    """A classifier of points that logs, and asks for the steps of the run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).double()

    def training_step(self, batch: Any, number: int) -> Tensor:
        inputs, labels = batch
        loss = cross_entropy(self.network(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        assert self.trainer.estimated_stepping_batches > 0
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Points(library.LightningDataModule):  # type: ignore[misc]
    """Forty points."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 1

    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(40, 4, generator=draw, dtype=torch.float64)
        self.data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size)


Quiet = partial(
    library.Trainer,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
"""A Trainer that prints nothing."""
