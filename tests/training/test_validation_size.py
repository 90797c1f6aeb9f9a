"""The validation micro-batch on its own; `test_evaluation.py` holds what a validation makes of it."""

from __future__ import annotations

from autobatch.training.validation_size import ValidationBatchSize


def test_a_size_that_fits_doubles_once_and_a_failed_one_halves() -> None:
    size = ValidationBatchSize(5, grows=True)
    size.record_fit(4)
    assert size.micro_batch == 5, "a short last micro-batch tells nothing"
    size.record_fit(5)
    assert size.micro_batch == 10
    size.record_fit(10)
    assert size.micro_batch == 10, "twice the training micro-batch is enough"
    size.record_failure(10)
    size.record_fit(5)
    assert size.micro_batch == 5, "what failed is not tried again"


def test_a_size_that_may_not_grow_only_halves() -> None:
    size = ValidationBatchSize(5)
    size.record_fit(5)
    assert size.micro_batch == 5
    size.record_failure(5)
    assert size.micro_batch == 3
