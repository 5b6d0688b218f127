"""The application: every page at its path, files of the browser's side, and what went wrong in words."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from treetune_view.guard import ASSETS, Guard
from treetune_view.page import SEEN, Form, Page, View
from treetune_view.pages import PAGES
from treetune_view.report.pages import DRAWINGS, LOOK
from treetune_view.store import NotThere, Store

FILES = Path(__file__).parent / "assets"
MOST_SENT_BYTES = 500_000
"""Of a form: a note of the longest and what a browser makes of its characters."""

LOG = logging.getLogger("treetune_view")


def application(store: Store, token: str) -> ASGIApp:
    """The viewer of what is in the store, for those who know the token."""
    routes = [
        Route(page.path, _endpoint(page, store), methods=["GET", "POST"] if page.save else ["GET"])
        for page in PAGES
    ]
    app = Starlette(
        routes=[
            *routes,
            *(Route(f"{ASSETS}/{style.name}", _style(style)) for style in (LOOK, DRAWINGS)),
            Mount(ASSETS, StaticFiles(directory=FILES)),
        ]
    )
    return Guard(app, token)


def _style(path: Path) -> Callable[[Request], Awaitable[Response]]:
    """A style sheet that the report has too."""

    async def endpoint(request: Request) -> Response:
        return FileResponse(path)

    return endpoint


def _endpoint(page: Page, store: Store) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        view = View(request, store, page, PAGES)
        if request.method != "POST":
            return await run_in_threadpool(_answer, view)
        sent = await _sent(request)
        if sent is None:
            words = f"more than {MOST_SENT_BYTES:,} bytes were sent: nothing was saved"
            return await run_in_threadpool(_problem, view, 413, "Too much", words)
        return await run_in_threadpool(_answer, view, parse_qs(sent, keep_blank_values=True))

    return endpoint


async def _sent(request: Request) -> str | None:
    """What a form sent; None where it is too much."""
    sent = bytearray()
    async for part in request.stream():
        sent += part
        if len(sent) > MOST_SENT_BYTES:
            return None
    return sent.decode("ascii", "replace")


def _answer(view: View, form: Form | None = None) -> Response:
    try:
        if form is not None:
            assert view.page.save is not None
            return view.page.save(view, form)
        mark = view.mark  # before anything is read: what is written meanwhile changes it
        if view.request.headers.get(SEEN) == mark:
            return Response(status_code=204)
        return view.page.show(view)
    except NotThere as error:
        return _problem(view, 404, "Not there", str(error))
    except ValueError as error:
        return _problem(view, 400, "This can't be shown", str(error))
    except FileNotFoundError as error:
        return _problem(view, 404, "Gone", f"{error.filename} was there and is no more")
    except Exception as error:  # a page that fails is not the end of the viewer: it says what it was
        LOG.exception("%s", view.request.url.path)
        words = f"{type(error).__name__}: {error}. The terminal of `treetune view` has the whole of it."
        return _problem(view, 500, "The viewer failed", words)


def _problem(view: View, status: int, title: str, words: str) -> Response:
    return view.render("problem.html", status, title=title, words=words)
