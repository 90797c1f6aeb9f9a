"""Small models of transformers, peft and torch from their configurations, and micro-batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

from autobatch import Workload

SAMPLES, LENGTH, WORDS = 256, 32, 199
DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=DRAW)
IMAGES = torch.randn(SAMPLES, 3, 32, 32, generator=DRAW)
LABELS = torch.randint(0, 10, (SAMPLES,), generator=DRAW)
NARROW = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class PackedLstm(nn.Module):
    """A classifier of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of ten classes; the lengths follow from the first word."""
        lengths = (ids[:, 0] % LENGTH).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class SparseWords(nn.Module):
    """A classifier whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(20_000, 32, sparse=True)
        self.head = nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of ten classes."""
        return self.head(self.embedding(ids * 97 % 20_000))


def words_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss that a model of words computes itself."""
    return model(input_ids=batch[0], labels=batch[0]).loss


def classes_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean cross-entropy of a classifier of torch."""
    return cross_entropy(model(batch[0]), batch[1])


def pictures_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a classifier of pictures."""
    return model(pixel_values=batch[0], labels=batch[1]).loss


def lora() -> nn.Module:
    """Build GPT-2 with adapters."""
    config = hf.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=4, **ENDS)
    return get_peft_model(hf.GPT2LMHeadModel(config), LoraConfig(r=4, target_modules=["c_attn"]))


def adamw(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    """Build AdamW."""
    return torch.optim.AdamW(parameters, lr=learning_rate)


def sgd(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    """Build SGD, which takes sparse gradients."""
    return torch.optim.SGD(parameters, lr=learning_rate)


def _workload(name: str, model: Callable[[], nn.Module], data: list[Tensor], loss: Any, made: Any) -> Any:
    fields = {"name": name, "model": model, "loss": loss, "optimizer": made, "learning_rate": 1e-3}
    return Workload(train_data=TensorDataset(*data), **fields)


def clients() -> list[Workload]:
    """Return the workloads of the table."""
    words = {"vocab_size": WORDS, **NARROW, **ENDS}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    t5 = {"vocab_size": WORDS, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    gpt2 = hf.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=4, **ENDS)
    vit = hf.ViTConfig(image_size=32, patch_size=8, num_labels=10, **NARROW)
    bert = hf.BertConfig(max_position_embeddings=LENGTH, **words)
    mamba = hf.MambaConfig(vocab_size=WORDS, hidden_size=48, num_hidden_layers=2, state_size=8, **ENDS)
    models: dict[str, Callable[[], nn.Module]] = {
        "GPT-2": lambda: hf.GPT2LMHeadModel(gpt2),
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**words)),
        "Mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**words, **experts)),
        "Mamba": lambda: hf.MambaForCausalLM(mamba),
        "BERT": lambda: hf.BertForMaskedLM(bert),
        "T5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(**t5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
        ),
        "GPT-2 with LoRA": lora,
    }
    return [
        *(_workload(name, model, [IDS], words_loss, adamw) for name, model in models.items()),
        _workload("ViT", lambda: hf.ViTForImageClassification(vit), [IMAGES, LABELS], pictures_loss, adamw),
        _workload("packed LSTM", PackedLstm, [IDS, LABELS], classes_loss, adamw),
        _workload("sparse embedding", SparseWords, [IDS, LABELS], classes_loss, sgd),
    ]
