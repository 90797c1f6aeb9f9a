"""State of the training loop, captured as plain values and tensors and restored from them.

A checkpoint holds neither NumPy scalars nor arrays. They become plain numbers and tensors here.

Counters in a checkpoint:

- ``batches_seen``: batches trained so far, whether their step was applied or not.
- ``steps_applied``: optimizer steps among them; the others are the ``skipped_steps`` of a run's summary.
- ``skipped_steps_in_a_row``: steps skipped since the last applied one because they were not finite.
- ``oom_recoveries``: batches that ran again in smaller micro-batches.
- ``micro_batch``: the largest micro-batch, which shrinks with each recovery.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autobatch.core.errors import AutobatchError, DoesNotFitError, InputError
from autobatch.core.units import format_bytes
from autobatch.device.oom import first_line, is_oom
from autobatch.step.ema import load_average
from autobatch.training.checkpoints.sharded import sharded_bytes, with_shards
from autobatch.training.checkpoints.state_file import pack, read_state_file, write_state_file
from autobatch.training.loop import Loop
from autobatch.training.oom_errors import available_host_memory
from autobatch.workload.nested import tensors_of
from autobatch.workload.rng import capture_random_state, restore_random_state, seed_rank
from autobatch.workload.streams import stream_state


def capture_loop(loop: Loop) -> dict[str, Any]:
    """Return everything that the rest of a run depends on, between two steps."""
    train_state = loop.train_state
    own = _plain_random()
    return {
        "model": train_state.model.state_dict(),
        "buffers": _unsaved_buffers(train_state.model),
        "optimizers": [to_plain(optimizer.state_dict()) for optimizer in train_state.optimizers],
        "schedules": [to_plain(schedule.state_dict()) for schedule in loop.schedules],
        "scaler": None if train_state.scaler is None else train_state.scaler.state_dict(),
        "average": None if train_state.average is None else train_state.average.state_dict(),
        "items_per_sample": train_state.items_per_sample,
        "noise": loop.noise.state_dict(),
        "stream": to_plain(stream_state(loop.workload.train_data)),
        "random": own,
        "ranks": _ranks_of(loop, own),
        "counters": {
            "batches_seen": loop.batches_seen,
            "steps_applied": loop.steps_applied,
            "oom_recoveries": loop.oom_recoveries,
            "skipped_steps_in_a_row": loop.skipped_steps_in_a_row,
            "micro_batch": loop.micro_batch,
        },
    }


def restore_loop(
    loop: Loop, state: Mapping[str, Any], *, same_hardware: bool, folder: Path | None = None
) -> None:
    """Restore a state that `capture_loop` returned.

    Args:
        loop: a loop of the same workload.
        state: what `capture_loop` returned.
        same_hardware: also restore the micro-batch and the random states of the GPUs, so that the rest of the
            run is bit-exact. Otherwise the loop keeps its micro-batch, and the batches are still the same.
        folder: of the checkpoint, which may have a part of the state; None if it has none.

    Raises:
        InputError: the state belongs to another model, optimizer or schedule.
        DoesNotFitError: memory runs out while it is restored.
    """
    watch = _OomWatch()
    try:
        with watch:
            _restore_train_state(loop, with_shards(loop, state, folder))
            _restore_random_of_rank(loop, state, same_hardware=same_hardware)
    except AutobatchError:
        raise
    except Exception as error:  # a user's optimizer or schedule may raise anything
        oom = error if is_oom(error) else watch.error
        if oom is not None:
            raise DoesNotFitError(_not_enough_memory(loop, state, oom)) from error
        text = (str(error).splitlines() or [""])[0]
        raise InputError(
            "the checkpoint was written with another model, optimizer or schedule "
            f"({type(error).__name__}: {text}). Give the same workload, or start without --resume"
        ) from error
    counters = state["counters"]
    loop.batches_seen = counters["batches_seen"]
    loop.steps_applied = counters["steps_applied"]
    loop.oom_recoveries = counters["oom_recoveries"]
    loop.skipped_steps_in_a_row = counters["skipped_steps_in_a_row"]
    if same_hardware:
        loop.micro_batch = counters["micro_batch"]
    kept = state.get("ranks")
    if same_hardware and kept is not None and loop.engine.limits:
        loop.engine.limits[:] = kept["limits"]
        loop.micro_batch = loop.engine.limits[loop.engine.ranks.rank]


def _plain_random() -> dict[str, Any]:
    """Return the random states of this process as plain values and tensors."""
    state = capture_random_state()
    numpy = state.numpy
    return {
        "python": state.python,
        "numpy": None if numpy is None else (numpy[0], torch.from_numpy(numpy[1].copy()), *numpy[2:]),
        "torch": state.torch,
        "cuda": state.cuda,
    }


def _ranks_of(loop: Loop, own: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of every rank; None for one process. All ranks call it."""
    ranks = loop.engine.ranks
    if ranks.world == 1:
        return None
    file = io.BytesIO()
    write_state_file(file, own)
    found = [read_state_file(io.BytesIO(one)) for one in ranks.gather_bytes(file.getvalue())]
    return {"limits": [*loop.engine.limits], "random": found}


