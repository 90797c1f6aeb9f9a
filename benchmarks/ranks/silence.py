"""Ranks that are killed, stopped or hang, at any instant of a training.

    python -m benchmarks.ranks.silence [--ranks 3] [--tries 10] [--timeout 5] [--kinds kill stop hang]
    python -m benchmarks.ranks.silence --hosts 2 [--ranks 2] …

With ``--hosts``, which needs root, each host is a network namespace; all have one disk. A rank that is
stopped there stays, because its launcher does not learn of it. Each try disturbs one run in one way, and the
next one resumes it:

    kill      SIGKILL to a random rank                  save      a save of rank 0 that takes three timeouts
    stop      SIGSTOP to a random rank                  term      SIGTERM to the launcher
    hang      the main thread of a random rank          launcher  SIGKILL to the launcher
    freeze    SIGSTOP to rank 0 in such a save          cut       the last host from the others

Printed are, for each try, the seconds until the ranks that nothing disturbed were gone, and until a disturbed
one was, whether a line named it, and whether a checkpoint was lost; then a table of them by kind. At the end,
the weights of the run are compared with those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, markdown

STEPS_OF_TRY, CHECKPOINT_EVERY = 200, 5
UNDISTURBED_S, STOPPED_S = 10, 40
"""Seconds after the timeout."""
OF_RANK = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "freeze": signal.SIGSTOP}
OF_LAUNCHER = {"term": signal.SIGTERM, "launcher": signal.SIGKILL}
WORKLOAD = """
import os, pathlib, time, torch
from torch.nn.functional import cross_entropy
import autobatch
from tests.support.training import points

RANK, HERE = os.environ.get("RANK", "0"), pathlib.Path(__file__).parent
fsync = os.fsync

def slow_fsync(file):
    if RANK == "0" and (HERE / "slow-save").exists():
        (HERE / "slow-save").unlink()
        (HERE / "saving").touch()
        time.sleep(3 * TIMEOUT)
        (HERE / "saving").unlink()
    fsync(file)

os.fsync = slow_fsync

def loss(model, batch):
    if (HERE / "slow").exists() and model.training:
        (HERE / f"pid-{RANK}").write_text(str(os.getpid()))
        time.sleep(0.02)
    if (HERE / f"hang-{RANK}").exists():
        time.sleep(10**6)
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


