"""Sizes of the workspaces that oneDNN's recurrent layers keep on the CPU.

oneDNN keeps the gates and the states of every time step, and makes room for the gradients of the states
(`set_workspace_sizes` and `get_good_ld` in cpu/rnn/rnn_utils.cpp). Each part is rounded up to pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PAGE = 4096
PARTS = 8
"""Parts that a workspace may have whose layout is unknown."""
SAMPLES = 64
"""Samples of a measured layer: with this many, every part is nearly a whole number of pages."""
_LINE = 64
"""Bytes of a cache line. Rows begin at lines."""
_ALIASED = 256
"""Rows of a multiple of this many numbers would share lines of the cache, so they get one more line."""


class Workspaces:
    """Sizes of oneDNN's workspaces. Each kind of layer is measured once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}

    def parts_of(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the bytes of the parts of a workspace of an ``aten::mkldnn_rnn_layer``, before rounding.

        If this oneDNN has another layout, the only part bounds all of them, at most `PARTS` pages too many. A
        layer in evaluation has no workspace. Tensors may be fakes.
        """
        steps, samples, features = args[0].shape
        hidden, is_trained = args[10], args[15]
        if not is_trained:
            return ()
        itemsize = args[0].dtype.itemsize
        key = (features, hidden, args[0].dtype, args[12])
        if key not in self._known:
            one, two = (_measured(args, at, features, hidden) for at in (1, 2))
            self._known[key] = one, two
        one, two = self._known[key]
        if [one, two] == [whole_pages(_parts(at, SAMPLES, features, hidden, itemsize)) for at in (1, 2)]:
            return _parts(steps, samples, features, hidden, itemsize)
        whole = samples * (steps * (two - one) + 2 * one - two)
        return (-(-whole // SAMPLES) + (PARTS - 1) * PAGE,)


def whole_pages(parts: tuple[int, ...]) -> int:
    """Return the bytes of parts that are rounded up to pages each."""
    return sum(-(-part // PAGE) * PAGE for part in parts)


def _parts(steps: int, samples: int, features: int, hidden: int, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of the parts of an LSTM's workspace: seven arrays of rows."""
    layer, row = steps * samples, 2 * (steps + 1) * samples
    widest = max(features, hidden)
    gradient = row * _row_bytes(widest, 4)
    return (
        layer * _row_bytes(4 * hidden, itemsize),
        layer * _row_bytes(hidden, itemsize),
        row * _row_bytes(widest, itemsize),
        row * hidden * itemsize,
        gradient,
        gradient,
        row * hidden * 4,
    )


def _row_bytes(width: int, itemsize: int) -> int:
    line = _LINE // itemsize
    padded = -(-width // line) * line
    return (padded + line * (padded % _ALIASED == 0)) * itemsize


def _measured(args: tuple[Any, ...], steps: int, features: int, hidden: int) -> int:
    """Run a layer of this many time steps, and return the bytes of its workspace."""
    # The tensors must be real, also within a dispatch of fakes.
    with torch._C._DisableTorchDispatch(), torch.enable_grad():

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=args[0].dtype, device="cpu")

        rows = args[1].shape[0]
        state = zeros(SAMPLES, hidden)
        out = torch.ops.aten.mkldnn_rnn_layer.default(
            zeros(steps, SAMPLES, features),
            zeros(rows, features),
            zeros(rows, hidden),
            zeros(rows),
            zeros(rows),
            state,
            state,
            *args[7:],
        )
    return int(out[3].numel() * out[3].element_size())
