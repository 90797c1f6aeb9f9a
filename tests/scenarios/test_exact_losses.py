"""Each row of the page "Is my loss exact?", with the functions of that page.

The oracle of a row is the loss as its paper or torch writes it, over the whole batch, in float64.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from autobatch import InputError
from tests.support.detection import Detector, scenes
from tests.support.detection import whole as whole_detection
from tests.support.runs import fit
from tests.support.split_losses import checked
from tests.support.steps import CLIP, EXACT, SAMPLES, Towers, off, step_of
from tests.support.training import (
    Rows,
    language_model,
    make_workload,
    mean_loss,
    network,
    reference,
    tokens,
    train_state_of,
    whole_tokens,
)

PAGE = (Path(__file__).parents[2] / "docs/loss.md").read_text(encoding="utf-8")
WRITTEN: dict[str, Any] = {}
"""Names that the code of the page defines."""
for _code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
    exec(compile(_code, "loss.md", "exec"), WRITTEN)
DRAW = torch.Generator().manual_seed(2)
OTHER_MEAN, MIXED = "a mean over something else than samples", "several samples at once"


def drawn(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, dtype=torch.float64, generator=DRAW)


def chosen(*shape: int, share: float) -> Tensor:
    """Draw ones and zeros, of which the first samples have none."""
    found = (torch.rand(SAMPLES, *shape, generator=DRAW) < share).double()
    found[:3] = 0
    return found


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(), network().requires_grad_(False)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(6, 4), mlp(2, 6)


class TwoDraws(nn.Module):
    """A network with dropout, whose draws depend on the sample and on which of two passes it is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.passes = network(), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes = 1 - self.passes
        return self.body(inputs * ((inputs * 1000 + self.passes).sin() > -0.5) / 0.67)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, 4).double()
        self.experts = nn.ModuleList([network() for _ in range(4)])

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        router = self.router(inputs).softmax(1)
        return sum(router[:, [i]] * expert(inputs) for i, expert in enumerate(self.experts)), router


def whole_weighted(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([0.2, 1.0, 3.7]).double())


def whole_masked(model: nn.Module, batch: Any) -> Tensor:
    """Select the hidden patches, where the page multiplies by the mask."""
    patches, hidden = batch
    seen = patches.masked_fill(hidden[..., None] > 0, 0.0)
    return F.mse_loss(model(seen)[hidden > 0], patches[hidden > 0])


def summed_vae(model: Any, batch: Any) -> Tensor:
    """Return the sum over the batch, of the divergence between two normal distributions as torch has it."""
    images, noise = batch
    mean, log_variance = model.encoder(images).chunk(2, 1)
    normal, found = torch.distributions.Normal, torch.distributions.Normal(mean, (log_variance / 2).exp())
    apart = torch.distributions.kl_divergence(found, normal(torch.zeros_like(mean), 1.0)).sum()
    return apart + F.mse_loss(model.decoder(found.loc + found.scale * noise), images, reduction="sum")


def whole_vae(model: Any, batch: Any) -> Tensor:
    return summed_vae(model, batch) / len(batch[0])


def whole_focal(model: nn.Module, batch: Any) -> Tensor:
    """Return -Σ (1 - p)² log p ÷ positives, with p the probability of the right answer."""
    chance = model(batch[0]).sigmoid()
    right = torch.where(batch[1] > 0, chance, 1 - chance)
    return -((1 - right) ** 2 * right.log()).sum() / batch[1].sum()


def whole_speech(model: nn.Module, batch: Any) -> Tensor:
    """Sum up the losses of one sample at a time, each divided by the length of its text."""
    losses = []
    for sound, frames, text, length in zip(*batch, strict=True):
        log_probs = model(sound).log_softmax(-1)[:frames, None]
        loss = F.ctc_loss(log_probs, text[None, :length], frames[None], length[None], reduction="sum")
        losses.append(loss / length)
    return torch.stack(losses).mean()


def divergence(one: Tensor, other: Tensor) -> Tensor:
    return (one.softmax(1) * (one.log_softmax(1) - other.log_softmax(1))).sum(1).mean()


def whole_distilled(model: Any, batch: Any) -> Tensor:
    student, teacher = model.student(batch[0]), model.teacher(batch[0])
    return cross_entropy(student, batch[1]) + 4 * divergence(teacher / 2, student / 2)


def whole_r_drop(model: nn.Module, batch: Any) -> Tensor:
    one, other = model(batch[0]), model(batch[0])
    apart = (divergence(one, other) + divergence(other, one)) / 2
    return cross_entropy(one, batch[1]) + cross_entropy(other, batch[1]) + apart


def whole_critic(model: nn.Module, batch: Any, *, of_mean: bool = False) -> Tensor:
    """Take the slope of one sample at a time, or wrongly that of the mean of the scores."""
    real, fake, share = batch
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    scores = model(mixed).flatten()
    if of_mean:
        slopes = list(torch.autograd.grad(scores.mean(), mixed, create_graph=True)[0])
    else:
        slopes = [torch.autograd.grad(s, mixed, create_graph=True)[0][row] for row, s in enumerate(scores)]
    penalty = torch.stack([(slope.norm() - 1) ** 2 for slope in slopes]).mean()
    return (model(fake) - model(real)).mean() + 10 * penalty


