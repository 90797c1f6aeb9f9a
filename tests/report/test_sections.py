"""The sections of the report page: their order, and what they say."""

import msgspec
import pytest

from autobatch.report.sections import sections
from tests.support.sample_run import a_run


def body_of(slug, run):
    return next(section.body for section in sections(run) if section.slug == slug)


@pytest.mark.usefixtures("no_pictures")
def test_sections_come_in_reading_order():
    assert [section.slug for section in sections(a_run())] == [
        "device", "memory", "plan", "tuning", "training", "repeat"
    ]  # fmt: skip


@pytest.mark.usefixtures("no_pictures")
def test_the_learning_rate_has_a_heading_of_its_own():
    assert "<h3>Learning rate</h3>" in body_of("tuning", a_run())


@pytest.mark.usefixtures("no_pictures")
def test_averaged_weights_name_their_file():
    training = msgspec.structs.replace(a_run().training, ema=0.999)
    assert "decay 0.999, exported to model-ema.safetensors" in body_of("training", a_run(training=training))


@pytest.mark.usefixtures("no_pictures")
def test_the_time_of_the_training_is_shared_out():
    run = a_run()
    body = body_of("training", run)
    assert "Where the time went" in body
    assert "backward 48 %" in body
    empty = msgspec.structs.replace(run.training, phase_seconds={})
    assert "Where the time went" not in body_of("training", a_run(training=empty))
