"""The viewer as a web application.

request ──► Guard ──► Starlette's routes ──► _respond, in a thread ──► Page.show
              │                                 └─ answers 204 if the page is unchanged
              └─ checks host, method, origin and token; refuses with 403 or 405
"""

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
from treetune.store.files import make_private_folder
from treetune.view import templates
from treetune.view.page import Form, Page, PageRequest
from treetune.view.pages import PAGES
from treetune.view.store import Store

SEEN_FINGERPRINT_HEADER = "X-Treetune-Seen"
"""The header in which a page in the browser sends the fingerprint of the content that it shows
(`PageRequest.fingerprint`). The response is empty (204) while the fingerprint is still the same."""

MOST_SENT_BYTES = 500_000
"""The most bytes of a form: enough for the longest note, with its characters escaped."""

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 6680
PORTS_TRIED = 50
LAST_PORT = 65_535

LOCAL_HOSTS = (DEFAULT_HOST, "localhost", "::1")
"""The names of this machine in addresses. Any other name is refused, against DNS rebinding."""

ASSETS_PATH = "/assets"
"""The path of scripts, styles and fonts."""

EVERY_ADDRESS = ("0.0.0.0", "::")
"""The hosts that mean all addresses of this machine."""

LEAST_TOKEN_CHARACTERS = 16
"""The fewest characters of a token: a shorter one could be guessed."""
TOKEN_FILE = "token"
"""The name of the file in the cache folder that keeps this user's default token, so that addresses and
cookies still work after a restart."""
COOKIE_S = 90 * 24 * 3600
"""The lifetime of the cookie with the token, in seconds (90 days)."""

READING_METHODS, WRITING_METHODS = ("GET", "HEAD"), ("POST",)

