"""Bytes that a rank of real ones allocates under FSDP2, beside those that one process predicts.

    python -m benchmarks.ranks.shard_memory            # prints a table and writes benchmarks/results

Each workload trains three steps of one and of two micro-batches, over 2 and 4 ranks with gloo, with gradients
reduced after each micro-batch or once per step, in fp32 and bf16. The prediction runs on fake tensors in one
process, as rank 0 of a process group that exchanges nothing.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from benchmarks.report import RESULTS
from benchmarks.workloads import WORKLOADS
from tests.support.rank_server import RankServer, rank_server
from tests.support.sharded import Case, peak_bytes, predict, run_real

RESULT = RESULTS / "ranks-shard-memory_amd-epyc_2026-11-22.json"
WORLDS = (2, 4)
MICRO_BATCH = 3
SECONDS = 120.0


def real(name: str, case: Case) -> int:
    return peak_bytes(run_real(WORKLOADS[name](), case))


def predicted(name: str, case: Case, world: int) -> int:
    return peak_bytes(predict(WORKLOADS[name](), case, world))


def compare(server: RankServer, name: str) -> list[dict[str, Any]]:
    """Compare one workload in all ways; a way that the CPU cannot run is named with its error."""
    found = []
    for precision in ("fp32", "bf16"):
        for sync in ("each", "once"):
            for world in WORLDS:
                case = Case(MICRO_BATCH, sync, precision)  # type: ignore[arg-type]
                row: dict[str, Any] = {
                    "workload": name, "precision": precision, "sync": sync, "ranks": world
                }  # fmt: skip
                try:
                    row["real_bytes"] = server.values(real, name, case, world=world, seconds=SECONDS)[0]
                    (row["predicted_bytes"],) = server.values(
                        predicted, name, case, world, world=1, seconds=SECONDS
                    )
                except AssertionError as error:
                    row["error"] = str(error).strip().splitlines()[-1][:200]
                print(row, flush=True)
                found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(WORKLOADS)}; all if none is given")
    names = parser.parse_args().names
    rows: list[dict[str, Any]] = []
    with rank_server() as server:
        for name in names or WORKLOADS:
            rows += compare(server, name)
            ran = [row for row in rows if "predicted_bytes" in row]
            equal = sum(row["real_bytes"] == row["predicted_bytes"] for row in ran)
            result = {"torch": str(torch.__version__), "equal": equal, "compared": len(ran), "rows": rows}
            RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{equal} of {len(ran)} equal to the byte")


if __name__ == "__main__":
    main()
