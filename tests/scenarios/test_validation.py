"""Validation during a run: it changes no bit of the training, and its mistakes show before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from tests.support.runs import fit, open_loop, rows, settings, train
from tests.support.training import averages, fingerprint, make_workload, points


def drawing(model, batch):
    return {"drawn": torch.rand(())}


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def test_averaged_weights_are_validated_and_exported_and_no_bit_of_the_training_changes(
    tmp_path: Path,
) -> None:
    data = points(30, seed=1)
    workload = make_workload(model=normalised, validation_data=data, metrics=drawing)
    plain = open_loop(workload)
    untouched = train(plain, settings(tmp_path / "plain"))
    loop = open_loop(workload, ema=0.5)
    done = train(loop, settings(tmp_path / "run", validate_every=2))
    assert fingerprint(loop.train_state.model) == fingerprint(plain.train_state.model)
    assert (done.ema, untouched.ema) == (0.5, None)
    found = {row["step"]: row["validation"] for row in rows(tmp_path / "run") if row["validation"]}
    assert [*found] == [2, 4], "the last validation is not periodic"
    assert found[2]["loss"] != found[4]["loss"]
    assert not any(row["validation"] for row in rows(tmp_path / "plain"))

    stored = load_file(tmp_path / "run" / "model.safetensors")
    averaged = load_file(tmp_path / "run" / "model-ema.safetensors")
    names = [name for name, _ in loop.train_state.model.named_parameters()]
    for name, value in loop.train_state.model.state_dict().items():
        assert torch.equal(stored[name], value)
        assert torch.equal(averaged[name], value) == (name not in names), "buffers are not averaged"
    for name, average in zip(names, averages(loop.train_state.average), strict=True):
        assert torch.equal(averaged[name], average)
    assert not (tmp_path / "plain" / "model-ema.safetensors").exists()

    model = normalised().eval()
    model.load_state_dict(averaged)
    inputs, labels = data.columns
    assert done.validation["loss"] == pytest.approx(cross_entropy(model(inputs), labels).item(), rel=1e-12)
    assert done.validation["loss"] != untouched.validation["loss"]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda model, batch: {"accuracy": model(batch[0])}, "only one element tensors"),
        (lambda model, batch: {"loss": 3.0}, "text other than 'loss'"),
    ],
)
def test_a_mistake_in_the_metrics_is_found_before_training(metrics, message: str, tmp_path: Path) -> None:
    workload = make_workload(validation_data=points(9), metrics=metrics)
    with pytest.raises(ValueError, match=message):
        fit(workload, tmp_path / "run", target_batch=24, steps=5)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
