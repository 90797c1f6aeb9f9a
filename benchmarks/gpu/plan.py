"""The units of a measurement, in the order that yields the most per minute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from autobatch import Workload
from autobatch.core.units import GiB
from benchmarks.gpu import commands, facts, footprint, graphs, loop, models, probe, tune
from benchmarks.gpu.cases import CASES, SAMPLES, Case, case, vectors
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.work import Unit
from benchmarks.workloads import Block, Residual, adamw, classify, mlp

VOCABULARY = 8192
FACT_SECONDS = 5.0


class Decoder(nn.Module):
    """A decoder of 50 million parameters."""

    def __init__(self, width: int = 512, layers: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, 8) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def decoder(length: int) -> Workload:
    """A decoder on 4,096 random texts."""
    ids = torch.randint(VOCABULARY, (4096, length + 1), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    return Workload(
        name="decoder", model=Decoder, train_data=data, loss=decoder_loss, optimizer=adamw, learning_rate=3e-4
    )


def convolutional() -> Workload:
    """Residual blocks at 56 by 56 pixels."""

    def model(channels: int = 128, blocks: int = 8) -> nn.Module:
        stem = nn.Conv2d(3, channels, 7, stride=4, padding=3)
        body = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        return nn.Sequential(stem, body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))

    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(2048, 3, 224, 224, generator=draw), torch.randint(1000, (2048,), generator=draw)
    )
    return Workload(
        name="conv-net", model=model, train_data=data, loss=classify, optimizer=adamw, learning_rate=3e-4
    )


def perceptron() -> Workload:
    """The workload of a rehearsal."""
    data = TensorDataset(
        torch.randn(400, 32, generator=torch.Generator().manual_seed(0)), torch.arange(400) % 10
    )
    return Workload(
        name="perceptron",
        model=mlp(64, 2, 32),
        train_data=data,
        loss=classify,
        optimizer=adamw,
        learning_rate=1e-3,
    )


def units_of(machine: Machine, out: Path) -> list[Unit]:
    """Return all units of a machine. A rehearsal has every kind of unit, with a small workload."""
    return _on_a_gpu(machine, out) if machine.is_real else _rehearsal(machine, out)


def _on_a_gpu(machine: Machine, out: Path) -> list[Unit]:
    peaks, traces = partial(_peaks, machine), partial(_traces, machine, out)
    limit, gain = partial(_limit, machine), partial(_gain, machine)
    return [
        *_facts(machine),
        Unit("footprint/golden", 20, lambda: footprint.golden(machine, CASES["gpt"](), "bf16", 16, out)),
        Unit("tests/gpu", 40, lambda: commands.tests(machine, [], out)),
        limit("gpt-124m", 8, 50),
        traces("gpt", "bf16", 40),
        Unit("fit/demo", 60, lambda: commands.demo(machine, [])),
        Unit("loop/small", 30, lambda: loop.ratio(machine, perceptron(), 32, 60)),
        peaks("gpt", "bf16", (8, 24), 80),
        Unit("fit/resume", 60, lambda: commands.resume(machine, 60)),
        limit("resnet-50", 8, 50),
        Unit("loop/graphs", 60, lambda: graphs.steps_of_modes(machine, perceptron(), 32)),
        Unit("fit/doctor", 8, commands.doctor),
        Unit("fit/plan", 15, lambda: commands.plan(machine)),
        Unit("loop/decoder", 60, lambda: loop.ratio(machine, decoder(1024), 16, 30)),
        traces("residual", "bf16", 30),
        traces("gpt", "fp32", 40),
        *(peaks(name, "bf16", (24,), 60) for name in ("residual", "u-net", "encoder-dropout", "llama-small")),
        limit("gpt-124m", 40, 90),
        limit("resnet-50", 40, 90),
        gain("decoder", lambda: replace(decoder(256), name="decoder"), 200),
        traces("encoder-dropout", "bf16", 30),
        traces("mlp", "bf16", 20),
        *(peaks(name, "fp32", (24,), 60) for name in ("gpt", "mlp", "lstm", "experts")),
        *(peaks(name, "fp16", (24,), 60) for name in ("gpt", "residual")),
        gain("conv-net", convolutional, 200),
        limit("mlp-wide", 8, 60),
        limit("gpt-124m", 80, 150),
        limit("resnet-50", 80, 150),
    ]


def _rehearsal(machine: Machine, out: Path) -> list[Unit]:
    small = case("mlp", mlp(64, 2, 32), partial(vectors, width=32))

    def peaks() -> dict[str, object]:
        return footprint.peaks_and_limits(machine, small, "fp32", (8 * GiB,), most=40)

    return [
        *_facts(machine),
        Unit("tests/gpu", 1, lambda: commands.tests(machine, ["tests/scenarios/test_host_syncs.py"], out)),
        Unit("footprint/golden", 1, lambda: footprint.golden(machine, small, "bf16", 4, out)),
        Unit("footprint/mlp fp32", 1, peaks),
        Unit("facts/traces mlp fp32", 1, lambda: footprint.traces(machine, small, "fp32", out)),
        Unit("probe/perceptron 8 GiB", 1, lambda: probe.limit(machine, perceptron, 8 * GiB)),
        Unit("fit/doctor", 1, commands.doctor),
        Unit("fit/demo", 1, lambda: commands.demo(machine, ["--steps", "2", "--trials", "0"])),
        Unit("fit/plan", 1, lambda: commands.plan(machine)),
        Unit("fit/resume", 1, lambda: commands.resume(machine, 60)),
        Unit("loop/small", 1, lambda: loop.ratio(machine, perceptron(), 32, 4)),
        Unit("loop/graphs", 1, lambda: graphs.steps_of_modes(machine, perceptron(), 32)),
        Unit("tune/perceptron", 20, lambda: tune.gain(machine, perceptron, 64, 3, 10.0)),
    ]


def _facts(machine: Machine) -> list[Unit]:
    return [Unit(f"facts/{name}", FACT_SECONDS, partial(read, machine)) for name, read in facts.FACTS.items()]


def _peaks(machine: Machine, name: str, precision: str, caps: tuple[int, ...], seconds: float) -> Unit:
    def run() -> dict[str, object]:
        return footprint.peaks_and_limits(
            machine, CASES[name](), precision, [gib * GiB for gib in caps], SAMPLES
        )

    return Unit(f"footprint/{name} {precision}", seconds, run)


def _traces(machine: Machine, out: Path, name: str, precision: str, seconds: float) -> Unit:
    def run() -> dict[str, object]:
        made: Case = CASES[name]()
        return footprint.traces(machine, made, precision, out)

    return Unit(f"facts/traces {name} {precision}", seconds, run)


def _limit(machine: Machine, name: str, gib: int, seconds: float) -> Unit:
    return Unit(
        f"probe/{name} {gib} GiB", seconds, lambda: probe.limit(machine, models.MODELS[name], gib * GiB)
    )


def _gain(machine: Machine, name: str, make: Callable[[], Workload], seconds: float) -> Unit:
    return Unit(f"tune/{name}", seconds, lambda: tune.gain(machine, make, 1024, 12, 0.5 * seconds))
