"""The classifier against every text that was seen in the field, near misses, chains, and real errors."""

from __future__ import annotations

import errno
import itertools
import subprocess
import sys

import numpy
import pytest
import torch

from autobatch import (
    AutobatchError,
    CheckpointError,
    DoesNotFitError,
    InputError,
    Interrupted,
    NonFiniteError,
    RestartSmallerError,
)
from autobatch.device.oom import (
    Verdict,
    classify,
    first_line,
    is_fragmented,
    is_oom,
    loses_context,
    lost_context_ignored,
    memory_named,
)

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
IN_TORCHSCRIPT = (
    "The following operation failed in the TorchScript interpreter.\n"
    "Traceback of TorchScript (most recent call last):\n    return torch.neg(b) + a\n"
)
KILLED = "DataLoader worker (pid 4711) is killed by signal: "


class OutOfResources(Exception):
    """Stands for triton.runtime.errors.OutOfResources: an Exception, and no RuntimeError."""

    __module__ = "triton.runtime.errors"


class PoolError(RuntimeError):
    """A user's own."""


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


BY_TYPE = [
    (Verdict.DEVICE, torch.OutOfMemoryError(CUDA_TEXT)),
    (Verdict.DEVICE, torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB.")),
    (Verdict.DEVICE, torch.OutOfMemoryError("XPU out of memory. Tried to allocate 20.00 MiB.")),
    (Verdict.DEVICE, torch.OutOfMemoryError("any text")),
    (
        Verdict.DEVICE,
        torch.OutOfMemoryError(
            f"{CUDA_TEXT} expandable_segments is enabled. If instead the process is running out of virtual "
            "address space (VSZ), expandable segments may be over-reserving VA"
        ),
    ),
    # Addresses, not memory: a smaller micro-batch fails alike.
    (
        Verdict.NONE,
        torch.OutOfMemoryError(
            "Tried to reserve 9 bytes of virtual address space. This is virtual-address-space (VSZ) "
            "exhaustion from expandable segments, not physical GPU OOM."
        ),
    ),
    (Verdict.DEVICE, torch.OutOfMemoryError()),
    (Verdict.HOST, MemoryError()),
    (Verdict.HOST, OSError(errno.ENOMEM, "Cannot allocate memory")),
    (Verdict.NONE, OSError(errno.ENOSPC, "No space left on device")),
    (Verdict.NONE, OSError("out of memory")),
]
BY_TEXT = [
    (Verdict.FATAL, "CUDA error: out of memory"),
    (Verdict.FATAL, "CUDA error: out of memory" + HINT),
    (Verdict.FATAL, "CUDA driver error: out of memory"),
    (Verdict.FATAL, "HIP error: out of memory" + HINT),
    (
        Verdict.FATAL,
        "Search for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api",
    ),
    (Verdict.FATAL, "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"),
    (Verdict.FATAL, "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    (Verdict.FATAL, NCCL + "Failed to CUDA calloc 4194304 bytes"),
    (Verdict.FATAL, NCCL + "Failed to CUDA calloc async 24 bytes"),
    (Verdict.FATAL, NCCL + "Cuda failure 2 'out of memory'"),
    (Verdict.FATAL, NCCL + "Cuda failure 'out of memory'"),
    (
        Verdict.HOST,
        "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback (most recent call "
        "last):\ntorch.AcceleratorError: CUDA error: out of memory\n",
    ),
    (Verdict.DEVICE, CUDA_TEXT),
    (Verdict.DEVICE, WORKER + "torch.OutOfMemoryError: " + CUDA_TEXT),
    (Verdict.DEVICE, "HIP out of memory. Tried to allocate 20.00 MiB"),
    (Verdict.DEVICE, "CUDA out of memory."),
    (Verdict.DEVICE, "XPU out of memory.\n"),
    (Verdict.NONE, "CUDA out of memory. is what I would call it"),
    (Verdict.DEVICE, "XPU out of memory. Tried to allocate 20.00 MiB"),
    (Verdict.DEVICE, "MPS backend out of memory (MPS allocated: 17.72 GB, other allocations: 384.00 KB)"),
    (Verdict.DEVICE, "Allocation on device 0 would exceed allowed memory. (out of memory)"),
    (Verdict.DEVICE, "NVML_SUCCESS == r " + ASSERT),
    (Verdict.DEVICE, "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() " + ASSERT),
    (Verdict.DEVICE, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (Verdict.DEVICE, "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    (Verdict.DEVICE, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    (Verdict.DEVICE, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (Verdict.DEVICE, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    (Verdict.DEVICE, "cuFFT error: CUFFT_ALLOC_FAILED"),
    (Verdict.DEVICE, "Triton Error [CUDA]: out of memory"),
    (Verdict.DEVICE, "Triton Error [HIP]:  Code: 2, Message: out of memory"),
    (
        Verdict.HOST,
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 268435456 bytes. Error code 12 (Cannot allocate memory)",
    ),
    (
        Verdict.HOST,
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried",
    ),
    (Verdict.HOST, "std::bad_alloc"),
    (Verdict.HOST, "can't start new thread"),
    (Verdict.HOST, "unable to mmap 4096 bytes from file </torch_1_2>: Cannot allocate memory (12)"),
    (Verdict.HOST, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    (Verdict.SUSPECT, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    (Verdict.SUSPECT, "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    (Verdict.SUSPECT, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a …"),
    (Verdict.SUSPECT, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    (Verdict.SUSPECT, "GET was unable to find an engine to execute this computation"),
    (Verdict.SUSPECT, "FIND was unable to find an engine to execute this computation"),
    (Verdict.SUSPECT, "could not create a primitive"),
    (Verdict.SUSPECT, IN_TORCHSCRIPT + "RuntimeError: \n"),
    (Verdict.NONE, IN_TORCHSCRIPT + "RuntimeError: The size of tensor a (3) must match the size of b (4)\n"),
    (Verdict.SUSPECT, KILLED + "Killed. "),
    (
        Verdict.SUSPECT,
        KILLED + "Bus error. It is possible that dataloader's workers are out of shared memory.",
    ),
    (Verdict.SUSPECT, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    (Verdict.SUSPECT, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER"),
    (Verdict.SUSPECT, "cuDNN error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"),
    (
        Verdict.SUSPECT,
        "Expected mha_graph.execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true, but got "
        "false.  (Could this error message be improved?  If so, please report an enhancement request to "
        "PyTorch.)",
    ),
    (Verdict.SUSPECT, CUDNN_ATTENTION + "CUDNN_STATUS_BAD_PARAM"),
    (Verdict.DEVICE, CUDNN_ATTENTION + "err 2 != CUDA_SUCCESS :: shimCuLaunchKernelEx" + OUTSIDE),
    (Verdict.DEVICE, CUDNN_ATTENTION + "CUDA_ERROR_OUT_OF_MEMORY" + OUTSIDE),
    # Near misses.
    (Verdict.NONE, ""),
    (Verdict.NONE, "Expected mha_graph.validate().is_good() to be true, but got false."),
    (Verdict.NONE, "out of memory slots in the pool"),
    (Verdict.NONE, "out of memory"),
    (Verdict.NONE, "CUDA error: out of memory slots"),
    (Verdict.NONE, "my CUDA out of memory handler is missing"),
    (Verdict.NONE, "the std::bad_alloc handler is missing"),
    (Verdict.NONE, "CUDA error: an illegal memory access was encountered" + HINT),
    (Verdict.NONE, "CUDA error: device-side assert triggered" + HINT),
    (Verdict.NONE, "CUDA error: the launch timed out and was terminated" + HINT),
    (Verdict.NONE, "CUDA error: invalid configuration argument" + HINT),
    (Verdict.NONE, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    (
        Verdict.NONE,
        "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false",
    ),
    (Verdict.NONE, "could not create a primitive descriptor for a matmul primitive"),
    (Verdict.NONE, "r == 0 " + ASSERT),
    (Verdict.NONE, NCCL + "Cuda failure 1 'invalid argument'"),
    (Verdict.NONE, "Triton Error [CUDA]: device kernel image is invalid"),
    (Verdict.NONE, KILLED + "Segmentation fault. "),
    (Verdict.NONE, KILLED + "Aborted. "),
    (Verdict.NONE, "DataLoader worker (pid(s) 4711) exited unexpectedly"),
    (Verdict.NONE, "mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)"),
]


@pytest.mark.parametrize(("verdict", "error"), BY_TYPE, ids=lambda value: repr(value)[:40])
def test_type_decides(verdict: Verdict, error: BaseException) -> None:
    assert classify(error) is verdict


@pytest.mark.parametrize(("verdict", "text"), BY_TEXT, ids=lambda value: str(value)[:40])
def test_text_decides_on_runtime_errors_and_on_no_user_type(verdict: Verdict, text: str) -> None:
    assert classify(RuntimeError(text)) is verdict
    assert classify(torch.AcceleratorError(text)) is verdict
    assert classify(PoolError(text)) is verdict
    assert classify(ValueError(text)) is Verdict.NONE
    assert is_oom(RuntimeError(text)) is (verdict in {Verdict.DEVICE, Verdict.HOST, Verdict.FATAL})


def test_triton_is_known_by_its_module() -> None:
    kernel = (
        "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes …"
    )
    assert classify(OutOfResources(kernel)) is Verdict.NONE
    assert classify(OutOfResources("Triton Error [CUDA]: out of memory")) is Verdict.DEVICE


@pytest.mark.parametrize(
    "kind", [DoesNotFitError, RestartSmallerError, InputError, CheckpointError, NonFiniteError]
)
def test_own_errors_are_never_out_of_memory(kind: type[AutobatchError]) -> None:
    error = kind(CUDA_TEXT)
    error.__cause__ = torch.OutOfMemoryError(CUDA_TEXT)
    assert classify(error) is Verdict.NONE
    outer = RuntimeError("the caller's")
    outer.__cause__ = error
    assert classify(outer) is Verdict.NONE
    assert first_line(error) == first_line(RuntimeError(CUDA_TEXT))


def test_signals_while_memory_runs_out_stay_signals() -> None:
    for stop in (KeyboardInterrupt(), SystemExit(1), Interrupted("stopped", signal_number=15)):
        stop.__context__ = torch.OutOfMemoryError(CUDA_TEXT)
        assert classify(stop) is Verdict.NONE


def test_chain_is_walked_as_a_traceback_prints_it() -> None:
    oom = torch.OutOfMemoryError(CUDA_TEXT)
    wrapped = KeyError("step")
    wrapped.__cause__ = oom
    assert classify(wrapped) is Verdict.DEVICE

    while_handling = KeyError("step")
    while_handling.__context__ = oom
    assert classify(while_handling) is Verdict.DEVICE
    while_handling.__suppress_context__ = True
    assert classify(while_handling) is Verdict.NONE

    explained = KeyError("step")
    explained.__context__ = oom
    explained.__cause__ = ValueError("the cause stands instead of the context")
    assert classify(explained) is Verdict.NONE


def test_deep_chain_and_cycle_end() -> None:
    errors: list[Exception] = [ValueError(str(depth)) for depth in range(2000)]
    for outer, inner in itertools.pairwise(errors):
        outer.__cause__ = inner
    assert classify(errors[0]) is Verdict.NONE
    errors[-1].__cause__ = MemoryError()
    assert classify(errors[0]) is Verdict.HOST
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) is Verdict.NONE


@pytest.mark.parametrize(
    ("outer", "inner", "verdict"),
    [
        (CUDA_TEXT, "CUDA error: out of memory", Verdict.FATAL),
        ("CUDA error: out of memory", CUDA_TEXT, Verdict.FATAL),
        ("could not create a primitive", "std::bad_alloc", Verdict.HOST),
        ("DataLoader worker (pid(s) 4711) exited unexpectedly", KILLED + "Killed. ", Verdict.SUSPECT),
        # A dead context is dead, whatever led to it.
        ("CUDA error: an illegal memory access was encountered", CUDA_TEXT, Verdict.NONE),
        (CUDA_TEXT, "CUDA error: device-side assert triggered", Verdict.NONE),
    ],
)
def test_heaviest_link_decides(outer: str, inner: str, verdict: Verdict) -> None:
    error = RuntimeError(outer)
    error.__context__ = RuntimeError(inner)
    assert classify(error) is verdict


@pytest.mark.parametrize(
    "said",
    [
        "an illegal memory access was encountered",
        "the launch timed out and was terminated",
        "hardware stack error",
        "invalid program counter",
        "operation not supported on global/shared address space",
        "uncorrectable ECC error encountered",
        "uncorrectable NVLink error detected during the execution",
        "Invalid access of peer GPU memory over nvlink or a hardware error",
        "tensor memory not completely freed",
    ],
)
def test_errors_after_which_every_call_fails(said: str) -> None:
    """The texts are those of ``libcudart`` 13.0."""
    error = RuntimeError(f"CUDA error: {said}{HINT}")
    assert loses_context(error)
    with lost_context_ignored():
        raise error


def test_cleaning_up_hides_no_other_error() -> None:
    for error in (RuntimeError("CUDA error: invalid argument"), torch.OutOfMemoryError(CUDA_TEXT)):
        with pytest.raises(type(error)), lost_context_ignored():
            raise error


def test_only_torch_can_say_that_the_context_is_dead() -> None:
    error = ValueError("CUDA error: device-side assert triggered")
    error.__cause__ = torch.OutOfMemoryError(CUDA_TEXT)
    assert classify(error) is Verdict.DEVICE


def test_broken_text_does_not_hide_the_error() -> None:
    assert classify(Unprintable()) is Verdict.NONE
    assert first_line(Unprintable()) == "Unprintable"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("CUDA error: out of memory" + HINT), "CUDA error: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried …"), "CUDA out of memory. Tried …"),
        (MemoryError(), "MemoryError"),
        (KeyError("weight"), "KeyError: 'weight'"),
        (RuntimeError("\n\n  the first   \n the second"), "the first"),
    ],
)
def test_first_line(error: BaseException, line: str) -> None:
    assert first_line(error) == line


@pytest.mark.parametrize(
    ("asked", "idle", "expected"),
    [
        ("20.00 MiB", "23.00 MiB", True),
        ("20.00 MiB", "19.99 MiB", False),
        ("512 bytes", "4.00 KiB", True),
        ("1.20 GiB", "900.00 MiB", False),
    ],
)
def test_memory_is_fragmented_if_less_was_asked_for_than_lies_idle(
    asked: str, idle: str, expected: bool
) -> None:
    text = (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 14.56 GiB of which "
        f"4.00 MiB is free. Of the allocated memory 9.00 MiB is allocated by PyTorch, and {idle} is reserved "
        "by PyTorch but unallocated. If reserved but unallocated memory is large try setting …"
    )
    assert is_fragmented(torch.OutOfMemoryError(text)) is expected
    wrapped = RuntimeError("backward failed")
    wrapped.__cause__ = torch.OutOfMemoryError(text)
    assert is_fragmented(wrapped) is expected
    assert not is_fragmented(ValueError(text))


def test_first_line_shows_the_link_that_ran_out_and_is_short() -> None:
    outer = RuntimeError("the training step failed")
    outer.__cause__ = torch.OutOfMemoryError(CUDA_TEXT)
    line = first_line(outer)
    assert line.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert len(line) <= 240


def test_real_memory_error() -> None:
    with pytest.raises(MemoryError) as caught:
        numpy.empty(1 << 60, dtype=numpy.uint8)
    assert classify(caught.value) is Verdict.HOST
    with pytest.raises(MemoryError) as caught:
        bytearray(sys.maxsize)
    assert classify(caught.value) is Verdict.HOST


LIMITED = """
import resource, sys, torch
from autobatch.device.oom import classify
torch.ones(8) @ torch.ones(8)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    torch.empty(512 << 20, dtype=torch.uint8)
except Exception as error:
    found = error
print(type(found).__name__, classify(found).name, "DefaultCPUAllocator" in str(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc/self/statm (Linux)")
def test_real_allocator_error_of_torch_under_an_address_space_limit() -> None:
    child = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120, check=True
    )
    assert child.stdout.split() == ["RuntimeError", "HOST", "True"]


def test_memory_that_runs_out_in_a_named_part_is_one_error_and_others_pass() -> None:
    with (
        pytest.raises(DoesNotFitError, match=r"out of memory while it was built: MemoryError\. Free") as told,
        memory_named("it was built"),
    ):
        raise MemoryError
    assert told.value.exit_code == 3
    for error in (KeyError("x"), DoesNotFitError("its own"), InputError("out of memory slots")):
        with pytest.raises(type(error)) as same, memory_named("it was built"):
            raise error
        assert same.value is error
