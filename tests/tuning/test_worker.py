"""Identity of processes, against real ones that live and end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from autobatch.tuning.worker import Worker, is_gone, this_worker

SHOW = "from autobatch.tuning.worker import this_worker; print(list(this_worker()), flush=True); input()"


def test_this_process_is_alive_and_known_by_host_and_id() -> None:
    here = this_worker()
    assert (here.host, here.pid) == (socket.gethostname(), os.getpid())
    assert here == this_worker()
    assert not is_gone(here, here)


def test_another_process_is_gone_once_it_has_ended() -> None:
    other = subprocess.Popen([sys.executable, "-c", SHOW], stdin=-1, stdout=-1, text=True)
    assert other.stdout is not None
    worker = Worker(*eval(other.stdout.readline()))
    assert worker.pid == other.pid
    assert not is_gone(worker, this_worker())
    other.communicate("\n")
    assert is_gone(worker, this_worker())


def test_a_reused_process_id_and_a_restarted_machine_mean_that_it_is_gone() -> None:
    here = this_worker()
    assert is_gone(here._replace(started="1"), here)
    assert is_gone(here._replace(boot="another"), here)


def test_nothing_is_known_of_another_machine_or_container() -> None:
    here = this_worker()
    ended = here._replace(pid=2**22 + 1)
    assert is_gone(ended, here)
    assert not is_gone(ended._replace(host="another", boot="another"), here)
    assert not is_gone(ended._replace(namespace="another"), here)
