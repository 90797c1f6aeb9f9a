"""Ranks that stop without a word or are killed, hosts that lose power, and links that are cut.

    python -m benchmarks.ranks.silence --stops 50 --cuts 20 --losses 20 --kills 100 [--timeout 30] [--save]
    python -m benchmarks.ranks.silence --restarts 10 --seed 1 --parallel shard [--save]

- A stop sends SIGSTOP to one of two ranks (``--ranks 2``) at a random instant of a run that validates and
  writes a checkpoint after every step, or of its start, and resumes the run afterwards; or of the tuning of
  another run.
- A cut lets all packets between two hosts vanish for longer than the timeout, half of the time for so long
  that torchrun takes a host for dead, and heals the link; torchrun starts the ranks again. Each host is a
  network namespace of this machine with an address of its own.
- A loss kills all processes of a host at once; then both hosts are started again with ``--resume``.
- A kill sends SIGKILL to a random rank, which torchrun starts again, or to a launcher or all processes of a
  random host, after which both hosts are started again; a third of them come at any instant of a start.
- A restart sends SIGKILL to a random rank of one machine under ``torchrun --max-restarts``: half of them come
  at any instant after a start, half while batches are trained and checkpoints written.

Counted are waits beyond the ``--collective-timeout`` by more than 10 s, ends in the training without a
named cause, checkpoints that were published and are lost, and runs whose final weights differ from those of
an undisturbed run in any bit. Two hosts need root. With ``--save``, each kind and seed is a part of the
file of results, so a long run may be taken in pieces.
"""

from __future__ import annotations

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
from typing import Any

from benchmarks.report import RESULTS, arguments, surroundings
from tests.support.hosts import INTERFACE, TwoHosts, torchrun, two_hosts

ROOT = Path(__file__).parents[2]
TOLERANCE_S = 10.0
WORKLOAD = """
import pathlib, time, torch
from torch.nn.functional import cross_entropy
import autobatch
from tests.support.training import points

def loss(model, batch):
    if pathlib.Path("slow").exists():
        time.sleep(0.02)
    return cross_entropy(model(batch[0]), batch[1])

def workload():
    return autobatch.Workload(
        model=lambda: torch.nn.Sequential(
            torch.nn.Linear(5, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 3)
        ).double(),
        train_data=points(64), validation_data=points(16), loss=loss, learning_rate=0.01,
        optimizer=lambda params, rate: torch.optim.AdamW(params, lr=rate),
    )
"""
STEPS = {"replicate": 120, "shard": 30}
"""Steps for each restart; a sharded checkpoint after every step takes longer."""
RESULT = RESULTS / "ranks-silence_amd-epyc_2026-11-23.json"
CAUSES = (
    *("no sign of life", "lets the other ranks wait", "has not answered", "a rank ended", "got further"),
    *("is gone", "C10d store has failed", "stopped after step"),
)
FAULTS = ("waits too long", "without a cause", "checkpoints lost", "other exit codes", "other bits")
FIT = (
    *("-m", "autobatch", "fit", "work.py", "--out", "run", "--target-batch", "14", "--memory-budget", "1GiB"),
    *("--max-micro-batch", "4", "--checkpoint-every", "1", "--validate-every", "1", "--trials", "0"),
    "--collective-timeout",
)


class Runs:
    """Runs of one training in a folder that something disturbs, and what was seen of them.

    Args:
        folder: empty.
        steps: of the training.
        timeout_s: its ``--collective-timeout`` in seconds.
        parallel: as the option.
    """

    def __init__(self, folder: Path, steps: int, timeout_s: float = 5, parallel: str = "replicate") -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self.found = Counter(dict.fromkeys(FAULTS, 0))
        self.seen: list[dict[str, Any]] = []
        """What was done, how long the others waited in seconds, and the load of the machine."""
        (folder / "tmp").mkdir(parents=True)  # torchrun leaves folders there
        (folder / "work.py").write_text(WORKLOAD)
        (folder / "slow").touch()
        self.fit = (*FIT, f"{timeout_s:g}", "--steps", str(steps), "--parallel", parallel)
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

    def wait_for_step(self, after: int, seconds: float = 600.0) -> None:
        """Wait until a step after this one has a checkpoint."""
        self.wait_until(lambda: self.newest > after, seconds, "no checkpoint")

    def judge(self, what: str, survivors: Callable[[], bool], texts: list[Path]) -> None:
        """Wait for the end of the survivors, and count what does not hold.

        Args:
            what: the disturbance.
            survivors: returns whether some rank runs that nothing has disturbed.
            texts: files in which every survivor names the cause.
        """
        since = time.monotonic()
        while survivors() and time.monotonic() - since < self.timeout_s + 90:
            time.sleep(0.1)
        waited_s = time.monotonic() - since
        found = {
            "waits too long": waited_s > self.timeout_s + TOLERANCE_S,
            "without a cause": sum(not _names_cause(text) for text in texts),
            "checkpoints lost": self.newest < self._acknowledged,
        }
        self._acknowledged = self.newest
        self.found.update(found)
        seen = {"what": what, "waited_s": round(waited_s, 1), "load": round(os.getloadavg()[0], 1)}
        self.seen.append(seen)
        print(json.dumps(seen | {name: value for name, value in found.items() if value}), flush=True)
        for text in texts:
            if not _names_cause(text):
                print(text.read_text()[-3000:], flush=True)

    def wait_until(self, is_so: Callable[[], bool], seconds: float, failure: str) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{failure} within {seconds:g} s in {self.folder}")
            time.sleep(0.05)


