"""The classifier against every text that was seen in the field, near misses and chains."""

from __future__ import annotations

import errno
import itertools

import torch

from autobatch import DoesNotFitError, InputError, Interrupted, RestartSmallerError
from autobatch.device.oom import Verdict, classify, first_line, is_oom, loses_context

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB of which 1 GiB "
    "is free. Including non-PyTorch memory, this process has 6.41 GiB memory in use. Of the allocated memory "
    "6.01 GiB is allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated."
)
HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below"
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function "
    "failed.\nLast error:\n"
)
WORKER = (
    "Caught RuntimeError in replica 0 on device 0.\nOriginal Traceback (most recent call last):\n  File …\n"
)
ASSERT = (
    'INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please report a bug to PyTorch. '
)
CUDNN_ATTENTION = 'cuDNN SDPA execution failed with error code ["CUDNN_BACKEND_API_FAILED"]: '
OUTSIDE = (
    "\nCUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes, cuDNN"
)
KILLED = "DataLoader worker (pid 4711) is killed by signal: "


class OutOfResources(Exception):
    """Stands for triton.runtime.errors.OutOfResources: an Exception, and no RuntimeError."""

    __module__ = "triton.runtime.errors"


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


BY_TYPE = [
    (Verdict.MEMORY, torch.OutOfMemoryError("any text")),
    (Verdict.MEMORY, MemoryError()),
    (Verdict.MEMORY, OSError(errno.ENOMEM, "Cannot allocate memory")),
    (Verdict.NONE, OSError(errno.ENOSPC, "No space left on device")),
    (Verdict.NONE, OSError("out of memory")),
    (Verdict.NONE, OutOfResources("out of resource: shared memory, Required: 147456")),
    (Verdict.MEMORY, OutOfResources("Triton Error [CUDA]: out of memory")),
]
BY_TEXT = {
    Verdict.FATAL: (
        "CUDA error: out of memory",
        "CUDA error: out of memory" + HINT,
        "CUDA driver error: out of memory",
        "Search for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api",
        "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY",
        NCCL + "Failed to CUDA calloc 4194304 bytes",
        NCCL + "Cuda failure 2 'out of memory'",
    ),
    Verdict.MEMORY: (
        CUDA_TEXT,
        WORKER + "torch.OutOfMemoryError: " + CUDA_TEXT,
        "CUDA out of memory.",
        "Allocation on device 0 would exceed allowed memory. (out of memory)",
        "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() " + ASSERT,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
        CUDNN_ATTENTION + "err 2 != CUDA_SUCCESS :: shimCuLaunchKernelEx" + OUTSIDE,
        CUDNN_ATTENTION + "CUDA_ERROR_OUT_OF_MEMORY" + OUTSIDE,
        "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback (most recent call "
        "last):\ntorch.AcceleratorError: CUDA error: out of memory\n",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 268435456 bytes. Error code 12 (Cannot allocate memory)",
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried",
        "std::bad_alloc",
        "unable to mmap 4096 bytes from file </torch_1_2>: Cannot allocate memory (12)",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    ),
    Verdict.SUSPECT: (
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a …",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "GET was unable to find an engine to execute this computation",
        "could not create a primitive",
        KILLED + "Killed. ",
        KILLED + "Bus error. It is possible that dataloader's workers are out of shared memory.",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "cuDNN error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED",
        "Expected mha_graph.execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true, but got "
        "false.  (Could this error message be improved?  If so, please report an enhancement request to "
        "PyTorch.)",
        CUDNN_ATTENTION + "CUDNN_STATUS_BAD_PARAM",
    ),
    Verdict.NONE: (
        "CUDA out of memory. is what I would call it",
        "",
        "Expected mha_graph.validate().is_good() to be true, but got false.",
        "out of memory slots in the pool",
        "my CUDA out of memory handler is missing",
        "CUDA error: an illegal memory access was encountered" + HINT,
        "CUDA error: device-side assert triggered" + HINT,
        "could not create a primitive descriptor for a matmul primitive",
        "r == 0 " + ASSERT,
        NCCL + "Cuda failure 1 'invalid argument'",
        "Triton Error [CUDA]: device kernel image is invalid",
        KILLED + "Segmentation fault. ",
        "DataLoader worker (pid(s) 4711) exited unexpectedly",
        "can't start new thread",  # the limit of threads, as well as no memory for a stack
    ),
}


