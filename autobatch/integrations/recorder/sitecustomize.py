"""Recorder of the GPU memory of any program, which Python runs at its start.

Python imports a module of this name before a program, if its folder is on ``PYTHONPATH``; every process that
the program starts has it, too. It needs nothing but the program's own torch, and imports nothing before the
program does.

``AUTOBATCH_RECORDER`` is JSON with the ``folder`` for the facts of each process, and perhaps: ``out``, the
file for the snapshot of the first process, beside which those of other ranks are; ``steps`` of an optimizer
or ``seconds`` after which they are written, otherwise at the end of the program; ``ends`` if the program ends
then; ``stacks`` to record the lines of Python that allocate; ``fraction`` of each GPU that the allocator may
hold. They are written in any case when memory runs out. A process that has touched no GPU writes nothing.
Each other one writes once: a snapshot as torch makes them, and then its facts.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from types import ModuleType
from typing import Any

VARIABLE = "AUTOBATCH_RECORDER"
MOST_EVENTS = 4_000_000
"""Events that a recording keeps, the latest; about a gigabyte with stacks."""
OPTIONS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of the allocator's options. The first that is set counts."""


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finder that starts a recording once the program has imported torch."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find torch as Python does, and let its loader call the recorder."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        if "fraction" in self._wanted:
            limit_memory(self._wanted["fraction"])
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_record(module: ModuleType) -> None:
                execute(module)
                record(self._wanted)

            spec.loader.exec_module = execute_and_record  # type: ignore[method-assign]
        return spec


def limit_memory(fraction: float) -> None:
    """Limit the allocator by its options, whatever the program has set, before torch reads them."""
    name = next((name for name in OPTIONS if name in os.environ), OPTIONS[-1])
    limit = f"per_process_memory_fraction:{fraction!r}"
    options = os.environ.get(name, "").split(",")
    os.environ[name] = ",".join([*(option for option in options if option not in ("", limit)), limit])


def record(wanted: dict[str, Any]) -> None:
    """Record from now on, until an optimizer has taken so many steps or the process ends."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if not torch.cuda.is_available():
        return
    steps: dict[int, int] = {}
    owner, is_written = os.getpid(), threading.Lock()

    def write() -> None:
        """Write what was recorded, unless that is done, or this is a copy of the process that records."""
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if os.getpid() != owner or not is_used or not is_written.acquire(blocking=False):
            return
        is_main = threading.current_thread() is threading.main_thread()
        earlier = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
        try:
            dump(wanted, max(steps.values(), default=0))
        except Exception as error:  # the program goes on
            sys.stderr.write(f"autobatch: the snapshot of memory was not written: {error}\n")
        finally:
            if is_main:
                signal.signal(signal.SIGINT, earlier or signal.SIG_DFL)

    def count(optimizer: Any, *_: Any) -> None:
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
        if steps[id(optimizer)] == wanted.get("steps"):
            handle.remove()
            finish(0)

    def finish(code: int) -> None:
        write()
        if wanted.get("ends"):
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    torch.cuda.memory._record_memory_history(
        context="alloc" if wanted.get("stacks") else None, stacks="python", max_entries=MOST_EVENTS
    )
    handle = register_optimizer_step_post_hook(count)
    atexit.register(write)
    attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    attach(lambda *_: finish(1))
    if wanted.get("seconds"):
        timer = threading.Timer(wanted["seconds"], write)
        timer.daemon = True
        timer.start()


def dump(wanted: dict[str, Any], steps: int) -> None:
    """Write the snapshot of this process, and then what it is of, and end the recording."""
    import torch

    torch.cuda.synchronize()  # other ranks wait for what this one has begun
    rank, process = os.environ.get("RANK", "0"), os.getpid()
    facts = os.path.join(wanted["folder"], f"rank-{rank}-{process}.json")
    snapshot = wanted.get("out") or facts.replace(".json", ".pickle")
    stem, ending = os.path.splitext(snapshot)
    if "out" in wanted and rank != "0":
        snapshot = f"{stem}-rank{rank}{ending}"
    try:
        os.close(os.open(os.path.join(wanted["folder"], f"{rank}.taken"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:  # by another process of this rank
        snapshot = f"{stem}-{process}{ending}"
    torch.cuda.memory._dump_snapshot(f"{snapshot}.part")  # type: ignore[no-untyped-call]
    os.replace(f"{snapshot}.part", snapshot)
    torch.cuda.memory._record_memory_history(enabled=None)
    devices = [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]
    most = max(devices, key=lambda device: device.get("reserved_bytes.all.peak", 0))
    content = {
        "snapshot": snapshot,
        "steps": steps,
        "retries": most.get("num_alloc_retries", 0) + most.get("num_ooms", 0),
        "peak_allocated_bytes": most.get("allocated_bytes.all.peak", 0),
        "peak_reserved_bytes": most.get("reserved_bytes.all.peak", 0),
    }
    with open(f"{facts}.part", "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(f"{facts}.part", facts)
    if "out" in wanted:
        sys.stderr.write(f"autobatch: wrote {snapshot}\n")


def run_next_of_this_name() -> None:
    """Run the module that this one hides, if the machine has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if VARIABLE in os.environ:
    sys.meta_path.insert(0, AfterTorch(json.loads(os.environ[VARIABLE])))
run_next_of_this_name()
