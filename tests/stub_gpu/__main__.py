"""Run a command on the stub GPU: ``python -m tests.stub_gpu [--torch VERSION] -- COMMAND``."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys

from tests.stub_gpu.environment import Unavailable, prepare, shared_table

CANNOT_BE_HAD = 69  # EX_UNAVAILABLE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stub_gpu", description=__doc__)
    parser.add_argument("--torch", default="2.13.0", help="the version of torch (default: %(default)s)")
    parser.add_argument("--gpus", type=int, help="how many GPUs there are (default: STUB_GPU_COUNT, else 1)")
    parser.add_argument("--few", action="store_true", help="leave out the integrations' libraries")
    parser.add_argument("command", nargs="*", help="the command; without one, only the environment is made")
    options = parser.parse_args()
    try:
        folder, variables = prepare(options.torch, extras=not options.few)
    except Unavailable as error:
        sys.stderr.write(f"The stub GPU cannot be had: {error}\n")
        return CANNOT_BE_HAD
    if not options.command:
        sys.stdout.write(f"{folder}\n")
        return 0
    if options.gpus:
        variables["STUB_GPU_COUNT"] = str(options.gpus)
    with shared_table() as table:
        variables.setdefault("STUB_GPU_STATE", table)
        program = subprocess.Popen(options.command, env=variables)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: program.send_signal(received))
        code = program.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main())
