"""The check that the values of all options go through, and the messages about wrong ones.

Values come from the command line, config files, environment variables and keywords of library calls
(`autobatch.cli.parser` sets their precedence). Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import os
import re
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from autobatch.core.errors import InputError
from autobatch.core.files import UNREADABLE
from autobatch.core.knobs import parse_knobs
from autobatch.core.options import MOST_WORKERS, AtLeastOne, Options, fields_of
from autobatch.core.text import LONGEST_VALUE, is_text, printable, quoted
from autobatch.core.units import TiB, parse_budget, parse_duration

LARGEST_INTEGER = 2**63 - 1
"""Largest whole number of an option: torch and the files count in 64 bits."""
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_COUNTS = re.compile(rf"{_COUNT.pattern}(,{_COUNT.pattern})*")
_DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?|sim:.+")
OTHER_NAMES = {
    "batch_size": ("target_batch", "micro_batch"),
    "bs": ("target_batch", "micro_batch"),
    "gradient_accumulation_steps": ("target_batch",),
    "accumulate_grad_batches": ("target_batch",),
    "lr": ("tune_lr",),
    "learning_rate": ("tune_lr",),
    "no_tune": ("trials",),
    "amp": ("precision",),
    "dtype": ("precision",),
    "gpu": ("device",),
    "gpus": ("ranks",),
    "nproc_per_node": ("ranks",),
    "num_processes": ("ranks",),
    "fsdp": ("parallel",),
    "memory": ("memory_budget",),
    "vram": ("memory_budget",),
    "checkpoint": ("resume",),
    "output_dir": ("out",),
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
    names = names or {}
    fields = fields_of(command)
    checked = {}
    for name, value in values.items():
        if name not in fields:
            raise InputError(unknown_option(names.get(name, name), fields))
        checked[name] = _converted(names.get(name, name), value, fields[name].type)
    for name, field in fields.items():
        if command in field.about.required_by and checked.get(name) is None:
            found = f"must be {expected(field.type)}, found None"
            missing = f"is missing: give {expected(field.type)}"
            raise InputError(f"{names.get(name, name)} {found if name in checked else missing}")
    _check(command, checked, {name: names.get(name, name) for name in checked})
    return Options(command=command).with_values(**checked)


def _converted(name: str, value: Any, annotation: Any) -> Any:
    """Return a value in the type of its option."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif hasattr(value, "item"):  # a number of NumPy
        value = value.item()
    is_list = get_origin(plain_type(annotation)) is list
    if isinstance(value, str) and is_list:
        value = [value]
    is_count = AtLeastOne in get_args(plain_type(annotation))
    if is_count and isinstance(value, str) and _COUNT.fullmatch(value):
        value = int(value)  # where an option takes text too, msgspec would keep it
    try:
        found = msgspec.convert(value, annotation, strict=False)
        is_valid = value is None or found is not None  # msgspec reads the text null as None
    except UNREADABLE:
        found, is_valid = None, False
    if not is_valid:
        each = value if is_list and isinstance(value, list) else [value]
        raise InputError(f"{name} must be {expected(annotation)}, found {', '.join(map(quoted, each))}")
    if isinstance(found, int) and found > LARGEST_INTEGER:
        raise InputError(f"{name} must be at most {LARGEST_INTEGER}, found {quoted(found)}")
    for text in found if isinstance(found, list) else [found]:
        if isinstance(text, str) and not is_text(text):
            raise InputError(f"{name} must be text in UTF-8 without NUL, found {quoted(text)}")
    return found


def _check(command: str, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check what the types cannot express and no device or workload is needed for."""
    given = {name: value for name, value in values.items() if value is not None}
    if "device" in given and not _DEVICES.fullmatch(given["device"]):
        raise InputError(
            f"{names['device']} {quoted(given['device'])} names no device: "
            "write auto, cuda, cuda:N, cpu or sim:PROFILE"
        )
    if command == "estimate":
        if not _COUNTS.fullmatch(str(given.get("ranks", 1))):
            raise InputError(
                f"{names['ranks']} must be whole numbers of 1 or more with commas between them, found "
                f"{quoted(given['ranks'])}"
            )
    elif given.get("ranks", 1) not in range(1, MOST_WORKERS + 1):
        raise InputError(
            f"{names['ranks']} must be a whole number from 1 to {MOST_WORKERS}, found "
            f"{quoted(given['ranks'])}"
        )
    try:
        name = "memory_budget"
        if name in given:
            parse_budget(given[name], whole_bytes=TiB)
        name = "knobs"
        if name in given:
            parse_knobs(given[name])
        name = "checkpoint_every"
        if isinstance(given.get(name), str):
            parse_duration(given[name])
    except InputError as error:
        raise InputError(f"{names[name]}: {error}") from None
    if "steps" in given and "epochs" in given:
        raise InputError(
            f"{names['steps']} {given['steps']} and {names['epochs']} {given['epochs']} exclude each other: "
            "give one"
        )


def plain_type(annotation: Any) -> Any:
    """Return the type of an option without its annotations: ``bool``, ``list[str]``, ``int | None``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values that an option can take; empty if its type does not list them."""
    plain = plain_type(annotation)
    if get_origin(plain) is not Literal:  # one of several types, or of a list
        plain = next((part for part in get_args(plain) if get_origin(part) is Literal), plain)
    return get_args(plain) if get_origin(plain) is Literal else ()


def expected(annotation: Any) -> str:
    """Describe the values that an option accepts, for example ``a whole number of 1 or more``."""
    plain = plain_type(annotation)
    if plain is not annotation:
        limits = [one for one in get_args(annotation)[1:] if isinstance(one, Meta)]
        return _limited(plain, limits[0]) if limits else expected(plain)
    if get_origin(plain) is Literal:
        return f"one of {', '.join(get_args(plain))}"
    if get_origin(plain) is list:
        choices = choices_of(plain)
        return f"one or more of {', '.join(choices)}" if choices else "one or more names"
    if isinstance(plain, types.UnionType) or get_origin(plain) is not None:
        return " or ".join(expected(part) for part in get_args(plain) if part is not type(None))
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[plain]


def unknown_option(asked: str, names: Iterable[str], *, otherwise: str | None = None) -> str:
    """Return the message about an option that does not exist, with what replaced it or was probably meant.

    Args:
        asked: as the user wrote it, for example ``--batch-size``.
        names: the options that exist, spelled in the same way.
        otherwise: advice if no option is near; None to list all of them.
    """
    removed = REMOVED.get(_plain(asked).removeprefix("autobatch_"))
    if removed is not None:
        return f"the option {asked} is gone: {removed}"
    known = {_plain(name): name for name in names}
    usual = [one for one in OTHER_NAMES.get(_plain(asked), ()) if one in known]
    near = usual or difflib.get_close_matches(_plain(asked), known, n=1)
    otherwise = otherwise or f"there are: {', '.join(sorted(known.values()))}"
    hint = f"did you mean {known[near[0]]}?" if near else otherwise
    return f"there is no option {printable(asked, limit=LONGEST_VALUE)}; {hint}"


def _plain(name: str) -> str:
    """Return a name without dashes, to compare it with others: ``--batch-size`` is ``batch_size``."""
    return name.lstrip("-").replace("-", "_").lower()


def _limited(kind: type, meta: Meta) -> str:
    number = "a whole number" if kind is int else "a number"
    if meta.le is not None:
        return f"{number} from {meta.ge} to {meta.le}"
    if meta.lt is not None:
        return f"{number} over {meta.gt} and under {meta.lt}"
    return f"{number} of {meta.ge} or more" if meta.ge is not None else f"{number} over {meta.gt}"
