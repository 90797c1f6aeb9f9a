"""Every command on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from autobatch.core.units import MiB
from tests.support.kernels import needs_kernels, only_stub
from tests.support.training import apart

pytestmark = pytest.mark.gpu
WITHIN = ("--device", "cuda", "--memory-budget", "200MiB")
TRAIN = ("train.py", *WITHIN, "--split-check", "off", "--target-batch", 4096, "--steps", 2)


def test_doctor_lists_the_gpu(on_gpu) -> None:
    done = on_gpu("doctor", "--json")
    assert done.code == 0, done.err
    assert done.json["cuda"]["gpus"][0]["name"] in on_gpu("doctor").out


@only_stub
def test_estimate_opens_no_context(on_gpu, contexts, tmp_path: Path) -> None:
    log = str(tmp_path / "contexts")
    done = on_gpu("estimate", "train.py", "--profile", "h100-80gb", "--json", STUB_CONTEXT_LOG=log)
    assert done.code == 0, done.err
    assert done.json["estimates"][0]["micro_batch"] > 1000
    assert contexts() == {}


def test_what_probe_finds_fits_and_one_more_does_not(on_gpu) -> None:
    # Too little for all samples even where no workspace of cuBLAS is kept.
    within = (*WITHIN[:-1], "120MiB")
    done = on_gpu("probe", "train.py", *within, "--json")
    assert done.code == 0, done.err
    found = done.json["probe"]
    m = found["micro_batch"]
    assert found["limited_by"] == "memory"
    assert found["oom_count"] <= 2
    assert len(found["attempts"]) <= 8
    again = [on_gpu("probe", "train.py", *within, "--micro-batch", size, "--json") for size in (m, m + 1)]
    assert [one.code for one in again] == [0, 3], [one.err for one in again]


def test_the_whole_estimate_of_a_limit_is_exact_but_for_workspaces(on_gpu) -> None:
    """The estimate sees the profile alone, and the limit was found by runs, with cuBLAS's two workspaces."""
    found = on_gpu("probe", "train.py", *WITHIN, "--json").json["probe"]
    m = found["micro_batch"]
    size = ("--micro-batch", m)
    guess = on_gpu("estimate", "train.py", "--profile", "h100-80gb", *size, "--json").json["estimates"][0]
    ran = next(one for one in found["attempts"] if one["micro_batch"] == m)
    missing = ran["peak_allocated_bytes"] - guess["peak_allocated_bytes"]
    assert -0.01 < missing / ran["peak_allocated_bytes"] < 0.01 or missing == pytest.approx(
        64 * MiB, rel=0.01
    )


def test_a_second_fit_takes_the_saved_limit_and_confirms_it(on_gpu) -> None:
    first = on_gpu("fit", *TRAIN, "--trials", 0, "--out", "one", "--json")
    second = on_gpu("fit", *TRAIN, "--trials", 0, "--out", "two", "--json")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    limits = [run.json["probe"]["micro_batch"] for run in (first, second)]
    assert limits[0] == limits[1]
    assert len(second.json["probe"]["attempts"]) == 1
    assert second.json["training"]["optimizer_steps"] == 2
    assert second.json["device"]["other_processes_bytes"] == 0


@needs_kernels
def test_a_fit_has_the_weights_of_the_cpu(on_gpu, tmp_path: Path) -> None:
    words = ("--trials", 0, "--target-batch", 64, "--max-micro-batch", 24, "--steps", 3)
    for device in ("cpu", "cuda"):
        done = on_gpu("fit", "train.py", "--device", device, *words, "--out", device)
        assert done.code == 0, done.err
    expected, found = (load_file(tmp_path / device / "model.safetensors") for device in ("cpu", "cuda"))
    assert all(apart(found[name], expected[name]) < 1e-3 for name in expected), "a step moves them by 0.1"


def test_plan_and_tune(on_gpu) -> None:
    planned = on_gpu("plan", "train.py", *WITHIN, "--target-batch", 4096, "--json")
    assert planned.code == 0, planned.err
    assert sum(planned.json["plan"]["micro_batches"]) == 4096
    tuned = on_gpu("tune", "train.py", *WITHIN, "--target-batch", 512, "--trials", 2, "--json")
    assert tuned.code == 0, tuned.err
    assert tuned.json["tuning"]["trials"] == 2


def test_an_interrupted_run_resumes(on_gpu) -> None:
    saving = (*TRAIN, "--trials", 0, "--out", "run", "--checkpoint-every", 1, "--json")
    assert on_gpu("fit", *saving).code == 0
    longer = [4 if word == 2 else word for word in saving]
    resumed = on_gpu("fit", *longer, "--resume")
    assert resumed.code == 0, resumed.err
    assert resumed.json["training"]["optimizer_steps"] == 4


def test_nothing_fits_says_where_the_memory_goes(on_gpu) -> None:
    done = on_gpu("probe", "train.py", "--device", "cuda", "--memory-budget", "24MiB")
    assert done.code == 3
    assert "24.0 MiB" in done.err
