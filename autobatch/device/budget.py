"""The memory budget of a device: what the user asked for, or the free memory less a headroom."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.units import MiB, format_bytes, parse_budget

HEADROOM_LEAST_BYTES = 512 * MiB
"""The least headroom: for libraries that allocate past torch, the interpreter and loader workers."""
GPU_HEADROOM_SHARE = 0.05
"""Share of a GPU's memory that no budget takes by default, simulated GPUs included."""


def resolve_budget(
    asked: str | int | None,
    *,
    total_bytes: int,
    available: Sequence[tuple[int, str]],
    headroom_share: float,
    owner: str,
) -> tuple[int, str]:
    """Return the bytes that the allocator may hold, and how they were determined, in words.

    Args:
        asked: The user's budget, taken literally: a size or a share of the total. None for the available
            memory less a headroom.
        total_bytes: Memory of the device.
        available: Signed terms that add up to the available memory, each in bytes and in words.
        headroom_share: Share of the total to leave free; at least `HEADROOM_LEAST_BYTES` are left.
        owner: Name of the device in messages.

    Raises:
        InputError: The budget is no size, or exceeds the total.
        DoesNotFitError: Nothing is left after the headroom.
    """
    if asked is not None:
        budget_bytes = parse_budget(asked, whole_bytes=total_bytes)
        if budget_bytes > total_bytes:
            raise InputError(
                f"the memory budget is {format_bytes(budget_bytes)} ({asked}), but {owner} has "
                f"{format_bytes(total_bytes)} ({total_bytes} bytes): ask for no more than that"
            )
        return budget_bytes, f"as set: {asked}"
    headroom_bytes = max(int(total_bytes * headroom_share), HEADROOM_LEAST_BYTES)
    budget_bytes = min(sum(size for size, _ in available), total_bytes) - headroom_bytes
    is_least = headroom_bytes == HEADROOM_LEAST_BYTES
    headroom = f"headroom, {'the least' if is_least else f'{headroom_share:.0%} of the total'}"
    words = _sum_in_words([*available, (-headroom_bytes, headroom)])
    if budget_bytes <= 0:
        raise DoesNotFitError(
            f"no memory is left to train in on {owner}: {words}; "
            "end other processes that use it, or set --memory-budget, which takes no headroom off"
        )
    return budget_bytes, words


def _sum_in_words(terms: Sequence[tuple[int, str]]) -> str:
    text = ""
    for size, words in terms:
        sign = " - " if size < 0 else " + " if text else ""
        text += f"{sign}{format_bytes(abs(size))} {words}"
    return text
