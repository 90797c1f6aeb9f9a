"""A sink for Aim: ``autobatch.fit(workload(), sinks=[AimSink("digits")], …)``; needs ``pip install aim``."""

from __future__ import annotations

from typing import Any

import msgspec

from autobatch import StepRecord, Training


class AimSink:
    """A run of Aim, which gets the known numbers of every step."""

    def __init__(self, experiment: str, **settings: Any) -> None:
        import aim

        self.run = aim.Run(experiment=experiment, **settings)

    def step(self, record: StepRecord) -> None:
        """Track the known numbers of a step by name, held-out figures included."""
        values: dict[str, Any] = msgspec.to_builtins(record)
        values |= {f"held_out/{name}": value for name, value in values.pop("validation").items()}
        for name, value in values.items():
            if isinstance(value, int | float):
                self.run.track(value, name=name, step=record.step)

    def end(self, training: Training) -> None:
        """Keep the summary of the run."""
        self.run["training"] = msgspec.to_builtins(training)

    def close(self) -> None:
        """Finish; called once, whether the run reached its end or failed."""
        self.run.close()
