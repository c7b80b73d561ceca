"""Pages read back with the standard library."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import pairwise


class Reader(HTMLParser):
    """Collects tags, tables and headings of a page, and minds that every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.headings: list[tuple[str, str]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("h1", "h2", "h3"):
            self.headings.append((tag, ""))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] in ("h1", "h2", "h3"):
            tag, text = self.headings[-1]
            self.headings[-1] = tag, text + data

    def check(self) -> None:
        """What every page keeps: headings in order, captions, texts of pictures, no column without an entry."""
        levels = [int(tag[1]) for tag, _ in self.headings]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        names = [tag for tag, _ in self.tags]
        assert names.count("caption") == names.count("table") > 0
        assert all(attributes.get("alt") for tag, attributes in self.tags if tag == "img")
        for header, *rows in self.tables:
            assert all(len(row) == len(header) for row in rows)
            for place in range(len(header)):
                assert any(row[place] for row in rows), header[place]
