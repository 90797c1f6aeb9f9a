"""The check that the values of all options go through, and the messages about unknown ones.

Values come from the command line, config files, environment variables and keywords of library calls
(`autobatch.cli.parser` sets their precedence). Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from autobatch.core.errors import InputError
from autobatch.core.options import PLANS, Options, all_fields, fields_of
from autobatch.core.text import LONGEST_VALUE, printable

OTHER_NAMES = {
    "batch_size": "target_batch micro_batch",
    "gradient_accumulation_steps": "target_batch",
    "lr": "tune_lr",
    "learning_rate": "tune_lr",
    "amp": "precision",
    "dtype": "precision",
    "gpu": "device",
    "gpus": "ranks",
    "nproc_per_node": "ranks",
    "fsdp": "parallel",
    "output_dir": "out",
}
"""Names of options in other tools, and the options here; the first that a command takes is named."""

REMOVED = {
    "world_size": "a command plans for --ranks N, and autobatch.plan(…, world_size=N) for another launcher",
    "scan": "a stream is planned from its first 1,000 samples",
    "prefetch": "each loader process reads 2 micro-batches ahead",
    "sample_seeds": "samples are seeded one by one with --workers N",
    "all": "estimate without --profile names all known GPUs",
    "memory_viz": "autobatch record --out FILE -- COMMAND writes a snapshot for pytorch.org/memory_viz",
    "bn_momentum": "BatchNorm keeps its momentum; set it in the model, as the note of a run says",
    "validation_micro_batch": "validation takes the micro-batch of the training, or a smaller one that fits",
    "time_limit": "a search takes few runs; Ctrl-C ends it with what is known to fit",
    "own_loop": "plan is for a loop of your own, and fit plans for its own loop",
    "study": "a study is named after what it tunes, so the same command goes on with it",
    "lr_trials": "--tune-lr tries 10 learning rates; --timeout limits its time",
    "last_batch": "batches carry over the end of an epoch, and the rest of the data is the run's last batch",
    "warmup_samples": "a schedule warms up: Workload(schedule=…)",
    "checkpoint_minutes": "--checkpoint-every takes a time too, for example 15min",
    "on_failed_save": "a checkpoint that cannot be written ends the run, and the earlier ones are intact",
    "optimizer": "the optimizer is that of Workload(optimizer=…)",
    "lr_steps": "--tune-lr runs 40 optimizer steps for each learning rate",
    "shard_sync": "gradients are reduced after each micro-batch; those of 16-bit weights once per step",
    "shard_modules": "the repeated blocks of a shared model are gathered one at a time",
}
"""Options of earlier versions, and what is in their place."""


def options_from(
    command: str, values: Mapping[str, Any], *, names: Mapping[str, str] | None = None
) -> Options:
    """Check values, plain or as text, and build the options of a command from them.

    Args:
        command: the command.
        values: option names to values; text is converted (``steps="3"``).
        names: what messages call an option, if not by its own name (``--steps``).

    Raises:
        InputError: an option is unknown, missing or has a wrong value; the message names it and the value.
    """
    fields = fields_of(command)
    labels = {name: name for name in (*fields, *values)} | dict(names or {})
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise InputError(unknown_option(labels[name], fields, command=command))
        checked[name] = fields[name].convert(value, labels[name])
        try:
            if (check := fields[name].check) and checked[name] is not None:
                check(checked[name])
        except InputError as error:
            raise InputError(f"{labels[name]}: {error}") from None
    given = {name: value for name, value in checked.items() if value is not None}
    if command in PLANS and "target_batch" not in given:
        raise InputError(f"{labels['target_batch']} is missing: give {fields['target_batch'].expected}")
    if command != "estimate" and isinstance(given.get("ranks"), str):
        raise InputError(f"{labels['ranks']} must be a whole number from 1 to 1024, found {given['ranks']!r}")
    if {"steps", "epochs"} <= given.keys():
        steps, epochs = (f"{labels[name]} {given[name]}" for name in ("steps", "epochs"))
        raise InputError(f"{steps} and {epochs} exclude each other: give one")
    return Options(command=command).with_values(**checked)


def unknown_option(asked: str, names: Iterable[str], *, command: str = "") -> str:
    """Return the message about an option that does not exist, with what replaced it or was probably meant.

    Args:
        asked: as the user wrote it, for example ``--batch-size``.
        names: the options that exist, spelled in the same way.
        command: the command that they are of; empty for those of all commands.
    """
    plain = _plain(asked)
    if (removed := REMOVED.get(plain.removeprefix("autobatch_"))) is not None:
        return f"the option {asked} is gone: {removed}"
    known = {_plain(name): name for name in names}
    if command and plain in all_fields() and plain not in known:
        others = " and ".join(all_fields()[plain].commands)
        see = f"see autobatch {command} --help-all"
        return f"{command} does not take {asked}, which is an option of {others}; {see}"
    near = [*OTHER_NAMES.get(plain, "").split(), *difflib.get_close_matches(plain, known, n=1)]
    hints = [f"did you mean {known[name]}?" for name in near if name in known]
    hints += [f"see autobatch {command} --help-all" if command else f"there are: {', '.join(sorted(names))}"]
    return f"there is no option {printable(asked, limit=LONGEST_VALUE)}; {hints[0]}"


def _plain(name: str) -> str:
    """Return a name without dashes, to compare it with others: ``--batch-size`` is ``batch_size``."""
    return name.lstrip("-").replace("-", "_").lower()
