"""The only classifier of out-of-memory errors: first by type, then by text, over the chain of causes.

Text counts only on exception types that torch, CUDA and Triton raise, and only in their own wording: a user's
"out of memory slots" is a bug in their code, not a batch that is too large.
"""

from __future__ import annotations

import enum
import errno
import math
import re
import textwrap
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from autobatch.core.errors import AutobatchError, DoesNotFitError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Verdict(enum.Enum):
    """The meaning of an error for memory. In a chain of errors the first of these counts."""

    FATAL = "fatal"
    """Out of memory, with a context or communicator in an unknown state: this process must end."""
    MEMORY = "memory"
    """Out of memory, on the device or on the host. A smaller micro-batch can run in this process."""
    SUSPECT = "suspect"
    """Seen under memory pressure and for real bugs: try a smaller size once, then raise this error."""
    NONE = "none"
    """Not about memory."""


_RULES = tuple(
    (verdict, re.compile("|".join(patterns), re.DOTALL))
    for verdict, *patterns in (
        # Both have the driver's text, too, and no context is lost: cuDNN's attention, whose kernels are
        # loaded past the allocator (cudnn/MHA.cpp, torch 2.15), and the thread that pins batches of workers.
        (
            Verdict.MEMORY,
            r"CUDA ran out of memory outside PyTorch's allocator",
            r"in pin memory thread\b.*CUDA error: out of memory",
        ),
        (
            Verdict.FATAL,
            # cudaMalloc failed outside the caching allocator. AcceleratorError on recent torch.
            r"\b(?:CUDA|HIP)(?: driver)? error: out of memory\s*(?:\n|$)",
            r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory",
            # NCCL allocates past torch's cache and poisons the communicator: nccl#1235, slime#1086.
            r"Failed to CUDA (?:host )?[mc]?alloc|Cuda failure (?:\d+ )?'out of memory'",
        ),
        (
            Verdict.MEMORY,
            # The caching allocators' own text, if the type was lost (workers, wrapped errors).
            # Bare, it is raised by whoever simulates one (accelerate's own tests).
            r"\b(?:CUDA|HIP) out of memory\.(?: Tried to allocate\b|\s*$)",
            # backend:cudaMallocAsync has another text (many reports of ComfyUI).
            r"Allocation on device \d+ would exceed allowed memory",
            # On MIG slices and Jetson the allocator's report calls NVML and fails: pytorch#112377, #122068.
            r"NVML_SUCCESS == \S.{0,80} INTERNAL ASSERT FAILED",
            # Handles and workspaces that libraries allocate themselves: deepmd-kit#5443, for example.
            r"\b(?:CU|HIP)[A-Z]+_(?:STATUS_)?ALLOC_FAILED\b|miopenStatusAllocFailed",
            r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            r"Triton Error \[(?:CUDA|HIP)\]:.{0,40}\bout of memory",
            # On the host: alloc_cpu.cpp on POSIX and on Windows, c10 and libstdc++.
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
            r"\A(?:std::bad_alloc|bad allocation)\Z",
            r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
            r"unable to mmap \d+ bytes from file .*Cannot allocate memory",
        ),
        (
            Verdict.SUSPECT,
            # Handles created on a full GPU, or with a broken installation.
            r"\b(?:CUBLAS|HIPBLAS|CUDNN)_STATUS_NOT_INITIALIZED\b",
            # No plan or kernel fits in the remaining memory, or a real bug: pytorch#108645, #17774.
            r"CUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED|SUBLIBRARY_LOADING_FAILED)",
            r"mha_graph(?:\.|->)execute\(|cuDNN SDPA execution failed|unable to find an engine to execute",
            # oneDNN under an address-space limit. "… primitive descriptor" is an unsupported shape.
            r"could not create a primitive\b(?! descriptor)",
            # SIGKILL is the kernel's OOM killer or a kill -9, SIGBUS a full /dev/shm or a broken file.
            r"DataLoader worker \(pid \d+\) is killed by signal: (?:Killed|Bus error)",
        ),
    )
)
"""Patterns for whole messages, as DataLoader puts a heading before the text of a worker's error. The first
that is found counts."""

