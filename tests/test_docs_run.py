"""The Python code of the documents runs, page by page, each page in one namespace."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader

import autobatch
from autobatch.step.train_state import build_optimizers
from autobatch.training.run import build_schedules
from autobatch.workload.order import GlobalBatchSampler
from tests.support.commandline import printed
from tests.support.custom_loops import Sam
from tests.support.libraries import installed
from tests.support.training import make_workload, weights
from tests.test_docs import ROOT, blocks, text_of

README, LOOPS, DATA, LOSS, TUTORIAL = (
    ROOT / name for name in ("README.md", "docs/loops.md", "docs/data.md", "docs/loss.md", "docs/tutorial.md")
)
COMPLETE = [TUTORIAL, ROOT / "docs/reports.md", ROOT / "docs/which-gpu.md"]
"""Pages whose code stands alone."""


@pytest.fixture(autouse=True)
def beside_the_program_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(blocks(TUTORIAL, "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def reader() -> dict[str, Any]:
    """Return the program of the tutorial, and what else its reader has."""
    names = runpy.run_path("train.py")
    dataset, model = names["data"](), names["build_model"]()
    names |= {
        "generator": nn.Linear(8, 8),
        "discriminator": nn.Linear(8, 1),
        "bce": binary_cross_entropy_with_logits,
        "autobatch": autobatch,
        "dataset": dataset,
        "sentences": [torch.ones(4, dtype=torch.long)],
        "loader": DataLoader(dataset, batch_size=32, shuffle=True),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    for network in ("generator", "discriminator"):
        names[f"of_{network}"] = torch.optim.SGD(names[network].parameters(), lr=0.1)
    return names


def run_page(page: Path, names: dict[str, Any]) -> int:
    """Run the blocks of a page in order, and return their number."""
    codes = blocks(page, "python")
    for number, code in enumerate(codes, 1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)
    return len(codes)


@pytest.mark.program
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", COMPLETE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_as_it_stands(page: Path) -> None:
    assert run_page(page, {"__name__": f"docs_{page.stem.replace('-', '_')}"}) > 0


@pytest.mark.program
def test_the_code_on_loops_runs_beside_the_program_of_the_tutorial() -> None:
    first, *others = blocks(LOOPS, "python")
    alone: dict[str, Any] = {}
    exec(first, alone)
    names = reader() | alone | {"sam": Sam(alone["model"].parameters(), lr=0.1)}
    before = weights(names["model"])
    for code in others:
        exec(code, names)
    assert not torch.equal(weights(names["model"]), before), "its loops train"


class Bigrams(nn.Embedding):
    """A model that returns logits and the loss, as nanoGPT's does."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = super().forward(x)
        return logits, cross_entropy(logits.flatten(0, 1), y.flatten())


@pytest.mark.program
def test_the_code_on_data_runs_and_the_text_of_nanogpt_trains(tmp_path: Path) -> None:
    (np.arange(4000) % 17).astype(np.uint16).tofile(tmp_path / "train.bin")
    names = reader() | {"os": os, "data_dir": tmp_path, "block_size": 8, "config": 17}
    names |= {"GPT": lambda config: Bigrams(config, config)}
    names |= {"optimizer": torch.optim.AdamW, "validation_loader": names["loader"]}
    names["prefetcher"] = SimpleNamespace(
        loader=names["loader"], mean=torch.zeros(1, 8), std=torch.ones(1, 8)
    )
    assert run_page(DATA, names) > 0
    options = {"target_batch": 12, "max_micro_batch": 5, "steps": 3, "trials": 0, "device": "cpu"}
    found = autobatch.fit(names["workload"], **options, out=tmp_path / "run")
    assert found.training.samples == 36


def test_the_functions_of_the_page_on_optimizers_train() -> None:
    """The names of their first arguments decide what they get, and each loss reaches its own part alone."""
    first, second, schedules, following = blocks(LOSS, "python")[-4:]
    names: dict[str, Any] = {"torch": torch, "functional_call": torch.func.functional_call}
    names["dataset"] = range(2048)
    names["bce"] = binary_cross_entropy_with_logits
    body, head = nn.Linear(4, 3), nn.Linear(3, 2)
    model = nn.Sequential(body, head)
    model.head = head
    steps = GlobalBatchSampler(samples=2, target_batch=1, seed=0, steps=60)
    for code, last in zip(re.split(r"\n\n\n", schedules), (0.0, 0.1, 0.61 * 0.999**60), strict=True):
        exec(code, names)
        one = torch.optim.SGD(body.parameters(), lr=1.0)
        (built,) = build_schedules(make_workload(schedule=names["schedule"]), (one,), steps)
        for _ in range(60):
            one.step()
            built.step()
        assert built.get_last_lr() == pytest.approx([last])
    for code, trained in zip(re.split(r"\n\n\n", first), ([3 * 2 + 2], [4 * 3 + 3 * 2, 3 + 2]), strict=True):
        exec(code, names)
        made = build_optimizers(make_workload(optimizer=names["optimizer"]), model, 0.1)
        groups = [group for one in made for group in one.param_groups]
        assert [sum(p.numel() for p in group["params"]) for group in groups] == trained
    exec(second, names)
    gan = nn.Module()
    gan.generator, gan.discriminator = nn.Linear(8, 4), nn.Linear(4, 1)
    generator, discriminator = names["optimizer"](gan, 0.1)
    names["loss"](gan, torch.randn(5, 4)).backward()
    for one in (generator, discriminator):
        assert all(p.grad is not None for group in one.param_groups for p in group["params"])
    exec(following, names)
    dino = nn.Module()
    dino.teacher, dino.student, dino.logit_scale = (
        nn.Linear(2, 1),
        nn.Linear(2, 1),
        nn.Parameter(torch.ones(())),
    )
    before, one = weights(dino.teacher), names["optimizer"](dino, 0.1)
    with torch.no_grad():
        one.step()
    assert torch.allclose(weights(dino.teacher), before.lerp(weights(dino.student), 0.004))


