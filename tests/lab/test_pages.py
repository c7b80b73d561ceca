"""Curves, charts and pages."""

from __future__ import annotations

import base64
import re
from math import nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from ditmesh.errors import InputError
from ditmesh.lab.pages import charts as figures
from ditmesh.lab.pages.page import GridImage, Page
from ditmesh.report.report import StyledText
from support.html import Reader


def pair() -> tuple[np.ndarray, np.ndarray]:
    """Two pictures (24, 40, 3) that anybody can make again."""
    y, x = np.mgrid[:24, :40]
    one = np.stack([np.sin(x / 5) ** 2, np.cos(y / 7) ** 2, (x * y % 17) / 16], -1)
    return one, np.clip(one * 0.9 + 0.1 * np.cos(x / 3 + y)[..., None], 0, 1)


# ---- figures


def texts(chart: figures.Chart) -> list[str]:
    """The texts of a drawing."""
    drawing = ElementTree.fromstring(base64.b64decode(chart.source.removeprefix("data:image/svg+xml;base64,")))
    return [element.text or "" for element in drawing.iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes that charts are drawn on."""
    drawn: list[Any] = []
    subplots = Figure.subplots
    monkeypatch.setattr(Figure, "subplots", lambda self: drawn.append(subplots(self)) or drawn[-1])
    return drawn


def test_line_chart_shows_its_points_and_names(axes):
    lines = [figures.Series("a", (1, 2, 3), (0.0, 5.0, 10.0)), figures.Series("b & $c$", (1, 2, 3), (nan, 1.0, nan))]
    chart = figures.line_chart(lines, "A <title>", "step", "error")
    assert [list(line.get_ydata()) for line in axes[0].lines[:1]] == [[0.0, 5.0, 10.0]]
    assert {"a", "b & $c$", "step", "error"} <= set(texts(chart))
    assert (chart.title, chart.header) == ("A <title>", ("step", "a", "b & $c$"))
    assert chart.rows == (("1", "0", ""), ("2", "5", "1"), ("3", "10", ""))
    assert chart == figures.line_chart(lines, "A <title>", "step", "error")


def test_a_difference_has_the_colours_of_its_scale():
    one, other = pair()
    apart = np.abs(one - other)
    bright = figures.scale_maximum([apart, np.zeros_like(apart)])
    # 99 of 100 pixels that differ lie below the bright end, and pixels without a difference do not count.
    assert (apart.max(axis=2) <= bright).mean() == pytest.approx(0.99, abs=0.01)
    assert figures.scale_maximum([np.zeros_like(apart)]) == figures.scale_maximum([]) == 0
    ramp = np.array(figures.RAMP) / 255
    for share, colour in zip(np.linspace(0, 1, len(ramp)), ramp, strict=True):
        assert figures.coloured(np.full((2, 2, 3), 0.3 * share), 0.3) == pytest.approx(np.full((2, 2, 3), 1) * colour)


# ---- pages


def test_a_page_asks_for_nothing_and_says_what_it_shows(tmp_path: Path):
    page = Page("A <b>title</b>", "lead & more")
    page.section("One")
    page.text("1 < 2")
    page.table(("a", "b"), [("x", StyledText("no", "bad")), ("y", StyledText("many words", "words"))], "numbers")
    page.chart(figures.line_chart([figures.Series("a", (1, 2), (1, 2))], "line", "x", "y"), "a line")
    page.chart(figures.heat_map(figures.ValueGrid(("r",), ("c",), ((1.0,),)), "heat", "x", "y"), "shades")
    one, other = pair()
    page.images(
        [[GridImage(one, 'the "one"'), GridImage(other, "other", "in words")], [GridImage(one[..., :1], "grey")]],
        "grid",
    )
    html = page.write(tmp_path / "page.html").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    reader = Reader(html)
    assert "A &lt;b&gt;title" in html
    assert "<b>" not in html
    images = [attributes for tag, attributes in reader.tags if tag == "img"]
    assert [image["alt"] for image in images] == ["line", "heat", 'the "one"', "in words", "grey"]
    assert all(image["src"].startswith("data:image/") for image in images)
    # Nothing is fetched: no address but the pictures' own, no script, no style sheet.
    addresses = [
        value for _, attributes in reader.tags for name, value in attributes.items() if name in ("src", "href")
    ]
    assert len(addresses) == len(images)
    assert not re.search(r"https?://|url\(|@import|<script|<link", html)
    assert sum(tag == "figcaption" for tag, _ in reader.tags) == 6
    assert sum(tag == "caption" for tag, _ in reader.tags) == 3
    with pytest.raises(InputError, match="No such file"):
        page.write(tmp_path / "none" / "page.html")


# ---- charts and pages for readers


def test_what_a_user_wrote_is_text_everywhere():
    nasty = '<script>alert("1")</script>'
    page = Page(nasty, nasty)
    page.section(nasty)
    page.points([nasty])
    page.table((nasty, "b"), [(nasty, StyledText(nasty, "words"))], nasty)
    page.facts({nasty: {nasty: nasty}}, nasty)
    page.charts([(figures.line_chart([figures.Series(nasty, (1,), (2,))], nasty, nasty, nasty), nasty)])
    page.charts([(figures.heat_map(figures.ValueGrid((nasty,), (nasty,), ((1.0,),)), nasty, nasty, nasty), nasty)])
    page.images([[GridImage(pair()[0], nasty, nasty, 0.5)]], nasty)
    reader = Reader(page.as_html())
    assert "script" not in {tag for tag, _ in reader.tags}
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    assert nasty in {value for _, attributes in reader.tags for value in attributes.values()}
