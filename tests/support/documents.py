"""Parse the project's documents: their links, names, commands and code."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import markdown

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("results", "reference")
UNRUN = "<!-- not run: "
"""Begins the line above a fence whose commands no test runs; the reason follows."""

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("examples/*.md")),
    *sorted(ROOT.glob("examples/*/*.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name not in GENERATED),
]


@dataclass
class Document:
    """A page of the documents.

    `fences` are pairs of info string and text, and `unrun` has for each the reason why no test runs its
    commands, or an empty text. `links` and `names` (text that is set as code) are of the prose between the
    fences, `entries` the names in the first columns of tables.
    """

    path: Path
    fences: list[tuple[str, str]] = field(default_factory=list)
    unrun: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        prose: list[str] = []
        fence: list[str] | None = None
        info = ""
        for line in self.path.read_text().splitlines():
            if not line.lstrip().startswith("```"):
                (prose if fence is None else fence).append(line)
            elif fence is None:
                info, fence = line.strip().removeprefix("```").strip(), []
                above = prose[-1].strip() if prose else ""
                marked = above.startswith(UNRUN) and above.endswith(" -->")
                self.unrun.append(above[len(UNRUN) : -len(" -->")] if marked else "")
            else:
                self.fences.append((info, "\n".join(fence) + "\n"))
                fence = None
        assert fence is None, f"{self.path}: a fence is left open"
        reader = _Prose()
        reader.feed(markdown.markdown("\n".join(prose), extensions=["tables"]))
        self.links, self.names, self.entries = reader.links, reader.names, reader.entries

    @property
    def commands(self) -> Iterator[tuple[dict[str, str], list[str]]]:
        """Yield the environment and the words of every line that a reader would type."""
        for info, text in self.fences:
            if info == "bash":
                yield from commands_in(text)

    @property
    def files(self) -> dict[str, str]:
        """Files of the reader: Jsonnet that begins with a comment of its name, and Python with a title."""
        contents = {}
        for info, text in self.fences:
            if info.startswith("jsonnet") and text.startswith("// "):
                name = text.split("\n")[0].removeprefix("// ").replace(",", " ").replace(":", " ").split()[0]
                if "/" not in name:
                    contents[name] = text
            elif info.startswith("python title="):
                contents[info.removeprefix("python title=").strip('"')] = text
        return contents


def commands_in(text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yields environment and words of every line that a reader would type."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition(" > ")[0], comments=True)
        environment: dict[str, str] = {}
        while words and "=" in words[0] and words[0].split("=")[0].isupper():
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if words:
            yield environment, words


class _Prose(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: list[str] = []
        self.entries: list[str] = []
        self._in_code = False
        self._column = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attributes if name in ("href", "src") and value]
        self._in_code = tag == "code"
        self._column = 0 if tag == "tr" else self._column + (tag == "td")

    def handle_endtag(self, tag: str) -> None:
        self._in_code = False

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.names.append(data)
            if self._column == 1:
                self.entries.append(data)
