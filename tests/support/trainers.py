"""Small models and ragged data for the training loops of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.support.libraries import installed

WORDS = 23
BUDGET = "400KiB"
"""Memory in which the batch of 24 needs several micro-batches."""


def texts(count: int = 40) -> list[dict[str, Tensor]]:
    """Draw texts of 3 to 12 words."""
    draw = torch.Generator().manual_seed(3)
    sizes = torch.randint(3, 13, (count,), generator=draw).tolist()
    return [{"input_ids": torch.randint(1, WORDS, (size,), generator=draw)} for size in sizes]


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad texts to the longest; padding is neither attended to nor predicted."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    real = (ids > 0).long()  # no word is 0
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


def gpt2() -> Any:
    """Build a language model of transformers without dropout, whose loss is a mean over words."""
    library = installed("transformers")
    torch.manual_seed(0)
    config = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = library.GPT2LMHeadModel(library.GPT2Config(**config | dropout | ends))
    model.loss_type = "ForCausalLM"
    return model
