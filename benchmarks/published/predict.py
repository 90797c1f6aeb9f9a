"""Predictions of published steps on GPUs that are not here, each in a process of its own."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autobatch import Workload
from autobatch.core.options import Options
from autobatch.core.records import Precision
from autobatch.device.allocator import Block, BudgetExceeded, CachingAllocator
from autobatch.device.profiles import HardwareProfile
from autobatch.device.trace import replay
from autobatch.distributed.shard import ShardedModel, Sharding, fake_ranks
from autobatch.estimates.estimator import Estimator
from autobatch.estimates.gpus import Gpus
from autobatch.estimates.traced_step import TracedStep, footprint, record
from autobatch.footprint.program import Fitting

Row = dict[str, str]
Published = tuple[TracedStep, Gpus, HardwareProfile]
LORA = {"q": "query", "k": "key", "v": "value", "p": "projection", "m": "mlp", "h": "head"}
"""Layers with adapters, by their letters in the data."""
NEAR = 1024
"""The largest micro-batch that is tried: larger than any that was published."""


class Retrying(CachingAllocator):
    """An allocator that releases its cached segments and tries again before an error, as CUDA's does."""

    def malloc(self, size: int, stream: int = 0) -> Block | None:
        """Take ``size`` bytes; see `CachingAllocator.malloc`."""
        try:
            return super().malloc(size, stream)
        except BudgetExceeded:
            self.release()
            return super().malloc(size, stream)


def limits_of(checkouts: Path, row: Row) -> dict[str, object]:
    """Predict the largest micro-batch of a row of timm's file, by both definitions of fitting."""
    start = time.perf_counter()
    step, gpus, gpu = timm_step(checkouts, row)
    budget, found = gpus.budget(gpu), footprint(step)
    predicted = budget.predict(found)
    retrying = Fitting([found.program], lambda: Retrying(budget.budget_bytes, held_bytes=budget.held_bytes))
    return {
        "low": predicted.micro_batch_low,
        "predicted": predicted.micro_batch,
        "with_retries": retrying.largest(budget.cap, found.multiple),
        "high": predicted.micro_batch_high,
        "seconds": round(time.perf_counter() - start, 1),
    }


def peak_of(source: str, checkouts: Path, row: Row) -> dict[str, object]:
    """Predict the most bytes that a row allocates, or reserves, as it was measured."""
    start = time.perf_counter()
    step, gpus, gpu = STEPS[source](checkouts, row)
    trace = record(step, int(row["micro_batch"])).trace
    peaks = replay(trace, gpus.budget(gpu).new_allocator(None))
    is_allocated = row["kind"] == "max_memory_allocated"
    return {
        "predicted_bytes": peaks.peak_allocated_bytes if is_allocated else peaks.peak_reserved_bytes,
        "fits": (peaks.peak_reserved_bytes or 0) <= gpus.budget(gpu).budget_bytes,
        "seconds": round(time.perf_counter() - start, 1),
    }


def timm_step(checkouts: Path, row: Row) -> Published:
    """Return training as timm's benchmark runs it: SGD with Nesterov momentum on images of one size."""
    sys.path.insert(0, str(checkouts / "timm"))
    timm = importlib.import_module("timm")
    layout = torch.channels_last if row["layout"] == "nhwc" else torch.contiguous_format
    shape = (3, int(row["image"]), int(row["image"]))

    def build() -> nn.Module:
        model: nn.Module = timm.create_model(row["model"])
        return model.to(memory_format=layout).train()  # type: ignore[call-overload]

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(samples), *shape, device="cpu").contiguous(memory_format=layout)
        return images, torch.zeros(len(samples), dtype=torch.int64, device="cpu")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = model(batch[0])
        return nn.functional.cross_entropy(output[0] if isinstance(output, tuple) else output, batch[1])

    def optimize(weights: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=rate, momentum=0.9, nesterov=True, foreach=False)

    samples = [(torch.zeros(1).expand(shape), 0)] * NEAR
    workload = Workload(
        model=build, train_data=samples, collate=collate, loss=loss, optimizer=optimize, learning_rate=0.1
    )
    return published(workload, "rtx-3090", precision="fp16")


