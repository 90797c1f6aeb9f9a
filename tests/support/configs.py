"""Configs of small Hugging Face models, one of each kind, as folders that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DECODER = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **DECODER, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    },
    "qwen3": {
        **DECODER, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64,
        "patch_size": 8,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 64,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 16, "max_source_positions": 100,
        "max_target_positions": 64, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    },
}  # fmt: skip


def config_folder(folder: Path, name: str, **changes: Any) -> Path:
    """Write the config of a model, and return its folder."""
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}), encoding="utf-8")
    return place
