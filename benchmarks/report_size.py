"""The time of the report of a long run with many trials: reading its folder, and drawing the page.

    python -m benchmarks.report_size [--steps 100000] [--trials 1000]

The run is made up: a noisy loss that falls, and trials that differ in speed and micro-batch.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from pathlib import Path

import msgspec

from autobatch.core.records import RunRecord, StepRecord, Training, Trial, Tuning
from autobatch.device.cpu import CpuDevice
from autobatch.report.page import write_report
from autobatch.report.result import load_run
from benchmarks.report import save, surroundings


def a_step(number: int, rng: random.Random) -> StepRecord:
    """Return a step of the made-up run."""
    return StepRecord(
        step=number,
        applied=True,
        samples=number * 1024,
        loss=2.0 * math.exp(-number / 2e4) + 0.05 * rng.random(),
        count=1024.0,
        learning_rate=1e-3,
        grad_norm=1.0 + rng.random(),
        micro_batch=256,
        accumulation_steps=4,
        seconds=0.1,
        samples_per_s=10240.0 + 500 * rng.random(),
        items_per_s=10240.0,
        peak_allocated_bytes=2**30,
        peak_reserved_bytes=2**30 + 2**20,
        oom_recoveries=0,
        recovered=None,
    )


def some_trials(count: int, rng: random.Random) -> list[Trial]:
    """Return trials of the made-up study."""
    sizes = [2**exponent for exponent in range(3, 11)]
    return [
        Trial(
            number=number,
            samples_per_s=1e4 * rng.random(),
            parameters={"precision": rng.choice(["fp32", "bf16"]), "loader_workers": rng.randrange(4)},
            micro_batch=rng.choice(sizes),
        )
        for number in range(count)
    ]


def main() -> None:
    """Write a run, read and draw it, print and save the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--trials", type=int, default=1_000)
    options = parser.parse_args()
    report = surroundings("matplotlib")
    rng = random.Random(0)
    trials = some_trials(options.trials, rng)
    best = max(trials, key=lambda one: one.samples_per_s or 0.0)
    tuning = Tuning(
        trials=len(trials),
        best=best.parameters,
        baseline_samples_per_s=trials[0].samples_per_s or 0.0,
        best_samples_per_s=best.samples_per_s or 0.0,
        study="made-up",
        history=trials,
    )
    training = Training(
        optimizer_steps=options.steps,
        samples=options.steps * 1024,
        samples_per_s=1e4,
        first_loss=2.0,
        final_loss=0.05,
        oom_recoveries=0,
        resumed_from=None,
        checkpoint=None,
        seconds=1e4,
    )
    device = CpuDevice(memory_budget="1GiB").describe()
    run = RunRecord(device=device, tuning=tuning, training=training)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "result.json").write_bytes(msgspec.json.encode(run))
        lines = [msgspec.json.encode(a_step(number, rng)) for number in range(1, options.steps + 1)]
        (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        start, cpu = time.perf_counter(), time.process_time()
        found = load_run(folder)
        read_s, read_cpu_s = time.perf_counter() - start, time.process_time() - cpu
        start, cpu = time.perf_counter(), time.process_time()
        page = write_report(folder / "report.html", found)
        draw_s, draw_cpu_s = time.perf_counter() - start, time.process_time() - cpu
        size = page.stat().st_size
    assert len(found.metrics) == options.steps
    report |= {"steps": options.steps, "trials": options.trials, "page_bytes": size}
    report |= {"read_s": read_s, "read_cpu_s": read_cpu_s, "draw_s": draw_s, "draw_cpu_s": draw_cpu_s}
    table = (
        "| steps, trials | read: wall, CPU | draw: wall, CPU | page |\n|---|---|---|---|\n"
        f"| {options.steps:,}, {options.trials:,} | {read_s:.1f} s, {read_cpu_s:.1f} s "
        f"| {draw_s:.1f} s, {draw_cpu_s:.1f} s | {size / 2**20:.1f} MiB |\n"
    )
    print(table + str(save("report-size", report, table)))


if __name__ == "__main__":
    main()
