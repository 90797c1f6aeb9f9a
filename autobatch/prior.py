"""What a step allocates, before anything has run: what makes the first guess of a search the last one."""

from __future__ import annotations

from torch import nn

from autobatch.attempt import WINDOWS, Bench
from autobatch.errors import AutobatchError
from autobatch.footprint.predict import Footprint, footprint
from autobatch.footprint.recorder import Setting
from autobatch.knobs import COMPILE
from autobatch.state import preserved_random_state


def prior_footprint(bench: Bench) -> Footprint | None:
    """Trace an attempt on tensors without memory; ``None`` where that would not tell what will be recorded.

    On a card the first runs tell more: its libraries take workspaces that no trace sees. So do those of
    recurrent layers on the CPU (oneDNN).
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in bench.model.modules())
    if bench.device.kind == "cuda" or recurrent:
        return None
    try:
        # Data that is augmented draws while it is read.
        with preserved_random_state():
            return footprint(
                Setting(
                    workload=bench.workload,
                    model=bench.model,
                    batch_of=bench.costliest.batch,
                    precision=bench.precision,
                    capability=None,
                    windows=WINDOWS,
                    max_grad_norm=bench.max_grad_norm,
                    # A compiled model is predicted as its module runs without the compiler.
                    knobs={name: value for name, value in bench.knobs.items() if name != COMPILE},
                )
            )
    except AutobatchError:
        # Whatever cannot be traced is run.
        return None
