"""The viewer as a web application: who may look, every page at its path, and how it is served on this
machine."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treetune.exceptions import NotThere
from treetune.store.files import own_folder
from treetune.view import templates
from treetune.view.page import Form, Page, PageRequest
from treetune.view.pages import PAGES
from treetune.view.store import Store

SEEN = "X-Treetune-Seen"
"""Header with the mark of what a page shows: the answer is empty (204) while that is what there is."""

MOST_SENT_BYTES = 500_000
"""Bytes of a form: a note of the longest and what a browser makes of its characters."""

HOST, PORT = "127.0.0.1", 6680
PORTS_TRIED = 50
LAST_PORT = 65_535

HOSTS = (HOST, "localhost", "::1")
"""Names of this machine in addresses: a name that leads here from elsewhere (DNS rebinding) is refused."""

ASSETS = "/assets"
"""Path of the files of the browser's side."""

EVERY_ADDRESS = ("0.0.0.0", "::")
"""Hosts that stand for all addresses of this machine."""

LEAST_TOKEN = 16
"""Characters of a token: fewer could be guessed."""
KEPT = "token"
"""File of the viewer's own folder with the token of those who give none: an address and its cookie are good
again after a restart."""
COOKIE_S = 90 * 24 * 3600

READING, WRITING = ("GET", "HEAD"), ("POST",)

