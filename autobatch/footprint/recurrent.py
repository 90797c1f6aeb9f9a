"""What oneDNN keeps of a recurrent layer on the CPU between forward and backward: gates and states.

It is one opaque tensor, of which torch's meta kernel says that it is empty
(torch/_meta_registrations.py, ``mkldnn_rnn_layer``). oneDNN makes it of parts that grow with the batch, each
rounded up to a page (src/cpu/rnn/rnn_utils.cpp, ``set_offsets``). How large it is, is asked of oneDNN itself,
on two layers of one and of two time steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PAGE = 4096
PARTS = 8
"""Parts that are rounded up, each by less than a page."""
SAMPLES = 64
"""Samples of the layers that are asked: so many of any part are whole pages, or nearly."""


class Workspaces:
    """Sizes of oneDNN's workspaces; each kind of layer is asked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}

    def bytes_of(self, args: tuple[Any, ...]) -> int:
        """The workspace of a call of ``aten::mkldnn_rnn_layer``, in bytes: at most `PARTS` pages too many.

        Args:
            args: of the call; its tensors may be fakes. The input is (time steps, samples, features).
        """
        steps, samples, features = args[0].shape
        hidden, is_trained = args[10], args[15]
        if not is_trained:
            return 0
        key = (features, hidden, args[0].dtype, args[12])
        if key not in self._known:
            one, two = (_asked(args, at, features, hidden) for at in (1, 2))
            self._known[key] = (two - one, 2 * one - two)
        a_step, fixed = self._known[key]
        whole = int(samples * (steps * a_step + fixed))
        return -(-whole // SAMPLES) + PARTS * PAGE


def _asked(args: tuple[Any, ...], steps: int, features: int, hidden: int) -> int:
    """The workspace of a layer of so many time steps, really run, in bytes."""
    # Inside a dispatch of fakes, these tensors are to be real ones.
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
