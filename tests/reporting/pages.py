"""Read a page as a browser would: its elements, its texts, the data of its charts."""

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "img", "br", "input", "hr", "rect", "line", "circle", "polyline"}


class ReadPage(HTMLParser):  # a page's elements in order, each with its attributes and its own text
    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        """(the element, its text) of everything that is shown."""
        self.scripts: dict[str, str] = {}
        self._open: list[str] = []
        self._id = ""
        self.feed(html)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self._id = dict(attrs).get("id") or f"code-{len(self.scripts)}"
            self.scripts[self._id] = ""

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[self._id] += data
        elif self._open and self._open[-1] != "style" and data.strip():
            self.texts.append((self._open[-1], " ".join(data.split())))

    @property
    def charts(self) -> dict[str, Any]:
        """The charts' data by their ids; NaN, which is no JSON, is refused."""
        found = json.loads(self.scripts["report-data"], parse_constant=lambda name: 1 / 0)
        return {chart["id"]: chart for chart in found["charts"]}

    def with_attribute(self, name: str) -> list[str | None]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def shown(self) -> str:
        return " ".join(text for _, text in self.texts)
