"""The time of the training loop against a loop written by hand that does the same work.

    python -m benchmarks.loop.run [--rounds 100] [--out FILE.json]

One process with one thread runs all contenders in turn in every round, so that other load on the machine
affects them equally. The work: Adam, accumulation of 4 micro-batches, clipping to 1.0, reading the loss of
each optimizer step, and collating samples from memory (a DataLoader without workers in the loops by hand).
The figure is the ratio to the loop by hand in the same round, for wall time and for the CPU time of the
process. They agree on an idle machine. On a busy one, read the CPU time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from autobatch import Workload
from autobatch.device.cpu import CpuDevice, SilentMeter
from autobatch.device.host import cpu_name
from autobatch.step.train_state import build_train_state
from autobatch.training.loop import Loop
from autobatch.training.metrics import JsonLines
from autobatch.workload.order import GlobalBatchSampler

ACCUMULATION = 4
CLIP = 1.0


class Transformer(nn.Module):
    """Four layers of width 256 over 128 positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(256, 256)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 256)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


CASES: dict[str, dict[str, Any]] = {
    "mlp": {
        "model": perceptron,
        "data": TensorDataset(torch.randn(8192, 64), torch.randint(10, (8192,))),
        "micro_batch": 32,
        "steps": 5,
    },
    "transformer": {
        "model": Transformer,
        "data": TensorDataset(torch.randint(256, (512, 128)), torch.randint(256, (512, 128))),
        "micro_batch": 4,
        "steps": 1,
        "fewer": 10,
    },
}


def workload_of(case: dict[str, Any]) -> Workload:
    return Workload(
        model=case["model"],
        train_data=case["data"],
        loss=loss_of,
        optimizer=lambda params, lr: torch.optim.Adam(params, lr=lr),
        learning_rate=1e-3,
    )


def batches(case: dict[str, Any]) -> Iterator[Any]:
    loader = DataLoader(
        case["data"], batch_size=case["micro_batch"], sampler=RandomSampler(case["data"]), drop_last=True
    )
    while True:
        yield from loader


