"""Probe over ranks, of which a fake is the first."""

from __future__ import annotations

from typing import Any

from autobatch.api import probe_stage
from autobatch.api.context import RunContext
from autobatch.api.probe_stage import JointSettings
from autobatch.core.options import Options
from autobatch.distributed.ranks import Alone
from autobatch.setup.child import ThisProcess
from autobatch.setup.setup import open_setup
from tests.support.options import as_options
from tests.support.training import make_workload


class Second(Alone):
    """The second of two ranks on one kind of device. One sample less fits on the first."""

    rank, world = 1, 2

    def gather(self, value: Any) -> list[Any]:
        return [[*value[:-1], value[-1] - 1], value] if isinstance(value, list) else [value, value]


def test_the_limit_is_the_least_of_ranks_of_a_kind() -> None:
    process = ThisProcess(
        open_setup(make_workload(), Options().with_values(device="cpu", memory_budget="1GiB"))
    )
    options = as_options("probe", max_micro_batch=4)
    found = probe_stage.probe_only(process, options, RunContext(ranks=Second()), JointSettings()).probe
    assert found is not None
    assert (found.micro_batch, found.upper_bound_by) == (3, None)
    assert [one.limit for one in found.ranks] == [3, 3]
