"""Validation over ranks that share a model: each sample counts once, and ranks make as many passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch.core.errors import DoesNotFitError
from autobatch.device.cpu import SilentMeter
from autobatch.training.evaluation import Sums
from autobatch.training.shared_evaluation import evaluate_shared
from tests.support.rank_server import RankServer
from tests.support.ranked import open_group
from tests.support.sharded_loops import block_workload, sharded_loop
from tests.support.training import make_loop, make_workload, mean_loss, points


def workload(samples: int):
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).double()

    return make_workload(model=model, validation_data=points(samples, seed=5))


def validate(samples: int, micro_batch: int) -> tuple[float | None, bool]:
    """Return the loss over all ranks, and whether the model is in parts again."""
    group = open_group()
    loop = sharded_loop(group, workload(samples))
    sums = evaluate_shared(
        loop.workload,
        loop.train_state,
        meter=SilentMeter(),
        micro_batch=micro_batch,
        part=(group.rank, group.world),
    )
    whole = Sums()
    for part in group.gather(sums.to_plain()):
        whole.add_plain(part)
    in_parts = all(hasattr(p, "to_local") for p in loop.train_state.model.parameters())
    group.close()
    return whole.means()["loss"], in_parts


@pytest.mark.distributed
# One rank has more samples than the other, or all of them.
@pytest.mark.parametrize(("samples", "micro_batch"), [(7, 2), (1, 2), (8, 3)])
def test_the_loss_is_that_of_one_process(server: RankServer, samples: int, micro_batch: int) -> None:
    model = make_loop(workload(samples)).train_state.model
    rows = torch.utils.data.default_collate(list(points(samples, seed=5)))  # type: ignore[arg-type]
    expected = float(mean_loss(model, rows).detach())
    for loss, in_parts in server.values(validate, samples, micro_batch):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert in_parts


def test_nothing_is_computed_without_validation_data() -> None:
    loop = make_loop(block_workload())
    sums = evaluate_shared(loop.workload, loop.train_state, meter=SilentMeter(), micro_batch=2, part=(0, 1))
    assert sums.means() == {}


def test_out_of_memory_names_the_option_that_helps() -> None:
    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    loop = make_loop(make_workload(loss=loss, validation_data=points(4)))
    with pytest.raises(DoesNotFitError, match=r"micro-batch of 2, .* a smaller --validation-micro-batch"):
        evaluate_shared(loop.workload, loop.train_state, meter=SilentMeter(), micro_batch=2, part=(0, 1))
