"""Sends requests to an endpoint, and sends them again after failures that may be temporary."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from treetune.domains.endpoints.replies import read_reply
from treetune.domains.endpoints.settings import EndpointAddress, EndpointSettings, RequestSettings
from treetune.exceptions import EndpointError, RequestRefused, Unanswered

log = logging.getLogger(f"treetune.{__name__}")  # a run logs what is below "treetune"

LONGEST_WAIT_S = 120.0
"""The longest time between two attempts, even if the endpoint asks for more."""

REFUSAL_CHARACTERS = 300
"""The number of characters of an endpoint's refusal that messages show."""

SECRET_CHARACTERS = 8
"""The number of characters from which a key is a secret and is removed from messages. A shorter one is a
placeholder for local servers, and may be an ordinary word."""


@dataclass(frozen=True)
class EndpointReply:
    """An answer of the endpoint.

    Example: ``EndpointReply(text="Verdict: correct", complete=True, input_tokens=212, output_tokens=5)``.
    """

    text: str
    complete: bool
    """Whether the answer wasn't cut off."""
    input_tokens: int | None
    """The tokens of the request, as the endpoint counts them; None if it reports no plausible number."""
    output_tokens: int | None
    """The tokens of the answer, as the endpoint counts them; None if it reports no plausible number."""
    why_empty: str | None = None
    """The reason why a complete answer has no text; None if it has one, or is cut off."""


