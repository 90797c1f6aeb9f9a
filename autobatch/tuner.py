"""Optuna over what is left when the effective batch is fixed: the only module that imports it.

Largest is not fastest. A trial measures seconds an optimizer step; one that does not fit is recorded as
complete and infeasible, never as failed or pruned, because samplers learn nothing from those. The default is
the first trial, and it stays unless something is faster by more than the noise, measured again side by side.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autobatch.errors import InputError
from autobatch.knobs import Knob, Value, defaults
from autobatch.records import Trial, Tuning

if TYPE_CHECKING:
    import optuna

MINIMUM_GAIN = 0.02
"""What a configuration must gain over the default to replace it: the noise of a short measurement."""
REMEASURED = 2
"""Best configurations that are measured again beside the default."""
ROUNDS = 3
"""… and how often, in turn: the best of many noisy figures is too good to be true."""


class Measurement(NamedTuple):
    """What a trial found."""

    samples_per_s: float
    """At the effective batch; 0 where it does not run."""
    failure: str | None = None


class Budget(NamedTuple):
    """How long to tune."""

    trials: int
    expired: Callable[[], bool]


Measure = Callable[[Mapping[str, Value]], Measurement]


def tune(
    measure: Measure,
    knobs: list[Knob],
    *,
    budget: Budget,
    seed: int,
    study_name: str,
    storage: str | None = None,
    progress: Callable[[int, Mapping[str, Value], Measurement], None] = lambda *_: None,
) -> Tuning:
    """Find the fastest configuration.

    Args:
        measure: runs a configuration; the same one is never measured twice in the search.
        knobs: what may be chosen.
        budget: trials and time.
        seed: same seed, same measurements, same answer.
        study_name: names the study in its storage.
        storage: a database URL, or the path of a journal file; ``None``: kept in memory.
        progress: told of each trial.

    Returns:
        The best configuration, the default where nothing is faster by more than the noise.

    Raises:
        InputError: the storage cannot be opened, or its study has another space.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    base = defaults(knobs)
    study = _open_study(study_name, storage, seed)
    _check_space(study, knobs)
    if not study.trials:
        study.enqueue_trial(dict(base), user_attrs={"why": "default"})
    seen = {_key(trial.params): trial for trial in study.trials if trial.value is not None}
    while len(seen) < budget.trials and len(seen) < _size(knobs) and not budget.expired():
        trial = study.ask()
        values: dict[str, Value] = {
            knob.name: trial.suggest_categorical(knob.name, list(knob.choices)) for knob in knobs
        }
        if _key(values) in seen:
            # Samplers repeat points by design; a repeat costs nothing, and the next one is drawn at random.
            study.tell(trial, seen[_key(values)].value)
            values = _unseen(knobs, seen)
            study.enqueue_trial(dict(values))
            continue
        found = measure(values)
        _tell(study, trial, found)
        seen[_key(values)] = study.trials[trial.number]
        progress(len(seen), values, found)
    return _decide(study, measure, base, budget)


def _tell(study: optuna.Study, trial: optuna.Trial, found: Measurement) -> None:
    trial.set_user_attr("samples_per_s", found.samples_per_s)
    trial.set_constraint("does_not_fit", 1.0 if found.failure else -1.0)
    if found.failure:
        trial.set_user_attr("failure", found.failure)
        worst = [t.value for t in study.trials if t.value is not None]
        study.tell(trial, min(worst, default=0.0))
    else:
        study.tell(trial, math.log(found.samples_per_s))


