"""A process that takes memory of a GPU, without torch: ``python -m tests.stub_gpu.hog GPU MIB``.

It writes the bytes that it got as a line, and holds them until its standard input ends.
"""

from __future__ import annotations

import ctypes
import sys


def main() -> None:
    gpu, mib = (int(argument) for argument in sys.argv[1:])
    runtime = ctypes.CDLL("libcudart.so.13")
    address = ctypes.c_void_p()
    if runtime.cudaSetDevice(gpu) or runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(mib << 20)):
        raise SystemExit(f"GPU {gpu} has no {mib} MiB")
    sys.stdout.write(f"{mib << 20}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
