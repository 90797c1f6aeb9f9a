"""The layout of a model over ranks is plain values, and part of what a saved limit depends on."""

from __future__ import annotations

import pickle

from autobatch.distributed.sharding.layout import ShardLayout


def test_a_layout_travels_to_another_process() -> None:
    layout = ShardLayout(world=4, sync="once", modules="blocks.*")
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_layouts_with_other_memory_have_other_texts() -> None:
    texts = {
        str(ShardLayout(world=2, sync=sync, modules=m)) for sync in ("each", "once") for m in (None, "x")
    }  # type: ignore[arg-type]
    assert len(texts) == 4
