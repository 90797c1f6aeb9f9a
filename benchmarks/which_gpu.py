"""The largest micro-batch of well-known models on common GPUs, predicted from their configs.

    python -m benchmarks.which_gpu

traces each model in each way of training, saves the figures in ``benchmarks/results``, and writes the tables
of ``docs/which-gpu.md``. It needs transformers and peft, no GPU, no network and no weights: the configs below
hold what the authors of the models have published, as far as it decides the shapes of tensors. The numbers of
parameters come from the authors' pages too, so that a test can tell that a config is that of its model.
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
from autobatch.core.options import ModelOptions
from autobatch.estimates.copies import run_in_copies
from autobatch.estimates.estimator import Estimator
from autobatch.estimates.gpus import Gpus
from autobatch.estimates.hugging_face import open_named
from benchmarks.report import RESULTS, arguments, markdown
from tests.support.options import as_options

RESULT = RESULTS / "which-gpu_amd-epyc_2026-11-23.json"
PAGE = Path(__file__).parents[1] / "docs/which-gpu.md"
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
    model: ModelOptions
    ranks: int = 1


WAYS = {
    "full": Way("All weights", "", ModelOptions()),
    "checkpointed": Way(
        "All weights, each block recomputed", "--checkpointing", ModelOptions(checkpointing=True)
    ),
    "lora": Way("LoRA of rank 16", "--lora 16", ModelOptions(lora=16)),
    "ranks": Way("All weights, shared by 8 GPUs (FSDP2)", "--ranks 8 --parallel shard", ModelOptions(), 8),
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


def _decoder(kind: str, head: str, *shape: int, **others: Any) -> dict[str, Any]:
    """Return the config of a decoder: layers, width, inner width, heads, heads of keys, words, positions."""
    layers, width, inner, heads, key_heads, words, positions = shape
    return {
        "architectures": [head],
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": words,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        **others,
    }


def _llama(*shape: int, **others: Any) -> dict[str, Any]:
    return _decoder("llama", "LlamaForCausalLM", *shape, **others)


def _qwen2(*shape: int, **others: Any) -> dict[str, Any]:
    return _decoder("qwen2", "Qwen2ForCausalLM", *shape, **others)


def _qwen3(*shape: int, **others: Any) -> dict[str, Any]:
    return _decoder("qwen3", "Qwen3ForCausalLM", *shape, head_dim=128, **others)


def _encoder(kind: str, head: str, layers: int, width: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "architectures": [head],
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        **others,
    }


def _whisper(layers: int, width: int, heads: int, words: int, mels: int) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": width,
        "vocab_size": words,
        "num_mel_bins": mels,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        **{f"{part}_layers": layers for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": heads for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 4 * width for part in ("encoder", "decoder")},
        "torch_dtype": "float16",
    }


LABELS = {str(number): f"LABEL_{number}" for number in range(1000)}
TIED = {"tie_word_embeddings": True}
MODELS = {
    "google-bert/bert-base-uncased": Model(
        109_514_298,
        _encoder("bert", "BertForMaskedLM", 12, 768, 12, vocab_size=30522, max_position_embeddings=512),
    ),
    "FacebookAI/roberta-large": Model(
        355_412_057,
        _encoder(
            "roberta", "RobertaForMaskedLM", 24, 1024, 16,
            vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, pad_token_id=1,
        ),
    ),
    "google/vit-large-patch16-224": Model(
        304_326_632,
        _encoder(
            "vit", "ViTForImageClassification", 24, 1024, 16, image_size=224, patch_size=16,
            id2label=LABELS,
        ),
    ),
    "microsoft/resnet-50": Model(
        25_557_032,
        {
            "architectures": ["ResNetForImageClassification"], "model_type": "resnet",
            "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048], "embedding_size": 64,
            "layer_type": "bottleneck", "id2label": LABELS,
        },
    ),
    "openai/whisper-small": Model(241_734_912, _whisper(12, 768, 12, 51865, 80)),
    "openai/whisper-large-v3": Model(1_543_490_560, _whisper(32, 1280, 20, 51866, 128)),
    "google-t5/t5-small": Model(
        60_506_624,
        {
            "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 512, "d_kv": 64,
            "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6, "num_heads": 8, "vocab_size": 32128,
        },
    ),
    "openai-community/gpt2": Model(
        124_439_808,
        {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 12, "n_embd": 768,
            "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
        },
    ),
    "HuggingFaceTB/SmolLM2-135M": Model(134_515_008, _llama(30, 576, 1536, 9, 3, 49152, 8192, **TIED)),
    "Qwen/Qwen2.5-0.5B": Model(494_032_768, _qwen2(24, 896, 4864, 14, 2, 151936, 32768, **TIED)),
    "Qwen/Qwen3-0.6B": Model(596_049_920, _qwen3(28, 1024, 3072, 16, 8, 151936, 40960, **TIED)),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Model(1_100_048_384, _llama(22, 2048, 5632, 32, 4, 32000, 2048)),
    "meta-llama/Llama-3.2-1B": Model(1_235_814_400, _llama(16, 2048, 8192, 32, 8, 128256, 131072, **TIED)),
    "google/gemma-2b": Model(
        2_506_172_416,
        _decoder("gemma", "GemmaForCausalLM", 18, 2048, 16384, 8, 1, 256000, 8192, head_dim=256),
    ),
    "microsoft/Phi-3-mini-4k-instruct": Model(
        3_821_079_552,
        _decoder(
            "phi3", "Phi3ForCausalLM", 32, 3072, 8192, 32, 32, 32064, 4096,
            sliding_window=2047, pad_token_id=32000, resid_pdrop=0.0,
        ),
    ),
    "mistralai/Mistral-7B-v0.3": Model(
        7_248_023_552,
        _decoder("mistral", "MistralForCausalLM", 32, 4096, 14336, 32, 8, 32768, 32768, sliding_window=None),
    ),
    "Qwen/Qwen2.5-7B": Model(7_615_616_512, _qwen2(28, 3584, 18944, 28, 4, 152064, 131072)),
    "meta-llama/Llama-3.1-8B": Model(8_030_261_248, _llama(32, 4096, 14336, 32, 8, 128256, 131072)),
    "Qwen/Qwen3-8B": Model(8_190_735_360, _qwen3(36, 4096, 12288, 32, 8, 151936, 40960)),
    "meta-llama/Llama-3.1-70B": Model(70_553_706_496, _llama(80, 8192, 28672, 64, 8, 128256, 131072)),
}  # fmt: skip
"""By name on the hub: those with few parameters first in each family."""


def write_config(folder: Path, name: str) -> Path:
    """Write the config of a model, and return its folder."""
    place = folder / name.rpartition("/")[2]
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(MODELS[name].config))
    return place


def sizes(place: Path, way: Way) -> dict[str, int]:
    """Return the largest micro-batch of a rank, by GPU; 0 if not even one sample fits."""
    options = as_options("estimate", profile=[*GPUS], precision="bf16", ranks=way.ranks)
    if way.ranks > 1:
        options = options.with_values(parallel="shard")
    workload = open_named(f"hf:{place}", way.model).workload
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
