"""The Python code of the documents runs, page by page, each page in one namespace."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import autobatch
from autobatch.step.optimizers import build_optimizers
from autobatch.training.build import build_schedules
from autobatch.workload.order import GlobalBatchSampler
from benchmarks.recording import COMMAND, lines_of
from tests.support.custom_loops import Sam
from tests.support.libraries import installed
from tests.support.rank_server import RankServer
from tests.support.training import make_workload, weights

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMPLETE = [ROOT / f"docs/{page}.md" for page in ("tutorial", "reports", "which-gpu")]
"""Pages whose code stands alone."""
EXCERPTS = [ROOT / f"docs/{page}.md" for page in ("loops", "data")]
"""Pages whose code uses a model and data that a reader has: `reader` stands in for them."""


def code_of(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def promised(recording: Path) -> str:
    """Return the last screen of a recording without what the machine and the hour decide."""
    screen = " ".join(" ".join(lines_of(recording.read_text(encoding="utf-8"))).split())
    screen = re.sub(r"\d+\.[\d.]+|\d{8}-\d{6}|[\d,]+(?= samples/s)", "#", screen)
    # The tuner may choose another micro-batch. That of the probe stands before its trials.
    trials = r"trial .* (?=plan batch)", r"(?<=plan batch 1,024 in ).* (?=reached)", r"tuned .* (?=trained)"
    for its_own in (r"device .* (?=budget)", r"\(predicted .*?\)", *trials):
        screen = re.sub(its_own, "", screen)
    return screen


@pytest.mark.program
def test_the_recording_shows_what_the_first_command_of_the_readme_prints(tmp_path: Path) -> None:
    first = re.search(r"```bash\n.*\n(autobatch .*)\n", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert first is not None
    assert first[1] == COMMAND
    again = tmp_path / "again.svg"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.recording", str(again)]
    subprocess.run(command, check=True, cwd=ROOT, env=environ, timeout=240)
    kept = promised(ROOT / "docs/img/fit.svg")
    assert "plan batch 1,024 in reached" in kept
    assert promised(again) == kept


def reader() -> dict[str, Any]:
    """Return a reader's model, data and loop."""
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(2048, 4, generator=draw), torch.randint(3, (2048,), generator=draw))

    def build_model() -> nn.Module:
        return nn.Linear(4, 4)

    def workload() -> autobatch.Workload:
        return autobatch.Workload(
            model=build_model,
            train_data=dataset,
            loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda params, learning_rate: torch.optim.SGD(params, lr=learning_rate),
            learning_rate=0.1,
        )

    model = build_model()
    generator, discriminator = nn.Linear(8, 4), nn.Linear(4, 1)
    return {
        "prefetcher": SimpleNamespace(
            loader=DataLoader(dataset, batch_size=32), mean=torch.zeros(1, 4), std=torch.ones(1, 4)
        ),
        "generator": generator,
        "discriminator": discriminator,
        "of_generator": torch.optim.SGD(generator.parameters(), lr=0.1),
        "of_discriminator": torch.optim.SGD(discriminator.parameters(), lr=0.1),
        "bce": binary_cross_entropy_with_logits,
        "sam": Sam(model.parameters(), lr=0.1),
        "autobatch": autobatch,
        "torch": torch,
        "cross_entropy": cross_entropy,
        "build_model": build_model,
        "dataset": dataset,
        "sentences": [torch.ones(4, dtype=torch.long)],
        "loader": DataLoader(dataset, batch_size=32, shuffle=True),
        "validation_loader": DataLoader(dataset, batch_size=32),
        "loss": lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        "workload": workload,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "Workload": autobatch.Workload,
    }


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run_page(page: Path, names: dict[str, Any]) -> int:
    """Run the blocks of a page in order, and return their number."""
    blocks = code_of(page)
    for number, code in enumerate(blocks, 1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)
    return len(blocks)


@pytest.mark.program
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", COMPLETE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_as_it_stands(page: Path) -> None:
    assert run_page(page, {"__name__": f"docs_{page.stem.replace('-', '_')}"})