def ip(*words: object) -> None:
    """Change the network."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def open_hosts(count: int) -> None:
    """Make namespaces, host0 and so on, that meet at a bridge of host0, which has the address 10.77.0.1."""
    for host in range(count):
        own, peer = f"host{host}", f"to{host}"
        subprocess.run(["ip", "netns", "del", own], check=False, capture_output=True)
        ip("netns", "add", own)
        if host:
            ip("link", "add", peer, "netns", "host0", "type", "veth", "peer", "net", "netns", own)
            ip("-n", "host0", "link", "set", peer, "master", "net", "up")
        else:
            ip("-n", own, "link", "add", "net", "type", "bridge")
        ip("-n", own, "address", "add", f"10.77.0.{host + 1}/24", "dev", "net")
        ip("-n", own, "link", "set", "net", "up")
        ip("-n", own, "link", "set", "lo", "up")


class Run:
    """One training in an empty folder, which is disturbed again and again."""

    def __init__(self, folder: Path, steps: int, ranks: int, timeout_s: float, hosts: int) -> None:
        folder.mkdir()
        (folder / "work.py").write_text(WORKLOAD.replace("TIMEOUT", str(timeout_s)))
        self.folder, self.ranks, self.timeout_s, self.hosts = folder, ranks, timeout_s, hosts
        self._said = [folder / f"said-{host}" for host in range(hosts)]
        self._command = [
            *("-m", "autobatch", "fit", "work.py", "--out", "run", "--target-batch", "14"),
            *("--trials", "0", "--memory-budget", "1GiB", "--max-micro-batch", "4", "--validate-every", "50"),
            *("--checkpoint-every", str(CHECKPOINT_EVERY), "--steps", str(steps)),
            *("--collective-timeout", f"{timeout_s:g}", *(["--ranks", str(ranks)] if hosts == 1 else [])),
        ]
        root = str(Path(__file__).parents[2])
        self._environ = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        if hosts > 1:
            self._environ["GLOO_SOCKET_IFNAME"] = "net"
        self._environ["AUTOBATCH_HOME"] = str(folder / "home")

    @property
    def newest(self) -> int:
        """Step of the newest checkpoint; 0 for none."""
        found = (self.folder / "run" / "checkpoints").glob("step-" + "[0-9]" * 8)
        return max((int(path.name[5:]) for path in found), default=0)

    def start(self) -> list[subprocess.Popen[str]]:
        """Start or resume the run, and return the launcher of each host."""
        for pattern in ("pid-*", "hang-*", "saving", "slow-save"):
            for path in self.folder.glob(pattern):
                path.unlink()
        words = [*self._command, *(["--resume"] if self.newest else [])]
        launchers = []
        for host, path in enumerate(self._said):
            place = ("--nnodes", self.hosts, "--node-rank", host, "--master-addr", "10.77.0.1")
            launcher = ["-m", "torch.distributed.run", *place, "--nproc-per-node", self.ranks // self.hosts]
            command = [sys.executable, *(launcher if self.hosts > 1 else []), *words]
            inside = ["ip", "netns", "exec", f"host{host}"] if self.hosts > 1 else []
            with path.open("w") as said:
                where = {"cwd": self.folder, "env": self._environ, "stdout": said, "stderr": said}
                launchers.append(subprocess.Popen([*inside, *map(str, command)], text=True, **where))
        return launchers

    def disturb(self, kind: str, draw: random.Random) -> dict[str, Any]:
        """Disturb the run once, and return what was seen."""
        (self.folder / "slow").touch()
        before, (launcher, *others) = self.newest, self.start()
        pids = [self.folder / f"pid-{rank}" for rank in range(self.ranks)]

        def trains() -> bool:
            return self.newest > before and all(path.exists() and path.read_text() for path in pids)

        wait_for(trains, 120)
        of_rank = [int(path.read_text()) for path in pids]
        time.sleep(draw.uniform(0, 1))
        target, acknowledged = draw.randrange(self.ranks), self.newest
        if kind in ("save", "freeze"):
            target = 0
            (self.folder / "slow-save").touch()
            wait_for((self.folder / "saving").exists, 60)
        since = time.monotonic()
        if kind == "hang":
            (self.folder / f"hang-{target}").touch()
        elif kind == "save":
            wait_for(lambda: self.newest > acknowledged + 2 * CHECKPOINT_EVERY, 4 * self.timeout_s + 60)
            launcher.terminate()
        elif kind in OF_LAUNCHER:
            launcher.send_signal(OF_LAUNCHER[kind])
        elif kind == "cut":
            ip("-n", f"host{self.hosts - 1}", "link", "set", "net", "down")
        else:
            os.kill(of_rank[target], OF_RANK[kind])
        gone: dict[int, float] = {}
        while len(gone) < self.ranks and time.monotonic() - since < self.timeout_s + 2 * STOPPED_S:
            for rank, pid in enumerate(of_rank):
                if rank not in gone and not is_alive(pid):
                    gone[rank] = round(time.monotonic() - since, 1)
            time.sleep(0.05)
        if kind == "cut":
            ip("-n", f"host{self.hosts - 1}", "link", "set", "net", "up")
        for pid in of_rank:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        for one in (launcher, *others):
            one.wait(60)
        disturbed = {target} if kind in ("hang", *OF_RANK) else set[int]()
        said = "".join(path.read_text() for path in self._said)
        lines = [line for line in said.splitlines() if line.startswith("autobatch: ")]
        undisturbed_s = max(gone.get(rank, 999.0) for rank in range(self.ranks) if rank not in disturbed)
        disturbed_s = max((gone.get(rank, 999.0) for rank in disturbed), default=0.0)
        stays = self.hosts == 1 and disturbed_s > self.timeout_s + STOPPED_S
        is_late = undisturbed_s > self.timeout_s + UNDISTURBED_S or stays
        return {
            "kind": kind,
            "ranks": self.ranks,
            "undisturbed_s": undisturbed_s,
            "disturbed_s": disturbed_s if disturbed else None,
            "late": is_late and kind != "save",
            "not_named": bool(disturbed) and not any(f"rank {target}" in line for line in lines),
            "lost": self.newest < acknowledged,
            "load": round(os.getloadavg()[0], 1),
            "lines": lines,
        }

    def finish(self) -> bytes:
        """Let the run end undisturbed, and return its weights."""
        (self.folder / "slow").unlink(missing_ok=True)
        for launcher, said in zip(self.start(), self._said, strict=True):
            assert launcher.wait(900) == 0, said.read_text()[-3000:]
        return (self.folder / "run" / "model.safetensors").read_bytes()


def is_alive(pid: int) -> bool:
    """Check that a process runs and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.02)


def table(tries: list[dict[str, Any]]) -> str:
    """Return the longest waits of each kind of disturbance, and what did not hold."""
    rows = []
    for kind in dict.fromkeys(seen["kind"] for seen in tries):
        own = [seen for seen in tries if seen["kind"] == kind]
        others = max(seen["undisturbed_s"] for seen in own)
        itself = max((seen["disturbed_s"] for seen in own if seen["disturbed_s"] is not None), default="-")
        faults = (sum(seen[fault] for seen in own) for fault in ("late", "not_named", "lost"))
        rows.append((kind, len(own), others, itself, *faults))
    waits = ("others gone, s", "itself gone, s")
    return markdown(("disturbance", "tries", *waits, "late", "not named", "lost checkpoints"), rows)


def main() -> int:
    """Disturb a run as often as asked, and return 1 if something did not hold."""
    kinds = [*OF_RANK, "hang", "save", *OF_LAUNCHER, "cut"]
    given = arguments(__doc__, ranks=2, hosts=1, tries=10, timeout=5.0, kinds=kinds, seed=1)
    if given.hosts > 1:
        open_hosts(given.hosts)
    asked = [kind for kind in given.kinds if kind != "cut" or given.hosts > 1]
    kinds = [kind for kind in asked for _ in range(given.tries)]
    draw, tries, steps = random.Random(given.seed), [], STEPS_OF_TRY * (len(kinds) + 1)
    with tempfile.TemporaryDirectory() as name:
        run, whole = (
            Run(Path(name, folder), steps, given.ranks, given.timeout, given.hosts)
            for folder in ("run", "whole")
        )
        for kind in kinds:
            tries.append(run.disturb(kind, draw))
            print(json.dumps(tries[-1]), flush=True)
        print(table(tries), flush=True)
        is_same = run.finish() == whole.finish()
    failed = sum(seen["late"] or seen["lost"] or seen["not_named"] for seen in tries)
    print(json.dumps({"failed": failed, "same bits": is_same}))
    return int(failed > 0 or not is_same)


if __name__ == "__main__":
    sys.exit(main())
