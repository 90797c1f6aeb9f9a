"""Whole fits on a GPU made of CPU tensors: every tensor is on the device where CUDA would need it.

The CPU is the oracle: it runs the same kernels, so the weights are the same up to the order of a few sums.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import autobatch
from tests.support.python_gpu import python_gpu
from tests.support.rank_server import RankServer
from tests.support.training import Rows

MORE = pytest.mark.program
TOLERANCE = 1e-12
BUDGET = 4 * 2**20
OPTIONS: dict[str, Any] = {
    "target_batch": 24,
    "max_micro_batch": 10,
    "memory_budget": BUDGET,
    "precision": "fp32",
    "steps": 6,
    "trials": 0,
    "checkpoint_every": 2,
}


def rows(samples: int = 60) -> Rows:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 5, dtype=torch.float64, generator=draw)
    return Rows(inputs, torch.randint(3, (samples,), generator=draw))


def network(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), *more, nn.Tanh(), nn.Linear(8, 3)).double()


def mean(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def counted(model: nn.Module, batch: Any) -> autobatch.Loss:
    weights = (batch[1] + 1).double()
    total = (cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum()
    return autobatch.Loss(total, weights.sum())


def contrast(_: nn.Module, found: Tensor) -> Tensor:
    same = torch.arange(len(found), device=found.device)
    return cross_entropy(normalize(found) @ normalize(found).T, same)


def workload(**more: Any) -> autobatch.Workload:
    stated = {
        "model": network,
        "train_data": rows(),
        "loss": mean,
        "optimizer": lambda params, rate: torch.optim.AdamW(params, lr=rate),
        "learning_rate": 1e-2,
        "validation_data": rows(14),
        "metrics": lambda model, batch: {"right": (model(batch[0]).argmax(1) == batch[1]).double().mean()},
        **more,
    }
    return autobatch.Workload(**stated)


def whole() -> autobatch.Workload:
    loss = autobatch.WholeBatchLoss(represent=lambda model, batch: model(batch[0]), loss=contrast)
    return workload(loss=loss, validation_data=None, metrics=None)


KINDS: dict[str, tuple[Callable[[], autobatch.Workload], dict[str, Any]]] = {
    "clipped and averaged": (workload, {"max_grad_norm": 0.1, "ema": 0.9, "workers": 1}),
    "dropout, statistics and a schedule": (
        lambda: workload(
            loss=counted,
            model=lambda: network(nn.Dropout(0.2), nn.BatchNorm1d(8)),
            optimizer=lambda params, rate: torch.optim.SGD(params, lr=rate, momentum=0.9),
            schedule=torch.optim.lr_scheduler.CosineAnnealingLR,
        ),
        {"lr_rule": "sqrt", "base_batch": 12},
    ),
    "whole batch": (whole, {}),
}
DEFAULT = "clipped and averaged"


def train(device: str, kind: str, out: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train, and return the weights and figures."""
    made, options = KINDS[kind]
    # The server's processes are daemons, which may start no workers.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with python_gpu() if device == "cuda" else nullcontext() as gpu:
        found = autobatch.fit(made(), device=device, out=out, **{**OPTIONS, **options, **(more or {})})
        assert found.plan is not None
        assert found.training is not None
        assert found.model is not None
        return {
            "weights": [tensor.cpu().tolist() for tensor in found.model.state_dict().values()],
            "plan": found.plan.micro_batches,
            "validation": found.training.validation,
            "devices": sorted({str(parameter.device) for parameter in found.model.parameters()}),
            "peak": 0 if gpu is None else gpu.peak_bytes,
        }


def alone(server: RankServer, folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a process of its own."""
    return server.values(function, *args, world=1, environ={"AUTOBATCH_HOME": str(folder / "home")})[0]


def flat(nested: Any) -> list[float]:
    return [one for part in nested for one in flat(part)] if isinstance(nested, list) else [float(nested)]


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert flat(found["weights"]) == pytest.approx(flat(expected["weights"]), rel=0, abs=TOLERANCE)


@pytest.mark.parametrize(
    "kind", [DEFAULT, *(pytest.param(kind, marks=MORE) for kind in KINDS if kind != DEFAULT)]
)
def test_a_fit_on_a_gpu_has_the_weights_of_the_cpu(server: RankServer, tmp_path: Path, kind: str) -> None:
    expected, found = (
        alone(server, tmp_path, train, device, kind, str(tmp_path / device)) for device in ("cpu", "cuda")
    )
    assert found["plan"] == expected["plan"] == [8, 8, 8]
    assert_same_weights(found, expected)
    assert found["validation"] == pytest.approx(expected["validation"], abs=TOLERANCE)
    assert found["devices"] == ["cuda:0"]
    assert 0 < found["peak"] <= BUDGET


@MORE
def test_a_resumed_run_loads_its_state_onto_the_gpu(server: RankServer, tmp_path: Path) -> None:
    kind, out = "clipped and averaged", tmp_path / "run"
    expected = alone(server, tmp_path, train, "cuda", kind, str(out))
    shutil.rmtree(out / "checkpoints/step-00000006")
    found = alone(server, tmp_path, train, "cuda", kind, str(out), {"resume": True})
    assert found["weights"] == expected["weights"]
