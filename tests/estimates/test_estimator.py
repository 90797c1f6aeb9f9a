"""Estimates: sizes, explanations, and what would help."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec
import pytest

from autobatch import DoesNotFitError
from autobatch.core.records import RankEstimate, Remedy
from autobatch.core.units import MiB
from autobatch.device.allocator.caching import CachingAllocator
from autobatch.device.allocator.trace import replay
from autobatch.device.profiles import load_profile
from autobatch.estimates import estimator as estimating
from autobatch.estimates import traces as tracing
from autobatch.estimates.estimator import Estimator, estimate_limits, nothing_fits
from autobatch.estimates.traces import ALONE, Traces
from autobatch.footprint.depth import deep_footprint
from autobatch.footprint.predict import program_on
from autobatch.footprint.tracing.apart import run_apart
from autobatch.report.terminal import Terminal
from tests.support.options import as_options
from tests.support.probes import mlp, work
from tests.support.step_workloads import WORKLOADS, Tokens, Transformer, make, token_loss

NOWHERE = Path("nowhere")


@pytest.fixture(scope="module")
def found():
    workload = make(lambda: Transformer(width=32), data=Tokens(), loss=token_loss)
    return estimate_limits(
        workload, as_options("estimate", profile=["rtx-4090"], memory_budget=f"{24 * MiB}"), home=NOWHERE
    )


def test_an_estimate_for_one_gpu_explains_its_memory(found):
    one = found.estimates[0]
    assert one.fits
    assert sum(one.modules.values()) == one.memory["activations"]
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


def test_every_gpu_that_does_not_fit_has_its_advice(monkeypatch):
    """Each change is traced once for all GPUs that run a step in the same way."""
    traced = []

    def trace(setting, **more):
        traced.append(setting.max_grad_norm)
        return deep_footprint(setting, **more)

    def advise(setting, step, spending, *, trace):
        assert trace("clipped", replace(setting, max_grad_norm=1.0)).program == step.program
        limit = spending.allocator(False).limit
        return [Remedy(name="smaller", advice="a smaller model", micro_batch=7, peak_bytes=limit)]

    monkeypatch.setattr(estimating, "run_apart", lambda function: function())
    monkeypatch.setattr(tracing, "find_suggestions", advise)
    monkeypatch.setattr(tracing, "deep_footprint", trace)
    names = ["t4", "l40s", "v100-16gb"]
    options = as_options("estimate", profile=names, memory_budget="0.13%", precision="fp32", micro_batch=8)
    found = estimate_limits(WORKLOADS["perceptron"](), options, home=NOWHERE)
    assert [one.fits for one in found.estimates] == [False, True, False]
    advice = [one.remedies and one.remedies[0].peak_bytes for one in found.estimates]
    assert advice == [found.estimates[0].budget_bytes, None, found.estimates[2].budget_bytes]
    assert traced == [None, None, 1.0], "an old and a new kind of GPU, and one change of the old"
    text = StringIO()
    Terminal(text).estimated(found)
    for name in ("t4", "v100-16gb"):
        assert f"predicted micro-batch on {name} with a change:" in text.getvalue()
    assert "on l40s with" not in text.getvalue()


def test_estimates_for_several_gpus_have_no_remedies():
    options = as_options("estimate", profile=["rtx-4090", "a100-40gb"], max_micro_batch=4)
    found = estimate_limits(WORKLOADS["perceptron"](), options, home=NOWHERE)
    assert [one.remedies for one in found.estimates] == [None, None]
    text = StringIO()
    Terminal(text).estimated(found)
    assert "share" not in text.getvalue()


def test_the_error_names_memory_and_remedies_if_no_gpu_is_large_enough():
    workload = make(lambda: Transformer(width=32, depth=1), data=Tokens(), loss=token_loss)
    options = as_options("estimate", profile=["t4"], memory_budget=f"{17 * MiB}", precision="fp32")
    with pytest.raises(DoesNotFitError, match=r"optimizer state.*What helps: a larger GPU"):
        estimate_limits(workload, options, home=NOWHERE)


def test_an_estimate_plans_the_batch_within_its_micro_batch(monkeypatch):
    monkeypatch.setattr("autobatch.footprint.predict.workspace_rule", lambda *_: "shared")  # until torch 2.14
    options = as_options("estimate", profile=["t4"], memory_budget=f"{24 * MiB}", target_batch=500)
    (one,) = estimate_limits(work(lambda: mlp(2048)), options, home=NOWHERE).estimates
    assert 1 <= one.micro_batch_low <= one.micro_batch <= one.micro_batch_high <= 500
    assert one.micro_batch < 500
    assert one.plan is not None
    assert (sum(one.plan.micro_batches), one.plan.precision) == (500, "fp32")
    assert max(one.plan.micro_batches) <= one.micro_batch


def test_an_estimate_is_not_capped_by_the_data_and_says_which_option_caps_it():
    """The data have 64 samples, and all GPUs would take them in one micro-batch."""
    workload, gpus = WORKLOADS["perceptron"](), ["t4", "a100-80gb"]
    free = estimate_limits(workload, as_options("estimate", profile=gpus), home=NOWHERE)
    small, large = (one.micro_batch for one in free.estimates)
    assert 64 < small < large
    assert not any("bounds" in note for note in free.notes)
    capped = estimate_limits(
        workload, as_options("estimate", profile=gpus, target_batch=small + 1), home=NOWHERE
    )
    assert [one.micro_batch for one in capped.estimates] == [small, small + 1]
    assert any("--target-batch" in note and "on a100-80gb:" in note for note in capped.notes)
    asked = estimate_limits(workload, as_options("estimate", profile=gpus, micro_batch=5000), home=NOWHERE)
    assert [(one.micro_batch, one.fits) for one in asked.estimates] == [(5000, True)] * 2


def test_a_step_that_insists_on_even_micro_batches_is_estimated_in_them():
    options = as_options(
        "estimate", profile=["t4"], memory_budget="24MiB", target_batch=500, precision="fp32"
    )
    workload = work(lambda: mlp(2048))
    free = estimate_limits(workload, options, home=NOWHERE).estimates[0]
    loss = workload.loss

    def even_loss(model, batch):
        assert len(batch[0]) % 2 == 0
        return loss(model, batch)

    found = estimate_limits(replace(workload, loss=even_loss), options, home=NOWHERE)
    (one,) = found.estimates
    assert one.micro_batch == free.micro_batch // 2 * 2 > 0
    assert all(size % 2 == 0 for size in one.plan.micro_batches)
    assert any("only multiples of 2" in note for note in found.notes)


def test_an_estimate_needs_no_emptied_cache():
    """As on the GPU itself: a size that fits only after the cache was emptied does not count."""
    workload = make(lambda: Transformer(width=128, depth=3), data=Tokens(), loss=token_loss)
    for budget in (40, 56):
        options = as_options("estimate", profile=["t4"], memory_budget=f"{budget}MiB", precision="fp32")
        (one,) = estimate_limits(workload, options, home=NOWHERE).estimates
        assert one.fits
        step = Traces(workload, options).step(ALONE, (7, 5))
        program = program_on(step, load_profile("t4", user_dir=NOWHERE).libraries)
        found = replay(program.at(one.micro_batch), CachingAllocator(budget * MiB))
        assert found.fits


def test_a_micro_batch_is_predicted_for_models_of_any_size():
    """The weights, two states of AdamW and the gradients take 19 GB; a T4 has 16 GB, an A100 80 GB."""
    options = as_options("estimate", profile=["t4", "a100-80gb"], micro_batch=3, precision="fp32")
    found = estimate_limits(work(lambda: mlp(60_000_000)), options, home=NOWHERE)
    assert [(one.micro_batch, one.fits) for one in found.estimates] == [(3, False), (3, True)]
    assert all(one.peak_reserved_bytes > 4 * 4 * 20 * 60_000_000 for one in found.estimates)


def test_the_error_names_the_fewest_ranks_on_the_smallest_gpu_that_fit():
    workload = make(lambda: Transformer(width=32, depth=1), data=Tokens(), loss=token_loss)
    options = as_options("estimate", profile=["t4"], memory_budget="1MiB", micro_batch=1)
    one = run_apart(lambda: Estimator(workload, options, NOWHERE).limit(load_profile("t4", user_dir=NOWHERE)))
    cells = [
        RankEstimate(
            profile=f"gpu-{budget}",
            world_size=world,
            parallel="shard",
            budget_bytes=budget,
            micro_batch=micro_batch,
            peak_reserved_bytes=1,
        )
        for world, budget, micro_batch in [(8, 40, 3), (4, 80, 2), (4, 40, 0), (4, 60, 1)]
    ]
    text = str(nothing_fits([one], 1, cells))
    assert text.startswith("a micro-batch of 1 is predicted not to fit on t4: it takes ")
    assert text.endswith(", 4 ranks on gpu-60 (a micro-batch of 1 fits there)")
