"""The gain of tuning on a GPU over the largest micro-batch: a transformer and a convolutional network.

    python -m benchmarks.gpu.tune [--trials 20] [--timeout 240] [--knobs …]

The gain is over the largest micro-batch with every knob at its default, measured in turn. A second gain is
over the same in fp32, because the default on recent GPUs is bf16.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from autobatch import Workload
from autobatch.core.knobs import applicable, defaults, parse_knobs
from autobatch.core.progress import Progress
from autobatch.probing.attempt import TrainSetup
from autobatch.probing.child import Session, ThisProcess
from autobatch.probing.find_limit import ProbeLimits, find_limit
from autobatch.probing.setup import SetupSettings, open_setup
from autobatch.tuning.find_fastest import Budget, StudyLocation, find_fastest
from autobatch.tuning.trial import TrialRunner, TrialSpec, look_at_workload
from benchmarks.report import save, surroundings
from benchmarks.workloads import Block, Residual

VOCABULARY = 8192
ROUNDS = 7


class Decoder(nn.Module):
    """A decoder of 50 million parameters."""

    def __init__(self, width: int = 512, layers: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, 8) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def convolutional(channels: int = 128, blocks: int = 8) -> nn.Module:
    """Build residual blocks at 56 by 56 pixels."""
    stem = nn.Conv2d(3, channels, 7, stride=4, padding=3)
    body = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
    return nn.Sequential(stem, body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def next_token(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def classify(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def transformer() -> Workload:
    ids = torch.randint(VOCABULARY, (4096, 257), generator=torch.Generator().manual_seed(0))
    return workload("transformer", Decoder, TensorDataset(ids[:, :-1], ids[:, 1:]), next_token)


def conv_net() -> Workload:
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(2048, 3, 224, 224, generator=draw), torch.randint(1000, (2048,), generator=draw)
    )
    return workload("conv-net", convolutional, data, classify)


def workload(name: str, model: Callable[[], nn.Module], data: Any, loss: Any) -> Workload:
    return Workload(
        name=name,
        model=model,
        train_data=data,
        loss=loss,
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr),
        learning_rate=3e-4,
    )


TARGET = 1024
CASES = {"transformer": transformer, "conv-net": conv_net}


def examine(make: Callable[[], Workload], chosen: argparse.Namespace) -> dict[str, Any]:
    """Probe, tune, and measure the result next to the default."""
    settings = SetupSettings(target_batch=TARGET, device="cuda", memory_budget=chosen.memory_budget)
    setup = open_setup(make(), settings)
    limit = limit_of(setup)
    task = TrialSpec(limit=limit, cap=TARGET, samples=TARGET, planned_steps=1000, seconds=1.0)
    names = None if chosen.knobs is None else parse_knobs(chosen.knobs)
    axes, _ = applicable(look_at_workload(Session(setup), task), names)
    base = defaults(axes)
    runner = TrialRunner(setup, dataclasses.replace(task, defaults=base))
    start = time.monotonic()
    found = find_fastest(
        runner.measure,
        axes,
        budget=Budget(chosen.trials, lambda: time.monotonic() - start > chosen.timeout),
        seed=0,
        place=StudyLocation("gpu", None, {}),
        confirm_fits=runner.confirm_fits,
        progress=lambda n, values, one: print(
            n, dict(values), one.failure or round(one.samples_per_s), flush=True
        ),
    ).tuning
    single = dataclasses.replace(setup, precision="fp32")
    plain = TrialRunner(single, dataclasses.replace(task, limit=limit_of(single)))
    gains: dict[str, list[float]] = {"over_default": [], "over_fp32": []}
    for _ in range(ROUNDS):
        best = runner.measure(found.best).samples_per_s
        gains["over_default"].append(best / runner.measure(base).samples_per_s)
        gains["over_fp32"].append(best / plain.measure({}).samples_per_s)
    return {
        "target_batch": TARGET,
        "micro_batch_limit": limit,
        "best": found.best,
        **{name: round(statistics.median(ratios), 3) for name, ratios in gains.items()},
        "trials": found.trials,
        "seconds": round(found.seconds, 1),
        "sampler_share": round(found.sampler_seconds / found.seconds, 4),
        "history": [[one.parameters, one.micro_batch, one.samples_per_s, one.note] for one in found.history],
    }


def limit_of(setup: TrainSetup) -> int:
    """Return the largest micro-batch that fits."""
    limits = ProbeLimits(target_batch=TARGET)
    with tempfile.TemporaryDirectory() as home:
        found = find_limit(ThisProcess(setup), limits, home=Path(home), progress=Progress())
    return found.probe.micro_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="transformer,conv-net")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per case")
    parser.add_argument("--knobs", default=None)
    parser.add_argument("--memory-budget", default="24GiB")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu.tune needs a CUDA GPU and found none: nothing was measured")
        sys.exit(0)
    content = surroundings("optuna", "scipy", "triton")
    content["hardware"]["cpu"] = torch.cuda.get_device_name(0)
    content |= {
        "command": "python -m benchmarks.gpu.tune",
        "memory_budget": chosen.memory_budget,
        "cases": {},
    }
    lines = [f"# Tuning on {torch.cuda.get_device_name(0)}, {content['date']}", ""]
    lines += ["| case | result | over the default | over fp32 |", "|---|---|---|---|"]
    for name in chosen.cases.split(","):
        one = examine(CASES[name], chosen)
        content["cases"][name] = one
        answer = ", ".join(f"{knob} {value}" for knob, value in one["best"].items())
        lines.append(f"| {name} | {answer} | {one['over_default']:.2f} | {one['over_fp32']:.2f} |")
        print(lines[-1], flush=True)
    print(save("tune-gpu", content, "\n".join(lines) + "\n"))


if __name__ == "__main__":
    main()
