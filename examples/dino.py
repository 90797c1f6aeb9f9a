"""DINO (Caron et al. 2021): a student learns what a teacher, its slow average, says about another view.

python examples/dino.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import autobatch  # +

CLASSES, SHARP, SOFT = 32, 0.04, 0.1


class Dino(nn.Module):
    """A student, a teacher, and the centre of what the teacher says."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Conv2d(16, 64, 3), nn.GELU(), nn.Flatten()
        self.student = nn.Sequential(*body, nn.Linear(256, 64), nn.GELU(), nn.Linear(64, CLASSES))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.centre, self.total = nn.Buffer(torch.zeros(CLASSES)), nn.Buffer(torch.zeros(CLASSES + 1))


class Views(Dataset[Tensor]):
    """Two views of discs of many colours, with other noise, brightness and place at each visit."""

    def __init__(self, samples: int = 512) -> None:
        draw = torch.Generator().manual_seed(0)
        (top, left, radius), places = torch.rand(3, samples, 1, 1, generator=draw), torch.linspace(0, 1, 20)
        away = ((places[:, None] - top) ** 2 + (places - left) ** 2).sqrt()
        self.pictures = (away < 0.1 + radius / 3)[:, None] * torch.rand(samples, 3, 1, 1, generator=draw)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([self.view(self.pictures[index]) for _ in range(2)])

    def view(self, picture: Tensor) -> Tensor:
        """Draw a crop, its brightness and its noise."""
        top, left = torch.randint(5, (2,)).tolist()
        light, noise = 0.6 + 0.8 * torch.rand(()), torch.randn(3, 16, 16) / 10
        return light * picture[:, top : top + 16, left : left + 16] + noise


def loss(model: Dino, views: Tensor) -> Tensor:
    """Return the mean over the samples, and add what the teacher says to the sum of this batch."""
    with torch.no_grad():
        said = [model.teacher(view) for view in views.unbind(1)]
        model.total[:-1] += sum(said).sum(0)
        model.total[-1] += 2 * len(views)
    wanted = [((one - model.centre) / SHARP).softmax(1) for one in reversed(said)]
    guessed = [(model.student(view) / SOFT).log_softmax(1) for view in views.unbind(1)]
    return -sum((one * other).sum(1).mean() for one, other in zip(wanted, guessed, strict=True)) / 2


def follow(model: Dino) -> None:
    """Move the teacher and the centre, once for the whole batch."""
    if torch.distributed.is_initialized():  # each rank has added up its own samples
        torch.distributed.all_reduce(model.total)
    for own, other in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        own.lerp_(other, 0.01)
    model.centre.lerp_(model.total[:-1] / model.total[-1], 0.1)
    model.total.zero_()


def optimizer(model: Dino, learning_rate: float) -> torch.optim.Optimizer:
    """Return an optimizer whose steps the teacher follows."""
    made = torch.optim.AdamW(model.student.parameters(), learning_rate)
    made.register_step_post_hook(lambda *_: follow(model))
    return made


def workload() -> autobatch.Workload:  # +
    """Return the model, the data, the loss, and the optimizer."""
    parts = {"model": Dino, "train_data": Views(), "loss": loss, "optimizer": optimizer}  # +
    return autobatch.Workload(**parts, learning_rate=1e-3)  # +


if __name__ == "__main__":
    print(autobatch.fit(workload, target_batch=128, memory_budget="2MiB", steps=20, trials=0))  # +
