"""Predicted peaks of models that are only named, against a plain training of the same config on the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autobatch
from autobatch.core.units import MiB
from tests.support.configs import CONFIGS, config_folder

pytestmark = pytest.mark.gpu
pytest.importorskip("transformers")
PLAIN = """
import json, sys
import torch, transformers

place, size, sequence, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
config = transformers.AutoConfig.from_pretrained(place, use_cache=False)
model = getattr(transformers, config.architectures[0])(config)
takes = model.main_input_name
if way == "lora":
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
if way == "checkpointing":
    model.gradient_checkpointing_enable({"use_reentrant": False})
model.cuda().train()
tokens = torch.zeros(size, sequence, dtype=torch.long)
if takes == "pixel_values":
    pixels = torch.zeros(size, 3, config.image_size, config.image_size)
    batch = {"pixel_values": pixels, "labels": tokens[:, 0]}
elif takes == "input_features":
    batch = {"input_features": torch.zeros(size, config.num_mel_bins, 2 * config.max_source_positions)}
    batch["labels"] = tokens
else:
    batch = {"input_ids": tokens, "labels": tokens.clone()}
trained = [one for one in model.parameters() if one.requires_grad]
optimizer = torch.optim.AdamW(trained, fused=True)
for step in range(3):
    optimizer.zero_grad()
    for micro in range(2):
        here = {name: one.cuda() for name, one in batch.items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**here).loss
        del here  # as transformers' Trainer does
        (loss / 2).backward()
        del loss
    optimizer.step()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""
SIZE, SEQUENCE = 64, 64
"""Samples of a micro-batch, and their tokens: activations outweigh the weights of such small models."""
WAYS: dict[str, dict[str, Any]] = {"full": {}, "checkpointing": {"checkpointing": True}, "lora": {"lora": 16}}


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
    command = [sys.executable, "-c", PLAIN, str(place), str(SIZE), str(SEQUENCE), way]
    # No trace knows what cuBLAS and cuDNN hold, and the scratch of the stub's cuDNN is made up.
    variables = {**os.environ, "STUB_CUDNN_WORKSPACE_MIB": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert ran.returncode == 0, ran.stderr
    allocated, reserved = json.loads(ran.stdout.splitlines()[-1])
    assert one.peak_allocated_bytes == pytest.approx(allocated, rel=0.03)
    # What a kernel takes for a moment may open one more segment.
    assert one.peak_reserved_bytes == pytest.approx(reserved, rel=0.02, abs=20 * MiB)
