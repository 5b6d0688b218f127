"""Who may look: those who know the token, from this machine, in a page of the viewer's own."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost", "::1")
"""What an address may call this machine: a name that leads here from elsewhere (DNS rebinding) is refused."""

ASSETS = "/assets"
"""Where the files of the browser's side lie."""

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


class Guard:
    """Middleware around the viewer: Host, method and origin, token; and the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token
        # Cookies know no port: several viewers behind one name must not take each other's.
        self.cookie = "treetune-" + hashlib.sha256(token.encode()).hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                # What runs wrote is kept nowhere; the viewer's own files are asked for again by their mark.
                own = scope["path"].startswith(ASSETS)
                headers.setdefault("Cache-Control", "no-cache" if own else "no-store")
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """What is answered instead; None for a request that may pass."""
        given_host = request.headers.get("host", "")
        try:
            host = urlsplit(f"//{given_host}")
        except ValueError:  # such as a bracket that nothing closes
            host = urlsplit("")
        if host.hostname not in HOSTS:
            return _refused(f"This viewer is asked for as {' or '.join(HOSTS)}, and not as {given_host!r}.")
        if request.method not in (*READING, *WRITING):
            return _refused(f"{request.method} is nothing that this viewer does.", 405)
        if request.method in WRITING and request.headers.get("origin") != f"http://{host.netloc}":
            return _refused("Only a page of this viewer may send it something.")
        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            # One slash: what begins with two names another host.
            address = "/" + request.url.path.lstrip("/") + (f"?{urlencode(rest)}" if rest else "")
            answer = RedirectResponse(address, status_code=303)
            answer.set_cookie(self.cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if self._is_token(request.cookies.get(self.cookie, "")):
            return None
        return _refused(
            "This viewer answers those who know its token: open the address that `treetune view` printed,"
            " with all that stands behind `token=`."
        )

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _refused(words: str, status: int = 403) -> Response:
    return PlainTextResponse(words + "\n", status_code=status)
