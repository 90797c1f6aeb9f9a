"""Workloads of a size for GPUs: 26 kinds of models, optimizers and precisions, each with two budgets.

Every call builds a new workload.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint_sequential

from autobatch import Workload
from benchmarks.workloads import (
    Block,
    Experts,
    Few,
    Lstm,
    Make,
    UNet,
    classify,
    contrast,
    images,
    mlp,
    pad,
    reconstruct,
    resnet,
    sgd,
    texts,
    vectors,
    workload,
)

SAMPLES = 1 << 16
WORDS = 8192


class PackedLstm(nn.Module):
    """Two recurrent layers over packed sequences, and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(16, 32, 2)
        self.head = nn.Linear(32, 4)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.head(self.body(packed)[1][0][-1])


class Case(NamedTuple):
    """A workload, the budgets under which its limit is found, and options of the probe."""

    make: Callable[[], Workload]
    budgets_mib: tuple[int, int]
    options: dict[str, Any]


class Decoder(nn.Module):
    """A decoder whose head is its embedding; with ``recompute``, activations are computed twice."""

    def __init__(
        self, width: int, layers: int, heads: int, *, words: int = WORDS, length: int = 256, recompute=False
    ) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        if self.recompute:
            x = checkpoint_sequential(self.blocks, len(self.blocks), x, use_reentrant=False)
        else:
            x = self.blocks(x)
        return functional.linear(x, self.embed.weight)


class MaskedEncoder(nn.Module):
    """An encoder that is told which words are padding."""

    def __init__(self, width: int = 512, layers: int = 4, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids), src_key_padding_mask=ids == 0))


class Patches(nn.Module):
    """A vision transformer."""

    def __init__(self, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)
        given = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, **given)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.cut(x).flatten(2).transpose(1, 2)).mean(1))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with batch statistics, around a shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            resized = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(resized, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inputs, inner, stride if number == 0 else 1))
            inputs = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def plain_conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 64, 256), nn.Dropout(0.1), nn.Linear(256, 10),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.SiLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.SiLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1),
    )  # fmt: skip


def wide(bias: bool) -> nn.Module:
    linear = partial(nn.Linear, bias=bias)
    return nn.Sequential(linear(512, 2048), nn.ReLU(), linear(2048, 2048), nn.ReLU(), linear(2048, 100))


def normed(width: int = 1024, layers: int = 6) -> nn.Module:
    layer = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*layer, nn.Linear(width, 10))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=256, **sizes))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, **sizes))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 256, "d_ff": 512, "num_layers": 3, "num_heads": 4, "d_kv": 64}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **ids, **sizes))


def inputs(length: int) -> Few:
    rows = [torch.randint(5, WORDS, (length,)) for _ in range(16)]
    return Few([{"input_ids": row, "labels": row} for row in rows], 16)


def series() -> Few:
    return Few([(torch.randn(64 + 8 * number, 16), number % 4) for number in range(16)], 16)


def pack(samples: list[tuple[Tensor, int]]) -> tuple[Any, Tensor]:
    rows, labels = zip(*sorted(samples, key=lambda one: -len(one[0])), strict=True)
    return pack_sequence(list(rows)), torch.tensor(labels)


def next_token(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def case(
    model: Make,
    data: Make,
    budgets_mib: tuple[int, int],
    loss: Make = classify,
    *,
    precision: str = "bf16",
    **fields: Any,
) -> Case:
    many = lambda: Few(data().samples, SAMPLES)  # noqa: E731
    make = workload(model, many, loss, learning_rate=1e-4, **fields)
    return Case(make, budgets_mib, {"precision": precision})


text = partial(texts, 256, words=WORDS)
uneven = partial(texts, *(256 * (16 + number) // 31 for number in range(16)), words=WORDS)
decoder = partial(Decoder, 512, 8, 8)
lstm = partial(Lstm, 256, 512, 2, vocabulary=WORDS)
one_by_one = partial(torch.optim.AdamW, foreach=False)
length = {"size_of": lambda sample: len(sample[0])}
gpt_124m = partial(Decoder, 768, 12, 12, words=50257, length=512)
MIB = {"gpt": (1500, 4096), "residual": (400, 1200)}
FP16, FP32 = {"precision": "fp16"}, {"precision": "fp32"}
CASES: dict[str, Case] = {
    "mlp": case(partial(wide, True), partial(vectors, 512, 100), (230, 260)),
    "mlp-no-bias": case(partial(wide, False), partial(vectors, 512, 100), (210, 300)),
    "mlp-sgd-fp32": case(mlp(2048, 6, 1024), partial(vectors, 1024), (512, 900), optimizer=sgd, **FP32),
    "mlp-normed": case(normed, partial(vectors, 1024), (300, 700)),
    "experts": case(partial(Experts, 512, 16), partial(vectors, 512), (200, 500)),
    "contrastive": case(mlp(1024, 4, 512), partial(vectors, 512), (300, 900), contrast),
    "conv": case(plain_conv, partial(images, 32), (300, 900)),
    "residual": case(partial(resnet, 64, 4), partial(images, 32), MIB["residual"]),
    "residual-fp16": case(partial(resnet, 64, 4), partial(images, 32), MIB["residual"], **FP16),
    "resnet-50": case(resnet50, partial(images, 224, 1000), (3072, 8192)),
    "u-net": case(partial(UNet, 32), partial(images, 128), (800, 24576), reconstruct),
    "autoencoder": case(autoencoder, partial(images, 64), (400, 1500), reconstruct, **FP32),
    "vision-transformer": case(Patches, partial(images, 224, 1000), (900, 3000)),
    "gpt": case(decoder, text, MIB["gpt"], next_token),
    "gpt-fused": case(
        decoder, text, MIB["gpt"], next_token, optimizer=partial(torch.optim.AdamW, fused=True)
    ),
    "gpt-one-by-one-fp32": case(decoder, text, MIB["gpt"], next_token, optimizer=one_by_one, **FP32),
    "gpt-fp16": case(decoder, text, MIB["gpt"], next_token, **FP16),
    "gpt-checkpointed": case(partial(decoder, recompute=True), text, (1200, 3000), next_token),
    "gpt-ragged": case(decoder, uneven, MIB["gpt"], next_token, collate=pad, **length),
    "gpt-124m": case(gpt_124m, partial(texts, 512, words=50257), (6144, 16384), next_token),
    "encoder-masked": case(MaskedEncoder, partial(texts, 256, words=64), (700, 2000), next_token),
    "lstm": case(lstm, partial(texts, 64, words=WORDS), (500, 1500), next_token),
    "packed-lstm": case(PackedLstm, series, (160, 400), collate=pack, **length, **FP32),
    "llama": case(llama, partial(inputs, 256), (700, 3000), own_loss),
    "bert": case(bert, partial(inputs, 128), (500, 2000), own_loss),
    "t5": case(t5, partial(inputs, 128), (500, 2000), own_loss),
}
