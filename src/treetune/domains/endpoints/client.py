"""Sends requests to an endpoint: again where that may help, and no longer where it won't."""

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
from treetune.domains.endpoints.settings import Asking, EndpointSettings, Place
from treetune.exceptions import EndpointError, RequestRefused, Unanswered

log = logging.getLogger(f"treetune.{__name__}")  # a run logs what is below "treetune"

LONGEST_WAIT_S = 120.0
"""Most seconds between two attempts, whatever the endpoint asks for."""

SHOWN = 300
"""Characters of a refusal that are worth showing."""

SECRET_CHARACTERS = 8
"""A key of fewer is a placeholder, such as local servers take, and may be an ordinary word."""


@dataclass(frozen=True)
class EndpointReply:
    """An answer of the endpoint: its text, whether it came to its end, what the endpoint says it used (None
    where it says nothing that could be true), and why a whole answer has no text, where it has none."""

    text: str
    complete: bool
    input_tokens: int | None
    output_tokens: int | None
    why_empty: str | None = None


class EndpointClient:
    """Sends requests. Use it as an asynchronous context manager.

    `stopping` says whether the work is to end: then nothing is tried again. `place` says where the model is
    whenever a request is sent, and may wait for it, in a thread: a server that is started anew has another
    address. What it raises is an attempt that failed.
    """

    def __init__(
        self,
        settings: Asking,
        place: Place | Callable[[], Place],
        stopping: Callable[[], bool],
        tell: Callable[[str], None] = log.info,
    ) -> None:
        """`tell` is given a line about each attempt that failed and is made again."""
        self.settings, self._tell = settings, tell
        self.failed_attempts = 0
        self._place = place
        self._stopping = stopping

    @staticmethod
    def of(settings: EndpointSettings, stopping: Callable[[], bool]) -> EndpointClient:
        """Raises ValueError where the key isn't there."""
        return EndpointClient(settings, settings.place(), stopping)

    async def __aenter__(self) -> EndpointClient:
        import aiohttp

        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def ask(self, body: Mapping[str, Any], tried: list[Place] | None = None) -> EndpointReply:
        """Raises Unanswered after the last attempt, and EndpointError for what no request will get past.
        `tried` is given the place of each attempt when it begins."""
        attempts = self.settings.retries + 1
        for attempt in range(attempts):
            try:
                place = self._place if isinstance(self._place, Place) else await self._where(self._place)
                if tried is not None:
                    tried.append(place)
                return await self._attempt(body, place)
            except _AttemptFailed as failure:
                self.failed_attempts += 1
                reason, wait = str(failure), failure.wait
            if attempt + 1 == attempts or self._stopping():
                break
            wait = min(LONGEST_WAIT_S, max(wait, self.settings.backoff * 2**attempt))
            self._tell(f"{reason}; attempt {attempt + 1} of {attempts}, again in {wait:.1f} s")
            resume = asyncio.get_running_loop().time() + wait
            while not self._stopping() and (remaining := resume - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(min(remaining, 0.5))
        raise Unanswered(f"{reason} ({attempt + 1} of {attempts} attempts)")

    async def _where(self, place: Callable[[], Place]) -> Place:
        try:
            return await asyncio.to_thread(place)
        except RuntimeError as error:
            raise _AttemptFailed(str(error)) from error

    async def _attempt(self, body: Mapping[str, Any], place: Place) -> EndpointReply:
        import aiohttp

        url = self.settings.url_below(place.url)
        headers = {"Authorization": f"Bearer {place.key}"} if place.key else {}
        limit = aiohttp.ClientTimeout(total=self.settings.timeout)
        try:
            async with self._session.post(
                url,
                json=body,
                headers=headers,
                timeout=limit,
                allow_redirects=False,
                proxy=_proxy_for(place.url),
            ) as response:
                raw = await response.read()
        except TimeoutError as error:
            raise _AttemptFailed(f"{url}: no answer in {self.settings.timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _AttemptFailed(f"{url}: {_safe(f'{type(error).__name__}: {error}', place)}") from error
        status, text = response.status, _safe(raw.decode(errors="replace"), place)
        classified = read_reply(status, text, is_chat=self.settings.api == "chat")
        if classified.kind in ("answered", "cut_off", "empty"):
            return EndpointReply(
                text=classified.text,
                complete=classified.kind != "cut_off",
                input_tokens=classified.input_tokens,
                output_tokens=classified.output_tokens,
                why_empty=classified.why if classified.kind == "empty" else None,
            )
        status_and_text = f"HTTP {status}: {text[:SHOWN]}"
        if status == 200:
            status_and_text = f"HTTP 200, and {classified.why}: {text[:SHOWN]}"
        if classified.kind == "refused_all":
            key = place.key_of
            key_note = (
                f" (the key is that of {key})" if key else " (no key was sent: api_key_variable is null)"
            )
            raise EndpointError(f"{url} answered HTTP {status}: {classified.why}{key_note}: {text[:SHOWN]}")
        if classified.kind == "refused":
            raise RequestRefused(f"{url} refused a request with {status_and_text}")
        raise _AttemptFailed(f"{url}: {status_and_text}", wait_asked_for(response.headers, datetime.now(UTC)))


class _AttemptFailed(Exception):
    """An attempt failed in a way that the next one may not. `wait`: the endpoint asks for so many seconds."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def _safe(text: str, place: Place) -> str:
    """Removes the key: endpoints like to quote it."""
    return text.replace(place.key, "***") if place.key and len(place.key) >= SECRET_CHARACTERS else text


def wait_asked_for(headers: Mapping[str, str], now: datetime) -> float:
    """Returns the seconds that an endpoint asks to wait: what `Retry-After` says, in seconds
    (``Retry-After: 20``) or as a date (``Retry-After: Wed, 21 Oct 2026 07:28:00 GMT``); 0 where it says
    nothing that can be read.

    A date is held against the reply's own `Date`, since the two machines' clocks may differ, and against
    `now` where the reply has none.
    """
    for name, unit in (("Retry-After-Ms", 0.001), ("Retry-After", 1.0)):
        text = (headers.get(name) or "").strip()
        if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
            return float(text) * unit
    until = _http_date(headers.get("Retry-After"))
    if until is None:
        return 0.0
    sent = _http_date(headers.get("Date")) or now
    return max(0.0, (until - sent).total_seconds())


def _http_date(text: str | None) -> datetime | None:
    """Reads any of the three forms that HTTP knows; None for another text. All are in UTC."""
    try:
        date = parsedate_to_datetime(text or "")
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)


def _proxy_for(base_url: str) -> str | None:
    """Returns the environment's proxy, and none for this machine."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if local or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)