def whole_balanced(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss with the balance term of the Switch Transformer, N Σ f P."""
    scores, router = model(batch[0])
    shares = torch.bincount(router.argmax(1), minlength=4).double() / len(router)
    return cross_entropy(scores, batch[1]) + 0.01 * 4 * (shares * router.mean(0)).sum()


def sharpness_aware(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss at the weights that a step up the gradient of these samples leads to."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    slopes = torch.autograd.grad(mean_loss(model, batch), parameters)
    length = torch.cat([slope.flatten() for slope in slopes]).norm()
    moved = [p + 0.3 * slope / length for p, slope in zip(parameters, slopes, strict=True)]
    return cross_entropy(functional_call(model, dict(zip(names, moved, strict=True)), (batch[0],)), batch[1])


TEXT: dict[str, Any] = {"model": language_model, "train_data": tokens()}
MASKED = {"model": lambda: mlp(6, 6), "train_data": Rows(drawn(9, 6), chosen(9, share=0.6))}
VAE = {"model": Vae, "train_data": Rows(drawn(6), drawn(2))}
ANCHORS = {"model": lambda: mlp(6, 7), "train_data": Rows(drawn(6), chosen(7, share=0.1))}
SCENES = {"model": lambda: Detector().double(), "train_data": scenes(SAMPLES)}
TOWERS = {"model": lambda: Towers().double()}
SPEECH = {
    "model": lambda: mlp(3, 6),
    "train_data": Rows(
        drawn(12, 3),
        torch.randint(9, 13, (SAMPLES,), generator=DRAW),
        torch.randint(1, 6, (SAMPLES, 4), generator=DRAW),
        torch.randint(1, 5, (SAMPLES,), generator=DRAW),
    ),
}
CRITIC = {
    "model": lambda: mlp(4, 1),
    "train_data": Rows(drawn(4), drawn(4), torch.rand(SAMPLES, 1, generator=DRAW).double()),
}
whole_smoothed = partial(whole_tokens, smoothing=0.1)
contrast = partial(CLIP)
slope_of_the_mean = partial(whole_critic, of_mean=True)
SEVERAL = "several means: boxes and classes (DETR), tokens and pairs (BERT), tasks"
COUNTS = {"counts": WRITTEN["detection_counts"]}
ROWS: dict[str, tuple[dict[str, Any], Any, Any, tuple[Any, str] | None]] = {
    "mean over samples": ({}, mean_loss, mean_loss, None),
    "tokens with `ignore_index`": (TEXT, "token_loss", whole_tokens, (whole_tokens, OTHER_MEAN)),
    "label smoothing with `ignore_index`": (
        TEXT,
        "smoothed_loss",
        whole_smoothed,
        (whole_smoothed, OTHER_MEAN),
    ),
    "class weights": ({}, "weighted_loss", whole_weighted, (whole_weighted, OTHER_MEAN)),
    "masked pixels (MAE)": (MASKED, "masked_loss", whole_masked, (whole_masked, OTHER_MEAN)),
    "sum over the batch (VAE)": (VAE, "vae_loss", whole_vae, (summed_vae, "a sum over the batch")),
    "focal loss ÷ positives": (ANCHORS, "focal_loss", whole_focal, (whole_focal, OTHER_MEAN)),
    SEVERAL: (SCENES, "detection_loss", whole_detection, (whole_detection, "each of several means")),
    "CTC": (SPEECH, "speech_loss", whole_speech, None),
    "distillation": ({"model": Distilled}, "distilled_loss", whole_distilled, None),
    "R-Drop": ({"model": TwoDraws}, "r_drop_loss", whole_r_drop, None),
    "gradient penalty": (CRITIC, "critic_loss", whole_critic, (slope_of_the_mean, "differs by")),
    "contrastive": (TOWERS, CLIP, contrast, (contrast, MIXED)),
    "balance of experts (MoE)": (
        {"model": Experts},
        "expert_loss",
        whole_balanced,
        (whole_balanced, MIXED),
    ),
    "SAM within the loss": ({}, None, None, (sharpness_aware, MIXED)),
}
"""Fields of a workload, its loss or the name of that on the page, the loss over the whole batch, and a wrong
loss with the cause that its refusal names. A row without a right loss is inexact."""


@pytest.mark.parametrize("name", ROWS)
def test_a_loss_of_the_page_is_exact_and_its_wrong_form_is_refused(name: str) -> None:
    fields, loss, whole, wrong = ROWS[name]
    if loss is not None:
        counts = COUNTS if name == SEVERAL else {}
        workload = make_workload(**fields, **counts, loss=WRITTEN[loss] if isinstance(loss, str) else loss)
        expected, losses = reference(workload, [range(SAMPLES)], whole)
        for sizes in ([1, 23], [20, 3, 1], [7, 7, 7, 3]):
            train_state = train_state_of(workload)
            result = step_of(train_state, workload, sizes)
            assert off(train_state, workload, expected) <= EXACT, sizes
            assert result.loss == pytest.approx(losses[0], rel=EXACT)
        assert checked(workload, target_batch=SAMPLES) == []
    if wrong is not None:
        with pytest.raises(InputError, match=wrong[1]):
            checked(make_workload(**fields, loss=wrong[0]), target_batch=SAMPLES)


def test_batch_statistics_are_named_before_training(tmp_path: Path) -> None:
    workload = make_workload(model=lambda: nn.Sequential(nn.BatchNorm1d(5), network()).double())
    _, notes = fit(workload, tmp_path, target_batch=SAMPLES, max_micro_batch=8, steps=1)
    found = next(note for note in notes if "BatchNorm" in note)
    assert "BatchNorm (1 layer) computes its statistics over micro-batches of 8 samples, not over" in found
    assert "a momentum of 0.03451 instead of 0.1 would undo" in found