def context(precision: str) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def by_hand(case: dict[str, Any], precision: str) -> Callable[[], None]:
    model = case["model"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = batches(case)

    def step() -> None:
        total = torch.zeros(())
        for _ in range(ACCUMULATION):
            with context(precision):
                loss = loss_of(model, next(data)) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.item()

    return step


def by_autobatch(case: dict[str, Any], precision: str) -> Callable[[], None]:
    workload = workload_of(case)
    train_state = build_train_state(
        workload,
        workload.model(),
        torch.device("cpu"),
        precision=precision,  # type: ignore[arg-type]
        learning_rate=1e-3,
        max_grad_norm=CLIP,
    )
    target_batch = ACCUMULATION * case["micro_batch"]
    loop = Loop(
        workload=workload,
        train_state=train_state,
        sampler=GlobalBatchSampler(samples=len(case["data"]), target_batch=target_batch, seed=0, steps=10**9),
        device=CpuDevice(memory_budget="1GiB"),
        meter=SilentMeter(),
        micro_batch=case["micro_batch"],
    )
    run = loop.run()
    # Writing a row for every step is part of the cost of a run.
    lines = JsonLines(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    return lambda: lines.step(next(run))


def by_accelerate(case: dict[str, Any], precision: str) -> Callable[[], None]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # accelerate keeps its precision for the whole process.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        mixed_precision="bf16" if precision == "bf16" else "no",
    )
    model = case["model"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(
        case["data"], batch_size=case["micro_batch"], sampler=RandomSampler(case["data"]), drop_last=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    data = forever()

    def step() -> None:
        total = torch.zeros(())
        for _ in range(ACCUMULATION):
            with accelerator.accumulate(model):
                loss = loss_of(model, next(data))
                total += loss.detach() / ACCUMULATION
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        total.item()

    return step


def by_fabric(case: dict[str, Any], precision: str) -> Callable[[], None]:
    from lightning.fabric import Fabric

    fabric = Fabric(
        accelerator="cpu", devices=1, precision="bf16-mixed" if precision == "bf16" else "32-true"
    )
    model = case["model"]()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(
        DataLoader(
            case["data"], batch_size=case["micro_batch"], sampler=RandomSampler(case["data"]), drop_last=True
        )
    )

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    data = forever()

    def step() -> None:
        total = torch.zeros(())
        for number in range(ACCUMULATION):
            with fabric.no_backward_sync(model, enabled=number < ACCUMULATION - 1):
                loss = loss_of(model, next(data)) / ACCUMULATION
                fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.item()

    return step


class Paced:
    """Batches for a loop that has no step function: it waits before every optimizer step."""

    def __init__(self, data: Iterator[Any]) -> None:
        self.data = data
        self.may_go, self.is_done = threading.Semaphore(0), threading.Semaphore(0)

    def __len__(self) -> int:
        """Return a length, so that Lightning does not fetch a batch of the next step ahead."""
        return 10**9

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.is_done.release()
            self.may_go.acquire()
            for _ in range(ACCUMULATION):
                yield next(self.data)

    def step(self) -> None:
        self.may_go.release()
        self.is_done.acquire()


def by_lightning(case: dict[str, Any], precision: str) -> Callable[[], None]:
    """Run Lightning's Trainer in a thread, one optimizer step at a time."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = case["model"]()
            self.total = torch.zeros(())

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = loss_of(self.net, batch)
            self.total += loss.detach() / ACCUMULATION
            return loss

        def on_before_zero_grad(self, _: torch.optim.Optimizer) -> None:
            self.total.item()
            self.total = torch.zeros(())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=CLIP,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    paced = Paced(batches(case))
    threading.Thread(target=trainer.fit, args=(Module(), paced), daemon=True).start()
    paced.is_done.acquire()
    return paced.step


CONTENDERS = {
    "hand": by_hand,
    "autobatch": by_autobatch,
    "accelerate": by_accelerate,
    "fabric": by_fabric,
    "lightning": by_lightning,
}


def compare(case: dict[str, Any], precision: str, rounds: int) -> dict[str, Any]:
    steps: dict[str, Callable[[], None]] = {}
    left_out = {}
    for name, make in CONTENDERS.items():
        torch.manual_seed(0)
        try:
            steps[name] = make(case, precision)
            for _ in range(case["steps"]):
                steps[name]()
        except ImportError as error:
            steps.pop(name, None)
            left_out[name] = str(error)
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {c: {name: [] for name in steps} for c in clocks}
    names = list(steps)
    for number in range(rounds // case.get("fewer", 1)):
        # The order rotates, so that no contender always follows the same other one.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = {clock: read() for clock, read in clocks.items()}
            for _ in range(case["steps"]):
                steps[name]()
            for clock, read in clocks.items():
                seconds[clock][name].append((read() - before[clock]) / case["steps"] / ACCUMULATION)
    result: dict[str, Any] = {"left_out": left_out}
    for name in names:
        result[name] = {clock: figures(seconds[clock][name], seconds[clock]["hand"]) for clock in clocks}
    return result


def figures(own: list[float], by_hand: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(own, by_hand, strict=True)], n=4)
    return {
        "microseconds_a_micro_batch": round(statistics.median(own) * 1e6, 1),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def show(case: str, found: dict[str, Any]) -> None:
    for who, why in found["left_out"].items():
        print(f"{case:18} {who:10} left out: {why}")
    for name in found.keys() - {"left_out"}:
        for clock, own in found[name].items():
            low, high = own["quartiles"]
            micro = own["microseconds_a_micro_batch"]
            print(
                f"{case:18} {name:10} {clock:4} {micro:10.1f} us  {own['ratio']:.3f} [{low:.3f}, {high:.3f}]"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--cases", default="mlp,transformer")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    results = {}
    for name in options.cases.split(","):
        for precision in options.precisions.split(","):
            results[f"{name} {precision}"] = compare(CASES[name], precision, options.rounds)
            show(f"{name} {precision}", results[f"{name} {precision}"])
    report = {
        "rounds": options.rounds,
        "accumulation": ACCUMULATION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1_minute": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "results": results,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
