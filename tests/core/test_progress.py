from collections.abc import Iterator

from autobatch.core.progress import Stopwatch
from tests.support.sample_run import a_step


def test_the_seconds_of_acts_sum_to_the_total_and_to_the_first_step() -> None:
    def thirds() -> Iterator[float]:
        yield from (number * 0.333_333 for number in range(100))

    watch = Stopwatch(thirds().__next__)
    for act in ("importing torch", "trial 1 of 8", "trial 2 of 8", "training: the first step"):
        watch.doing(act)
    watch.stepped(a_step(1), 2)
    watch.stepped(a_step(2), 2)
    watch.doing("saving a checkpoint")
    figures = {
        act: round(float(seconds) * 100) for seconds, act in (one.split(" s  ") for one in watch.lines())
    }
    total, first = figures.pop("in total"), figures.pop("to the end of the first step")
    assert (total, first) == (233, 167)
    assert sum(figures.values()) == total
    assert figures["trial N of N"] in (66, 67)
    assert sum(list(figures.values())[:4]) == first
