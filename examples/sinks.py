"""Sinks for W&B, MLflow and Aim: ``autobatch.fit(workload(), sinks=[WandbSink("digits")], …)``."""

from __future__ import annotations

from typing import Any

import msgspec

from autobatch import StepRecord, Training


def figures(record: StepRecord) -> dict[str, float]:
    """Return the known numbers of a step by name, held-out figures included."""
    values: dict[str, Any] = msgspec.to_builtins(record)
    held_out = {f"held_out/{name}": value for name, value in values.pop("validation").items()}
    numbers = {**values, **held_out}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


class WandbSink:
    """Weights & Biases: ``pip install wandb``."""

    def __init__(self, project: str, **settings: Any) -> None:
        import wandb

        self._run = wandb.init(project=project, **settings)

    def step(self, record: StepRecord) -> None:
        """Log a step."""
        self._run.log(figures(record), step=record.step)

    def end(self, training: Training) -> None:
        """Put the summary of the run into W&B's."""
        self._run.summary.update(msgspec.to_builtins(training))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowSink:
    """MLflow: ``pip install mlflow-skinny``, or all of ``mlflow``."""

    def __init__(self, experiment: str, **settings: Any) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run(**settings)

    def step(self, record: StepRecord) -> None:
        """Log a step."""
        self._mlflow.log_metrics(figures(record), step=record.step)

    def end(self, training: Training) -> None:
        """Keep the summary of the run as an artifact."""
        self._mlflow.log_dict(msgspec.to_builtins(training), "training.json")

    def close(self) -> None:
        """Finish the run."""
        self._mlflow.end_run()


class AimSink:
    """Aim: ``pip install aim``."""

    def __init__(self, experiment: str, **settings: Any) -> None:
        import aim

        self._run = aim.Run(experiment=experiment, **settings)

    def step(self, record: StepRecord) -> None:
        """Log a step."""
        for name, value in figures(record).items():
            self._run.track(value, name=name, step=record.step)

    def end(self, training: Training) -> None:
        """Keep the summary of the run."""
        self._run["training"] = msgspec.to_builtins(training)

    def close(self) -> None:
        """Finish the run."""
        self._run.close()
