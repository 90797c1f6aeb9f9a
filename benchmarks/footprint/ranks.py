"""The largest micro-batch of a rank: large models on 1, 8 and 64 GPUs of three kinds, with none of them here.

    python -m benchmarks.footprint.ranks            # prints a table and writes benchmarks/results

Each model is estimated in a process of its own, in bf16 with AdamW and no activation checkpointing: on one
GPU as it is, and on more of them with FSDP2. The seconds are those of this process and its children.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from autobatch.device.profiles import load_profile
from autobatch.estimates.estimator import Estimator
from benchmarks.footprint.decoders import MODELS, large
from benchmarks.report import RESULTS, markdown
from tests.support.options import as_options

RESULT = RESULTS / "footprint-ranks_amd-epyc_2026-11-22.json"
GPUS = {"a100-40gb": "A100 40", "h100-80gb": "H100 80", "h200": "H200 141"}
"""Profiles, and what the table calls them."""
WORLDS = (1, 8, 64)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the copies that trace in it."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def estimate(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    wall, before = time.perf_counter(), cpu_seconds()
    home = Path("nowhere")
    alone = as_options("estimate", profile=[*GPUS], precision="bf16")
    gpus = [load_profile(gpu, user_dir=Path("nowhere")) for gpu in GPUS]
    cells: dict[str, dict[str, int]] = {}
    seconds: dict[str, float] = {}
    shared = Estimator(large(name), alone.with_values(ranks=8, parallel="shard"), home)
    for world in WORLDS:
        start = cpu_seconds()
        one = Estimator(shared.traces.workload, alone, home) if world == 1 else shared
        layout = one.layout("replicate" if world == 1 else "shard", world)
        cells[str(world)] = {gpu.name: one.peak(gpu, layout)[0] for gpu in gpus}
        seconds[str(world)] = round(cpu_seconds() - start, 1)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in shared.traces.model.parameters()),
        "micro_batch": cells,
        "cpu_seconds": seconds,
        "all_cpu_seconds": round(cpu_seconds() - before, 1),
        "wall_seconds": round(time.perf_counter() - wall, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Write the table: a row per model, a column per number and kind of GPUs."""
    heads = [f"{world} × {name}" for world in WORLDS for name in GPUS.values()]
    return markdown(
        ("model", *heads, "seconds"),
        [
            (
                row["model"],
                *(row["micro_batch"][str(world)][gpu] or "–" for world in WORLDS for gpu in GPUS),
                f"{row['all_cpu_seconds']:.0f}",
            )
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}; all if none is given")
    parser.add_argument("--one", metavar="NAME", help="estimate one model in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(estimate(options.one)))
        return
    rows = []
    for name in options.names or MODELS:
        command = [sys.executable, "-m", "benchmarks.footprint.ranks", "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
        result = {"torch": str(torch.__version__), "length": 2048, "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
