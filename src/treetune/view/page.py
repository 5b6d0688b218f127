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

MOST_DIGITS_OF_NUMBER = 9
"""The most digits of a number in an address."""

Choice = TypeVar("Choice", bound=str)
Form = Mapping[str, Sequence[str]]
"""The values of each field of a form: {"labels": ["wrong"], "text": ["…"]}."""


@dataclass(frozen=True)
class Page:
    """A kind of page.

    Example::

        Page("/timeline", "Timeline", show, navigation="run", key="t", fingerprint=fingerprint_of_timeline)
    """

    path: str
    title: str
    show: Callable[[PageRequest], Response]
    """Renders the page. It is called in a thread, so it may read files."""
    navigation: Literal["top", "run", "both"] | None = None
    """When the navigation links to the page:

    * ``top``: always. The link names no experiments.
    * ``run``: if the present page's address names experiments. The link names the same ones.
    * ``both``: always. The link names the experiments of the present page's address, if there are any.
    * None: never.
    """
    key: str = ""
    """The key that opens the page, pressed after `g`; empty for none."""
    fingerprint: Callable[[PageRequest], str] | None = None
    """Returns a text that changes whenever the content does. None stands for the fingerprint of the
    experiments that the address names, or of all experiments if it names none."""
    save: Callable[[PageRequest, Form], Response] | None = None
    """Saves a form that is sent to the page, and returns the response; None if the page takes no forms."""


@dataclass(frozen=True)
class PageRequest:
    """A request for a page."""

    request: Request
    store: Store
    page: Page
    pages: Sequence[Page]
    """All pages of the viewer, for the navigation."""

    @functools.cached_property
    def runs(self) -> list[Run]:
        """The experiments that the address names, `?run=…&run=…`. Raises NotThere if one doesn't exist."""
        return [self.store.run(name) for name in self.request.query_params.getlist("run")]

    @property
    def run(self) -> Run:
        """The first experiment that the address names. Raises NotThere if it names none."""
        if not self.runs:
            raise NotThere("this page is about an experiment: choose one from the list of experiments")
        return self.runs[0]

    def text(self, name: str, default: str = "") -> str:
        """Returns a field of the address, or `default` if the address doesn't have the field."""
        return self.request.query_params.get(name, default)

    def integer(self, name: str, default: int, *, least: int = 0) -> int:
        """Returns a field of the address as a whole number, or `default` if the field is missing or empty.

        Raises ValueError if the text isn't a whole number, is too long, or is a number below `least`.
        """
        text = self.request.query_params.get(name) or str(default)
        if len(text) > MOST_DIGITS_OF_NUMBER or not text.removeprefix("-").isdecimal() or int(text) < least:
            raise ValueError(
                f"{name} is {text!r} and must be a whole number from {least} on, of at most"
                f" {MOST_DIGITS_OF_NUMBER} digits"
            )
        return int(text)

    def choice(self, name: str, options: Sequence[Choice], default: Choice | None = None) -> Choice:
        """Returns a field of the address that must be one of `options`.

        If it is missing or empty, returns `default`, or without one the first option. Raises ValueError for
        any other value.
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
        """Returns another page's address. A field with a list is repeated for each item: ``?run=a&run=b``."""
        return self._address(path, [], query)

    @staticmethod
    def _address(path: str, pairs: list[tuple[str, str]], query: Mapping[str, Any]) -> str:
        """Returns a path with the fields `pairs` and then those of `query`, whose None values are left
        out."""
        for name, value in query.items():
            values = value if isinstance(value, list | tuple) else [value]
            pairs += [(name, str(item)) for item in values if item is not None]
        return f"{path}?{urlencode(pairs)}" if pairs else path

    @functools.cached_property
    def fingerprint(self) -> str:
        """A text that changes whenever the page may show something else."""
        if self.page.fingerprint is not None:
            return self.page.fingerprint(self)
        return self.store.fingerprint(self.runs or self.store.runs())

    def render(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Renders a template, in which `view` is this request, as a response."""
        text = templates.render(template, view=self, **values)
        if base := self.request.scope["base"]:
            # Adds the proxy's prefix to links. Text of runs can't match, because its quotes are escaped.
            text = re.sub(r'((?:href|src|action|data-later)=")/', rf"\1{escape(base)}/", text)
        # "replace", because a text may contain half a character, which UTF-8 can't encode.
        return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)


@dataclass(frozen=True)
class Paged:
    """A part of a long list that is shown on one page."""

    rows: Sequence[Any]
    """The rows on this page."""
    total: int
    """The number of rows of the whole list."""
    number: int
    """The number of this page, counted from 1."""
    pages: int
    """The number of pages, at least 1."""


def choose_page(view: PageRequest, rows: Sequence[Any], size: int) -> Paged:
    """Returns the page of a list that the address names by `?page=`, with at most `size` rows."""
    number = view.integer("page", 1, least=1)
    pages = max(1, math.ceil(len(rows) / size))
    return Paged(rows[(number - 1) * size : number * size], len(rows), number, pages)
