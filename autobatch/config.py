"""The options of every command, and where their values come from.

One frozen structure a command; the command line, the config files and the keywords of the library calls are
all checked against it. Later places win: defaults, the user's ``config.toml``, ``[tool.autobatch]`` of
``pyproject.toml``, ``autobatch.toml`` (which replaces the table of ``pyproject.toml``), ``AUTOBATCH_…``
variables, the command line. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from autobatch.errors import InputError
from autobatch.records import LearningRateRule

AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every command takes."""

    device: str = "auto"
    """auto, cuda, cuda:N, cpu or sim:PROFILE."""
    memory_budget: str | int | None = None
    """What the allocator may hold: 6GiB, 512MiB, 80%. Without it: what is free, less a headroom."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the micro-batches; auto is bf16 where the card is built for it, else fp32."""
    seed: int = 0
    """Seed of the weights, the order of the data and the trials."""
    json: bool = False
    """Print one JSON object on standard output, and everything for people on standard error."""
    quiet: bool = False
    """No progress, only the result."""
    verbose: bool = False
    """Show the whole traceback of an error."""


class SearchOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the largest micro-batch is searched."""

    max_micro_batch: AtLeastOne | None = None
    """Search no further than this many samples."""
    time_limit: Positive | None = None
    """Seconds after which the best certified size so far is the answer."""
    max_grad_norm: Positive | None = None
    """Clip the gradient of the whole window to this norm; without it: no clipping."""


class ProbeOptions(SearchOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch probe``."""

    micro_batch: AtLeastOne | None = None
    """Only ask whether this micro-batch fits."""


class PlanOptions(SearchOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch plan``."""

    target_batch: AtLeastOne
    """Samples an optimizer step, exactly."""
    lr_rule: LearningRateRule = "none"
    """How the learning rate follows the batch; a rule needs the batch that it was tuned for."""
    base_batch: AtLeastOne | None = None
    """The batch that the learning rate was tuned for; overrides the workload's."""


class TuneOptions(PlanOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch tune``."""

    trials: AtLeastZero = 8
    """Configurations to measure; 0: no tuning."""
    timeout: Positive | None = None
    """Seconds after which no further trial starts."""
    storage: str | None = None
    """Where the study is kept: a database URL, or the path of a journal file."""
    study: str | None = None
    """Name of the study; runs that share storage and name share the trials."""


class FitOptions(TuneOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch fit``."""

    steps: AtLeastOne | None = None
    """Optimizer steps to train."""
    epochs: AtLeastOne | None = None
    """Passes over the training data; 1 where neither steps nor epochs are given."""
    last_window: Literal["carry", "flush", "drop"] = "carry"
    """carry windows over the end of an epoch, flush a short one, or drop it."""
    checkpoint_every: AtLeastOne | None = None
    """Write a checkpoint every this many optimizer steps, besides the one at the end."""
    keep_last: Annotated[int, Meta(ge=2)] = 3
    """Checkpoints to keep."""
    resume: bool = False
    """Go on from the newest valid checkpoint."""
    out: str | None = None
    """Folder of the run; without it: runs/NAME/DATE."""


class EstimateOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``autobatch estimate``."""

    profile: list[str] = []
    """Names or files of hardware profiles; without it: all that are known."""
    micro_batch: AtLeastOne | None = None
    """Predict the footprint of this micro-batch instead of searching the largest."""
    max_micro_batch: AtLeastOne | None = None
    """Search no further than this many samples."""
    target_batch: AtLeastOne | None = None
    """Also plan this many samples an optimizer step."""


COMMANDS: dict[str, type[Options]] = {
    "fit": FitOptions,
    "plan": PlanOptions,
    "probe": ProbeOptions,
    "tune": TuneOptions,
    "estimate": EstimateOptions,
}

_Kind = TypeVar("_Kind", bound=Options)


def options_from(kind: type[_Kind], values: Mapping[str, Any], *, spell: str = "{}") -> _Kind:
    """Build and check the options of a command from plain values or text.

    Args:
        kind: the structure of the command.
        values: option names to values; text is converted (``steps="3"``).
        spell: how an option is called in messages, ``--{}`` on the command line.

    Raises:
        InputError: an unknown option, or a value that cannot be; names it and what was found.
    """
    unknown = [name for name in values if name not in kind.__struct_fields__]
    if unknown:
        raise InputError(_unknown(spell.format(unknown[0]), kind.__struct_fields__, spell))
    try:
        return msgspec.convert(dict(values), kind, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = re.split(r"[`\[.]", where)[0]
        if not name:
            missing = re.search(r"missing required field `(\w+)`", what)
            if missing is None:
                raise InputError(str(error)) from None
            raise InputError(f"{_spelled(spell, missing[1])} is needed and was not given") from None
        asked = _spelled(spell, name)
        raise InputError(f"{asked}: {what[0].lower()}{what[1:]}, found {values[name]!r}") from None


def file_values(folder: Path, user_config: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """Read the options that stand in config files.

    Args:
        folder: the working directory.
        user_config: the user's own ``config.toml``.

    Returns:
        Option names to values (``workload`` among them), and the files that they came from.

    Raises:
        InputError: a file is no TOML, or has an option that does not exist.
    """
    values: dict[str, Any] = {}
    sources: list[str] = []
    project = folder / "autobatch.toml"
    for path in (user_config, project if project.is_file() else folder / "pyproject.toml"):
        if path is None or not path.is_file():
            continue
        table = _read_toml(path)
        if path.name == "pyproject.toml":
            table = table.get("tool", {}).get("autobatch", {})
        if table:
            values |= _known(table, path)
            sources.append(str(path))
    return values, sources


def environment_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Read the options that stand in ``AUTOBATCH_…`` variables (``AUTOBATCH_MEMORY_BUDGET=6GiB``)."""
    names = {f"AUTOBATCH_{name.upper()}": name for name in _all_names()}
    return {names[key]: value for key, value in environ.items() if key in names}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} cannot be read as TOML: {error}") from None


def _known(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    values = {key.replace("-", "_"): value for key, value in table.items()}
    for name in values:
        if name not in _all_names():
            raise InputError(f"{path}: {_unknown(name, sorted(_all_names()), '{}')}")
    return values


def _all_names() -> set[str]:
    return {"workload"} | {name for kind in COMMANDS.values() for name in kind.__struct_fields__}


def _unknown(asked: str, names: Iterable[str], spell: str) -> str:
    near = difflib.get_close_matches(asked, [_spelled(spell, name) for name in names], n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(names))}"
    return f"there is no option {asked}; {hint}"


def _spelled(spell: str, name: str) -> str:
    return spell.format(name.replace("_", "-") if spell.startswith("--") else name)
