"""The model of a setup, with its memory and without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.device.cpu import CpuDevice
from autobatch.setup.model import build_model, check_whole
from tests.support.probes import work
from tests.support.training import make_workload


@pytest.mark.parametrize("made", [None, nn.Linear, torch.zeros(3)])
def test_a_model_function_that_returns_no_module_is_an_error(made) -> None:
    with pytest.raises(InputError, match=r"Workload\(model=…\) returned"):
        build_model(work(lambda: made))


def test_a_model_that_is_too_large_for_one_rank_is_known_without_its_memory() -> None:
    device = CpuDevice(memory_budget="1GiB")
    check_whole(make_workload(), device)
    with pytest.raises(DoesNotFitError, match=r"gradients of a whole model take 8.* TiB, and .* 1.00 GiB"):
        check_whole(make_workload(model=lambda: nn.Linear(2**20, 2**20, bias=False)), device)
