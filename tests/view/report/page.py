"""A parsed HTML page, for tests that look at its elements and its text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

CELLS = {"td", "th", "dt", "dd", "li", "p"}
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Elements, visible text, and whether every element is closed in turn."""

    def __init__(self, page: Path | str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._texts: list[str] = []
        self._inside: list[int] = []
        self.feed(page if isinstance(page, str) else page.read_text())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
            self._inside.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()
        self.text += " " if tag in CELLS else ""
        self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data
        for number in self._inside:
            self._texts[number] += data

    @property
    def words(self) -> str:
        """The visible text, with one space instead of any white space."""
        return " ".join(self.text.split())

    def count(self, tag: str, css_class: str) -> int:
        return sum(name == tag and css_class in _classes_of(attrs) for name, attrs in self.elements)

    def texts(self, *css_classes: str) -> list[str]:
        """Returns the texts of the elements that have all of these classes, in their order."""
        texts = []
        for (_, attrs), text in zip(self.elements, self._texts, strict=True):
            if set(css_classes) <= _classes_of(attrs):
                texts.append(text)
        return texts


def _classes_of(attrs: dict[str, str | None]) -> set[str]:
    return set((attrs.get("class") or "").split())
