"""Traces of an estimate: each made once, beside others, and equal to one that is made alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autobatch import InputError
from autobatch.estimates import traces as tracing
from autobatch.estimates.traces import ALONE, Layout, Traces, on_meta
from autobatch.footprint.depth import deep_footprint
from autobatch.footprint.tracing.apart import run_apart
from tests.support.options import as_options
from tests.support.probes import mlp, work
from tests.support.step_workloads import Tokens, Transformer, make, token_loss

NEW = (8, 0)


def traces_of(depth: int = 2) -> Traces:
    workload = make(lambda: Transformer(32, depth), data=Tokens(), loss=token_loss)
    return Traces(workload, as_options("estimate", profile=["a100-40gb"]))


def test_a_step_and_its_changes_are_traced_once(monkeypatch):
    made = []

    def trace(setting, **more):
        made.append(setting.knobs)
        return deep_footprint(setting, **more)

    monkeypatch.setattr(tracing, "deep_footprint", trace)
    traces = traces_of()
    for cores in (2, 4):
        monkeypatch.setattr(tracing, "usable_cores", lambda cores=cores: cores)
        traces.prepare(NEW, [ALONE], changed=ALONE)
        # A trace that would run alone on one of 2 cores waits until it can have both.
        assert made == [{}, {"checkpointing": "full"}, {"optimizer": "fused"}][: max(2, cores - 1)]
    with traces.setting(ALONE, NEW) as setting:
        assert traces.step(ALONE, (9, 0)).program == deep_footprint(setting).step.program
    assert len(made) == 3
    traces.step(ALONE, (7, 5))
    assert len(made) == 4, "an older GPU runs other operators"


def on_more_ranks() -> bool:
    traces = traces_of(depth=8)
    few, more = Layout(4, "shard"), Layout(6, "shard")
    traces.prepare(NEW, [few], like=[more])
    found = traces.step(more, NEW, like=few)
    with traces.setting(more, NEW) as setting:
        return found.program == deep_footprint(setting).step.program


@pytest.mark.slow
def test_more_ranks_follow_from_fewer_as_if_they_were_traced():
    assert run_apart(on_more_ranks)


def needs_values() -> nn.Module:
    model = mlp()
    float(model[0].weight.sum())
    return model


def test_a_model_takes_no_memory_if_its_constructor_reads_no_values():
    for build, device in ((mlp, "meta"), (needs_values, "cpu")):
        model, notes = on_meta(work(build))
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        said = ["cannot be built on the meta device" in note and "on the CPU" in note for note in notes]
        assert said == [True] * (device == "cpu")


def test_a_model_that_needs_values_and_more_memory_than_there_is_is_refused_in_one_line():
    def too_large() -> nn.Module:
        model = needs_values()
        model.register_parameter("large", nn.Parameter(torch.empty(10**15)))
        return model

    with pytest.raises(InputError, match=r"not on the CPU either, where .* are available") as caught:
        on_meta(work(too_large))
    assert "\n" not in str(caught.value)
