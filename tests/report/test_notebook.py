"""Notebook output, read with the standard library's parser."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import pytest

from autobatch import Estimates, Result
from autobatch.report.result import PlanResult, ProbeResult
from tests.support.page_checker import Page
from tests.support.sample_run import a_device, a_probe, a_run, an_estimate

HOSTILE = "<script>alert(1)</script>"


def fields(record) -> dict:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def a_result(**changes) -> Result:
    run = a_run()
    names = "device", "probe", "plan", "tuning", "training", "checkpoints"
    parts = {name: getattr(run, name) for name in names}
    return Result(**(parts | {"created": "2026-11-21T14:05:00+00:00"} | changes))


def shown(record) -> Page:
    """Return the parsed fragment, after the checks that hold for every fragment."""
    html = record._repr_html_()
    page = Page(html)
    ids = [
        attributes["id"]
        for attributes in page.all(*{tag for tag, _, _ in page.elements})
        if "id" in attributes
    ]
    assert len(ids) == len(set(ids))
    assert all(re.match(r"autobatch-[0-9a-f]{12}-", one) for one in ids)
    for _, attributes, _ in page.elements:
        for name in ("href", "xlink:href", "src"):
            assert attributes.get(name, "#" + "".join(ids[:1])).lstrip("#") in ids or not ids
        assert attributes.get("aria-describedby", "".join(ids[:1])) in ids or not ids
    for target in re.findall(r"url\(#([^)]+)\)", html):
        assert target in ids
    assert not page.all("style", "script", "link", "iframe", "img", "html", "body")
    assert "var(--" not in html
    assert len(html.encode()) < 300_000
    return page


def test_a_probe_is_shown() -> None:
    page = shown(ProbeResult(**fields(a_probe()), device=a_device()))
    assert page.text.startswith("93 samples at a time in 6.00 GiB on NVIDIA GeForce RTX 4090; 94 ran and do")
    assert len(page.all("svg")) == 1
    assert "Every size that ran, in order" in page.text


def test_a_plan_is_shown() -> None:
    page = shown(PlanResult(**fields(a_run().plan), device=a_device(), probe=a_probe()))
    assert "batch 1,024 in 12 micro-batches (4 × 86, 8 × 85)" in page.text
    assert "0.0003, kept as declared" in page.text
    assert len(page.all("svg")) == 2


def test_a_result_is_shown_with_the_curves_of_its_run(tmp_path) -> None:
    result = a_result(out=tmp_path)
    (tmp_path / "result.json").write_bytes(msgspec.json.encode(result.to_json()))
    lines = [msgspec.json.encode(record) for record in a_run().metrics]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    page = shown(result)
    for words in ("Held-out accuracy 93.12 %.", "15 % faster", "step-120.pt"):
        assert words in page.text
    assert len(page.all("svg")) == 5
    assert "Optimizer steps: 50 of 120" in page.text


@pytest.mark.parametrize("left", ["nothing", "another run", "no result"])
def test_a_result_without_its_folder_is_shown_without_curves(tmp_path, left: str) -> None:
    result = a_result(out=tmp_path / "gone")
    if left != "nothing":
        result.out.mkdir()
        other = a_result(created="2027-01-01T00:00:00+00:00").to_json() if left == "another run" else []
        (result.out / "result.json").write_bytes(msgspec.json.encode(other))
        (result.out / "metrics.jsonl").write_bytes(msgspec.json.encode(a_run().metrics[0]))
    page = shown(result)
    assert len(page.all("svg")) == 4
    assert "Optimizer steps" not in page.text


def test_a_result_may_have_a_probe_alone() -> None:
    page = shown(Result(device=a_device(), probe=a_probe()))
    assert len(page.all("svg")) == 1
    assert shown(Result(device=a_device())).text.startswith("The memory budget is 6.00 GiB")


def test_estimates_are_shown_one_row_per_gpu() -> None:
    none = an_estimate(profile="old", fits=False, micro_batch=0, plan=None, peak_reserved_bytes=None)
    exact = an_estimate(profile="new", micro_batch_low=90, micro_batch_high=90)
    page = shown(Estimates(estimates=[an_estimate(), none, exact], notes=["a note"]))
    assert page.text.startswith("Predicted to fit on 2 of 3 GPUs. No GPU was used.")
    assert "90 (86 to 93)" in page.text
    assert "12 micro-batches (4 × 86, 8 × 85)" in page.text
    assert "none" in page.text
    assert "a note" in page.text
    assert len(page.all("tr")) == 4


def test_user_text_is_escaped() -> None:
    html = Result(device=a_device(name=HOSTILE), probe=a_probe())._repr_html_()
    assert "<script" not in html


def test_two_fragments_can_share_a_page() -> None:
    one = Result(device=a_device(), probe=a_probe())._repr_html_()
    other = Result(device=a_device(name="another"), probe=a_probe())._repr_html_()
    ids = [set(re.findall(r'\bid="([^"]+)"', html)) for html in (one, other)]
    assert not ids[0] & ids[1]
    assert one == Result(device=a_device(), probe=a_probe())._repr_html_()


def test_notebook_output_needs_no_torch(tmp_path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from autobatch.core.records import DeviceRecord\n"
        "from autobatch.report.result import Result\n"
        "device = DeviceRecord(kind='cpu', name='a', total_bytes=1, budget_bytes=1, budget_source='')\n"
        "assert '<table>' in Result(device=device)._repr_html_()\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path)}
    )
