"""Small workloads and loops, and training on whole batches as an independent oracle."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from autobatch import Loss, WholeBatchLoss, Workload
from autobatch.core.units import GiB
from autobatch.device.base import Meter
from autobatch.device.cpu import CpuDevice
from autobatch.device.host import HostMemory
from autobatch.rehearsal.setup import Setup
from autobatch.step.train_state import StepSettings, TrainState, build_train_state
from autobatch.training.loop import Loop
from autobatch.training.run import build_schedules
from autobatch.workload.data import WorstCaseSampler
from autobatch.workload.feed import Feed
from autobatch.workload.order import GlobalBatchSampler, Split
from autobatch.workload.rng import seed_everything

IGNORED = -100
CPU = torch.device("cpu")
HOST = HostMemory(8 * GiB, 8 * GiB, "made up")
SETTINGS = dataclasses.fields(StepSettings)


class Rows(TensorDataset):
    """Dataset over the rows of tensors."""

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self.tensors


class Augmented(Rows):
    """Rows whose first column is augmented by the random generators of Python, NumPy and torch."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, *others = super().__getitem__(index)
        noise = float(np.random.normal()) + torch.randn(inputs.shape)
        return inputs * random.uniform(0.5, 1.5) + noise, *others


def points(samples: int = 24, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Rows:
    """Make random points in 5 dimensions with one of 3 labels."""
    generator = torch.Generator().manual_seed(seed)
    return Rows(
        torch.randn(samples, 5, dtype=dtype, generator=generator),
        torch.randint(3, (samples,), generator=generator),
    )


def tokens(samples: int = 24, *, seed: int = 0) -> Rows:
    """Make random sequences with ragged labels: from none to all of the positions count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, (samples, 6), generator=generator)
    labels = torch.randint(7, (samples, 6), generator=generator)
    counted = torch.randint(7, (samples, 1), generator=generator)
    labels[torch.arange(6).expand(samples, -1) >= counted] = IGNORED
    return Rows(ids, labels)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def language_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 7)).to(dtype)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def token_loss(model: nn.Module, batch: Any) -> Loss:
    ids, labels = batch
    total = cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return Loss(total, (labels != IGNORED).sum())


def whole_tokens(model: nn.Module, batch: Any, smoothing: float = 0.0) -> Tensor:
    """Return the mean over all counted tokens, as a loop without micro-batches writes it."""
    scores, labels = model(batch[0]).flatten(0, 1), batch[1].flatten()
    return cross_entropy(scores, labels, ignore_index=IGNORED, label_smoothing=smoothing)


def features(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


def info_nce(_: nn.Module, rows: Tensor) -> Tensor:
    """Compare each row with a rolled view of all, so that the loss depends on several samples at once."""
    rows = normalize(rows)
    return cross_entropy(rows @ rows.roll(1, 1).T * 5, torch.arange(len(rows)))


INFO_NCE = WholeBatchLoss(represent=features, loss=info_nce)


def contrastive_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the same loss in one part, which cannot be split."""
    return info_nce(model, features(model, batch))


TOKENS: dict[str, Any] = {"model": language_model, "train_data": tokens(), "loss": token_loss}
"""Fields of a workload whose loss is a mean over counted tokens."""


def sgd(params: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=learning_rate)


def adamw(params: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=learning_rate)


def amsgrad(params: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=learning_rate, amsgrad=True)


def make_workload(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "model": network,
        "train_data": points(),
        "loss": mean_loss,
        "optimizer": sgd,
        "learning_rate": 0.1,
    }
    return Workload(**{**fields, **changes})


def train_state_of(
    workload: Workload,
    *,
    seed: int = 0,
    device: torch.device = CPU,
    meter: Any | None = None,
    **settings: Any,
) -> TrainState:
    """Build a train state, with weights drawn from the seed."""
    seed_everything(seed)
    rate = settings.pop("learning_rate", workload.learning_rate)
    made = StepSettings(**{"precision": "fp32", **settings})
    return build_train_state(workload, workload.model(), device, made, meter or Meter(), learning_rate=rate)


def make_loop(
    workload: Workload,
    *,
    target_batch: int = 24,
    micro_batch: int = 5,
    steps: int | None = 3,
    epochs: int | None = None,
    seed: int = 0,
    **fields: Any,
) -> Loop:
    """Build a loop as ``fit`` does, with everything drawn from the seed. Fields are its own or its steps'."""
    device = fields.pop("device", None) or CpuDevice(HOST, "1GiB")
    settings = {each.name: fields.pop(each.name) for each in SETTINGS if each.name in fields}
    settings["meter"] = fields.pop("meter", None)
    train_state = train_state_of(workload, seed=seed, device=device.torch_device, **settings)
    samples: Any = workload.train_data
    sampler = GlobalBatchSampler(
        samples=len(samples), target_batch=target_batch, seed=seed, steps=steps, epochs=epochs
    )
    schedules = build_schedules(workload, train_state.optimizers, sampler)
    split = fields.get("split", Split())
    known = {"split": split, "feed": Feed(workload, sampler, split)}
    return Loop(
        workload=workload, train_state=train_state, sampler=sampler, device=device, micro_batch=micro_batch,
        schedules=schedules, **{**known, **fields},
    )  # fmt: skip


def make_setup(
    workload: Workload, budget: str | int = "1GiB", *, device: Any | None = None, **fields: Any
) -> Setup:
    """Build what a probe opens of a workload, on the CPU unless another device is given."""
    torch.manual_seed(0)
    return Setup(
        workload=workload,
        model=workload.model(),
        device=device or CpuDevice(HOST, budget),
        worst_case=WorstCaseSampler(workload),
        **{"precision": "fp32", **fields},
    )


def weights(model: nn.Module) -> Tensor:
    """Return all parameters and floating-point buffers as one vector of float64."""
    tensors = [*model.parameters(), *model.buffers()]
    return torch.cat([t.detach().double().flatten() for t in tensors if t.is_floating_point()])


def averages(average: Any) -> list[Tensor]:
    """Return the averages of the weights that a train state keeps; empty if it keeps none."""
    return [] if average is None else average.state_dict()["averages"]


def then(optimizer: Callable[..., Any], after_step: Callable[[Any], object]) -> Callable[..., Any]:
    """Return a function for an optimizer that calls one of the model after each step."""

    def build(model: nn.Module, learning_rate: float) -> Any:
        made = optimizer(model.parameters(), learning_rate)
        made.register_step_post_hook(lambda *_: after_step(model))
        return made

    return build


def digest(*tensors: Tensor) -> str:
    """Return the SHA-256 of the bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def fingerprint(model: nn.Module, *others: Tensor) -> str:
    """Return the SHA-256 of all tensors of a model, and of others."""
    return digest(*model.parameters(), *model.buffers(), *others)


def apart(one: Tensor, other: Tensor) -> float:
    """Return the relative L2 distance."""
    return float((one - other).norm() / other.norm())


def reference(
    workload: Workload,
    batches: Sequence[Sequence[int]],
    whole_loss: Callable[[nn.Module, Any], Tensor],
    *,
    seed: int = 0,
    clip: float | None = None,
    after_step: Callable[[Any], object] | None = None,
) -> tuple[Tensor, list[float]]:
    """Train with one pass over each whole batch, without autobatch; return the weights and the losses."""
    seed_everything(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
    losses = []
    for ids in batches:
        batch = (workload.collate or torch.utils.data.default_collate)([workload.train_data[i] for i in ids])
        optimizer.zero_grad()
        loss = whole_loss(model, batch)
        losses.append(loss.item())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if after_step is not None:
            with torch.no_grad():
                after_step(model)
    return weights(model), losses
