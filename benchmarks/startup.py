"""Time of whole processes: the help, and the demo in an empty directory.

python -m benchmarks.startup
"""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import arguments, markdown, save

ROOT = Path(__file__).parents[1]
PROCESSES = {
    "python -c pass": (15, ["-c", "pass"]),
    "autobatch --help": (15, ["-m", "autobatch", "--help"]),
    "autobatch fit --help": (15, ["-m", "autobatch", "fit", "--help"]),
    "the demo": (1, ["-m", "autobatch", "fit", "--target-batch", "1024", "--quiet"]),
}
"""How often each process runs, and its arguments."""


def wall(words: list[str]) -> float:
    """Return the seconds of a process in an empty directory, without saved limits."""
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"AUTOBATCH_HOME": folder, "PYTHONPATH": str(ROOT)}
        start = time.perf_counter()
        command = [sys.executable, *words]
        subprocess.run(command, check=True, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def main() -> None:
    """Time each process, print and save the table."""
    options = arguments(__doc__, no_save=False)
    compileall.compile_dir(ROOT / "autobatch", quiet=1)  # as installers do
    times: dict[str, list[float]] = {}
    for number in range(15):
        for name, (often, words) in PROCESSES.items():
            if number < often:
                times.setdefault(name, []).append(wall(words))
    rows = [[name, f"{min(own):.3f}", f"{statistics.median(own):.3f}"] for name, own in times.items()]
    table = markdown(("process", "least, s", "median, s"), rows)
    print(table)
    if not options.no_save:
        print(save("startup", table))


if __name__ == "__main__":
    main()
