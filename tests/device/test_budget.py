"""The rule for a memory budget: as asked, or what is available less a headroom."""

from __future__ import annotations

import pytest

from autobatch.core.errors import DoesNotFitError, InputError
from autobatch.core.units import GiB, MiB
from autobatch.device.budget import resolve_budget


def budget(
    asked: str | int | None = None,
    *,
    total: int = 8 * GiB,
    available: tuple[tuple[int, str], ...] = (),
    share: float = 0.05,
) -> tuple[int, str]:
    return resolve_budget(
        asked, total_bytes=total, available=available, headroom_share=share, owner="the GPU"
    )


def test_the_available_memory_less_a_headroom() -> None:
    # 5 % of 24 GiB is 1.2 GiB; of 4 GiB it would be 205 MiB, so 512 MiB are kept.
    large, words = budget(
        total=24 * GiB, available=((20 * GiB, "free (NVML)"), (GiB, "held by this process"))
    )
    assert large == 21 * GiB - int(1.2 * GiB)
    assert words == (
        "20.0 GiB free (NVML) + 1.00 GiB held by this process - 1.20 GiB headroom, 5% of the total"
    )
    small, _ = budget(total=4 * GiB, available=((3 * GiB, "free"),))
    assert small == 3 * GiB - 512 * MiB


def test_the_share_of_the_headroom_is_the_devices() -> None:
    found, words = budget(total=16 * GiB, available=((8 * GiB, "available"),), share=0.1)
    assert found == 8 * GiB - int(1.6 * GiB)
    assert words.endswith("- 1.60 GiB headroom, 10% of the total")


def test_a_negative_term_is_subtracted_in_words_too() -> None:
    found, words = budget(available=((8 * GiB, "in total"), (-256 * MiB, "CUDA context")))
    assert found == 8 * GiB - 256 * MiB - 512 * MiB
    assert words == "8.00 GiB in total - 256 MiB CUDA context - 512 MiB headroom, the least"


def test_the_budget_never_exceeds_the_total() -> None:
    found, _ = budget(available=((8 * GiB, "free"), (4 * GiB, "held")))
    assert found == 8 * GiB - 512 * MiB


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("6GiB", 6 * GiB), (6 * GiB, 6 * GiB), ("50%", 4 * GiB), ("100%", 8 * GiB), (8 * GiB, 8 * GiB), (1, 1)],
)
def test_an_asked_budget_is_taken_literally(asked: str | int, expected: int) -> None:
    assert budget(asked, available=((0, "free"),)) == (expected, f"as set: {asked}")


def test_an_asked_budget_over_the_total_names_both_numbers() -> None:
    with pytest.raises(
        InputError, match=r"12\.0 GiB \(12GiB\), but the GPU has 8\.00 GiB \(8589934592 bytes"
    ):
        budget("12GiB")
    with pytest.raises(InputError):
        budget(8 * GiB + 1)
    with pytest.raises(InputError, match="nonsense"):
        budget("nonsense")


def test_nothing_left_after_the_headroom_names_all_terms() -> None:
    with pytest.raises(DoesNotFitError, match=r"400 MiB free .*512 MiB headroom.*--memory-budget"):
        budget(available=((400 * MiB, "free (NVML)"),))
    with pytest.raises(DoesNotFitError):
        budget(available=((512 * MiB, "free"),))
    assert budget(available=((512 * MiB + 1, "free"),))[0] == 1
