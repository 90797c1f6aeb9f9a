"""Ranks that stop without a word: stopped processes, hosts that lose power, and links that are cut.

    python -m benchmarks.ranks.silence --stops 50 --cuts 20 --losses 20 --seed 1 [--save]

- A stop sends SIGSTOP to one of two ranks (``--ranks 2``) at a random instant of a run that writes a
  checkpoint after every step, and resumes the run afterwards.
- A cut lets all packets between two hosts vanish for longer than the timeout, and heals the link; torchrun
  starts the ranks again. If its launchers do not meet within 90 s, they are started anew. Each host is a
  network namespace of this machine with an address of its own.
- A loss kills all processes of the second host at once; then both hosts are started again with ``--resume``.

Counted are waits beyond the ``--collective-timeout`` of 5 s by more than 10 s, ends without a named cause,
checkpoints that were published and are lost, and runs whose final weights differ from those of an undisturbed
run in any bit. Cuts and losses need root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.ranks.kills import ROOT, WORKLOAD
from benchmarks.report import save, surroundings
from tests.support.hosts import INTERFACE, TwoHosts, torchrun, two_hosts

TIMEOUT_S = 5.0
TOLERANCE_S = 10.0
CAUSES = ("no sign of life", "lets the other ranks wait", "has not answered", "a rank ended", "got further")
NO_FAULTS = ("disturbed", "launchers started again")
FIT = (
    *("-m", "autobatch", "fit", "work.py", "--out", "run", "--target-batch", "14", "--memory-budget", "1GiB"),
    *("--max-micro-batch", "4", "--checkpoint-every", "1", "--trials", "0"),
    *("--collective-timeout", f"{TIMEOUT_S:g}"),
)


class Runs:
    """Runs of one training in a folder that something disturbs, and what was seen of them.

    Args:
        folder: empty.
        steps: of the training.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.found: Counter[str] = Counter()
        self.longest_s = 0.0
        (folder / "tmp").mkdir(parents=True)  # torchrun leaves folders there
        (folder / "work.py").write_text(WORKLOAD)
        (folder / "slow").touch()
        self.fit = (*FIT, "--steps", str(steps))
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "AUTOBATCH_HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
        }
        self._acknowledged = 0

    @property
    def newest(self) -> int:
        """Step of the newest published checkpoint; 0 for none."""
        names = (self.folder / "run" / "checkpoints").glob("step-" + "[0-9]" * 8)
        return max((int(path.name[5:]) for path in names), default=0)

    @property
    def resume(self) -> tuple[str, ...]:
        """The words that continue the run, if there is one."""
        return ("--resume",) if self.newest else ()

    def wait_for_step(self, after: int, seconds: float = 240.0) -> None:
        """Wait until a step after this one has a checkpoint."""
        self.wait_until(lambda: self.newest > after, seconds, "no checkpoint")

    def judge(self, survivors: Callable[[], bool], texts: list[Path]) -> None:
        """Wait for the end of the survivors, and count what does not hold.

        Args:
            survivors: returns whether some rank runs that nothing has disturbed.
            texts: files in which every survivor names the cause.
        """
        since = time.monotonic()
        while survivors() and time.monotonic() - since < 120:
            time.sleep(0.1)
        waited_s = time.monotonic() - since
        self.longest_s = max(self.longest_s, waited_s)
        self.found["disturbed"] += 1
        self.found["waits too long"] += waited_s > TIMEOUT_S + TOLERANCE_S
        self.found["without a cause"] += sum(not _names_cause(text) for text in texts)
        self.found["checkpoints lost"] += self.newest < self._acknowledged
        self._acknowledged = self.newest

    def wait_until(self, is_so: Callable[[], bool], seconds: float, failure: str) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{failure} within {seconds:g} s in {self.folder}")
            time.sleep(0.05)


