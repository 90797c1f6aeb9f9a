"""Workloads whose probe is measured: small models of transformers, a packed LSTM, many tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from autobatch import Workload
from benchmarks.workloads import WORKLOADS


class Drawn:
    """Samples that are drawn from a seed of their own."""

    def __init__(self, draw: Callable[[torch.Generator, int], Any], count: int = 256) -> None:
        self._draw = draw
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._draw(torch.Generator().manual_seed(index), index)


def _workload(model: Callable[[], nn.Module], data: Any, loss: Any, **more: Any) -> Workload:
    return Workload(
        model=model,
        train_data=data,
        loss=loss,
        optimizer=lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
        learning_rate=1e-3,
        **more,
    )


def _text(g: torch.Generator, _: int) -> dict[str, Tensor]:
    return {name: torch.randint(5, 100, (32,), generator=g) for name in ("input_ids", "labels")}


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _classify(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, **sizes))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=128, decoder_start_token_id=0, pad_token_id=0, **sizes)
    )


class PackedLstm(nn.Module):
    """Two recurrent layers over packed sequences, and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(16, 32, 2)
        self.head = nn.Linear(32, 4)

    def forward(self, packed: PackedSequence) -> Tensor:
        _, (hidden, _) = self.body(packed)
        scores: Tensor = self.head(hidden[-1])
        return scores


def _series(g: torch.Generator, index: int) -> tuple[Tensor, int]:
    return torch.randn(8 + index * 7 % 25, 16, generator=g), index % 4


def _packed(samples: list[tuple[Tensor, int]]) -> tuple[PackedSequence, Tensor]:
    series, labels = zip(*sorted(samples, key=lambda one: -len(one[0])), strict=True)
    return pack_sequence(list(series)), torch.tensor(labels)


def _many_tensors(count: int) -> nn.Module:
    """Return a chain of small linear layers with ``count`` parameter tensors."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count // 2)))


def _vector(g: torch.Generator, index: int) -> tuple[Tensor, int]:
    return torch.randn(4, generator=g), index % 4


MODELS: dict[str, tuple[str, Callable[[], Workload]]] = {
    "hf_llama": ("40MiB", partial(_workload, _llama, Drawn(_text), _own_loss)),
    "hf_t5": ("40MiB", partial(_workload, _t5, Drawn(_text), _own_loss)),
    "packed_lstm": (
        "8MiB",
        partial(_workload, PackedLstm, Drawn(_series), _classify, collate=_packed),
    ),
    "mlp-heavy": ("6MiB", WORKLOADS["mlp-heavy"]),
    "gpt": ("24MiB", WORKLOADS["gpt"]),
    "tensors_1000": (
        "16MiB",
        partial(_workload, partial(_many_tensors, 1_000), Drawn(_vector), _classify),
    ),
    "tensors_10000": (
        "160MiB",
        partial(_workload, partial(_many_tensors, 10_000), Drawn(_vector), _classify),
    ),
}
"""Budget and workload by name."""

hf_llama, hf_t5, packed_lstm, mlp_heavy, gpt, tensors_1000, tensors_10000 = (
    make for _, make in MODELS.values()
)