@pytest.mark.program
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", EXCERPTS, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_with_what_a_reader_has(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = autobatch.fit

    def few_steps(workload: Any, **options: Any) -> Any:
        return limited(workload, **{"steps": 1, "trials": 0, "device": "cpu", **options})

    monkeypatch.setattr(autobatch, "fit", few_steps, raising=False)
    names = reader() | {"__name__": "docs"}
    theirs = {"data": lambda: names["dataset"], "build_model": lambda: names["model"]}
    monkeypatch.setitem(sys.modules, "train", SimpleNamespace(**names | theirs))  # type: ignore[arg-type]
    if page.stem == "data":  # a workload takes the function, a loop the optimizer
        names["optimizer"] = lambda params, learning_rate: torch.optim.SGD(params, lr=learning_rate)
        np.zeros(100, np.uint16).tofile("train.bin")
        names |= {"os": os, "data_dir": ".", "block_size": 8}
    assert run_page(page, names)


def test_the_functions_of_the_page_on_optimizers_train() -> None:
    """The names of their first arguments decide what they get, and each loss reaches its own part alone."""
    first, second, schedules, following = code_of(ROOT / "docs/loss.md")[-4:]
    names: dict[str, Any] = {
        "torch": torch,
        "functional_call": torch.func.functional_call,
        "bce": binary_cross_entropy_with_logits,
    }
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
        workload = reader()["workload"]()
        made = build_optimizers(replace(workload, optimizer=names["optimizer"]), model, 0.1)
        groups = [group for one in made for group in one.param_groups]
        assert [sum(p.numel() for p in group["params"]) for group in groups] == trained
    exec(second, names)
    exec(following, names)
    gan = nn.Module()
    gan.generator, gan.discriminator = nn.Linear(8, 4), nn.Linear(4, 1)
    generator, discriminator = names["optimizer"](gan, 0.1)
    names["loss"](gan, torch.randn(5, 4)).backward()
    for one in (generator, discriminator):
        assert all(p.grad is not None for group in one.param_groups for p in group["params"])


@pytest.mark.program
def test_the_text_of_nanogpt_trains_in_parts_as_it_does_whole(tmp_path: Path) -> None:
    """Only GPT is a stand-in: it returns logits and the loss, as nanoGPT's does."""
    (code,) = (one for one in code_of(ROOT / "docs/data.md") if ".unfold(" in one)
    (np.arange(4000) % 17).astype(np.uint16).tofile(tmp_path / "train.bin")

    class Bigrams(nn.Embedding):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = super().forward(x)
            return logits, cross_entropy(logits.flatten(0, 1), y.flatten())

    names: dict[str, Any] = {"os": os, "torch": torch, "block_size": 8}
    names |= {"GPT": lambda config: Bigrams(config, config, dtype=torch.float64), "config": 17}
    names |= {"Workload": autobatch.Workload, "data_dir": tmp_path}
    exec(code, names)
    found = [
        autobatch.fit(
            names["workload"], target_batch=12, steps=40, max_micro_batch=size, trials=0, device="cpu",
            precision="fp32", out=tmp_path / str(size),
        )
        for size in (5, 12)
    ]  # fmt: skip
    assert [one.plan.accumulation_steps for one in found] == [3, 1]
    parts, whole = (one.model.weight for one in found)
    assert torch.allclose(parts, whole, rtol=1e-11)
    assert found[0].training.final_loss < found[0].training.first_loss


def with_lightning() -> dict[str, Any]:
    from tests.support.lightning_modules import Classifier, Points

    return {"module": Classifier(), "datamodule": Points()}


def with_transformers() -> dict[str, Any]:
    from tests.support.trainers import gpt2, pad, texts

    return {"model": gpt2(), "dataset": texts(), "collator": pad}


def sides_of(diff: str) -> list[str]:
    """Return the code before and after a difference."""
    return ["\n".join(line[1:] for line in diff.splitlines() if line[:1] != other) for other in "+-"]


@pytest.mark.program
def test_a_project_begins_with_the_program_of_the_readme_and_its_command_runs(
    tmp_path: Path, runner: RankServer
) -> None:
    text, program = (ROOT / "README.md").read_text(encoding="utf-8"), code_of(ROOT / "README.md")[0]
    assert len(program.splitlines()) <= 20
    (command,) = re.findall(r"^autobatch fit train.py .*$", text, re.MULTILINE)
    printed = printed_by("bash", f"autobatch init . && {command}", tmp_path, runner)
    assert (tmp_path / "train.py").read_text() == program.removeprefix("# train.py\n")
    assert "batch 2,048 in" in printed


