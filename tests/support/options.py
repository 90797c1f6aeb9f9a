"""A value for every option that is not its default."""

from __future__ import annotations

from typing import Any

from autobatch.core.check_options import options_from
from autobatch.core.options import Options, fields_of

CHANGED: dict[str, Any] = {
    "base_batch": 24,
    "checkpoint_every": 5,
    "device": "sim:t4",
    "ema": 0.9,
    "epochs": 3,
    "gradient_dtype": "weights",
    "json": True,
    "keep_last": 4,
    "knobs": "precision",
    "log": ["wandb", "mlflow"],
    "lr_rule": "sqrt",
    "max_grad_norm": 0.5,
    "max_micro_batch": 3,
    "micro_batch_multiple": 2,
    "memory_budget": "123MiB",
    "micro_batch": 2,
    "on_nonfinite": "skip",
    "out": "elsewhere",
    "precision": "bf16",
    "profile": ["l4"],
    "snapshot": ["8=b8.pickle"],
    "quiet": True,
    "resume": True,
    "ranks": 2,
    "parallel": "shard",
    "collective_timeout": 60.0,
    "sequence": 11,
    "lora": 3,
    "checkpointing": True,
    "seed": 7,
    "split": "count",
    "split_check": "note",
    "steps": 9,
    "storage": "journal.log",
    "target_batch": 48,
    "timeout": 8.5,
    "trials": 4,
    "tune_lr": True,
    "validate_every": 6,
    "verbose": True,
    "workers": 2,
}


def required(command: str) -> dict[str, Any]:
    """Return the options that a command needs."""
    return {"target_batch": 32} if command in ("plan", "tune", "fit") else {}


def all_changed(command: str, *, length: str = "steps") -> dict[str, Any]:
    """Return a changed value for each option of a command, with one of ``steps`` and ``epochs``."""
    left_out = {"steps", "epochs"} - {length}
    return {name: CHANGED[name] for name in fields_of(command) if name not in left_out}


def as_options(command: str, **values: Any) -> Options:
    """Return the options of a command."""
    return options_from(command, values)