def _decide(study: optuna.Study, measure: Measure, base: dict[str, Value], budget: Budget) -> Tuning:
    """Measure the best again beside the default, in turn; the default stays unless it is clearly beaten."""
    ran = [t for t in study.trials if t.value is not None and "samples_per_s" in t.user_attrs]
    feasible = sorted(
        (t for t in ran if not t.user_attrs.get("failure")), key=lambda t: -t.user_attrs["samples_per_s"]
    )
    candidates = [dict(t.params) for t in feasible if _key(t.params) != _key(base)][:REMEASURED]
    default_ran = next((t for t in feasible if _key(t.params) == _key(base)), None)
    rounds = _side_by_side(measure, [base, *candidates], budget) if candidates and default_ran else []
    if not rounds:
        rounds = [[default_ran.user_attrs["samples_per_s"] if default_ran else 0.0]]
        rounds[0] += [t.user_attrs["samples_per_s"] for t in feasible if dict(t.params) in candidates]
    speeds = [statistics.median(column) for column in zip(*rounds, strict=True)]
    best = 0
    for number in range(1, len(speeds)):
        # Beside the default in every round, not only on average: single figures of a busy machine lie.
        always = all(one[number] > one[0] for one in rounds)
        if always and speeds[number] > max(speeds[0] * (1 + MINIMUM_GAIN), speeds[best]):
            best = number
    return Tuning(
        trials=len(ran),
        best=[base, *candidates][best],
        baseline_samples_per_s=speeds[0],
        best_samples_per_s=speeds[best],
        study=study.study_name,
        history=[_row(number, trial) for number, trial in enumerate(ran)],
        importance=_importance(study) if len(feasible) > len(base) else {},
    )


def _row(number: int, trial: optuna.trial.FrozenTrial) -> Trial:
    failure = trial.user_attrs.get("failure")
    return Trial(
        number=number,
        samples_per_s=None if failure else trial.user_attrs["samples_per_s"],
        feasible=failure is None,
        parameters=dict(trial.params),
        note=failure,
    )


def _importance(study: optuna.Study) -> dict[str, float]:
    """How much each knob mattered (PED-ANOVA, Watanabe et al. 2023, arXiv:2304.10255)."""
    import optuna

    try:
        return dict(optuna.importance.get_param_importances(study))
    except (RuntimeError, ValueError):
        # Too few trials, or all of them equal.
        return {}


def _side_by_side(
    measure: Measure, configurations: list[dict[str, Value]], budget: Budget
) -> list[list[float]]:
    """Samples a second of each configuration, a row for each round in which all were measured in turn."""
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        if budget.expired():
            break
        rounds.append([measure(values).samples_per_s for values in configurations])
    return rounds


def _open_study(name: str, storage: str | None, seed: int) -> optuna.Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        if storage is None or "://" in storage:
            backend: str | JournalStorage | None = storage
        else:
            Path(storage).parent.mkdir(parents=True, exist_ok=True)
            backend = JournalStorage(JournalFileBackend(storage))
        study = optuna.create_study(
            study_name=name, storage=backend, direction="maximize", load_if_exists=True
        )
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"the storage {storage} of the study cannot be opened: {type(error).__name__}: {reason}; "
            "give a database URL or the path of a journal file"
        ) from error
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        # Left running by a process that is gone.
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    # A sampler with the same seed draws the same points again after a resume: the seed moves on.
    study.sampler = _sampler(seed + len(study.trials))
    return study


def _sampler(seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.samplers.GPSampler(seed=seed)


def _check_space(study: optuna.Study, knobs: list[Knob]) -> None:
    asked = {knob.name: list(knob.choices) for knob in knobs}
    known = study.user_attrs.get("space")
    if known is None:
        study.set_user_attr("space", asked)
    elif known != asked:
        raise InputError(
            f"the study {study.study_name!r} was made for other knobs or choices ({known}), this run has "
            f"{asked}: choose another --study"
        )


def _unseen(knobs: list[Knob], seen: Iterable[object]) -> dict[str, Value]:
    """The first configuration, in the order of the choices, that has not been measured."""
    from itertools import product

    known = set(seen)
    for choice in product(*(knob.choices for knob in knobs)):
        values = dict(zip((knob.name for knob in knobs), choice, strict=True))
        if _key(values) not in known:
            return values
    raise AssertionError("asked for an unseen configuration of a space that is exhausted")


def _size(knobs: list[Knob]) -> int:
    return math.prod(len(knob.choices) for knob in knobs)


def _key(values: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(values.items()))
