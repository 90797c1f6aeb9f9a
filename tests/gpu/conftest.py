"""A command on GPUs, and other processes that take their memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from autobatch.cli.main import run as run_command
from benchmarks.gpu.limits import alone
from tests.support.commandline import Ran, autobatch, environment

WORKLOAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from autobatch import Workload

def model():
    return nn.Sequential(nn.Linear(512, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 100, bias=False))

def workload():
    torch.manual_seed(0)
    return Workload(
        model=model,
        train_data=TensorDataset(torch.randn(20_000, 512), torch.randint(100, (20_000,))),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params, learning_rate: torch.optim.AdamW(params, lr=learning_rate),
        learning_rate=1e-3,
    )
"""
Command = Callable[..., Ran]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, or the stub: python -m tests.stub_gpu -- pytest -m gpu tests/gpu")


@pytest.fixture(scope="session", autouse=True)
def own_gpus(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each worker stub GPUs of its own: a test that fills one must fail no test beside it."""
    if "STUB_GPU_STATE" in os.environ:
        os.environ["STUB_GPU_STATE"] = str(tmp_path_factory.mktemp("gpus") / "table")


@pytest.fixture
def on_gpu(tmp_path: Path) -> Command:
    """Run the command beside the file ``train.py`` of a workload, on so many GPUs; check its exit code."""
    (tmp_path / "train.py").write_text(WORKLOAD, encoding="utf-8")
    (tmp_path / "table").touch()

    def run(*arguments: object, gpus: int = 1, codes: Sequence[int] = (0,), **variables: str) -> Ran:
        variables = {
            "STUB_GPU_STATE": str(tmp_path / "table"),
            "STUB_GPU_COUNT": str(gpus),
            "STUB_CONTEXT_LOG": str(tmp_path / "contexts"),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
            **variables,
        }
        if "--ranks" in arguments:  # whose launcher ends its process
            done = autobatch(tmp_path, *arguments, timeout=300, **variables)
        else:
            done = Ran(*alone(command, tmp_path, [*map(str, arguments)], variables))
        assert done.code in codes, done
        return done

    return run


def command(folder: Path, words: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Run the command in this process, a fork of one that has imported torch, and return what it wrote."""
    os.chdir(folder)
    os.environ.update(environment(folder, **variables))
    files = [folder / "out", folder / "err"]
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    code = run_command(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    return (code, *(file.read_text() for file in files))


@pytest.fixture
def contexts(tmp_path: Path) -> Callable[[], dict[int, set[int]]]:
    """Return the GPUs on which each process opened a context."""

    def read() -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        log = (tmp_path / "contexts").read_text() if (tmp_path / "contexts").exists() else ""
        for process, gpu in re.findall(r"process (\d+) opens a context on GPU (\d+)", log):
            found.setdefault(int(process), set()).add(int(gpu))
        return found

    return read


@pytest.fixture
def hog() -> Iterator[Callable[..., int]]:
    """Take MiB of a GPU in another process until the test ends; return its process id."""
    started: list[subprocess.Popen[str]] = []

    def take(mib: int, gpu: int = 0, **variables: str) -> int:
        words = [sys.executable, "-m", "tests.stub_gpu.hog", str(gpu), str(mib)]
        process = subprocess.Popen(
            words, env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(mib << 20)
        return process.pid

    yield take
    for process in started:
        process.communicate()