def litgpt_step(checkouts: Path, row: Row) -> Published:
    """Return fine-tuning as litgpt's scripts run it: weights in bf16, logits in float32 that stay."""
    folder = checkouts / f"litgpt-{row['code']}"
    package = "litgpt" if (folder / "litgpt").is_dir() else "lit_gpt"
    sys.path.insert(0, str(folder))
    is_lora, sequence = row["method"] == "lora", int(row["sequence"])
    models = importlib.import_module(f"{package}.lora" if is_lora else f"{package}.model")
    utils = importlib.import_module(f"{package}.utils")
    prefix, to = ("lora_", "lora_") if hasattr(models.Config, "lora_r") else ("", "to_")
    given: dict[str, Any] = {}
    if is_lora:
        given = {f"{prefix}r": int(row["lora_r"]), f"{prefix}alpha": 16, f"{prefix}dropout": 0.05}
        given |= {f"{to}{layer}": letter in row["lora_on"] for letter, layer in LORA.items()}
    config = models.Config.from_name(row["model"], **given)
    kept: list[object] = []

    def build() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: nn.Module = models.GPT(config)
        finally:
            torch.set_default_dtype(torch.float32)
        if is_lora:
            models.mark_only_lora_as_trainable(model)
        model.max_seq_length = sequence
        return model

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = batch
        made = [*model(ids, lm_head_chunk_size=128)] if is_lora else [model(ids)]
        logits = [made.pop(0).float() for _ in range(len(made))]
        logits[-1] = logits[-1][..., :-1, :]
        kept[:] = [logits]  # as the variable of the loop, up to its next pass
        return utils.chunked_cross_entropy(logits if is_lora else logits[0], targets[..., 1:])

    def optimize(weights: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([weight for weight in weights if weight.requires_grad], lr=rate)

    samples = [(torch.zeros(sequence, dtype=torch.int64),) * 2] * NEAR
    workload = Workload(model=build, train_data=samples, loss=loss, optimizer=optimize, learning_rate=1e-4)
    profile = {"A10G": "a10", "A100-40GB": "a100-40gb"}[row["gpu"]]
    return published(workload, profile, precision="fp32", gradient_dtype="weights")


def torchtitan_step(checkouts: Path, row: Row) -> Published:
    """Return pre-training as torchtitan runs it: its own sharding, and checkpoints chosen by operator."""
    import torch._inductor.utils  # with the real Triton, if there is one

    sys.path.insert(0, str(checkouts / "torchtitan"))
    absent = ("triton", "triton.language", "tiktoken", "tiktoken.load")
    with patch.dict(sys.modules, {name: MagicMock() for name in absent}):  # imported, and not used here
        models = importlib.import_module("torchtitan.models.llama")
        parallel = importlib.import_module("torchtitan.parallelisms.parallelize_llama")
    world, sequence = int(row["gpus"]), int(row["sequence"])
    given = {"vocab_size": 128_256, "max_seq_len": sequence, "norm_type": "rmsnorm"}
    config = replace(models.llama3_configs["8B"], **given)

    @contextmanager
    def sharding() -> Iterator[Sharding]:
        def shard(model: nn.Module, _: Precision) -> ShardedModel:
            parallel.apply_ac(model, SimpleNamespace(mode="selective", selective_ac_option="op"))
            parallel.apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
            return ShardedModel(model)

        with fake_ranks(world):
            mesh = init_device_mesh("cpu", (world,))
            yield shard

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten(0, 1))

    def optimize(weights: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=rate, foreach=True)

    samples = [(torch.zeros(sequence, dtype=torch.int64),) * 2] * NEAR
    build = partial(models.Transformer.from_model_args, config)
    workload = Workload(model=build, train_data=samples, loss=loss, optimizer=optimize, learning_rate=3e-4)
    step, gpus, gpu = published(workload, "h100-80gb", precision="fp32")
    return replace(step.changed(max_grad_norm=1.0), sharding=sharding, steps=(1, 1)), gpus, gpu


def bert_step(_: Path, row: Row) -> Published:
    """Return fine-tuning of BERT-large as the Trainer of transformers ran it, on sequences of 512."""
    import transformers

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = transformers.BertConfig(**large, intermediate_size=4096, attn_implementation="eager")

    def build() -> nn.Module:
        model = transformers.BertForSequenceClassification(config).train()
        if row["checkpointing"] == "yes":
            model.gradient_checkpointing_enable()
        return model

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
        return made

    def optimize(weights: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        if row["optimizer"] == "adafactor":
            return transformers.Adafactor(weights, lr=rate, scale_parameter=False, relative_step=False)
        return torch.optim.AdamW(weights, lr=rate, foreach=False)

    samples = [(torch.zeros(512, dtype=torch.int64), torch.zeros((), dtype=torch.int64))] * NEAR
    workload = Workload(model=build, train_data=samples, loss=loss, optimizer=optimize, learning_rate=5e-5)
    # Torch of that time set gradients to zero, and kept them: as in a second micro-batch.
    return published(workload, "v100-16gb", precision=row["precision"])


STEPS = {"litgpt": litgpt_step, "torchtitan": torchtitan_step, "bert-large-v100": bert_step}
"""How the rows of a file of peaks are run."""


def published(workload: Workload, profile: str, **values: Any) -> Published:
    """Return a step as it is predicted on a GPU."""
    options = Options(profile=[profile], max_micro_batch=NEAR, **values)
    gpus = Gpus(options)
    (gpu,) = gpus.asked
    return Estimator(workload, options, gpus).step(gpu), gpus, gpu
