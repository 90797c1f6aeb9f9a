"""Limits found on a GPU made of arithmetic, whose libraries take scratch memory beside a traced step.

    python -m benchmarks.probe.scratch [--budgets 8 16 40 80] [--models gpt-124m] [--out DIR]

No GPU and no memory is needed: `benchmarks.probe.libraries` has the rules. Tracing takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autobatch import Workload
from autobatch.core.units import GiB
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.probing.estimates.traces import on_meta
from autobatch.search.limits import ReplayPredictor, first_size
from autobatch.search.search import search
from autobatch.workload.data import WorstCaseSampler
from benchmarks.gpu.models import MODELS, workload
from benchmarks.probe.libraries import Libraries, SimulatedGpu, both_orders
from benchmarks.probe.run import RESULTS, environment

CAP = 1 << 22
CAPABILITY = (9, 0)
ROWS, EMBEDDING_WIDTH, WORDS = 200_000, 128, 64
LIBRARIES = {
    "no scratch": Libraries(on=False),
    "scratch, workspaces that last (torch 2.11 to 2.14)": Libraries(),
    "scratch, a workspace at each product (torch 2.15)": Libraries(lasting_workspaces=False),
}


class Tower(nn.Module):
    """A wide embedding below a small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, EMBEDDING_WIDTH)
        self.head = nn.Sequential(nn.Linear(EMBEDDING_WIDTH, 1024), nn.GELU(), nn.Linear(1024, 10))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rows(ids).mean(dim=1))


def embedding() -> Workload:
    samples = [(torch.randint(ROWS, (WORDS,)), torch.tensor(number % 10)) for number in range(16)]
    return workload("embedding", Tower, samples)


CASES = {"gpt-124m": MODELS["gpt-124m"], "resnet-50": MODELS["resnet-50"], "embedding": embedding}


def measure(gpu: SimulatedGpu) -> dict[str, Any]:
    """Search for a limit, and compare it with the arithmetic."""
    predictor = ReplayPredictor(gpu.new_allocator, first_size=first_size(CAPABILITY))
    found = search(gpu.run, cap=CAP, predictor=predictor)
    runs = len(gpu.asked)
    answer = found.micro_batch
    fits = bool(answer) and gpu.outcome(answer).attempt.fits
    return {
        "budget_gib": gpu.budget // GiB,
        "found": answer,
        "exact": fits and not gpu.outcome(answer + 1).attempt.fits,
        "upper_bound_by": found.upper_bound_by,
        "runs": runs,
        "ooms": sum(not one.fits for one in found.attempts),
        "sizes": [one.micro_batch for one in found.attempts],
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the runs and errors of all rows, in one cell each of a table."""
    runs, ooms = [row["runs"] for row in rows], [row["ooms"] for row in rows]
    return (
        f"{sum(row['exact'] for row in rows)} of {len(rows)} | "
        f"{statistics.median(runs):g}, {max(runs)} | {statistics.median(ooms):g}, {max(ooms)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=range(8, 81, 3), help="GiB")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in options.models:
        given = CASES[name]()
        setting = Setting(
            workload=given,
            model=on_meta(given)[0],
            batch_of=WorstCaseSampler(given).batch,
            precision="bf16",
            capability=CAPABILITY,
        )
        orders = both_orders(setting)
        for kind, libraries in LIBRARIES.items():
            rows = [measure(SimulatedGpu(orders, budget * GiB, libraries)) for budget in options.budgets]
            results.setdefault(kind, {})[name] = rows
            print(f"{name} | {kind} | {summary(rows)}", flush=True)
    for kind, by_model in results.items():
        print(f"all | {kind} | {summary([row for rows in by_model.values() for row in rows])}")
    about = environment() | {"command": "python -m benchmarks.probe.scratch"}
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"scratch_{about['date']}.json"
    file.write_text(json.dumps({"environment": about, "limits": results}) + "\n")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
