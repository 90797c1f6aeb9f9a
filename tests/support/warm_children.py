"""Imports of the server that forks warm children and ranks, which would take two seconds for them."""

from __future__ import annotations

import gc
import importlib
import os
from pkgutil import walk_packages

import pytest  # noqa: F401, a test module imports it
import torch.distributed.checkpoint

import autobatch.api
import autobatch.distributed
import autobatch.rehearsal.process
import autobatch.report.page
import autobatch.tuning.trial
import tests.support.kinds
import tests.support.ragged
import tests.support.runs
import tests.support.sharded_loops  # noqa: F401

# What a run imports when it first needs it.
for package in (autobatch.api, autobatch.distributed):
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
torch.set_num_threads(1)
# The first optimizer of a process imports many modules.
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
# As in the tests of one process, nothing waits for a disk or draws a picture.
os.fsync = lambda _: None
# Ranks of one host that have not answered by then never do.
autobatch.distributed.group.ROLL_CALL_S = 2.0
autobatch.report.page.draw = lambda *_, **__: '<svg viewBox="0 0 1 1"></svg>'
# A collection in a child would write to every object, and so copy the memory that it shares.
gc.collect()
gc.freeze()