# After these the context is unusable, whatever else is in the chain (CUDA Runtime API: "the process must be
# terminated and relaunched"). A launch times out on GPUs that also draw a display.
_DEAD_CONTEXT = re.compile(
    r"\b(?:CUDA|HIP)(?: driver)? error: (?:an illegal memory access|device-side assert|misaligned address"
    r"|unspecified launch failure|an illegal instruction|the launch timed out|hardware stack error"
    r"|invalid program counter|operation not supported on global/shared address space"
    r"|uncorrectable (?:ECC|NVLink) error|Invalid access of peer GPU memory"
    r"|tensor memory not completely freed)"
)
# CUDACachingAllocator.cpp, torch 2.13; older releases print the same sizes.
_SIZE = r"([0-9.]+) (bytes|[KMGT]?i?B)"
_REQUESTED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LINE_WIDTH = 240


def classify(error: BaseException) -> Verdict:
    """Return the meaning of an error and its causes for memory.

    The chain is walked like a traceback (``__cause__``, else ``__context__`` unless suppressed). An
    `AutobatchError` is `Verdict.NONE` and ends the walk: it was raised on purpose, with its own meaning. The
    same holds for anything but an `Exception`: a Ctrl-C while memory runs out is a Ctrl-C.
    """
    return _judge(error)[0]


def is_oom(error: BaseException) -> bool:
    """Return whether memory ran out for certain: on the device, on the host, or fatally."""
    return classify(error) in (Verdict.MEMORY, Verdict.FATAL)


def loses_context(error: BaseException) -> bool:
    """Return whether the GPU's context is unusable after an error, even one from another process."""
    return _is_dead(error) or _verdict_of(_text(error)) is Verdict.FATAL


@contextmanager
def memory_named(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error within the block into an error that says what memory did not suffice for.

    Raises:
        DoesNotFitError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            raise
        raise DoesNotFitError(
            f"out of memory while {doing}: {first_line(error).rstrip('.')}. Free memory, or give a larger "
            "--memory-budget"
        ) from error


def requested_bytes(error: BaseException) -> int | None:
    """Return an upper bound of the bytes that a failed request needed; None if no text has them.

    Caching allocators name the segment that they asked the driver for. Texts round to three digits at least,
    a half percent.
    """
    for link in _chain(error):
        if request := _REQUESTED.search(_text(link)):
            return math.ceil(1.006 * float(request[1]) * _UNITS[request[2]])
    return None


def is_below_budget(held_bytes: int | None, segment_bytes: int | None, budget_bytes: int) -> bool:
    """Return whether something else than the budget refused a request, such as another process's memory.

    Args:
        held_bytes: Most bytes that the allocator held: reserved ones, or live ones without a cache.
        segment_bytes: Bytes that it asked for, at most; 0 or None if unknown.
        budget_bytes: Bytes that it may hold.
    """
    return bool(held_bytes is not None and segment_bytes and held_bytes + segment_bytes <= budget_bytes)


def first_line(error: BaseException) -> str:
    """Return an error in one line of at most 240 characters.

    In a chain it is the link that made it an out-of-memory error, else the error itself. The name of its type
    precedes the text, except for a `RuntimeError` and an `AutobatchError`.
    """
    link = _judge(error)[1]
    name = type(link).__name__
    lines = _text(link).strip().splitlines()
    if not lines:
        return name
    own = isinstance(link, RuntimeError | AutobatchError)
    return textwrap.shorten(lines[0] if own else f"{name}: {lines[0]}", _LINE_WIDTH, placeholder=" …")


def _judge(error: BaseException) -> tuple[Verdict, BaseException]:
    """Return the verdict on a chain of errors, and the link that made it: the error itself if none did."""
    links = [(_classify_link(link), link) for link in _chain(error)]
    if any(_is_foreign(link) and _is_dead(link) for _, link in links):
        return Verdict.NONE, error
    weights = list(Verdict)
    return min([*links, (Verdict.NONE, error)], key=lambda judged: weights.index(judged[0]))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while isinstance(link, Exception) and not isinstance(link, AutobatchError) and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _classify_link(error: BaseException) -> Verdict:
    is_os_error = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if is_os_error or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Verdict.MEMORY
    return _verdict_of(_text(error)) if _is_foreign(error) else Verdict.NONE


def _verdict_of(text: str) -> Verdict:
    return next((verdict for verdict, pattern in _RULES if pattern.search(text)), Verdict.NONE)


def _is_dead(error: BaseException) -> bool:
    return bool(_DEAD_CONTEXT.search(_text(error)))


def _is_foreign(error: BaseException) -> bool:
    """Return whether torch, CUDA or Triton may have raised it; Triton's classes are not RuntimeErrors."""
    return isinstance(error, RuntimeError) or type(error).__module__.partition(".")[0] == "triton"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__ may be broken, which must not hide the error itself
        return ""
