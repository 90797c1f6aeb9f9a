"""Time of whole processes: the help, and the first and second run of the demo in an empty directory.

python -m benchmarks.startup
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import save, surroundings

ROUNDS = 15


def wall(command: list[str], *, folder: Path | None = None, home: Path | None = None) -> float:
    environ = dict(os.environ) | ({"AUTOBATCH_HOME": str(home)} if home else {})
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    argparse.ArgumentParser(description=str(__doc__).splitlines()[0]).parse_args()
    python = [sys.executable]
    program = [*python, "-m", "autobatch"]
    rows = []
    commands = {
        "python -c pass": [*python, "-c", "pass"],
        "autobatch --help": [*program, "--help"],
        "autobatch fit --help": [*program, "fit", "--help"],
    }
    for name, command in commands.items():
        times = [wall(command) for _ in range(ROUNDS)]
        rows.append({"what": name, "seconds": {"least": min(times), "median": statistics.median(times)}})
    fit = [*program, "fit", "--target-batch", "1024", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        for name in () if "--without-demo" in sys.argv else ("the demo, first run", "the demo, second run"):
            seconds = wall(fit, folder=Path(folder), home=home)
            rows.append({"what": name, "seconds": {"least": seconds, "median": seconds}})
    content = surroundings("optuna") | {"command": "python -m benchmarks.startup", "rows": rows}
    table = "| whole process | least, s | median, s |\n|---|---|---|\n" + "".join(
        f"| {row['what']} | {row['seconds']['least']:.3f} | {row['seconds']['median']:.3f} |\n"
        for row in rows
    )
    print(table)
    print(save("startup", content, table))


if __name__ == "__main__":
    main()
