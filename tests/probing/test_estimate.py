"""What an estimate says besides the size: where the memory goes, and what would help."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest

from autobatch.cli.terminal import Terminal
from autobatch.core.errors import DoesNotFitError
from autobatch.core.units import MiB
from autobatch.probing.cache import CachedLimit, store
from autobatch.probing.estimate import EstimateSettings, estimate_limits
from tests.support.step_workloads import WORKLOADS, Tokens, Transformer, make, token_loss

NOWHERE = Path("nowhere")


@pytest.fixture(scope="module")
def found():
    workload = make(lambda: Transformer(width=32, depth=3), data=Tokens(), loss=token_loss)
    return estimate_limits(
        workload, EstimateSettings(profiles=["rtx-4090"], memory_budget=f"{24 * MiB}"), home=NOWHERE
    )


def test_one_gpu_is_explained(found):
    one = found.estimates[0]
    assert one.fits
    assert sum(one.modules.values()) == one.memory["activations"]
    # Checkpoints are traced, and may or may not pay; what is listed gives more.
    assert all(remedy.micro_batch >= one.micro_batch for remedy in one.remedies)
    text = StringIO()
    Terminal(text).estimated(found)
    for words in (f"phase {one.phase}", "optimizer state", "blocks.0", "bytes", "share"):
        assert words in text.getvalue()
    for remedy in one.remedies:
        assert remedy.advice in text.getvalue()
    json = msgspec.json.decode(msgspec.json.encode(found.to_json()))
    assert [set(each) for each in json["estimates"][0]["remedies"]] == [
        {"name", "advice", "micro_batch", "peak_bytes"} for _ in one.remedies
    ]


def test_what_runs_on_this_machine_took_more_widens_the_interval(tmp_path):
    """Of two runs on such a card one took a quarter more than its trace said; of another card, no word."""
    workload = make(lambda: Transformer(width=128, depth=3), data=Tokens(), loss=token_loss)
    for number, (device, measured) in enumerate(
        (("NVIDIA GeForce RTX 4090", 125), ("NVIDIA GeForce RTX 4090", 99), ("NVIDIA T4", 900))
    ):
        saved = CachedLimit(
            key={"workload": f"w{number}", "device": device},
            micro_batch=1,
            limited_by="memory",
            upper_bound_by="run",
            date="2026-11-21",
            traced_bytes=100 * MiB,
            measured_bytes=measured * MiB,
        )
        store(saved, tmp_path)
    options = EstimateSettings(profiles=["rtx-4090", "l4"], memory_budget=f"{40 * MiB}")
    after = estimate_limits(workload, options, home=tmp_path)
    now, before = after.estimates[0], estimate_limits(workload, options, home=NOWHERE).estimates[0]
    assert now.micro_batch == before.micro_batch
    assert now.micro_batch_low < before.micro_batch_low
    tight = EstimateSettings(profiles=["rtx-4090", "l4"], memory_budget=f"{32 * MiB}")
    assert now.micro_batch_low == estimate_limits(workload, tight, home=NOWHERE).estimates[0].micro_batch
    assert any("-1.0% to +25.0% more than predicted (2 compared)" in note for note in after.notes)


def test_several_gpus_are_a_table_alone():
    options = EstimateSettings(profiles=["rtx-4090", "a100-40gb"], max_micro_batch=4)
    found = estimate_limits(WORKLOADS["perceptron"](), options, home=NOWHERE)
    assert [one.remedies for one in found.estimates] == [None, None]
    text = StringIO()
    Terminal(text).estimated(found)
    assert "share" not in text.getvalue()


def test_a_simulated_device_names_the_gpu():
    options = EstimateSettings(device="sim:l4", max_micro_batch=4)
    found = estimate_limits(WORKLOADS["perceptron"](), options, home=NOWHERE)
    assert [one.profile for one in found.estimates] == ["l4"]


def test_no_figure_is_cut_off_on_a_narrow_terminal():
    options = EstimateSettings(profiles=["rtx-3060-12gb", "t4"], max_micro_batch=4)
    found = estimate_limits(WORKLOADS["perceptron"](), options, home=NOWHERE)
    wide = {"micro_batch": 12_345_678, "micro_batch_low": 11_345_678, "micro_batch_high": 13_345_678}
    rows = [msgspec.structs.replace(one, **wide) for one in found.estimates]
    text = StringIO()
    Terminal(text).estimated(msgspec.structs.replace(found, estimates=rows))
    assert "…" not in text.getvalue()
    assert text.getvalue().count("12,345,678  11,345,678 to 13,345,678") == 2


def test_a_gpu_that_is_too_small_says_what_would_help():
    workload = make(lambda: Transformer(width=32, depth=3), data=Tokens(), loss=token_loss)
    options = EstimateSettings(profiles=["t4"], memory_budget=f"{18 * MiB}", precision="fp32")
    with pytest.raises(DoesNotFitError, match=r"optimizer state.*What helps: a larger GPU"):
        estimate_limits(workload, options, home=NOWHERE)
