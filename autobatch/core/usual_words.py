"""Words that other tools use for an option, and what does the same here."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple


class Answer(NamedTuple):
    """The option or setting that does the same as a usual word."""

    option: str | None
    """The option; None if it is a field of the workload, or not an option at all."""
    words: str
    """A sentence, in which ``{}`` stands for the option."""


_BATCH = (
    Answer("target_batch", "give {} N, the samples of one optimizer step: autobatch finds the micro-batch"),
    Answer("micro_batch", "give {} N to try a size: the largest is what is searched"),
)
_RATE = (
    Answer("tune_lr", "the learning rate is Workload(learning_rate=…), and {} searches for a better one"),
    Answer(None, "the learning rate is Workload(learning_rate=…)"),
)
_ACCUMULATE = (Answer(None, "the accumulation steps follow from the target batch and what fits"),)
_PRECISION = (Answer("precision", "give {} fp32, bf16 or fp16"),)
_DEVICE = (Answer("device", "give {} cuda:N, cpu or sim:PROFILE"),)
_RANKS = (Answer("ranks", "give {} N, the number of processes, one per GPU"),)
_STEPS = (Answer("steps", "give {} N, the number of optimizer steps"),)
_OUT = (Answer("out", "give {} FOLDER"),)
_EPOCHS = (Answer("epochs", "give {} N"),)
_UNTUNED = (Answer("trials", "give {} 0"),)
_MEMORY = (Answer("memory_budget", "give {} 6GiB or 80%"),)
_SHARED = (Answer("parallel", "give {} shard"),)
USUAL: Mapping[str, tuple[Answer, ...]] = {
    "batch": _BATCH,
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "global_batch_size": _BATCH,
    "bs": _BATCH,
    "lr": _RATE,
    "learning_rate": _RATE,
    "accumulation_steps": _ACCUMULATE,
    "gradient_accumulation_steps": _ACCUMULATE,
    "accumulate_grad_batches": _ACCUMULATE,
    "no_tune": _UNTUNED,
    "no_tuning": _UNTUNED,
    "no_trials": _UNTUNED,
    "amp": _PRECISION,
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "dtype": _PRECISION,
    "mixed_precision": _PRECISION,
    "gpu": _DEVICE,
    "gpus": (*_RANKS, *_DEVICE),
    "num_gpus": _RANKS,
    "nproc": _RANKS,
    "nproc_per_node": _RANKS,
    "num_processes": _RANKS,
    "cuda": _DEVICE,
    "shard": _SHARED,
    "fsdp": _SHARED,
    "fsdp2": _SHARED,
    "zero": _SHARED,
    "max_steps": _STEPS,
    "iterations": _STEPS,
    "num_epochs": _EPOCHS,
    "epoch": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "output": _OUT,
    "output_dir": _OUT,
    "num_workers": (Answer("workers", "give {} N"),),
    "n_trials": (Answer("trials", "give {} N"),),
    "memory": _MEMORY,
    "max_memory": _MEMORY,
    "vram": _MEMORY,
    "clip": (Answer("max_grad_norm", "give {} X"),),
    "clip_grad_norm": (Answer("max_grad_norm", "give {} X"),),
    "checkpoint": (Answer("resume", "{} continues a run, --out names its folder"),),
    "resume_from_checkpoint": (Answer("resume", "{} continues a run, --out names its folder"),),
    "workload": (Answer(None, "the workload stands without an option: autobatch fit train.py"),),
    "model": (Answer(None, "the model is Workload(model=…) of a file: autobatch fit train.py"),),
}
"""By the word, without dashes."""


def answer_to(word: str, options: Container[str], spelled: Callable[[str], str]) -> str | None:
    """Return what does the same as a usual word; None if the word is not known.

    Args:
        word: as the user wrote it, for example ``--batch-size``.
        options: names of the options of the command.
        spelled: writes the name of an option as the user would.
    """
    name = word.lstrip("-").replace("-", "_").casefold()
    for option, words in USUAL.get(name, ()):
        if option is None or option in options:
            return words.format("" if option is None else spelled(option))
    return None
