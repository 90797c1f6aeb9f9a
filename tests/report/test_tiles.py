"""The tiles of the report page."""

import pytest

from autobatch.report.tiles import tiles
from tests.support.page_checker import Page
from tests.support.sample_run import a_run


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ((), ["Target batch", "1,024", "exactly, in 12 accumulation steps", "5.80 GiB", "1,824"]),
        (("training",), ["1,728", "samples/s, measured while tuning"]),
        (("plan",), ["Micro-batch", "93", "limited by memory"]),
        (("probe",), ["Budget", "6.00 GiB"]),
    ],
)
def test_tiles_show_the_figures_that_matter_most(missing, words):
    text = Page(tiles(a_run(**dict.fromkeys(missing)))).text
    for one in words:
        assert one in text
