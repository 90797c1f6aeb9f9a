"""The CPU time of a probe, against importing, building and one confirming run of the same workload.

    python -m benchmarks.probe.cost [--names hf_llama,hf_t5]

CPU seconds are those of all processes of a command, which are counted as they are reaped (Linux). The first
probe has an empty data directory, the second finds the limit saved by the first.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.report import save, surroundings

PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphans become children of this process, so that their time is counted."""
DEVICE = "sim:t4"


def tree_seconds(command: list[str], environment: dict[str, str]) -> tuple[float, bytes]:
    """Run a command, and return the CPU seconds of all its processes and its output."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        environment = {**os.environ, **environment}
        done = subprocess.run(
            command, check=False, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        with os.fdopen(writing, "w") as file:
            json.dump([used.ru_utime + used.ru_stime, done.returncode, done.stdout.decode()], file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        seconds, code, output = json.load(file)
    os.waitpid(child, 0)
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {code}: {output[-500:]}")
    return seconds, output.encode()


def reference(name: str, micro_batch: int) -> None:
    """Import, build, and run one attempt at a size."""
    from autobatch.core.options import Options
    from autobatch.setup.attempt import attempt
    from autobatch.setup.setup import open_setup
    from benchmarks.probe.library_models import MODELS

    budget, make = MODELS[name]
    setup = open_setup(make(), Options().with_values(device=DEVICE, memory_budget=budget))
    outcome = attempt(setup, micro_batch).attempt
    assert outcome.fits, outcome


def measure(name: str, budget: str) -> dict[str, Any]:
    """Return the CPU seconds of both probes and of the reference."""
    with tempfile.TemporaryDirectory() as home:
        probe = [sys.executable, "-m", "autobatch", "probe", "--json", "--device", DEVICE]
        probe += ["--memory-budget", budget, f"benchmarks.probe.library_models:{name.replace('-', '_')}"]
        first, output = tree_seconds(probe, {"AUTOBATCH_HOME": home})
        second, _ = tree_seconds(probe, {"AUTOBATCH_HOME": home})
    found = json.loads(output)["probe"]
    size = found["micro_batch"]
    alone, _ = tree_seconds(
        [sys.executable, "-m", "benchmarks.probe.cost", "--reference", name, str(size)], {}
    )
    return {
        "name": name,
        "micro_batch": size,
        "runs": len(found["attempts"]),
        "reference_s": round(alone, 2),
        "first_s": round(first, 2),
        "second_s": round(second, 2),
        "first_ratio": round(first / alone, 2),
        "second_ratio": round(second / alone, 2),
    }


def main() -> None:
    """Measure each workload, print and save the table."""
    from benchmarks.probe.library_models import MODELS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", default=",".join(MODELS))
    parser.add_argument("--reference", nargs=2)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    if options.reference:
        reference(options.reference[0], int(options.reference[1]))
        return
    report = surroundings("transformers")
    lines = [
        "| workload | micro-batch, runs | import, build, one run | first probe | second probe |",
        "|---|---|---|---|---|",
    ]
    report["results"] = []
    for name in options.names.split(","):
        one = measure(name, MODELS[name][0])
        report["results"].append(one)
        lines.append(
            f"| {name} | {one['micro_batch']}, {one['runs']} | {one['reference_s']} CPU s "
            f"| {one['first_s']} CPU s ({one['first_ratio']}) "
            f"| {one['second_s']} CPU s ({one['second_ratio']}) |"
        )
        print(lines[-1], flush=True)
    report["load_after"] = os.getloadavg()[0]
    if not options.no_save:
        print(save("probe-cost", report, "\n".join(lines) + "\n"))


if __name__ == "__main__":
    main()
