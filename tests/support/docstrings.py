"""Objects that the code in docstrings takes for granted: a small model, its data and its plan."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from autobatch.planning import make_plan

torch.manual_seed(0)
plan = make_plan(target_batch=8, micro_batch_limit=3, learning_rate=0.1)
dataset = TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate)
