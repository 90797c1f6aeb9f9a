"""Which GPUs a process touches."""

from __future__ import annotations

import pytest

from tests.support.kernels import only_stub

pytestmark = [pytest.mark.gpu, only_stub]
WITHIN = ("train.py", "--memory-budget", "200MiB")
TRAIN = (*WITHIN, "--split-check", "off", "--target-batch", 1024, "--steps", 2, "--json")


def test_a_command_opens_contexts_on_its_gpu_alone(on_gpu, contexts) -> None:
    done = on_gpu("fit", *TRAIN, "--trials", 1, "--device", "cuda:1", gpus=2)
    assert done.json["device"]["other_processes_bytes"] == 0
    assert done.json["tuning"]["trials"] == 1
    assert contexts()
    assert all(gpus == {1} for gpus in contexts().values())


def test_each_rank_opens_a_context_on_its_gpu_alone(on_gpu, contexts) -> None:
    more = ("--ranks", 2, "--device", "cuda", "--trials", 0)
    done = on_gpu("fit", *TRAIN, *more, gpus=3)
    assert sum(done.json["plan"]["micro_batches"]) * 2 == 1024
    opened = contexts().values()
    assert all(len(gpus) == 1 for gpus in opened)
    assert set().union(*opened) == {0, 1}


def test_an_older_gpu_beside_a_newer_one_keeps_the_precision_of_torch(on_gpu) -> None:
    unlike = {"STUB_GPU_CAPABILITY": "9.0,7.5", "STUB_GPU_TOTAL_MIB": "8192,4096"}
    more = ("--device", "cuda:1", "--target-batch", 64, "--json")
    done = on_gpu("plan", *WITHIN, *more, gpus=2, **unlike)
    assert done.json["plan"]["precision"] == "fp32"
    assert done.json["device"]["total_bytes"] == 4096 << 20
