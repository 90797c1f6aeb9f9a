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

from benchmarks.report import markdown, save, surroundings

ROUNDS = 15


def wall(command: list[str], *, folder: Path | None = None, home: Path | None = None) -> float:
    environ = dict(os.environ) | ({"AUTOBATCH_HOME": str(home)} if home else {})
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Time each process, print and save the table."""
    argparse.ArgumentParser(description=str(__doc__).splitlines()[0]).parse_args()
    program = [sys.executable, "-m", "autobatch"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "autobatch --help": [*program, "--help"],
        "autobatch fit --help": [*program, "fit", "--help"],
    }
    times = {name: [wall(command) for _ in range(ROUNDS)] for name, command in commands.items()}
    fit = [*program, "fit", "--target-batch", "1024", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        for which in ("first", "second"):
            times[f"the demo, {which} run"] = [wall(fit, folder=Path(folder), home=Path(folder) / "home")]
    table = markdown(
        ("whole process", "least, s", "median, s"),
        [[name, f"{min(own):.3f}", f"{statistics.median(own):.3f}"] for name, own in times.items()],
    )
    print(table)
    print(save("startup", surroundings("optuna") | {"seconds": times}, table))


if __name__ == "__main__":
    main()
