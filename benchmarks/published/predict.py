"""Predictions of published steps on GPUs that are not here, each in a process of its own."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autobatch import Workload
from autobatch.core.options import Options
from autobatch.device.allocator.caching import AllocatorConfig, CachingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.device.profiles import HardwareProfile
from autobatch.estimates.footprints import footprint
from autobatch.estimates.gpus import Gpus
from autobatch.estimates.traced_step import TracedStep, record
from autobatch.estimates.traces import Layout, Traces

Row = dict[str, str]
LORA = {"q": "query", "k": "key", "v": "value", "p": "projection", "m": "mlp", "h": "head"}
"""Layers with adapters, by their letters in the data."""
NEAR = 1024
"""The largest micro-batch that is tried: larger than any that was published."""


class Traced(NamedTuple):
    """A published step as it is predicted."""

    step: TracedStep
    gpus: Gpus
    gpu: HardwareProfile


def limits_of(checkouts: Path, row: Row) -> dict[str, object]:
    """Predict the largest micro-batch of a row of timm's file, by both definitions of fitting."""
    start = time.perf_counter()
    step, gpus, gpu = timm_step(checkouts, row)
    spending, found = gpus.spending(gpu), footprint(step)
    predicted = spending.predict(found)

    def retrying(limit: int | None, expandable: bool) -> CachingAllocator:
        config = AllocatorConfig(expandable_segments=expandable, held_bytes=spending.held_bytes)
        return CachingAllocator(limit, config)

    return {
        "low": predicted.low,
        "predicted": predicted.micro_batch,
        "with_retries": spending._replace(new_allocator=retrying).largest(found)[0],
        "high": predicted.high,
        "seconds": round(time.perf_counter() - start, 1),
    }


def peak_of(checkouts: Path, row: Row) -> dict[str, object]:
    """Predict the peak of a row, in bytes: allocated, or reserved where a whole process was measured."""
    start = time.perf_counter()
    step, gpus, gpu = litgpt_step(checkouts, row) if "sequence" in row else bert_step(row)
    trace = record(step, int(row["micro_batch"])).trace
    peaks = replay(trace, gpus.spending(gpu).new_allocator(None, False))
    reserved = peaks.peak_reserved_bytes or 0
    return {
        "predicted_bytes": reserved if "nvml_used_mib" in row else peaks.peak_allocated_bytes,
        "fits": reserved <= gpus.budget(gpu)[0],
        "seconds": round(time.perf_counter() - start, 1),
    }


def timm_step(checkouts: Path, row: Row) -> Traced:
    """Return training as timm's benchmark runs it: SGD with Nesterov momentum on images of one size."""
    sys.path[:0] = [str(checkouts / "timm"), str(checkouts / "site")]
    importlib.import_module("benchmarks.clients.of_others").load_torchvision()
    timm = importlib.import_module("timm")
    layout = torch.channels_last if row["layout"] == "nhwc" else torch.contiguous_format
    size = int(row["image"])
    image = torch.zeros(1).expand(3, size, size)

    def build() -> nn.Module:
        model: nn.Module = timm.create_model(row["model"])
        return model.to(memory_format=layout).train()  # type: ignore[call-overload]

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(samples), 3, size, size, device="cpu").contiguous(memory_format=layout)
        return images, torch.zeros(len(samples), dtype=torch.int64, device="cpu")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = model(batch[0])
        return nn.functional.cross_entropy(output[0] if isinstance(output, tuple) else output, batch[1])

    sgd = partial(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=False)
    return _traced("rtx-3090", {"precision": "fp16"}, build, image, loss, sgd, collate=collate)


def litgpt_step(checkouts: Path, row: Row) -> Traced:
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

    options = {"precision": "fp32", "gradient_dtype": "weights"}
    profile = {"A10G": "a10", "A100-40GB": "a100-40gb"}[row["gpu"]]
    return _traced(profile, options, build, torch.zeros(sequence, dtype=torch.int64), loss)


def bert_step(row: Row) -> Traced:
    """Return BERT-large as transformers' trainer ran it on sequences of 512 tokens, with eager attention."""
    transformers = importlib.import_module("transformers")

    def build() -> nn.Module:
        config = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
            attn_implementation="eager",
        )  # fmt: skip
        model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config)
        if row["checkpointing"] == "yes":
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return model.train()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = model(input_ids=batch[0], labels=batch[1][:, 0]).loss
        return found

    optimizer: Any = partial(torch.optim.AdamW, foreach=False)
    if row["optimizer"] == "adafactor":
        optimizer = partial(transformers.Adafactor, scale_parameter=False, relative_step=False)
    tokens = torch.zeros(512, dtype=torch.int64)
    return _traced("v100-16gb", {"precision": row["precision"]}, build, tokens, loss, optimizer)


def _traced(
    profile: str,
    values: dict[str, Any],
    build: Callable[[], nn.Module],
    sample: Tensor,
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **more: Any,
) -> Traced:
    """Return a step on one kind of sample."""

    def optimize(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return optimizer([weight for weight in parameters if weight.requires_grad], lr=rate)

    samples = [(sample, sample if sample.dim() == 1 else 0)] * NEAR
    workload = Workload(
        model=build, train_data=samples, loss=loss, optimizer=optimize, learning_rate=1e-4, **more
    )
    options = Options().with_values(profile=[profile], max_micro_batch=NEAR, **values)
    gpus = Gpus(options, Path("nowhere"))
    (gpu,) = gpus.asked
    return Traced(Traces(workload, options, gpus).step(gpu, Layout()), gpus, gpu)
