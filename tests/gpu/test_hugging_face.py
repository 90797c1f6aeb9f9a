"""Predicted peaks of models that are only named, against a plain training of the same config on the GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import autobatch
from autobatch.core.units import MiB
from benchmarks.gpu.limits import alone
from tests.support.configs import CONFIGS, config_folder

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")
SIZE, SEQUENCE = 64, 64
"""Samples of a micro-batch, and their tokens: activations outweigh the weights of such small models."""
WAYS: dict[str, dict[str, Any]] = {"full": {}, "checkpointing": {"checkpointing": True}, "lora": {"lora": 16}}


def plain(place: str, way: str) -> tuple[int, int]:
    """Train a model of a config for three steps; return the peaks that were allocated and reserved."""
    # Without what cuBLAS holds, which is told apart, and the stub's scratch of cuDNN, which is made up.
    os.environ |= {"STUB_CUDNN_WORKSPACE_MIB": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    config = transformers.AutoConfig.from_pretrained(place, use_cache=False)
    model = getattr(transformers, config.architectures[0])(config)
    takes = model.main_input_name
    if way == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    if way == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.cuda().train()
    tokens = torch.zeros(SIZE, SEQUENCE, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if takes == "pixel_values":
        pixels = torch.zeros(SIZE, 3, config.image_size, config.image_size)
        batch = {"pixel_values": pixels, "labels": tokens[:, 0]}
    elif takes == "input_features":
        sounds = torch.zeros(SIZE, config.num_mel_bins, 2 * config.max_source_positions)
        batch = {"input_features": sounds, "labels": tokens}
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            here = {name: one.cuda() for name, one in batch.items()}
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**here).loss
            del here  # as transformers' Trainer does
            (loss / 2).backward()
            del loss
        optimizer.step()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_predicted_peak_is_that_of_a_plain_training(tmp_path: Path, name: str, way: str) -> None:
    if way == "lora":
        pytest.importorskip("peft")
    place = config_folder(tmp_path, name, torch_dtype="float32")
    sequence = {} if name == "vit" else {"sequence": SEQUENCE}
    found = autobatch.estimate(
        f"hf:{place}", profile=["h100-80gb"], micro_batch=SIZE, precision="bf16", **sequence, **WAYS[way]
    )
    (one,) = found.estimates
    allocated, reserved = alone(plain, str(place), way)
    held = one.memory["workspaces of cuBLAS"]
    assert one.peak_allocated_bytes - held == pytest.approx(allocated, rel=0.03)
    # What a kernel takes for a moment may open one more segment.
    assert one.peak_reserved_bytes - held == pytest.approx(reserved, rel=0.02, abs=20 * MiB)
