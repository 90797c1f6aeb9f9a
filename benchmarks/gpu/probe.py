"""Accuracy of the limits found on a real GPU, under caps of several sizes.

    python -m benchmarks.gpu.probe [--out DIR] [--budgets 4 8] [--models gpt-124m]

Real attempts alone give the truth: doubling, then bisection. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from autobatch import Loss, Workload
from autobatch.core.errors import DoesNotFitError
from autobatch.core.progress import Progress
from autobatch.probing.attempt import TrainSetup, attempt
from autobatch.probing.child import ThisProcess
from autobatch.probing.find_limit import ProbeLimits, find_limit
from autobatch.probing.setup import SetupSettings, open_setup
from benchmarks.probe.limits import bisected
from benchmarks.probe.run import RESULTS, environment
from benchmarks.workloads import Block, adamw, classify, mlp

BUDGETS = (4, 8, 16, 40, 80)
"""GiB that the allocator may hold."""
SAMPLES = 16384
TOKENS, LENGTH, WIDTH, LAYERS, HEADS = 50257, 512, 768, 12, 12


class Few(Dataset):
    """A dataset of any length that repeats a few samples, because their creation is not measured."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


class Gpt(nn.Module):
    """A decoder of 124 million parameters whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return functional.linear(self.blocks(x), self.embed.weight)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with batch statistics, around a shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inputs, inner, stride if number == 0 else 1))
            inputs = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    logits = model(batch[0])
    total = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return Loss(total, batch[1].numel())


def workload(name: str, model: Callable[[], nn.Module], samples: list[Any], loss: Any = classify) -> Workload:
    return Workload(
        name=name, model=model, train_data=Few(samples), loss=loss, optimizer=adamw, learning_rate=1e-4
    )


def gpt() -> Workload:
    ids = [torch.randint(TOKENS, (LENGTH + 1,)) for _ in range(16)]
    return workload("gpt-124m", Gpt, [(one[:-1], one[1:]) for one in ids], next_token)


def resnet() -> Workload:
    samples = [(torch.randn(3, 224, 224), torch.tensor(number)) for number in range(16)]
    return workload("resnet-50", resnet50, samples)


def wide() -> Workload:
    samples = [(torch.randn(4096), torch.tensor(number % 10)) for number in range(16)]
    return workload("mlp-wide", mlp(8192, 6, inputs=4096), samples)


MODELS = {"gpt-124m": gpt, "resnet-50": resnet, "mlp-wide": wide}


def measure(name: str, budget: int) -> dict[str, Any]:
    """Probe under a cap, and find the truth."""
    options = SetupSettings(device="cuda:0", memory_budget=f"{budget}GiB")
    setup = open_setup(MODELS[name](), options)
    row: dict[str, Any] = {"model": name, "budget_gib": budget, "precision": setup.precision}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        try:
            probe = find_limit(ThisProcess(setup), ProbeLimits(), home=Path(home), progress=Progress()).probe
        except DoesNotFitError as error:
            return row | {"found": 0, "error": str(error), "true": truth(setup, {})}
    row |= {
        "found": probe.micro_batch,
        "limited_by": probe.limited_by,
        "upper_bound_by": probe.upper_bound_by,
        "predicted": probe.predicted_micro_batch,
        "runs": len(probe.attempts),
        "ooms": sum(one.phase is not None for one in probe.attempts),
        "refused": [one.reason for one in probe.attempts if not one.fits and one.phase is None],
        "seconds": round(time.perf_counter() - start, 2),
        "sizes": [one.micro_batch for one in probe.attempts],
        "peak_reserved_bytes": max(one.peak_reserved_bytes or 0 for one in probe.attempts if one.fits),
    }
    known: dict[int, bool] = {}
    row["true"] = truth(setup, known)
    for size in (probe.micro_batch, probe.micro_batch + 1):
        if size not in known and size <= SAMPLES:
            known[size] = attempt(setup, size).attempt.fits
    row["exact"] = known[probe.micro_batch] and not known.get(probe.micro_batch + 1, False)
    return row


def truth(setup: TrainSetup, known: dict[int, bool]) -> int:
    def fits(size: int) -> bool:
        known[size] = attempt(setup, size).attempt.fits
        return known[size]

    return bisected(fits, SAMPLES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS, help="GiB")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no CUDA GPU found (torch {torch.__version__}): nothing was measured")
        return
    gpu = torch.cuda.get_device_properties(0)
    rows = []
    for name in options.models:
        for budget in options.budgets:
            if budget * 2**30 > gpu.total_memory:
                print(f"{name} {budget} GiB left out: {gpu.name} has {gpu.total_memory / 2**30:.1f} GiB")
                continue
            rows.append(measure(name, budget))
            print(json.dumps(rows[-1]), flush=True)
    about = environment() | {"command": "python -m benchmarks.gpu.probe", "gpu": gpu.name}
    about |= {"gpu_bytes": gpu.total_memory, "cuda": torch.version.cuda}
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"probe_{slug}_{about['date']}.json"
    file.write_text(json.dumps({"environment": about, "limits": rows}, indent=1) + "\n")
    exact = sum(row.get("exact", False) for row in rows)
    print(f"exact in {exact} of {len(rows)}; written to {file}")


if __name__ == "__main__":
    main()