def stop_ranks(runs: Runs, number: int, draw: random.Random) -> Runs:
    """Stop one of two ranks of a machine, as often as asked, and let the run end."""
    folder = runs.folder
    for index in range(number):
        before, err = runs.newest, folder / "err"
        when = draw.choice((*["step"] * 6, *["start"] * 3, "tuning"))
        words = ("--out", f"tuned-{index}", "--trials", "30") if when == "tuning" else runs.resume
        with err.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *runs.fit, "--ranks", "2", *words],
                cwd=folder,
                env=runs.environ,
                stdout=file,
                stderr=file,
            )
        if when == "step":
            runs.wait_for_step(before)
        elif when == "tuning":
            runs.wait_until(lambda: "trial" in err.read_text(), 600, "no trial")  # noqa: B023
        else:  # at any instant after the ranks have met
            runs.wait_until(lambda: err.stat().st_size > 0, 600, "no rank")  # noqa: B023
            time.sleep(draw.uniform(0, 7))
        time.sleep(draw.uniform(0, 1))
        stopped, other = draw.sample(_children(process.pid), 2)
        os.kill(stopped, signal.SIGSTOP)
        runs.judge(f"stop in {when}", lambda: process.poll() is None, [err])  # noqa: B023
        if process.poll() is None:
            process.kill()
            os.kill(other, signal.SIGKILL)
            os.kill(stopped, signal.SIGKILL)
    (folder / "slow").unlink()
    subprocess.run(
        [sys.executable, *runs.fit, "--ranks", "2", *runs.resume], cwd=folder, env=runs.environ, check=True
    )
    return runs


