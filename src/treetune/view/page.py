"""The pages of the viewer, and the requests for them."""

from __future__ import annotations

import functools
import math
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
"""The most digits of a number in an address."""

Choice = TypeVar("Choice", bound=str)
Form = Mapping[str, Sequence[str]]
"""The values of each field of a form."""


@dataclass(frozen=True)
class Page:
    """A kind of page.

    Example: `Page("/timeline", "Timeline", show, place="run", key="t", mark=mark)`.
    """

    path: str
    title: str
    show: Callable[[PageRequest], Response]
    """Renders the page, in a thread."""
    place: Literal["top", "run", "both"] | None = None
    """Where the navigation has it: always (``top``), for experiments of the address (``run``), always but for
    these if there are any (``both``), or nowhere."""
    key: str = ""
    """The key that opens it, after `g`."""
    mark: Callable[[PageRequest], str] | None = None
    """Returns a text that changes whenever the content does; None: the mark of the address' experiments, or
    of all."""
    save: Callable[[PageRequest, Form], Response] | None = None
    """Saves a form that is sent to the page."""


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
        """Reads a whole number of the address. Raises ValueError for another text, or a smaller number."""
        text = self.request.query_params.get(name) or str(default)
        if len(text) > DIGITS or not text.removeprefix("-").isdecimal() or int(text) < least:
            raise ValueError(
                f"{name} is {text!r} and must be a whole number from {least} on, of at most {DIGITS} digits"
            )
        return int(text)

    def choice(self, name: str, options: Sequence[Choice], default: Choice | None = None) -> Choice:
        """Reads a field of the address with a fixed set of values; the first is the default.

        Raises ValueError for another value.
        """
        text = self.request.query_params.get(name) or default or options[0]
        if text not in options:
            raise ValueError(f"{name} is {text!r} and can be {', '.join(options)}")
        return next(option for option in options if option == text)  # `text`, with the options' type

    def here(self, **changes: Any) -> str:
        """Returns this page's address with some fields changed; None removes a field."""
        items = self.request.query_params.multi_items()
        unchanged = [(name, value) for name, value in items if name not in changes]
        return self._address(self.page.path, unchanged, changes)

    def address(self, path: str, **query: Any) -> str:
        """Returns another page's address. A list becomes several values."""
        return self._address(path, [], query)

    @staticmethod
    def _address(path: str, pairs: list[tuple[str, str]], query: Mapping[str, Any]) -> str:
        for name, value in query.items():
            values = value if isinstance(value, list | tuple) else [value]
            pairs += [(name, str(item)) for item in values if item is not None]
        return f"{path}?{urlencode(pairs)}" if pairs else path

    @functools.cached_property
    def mark(self) -> str:
        """A text that changes whenever the page may show something else."""
        if self.page.mark is not None:
            return self.page.mark(self)
        return self.store.mark(self.runs or self.store.runs())

    def render(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Renders a template with `view` as this request."""
        text = templates.render(template, view=self, **values)
        if base := self.request.scope["base"]:
            # Adds the proxy's prefix to links. Text of runs can't match, because its quotes are escaped.
            text = re.sub(r'((?:href|src|action|data-later)=")/', rf"\1{escape(base)}/", text)
        # "replace", because a text may contain half a character, which UTF-8 can't encode.
        return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)


@dataclass(frozen=True)
class Paged:
    """A page of a list: number `number` of `pages`, of `total` rows in all."""

    rows: Sequence[Any]
    total: int
    number: int
    pages: int


def paged(view: PageRequest, rows: Sequence[Any], size: int) -> Paged:
    """Returns the rows of the page that the address names, `?page=`."""
    number = view.integer("page", 1, least=1)
    pages = max(1, math.ceil(len(rows) / size))
    return Paged(rows[(number - 1) * size : number * size], len(rows), number, pages)
