"""The limits that a probe finds on a GPU, against a plain loop of torch in processes of its own.

    python -m tests.stub_gpu -- python -m benchmarks.gpu.limits --out benchmarks/results/limits_stub.csv

A limit m is exact if the plain loop runs at m and not at m + 1, under the same cap. The loop uses nothing of
autobatch. Each probe and each loop has a process of its own, so that no memory is left from another. Results
are added to the file, and what it has for this version of torch is not measured again.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.workloads import CASES
from benchmarks.plain_loop import STEPS, costliest, train
from benchmarks.report import arguments, markdown

MIB = 1 << 20
NO_ENGINE = "unable to find an engine"
"""What cuDNN says if it has no memory for the workspace of any plan."""


def probe(name: str, budget_mib: int) -> dict[str, Any]:
    """Find the limit of a case, as a user does."""
    import autobatch

    case = CASES[name]
    start = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as home:
        os.environ["AUTOBATCH_HOME"] = home  # no limit is saved, and none is known
        found = autobatch.probe(
            case.make(), device="cuda", memory_budget=budget_mib * MIB, progress=False, **case.options
        )
    return {
        "found": found.micro_batch,
        "limited_by": found.limited_by,
        "upper_bound_by": found.upper_bound_by,
        "runs": len(found.attempts),
        "errors": sum(not one.fits for one in found.attempts),
        "sizes": [one.micro_batch for one in found.attempts],
        "seconds": round(time.perf_counter() - start[0], 1),
        "cpu_seconds": round(time.process_time() - start[1], 1),
    }


def estimate(name: str, micro_batch: int) -> dict[str, Any]:
    """Predict the peaks of a micro-batch, without a GPU. Return nothing if they follow no rule."""
    import autobatch

    case = CASES[name]
    options = {"profile": ["h100-80gb"], "micro_batch": micro_batch, **case.options}
    try:
        found = autobatch.estimate(case.make(), **options)
    except autobatch.AutobatchError:
        return {}
    one = found.estimates[0]
    return {"allocated_bytes": one.peak_allocated_bytes, "reserved_bytes": one.peak_reserved_bytes}


def loop(name: str, budget_mib: int, micro_batch: int) -> dict[str, Any]:
    """Train a few steps in a plain loop under a cap. A step that had to empty the cache does not fit."""
    found: dict[str, Any] = {}
    for steps in STEPS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            train_within(name, budget_mib, micro_batch, steps)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and NO_ENGINE not in str(error):
                raise
            return {"fits": False}
        statistics = torch.cuda.memory_stats()
        if statistics["num_alloc_retries"]:
            return {"fits": False}
        found = found or {
            "fits": True,
            "allocated_bytes": statistics["allocated_bytes.all.peak"],
            "reserved_bytes": statistics["reserved_bytes.all.peak"],
        }
        torch._C._cuda_clearCublasWorkspaces()
    return found


def train_within(name: str, budget_mib: int, micro_batch: int, steps: tuple[int, ...]) -> None:
    """Run optimizer steps of so many micro-batches each, on the costliest samples."""
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(budget_mib * MIB / total)
    case = CASES[name]
    work = case.make()
    model = work.model().to(device).train()
    optimizer = work.optimizer(model.parameters(), work.learning_rate)
    train(
        model, optimizer, work.loss, lambda: moved(costliest(work, micro_batch), device), steps,
        device_type=device.type, precision=case.options["precision"],
    )  # fmt: skip


def moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, dict):
        return {name: one.to(device) for name, one in batch.items()}
    return [one.to(device) for one in batch]


def measure(name: str, budget_mib: int) -> dict[str, Any]:
    """Measure a limit and the truth around it."""
    row: dict[str, Any] = {"workload": name, "budget_mib": budget_mib, "torch": str(torch.__version__)}
    row |= alone(probe, name, budget_mib)
    here, above = (alone(loop, name, budget_mib, row["found"] + more) for more in (0, 1))
    row |= {"loop": here, "next_fits": above["fits"], "exact": here["fits"] and not above["fits"]}
    if predicted := alone(estimate, name, row["found"]):
        row["estimate"] = predicted
    return row


def alone(function: Any, *arguments: Any) -> dict[str, Any]:
    """Call a function in a new process, which has imported torch and no more."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["benchmarks.gpu.limits", "autobatch.api.library", "torch._dynamo", "transformers"]
    )
    # Attempts collect garbage: of what they made themselves.
    with ProcessPoolExecutor(1, mp_context=context, initializer=gc.freeze) as pool:
        found: dict[str, Any] = pool.submit(function, *arguments).result()
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a table with one line per version of torch."""
    lines = []
    for version in sorted({row["torch"] for row in rows}):
        own = [row for row in rows if row["torch"] == version]
        counts = [[row[name] for row in own] for name in ("runs", "errors")]
        cells = [version, len(own), sum(row["exact"] for row in own)]
        cells += [f"{statistics.median(some):g}, {max(some)}" for some in counts]
        for kind in ("allocated_bytes", "reserved_bytes"):
            known = [row for row in own if "estimate" in row and row["loop"]["fits"]]
            ratios = [row["estimate"][kind] / row["loop"][kind] for row in known]
            cells.append(f"{statistics.median(ratios):.4f} ({min(ratios):.3f} to {max(ratios):.3f})")
        lines.append(cells)
    head = ("torch", "limits", "exact", "runs: median, most", "errors: median, most")
    return markdown((*head, "allocated ÷", "reserved ÷"), lines)


def main() -> None:
    options = arguments(__doc__, out=Path("limits.json"), only=[*CASES], seconds=1e9)
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(row["workload"], row["budget_mib"]) for row in rows if row["torch"] == torch.__version__}
    start = time.perf_counter()
    for name in options.only:
        for budget_mib in CASES[name].budgets_mib:
            if (name, budget_mib) in done or time.perf_counter() - start > options.seconds:
                continue
            print(name, budget_mib, "MiB", end=" ", flush=True)
            try:
                rows.append(measure(name, budget_mib))
            except Exception as error:  # the other limits are measured all the same
                print(f"{type(error).__name__}: {error}"[:400], flush=True)
                continue
            options.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
            print(*(f"{key} {rows[-1][key]}" for key in ("found", "exact", "runs")), flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
