"""Estimates for one GPU: sizes, explanations, and what would help."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

import autobatch
from autobatch import DoesNotFitError
from autobatch.core.records import RankEstimate
from autobatch.core.units import MiB
from autobatch.estimates.estimator import estimate_limits, nothing_fits
from autobatch.estimates.footprints import Unpredictable
from autobatch.report.terminal import Terminal
from tests.support.options import as_options
from tests.support.probes import WIDTH, mlp, work
from tests.support.step_workloads import WORKLOADS, Tokens, Transformer, make, token_loss


@pytest.fixture(scope="module")
def found():
    workload = make(lambda: Transformer(width=32), data=Tokens(), loss=token_loss)
    return estimate_limits(
        workload, as_options("estimate", profile=["rtx-4090"], memory_budget=f"{40 * MiB}")
    )


@pytest.mark.program
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


def test_of_several_gpus_those_that_do_not_fit_are_counted():
    given = {"profile": ["t4", "l40s", "v100-16gb"], "memory_budget": "0.16%", "micro_batch": 1500}
    options = as_options("estimate", precision="fp32", **given)
    found = estimate_limits(WORKLOADS["perceptron"](), options)
    assert [one.fits for one in found.estimates] == [False, True, False]
    assert {one.remedies for one in found.estimates} == {None}
    assert "nothing fits on 2 of 3 GPUs: --profile NAME" in found.notes[0]


def with_attention() -> autobatch.Workload:
    """Return a workload whose attention is fused on some GPUs, and a matrix over all pairs on others."""

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        x = model(ids).unflatten(-1, (1, -1)).transpose(1, 2).bfloat16()
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True).float().square().mean()

    return make(lambda: nn.Embedding(61, 64), data=Tokens(), loss=loss)


@pytest.mark.program
def test_each_gpu_runs_its_own_kernels_in_any_order_of_their_names():
    """In 16 bits, GPUs before 8.0 keep a matrix over all pairs."""
    names = ["t4", "a100-40gb"]

    def peaks(*asked: str) -> dict[str, int]:
        options = as_options("estimate", profile=[*asked], micro_batch=64, precision="fp32")
        found = estimate_limits(with_attention(), options)
        return {one.profile: one.peak_allocated_bytes for one in found.estimates}

    found = peaks(*names)
    assert peaks(*names[::-1]) == found
    assert found["t4"] > found["a100-40gb"]


def test_the_error_names_memory_and_remedies_if_no_gpu_is_large_enough():
    workload = make(lambda: Transformer(width=32, depth=1), data=Tokens(), loss=token_loss)
    options = as_options("estimate", profile=["t4"], memory_budget=f"{MiB}", precision="fp32")
    with pytest.raises(DoesNotFitError, match=r"optimizer state.*What helps: a larger GPU"):
        estimate_limits(workload, options)


def test_an_estimate_plans_the_batch_within_its_micro_batch():
    options = as_options("estimate", profile=["t4"], memory_budget=f"{26 * MiB}", target_batch=500)
    (one,) = estimate_limits(work(lambda: mlp(2048)), options).estimates
    assert 1 <= one.micro_batch_low <= one.micro_batch <= one.micro_batch_high <= 500
    assert one.micro_batch < 500
    assert one.plan is not None
    assert (sum(one.plan.micro_batches), one.plan.precision) == (500, "fp32")
    assert max(one.plan.micro_batches) <= one.micro_batch


@pytest.mark.program
def test_an_estimate_is_not_capped_by_the_data_and_says_which_option_caps_it():
    """The data have 64 samples, and all GPUs would take them in one micro-batch."""

    def estimated(**options):
        asked = as_options("estimate", profile=["l40s", "a100-80gb"], memory_budget="1%", **options)
        return estimate_limits(WORKLOADS["perceptron"](), asked)

    free = estimated()
    small, large = (one.micro_batch for one in free.estimates)
    assert 64 < small < large
    assert not any("bounds" in note for note in free.notes)
    capped = estimated(target_batch=small + 1)
    assert [one.micro_batch for one in capped.estimates] == [small, small + 1]
    assert any("--target-batch" in note and "on a100-80gb:" in note for note in capped.notes)
    asked = estimated(micro_batch=5000)
    assert [(one.micro_batch, one.fits) for one in asked.estimates] == [(5000, True)] * 2


def test_a_step_that_insists_on_even_micro_batches_is_estimated_in_them():
    workload = work(lambda: mlp(2048))
    loss = workload.loss

    def even_loss(model, batch):
        assert len(batch[0]) % 2 == 0
        return loss(model, batch)

    def estimated(workload, **more):
        options = as_options("estimate", profile=["t4"], memory_budget="26MiB", precision="fp32", **more)
        return estimate_limits(workload, options).estimates[0]

    even = replace(workload, loss=even_loss)
    with pytest.raises(Unpredictable, match="give --micro-batch-multiple"):
        estimated(even)
    one, free = estimated(even, target_batch=500, micro_batch_multiple=2), estimated(workload)
    assert one.micro_batch == free.micro_batch // 2 * 2 > 0
    assert all(size % 2 == 0 for size in one.plan.micro_batches)


def test_a_micro_batch_is_predicted_for_models_of_any_size():
    """The weights, two states of AdamW and the gradients take 19 GB; a T4 has 16 GB, an A100 80 GB."""
    options = as_options("estimate", profile=["t4", "a100-80gb"], micro_batch=3, precision="fp32")
    found = estimate_limits(work(lambda: mlp(60_000_000)), options)
    assert [(one.micro_batch, one.fits) for one in found.estimates] == [(3, False), (3, True)]
    assert all(one.peak_reserved_bytes > 4 * 4 * 20 * 60_000_000 for one in found.estimates)


def test_the_error_names_the_fewest_ranks_on_the_smallest_gpu_that_fit():
    workload = make(lambda: Transformer(width=32, depth=1), data=Tokens(), loss=token_loss)
    options = as_options("estimate", profile=["t4"], memory_budget="1GiB", micro_batch=1)
    (one,) = estimate_limits(workload, options).estimates
    one = msgspec.structs.replace(one, remedies=None)
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
    text = str(nothing_fits([one], one, 1, cells))
    assert text.startswith("a micro-batch of 1 is predicted not to fit on t4: it takes ")
    assert text.endswith(", 4 ranks on gpu-60 (a micro-batch of 1 fits there)")


# Which GPUs, and what bounds an estimate.


@pytest.mark.parametrize(
    ("device", "profile", "names", "is_noted"),
    [
        ("sim:t4", "l4", ["l4"], True),
        ("sim:l4", None, ["l4"], False),
    ],
)
def test_a_profile_names_the_gpu_else_a_simulated_device_does(device, profile, names, is_noted):
    named = {"profile": [profile]} if profile else {}
    options = as_options("estimate", device=device, memory_budget="1%", **named)
    found = estimate_limits(WORKLOADS["perceptron"](), options)
    assert [one.profile for one in found.estimates] == names
    said = f"an estimate touches no device, so --device {device} was left out"
    assert any(said in note for note in found.notes) is is_noted


# Models whose constructors need values.


def needs_values() -> nn.Module:
    model = mlp()
    float(model[0].weight.sum())
    return model


@pytest.mark.program
def test_a_model_takes_no_memory_if_its_constructor_reads_no_values():
    for build in (mlp, needs_values):
        notes = autobatch.estimate(work(build), profile=["t4", "v100-16gb"], micro_batch=1).notes
        said = ["cannot be built on the meta device" in note and "on the CPU" in note for note in notes]
        assert any(said) == (build is needs_values)


def test_a_model_that_needs_values_and_more_memory_than_there_is_is_refused_in_one_line():
    def too_large() -> nn.Module:
        model = needs_values()
        model.register_parameter("large", nn.Parameter(torch.empty(10**15)))
        return model

    with pytest.raises(DoesNotFitError, match=r"out of memory while the model was built") as caught:
        autobatch.estimate(work(too_large), profile=["t4"])
    assert "\n" not in str(caught.value)


# Steps that follow no rule in the micro-batch.


class Joined(torch.utils.data.Dataset):
    """Samples of many lengths that are joined end to end, as graphs are."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(300 + index * index % 97, 16)