class EndpointClient:
    """Sends requests. Use it as an asynchronous context manager.

    After a failed attempt, the request is sent again up to `retries` times, with growing pauses::

        ask ──► _attempt ──► answered, cut off or empty ──► returns an EndpointReply
         ▲         ├──► this request is refused ──────────► raises RequestRefused
         │         ├──► all requests are refused ─────────► raises EndpointError
         └─ pause ─┴──► any other failure ──(last attempt)► raises Unanswered
    """

    def __init__(
        self,
        settings: RequestSettings,
        address: EndpointAddress | Callable[[], EndpointAddress],
        is_stopping: Callable[[], bool],
        report: Callable[[str], None] = log.info,
    ) -> None:
        """Args:
        settings: The settings of requests.
        address: The address, or a function that is called before each attempt and returns it, since a
            restarted server has another address. The function is called in a thread, and may wait. If it
            raises RuntimeError, the attempt has failed.
        is_stopping: Returns whether the work has to end. Then no request is sent again.
        report: Called with a line about each failed attempt after which the request is sent again.
        """
        self.settings = settings
        self.failed_attempts = 0
        self._report = report
        self._address = address
        self._is_stopping = is_stopping

    @staticmethod
    def of(settings: EndpointSettings, is_stopping: Callable[[], bool]) -> EndpointClient:
        """Returns a client of an endpoint. Raises ValueError if the key is missing."""
        return EndpointClient(settings, settings.address(), is_stopping)

    async def __aenter__(self) -> EndpointClient:
        import aiohttp

        # The number of connections is not limited here, because the callers limit their requests
        # (`concurrency`). aiohttp must not look for proxies in the environment, because `_proxy_for` does.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def ask(
        self, body: Mapping[str, Any], tried_addresses: list[EndpointAddress] | None = None
    ) -> EndpointReply:
        """Sends a request and returns the answer. The address of each attempt is appended to
        `tried_addresses`.

        Raises:
            Unanswered: All attempts have failed.
            RequestRefused: The endpoint refuses this request.
            EndpointError: The endpoint refuses all requests.
        """
        attempts = self.settings.retries + 1
        for attempt in range(attempts):
            try:
                address = (
                    self._address
                    if isinstance(self._address, EndpointAddress)
                    else await self._find_address(self._address)
                )
                if tried_addresses is not None:
                    tried_addresses.append(address)
                return await self._attempt(body, address)
            except _AttemptFailed as failure:
                self.failed_attempts += 1
                reason, wait = str(failure), failure.wait
            if attempt + 1 == attempts or self._is_stopping():
                break
            wait = min(LONGEST_WAIT_S, max(wait, self.settings.backoff * 2**attempt))
            self._report(f"{reason}; attempt {attempt + 1} of {attempts}, again in {wait:.1f} s")
            await self._pause(wait)
        raise Unanswered(f"{reason} ({attempt + 1} of {attempts} attempts)")

    async def _pause(self, seconds: float) -> None:
        """Waits for so many seconds, or until the work has to end."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self._is_stopping() and loop.time() < end:
            # It looks twice a second whether the work has to end.
            await asyncio.sleep(min(end - loop.time(), 0.5))

    async def _find_address(self, address: Callable[[], EndpointAddress]) -> EndpointAddress:
        """Calls the function for the address in a thread, since it may wait for a server to restart."""
        try:
            return await asyncio.to_thread(address)
        except RuntimeError as error:
            raise _AttemptFailed(str(error)) from error

    async def _attempt(self, body: Mapping[str, Any], address: EndpointAddress) -> EndpointReply:
        """Sends a request once. Raises _AttemptFailed if another attempt may succeed, and RequestRefused or
        EndpointError like `ask`."""
        import aiohttp

        # The endpoint's texts may quote the key. `_hide_key` removes the key, since messages quote the texts.
        url = self.settings.url_below(address.url)
        headers = {"Authorization": f"Bearer {address.key}"} if address.key else {}
        limit = aiohttp.ClientTimeout(total=self.settings.timeout)
        try:
            async with self._session.post(
                url,
                json=body,
                headers=headers,
                timeout=limit,
                allow_redirects=False,  # `read_reply` reports a redirect as a refusal
                proxy=_proxy_for(address.url),
            ) as response:
                raw = await response.read()
        except TimeoutError as error:
            raise _AttemptFailed(f"{url}: no answer in {self.settings.timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _AttemptFailed(
                f"{url}: {_hide_key(f'{type(error).__name__}: {error}', address)}"
            ) from error
        status, text = response.status, _hide_key(raw.decode(errors="replace"), address)
        classified = read_reply(status, text, is_chat=self.settings.api == "chat")
        if classified.kind in ("answered", "cut_off", "empty"):
            return EndpointReply(
                text=classified.text,
                complete=classified.kind != "cut_off",
                input_tokens=classified.input_tokens,
                output_tokens=classified.output_tokens,
                why_empty=classified.why if classified.kind == "empty" else None,
            )
        status_and_text = f"HTTP {status}: {text[:REFUSAL_CHARACTERS]}"
        if status == 200:
            status_and_text = f"HTTP 200, and {classified.why}: {text[:REFUSAL_CHARACTERS]}"
        if classified.kind == "refused_all":
            key_note = " (no key was sent: api_key_variable is null)"
            if address.key_variable:  # the name of the environment variable that has the key
                key_note = f" (the key is that of {address.key_variable})"
            raise EndpointError(
                f"{url} answered HTTP {status}: {classified.why}{key_note}: {text[:REFUSAL_CHARACTERS]}"
            )
        if classified.kind == "refused":
            raise RequestRefused(f"{url} refused a request with {status_and_text}")
        raise _AttemptFailed(f"{url}: {status_and_text}", requested_wait(response.headers, datetime.now(UTC)))


class _AttemptFailed(Exception):
    """An attempt failed, and another one may succeed. `wait` are the seconds that the endpoint asks to
    wait."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def _hide_key(text: str, address: EndpointAddress) -> str:
    """Removes the key from a text of the endpoint, which may quote it."""
    return text.replace(address.key, "***") if address.key and len(address.key) >= SECRET_CHARACTERS else text


def requested_wait(headers: Mapping[str, str], now: datetime) -> float:
    """Returns the seconds that an endpoint asks to wait; 0 if its reply has no header about this that can be
    read.

    `Retry-After` has seconds (``Retry-After: 20``) or a date (``Retry-After: Wed, 21 Oct 2026 07:28:00
    GMT``). A date is compared with the reply's own `Date`, since the clocks of the two machines may differ.
    If the reply has no `Date`, the date is compared with `now`.
    """
    for name, unit in (("Retry-After-Ms", 0.001), ("Retry-After", 1.0)):
        text = (headers.get(name) or "").strip()
        if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
            return float(text) * unit
    retry_date = _http_date(headers.get("Retry-After"))
    if retry_date is None:
        return 0.0
    reply_date = _http_date(headers.get("Date")) or now
    return max(0.0, (retry_date - reply_date).total_seconds())


def _http_date(text: str | None) -> datetime | None:
    """Reads a date in one of HTTP's three forms, which are all in UTC; None for any other text."""
    if text is None:
        return None
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    # One of the forms doesn't name the time zone: "Wed Oct 21 07:28:00 2026".
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)


def _proxy_for(base_url: str) -> str | None:
    """Returns the proxy that the environment sets for an address. Returns None if there is none, and for
    addresses of this machine."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, and not a number
        is_local = host == "localhost"
    if is_local or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)
