"""The only classifier of out-of-memory errors: first by type, then by text, over the chain of causes.

All known texts are in one table, each with its source. Text counts only on exception types that torch, CUDA
and Triton raise, and only in their own wording: a user's "out of memory slots" is a bug in their code, not a
batch that is too large.
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
    """The meaning of an error for memory."""

    DEVICE = "device"
    """Out of memory on the device. A smaller micro-batch can run in this process."""
    HOST = "host"
    """Out of memory on the host. A smaller micro-batch can run in this process."""
    FATAL = "fatal"
    """Out of memory, with a context or communicator in an unknown state: this process must end."""
    SUSPECT = "suspect"
    """Seen under memory pressure and for real bugs: try a smaller size once, then raise this error."""
    NONE = "none"
    """Not about memory."""


_PATTERNS: tuple[tuple[Verdict, str], ...] = (
    # cuDNN's attention, whose kernels are compiled and loaded past the allocator (cudnn/MHA.cpp, torch 2.15).
    # First, because the driver's own text stands before it.
    (Verdict.DEVICE, r"\bCUDA ran out of memory outside PyTorch's allocator\b"),
    # Pinned memory of the host, in the thread that pins what loader workers made. No context is lost.
    (Verdict.HOST, r"(?s)\bin pin memory thread\b.*\bCUDA error: out of memory\b"),
    # Driver level: cudaMalloc failed outside the caching allocator. AcceleratorError on recent torch.
    (Verdict.FATAL, r"\b(?:CUDA|HIP)(?: driver)? error: out of memory(?![ \t]*\w)"),
    (Verdict.FATAL, r"\b(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b"),
    # Level Zero, below the XPU allocator: the same for XPUs.
    (Verdict.FATAL, r"\bUR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b"),
    # NCCL allocates past torch's cache and poisons the communicator: nccl#1235, slime#1086, returnn#1626.
    (Verdict.FATAL, r"\bFailed to CUDA (?:host )?(?:m|c)?alloc\b"),
    (Verdict.FATAL, r"\bCuda failure (?:\d+ )?'out of memory'"),
    # The caching allocators' own text, if the type was lost (workers, wrapped errors).
    # Bare, it is raised by whoever simulates one (accelerate's own tests).
    (Verdict.DEVICE, r"\b(?:CUDA|HIP|XPU) out of memory\.(?: Tried to allocate\b|\s*\Z)"),
    (Verdict.DEVICE, r"\bMPS backend out of memory\b"),
    # backend:cudaMallocAsync has another text (many reports of ComfyUI).
    (Verdict.DEVICE, r"\bAllocation on device \d+ would exceed allowed memory\b"),
    # On MIG slices and Jetson the allocator's report calls NVML and fails there: pytorch#112377, #122068,
    # #185240, #197312.
    (Verdict.DEVICE, r"\bNVML_SUCCESS == \S.{0,80} INTERNAL ASSERT FAILED\b"),
    (
        Verdict.DEVICE,
        # Handles and workspaces that libraries allocate themselves: deepmd-kit#5443, for example.
        r"\b(?:CU|HIP)(?:BLAS|SOLVER|SPARSE|DNN)_STATUS_ALLOC_FAILED\b|\b(?:CU|HIP)FFT_ALLOC_FAILED\b"
        r"|\bCUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED\b|\bmiopenStatusAllocFailed\b",
    ),
    (Verdict.DEVICE, r"\bTriton Error \[(?:CUDA|HIP|XPU)\]:.{0,40}\bout of memory(?![ \t]*\w)"),
    # alloc_cpu.cpp: the first on POSIX, the second on Windows. Then c10's and libstdc++'s plain texts.
    (Verdict.HOST, r"\bDefaultCPUAllocator: (?:can't allocate memory|not enough memory)\b"),
    (Verdict.HOST, r"\A(?:std::bad_alloc|bad allocation)\Z"),
    (Verdict.HOST, r"\bCUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED\b"),
    (Verdict.HOST, r"\bunable to mmap \d+ bytes from file .*Cannot allocate memory"),
    # Handles created on a full GPU, or with a broken installation.
    (Verdict.SUSPECT, r"\b(?:CUBLAS|HIPBLAS|CUDNN)_STATUS_NOT_INITIALIZED\b"),
    # No plan fits in the remaining memory, or none exists for this shape: pytorch#108645.
    (Verdict.SUSPECT, r"\bCUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR)\b"),
    # No memory to load or launch a kernel, or a real bug: pytorch#17774.
    (Verdict.SUSPECT, r"\bCUDNN_STATUS_(?:EXECUTION_FAILED(?:_CUDA_DRIVER)?|SUBLIBRARY_LOADING_FAILED)\b"),
    # The same of cuDNN's attention, which torch 2.11 tells by the expression that is false (cudnn/MHA.cpp).
    (Verdict.SUSPECT, r"\bmha_graph(?:\.|->)execute\(|\bcuDNN SDPA execution failed\b"),
    (Verdict.SUSPECT, r"\bunable to find an engine to execute this computation\b"),
    # oneDNN under an address-space limit. "… primitive descriptor" is an unsupported shape.
    (Verdict.SUSPECT, r"\bcould not create a primitive\b(?! descriptor)"),
    # An error that Python raises within TorchScript loses its text, also that of a budget which is counted.
    (Verdict.SUSPECT, r"(?s)\bfailed in the TorchScript interpreter\b.*\nRuntimeError:\s*\Z"),
    # SIGKILL is the kernel's OOM killer or a kill -9, SIGBUS a full /dev/shm or a broken file: the text does
    # not show which. Other signals (segmentation fault, abort) are bugs.
    (Verdict.SUSPECT, r"\bDataLoader worker \(pid \d+\) is killed by signal: (?:Killed|Bus error)"),
)
"""Regular expressions for whole messages: DataLoader and DataParallel put a heading before the text of a
worker's error. The first that is found counts."""

