"""The table of well-known models: their configs are theirs, and a prediction gives its cells again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autobatch.estimates.estimator import on_meta

pytest.importorskip("transformers")
which_gpu = pytest.importorskip("benchmarks.which_gpu")
CELLS = json.loads(which_gpu.RESULT.read_text())["cells"]


def test_a_larger_gpu_never_takes_fewer_samples() -> None:
    for name, ways in CELLS.items():
        for way, found in ways.items():
            sizes = [] if isinstance(found, str) else [found[gpu] for gpu in which_gpu.GPUS]
            assert sizes == sorted(sizes), (name, way)


@pytest.mark.program
@pytest.mark.parametrize("name", which_gpu.MODELS)
def test_a_config_has_the_parameters_that_its_authors_publish(tmp_path: Path, name: str) -> None:
    place = which_gpu.write_config(tmp_path, name)
    model, _ = on_meta(which_gpu.open_named(f"hf:{place}", which_gpu.Options())[0])
    assert sum(one.numel() for one in model.parameters()) == which_gpu.MODELS[name].parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("google-bert/bert-base-uncased", "full"),
        ("Qwen/Qwen3-0.6B", "full"),
        ("openai-community/gpt2", "checkpointed"),
        ("HuggingFaceTB/SmolLM2-135M", "lora"),
        ("meta-llama/Llama-3.1-8B", "ranks"),
    ],
)
def test_a_cell_is_predicted_again(tmp_path: Path, name: str, way: str) -> None:
    found = which_gpu.sizes(which_gpu.write_config(tmp_path, name), which_gpu.WAYS[way])
    assert found == CELLS[name][way]
