"""Sinks for W&B, MLflow and Aim: ``autobatch.fit(workload(), sinks=[wandb_sink("digits")], …)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from autobatch import StepRecord, Training


class Tracker(NamedTuple):
    """A sink, made of three functions of a tracker."""

    log: Callable[[dict[str, float], int], object]  # figures of a step, and its number
    keep: Callable[[Any], object]  # the summary of the run
    close: Callable[[], object]

    def step(self, record: StepRecord) -> None:
        """Log the known numbers of a step by name, held-out figures included."""
        values: dict[str, Any] = msgspec.to_builtins(record)
        values |= {f"held_out/{name}": value for name, value in values.pop("validation").items()}
        self.log({k: value for k, value in values.items() if isinstance(value, int | float)}, record.step)

    def end(self, training: Training) -> None:
        """Keep the summary of the run."""
        self.keep(msgspec.to_builtins(training))


def wandb_sink(project: str, **settings: Any) -> Tracker:
    """Log to Weights & Biases: ``pip install wandb``."""
    import wandb

    run = wandb.init(project=project, **settings)
    return Tracker(run.log, run.summary.update, run.finish)


def mlflow_sink(experiment: str, **settings: Any) -> Tracker:
    """Log to MLflow: ``pip install mlflow-skinny``, or all of ``mlflow``."""
    import mlflow

    mlflow.set_experiment(experiment)
    mlflow.start_run(**settings)
    return Tracker(mlflow.log_metrics, lambda one: mlflow.log_dict(one, "training.json"), mlflow.end_run)


def aim_sink(experiment: str, **settings: Any) -> Tracker:
    """Log to Aim: ``pip install aim``."""
    import aim

    run = aim.Run(experiment=experiment, **settings)
    return Tracker(
        log=lambda values, step: [run.track(one, name=name, step=step) for name, one in values.items()],
        keep=lambda summary: run.__setitem__("training", summary),
        close=run.close,
    )