HEADERS: Mapping[str, str] = {
    # Nothing from elsewhere, no script and no style that stands in a page: text of models is only text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # Who is sent elsewhere brings nothing along; with `no-referrer`, a form of ours would have no origin.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

LOG = logging.getLogger("treetune.view")


# Who may look


class Guard:
    """Middleware that lets those pass who know the token, from this machine, in a page of the viewer's own:
    it checks Host, method, origin and token, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str, hosts: Sequence[str] = HOSTS, base_url: str = "") -> None:
        outside = urlsplit(base_url)
        self._app, self._token, self._base = app, token, outside.path.rstrip("/")
        self._hosts = [*hosts, *([outside.hostname] if outside.hostname else [])]
        self._origin = f"{outside.scheme}://{outside.netloc}"
        # Cookies know no port: several viewers behind one name must not take each other's.
        self.cookie = "treetune-" + hashlib.sha256(token.encode()).hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # A proxy may have taken its path away, or not; what pages lead to has it (`PageRequest.render`).
        path = "/" + scope["path"].removeprefix(self._base).lstrip("/")
        scope = {**scope, "path": path, "base": self._base}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("Location", "").startswith("/"):
                    headers["Location"] = self._base + headers["Location"]
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                # What runs wrote is kept nowhere; the viewer's own files are asked for again by their mark.
                own = scope["path"].startswith(ASSETS)
                headers.setdefault("Cache-Control", "no-cache" if own else "no-store")
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Returns the answer to a request that may not pass; None for one that may."""
        given_host = request.headers.get("host", "")
        try:
            host = urlsplit(f"//{given_host}")
        except ValueError:  # such as a bracket that nothing closes
            host = urlsplit("")
        if host.hostname not in self._hosts:
            names = " or ".join(self._hosts)
            return _refused(f"This viewer is asked for as {names}, and not as {given_host!r}.")
        if request.method not in (*READING, *WRITING):
            return _refused(f"{request.method} is nothing that this viewer does.", 405)
        own = [f"{scheme}://{host.netloc}" for scheme in ("http", "https")]  # a proxy may speak TLS for it
        if request.method in WRITING and request.headers.get("origin") not in (*own, self._origin):
            return _refused("Only a page of this viewer may send it something.")
        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            # One slash: what begins with two names another host.
            address = "/" + request.url.path.lstrip("/") + (f"?{urlencode(rest)}" if rest else "")
            answer = RedirectResponse(address, status_code=303)
            answer.set_cookie(self.cookie, self._token, COOKIE_S, httponly=True, samesite="strict")
            return answer
        if self._is_token(request.cookies.get(self.cookie, "")):
            return None
        return _refused(
            "This viewer answers those who know its token: open the address that `treetune view` printed,"
            " with all that stands behind `token=`."
        )

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _refused(message: str, status: int = 403) -> Response:
    return PlainTextResponse(message + "\n", status_code=status)


# Pages


def application(store: Store, token: str, hosts: Sequence[str] = HOSTS, base_url: str = "") -> ASGIApp:
    """Returns the viewer of what is in the store, for those who know the token and ask for one of `hosts`.
    Behind a proxy, browsers have it at `base_url`."""
    routes = [
        Route(page.path, _endpoint(page, store), methods=["GET", "POST"] if page.save else ["GET"])
        for page in PAGES
    ]
    app = Starlette(routes=[*routes, Mount(ASSETS, StaticFiles(directory=templates.ASSETS))])
    return Guard(app, token, hosts, base_url)


def _endpoint(page: Page, store: Store) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        view = PageRequest(request, store, page, PAGES)
        if request.method != "POST":
            return await run_in_threadpool(_answer, view)
        sent = bytearray()
        async for part in request.stream():
            sent += part
            if len(sent) > MOST_SENT_BYTES:
                message = f"more than {MOST_SENT_BYTES:,} bytes were sent: nothing was saved"
                return await run_in_threadpool(_problem, view, 413, "Too much", message)
        form = parse_qs(sent.decode("ascii", "replace"), keep_blank_values=True)
        return await run_in_threadpool(_answer, view, form)

    return endpoint


def _answer(view: PageRequest, form: Form | None = None) -> Response:
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
        message = f"{type(error).__name__}: {error}. The terminal of `treetune view` has the whole of it."
        return _problem(view, 500, "The viewer failed", message)


def _problem(view: PageRequest, status: int, title: str, message: str) -> Response:
    return view.render("problem.html", status, title=title, message=message)


# Serving


def serve(
    paths: Sequence[Path],
    say: Callable[[str], None],
    port: int | None = None,
    *,
    read_only: bool = False,
    host: str = HOST,
    token: str | None = None,
    base_url: str = "",
) -> None:
    """Says the address, then answers there until it is interrupted. Without a `port`: `PORT`, or the next
    that is free. Where it is `read_only`, nobody can write notes. Without a `token` it is this user's own.

    `paths` are folders, and files of data sets. Raises ValueError for one that isn't there, for a port that
    can't be had and for a token that could be guessed.
    """
    import uvicorn

    folders = [path for path in paths if path.is_dir() or not (path.is_file() or path.suffix)]
    files = [path for path in paths if path not in folders]
    cache = cache_folder()
    own_folder(cache)  # for this user alone: it holds beginnings of answers and problems
    store = Store(folders, cache, files=files, read_only=read_only)
    token = token or _kept_token(cache / KEPT)
    if len(token) < LEAST_TOKEN:
        raise ValueError(
            f"the token has {len(token)} characters and must have {LEAST_TOKEN}: it is the only lock"
        )
    if base_url and not re.match("https?://[^/]+/", base_url):
        raise ValueError(
            f"--base-url is {base_url} and must be a whole address, such as https://HUB/user/ME/"
        )
    hosts = [*HOSTS, host, *([socket.gethostname(), socket.getfqdn()] if host in EVERY_ADDRESS else [])]
    with _listening(port, host) as listening:
        own = listening.getsockname()[1]
        named = socket.getfqdn() if host in EVERY_ADDRESS else f"[{host}]" if ":" in host else host
        address = f"{base_url.rstrip('/')}/" if base_url else f"http://{named}:{own}/"
        say(f"{address}{'' if folders else 'data'}?token={token}")
        if host in HOSTS:
            say(f"From another machine: ssh -N -L {own}:{HOST}:{own} MACHINE there, and the same address.")
        else:
            say(f"Who can read what is sent to {host} can look in: put TLS before it, or use ssh -L.")
        say("Ctrl-C ends it.")
        config = uvicorn.Config(
            application(store, token, hosts, base_url),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(config).run(sockets=[listening])


def _kept_token(path: Path) -> str:
    """Returns this user's token, made where there is none yet."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(24)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        return token


def cache_folder() -> Path:
    """Returns the folder for what is made from experiments: TREETUNE_VIEWER_CACHE, or a user's own."""
    if given := os.environ.get("TREETUNE_VIEWER_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treetune" / "viewer"


def _listening(port: int | None, host: str = HOST) -> socket.socket:
    if port is not None and not 0 <= port <= LAST_PORT:
        raise ValueError(f"--port is {port} and must be from 0 (any free one) to {LAST_PORT}")
    ports = range(PORT, PORT + PORTS_TRIED) if port is None else [port]
    problem: OSError | None = None
    for candidate in ports:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
            listening.listen()  # who reads the address may ask at once
        except OSError as error:
            listening.close()
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
        else:
            return listening
    tried = f"port {port}" if port is not None else f"any of the ports {PORT} to {ports[-1]}"
    assert problem is not None
    raise ValueError(f"{tried} can't be had on {host} ({problem.strerror}): choose another with --port")
