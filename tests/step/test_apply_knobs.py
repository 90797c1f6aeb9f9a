"""Knobs change how a step is computed, not what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autobatch.step.apply_knobs import find_blocks, recomputable_blocks
from tests.support.step_workloads import IMAGES, Residual, convolutional
from tests.support.steps import step_of
from tests.support.training import make_workload, train_state_of


def recomputable() -> nn.Module:
    """Return a network that has BatchNorm outside of its blocks only."""
    model: Any = convolutional()
    for block in find_blocks(model):
        block.body[1] = nn.GroupNorm(2, 4)
    return model


def train(knobs: dict[str, Any], **fields: Any) -> tuple[nn.Module, Any, list[float]]:
    """Train three batches of two micro-batches each, everything drawn from one seed."""
    workload = make_workload(
        **{
            "model": recomputable,
            "train_data": IMAGES,
            "optimizer": lambda params, lr: torch.optim.AdamW(params, lr=0.01),
            **fields,
        }
    )
    train_state = train_state_of(workload, knobs=knobs)
    losses = [step_of(train_state, workload, [8, 8]).loss for _ in range(3)]
    return train_state.model, train_state, losses


def test_blocks_are_repeated_children_of_a_list() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert find_blocks(nn.Sequential(nn.Embedding(5, 8), encoder)) == list(encoder.layers)
    network = convolutional()
    assert find_blocks(network) == [network[4], network[5]]
    assert recomputable_blocks(network) == [], "BatchNorm would count a pass twice"
    stages = nn.Sequential(nn.Sequential(Residual(), Residual()), nn.Sequential(Residual()))
    assert len(find_blocks(stages)) == 3
    # Recomputing single layers saves nothing.
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    of_a_dict = nn.ModuleDict({name: nn.Sequential(nn.Linear(2, 2)) for name in "abc"})
    assert find_blocks(of_a_dict) == list(of_a_dict.values())
    towers = nn.ModuleDict({name: nn.Sequential(*encoder.layers) for name in ("text", "image")})
    assert find_blocks(towers) == list(encoder.layers)


def test_a_loss_that_fails_leaves_the_model_unchanged() -> None:
    seen: list[nn.Module] = []

    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(model)
        assert any("forward" in module.__dict__ for module in model.modules())
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train({"checkpointing": "full"}, loss=failing)
    assert all("forward" not in module.__dict__ for module in seen[0].modules())


def test_channels_last_keeps_the_values() -> None:
    # No dropout, whose draws depend on the layout, nor Adam, which turns the rounding error of a bias before
    # a BatchNorm into whole steps.
    optimizer = lambda params, lr: torch.optim.SGD(params, lr=0.01)  # noqa: E731
    fields = {"model": lambda: convolutional(0.0), "optimizer": optimizer}
    plain, _, before = train({}, **fields)
    turned, _, after = train({"channels_last": True}, **fields)
    assert turned[4].body[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert after == pytest.approx(before, rel=1e-5)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, turned.state_dict()[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("choice", ["for-loop", "foreach", "fused"])
def test_an_optimizer_has_the_requested_implementation(choice: str) -> None:
    _, train_state, before = train({})
    _, changed, after = train({"optimizer": choice})
    group = changed.optimizers[0].param_groups[0]
    assert (group["foreach"], group["fused"]) == (choice == "foreach", choice == "fused")
    assert train_state.optimizers[0].param_groups[0]["foreach"] is None
    assert after == pytest.approx(before, rel=1e-4)


def test_compilation_and_recomputation_change_neither_statistics_nor_dropout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda forward: lambda *args: calls.append(1) or forward(*args))
    plain, _, before = train({})
    model, _, after = train({"compile": "default", "checkpointing": "full"})
    assert (len(calls), after) == (6, before)
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    assert "forward" not in model.__dict__
