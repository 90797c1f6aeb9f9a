"""Imports of the server that forks warm children; a child of its own would take two seconds for them."""

from __future__ import annotations

import gc

import torch

import autobatch.rehearsal.process
import autobatch.tuning.trial  # noqa: F401

torch.set_num_threads(1)
# The first optimizer of a process imports many modules.
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
# A collection in a child would write to every object, and so copy the memory that it shares.
gc.collect()
gc.freeze()