def sides_of(diff: str) -> list[str]:
    """Return the code before and after a difference."""
    return ["\n".join(line[1:] for line in diff.splitlines() if line[:1] != other) for other in "+-"]


@pytest.mark.program
def test_a_project_begins_with_the_program_of_the_readme_and_its_command_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").unlink()
    program = blocks(README, "python")[0]
    assert len(program.splitlines()) <= 20
    (command,) = re.findall(r"^autobatch fit train.py .*$", text_of(README), re.MULTILINE)
    text = printed_by(f"autobatch init . && {command}", tmp_path)
    assert (tmp_path / "train.py").read_text() == program.removeprefix("# train.py\n")
    assert "batch 2,048 in" in text


def in_libraries() -> dict[str, Any]:
    """Return what a reader has before a loop of transformers or Lightning."""
    lightning, transformers = installed("lightning"), installed("transformers")
    from tests.support.lightning_modules import Classifier, Points
    from tests.support.trainers import gpt2, pad, texts

    names = {"autobatch": autobatch, "lightning": lightning, "Trainer": transformers.Trainer}
    names |= {"arguments": transformers.TrainingArguments("out", max_steps=2)}
    names |= {"model": gpt2(), "dataset": texts(), "collator": pad}
    return names | {"module": Classifier(), "datamodule": Points()}


def moved_by(code: str, names: dict[str, Any]) -> set[str]:
    """Run code, and return the names of the models whose weights it has moved."""
    models = {name: each for name, each in names.items() if isinstance(each, nn.Module)}
    before = {name: weights(each) for name, each in models.items()}
    exec(code, names)
    return {name for name, each in models.items() if not torch.equal(weights(each), before[name])}


@pytest.mark.program
@pytest.mark.filterwarnings("default")
def test_the_loop_of_the_readme_runs_before_and_after() -> None:
    own, libraries = blocks(README, "diff")
    program: dict[str, Any] = {"__name__": "readme", "autobatch": autobatch}
    exec(blocks(README, "python")[0], program)
    model = program["workload"]().model()
    program |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    program["loader"] = DataLoader(program["dataset"], 1000)
    assert [moved_by(code, dict(program)) for code in sides_of(own)] == [{"model"}] * 2
    assert libraries == "\n".join(blocks(LOOPS, "diff")[:2]), "which run below"


@pytest.mark.program
@pytest.mark.filterwarnings("default")
def test_the_loops_of_libraries_run_before_and_after() -> None:
    accelerate = installed("accelerate")
    with_trainer, with_module, with_accelerate = blocks(LOOPS, "diff")
    for diff, model in ((with_trainer, "model"), (with_module, "module")):
        assert [moved_by(code, in_libraries()) for code in sides_of(diff)] == [{model}] * 2
    for code in sides_of(with_accelerate):
        assert moved_by(code, reader() | {"Accelerator": accelerate.Accelerator}) == {"model"}


def printed_by(lines: str, folder: Path) -> str:
    """Run commands in a folder, and return all that they print."""
    commands = [shlex.split(line, comments=True) for line in re.split(r"\n|&&", lines)]
    return "".join(printed(folder, *words) for words in commands if words)


@pytest.mark.program
def test_the_commands_of_the_tutorial_print_what_it_quotes(tmp_path: Path) -> None:
    """Only the figures that the training reaches may differ by a little from machine to machine."""
    quotes, text = blocks(TUTORIAL, "text"), ""
    for lines, quoted in zip(blocks(TUTORIAL, "bash"), quotes, strict=True):
        text = printed_by(lines, tmp_path)
        limits = [line for line in quoted.splitlines() if not line.startswith("reached")]
        assert set(limits) <= set(text.splitlines()), text
    assert "in 4 micro-batches" in "".join(quotes)
    claimed, reached = (re.findall(r"held-out accuracy ([\d.]+) %", text) for text in ("".join(quotes), text))
    assert [float(one) for one in reached] == pytest.approx([float(one) for one in claimed], abs=1.5)
