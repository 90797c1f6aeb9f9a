"""Objects that the code in docstrings takes for granted: a small model, its data, its plan, and libraries."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from autobatch import Workload
from autobatch.planning import make_plan

torch.manual_seed(0)
plan = make_plan(target_batch=8, micro_batch_limit=3, learning_rate=0.1)
dataset: Any = TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
loader = DataLoader(dataset, batch_size=4)
model: Any = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return cross_entropy(model(batch[0]), batch[1])


workload = Workload(
    model=lambda: model,
    train_data=dataset,
    loss=loss,
    optimizer=lambda parameters, learning_rate: torch.optim.SGD(parameters, lr=learning_rate),
    learning_rate=plan.learning_rate,
)


def set_up(library: str) -> dict[str, Any]:
    """Return the names that a docstring about a library takes for granted besides."""
    if library == "transformers":
        from tests.support.trainers import Texts, gpt2

        found = import_module("transformers")
        texts = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in Texts(24)]
        width = min(len(one["labels"]) for one in texts)
        return {
            "Trainer": found.Trainer,
            "TrainingArguments": lambda folder: found.TrainingArguments(
                folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
            ),
            "model": gpt2(),
            "collator": found.default_data_collator,
            "dataset": [{name: ids[:width] for name, ids in one.items()} for one in texts],
        }
    if library == "lightning":
        from tests.support.lightning_modules import Points, Quiet, a_module

        points = Points()
        points.setup("fit")
        return {
            "Trainer": Quiet,
            "module": a_module(),
            "datamodule": Points(),
            "loader": DataLoader(points.data, batch_size=4),
        }
    if library == "accelerate":
        return {"Accelerator": lambda: import_module("accelerate").Accelerator(cpu=True)}
    return {}
