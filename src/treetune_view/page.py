"""What a page of the viewer is, and what it is asked with: an address and the experiments that it names."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from treetune.runtime.console import duration
from treetune.vocabulary import CORRECT_SCORE
from treetune_view.rendering import rendered
from treetune_view.report import pages as shared
from treetune_view.report.charts import number
from treetune_view.store import NotThere, Run, Store

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
SEEN = "X-Treetune-Seen"
"""Header with the mark of what a page shows: the answer is empty (204) while that is what there is."""

DIGITS = 9
"""Of numbers in addresses."""

Choice = TypeVar("Choice", bound=str)
Form = Mapping[str, Sequence[str]]
"""What a form said: the values of each field."""


@dataclass(frozen=True)
class Page:
    """One kind of page. `show` makes it, in a thread of its own.

    `place` is where the navigation has it: ``top`` always, ``run`` where the address names experiments,
    ``both`` always, and about these where it does, None nowhere. `key` is pressed after `g` to go there.
    `mark` changes when what the page shows does. `save` takes a form that is sent to the page.
    """

    path: str
    title: str
    show: Callable[[View], Response]
    place: Literal["top", "run", "both"] | None = None
    key: str = ""
    mark: Callable[[View], str] | None = None
    """None: the marks of the experiments that the address names, or of all."""
    save: Callable[[View, Form], Response] | None = None


@dataclass(frozen=True)
class View:
    """One request for a page."""

    request: Request
    store: Store
    page: Page
    pages: Sequence[Page]

    # What the address says

    @functools.cached_property
    def runs(self) -> list[Run]:
        """The experiments that the address names, `?run=…&run=…`. Raises NotThere for one that isn't."""
        return [self.store.run(name) for name in self.request.query_params.getlist("run")]

    @property
    def run(self) -> Run:
        """The first of them. Raises NotThere without one."""
        if not self.runs:
            raise NotThere("this page is about an experiment: choose one from the list of experiments")
        return self.runs[0]

    def text(self, name: str, default: str = "") -> str:
        return self.request.query_params.get(name, default)

    def integer(self, name: str, default: int, *, least: int = 0) -> int:
        """Raises ValueError for what is no whole number, or too small."""
        text = self.request.query_params.get(name) or str(default)
        if len(text) > DIGITS or not text.lstrip("-").isdecimal() or int(text) < least:
            raise ValueError(
                f"{name} is {text!r} and must be a whole number from {least} on, of at most {DIGITS} digits"
            )
        return int(text)

    def choice(self, name: str, options: Sequence[Choice], default: Choice | None = None) -> Choice:
        """One of the options, the first by default. Raises ValueError for another."""
        text = self.request.query_params.get(name) or default or options[0]
        if text not in options:
            raise ValueError(f"{name} is {text!r} and can be {', '.join(options)}")
        return next(option for option in options if option == text)

    # Addresses

    def here(self, **changes: Any) -> str:
        """This page's address with other values; None takes one away."""
        kept = [(k, v) for k, v in self.request.query_params.multi_items() if k not in changes]
        return self._address(self.page.path, kept, changes)

    def address(self, path: str, **query: Any) -> str:
        """Another page's address. A list becomes several values."""
        return self._address(path, [], query)

    @staticmethod
    def _address(path: str, kept: list[tuple[str, str]], query: Mapping[str, Any]) -> str:
        pairs = list(kept)
        for name, value in query.items():
            values = value if isinstance(value, list | tuple) else [value]
            pairs += [(name, str(one)) for one in values if one is not None]
        return f"{path}?{urlencode(pairs)}" if pairs else path

    # Answers

    @functools.cached_property
    def mark(self) -> str:
        """Of what this page shows: another as soon as it may show something else."""
        if self.page.mark is not None:
            return self.page.mark(self)
        names = self.request.query_params.getlist("run")
        return self.store.mark([self.store.run(name) for name in names] if names else self.store.runs())

    def render(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """The template, filled in; `view` is this."""
        text = environment().get_template(template).render(view=self, **values)
        # Half a character of somebody's is no reason to show nothing.
        return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)


def digest(*parts: object) -> str:
    """A short mark of anything that can be written down."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


@functools.cache
def environment() -> Environment:
    made = shared.environment(FOLDER / "templates")
    filters: dict[str, Callable[..., Any]] = {
        "duration": lambda seconds: "–" if seconds is None else duration(seconds),
        "json": lambda value: json.dumps(value, separators=(",", ":")),
        "when": lambda seconds: datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "in_seconds": in_seconds,
        "rendered": rendered,
        "pretty": _pretty,
    }
    made.filters |= filters
    made.tests["right"] = lambda score: score >= CORRECT_SCORE
    return made


def in_seconds(seconds: float) -> str:
    """A short time in three digits: ``5.11 s``, ``44 ms``, ``0.0026 ms``."""
    return f"{number(1000 * seconds)} ms" if seconds < 0.1 else f"{number(seconds)} s"


def _pretty(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)
