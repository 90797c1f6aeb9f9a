"""The self-test of predictions: it passes, and it notices a policy that has stopped working."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autobatch.footprint import selftest
from autobatch.footprint.tracing import cuda_policy, trace_step


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget the kept answer before and after a test."""
    selftest.self_test.cache_clear()
    yield
    selftest.self_test.cache_clear()


def test_this_torch_passes():
    assert selftest.self_test() is None


def test_a_dropout_without_its_own_mask_is_noticed(monkeypatch):
    monkeypatch.setattr(cuda_policy, "_dropout", lambda x, p, train: x * 2)
    assert "allocates in its forward" in selftest.self_test()


def test_an_optimizer_with_less_state_is_noticed(monkeypatch):
    monkeypatch.setattr(
        selftest.torch.optim, "Adam", lambda parameters, lr: selftest.torch.optim.SGD(parameters, lr=lr)
    )
    # Weights of 64 x 64 and 2 x 64 in fp32; two moments of the same size are missing.
    assert "keeps 16896 bytes with torch" in selftest.self_test()
    assert selftest.self_test().endswith(", not 50688")


def test_the_answer_is_kept(monkeypatch):
    assert selftest.self_test() is None
    monkeypatch.setattr(trace_step, "cuda_policy", None)
    assert selftest.self_test() is None


def test_a_step_that_fails_is_reported_in_one_line(monkeypatch):
    monkeypatch.setattr(trace_step, "cuda_policy", None)
    found = selftest.self_test()
    assert "the self-test step does not run (TypeError: " in found
    assert "\n" not in found
