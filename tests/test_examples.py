"""The examples run as a user runs them."""

from __future__ import annotations

import copy
import importlib
import re
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import autobatch
from autobatch import Loss, Workload
from autobatch.workload.nested import map_tensors
from autobatch.workload.order import GlobalBatchSampler
from tests.support.commandline import printed
from tests.support.libraries import installed
from tests.support.rank_server import RankServer
from tests.support.sample_run import a_run, a_step
from tests.support.training import apart, reference, then, weights

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_sink_hands_known_numbers_to_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker is a stand-in with the calls of its documentation."""
    aim = MagicMock()
    monkeypatch.setitem(sys.modules, "aim", aim)
    sink = runpy.run_path(str(EXAMPLES / "sinks.py"))["AimSink"]("p")
    sink.step(a_step(3, validation={"accuracy": 0.9, "x": None}))
    sink.end(a_run().training)
    sink.close()
    aim.Run.assert_called_once_with(experiment="p")
    run = aim.Run()
    tracked = {call.kwargs["name"]: (call.kwargs["step"], *call.args) for call in run.track.mock_calls}
    assert (tracked["held_out/accuracy"], tracked["micro_batch"]) == ((3, 0.9), (3, 86))
    assert "held_out/x" not in tracked
    ((name, training),) = (call.args for call in run.__setitem__.mock_calls)
    assert (name, training["optimizer_steps"]) == ("training", 120)
    run.close.assert_called_once_with()


LIBRARIES = {
    "hf_trainer": "transformers",
    "lightning_module": "lightning",
    "accelerate_loop": "accelerate",
}
TRAINED = r"in (\d+ )?micro-batches.*trained +20 steps"
SAID = {
    "hf_trainer": r"batch 64 in \d+ micro-batches.*after 8 steps",
    "lightning_module": r"batch 256 in \d+ micro-batches.*8 steps",
    "accelerate_loop": r"batch 256 in \d+ micro-batches.*8 steps",
    "streaming": r"5,120 samples.*7,680 samples",
    **dict.fromkeys(
        ("nanogpt", "imagenet", "mae", "clip", "lora", "gin", "diffusion", "dino", "detr"), TRAINED
    ),
    "own_loop": r"step 0: 256 samples.*step 7: 208 samples",
    "dcgan": r"batch 128 in [2-9] micro-batches.*step 9, judge.*step 9, fool",
}


@pytest.mark.program
@pytest.mark.parametrize("name", SAID)
def test_an_example_trains_in_micro_batches(name: str, tmp_path: Path) -> None:
    if name in LIBRARIES:
        installed(LIBRARIES[name])
    assert re.search(SAID[name], printed(tmp_path, EXAMPLES / f"{name}.py"), re.DOTALL)


def fit_dino(out: Path) -> dict[str, Tensor]:
    options = {"target_batch": 101, "max_micro_batch": 16, "steps": 3, "trials": 0, "workers": 1}
    autobatch.fit(f"{EXAMPLES / 'dino.py'}:workload", **options, device="cpu", split_check="off", out=out)
    return load_file(out / "model.safetensors")


@pytest.mark.program
def test_the_centre_of_dino_is_that_of_all_ranks(server: RankServer, tmp_path: Path) -> None:
    """Two ranks, of which each sees other samples, end with the weights of one process."""
    (alone,), (found, _) = (
        server.values(fit_dino, tmp_path / str(world), world=world, seconds=300) for world in (1, 2)
    )
    assert alone["centre"].abs().max() > 1e-3
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


TARGET, LARGEST, STEPS = 100, 37, 4
"""Batch, largest micro-batch and optimizer steps."""


def momentum(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, rate, momentum=0.9)


def in_float64(workload: Workload) -> Workload:
    """Return a workload whose samples are drawn once, in float64, and which is trained by SGD.

    Adam would turn the rounding of a gradient that is zero into a step.
    """
    torch.manual_seed(0)
    data: Any = workload.train_data
    model = workload.model().double()
    double = partial(map_tensors, change=lambda one: one.double() if one.is_floating_point() else one)
    return replace(
        workload,
        model=lambda: copy.deepcopy(model),
        train_data=[double(data[index]) for index in range(len(data))],
        optimizer=momentum,
        schedule=None,
        learning_rate=0.05,
    )


def mean_of(loss: Any) -> Tensor:
    """Return what a loss over the whole batch minimizes."""
    if isinstance(loss, dict):
        return sum(mean_of(term) for term in loss.values())  # type: ignore[return-value]
    return loss.total / loss.count if isinstance(loss, Loss) else loss


@pytest.mark.program
@pytest.mark.parametrize(
    "name",
    ["nanogpt", "imagenet", "imagenet in groups", "mae", "clip", "lora", "gin", "diffusion", "dino", "detr"],
)
def test_a_program_of_the_gallery_is_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is a loop of torch over whole batches in float64. BatchNorm is what is not exact."""
    monkeypatch.syspath_prepend(EXAMPLES)  # an example may import those beside it
    example = importlib.import_module(name.partition(" ")[0])
    workload, follow = example.workload(), getattr(example, "follow", None)
    if name.endswith("groups"):
        workload = replace(workload, model=partial(workload.model, partial(nn.GroupNorm, 4)))
    exact = in_float64(workload)
    followed = replace(exact, optimizer=momentum if follow is None else then(momentum, follow))
    fitted = autobatch.fit(
        followed, target_batch=TARGET, max_micro_batch=LARGEST, steps=STEPS, trials=0, device="cpu",
        memory_budget="1GiB", precision="fp32", progress=False, out=tmp_path / "run",
    ).model  # fmt: skip
    order = GlobalBatchSampler(samples=len(exact.train_data), target_batch=TARGET, seed=0, steps=STEPS)
    batches = [batch.ids for batch in order.batches()]
    expected, _ = reference(
        exact, batches, lambda model, batch: mean_of(exact.loss(model, batch)), after_step=follow
    )
    off = apart(weights(fitted) - weights(exact.model()), expected - weights(exact.model()))
    assert off > 1e-3 if name == "imagenet" else off <= 1e-12
