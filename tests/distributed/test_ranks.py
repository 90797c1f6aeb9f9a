"""One process: it asks nobody, and imports nothing for it."""

from __future__ import annotations

import subprocess
import sys

from autobatch.distributed.ranks import Alone, fail_before_meeting, open_ranks


def test_one_process_answers_itself() -> None:
    ranks = open_ranks({})
    assert isinstance(ranks, Alone)
    assert (ranks.rank, ranks.world, ranks.restart) == (0, 1, 0)
    assert ranks.gather({"a": 1}) == [{"a": 1}]
    assert ranks.once(lambda: 3) == 3
    assert ranks.agree(True)
    assert not ranks.agree(False)
    assert ranks.device("cuda") == "cuda"
    ranks.fail("a line", 2)


def test_one_process_imports_neither_torch_nor_torch_distributed() -> None:
    code = (
        "import sys; from autobatch.distributed.ranks import open_ranks; open_ranks({}).close(); "
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rank_that_fails_alone_tells_so_itself() -> None:
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "host"}
    for rank, is_common, tells in ((0, True, True), (1, True, False), (1, False, True)):
        assert fail_before_meeting({**environ, "RANK": str(rank)}, "line", is_common=is_common) == tells