def restart_ranks(runs: Runs, number: int, draw: random.Random) -> Runs:
    """Kill one of two ranks of a machine, which torchrun starts again, as often as asked."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts")
    command = [sys.executable, *torchrun, str(number), *runs.fit]
    killed = set[int]()
    with (runs.folder / "err").open("w") as file:
        process = subprocess.Popen(command, cwd=runs.folder, env=runs.environ, stdout=file, stderr=file)
    for index in range(number):
        runs.wait_until(
            lambda: process.poll() is not None or len({*_children(process.pid)} - killed) == 2,  # noqa: B023
            600,
            "no ranks",
        )
        if index % 2:
            time.sleep(draw.uniform(0, 15))
        else:
            runs.wait_for_step(runs.newest)
            time.sleep(draw.uniform(0, 1))
        ranks = _children(process.pid) if process.poll() is None else []
        if len(ranks) < 2:
            break
        rank = draw.randrange(2)
        killed = {*ranks}
        os.kill(ranks[rank], signal.SIGKILL)
        runs.judge(f"rank {rank}", lambda: ranks[1 - rank] in _children(process.pid), [])  # noqa: B023
    (runs.folder / "slow").unlink()
    runs.found["other exit codes"] += process.wait(300) != 0
    return runs


def disturb_hosts(runs: Runs, kind: str, number: int, draw: random.Random) -> Runs:
    """Disturb two hosts in one way, as often as asked, and let the run end."""
    folder = runs.folder
    runs.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    texts = [folder / f"host{host}.err" for host in range(2)]
    with two_hosts() as hosts:
        processes = _start(hosts, runs)
        for _ in range(number):
            is_early = kind == "kill" and draw.random() < 1 / 3
            if is_early:
                time.sleep(draw.uniform(0, 12))
            else:
                runs.wait_for_step(runs.newest)
                time.sleep(draw.uniform(0, 1))
            for text in texts:
                text.write_text("")
            if kind == "cut":
                hosts.cut()
                runs.judge(kind, lambda: any(hosts.ranks(host) for host in range(2)), texts)
                time.sleep(draw.choice((draw.uniform(0, 3), draw.uniform(12, 25))))
                hosts.heal()
                continue
            what, host = draw.choice(("rank", "rank", "launcher", "host")), draw.randrange(2)
            what = "host" if kind == "loss" else what
            if what == "rank":
                runs.wait_until(lambda: bool(hosts.ranks(host)), 600, "no rank")  # noqa: B023
            others = [1 - host]
            if what == "launcher":  # the second one takes nothing with it: its host ends when it starts again
                others = [] if host else [0, 1]
            left = {rank for other in others for rank in hosts.ranks(other)}
            if what == "host":
                hosts.kill(host)
            else:
                os.kill(hosts.ranks(host)[0] if what == "rank" else processes[host].pid, signal.SIGKILL)
            runs.judge(
                f"{what} {host}{' in the start' if is_early else ''}",
                lambda: any(left & {*hosts.ranks(other)} for other in others),  # noqa: B023
                [] if is_early else [texts[other] for other in others],
            )
            if what != "rank":
                processes = _start_again(hosts, runs, processes)
        (folder / "slow").unlink()
        codes = [process.wait(600) for process in processes]
    runs.found["other exit codes"] += sum(map(bool, codes))
    return runs


def _start(hosts: TwoHosts, runs: Runs) -> list[subprocess.Popen[str]]:
    words = (*runs.fit, *runs.resume)
    return [
        hosts.start(host, torchrun(*words, restarts=1000), runs.folder, runs.environ) for host in range(2)
    ]


def _start_again(
    hosts: TwoHosts, runs: Runs, processes: list[subprocess.Popen[str]]
) -> list[subprocess.Popen[str]]:
    """End all processes of both hosts, and start the run again from its newest checkpoint."""
    for host, process in enumerate(processes):
        hosts.kill(host)
        process.wait()
    return _start(hosts, runs)


def _names_cause(text: Path) -> bool:
    content = text.read_text()
    return any(cause in content for cause in CAUSES)


def _children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def main() -> int:
    """Disturb the runs, print the counts, and return 1 if something did not hold."""
    given = arguments(
        __doc__, stops=50, cuts=20, losses=20, kills=100, restarts=0, seed=1, timeout=5.0,
        parallel="replicate", save=False,
    )  # fmt: skip
    faults = 0
    numbers = {
        "stop": given.stops, "cut": given.cuts, "loss": given.losses, "kill": given.kills,
        "restart": given.restarts,
    }  # fmt: skip
    for kind, number in numbers.items():
        if number:
            part = measure(kind, number, given.seed, given.timeout, given.parallel)
            faults += sum(part["found"].values())
            shown = {name: part[name] for name in ("kind", "number", "found", "longest_s")}
            print(json.dumps(shown), flush=True)
            if given.save:
                add(part)
    print(json.dumps({"faults": faults}))
    return int(faults > 0)


def measure(kind: str, number: int, seed: int, timeout_s: float, parallel: str) -> dict[str, Any]:
    """Disturb a run in one way, compare it with an undisturbed one, and return what was seen."""
    root, draw, before = Path(tempfile.mkdtemp(prefix="silence-")), random.Random(seed), surroundings()
    steps = STEPS[parallel] * number if kind == "restart" else 20 * (number + 2)
    runs, whole = (Runs(root / name, steps, timeout_s, parallel) for name in (kind, "whole"))
    try:
        if kind == "stop":
            stop_ranks(runs, number, draw)
        elif kind == "restart":
            restart_ranks(runs, number, draw)
        else:
            disturb_hosts(runs, kind, number, draw)
        (whole.folder / "slow").unlink()
        command = [sys.executable, *whole.fit, "--ranks", "2"]
        subprocess.run(command, cwd=whole.folder, env=whole.environ, check=True)
        weights = [(one.folder / "run" / "model.safetensors").read_bytes() for one in (whole, runs)]
        runs.found["other bits"] += weights[0] != weights[1]
        longest_s = max((seen["waited_s"] for seen in runs.seen), default=0.0)
    except BaseException:
        print(f"the folder of the run is {root}", file=sys.stderr)
        raise
    shutil.rmtree(root, ignore_errors=True)
    kind = kind if parallel == "replicate" else f"{kind}, {parallel}"
    part = {"kind": kind, "seed": seed, "number": number, "timeout_s": timeout_s, "found": runs.found}
    return part | {"longest_s": longest_s, "seen": runs.seen, "surroundings": before}


def add(part: dict[str, Any]) -> None:
    """Add a part to the file of results, in place of one of the same kind and seed."""
    parts = json.loads(RESULT.read_text())["parts"] if RESULT.exists() else []
    parts = [one for one in parts if (one["kind"], one["seed"]) != (part["kind"], part["seed"])] + [part]
    content = {}
    for kind in dict.fromkeys(one["kind"] for one in parts):
        own = [one for one in parts if one["kind"] == kind]
        found: Counter[str] = sum((Counter(one["found"]) for one in own), Counter())
        content[kind] = {
            "number": sum(one["number"] for one in own),
            **{name: found[name] for name in FAULTS},
            "longest_s": max(one["longest_s"] for one in own),
            "beyond_the_timeout_s": round(max(one["longest_s"] - one["timeout_s"] for one in own), 1),
        }
    RESULT.write_text(json.dumps({**content, "parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