RESPONSE_HEADERS: Mapping[str, str] = {
    # Nothing from other hosts, and no inline script or style: text that models wrote must stay text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # Other hosts get no referrer. With `no-referrer` the browser would send our own forms without an origin.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

LOG = logging.getLogger("treetune.view")


# Access


class Guard:
    """Middleware that checks host, method, origin and token, and adds headers to every response."""

    def __init__(
        self, app: ASGIApp, token: str, hosts: Sequence[str] = LOCAL_HOSTS, base_url: str = ""
    ) -> None:
        self._app, self._token = app, token
        # The public address, if a proxy forwards to the viewer. Without a proxy, all its parts are empty.
        public_address = urlsplit(base_url)
        self._proxy_prefix = public_address.path.rstrip("/")
        """The prefix of the viewer's paths at the proxy, such as ``/user/me``."""
        self._hosts = list(hosts)
        if public_address.hostname:
            self._hosts.append(public_address.hostname)
        self._proxy_origin = f"{public_address.scheme}://{public_address.netloc}"
        """The origin of the pages at the proxy. Without a proxy it is ``://``, which no browser sends."""
        # Browsers share cookies among all ports of a host, so each token has a cookie with another name.
        self.cookie = "treetune-" + hashlib.sha256(token.encode()).hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # `serve` turns websockets and lifespan events off
            return
        # A proxy may or may not remove its prefix from the path. Links of pages have the prefix
        # (`PageRequest.render`).
        path, prefix = scope["path"], self._proxy_prefix
        # A prefix ends at a slash: with the prefix /r, the path /run has no prefix.
        if path == prefix or path.startswith(prefix + "/"):
            path = path.removeprefix(prefix)
        path = "/" + path.lstrip("/")
        scope = {**scope, "path": path, "base": prefix}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # The browser needs the address of a redirect with the proxy's prefix.
                if headers.get("Location", "").startswith("/"):
                    headers["Location"] = self._proxy_prefix + headers["Location"]
                for name, value in RESPONSE_HEADERS.items():
                    headers.setdefault(name, value)
                # Browsers must not store what runs wrote. Assets may be stored, and are revalidated.
                is_asset = scope["path"].startswith(ASSETS_PATH)
                headers.setdefault("Cache-Control", "no-cache" if is_asset else "no-store")
            await send(message)

        refusal = self._check_request(Request(scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _check_request(self, request: Request) -> Response | None:
        """Returns the response to a request that must not reach the pages, and None for a permitted request.

        The response is a refusal, or a redirect that moves the token from the address into a cookie.
        """
        host_header = request.headers.get("host", "")
        try:
            host = urlsplit(f"//{host_header}")
        except ValueError:  # such as an unclosed bracket
            host = urlsplit("")
        if host.hostname not in self._hosts:
            names = " or ".join(self._hosts)
            return _make_refusal(f"This viewer is available as {names}, but not as {host_header!r}.")
        if request.method not in (*READING_METHODS, *WRITING_METHODS):
            return _make_refusal(f"This viewer doesn't support the method {request.method}.", 405)
        # If a proxy speaks TLS with the browser, the origin begins with https.
        origins = [f"http://{host.netloc}", f"https://{host.netloc}", self._proxy_origin]
        if request.method in WRITING_METHODS and request.headers.get("origin") not in origins:
            return _make_refusal("Only pages of this viewer may send data to it.")
        token = request.query_params.get("token")
        if token is not None and self._is_token(token):
            # Moves the token from the address into a cookie, so that it isn't in the history of pages.
            fields = request.query_params.multi_items()
            other_fields = [(key, value) for key, value in fields if key != "token"]
            # With a single slash at its start: after two slashes, a browser reads the name of a host.
            address = "/" + request.url.path.lstrip("/")
            if other_fields:
                address += f"?{urlencode(other_fields)}"
            redirect = RedirectResponse(address, status_code=303)
            redirect.set_cookie(self.cookie, self._token, COOKIE_S, httponly=True, samesite="strict")
            return redirect
        if self._is_token(request.cookies.get(self.cookie, "")):
            return None
        return _make_refusal(
            "This viewer requires its token: open the address that `treetune view` printed, including"
            " everything after `token=`."
        )

    def _is_token(self, text: str) -> bool:
        # Takes equally long for all texts, so the time doesn't tell how many characters were right.
        return secrets.compare_digest(text.encode(), self._token.encode())


def _make_refusal(message: str, status: int = 403) -> Response:
    return PlainTextResponse(message + "\n", status_code=status)


# Pages


def make_application(
    store: Store, token: str, hosts: Sequence[str] = LOCAL_HOSTS, base_url: str = ""
) -> ASGIApp:
    """Returns the web application for a store.

    Its guard admits requests that have the token and address this machine by a name in `hosts`. `base_url`
    is the application's public address if a proxy forwards to it, and otherwise empty.
    """
    routes = [
        Route(page.path, _make_endpoint(page, store), methods=["GET", "POST"] if page.save else ["GET"])
        for page in PAGES
    ]
    app = Starlette(routes=[*routes, Mount(ASSETS_PATH, StaticFiles(directory=templates.ASSETS_FOLDER))])
    return Guard(app, token, hosts, base_url)


def _make_endpoint(page: Page, store: Store) -> Callable[[Request], Awaitable[Response]]:
    """Returns the function that answers requests for a page."""

    async def endpoint(request: Request) -> Response:
        view = PageRequest(request, store, page, PAGES)
        # Pages read files and query them. In the event loop, a slow page would block all others.
        if request.method != "POST":
            return await run_in_threadpool(_respond, view)
        form_bytes = bytearray()
        async for part in request.stream():
            form_bytes += part
            if len(form_bytes) > MOST_SENT_BYTES:
                message = f"more than {MOST_SENT_BYTES:,} bytes were sent: nothing was saved"
                return await run_in_threadpool(_render_problem, view, 413, "Too much", message)
        # Browsers send forms as ASCII, with everything else percent-encoded.
        form = parse_qs(form_bytes.decode("ascii", "replace"), keep_blank_values=True)
        return await run_in_threadpool(_respond, view, form)

    return endpoint


def _respond(view: PageRequest, form: Form | None = None) -> Response:
    """Returns the response to a request for a page.

    It is the page itself, an empty response (204) if the browser already shows the page's present state, or
    a page about what went wrong. If a form was sent, the page saves it and returns its own response.
    """
    try:
        if form is not None:
            assert view.page.save is not None, "only pages that save have a route for forms"
            return view.page.save(view, form)
        # The fingerprint is computed before anything is read, so that a change while the page is made gives
        # another fingerprint at the next request.
        fingerprint = view.fingerprint
        if view.request.headers.get(SEEN_FINGERPRINT_HEADER) == fingerprint:
            return Response(status_code=204)
        return view.page.show(view)
    except NotThere as error:
        return _render_problem(view, 404, "Not found", str(error))
    except ValueError as error:
        return _render_problem(view, 400, "This can't be shown", str(error))
    except FileNotFoundError as error:
        return _render_problem(view, 404, "Deleted", f"{error.filename} was deleted")
    except Exception as error:  # a fault in a page must not end the viewer
        LOG.exception("%s", view.request.url.path)
        message = f"{type(error).__name__}: {error}. The terminal of `treetune view` has the traceback."
        return _render_problem(view, 500, "The viewer failed", message)


def _render_problem(view: PageRequest, status: int, title: str, message: str) -> Response:
    return view.render("problem.html", status, title=title, message=message)


# Serving


def serve(
    paths: Sequence[Path],
    say: Callable[[str], None],
    port: int | None = None,
    *,
    read_only: bool = False,
    host: str = DEFAULT_HOST,
    token: str | None = None,
    base_url: str = "",
) -> None:
    """Prints the viewer's address, and serves it until it is interrupted.

    Args:
        paths: folders with experiments, and files of data sets.
        say: prints a line.
        port: the port to listen on, where 0 is any free one. None is `DEFAULT_PORT`, or the next free port
            after it.
        read_only: refuses to write notes.
        host: the address to listen on.
        token: the token that requests need. None is this user's token, which is kept in the cache.
        base_url: the viewer's public address if a proxy forwards to it, and otherwise empty.

    Raises:
        ValueError: A path doesn't exist, no port is available, the token is too short, or `base_url` isn't a
            whole address.
    """
    import uvicorn

    # A path that doesn't exist counts as a file if it has a suffix, and otherwise as a folder. The error
    # message of `Store` then names the right kind.
    folders = [path for path in paths if path.is_dir() or not (path.is_file() or path.suffix)]
    files = [path for path in paths if path not in folders]
    cache = cache_folder()
    make_private_folder(cache)  # readable by this user alone: it contains answers and problems
    store = Store(folders, cache, files=files, read_only=read_only)
    token = token or _read_or_make_token(cache / TOKEN_FILE)
    if len(token) < LEAST_TOKEN_CHARACTERS:
        raise ValueError(
            f"the token has {len(token)} characters and must have at least {LEAST_TOKEN_CHARACTERS}: a"
            " shorter one could be guessed"
        )
    if base_url and not re.match("https?://[^/]+/", base_url):
        raise ValueError(
            f"--base-url is {base_url} and must be a whole address, such as https://HUB/user/ME/"
        )
    hosts = [*LOCAL_HOSTS, host]
    if host in EVERY_ADDRESS:  # other machines address the viewer by this machine's name
        hosts += [socket.gethostname(), socket.getfqdn()]
    with _listen_on_port(port, host) as listening:
        actual_port = listening.getsockname()[1]
        if host in EVERY_ADDRESS:
            name = socket.getfqdn()
        else:
            name = f"[{host}]" if ":" in host else host  # IPv6 addresses have brackets in URLs
        address = f"{base_url.rstrip('/')}/" if base_url else f"http://{name}:{actual_port}/"
        first_page = "" if folders else "data"  # without folders, the list of experiments would be empty
        say(f"{address}{first_page}?token={token}")
        if host in LOCAL_HOSTS:
            say(
                f"From another machine: run ssh -N -L {actual_port}:{DEFAULT_HOST}:{actual_port} MACHINE, and"
                " open the same address."
            )
        else:
            say(f"Traffic to {host} is not encrypted and contains the token: use a TLS proxy, or ssh -L.")
        say("Press Ctrl-C to stop.")
        config = uvicorn.Config(
            make_application(store, token, hosts, base_url),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(config).run(sockets=[listening])


def _read_or_make_token(path: Path) -> str:
    """Returns this user's token from the file `path`, which the first start writes."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(24)
        # The file has its final permissions from the moment it exists, so nobody else can read it in between.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        return token


def cache_folder() -> Path:
    """Returns the folder of the viewer's indexes and its token.

    It is the environment variable TREETUNE_VIEWER_CACHE, or without one a folder in the user's cache.
    """
    if folder := os.environ.get("TREETUNE_VIEWER_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treetune" / "viewer"


def _listen_on_port(port: int | None, host: str = DEFAULT_HOST) -> socket.socket:
    """Returns a socket that listens on `port`, or if that is None on the first free port from `DEFAULT_PORT`
    on.

    Raises ValueError if the port, or each of the ports that were tried, isn't available.
    """
    if port is not None and not 0 <= port <= LAST_PORT:
        raise ValueError(f"--port is {port} and must be from 0 (any free one) to {LAST_PORT}")
    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if port is None else [port]
    problem: OSError | None = None
    for candidate in ports:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        # Without this option, the port of a viewer that has just ended would stay taken for a minute.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
            listening.listen()  # before the address is printed, so that it works at once
        except OSError as error:
            listening.close()
            problem = error
            if error.errno != errno.EADDRINUSE:  # another port would fail, too
                break
        else:
            return listening
    tried_ports = f"port {port}" if port is not None else f"any of the ports {DEFAULT_PORT} to {ports[-1]}"
    assert problem is not None
    raise ValueError(
        f"{tried_ports} is not available on {host} ({problem.strerror}): choose another with --port"
    )