# After these the context is unusable, whatever else is in the chain (CUDA Runtime API: "the process must be
# terminated and relaunched"). A launch times out on GPUs that also draw a display.
_DEAD_CONTEXT = re.compile(
    r"\b(?:CUDA|HIP)(?: driver)? error: (?:an illegal memory access|device-side assert|misaligned address"
    r"|unspecified launch failure|an illegal instruction|the launch timed out|hardware stack error"
    r"|invalid program counter|operation not supported on global/shared address space"
    r"|uncorrectable (?:ECC|NVLink) error|Invalid access of peer GPU memory"
    r"|tensor memory not completely freed)"
)

# Expandable segments of torch 2.15: every smaller size fails alike. The usual error only mentions the case.
_NO_ADDRESSES = re.compile(r"\bThis is virtual-address-space \(VSZ\) exhaustion\b")

# CUDACachingAllocator.cpp, torch 2.13; older releases print the same sizes.
_SIZE = r"(?P<size>[0-9.]+) (?P<unit>bytes|[KMGT]iB)"
_REQUESTED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_REQUESTED_OF_CPU = re.compile(rf"{_SIZE} requested")
_IDLE = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

# The first of these in a chain counts.
_BY_WEIGHT = (Verdict.FATAL, Verdict.DEVICE, Verdict.HOST, Verdict.SUSPECT)
_COMPILED = tuple((verdict, re.compile(text)) for verdict, text in _PATTERNS)
_WINDOWS_COMMIT_LIMIT = 1455  # ERROR_COMMITMENT_LIMIT: "The paging file is too small"
_LINE_WIDTH = 240


def classify(error: BaseException) -> Verdict:
    """Return the meaning of an error and its causes for memory.

    The chain is walked like a traceback (``__cause__``, else ``__context__`` unless suppressed). An
    `AutobatchError` is `Verdict.NONE` and ends the walk: it was raised on purpose, with its own meaning. The
    same holds for anything but an `Exception`: a Ctrl-C while memory runs out is a Ctrl-C.
    """
    verdicts = set()
    for link in _chain(error):
        if _is_foreign(link) and _DEAD_CONTEXT.search(_text(link)):
            return Verdict.NONE
        verdicts.add(_classify_one(link))
    return next((verdict for verdict in _BY_WEIGHT if verdict in verdicts), Verdict.NONE)