@pytest.mark.parametrize("is_still", [False, True])
def test_a_part_in_eval_mode_is_predicted_so(is_still: bool) -> None:
    """Dropout keeps a mask of a byte per number only where it draws one."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 1 << 16), nn.Dropout(0.5).train(not is_still), nn.Linear(1 << 16, 4)
        )

    options = as_options("estimate", profile=["t4"], micro_batch=64, precision="fp32")
    (found,) = estimate_limits(work(build), options).estimates
    bytes_each = 4 if is_still else 5
    assert found.memory["activations"] == pytest.approx(64 * (1 << 16) * bytes_each, rel=0.02)


def in_chunks(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss, over at most four samples at a time."""
    parts = zip(batch[0].split(4), batch[1].split(4), strict=True)
    return sum(nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in parts) / len(batch[0])


def test_a_step_of_other_work_at_each_size_is_predicted_at_the_size_that_is_asked_about():
    chunked = replace(work(lambda: mlp(2048)), loss=in_chunks)

    def estimated(micro_batch: int | None, budget: str):
        options = as_options("estimate", profile=["t4"], memory_budget=budget, micro_batch=micro_batch)
        return estimate_limits(chunked, options)

    with pytest.raises(Unpredictable, match="the order of allocations"):
        estimated(None, "26MiB")
    found = estimated(100, "100MiB")
    (one,) = found.estimates
    assert one.fits
    assert (one.micro_batch_low, one.micro_batch, one.micro_batch_high) == (100, 100, 100)
    assert any("holds for 100 only" in note for note in found.notes)
    # Within the budget that the prediction names, the step runs; within less than its live bytes, it fails.
    device = {"device": "sim:t4", "micro_batch": 100, "progress": False}
    peak = one.peak_reserved_bytes - one.memory["workspaces of cuBLAS"]
    assert autobatch.probe(chunked, memory_budget=peak, **device).micro_batch == 100
    with pytest.raises(autobatch.DoesNotFitError):
        estimated(100, "8MiB")


def test_a_step_that_follows_no_rule_is_left_to_a_simulated_gpu():
    made = make(lambda: nn.Linear(16, 4), data=Joined(), loss=lambda model, rows: model(rows).mean())
    options = as_options("estimate", profile=["t4"], memory_budget="4MiB")
    with pytest.raises(
        Unpredictable, match=r"no integer rule.* autobatch probe --device sim:t4 runs the step"
    ):
        estimate_limits(replace(made, collate=torch.cat, size_of=len), options)
