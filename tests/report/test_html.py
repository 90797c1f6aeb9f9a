"""Markup is escaped unless it was built here."""

from __future__ import annotations

import pytest

from autobatch.report.charts.drawing import Mark, Picture, Table
from autobatch.report.html import Markup, element, facts, figure, join, prose, table, unbroken
from tests.support.page_checker import Page


def test_text_is_escaped_and_markup_is_kept():
    assert element("p", "<b>", Markup("<i></i>"), None, ["a", Markup("&amp;")], title='"', hidden=True) == (
        '<p title="&quot;" hidden>&lt;b&gt;<i></i>a&amp;</p>'
    )


def test_attributes_drop_none_and_false_and_translate_underscores():
    assert element("p", class_="a", aria_label="b", hidden=False, title=None) == (
        '<p class="a" aria-label="b"></p>'
    )
    assert element("br") == "<br>"


def test_children_are_concatenated():
    assert join("a", None, ["b", "&"]) == "ab&amp;"


def test_options_do_not_break_after_their_dashes():
    built = prose("give --steps & go")
    assert built == 'give <span class="unbroken">--steps</span> &amp; go'
    assert Page(built).text == "give --steps & go"
    assert unbroken("<") == '<span class="unbroken">&lt;</span>'


def test_a_table_has_a_caption_scopes_and_a_name():
    built = table(Table(caption="Rows", head=["Name", "Size"], rows=[["one", "1.5 GiB"], ["two", "x" * 40]]))
    page = Page(built)
    assert page.all("div")[0]["aria-label"] == "Rows"
    assert [cell["scope"] for cell in page.all("th")] == ["col", "col", "row", "row"]
    assert [cell.get("class") for cell in page.all("td")] == ["number", "long"]


@pytest.mark.parametrize(
    ("text", "kind"), [("1,024", "number"), ("+15.0%", "number"), ("3.00 GiB", "number"), ("12 apples", None)]
)
def test_numbers_stay_on_one_line(text, kind):
    page = Page(table(Table(caption="", head=["a", "b"], rows=[["", text]])))
    assert page.all("td")[0].get("class") == kind


def test_a_figure_has_its_legend_its_note_and_its_data():
    picture = Picture(
        slug="one",
        title="One",
        description="",
        svg="<svg></svg>",
        legend=[Mark(role="accent", label="ran", shape="dot")],
        table=Table(caption="Data", head=["a"], rows=[["b"]]),
        note="A note.",
    )
    page = Page(figure(picture))
    assert page.all("figure")[0]["id"] == "figure-one"
    assert page.all("span")[0] == {
        "class": "mark dot",
        "style": "--mark:var(--accent)",
        "aria-hidden": "true",
    }
    assert len(page.all("details")) == len(page.all("caption")) == 1
    for words in ("ran", "A note.", "Data of this figure"):
        assert words in page.text


def test_facts_without_a_value_are_left_out():
    page = Page(facts([("a", "1"), ("b", None), ("c", "")]))
    assert len(page.all("dt")) == len(page.all("dd")) == 1
    assert page.text == "a1"
