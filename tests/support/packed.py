"""Workloads of packed sequences, whose memory depends on their lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from autobatch import Workload
from tests.support.probes import Sequences, work

LONGEST = 6


class Packed(nn.Module):
    """A recurrent layer over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(4, 8)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.body(packed)[0].data.square().mean()


class Packing(nn.Module):
    """A recurrent layer that reads lengths from the first word of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4)
        self.body = nn.LSTM(4, 8, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids[:, 0] % LONGEST).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.body(packed)[1][0].square().mean()


def packed_by_collate(samples: int = 120) -> Workload:
    """Return sequences of different lengths that are packed before the model."""
    return work(
        Packed,
        train_data=Sequences([2 + n % 6 for n in range(samples)], width=4),
        collate=lambda parts: pack_sequence([one for one, _ in parts], enforce_sorted=False),
        loss=lambda model, packed: model(packed),
    )


def packed_in_forward(samples: int = 120) -> Workload:
    """Return rows of words that the model packs."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(50, (samples, LONGEST), generator=draw)
    return work(Packing, train_data=list(rows), loss=lambda model, ids: model(ids))


WORKLOADS = {"packed by collate": packed_by_collate, "packed in the model": packed_in_forward}
