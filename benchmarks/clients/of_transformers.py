"""Small models of transformers and peft from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from autobatch import WholeBatchLoss, Workload
from benchmarks.clients.data import (
    DRAW,
    ENDS,
    IDS,
    IMAGES,
    LABELS,
    LENGTH,
    NARROW,
    SAMPLES,
    WORDS,
    WORDS_OF,
    pictures_loss,
    words_loss,
    workload,
)

GPT2 = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 4, **ENDS}
LAYERS = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
WIDE = {"d_model": 48, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": 1, **LAYERS}
STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1]}
SOUND = torch.randn(SAMPLES, 16, 2 * LENGTH, generator=DRAW)
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", GPT2),
    "Llama": ("Llama", WORDS_OF),
    "Mistral": ("Mistral", {**WORDS_OF, "num_key_value_heads": 2}),
    "Qwen2": ("Qwen2", {**WORDS_OF, "num_key_value_heads": 2}),
    "Gemma": ("Gemma", {**WORDS_OF, "num_key_value_heads": 1, "head_dim": 12}),
    "Phi": ("Phi", WORDS_OF),
    "GPT-NeoX": ("GPTNeoX", WORDS_OF),
    "Bloom": ("Bloom", {"vocab_size": WORDS, "hidden_size": 48, "n_layer": 2, "n_head": 4, **ENDS}),
    "Mixtral": (
        "Mixtral",
        {**WORDS_OF, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Mamba": (
        "Mamba",
        {"vocab_size": WORDS, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8, **ENDS},
    ),
}
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", WORDS_OF),
    "RoBERTa": ("Roberta", {**WORDS_OF, "max_position_embeddings": LENGTH + 2}),
    "DistilBERT": (
        "DistilBert",
        {"vocab_size": WORDS, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    ),
    "ALBERT": ("Albert", {**WORDS_OF, "embedding_size": 24}),
    "ELECTRA": ("Electra", {**WORDS_OF, "embedding_size": 24}),
    "DeBERTa-v2": ("DebertaV2", WORDS_OF),
}
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViT", {"image_size": 32, "patch_size": 8, **NARROW}),
    "DeiT": ("DeiT", {"image_size": 32, "patch_size": 8, **NARROW}),
    "Swin": (
        "Swin",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "ConvNeXt with drop path": ("ConvNext", {**STAGES, "num_stages": 2, "drop_path_rate": 0.2}),
    "ResNet": ("ResNet", {**STAGES, "embedding_size": 16, "layer_type": "basic"}),
}


def _model(kind: str, head: str, settings: dict[str, Any]) -> nn.Module:
    return getattr(hf, f"{kind}{head}")(getattr(hf, f"{kind}Config")(**settings))


def _words(name: str, head: str, kind: str, settings: dict[str, Any]) -> Workload:
    return workload(name, lambda: _model(kind, head, settings), [IDS], words_loss)


def _pictures(name: str, kind: str, settings: dict[str, Any]) -> Workload:
    made = {**settings, "num_labels": 10}
    build = partial(_model, kind, "ForImageClassification", made)
    return workload(name, build, [IMAGES, LABELS], pictures_loss)


def _t5() -> Workload:
    settings = {"vocab_size": WORDS, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    return _words("T5", "ForConditionalGeneration", "T5", {**settings, **ends})


def _bart() -> Workload:
    settings = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, **WIDE, **ENDS}
    return _words("BART", "ForConditionalGeneration", "Bart", settings)


def _whisper() -> Workload:
    settings = {"vocab_size": WORDS, "num_mel_bins": 16, "max_source_positions": LENGTH, **WIDE, **ENDS}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(input_features=batch[0], labels=batch[1]).loss

    build = partial(
        _model, "Whisper", "ForConditionalGeneration", {**settings, "max_target_positions": LENGTH}
    )
    return workload("Whisper", build, [SOUND, IDS], loss)


def _clip() -> Workload:
    text = {**WORDS_OF, "max_position_embeddings": LENGTH}
    picture = {"image_size": 32, "patch_size": 8, **NARROW}
    settings = {"text_config": text, "vision_config": picture, "projection_dim": 16}

    def represent(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        found = model(input_ids=batch[0], pixel_values=batch[1])
        return normalize(found.text_embeds, dim=1), normalize(found.image_embeds, dim=1)

    def contrast(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        logits = model.logit_scale.exp() * rows[0] @ rows[1].T
        return cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    loss = WholeBatchLoss(represent=represent, loss=contrast)
    return workload("CLIP", partial(_model, "CLIP", "Model", settings), [IDS, IMAGES], loss)


def _peft(name: str, config: str, **settings: Any) -> Workload:
    import peft

    def build() -> nn.Module:
        return peft.get_peft_model(_model("GPT2", "LMHeadModel", GPT2), getattr(peft, config)(**settings))

    return workload(name, build, [IDS], words_loss)


_CAUSAL_HEAD = {"GPT-2": "LMHeadModel"}
WORKLOADS: dict[str, Callable[[], Workload]] = {
    **{
        name: partial(_words, name, _CAUSAL_HEAD.get(name, "ForCausalLM"), *made)
        for name, made in CAUSAL.items()
    },
    **{name: partial(_words, name, "ForMaskedLM", *made) for name, made in MASKED.items()},
    "T5": _t5,
    "BART": _bart,
    "Whisper": _whisper,
    **{name: partial(_pictures, name, *made) for name, made in PICTURES.items()},
    "CLIP": _clip,
    "GPT-2 with LoRA": partial(_peft, "GPT-2 with LoRA", "LoraConfig", r=4, target_modules=["c_attn"]),
    "GPT-2 with DoRA": partial(
        _peft, "GPT-2 with DoRA", "LoraConfig", r=4, target_modules=["c_attn"], use_dora=True
    ),
    "GPT-2 with IA3": partial(
        _peft, "GPT-2 with IA3", "IA3Config", target_modules=["c_attn"], feedforward_modules=[]
    ),
}
