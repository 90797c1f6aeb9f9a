"""Recorder of the GPU memory of any program, which the program's own torch loads.

Torch calls `begin` at the end of its import, as an extension of its devices (the group ``torch.backends`` of
entry points), in each process that the program starts, too. Nothing else of autobatch is imported.

``AUTOBATCH_RECORDER`` is JSON. Each process that has touched a GPU writes a snapshot as torch makes them,
once: at its end, when memory runs out, or after ``steps`` of an optimizer or ``seconds``. It goes to the file
``out``, and those of further processes beside it; or to a ``folder``, with the facts of the process as JSON,
and then the program ends. ``fraction`` is the share of each GPU that the allocator may hold.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

VARIABLE = "AUTOBATCH_RECORDER"


def recorded(**wanted: Any) -> dict[str, str]:
    """Return the environment of this process, in which each process of a program records as is wanted."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1", VARIABLE: json.dumps(wanted)}
    return {**os.environ, **own}


def begin() -> None:
    """Record from now on, until an optimizer has taken so many steps or the process ends."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    wanted = json.loads(os.environ.get(VARIABLE, "{}"))
    if not wanted or not torch.cuda.is_available():
        return
    if "fraction" in wanted:  # the allocator reads its options with its first block
        given = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
        limit = f"per_process_memory_fraction:{wanted['fraction']!r}"
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(filter(None, [given, limit]))
    steps: dict[Any, int] = {}
    is_written = threading.Lock()

    def write(refused: int = 0) -> None:
        # A copy of a process that has used the GPU cannot use it.
        if torch.cuda.is_initialized() and is_written.acquire(blocking=False):  # type: ignore[no-untyped-call]
            try:
                dump(wanted, max(steps.values(), default=0), refused)
            except Exception as error:  # the program goes on
                sys.stderr.write(f"autobatch: the snapshot of memory was not written: {error}\n")

    def finish(code: int, refused: int = 0) -> None:
        write(refused)
        if "folder" in wanted:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def count(optimizer: Any, *_: Any) -> None:
        # DeepSpeed takes a step of each group of parameters on its own.
        key = id(optimizer), id(next((p for group in optimizer.param_groups for p in group["params"]), None))
        steps[key] = steps.get(key, 0) + 1
        if steps[key] == wanted.get("steps"):
            handle.remove()
            finish(0)

    context = None if "folder" in wanted else "alloc"
    # The latest events; with stacks they take about a gigabyte.
    try:
        torch.cuda.memory._record_memory_history(context=context, stacks="python", max_entries=4_000_000)
    except RuntimeError as error:  # of an allocator without a history, such as cudaMallocAsync
        sys.stderr.write(f"autobatch: the memory of this program cannot be recorded: {error}\n")
        return
    handle = register_optimizer_step_post_hook(count)
    atexit.register(write)
    torch._C._cuda_attach_out_of_memory_observer(  # type: ignore[attr-defined]
        lambda device, size, *_: finish(1, size)
    )
    if wanted.get("seconds"):
        timer = threading.Timer(wanted["seconds"], write)
        timer.daemon = True
        timer.start()


def dump(wanted: dict[str, Any], steps: int, refused: int) -> None:
    """Write the snapshot of this process, and perhaps what it is of, and end the recording.

    Args:
        wanted: what `AUTOBATCH_RECORDER` says.
        steps: those that the optimizer has taken.
        refused: bytes of the segment that the allocator did not get, 0 if it got all.
    """
    import torch

    torch.cuda.synchronize()  # other ranks wait for what this one has begun
    rank, process = os.environ.get("RANK", "0"), os.getpid()
    stem, ending = os.path.splitext(wanted.get("out") or os.path.join(wanted["folder"], f"{process}.pickle"))
    file = f"{stem}-rank{rank}{ending}" if rank != "0" and "out" in wanted else f"{stem}{ending}"
    if os.path.exists(file) and os.path.getmtime(file) > wanted.get("since", 0):  # by another process
        file = f"{stem}-{process}{ending}"
    torch.cuda.memory._dump_snapshot(f"{file}.part")  # type: ignore[no-untyped-call]
    os.replace(f"{file}.part", file)
    torch.cuda.memory._record_memory_history(enabled=None)
    if "out" in wanted:
        sys.stderr.write(f"autobatch: wrote {file}\n")
        return
    devices = [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]
    most = max(devices, key=lambda device: device.get("reserved_bytes.all.peak", 0))
    content = {
        "snapshot": file,
        "steps": steps,
        "refused_bytes": refused,
        "retries": most.get("num_alloc_retries", 0) + most.get("num_ooms", 0),
        "peak_allocated_bytes": most.get("allocated_bytes.all.peak", 0),
        "peak_reserved_bytes": most.get("reserved_bytes.all.peak", 0),
    }
    with open(f"{stem}.part", "w", encoding="utf-8") as facts:
        json.dump(content, facts)
    os.replace(f"{stem}.part", f"{stem}.json")
