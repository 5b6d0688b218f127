"""A page of the viewer, and the request that it answers: an address and the experiments that it names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from treetune.exceptions import NotThere
from treetune.view import templates
from treetune.view.store import Run, Store

DIGITS = 9
"""Digits of numbers in addresses."""

Choice = TypeVar("Choice", bound=str)
Form = Mapping[str, Sequence[str]]
"""The values of each field of a form."""


@dataclass(frozen=True)
class Page:
    """A kind of page. `show` makes it, in a thread of its own.

    The navigation has it always (`place` is ``top``), where the address names experiments (``run``), always
    and about these where it does (``both``), or not at all (None). `key` is pressed after `g` to go there.
    `mark` changes when the content does; without one it is the mark of the experiments that the address
    names, or of all. `save` takes a form that is sent to the page.
    """

    path: str
    title: str
    show: Callable[[PageRequest], Response]
    place: Literal["top", "run", "both"] | None = None
    key: str = ""
    mark: Callable[[PageRequest], str] | None = None
    save: Callable[[PageRequest, Form], Response] | None = None


@dataclass(frozen=True)
class PageRequest:
    """A request for a page."""

    request: Request
    store: Store
    page: Page
    pages: Sequence[Page]

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
        """Reads a number of the address. Raises ValueError for what is no whole number, or too small."""
        text = self.request.query_params.get(name) or str(default)
        if len(text) > DIGITS or not text.lstrip("-").isdecimal() or int(text) < least:
            raise ValueError(
                f"{name} is {text!r} and must be a whole number from {least} on, of at most {DIGITS} digits"
            )
        return int(text)

    def choice(self, name: str, options: Sequence[Choice], default: Choice | None = None) -> Choice:
        """Reads one of the options, the first by default. Raises ValueError for another."""
        text = self.request.query_params.get(name) or default or options[0]
        if text not in options:
            raise ValueError(f"{name} is {text!r} and can be {', '.join(options)}")
        return next(option for option in options if option == text)

    def here(self, **changes: Any) -> str:
        """Returns this page's address with other values; None takes one away."""
        items = self.request.query_params.multi_items()
        return self._address(self.page.path, [(k, v) for k, v in items if k not in changes], changes)

    def address(self, path: str, **query: Any) -> str:
        """Returns another page's address. A list becomes several values."""
        return self._address(path, [], query)

    @staticmethod
    def _address(path: str, pairs: list[tuple[str, str]], query: Mapping[str, Any]) -> str:
        for name, value in query.items():
            values = value if isinstance(value, list | tuple) else [value]
            pairs += [(name, str(one)) for one in values if one is not None]
        return f"{path}?{urlencode(pairs)}" if pairs else path

    @functools.cached_property
    def mark(self) -> str:
        """A text that is another as soon as the page may show something else."""
        if self.page.mark is not None:
            return self.page.mark(self)
        return self.store.mark(self.runs or self.store.runs())

    def render(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Fills in the template; `view` is this."""
        text = templates.render(template, view=self, **values)
        if base := self.request.scope["base"]:  # text of runs can't hold this: its quotes are escaped
            text = re.sub(r'((?:href|src|action|data-later)=")/', rf"\1{escape(base)}/", text)
        # Half a character of somebody's is no reason to show nothing.
        return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)


@dataclass(frozen=True)
class Paged:
    """Page `number` of `pages` of a list of `total` rows."""

    rows: Sequence[Any]
    total: int
    number: int
    pages: int


def paged(view: PageRequest, rows: Sequence[Any], size: int) -> Paged:
    """Returns the rows of the page that the address names, `?page=`."""
    number = view.integer("page", 1, least=1)
    pages = max(1, -(-len(rows) // size))
    return Paged(rows[(number - 1) * size : number * size], len(rows), number, pages)
