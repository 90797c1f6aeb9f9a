"""Notes on the place of a model and on an emulated precision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autobatch.core.records.base import Precision
from autobatch.setup.notes import emulation_notes, placement_notes


def test_a_model_that_was_built_on_a_gpu_is_noted() -> None:
    model = nn.Linear(1024, 256, bias=False)
    assert placement_notes(model) == placement_notes(model.to("meta")) == []
    on_gpu = SimpleNamespace(device=torch.device("cuda", 1), numel=lambda: 1 << 20, element_size=lambda: 4)
    (note,) = placement_notes(SimpleNamespace(parameters=lambda: iter([on_gpu])))
    assert "built on cuda:1, where each attempt holds a copy of its 4.00 MiB" in note


@pytest.mark.parametrize(
    ("precision", "capability", "noted"),
    [
        ("bf16", (7, 5), True),
        ("bf16", (7, 0), True),
        ("bf16", (8, 0), False),
        ("fp16", (7, 5), False),
        ("bf16", None, False),
    ],
)
def test_bf16_is_emulated_before_8_0(
    precision: Precision, capability: tuple[int, int] | None, noted: bool
) -> None:
    """torch runs it there without a word (``is_bf16_supported`` counts emulation)."""
    notes = emulation_notes(precision, capability)
    assert [note.startswith("a GPU of compute capability 7.") for note in notes] == [True] * noted