def _restore_random_of_rank(loop: Loop, state: Mapping[str, Any], *, same_hardware: bool) -> None:
    """Restore the random states of this rank, or seed it anew if the checkpoint has no such rank."""
    ranks, kept = loop.engine.ranks, state.get("ranks")
    if ranks.rank == 0:
        _restore_random(state["random"], with_cuda=same_hardware)
    elif kept is not None and ranks.rank < len(kept["random"]):
        _restore_random(kept["random"][ranks.rank], with_cuda=same_hardware)
    else:
        seed_rank(loop.sampler.seed, ranks.rank, state["counters"]["batches_seen"])


def _restore_train_state(loop: Loop, state: Mapping[str, Any]) -> None:
    train_state = loop.train_state
    train_state.model.load_state_dict(state["model"])
    _load_buffers(train_state.model, state["buffers"], train_state.device)
    for optimizer, saved in zip(train_state.optimizers, state["optimizers"], strict=True):
        _load_optimizer(optimizer, saved)
    for schedule, saved in zip(loop.schedules, state["schedules"], strict=True):
        schedule.load_state_dict(saved)
    load_average(train_state.average, state["average"])
    if train_state.scaler is not None and state["scaler"]:
        train_state.scaler.load_state_dict(state["scaler"])
    train_state.items_per_sample = state["items_per_sample"]
    loop.noise.load_state_dict(state["noise"])


class _OomWatch(TorchFunctionMode):
    """A watch that keeps the first out-of-memory error of a tensor operation.

    ``nn.Module.load_state_dict`` turns every error of a copy into the text of a RuntimeError.
    """

    error: Exception | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if self.error is None and is_oom(error):
                self.error = error
            raise


def _not_enough_memory(loop: Loop, state: Mapping[str, Any], error: Exception) -> str:
    size = sum(tensor.nbytes for tensor in tensors_of(dict(state))) + sharded_bytes(loop, state)
    return (
        f"not enough memory to resume: the state of the checkpoint takes {format_bytes(size)}, and the "
        f"memory budget is {format_bytes(loop.device.budget_bytes)}: {first_line(error).rstrip('.')}. The "
        "checkpoint is intact: free memory, or give a larger --memory-budget, then resume again"
    )


def check_checkpoint_state(state: Mapping[str, Any]) -> None:
    """Check that a checkpoint can hold this state; the values of tensors are not looked at.

    Raises:
        InputError: it holds objects that a checkpoint cannot hold; names the part.
        DoesNotFitError: the host memory does not suffice for the check.
    """
    for part, value in state.items():
        try:
            json.dumps(pack(_skeleton(value)).value)
        except Exception as error:
            if is_oom(error):
                raise DoesNotFitError(
                    f"not enough host memory to keep the state of the workload's {part} in a checkpoint, "
                    f"found {available_host_memory()} available: {first_line(error).rstrip('.')}. "
                    "Free host memory"
                ) from error
            raise InputError(
                f"the state of the workload's {part} cannot be kept in a checkpoint, which is read without "
                f"executing code, found {first_line(error)}: keep only numbers, text, tensors and lists, "
                "tuples, sets and dicts of them"
            ) from None


def to_plain(value: Any) -> Any:
    """Return the value with NumPy scalars as exact Python numbers; containers without any are kept."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, dict):
        changed = {to_plain(key): to_plain(item) for key, item in value.items()}
        is_same = all(a is b for a, b in zip(changed.values(), value.values(), strict=True))
        return value if is_same and all(a is b for a, b in zip(changed, value, strict=True)) else changed
    if type(value) in (list, tuple):
        items = [to_plain(item) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value


def _skeleton(value: Any) -> Any:
    """Return the same structure with every sharded tensor empty, which has a file of its own."""
    if hasattr(value, "device_mesh"):
        return torch.empty(0, device="cpu")
    if type(value) in (dict, list, tuple) or hasattr(value, "_metadata"):
        if isinstance(value, dict):
            return {key: _skeleton(item) for key, item in value.items()}
        return type(value)(_skeleton(item) for item in value)
    return value


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict leaves out; a forward pass may change them too."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def _load_buffers(model: nn.Module, saved: Mapping[str, Tensor], device: torch.device) -> None:
    for full_name, value in saved.items():
        path, _, name = full_name.rpartition(".")
        module = model.get_submodule(path)
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.copy_(value)
        else:
            module._buffers[name] = value.to(device)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load optimizer state exactly: torch would round float32 state of 16-bit parameters to 16 bits."""
    optimizer.load_state_dict(saved)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter][name]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device, copy=True)


def _restore_random(state: Mapping[str, Any], *, with_cuda: bool) -> None:
    numpy = state["numpy"]
    current = capture_random_state()
    cuda: list[Tensor] = state["cuda"] if with_cuda and len(state["cuda"]) == len(current.cuda) else []
    restore_random_state(
        current._replace(
            python=state["python"],
            numpy=None if numpy is None else (numpy[0], numpy[1].numpy(), *numpy[2:]),
            torch=state["torch"],
            cuda=cuda,
        )
    )