def chained(*errors: BaseException, by: str = "__cause__") -> BaseException:
    """Link each error to the next as its cause or context, and return the first."""
    for outer, inner in itertools.pairwise(errors):
        setattr(outer, by, inner)
    return errors[0]


def oom() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(CUDA_TEXT)


def test_type_decides_then_text_on_runtime_errors_and_on_no_user_type() -> None:
    for verdict, error in BY_TYPE:
        assert classify(error) is verdict, repr(error)
    for verdict, texts in BY_TEXT.items():
        for text in texts:
            assert classify(RuntimeError(text)) is verdict, text
            assert classify(torch.AcceleratorError(text)) is verdict
            assert classify(ValueError(text)) is Verdict.NONE
            assert is_oom(RuntimeError(text)) is (verdict in {Verdict.MEMORY, Verdict.FATAL})


def test_errors_on_purpose_and_signals_are_never_out_of_memory() -> None:
    for error in (DoesNotFitError(CUDA_TEXT), InputError(CUDA_TEXT), RestartSmallerError(CUDA_TEXT)):
        chained(error, oom())
        assert classify(error) is Verdict.NONE
        assert classify(chained(RuntimeError("the caller's"), error)) is Verdict.NONE
    for stop in (KeyboardInterrupt(), SystemExit(1), Interrupted("stopped", signal_number=15)):
        assert classify(chained(stop, oom(), by="__context__")) is Verdict.NONE


def test_chain_is_walked_as_a_traceback_prints_it() -> None:
    assert classify(chained(KeyError("step"), oom())) is Verdict.MEMORY
    while_handling = chained(KeyError("step"), oom(), by="__context__")
    assert classify(while_handling) is Verdict.MEMORY
    while_handling.__suppress_context__ = True
    assert classify(while_handling) is Verdict.NONE
    # The cause stands instead of the context.
    explained = chained(KeyError("step"), oom(), by="__context__")
    assert classify(chained(explained, ValueError("the cause"))) is Verdict.NONE
    errors: list[Exception] = [ValueError(str(depth)) for depth in range(2000)]
    assert classify(chained(*errors, MemoryError())) is Verdict.MEMORY
    first = RuntimeError("first")
    assert classify(chained(first, RuntimeError("second"), first)) is Verdict.NONE


def test_heaviest_link_decides() -> None:
    for outer, inner, verdict in (
        (CUDA_TEXT, "CUDA error: out of memory", Verdict.FATAL),
        ("CUDA error: out of memory", CUDA_TEXT, Verdict.FATAL),
        ("could not create a primitive", "std::bad_alloc", Verdict.MEMORY),
        ("DataLoader worker (pid(s) 4711) exited unexpectedly", KILLED + "Killed. ", Verdict.SUSPECT),
        # A dead context is dead, whatever led to it.
        ("CUDA error: an illegal memory access was encountered", CUDA_TEXT, Verdict.NONE),
        (CUDA_TEXT, "CUDA error: device-side assert triggered", Verdict.NONE),
    ):
        assert classify(chained(RuntimeError(outer), RuntimeError(inner), by="__context__")) is verdict
    # Only torch can say that the context is dead.
    assert classify(chained(ValueError("CUDA error: device-side assert triggered"), oom())) is Verdict.MEMORY


def test_a_context_is_lost_by_sticky_errors() -> None:
    """The texts are those of ``libcudart`` 13.0."""
    for said in (
        "an illegal memory access was encountered",
        "the launch timed out and was terminated",
        "uncorrectable NVLink error detected during the execution",
    ):
        assert loses_context(RuntimeError(f"CUDA error: {said}{HINT}"))
    for other in (RuntimeError("CUDA error: invalid argument"), oom()):
        assert not loses_context(other)


def test_first_line() -> None:
    for error, line in (
        (RuntimeError("CUDA error: out of memory" + HINT), "CUDA error: out of memory"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("\n\n  the first   \n the second"), "the first"),
        (KeyError("weight"), "KeyError: 'weight'"),
        # A broken text does not hide the error.
        (Unprintable(), "Unprintable"),
        # The link that ran out.
        (chained(RuntimeError("the step failed"), RuntimeError("std::bad_alloc")), "std::bad_alloc"),
    ):
        assert first_line(error) == line
    assert len(first_line(chained(RuntimeError("the step failed"), oom()))) <= 240
