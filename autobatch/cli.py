"""The command line: the only module that prints or exits. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from autobatch import __version__

if TYPE_CHECKING:
    from autobatch.config import Options
    from autobatch.results import Result

HELP = """\
usage: autobatch COMMAND [WORKLOAD] [options]

Finds the largest micro-batch that fits in memory, plans the accumulation that makes
the batch you ask for exactly, tunes what is left, and trains.

commands:
  fit        probe, plan, tune, train; save the profile and the report
  plan       probe and plan only
  probe      the largest micro-batch that fits
  tune       measure what is left to choose, with Optuna
  profiles   hardware profiles: list, show NAME, save NAME
  doctor     what this machine offers, and what is missing

WORKLOAD is module:function or path/to/file.py:function; without one, `workload` of
autobatch.toml or of [tool.autobatch] in pyproject.toml; with neither, the demo.

  autobatch fit --target-batch 1024
  autobatch fit train.py:workload --target-batch 1024 --memory-budget 6GiB
  autobatch COMMAND --help
  autobatch --version
"""
RUNNING = ("fit", "plan", "probe", "tune")
OTHER = ("profiles", "doctor")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run a command; returns the exit code."""
    from autobatch.errors import InputError

    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"autobatch {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in RUNNING + OTHER:
        near = difflib.get_close_matches(name, RUNNING + OTHER, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(RUNNING + OTHER)}"
        return _complain(InputError(f"there is no command {name!r}; {hint}"))
    return _guarded(lambda: _run_command(name, rest), verbose="--verbose" in rest)


def _run_command(name: str, arguments: list[str]) -> int:
    if name in OTHER:
        from autobatch.commands import doctor, profiles

        return {"doctor": doctor, "profiles": profiles}[name](arguments, print)
    workload, options = parse(name, arguments, folder=Path.cwd(), environ=os.environ)
    return _run_workload(name, workload, options, arguments)


def parse(
    name: str, arguments: list[str], *, folder: Path, environ: Mapping[str, str]
) -> tuple[str | None, Options]:
    """The workload and the options of a command, from the files, the variables and the command line.

    Raises:
        InputError: what was asked for cannot be; one line.
    """
    import platformdirs
    import tyro

    from autobatch.config import COMMANDS, environment_values, file_values, options_from
    from autobatch.errors import InputError

    kind = COMMANDS[name]
    user_config = Path(platformdirs.user_config_dir("autobatch")) / "config.toml"
    values, _ = file_values(folder, user_config)
    values |= environment_values(environ)
    configured = values.pop("workload", None)
    known = {key: value for key, value in values.items() if key in kind.__struct_fields__}
    _refuse_unknown(arguments, kind)
    needed = {key: tyro.MISSING for key in ("target_batch",) if key in kind.__struct_fields__}
    # Checked before tyro sees them: a value of a file must not be blamed on the command line.
    checked = options_from(kind, {**{key: 1 for key in needed}, **known})
    default = (
        {key: getattr(checked, key) for key in kind.__struct_fields__}
        | needed
        | {key: getattr(checked, key) for key in known}
    )

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            workload, options = tyro.cli(
                _collector(kind, kind(**default)),
                prog=f"autobatch {name}",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(f"{_one_line(complaint.getvalue())}; see autobatch {name} --help") from None
    given = {key: getattr(options, key) for key in kind.__struct_fields__}
    return workload or configured, options_from(kind, given, spell="--{}")


def _run_workload(name: str, workload: str | None, options: Options, arguments: list[str]) -> int:
    from autobatch.fitting import run_fit_command
    from autobatch.pipeline import Environment, run_plan_command, run_probe_command, run_tune_command
    from autobatch.report.terminal import Terminal

    run_it: dict[str, Callable[[Any, Any, Environment], Result]] = {
        "fit": run_fit_command,
        "plan": run_plan_command,
        "probe": run_probe_command,
        "tune": run_tune_command,
    }
    parts = {
        "fit": (),
        "plan": ("device", "probe", "plan", "profile"),
        "probe": ("device", "probe"),
        "tune": ("device", "probe", "plan", "tuning", "profile"),
    }
    command = shlex.join(["autobatch", name, *arguments])
    with Terminal(sys.stderr if options.json else sys.stdout, quiet=options.quiet) as terminal:
        terminal.begin(workload)
        environment = Environment(progress=terminal, isolated=True, environ=os.environ, command=command)
        result = run_it[name](workload, options, environment)
        terminal.finish(result)
    if options.json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(result.to_json(*parts[name])).decode() + "\n")
    return 0


def _guarded(call: Callable[[], int], *, verbose: bool) -> int:
    """Run a command; whatever it raises becomes one line and an exit code."""
    from autobatch.errors import AutobatchError, UserCodeError

    try:
        return call()
    except SystemExit as stop:
        return int(stop.code or 0)
    except BrokenPipeError:
        # Whoever read the output is gone; nothing may be written to it any more, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("autobatch: interrupted; nothing was trained", file=sys.stderr)
        return 130
    except AutobatchError as error:
        return _complain(error, verbose=verbose)
    except Exception as error:
        from autobatch.workload import blamed_part, describe, user_frame

        if blamed_part(error) is None and user_frame(error) is None:
            if verbose:
                raise
            print(f"autobatch: unexpected {type(error).__name__}: {error}", file=sys.stderr)
            print("this is a fault of autobatch; --verbose shows where", file=sys.stderr)
            return 1
        mended = UserCodeError(describe(error))
        mended.__cause__ = error
        return _complain(mended, verbose=verbose)


def _complain(error: Exception, *, verbose: bool = False) -> int:
    import traceback

    text = " ".join(str(error).split())
    print(f"autobatch: {text}", file=sys.stderr)
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("Traceback")]
    for note in notes:
        print(note, file=sys.stderr)
    if verbose:
        traceback.print_exception(error)
    return int(getattr(error, "exit_code", 1))


def _collector(kind: type[Options], default: Options) -> Callable[..., tuple[str | None, Options]]:
    """A function whose arguments are those of a command, for tyro to read."""
    import tyro

    def collect(workload: Any = None, *, options: Any = default) -> tuple[str | None, Options]:
        return workload, options

    # Given as objects: tyro would look the names of string annotations up in this module.
    collect.__annotations__ = {
        "workload": tyro.conf.Positional[str | None],
        "options": Annotated[kind, tyro.conf.OmitArgPrefixes],
    }
    collect.__doc__ = (
        f"{kind.__doc__}\n\nArgs:\n    workload: module:function or path/to/file.py:function; without it, the "
        "configured one, else the demo."
    )
    return collect


def _refuse_unknown(arguments: list[str], kind: type[Options]) -> None:
    """Name the nearest option before tyro sees the arguments: its own words are many lines."""
    from autobatch.errors import InputError

    known = ["--help", *(f"--{name.replace('_', '-')}" for name in kind.__struct_fields__)]
    known += [f"--no-{name[2:]}" for name in known]
    for word in arguments:
        option = word.partition("=")[0].replace("_", "-")
        if word == "--":
            return
        if word.startswith("--") and option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            raise InputError(f"there is no option {option}; {hint}")


def _one_line(box: str) -> str:
    """The message inside tyro's box: its first paragraph, as one line."""
    lines = [line.strip("│ ").strip() for line in box.splitlines() if line.startswith("│")]
    paragraph: list[str] = []
    for line in lines:
        if set(line) == {"─"}:
            break
        paragraph.append(line)
    return " ".join(paragraph) or " ".join(box.split())


if __name__ == "__main__":
    main()