def loses_context(error: BaseException) -> bool:
    """Return whether the GPU's context is unusable after an error, even one from another process."""
    text = _text(error)
    return bool(_DEAD_CONTEXT.search(text)) or _first_match(text) is Verdict.FATAL


@contextmanager
def lost_context_ignored() -> Iterator[None]:
    """Ignore within the block that the context of a GPU is lost.

    Use it to clean up: every call fails once the context is lost, and the first error is the one to report.
    """
    try:
        yield
    except RuntimeError as error:
        if not _DEAD_CONTEXT.search(_text(error)):
            raise


def is_oom(error: BaseException) -> bool:
    """Return whether memory ran out for certain: on the device, on the host, or fatally."""
    return classify(error) in (Verdict.DEVICE, Verdict.HOST, Verdict.FATAL)


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


def is_fragmented(error: BaseException) -> bool:
    """Return whether memory ran out although the allocator held enough of it, in pieces that are too small.

    CUDA's text tells: less was requested than "is reserved by PyTorch but unallocated". Emptying the cache
    then lets the same request succeed.
    """
    for link in _chain(error):
        text = _text(link)
        asked, idle = _REQUESTED.search(text), _IDLE.search(text)
        if asked and idle and _classify_one(link) is Verdict.DEVICE:
            return _bytes_of(asked) <= _bytes_of(idle)
    return False


def requested_bytes(error: BaseException) -> int | None:
    """Return an upper bound of the bytes that a failed request asked for; None if no text has them.

    The text of CUDA's allocator rounds them to a hundredth of their unit.
    """
    for link in _chain(error):
        request = _REQUESTED.search(_text(link)) or _REQUESTED_OF_CPU.search(_text(link))
        if request:
            return math.ceil(_bytes_of(request) + 0.01 * _UNITS[request["unit"]])
    return None


def first_line(error: BaseException) -> str:
    """Return an error in one line of at most 240 characters.

    In a chain it is the link that made it an out-of-memory error, else the error itself. The name of its type
    precedes the text, except for a `RuntimeError` and an `AutobatchError`.
    """
    verdict = classify(error)
    link = error
    if verdict is not Verdict.NONE:
        link = next(cause for cause in _chain(error) if _classify_one(cause) is verdict)
    name = type(link).__name__
    lines = _text(link).strip().splitlines()
    if not lines:
        return name
    own = isinstance(link, RuntimeError | AutobatchError)
    return textwrap.shorten(lines[0] if own else f"{name}: {lines[0]}", _LINE_WIDTH, placeholder=" …")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while isinstance(link, Exception) and not isinstance(link, AutobatchError) and id(link) not in seen:
        yield link
        seen.add(id(link))
        if link.__cause__ is not None:
            link = link.__cause__
        else:
            link = None if link.__suppress_context__ else link.__context__


def _classify_one(error: BaseException) -> Verdict:
    if isinstance(error, torch.OutOfMemoryError):
        return Verdict.NONE if _NO_ADDRESSES.search(_text(error)) else Verdict.DEVICE
    if isinstance(error, MemoryError):
        return Verdict.HOST
    if isinstance(error, OSError):
        commit_limit = getattr(error, "winerror", None) == _WINDOWS_COMMIT_LIMIT
        return Verdict.HOST if commit_limit or error.errno == errno.ENOMEM else Verdict.NONE
    if not _is_foreign(error):
        return Verdict.NONE
    return _first_match(_text(error))


def _first_match(text: str) -> Verdict:
    return next((verdict for verdict, pattern in _COMPILED if pattern.search(text)), Verdict.NONE)


def _bytes_of(size: re.Match[str]) -> float:
    return float(size["size"]) * _UNITS[size["unit"]]


def _is_foreign(error: BaseException) -> bool:
    """Return whether torch, CUDA or Triton may have raised it; Triton's classes are not RuntimeErrors."""
    return isinstance(error, RuntimeError) or type(error).__module__.partition(".")[0] == "triton"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__ may be broken, which must not hide the error itself
        return ""
