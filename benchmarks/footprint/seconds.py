"""The cost of an estimate in a process of its own: wall time, CPU time and peak memory.

    python -m benchmarks.footprint.seconds gpt2 h100-80gb

The process gets only the shapes, and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch

from autobatch.estimates.estimator import estimate_limits
from benchmarks.footprint.decoders import GPT2_SMALL, LLAMA2_7B, decoder
from tests.support.options import as_options

DECODERS = {"gpt2": (GPT2_SMALL, "GPT-2 small"), "7b": (LLAMA2_7B, "Llama 2 7B")}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the copies that trace in it."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("which", choices=DECODERS, help="model")
    parser.add_argument("gpus", nargs="+", help="profiles, for example h100-80gb")
    options = parser.parse_args()
    which, gpus = options.which, options.gpus
    torch.set_num_threads(1)
    shape, title = DECODERS[which]
    wall, cpu = time.perf_counter(), cpu_seconds()
    found = estimate_limits(
        decoder(shape, which), as_options("estimate", profile=gpus, micro_batch=1), home=Path("nowhere")
    )
    one = found.estimates[0]
    print(
        json.dumps(
            {
                "model": title,
                "length": shape.length,
                "gpus": gpus,
                "with_remedies": one.remedies is not None,
                "wall_seconds": time.perf_counter() - wall,
                "cpu_seconds": cpu_seconds() - cpu,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "parameters_bytes": one.memory["parameters"],
                "peak_allocated_bytes": one.peak_allocated_bytes,
                "micro_batch_high": one.micro_batch_high,
            }
        )
    )


if __name__ == "__main__":
    main()