def stop_ranks(folder: Path, number: int, steps: int, draw: random.Random) -> Runs:
    """Stop one of two ranks of a machine, as often as asked, and let the run end."""
    runs = Runs(folder, steps)
    for _ in range(number):
        before = runs.newest
        with (folder / "err").open("w") as err:
            command = [sys.executable, *runs.fit, "--ranks", "2", *runs.resume]
            process = subprocess.Popen(
                command, cwd=folder, env=runs.environ, stdout=subprocess.DEVNULL, stderr=err
            )
        if draw.random() < 0.8:
            runs.wait_for_step(before)
        else:  # at any instant of the start
            runs.wait_until(lambda: len(_children(process.pid)) == 2, 60, "no ranks")  # noqa: B023
            time.sleep(draw.uniform(5, 12))
        time.sleep(draw.uniform(0, 1))
        stopped, other = draw.sample(_children(process.pid), 2)
        os.kill(stopped, signal.SIGSTOP)
        runs.judge(lambda: process.poll() is None, [folder / "err"])  # noqa: B023
        if process.poll() is None:
            process.kill()
            os.kill(other, signal.SIGKILL)
            os.kill(stopped, signal.SIGKILL)
    (folder / "slow").unlink()
    subprocess.run(
        [sys.executable, *runs.fit, "--ranks", "2", *runs.resume], cwd=folder, env=runs.environ, check=True
    )
    return runs


def disturb_hosts(folder: Path, kind: str, number: int, steps: int, draw: random.Random) -> Runs:
    """Cut the link between two hosts, or end the second one, as often as asked, and let the run end."""
    runs = Runs(folder, steps)
    runs.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    with two_hosts() as hosts:
        processes = _start(hosts, runs, number)
        for _ in range(number):
            try:
                runs.wait_for_step(runs.newest, 90.0)
            except TimeoutError:
                # The launchers did not meet again by themselves: a job scheduler starts them anew.
                runs.found["launchers started again"] += 1
                processes = _start_again(hosts, runs, processes, number)
                runs.wait_for_step(runs.newest)
            time.sleep(draw.uniform(0, 1))
            texts = [folder / f"host{host}.err" for host in range(2)]
            for text in texts:
                text.write_text("")
            if kind == "cut":
                hosts.cut()
                runs.judge(lambda: any(hosts.ranks(host) for host in range(2)), texts)
                time.sleep(draw.uniform(0, 3))
                hosts.heal()
            else:
                hosts.kill(1)
                runs.judge(lambda: bool(hosts.ranks(0)), texts[:1])
                processes = _start_again(hosts, runs, processes, number)
        (folder / "slow").unlink()
        codes = [process.wait(600) for process in processes]
    runs.found["other exit codes"] += sum(map(bool, codes))
    return runs


def _start(hosts: TwoHosts, runs: Runs, restarts: int) -> list[subprocess.Popen[str]]:
    words = (*runs.fit, *runs.resume)
    return [
        hosts.start(host, torchrun(host, *words, restarts=restarts), runs.folder, runs.environ)
        for host in range(2)
    ]


def _start_again(
    hosts: TwoHosts, runs: Runs, processes: list[subprocess.Popen[str]], restarts: int
) -> list[subprocess.Popen[str]]:
    """End all processes of both hosts, and start the run again from its newest checkpoint."""
    for host, process in enumerate(processes):
        hosts.kill(host)
        process.wait()
    return _start(hosts, runs, restarts)


def _names_cause(text: Path) -> bool:
    content = text.read_text()
    return any(cause in content for cause in CAUSES)


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> int:
    """Disturb the runs, print the counts, and return 1 if something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    given = parser.parse_args()
    content, draw, table = surroundings(), random.Random(given.seed), ""
    root = Path(tempfile.mkdtemp(prefix="silence-"))
    faulty = 0
    try:
        for kind, number in (("stop", given.stops), ("cut", given.cuts), ("loss", given.losses)):
            if not number:
                continue
            steps = 60 * (number + 2)
            runs = (
                stop_ranks(root / kind, number, steps, draw)
                if kind == "stop"
                else disturb_hosts(root / kind, kind, number, steps, draw)
            )
            whole = Runs(root / f"whole-{kind}", steps)
            (whole.folder / "slow").unlink()
            command = [sys.executable, *whole.fit, "--ranks", "2"]
            subprocess.run(command, cwd=whole.folder, env=whole.environ, check=True)
            weights = [(one.folder / "run" / "model.safetensors").read_bytes() for one in (whole, runs)]
            runs.found["runs with other bits"] += weights[0] != weights[1]
            counts = {**runs.found, "longest wait in s": round(runs.longest_s, 1)}
            content[kind] = counts
            line = f"- {kind}: " + ", ".join(f"{name} {value}" for name, value in counts.items())
            print(line, flush=True)
            table += line + "\n"
            faulty += sum(value for name, value in runs.found.items() if name not in NO_FAULTS)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if given.save:
        save("ranks-silence", content | {"options": vars(given)}, table)
    print(json.dumps({"faults": faulty}))
    return int(faulty > 0)


if __name__ == "__main__":
    raise SystemExit(main())
