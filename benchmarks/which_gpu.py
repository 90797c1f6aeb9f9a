"""The largest micro-batch of well-known models on common GPUs, predicted from their configs.

    python -m benchmarks.which_gpu

traces each model in each way of training, saves the figures in ``benchmarks/results``, and writes the tables
of ``docs/which-gpu.md``. It needs transformers and peft, no GPU, no network and no weights: ``models.json``
holds what the authors of the models have published, as far as it decides the shapes of tensors. The numbers
of parameters come from the authors' pages too, so that a test can tell that a config is that of its model.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autobatch import AutobatchError
from autobatch.core.options import Options
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.estimator import Estimator
from autobatch.estimates.gpus import Gpus
from autobatch.estimates.hugging_face import open_named
from benchmarks.report import RESULTS, arguments, markdown
from tests.support.options import as_options

RESULT = RESULTS / "which-gpu_amd-epyc_2026-11-23.json"
PAGE = Path(__file__).parents[1] / "docs/which-gpu.md"
CONFIGS = Path(__file__).parent / "models.json"
GPUS = {
    "rtx-3060-12gb": "RTX 3060, 12",
    "rtx-4090": "RTX 4090, 24",
    "rtx-5090": "RTX 5090, 32",
    "l40s": "L40S, 48",
    "h100-80gb": "H100, 80",
    "h200": "H200, 141",
}
"""Profiles, and what the tables call them, with their GB."""


class Way(NamedTuple):
    """A way to train."""

    title: str
    flags: str
    """What a call of ``estimate`` adds."""
    model: Options
    ranks: int = 1


WAYS = {
    "full": Way("All weights", "", Options()),
    "checkpointed": Way("All weights, each block recomputed", "--checkpointing", Options(checkpointing=True)),
    "lora": Way("LoRA of rank 16", "--lora 16", Options(lora=16)),
    "ranks": Way("All weights, shared by 8 GPUs (FSDP2)", "--ranks 8 --parallel shard", Options(), 8),
}
NONE = "·"
"""Cell of a GPU on which not even one sample fits."""
ABSENT = "n/a"
"""Cell of a model that cannot be trained in that way."""


class Model(NamedTuple):
    """A model of the Hugging Face hub."""

    parameters: int
    """As published, in the form that is trained."""
    config: dict[str, Any]
    classes: int = 0


MODELS = {name: Model(**fields) for name, fields in json.loads(CONFIGS.read_text()).items()}
"""By name on the hub: those with few parameters first in each family."""


def write_config(folder: Path, name: str) -> Path:
    """Write the config of a model, and return its folder."""
    place = folder / name.rpartition("/")[2]
    place.mkdir(parents=True, exist_ok=True)
    labels = {str(number): f"LABEL_{number}" for number in range(MODELS[name].classes)}
    (place / "config.json").write_text(
        json.dumps(MODELS[name].config | ({"id2label": labels} if labels else {}))
    )
    return place


def sizes(place: Path, way: Way) -> dict[str, int]:
    """Return the largest micro-batch of a rank, by GPU; 0 if not even one sample fits."""
    parallel = "shard" if way.ranks > 1 else "auto"
    asked = {"profile": [*GPUS], "precision": "bf16", "ranks": way.ranks, "parallel": parallel}
    options = as_options("estimate", **asked)
    workload, _ = open_named(f"hf:{place}", way.model)
    gpus = Gpus(options)
    (found,) = run_in_copies([lambda: Estimator(workload, options, gpus).limits()])
    return {one.profile: one.micro_batch for one in found}


def tables(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables as Markdown, one for each way to train that was predicted for all models."""
    parts = []
    for key, way in WAYS.items():
        if not all(key in cells[name] for name in MODELS):
            continue
        rows = []
        for name in MODELS:
            found = cells[name][key]
            sizes = [
                ABSENT if isinstance(found, str) else f"{found[gpu]:,}" if found[gpu] else NONE
                for gpu in GPUS
            ]
            rows.append([f"[{name.rpartition('/')[2]}](https://huggingface.co/{name})", *sizes])
        flags = f" {way.flags}" if way.flags else ""
        parts.append(f"### {way.title}\n\n`autobatch estimate hf:NAME --precision bf16{flags}`\n\n")
        parts.append(markdown(["model", *GPUS.values()], rows) + "\n")
    return "".join(parts)


def write_page(cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the tables after the words that the page begins with."""
    begin, _, _ = PAGE.read_text().partition("### ")
    PAGE.write_text(begin + tables(cells).rstrip() + "\n")


def main() -> None:
    """Predict what is missing in the results, and write the page."""
    arguments(__doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = (
        json.loads(RESULT.read_text()) if RESULT.exists() else {"torch": torch.__version__, "cells": {}}
    )
    cells: dict[str, dict[str, Any]] = found["cells"]
    with tempfile.TemporaryDirectory() as folder:
        for key, way in WAYS.items():
            for name in MODELS:
                if key in cells.setdefault(name, {}):
                    continue
                start = time.perf_counter()
                try:
                    cells[name][key] = sizes(write_config(Path(folder), name), way)
                except AutobatchError as error:
                    cells[name][key] = str(error).replace(folder, "")
                print(f"{time.perf_counter() - start:6.1f} s  {name} {key}: {cells[name][key]}", flush=True)
                RESULT.write_text(json.dumps(found, indent=1) + "\n")
    write_page(cells)


if __name__ == "__main__":
    main()
