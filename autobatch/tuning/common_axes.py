"""The knobs that several ranks tune together."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch.core.knobs import KNOBS, SPLIT, SearchAxis
from autobatch.distributed.launch import check_equal
from autobatch.distributed.ranks import Ranks


def common_axes(axes: Sequence[SearchAxis], ranks: Ranks) -> list[SearchAxis]:
    """Return the knobs of all ranks, which must have the same choices; all of them call it.

    Ranks may differ in how often their micro-batches can be halved: one that runs one sample stays at one.

    Args:
        axes: of this rank.
        ranks: the ranks.

    Raises:
        InputError: ranks differ in the choices of a knob.
    """
    if ranks.world == 1:
        return list(axes)
    found = ranks.gather({axis.name: list(axis.choices) for axis in axes})
    halvings = max((one.pop(SPLIT, []) for one in found), key=len)
    names = dict.fromkeys(name for one in found for name in one)
    check_equal([{f"the knob {name}": one.get(name) for name in names} for one in found])
    own = {axis.name: axis for axis in axes}
    if halvings:
        own[SPLIT] = SearchAxis(SPLIT, tuple(halvings))
    return [own[knob.name] for knob in KNOBS if knob.name in own]