def diffs_of(page: Path) -> list[str]:
    return re.findall(r"^```diff\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def in_libraries() -> dict[str, Any]:
    """Return what a reader has before a loop of transformers, Lightning or accelerate."""
    lightning, transformers = installed("lightning"), installed("transformers")
    names = {"autobatch": autobatch, "lightning": lightning, "Trainer": transformers.Trainer}
    names |= {"arguments": transformers.TrainingArguments("out", max_steps=2)}
    return names | with_transformers() | with_lightning()


def moved_by(code: str, names: dict[str, Any]) -> set[str]:
    """Run code, and return the names of the models whose weights it has moved."""
    models = {name: each for name, each in names.items() if isinstance(each, nn.Module)}
    before = {name: weights(each) for name, each in models.items()}
    exec(code, names)
    return {name for name, each in models.items() if not torch.equal(weights(each), before[name])}


@pytest.mark.program
@pytest.mark.filterwarnings("default")
def test_the_loop_of_the_readme_runs_before_and_after() -> None:
    own, libraries = diffs_of(ROOT / "README.md")
    program: dict[str, Any] = {"__name__": "readme", "autobatch": autobatch}
    exec(code_of(ROOT / "README.md")[0], program)
    model = program["workload"]().model()
    program |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    program["loader"] = DataLoader(program["dataset"], 1000)
    assert [moved_by(code, dict(program)) for code in sides_of(own)] == [{"model"}] * 2
    assert libraries == "\n".join(diffs_of(ROOT / "docs/loops.md")[:2]), "which run below"


@pytest.mark.program
@pytest.mark.filterwarnings("default")
def test_the_loops_of_libraries_run_before_and_after() -> None:
    accelerate = installed("accelerate")
    with_trainer, with_module, with_accelerate = diffs_of(ROOT / "docs/loops.md")
    for diff, model in ((with_trainer, "model"), (with_module, "module")):
        assert [moved_by(code, in_libraries()) for code in sides_of(diff)] == [{model}] * 2
    for code in sides_of(with_accelerate):
        assert moved_by(code, reader() | {"Accelerator": accelerate.Accelerator}) == {"model"}


def blocks_of(page: str, folder: Path) -> list[tuple[str, str]]:
    """Write the tutorial's `train.py` to a folder. Return language and text of the other blocks of a page."""
    (folder / "train.py").write_text(code_of(ROOT / "docs/tutorial.md")[0])
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(language, lines) for language, lines in blocks if not lines.startswith("# train.py")]


def printed_by(language: str, lines: str, folder: Path, runner: RankServer) -> str:
    """Run the code of a block in a folder, and return all that it prints."""
    if language == "python":
        (folder / "block.py").write_text(lines)
        return runner.program(folder, folder / "block.py")
    commands = [shlex.split(line, comments=True) for line in re.split(r"\n|&&", lines)]
    return "".join(runner.program(folder, *words) for words in commands if words)


@pytest.mark.program
def test_the_first_lines_on_loops_run_as_they_stand_in_a_fresh_folder(
    tmp_path: Path, runner: RankServer
) -> None:
    first = next(found for found in blocks_of("loops", tmp_path) if found[0] in ("python", "bash"))
    assert "Traceback" not in printed_by(*first, tmp_path, runner)


@pytest.mark.program
def test_the_commands_of_the_tutorial_print_what_it_quotes(tmp_path: Path, runner: RankServer) -> None:
    """Only the figures that the training reaches may differ by a little from machine to machine."""
    quoted, printed = "", ""
    for language, lines in blocks_of("tutorial", tmp_path):
        if language == "bash":
            printed = printed_by(language, lines, tmp_path, runner)
        elif language == "text":
            quoted += lines
            limits = [line for line in lines.splitlines() if not line.startswith("reached")]
            assert set(limits) <= set(printed.splitlines()), printed
    assert "in 4 micro-batches" in quoted
    claimed, reached = (re.findall(r"held-out accuracy ([\d.]+) %", text) for text in (quoted, printed))
    assert [float(one) for one in reached] == pytest.approx([float(one) for one in claimed], abs=1.5)
