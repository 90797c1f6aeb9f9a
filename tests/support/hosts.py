"""Two hosts on one machine: network namespaces of Linux with a bridge between them, whose link can be cut.

Hosts have names and addresses of their own, and share the disk. Needs root, ``ip`` and ``unshare``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.99.77.1", "10.99.77.2")
NAMES = ("autobatch-0", "autobatch-1")
PORT = 29400
INTERFACE = "eth0"


class TwoHosts:
    """Two hosts that reach each other until the link is cut.

    Args:
        name: differs from those of other pairs on this machine, in at most eight characters.
    """

    def __init__(self, name: str) -> None:
        self._between = f"{name}-b"
        self._hosts = [f"{name}-0", f"{name}-1"]

    def open(self) -> None:
        """Make the hosts, and the bridge in a namespace between them."""
        for one in (self._between, *self._hosts):
            _ip("netns", "add", one)
        self._of_bridge("link", "add", "bridge", "type", "bridge")
        self._of_bridge("link", "set", "bridge", "up")
        for number, (host, address) in enumerate(zip(self._hosts, ADDRESSES, strict=True)):
            peer = ("peer", "name", f"port{number}", "netns", self._between)
            _ip("link", "add", INTERFACE, "netns", host, "type", "veth", *peer)
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", host, "link", "set", INTERFACE, "up")
            _ip("-n", host, "link", "set", "lo", "up")
            names = Path("/etc/netns", host, "hosts")  # of this namespace only
            names.parent.mkdir(parents=True)
            lines = [
                f"{address} {name} {name}.autobatch\n" for address, name in zip(ADDRESSES, NAMES, strict=True)
            ]
            names.write_text("127.0.0.1 localhost\n" + "".join(lines))
            self._of_bridge("link", "set", f"port{number}", "up")
        self.heal()

    def close(self) -> None:
        """Remove the hosts; all their processes must have ended."""
        for one in (*self._hosts, self._between):
            subprocess.run(["ip", "netns", "del", one], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns", one), ignore_errors=True)

    def cut(self) -> None:
        """Cut the link: packets vanish, and no host is told."""
        self._of_bridge("link", "set", "port1", "nomaster")

    def heal(self) -> None:
        """Join the link again."""
        for number in range(2):
            self._of_bridge("link", "set", f"port{number}", "master", "bridge")

    def start(
        self, host: int, words: Sequence[str], folder: Path, environ: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command on a host, with files for what it prints."""
        with (folder / f"host{host}.out").open("a") as out, (folder / f"host{host}.err").open("a") as err:
            return subprocess.Popen(
                self.on(host, words), cwd=folder, env=dict(environ), stdout=out, stderr=err, text=True
            )

    def on(self, host: int, words: Sequence[str]) -> list[str]:
        """Return the words that run a command on a host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', NAMES[host]]
        return ["ip", "netns", "exec", self._hosts[host], *named, *words]

    def pids(self, host: int) -> list[int]:
        """Return the processes that run on a host."""
        return [int(pid) for pid in _ip("netns", "pids", self._hosts[host]).split()]

    def ranks(self, host: int) -> list[int]:
        """Return the ranks that run on a host."""
        found = []
        for pid in self.pids(host):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"autobatch" in words and b"torch.distributed.run" not in words:
                    found.append(pid)
        return found

    def kill(self, host: int) -> None:
        """End all processes of a host at once, as a loss of power does."""
        for pid in self.pids(host):
            os.kill(pid, signal.SIGKILL)

    def _of_bridge(self, *words: str) -> None:
        _ip("-n", self._between, *words)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two hosts for the block."""
    found = TwoHosts(f"ab{os.getpid() % 10**5}")
    try:
        found.open()
        yield found
    finally:
        for host in range(2):
            found.kill(host)
        found.close()


def torchrun(*words: str, ranks: int = 1, restarts: int = 0) -> list[str]:
    """Return the words that start each of two hosts with torchrun; the first host keeps the store."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NAMES[0]}:{PORT}", "--rdzv-id", "run"),
        *("--max-restarts", str(restarts), *words),
    ]


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
