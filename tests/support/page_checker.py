"""What is asked of every page, read with the standard library's parser."""

import itertools
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "hr", "input"}
SELF_CLOSED = {"path", "use", "rect", "line", "circle", "image"}


class Page(HTMLParser):
    """Collects the elements of a page, and holds that they are balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> without a start"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    def all(self, *tags):
        return [attributes for tag, attributes, _ in self.elements if tag in tags]

    @property
    def text(self):
        return " ".join("".join(self.words).split())


def check(text):
    """Check a page, and return it parsed."""
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 1_000_000
    assert page.all("html")[0]["lang"] == "en"
    for landmark in ("header", "nav", "main"):
        assert len(page.all(landmark)) == 1, landmark
    assert len(page.all("h1")) == 1
    size_quartiles = [int(tag[1]) for tag, _, _ in page.elements if tag in {"h1", "h2", "h3", "h4"}]
    assert all(after <= before + 1 for before, after in itertools.pairwise(size_quartiles))
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)), "an id stands twice"
    for _, attributes, _ in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name, ids[0]) in ids, attributes
        for name in ("href", "xlink:href", "src"):
            target = attributes.get(name, f"#{ids[0]}")
            assert target.startswith("#"), f"loads {target}"
            assert target[1:] in ids, f"leads nowhere: {target}"
    assert "url(http" not in text
    assert "@import" not in text
    assert not page.all("script", "link", "iframe", "object", "img")
    for svg in page.all("svg"):
        assert svg["role"] == "img"
        assert svg["aria-label"]
        assert svg["aria-describedby"] in ids
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(cell["scope"] in {"row", "col"} for cell in page.all("th"))
    for tag, _, parents in page.elements:
        assert tag != "summary" or parents[-1] == "details"
    return page
