"""A language model behind an OpenAI-compatible address: how it is reached, asked and not given up too
early."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, MinLen

log = logging.getLogger(__name__)

Message = tuple[Literal["user", "assistant"], str]
"""Who says it, and what. A conversation begins and ends with the user's."""

LONGEST_WAIT_S = 120.0
"""Between two attempts, whatever the endpoint asks for."""

SHOWN = 300
"""Characters of a refusal that are worth showing."""

_RETRIED = frozenset({408, 409, 425, 429})
_FOR_ALL = {
    401: "the key is wrong or missing",
    402: "the account has nothing left",
    403: "the key has no right to this model",
    404: "there is no such address or model",
    405: "this is no address of an OpenAI-compatible endpoint",
}
_OURS = (
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "stop",
    "stream",
    "n",
)
_TURN_END = "\n\nUser:"
SECRET_CHARACTERS = 8
"""A key of fewer is a placeholder, such as local servers take, and may be an ordinary word."""


class EndpointError(RuntimeError):
    """The endpoint will answer nothing more: the work has to stop. What was answered is kept."""


class Unanswered(Exception):
    """One request came to nothing, after all its attempts; others may not."""


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """An OpenAI-compatible endpoint.

    `base_url` ends where the API's own paths begin, mostly with ``/v1``. `api` is ``chat``
    (/chat/completions) or ``completions`` (/completions, for models without a chat template: the
    conversation becomes one text). The key is read from the environment variable called `api_key_variable`,
    and written nowhere; without a name none is sent. `temperature` null leaves it to the endpoint;
    `max_tokens` bounds an answer, thought included, and is sent under `max_tokens_key`. `extra` goes into
    every request as it is.

    At most `concurrency` requests are in flight, each for `timeout` s. A request that meets HTTP 429, 5xx,
    a broken connection, silence or what is no answer is sent up to `retries` times more, after `backoff` s,
    twice that, and so on, or after what the endpoint asks for. When `give_up_after` requests in a row have
    come to nothing, the work stops.
    """

    base_url: Annotated[str, MinLen(1)]
    model: Annotated[str, MinLen(1)]
    api: Literal["chat", "completions"] = "chat"
    api_key_variable: Annotated[str, MinLen(1)] | None = None
    concurrency: Annotated[int, Gt(0)] = 16
    timeout: Annotated[float, Gt(0)] = 900.0
    retries: Annotated[int, Ge(0)] = 5
    backoff: Annotated[float, Gt(0)] = 2.0
    give_up_after: Annotated[int, Gt(0)] = 8
    temperature: Annotated[float, Ge(0)] | None = None
    max_tokens: Annotated[int, Gt(0)] = 16384
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        except ValueError:
            wrong = True
        if wrong:
            raise ValueError(f"base_url is {self.base_url!r}: it should be like 'https://host/v1'")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "base_url holds more than an address: leave out names, passwords and what follows a ? or #;"
                " a key goes into the environment variable that api_key_variable names"
            )
        check_extra("extra", self.extra)

    def key(self) -> str | None:
        """The key from the environment. Raises ValueError, which doesn't show it."""
        name = self.api_key_variable
        if name is None:
            return None
        value = os.environ.get(name, "").strip()
        if not value:
            raise ValueError(
                f"endpoint.api_key_variable names {name}, which is not set in the environment: export"
                f" {name}=…, or set it to null for an endpoint that asks for no key"
            )
        if not value.isascii() or not value.isprintable() or " " in value:
            raise ValueError(f"what the environment variable {name} holds is no key: it has other characters")
        return value

    def body(self, messages: Sequence[Message], extra: Mapping[str, Any]) -> dict[str, Any]:
        """The request that asks for the next message."""
        body: dict[str, Any] = {"model": self.model, self.max_tokens_key: self.max_tokens}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.api == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            turns = [f"{role.capitalize()}:\n{text}" for role, text in messages]
            body |= {"prompt": "\n\n".join([*turns, "Assistant:\n"]), "stop": [_TURN_END]}
        return {**body, **self.extra, **extra}

    @property
    def url(self) -> str:
        path = "chat/completions" if self.api == "chat" else "completions"
        return f"{self.base_url.rstrip('/')}/{path}"


def check_extra(key: str, extra: Mapping[str, Any]) -> None:
    """Raises ValueError for what a request says anyway."""
    clash = [name for name in extra if name in _OURS]
    if clash:
        raise ValueError(
            f"{key} sets {', '.join(clash)}, which the other settings say or no answer could be read with"
        )


@dataclass(frozen=True)
class Reply:
    """An answer of the endpoint: its text, whether it came to its end, and what the endpoint says it used
    (None where it says nothing that could be true)."""

    text: str
    complete: bool
    input_tokens: int | None
    output_tokens: int | None


class Endpoint:
    """Sends requests. Use it as an asynchronous context manager.

    `stopping` says whether the work is to end: then nothing is tried again.
    """

    def __init__(self, settings: EndpointSettings, stopping: Callable[[], bool]) -> None:
        self.settings = settings
        self.failed_attempts = 0
        self._stopping = stopping
        self._key = settings.key()

    async def __aenter__(self) -> Endpoint:
        import aiohttp

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), trust_env=False, headers=headers
        )
        self._proxy = _proxy_for(self.settings.base_url)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def ask(self, body: Mapping[str, Any]) -> Reply:
        """Raises Unanswered after the last attempt, and EndpointError for what no request will get past."""
        attempts = self.settings.retries + 1
        for attempt in range(attempts):
            try:
                return await self._attempt(body)
            except _Again as failure:
                self.failed_attempts += 1
                reason, wait = str(failure), failure.wait
            if attempt + 1 == attempts or self._stopping():
                break
            wait = min(LONGEST_WAIT_S, max(wait, self.settings.backoff * 2**attempt))
            log.info("%s; attempt %d of %d, again in %.1f s", reason, attempt + 1, attempts, wait)
            await self._wait(wait)
        raise Unanswered(f"{self.settings.url}: {reason} ({attempt + 1} of {attempts} attempts)")

    async def _wait(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not self._stopping() and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left, 0.5))

    async def _attempt(self, body: Mapping[str, Any]) -> Reply:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=self.settings.timeout)
        try:
            async with self._session.post(
                self.settings.url, json=body, timeout=limit, allow_redirects=False, proxy=self._proxy
            ) as response:
                raw = await response.read()
        except TimeoutError as error:
            raise _Again(f"no answer in {self.settings.timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Again(self._safe(f"{type(error).__name__}: {error}")) from error
        status, text = response.status, self._safe(raw.decode(errors="replace"))
        if status in _FOR_ALL:
            key = self.settings.api_key_variable
            whose = f" (the key is that of {key})" if key else " (no key was sent: api_key_variable is null)"
            raise EndpointError(
                f"{self.settings.url} answered HTTP {status}: {_FOR_ALL[status]}{whose}: {text[:SHOWN]}"
            )
        if status in _RETRIED or status >= 500:
            raise _Again(f"HTTP {status}: {text[:SHOWN]}", _seconds(response.headers.get("Retry-After")))
        if status != 200:
            raise Unanswered(f"{self.settings.url} refused a request with HTTP {status}: {text[:SHOWN]}")
        return self._reply(text)

    def _reply(self, text: str) -> Reply:
        try:
            answer = json.loads(text)
            choice = answer["choices"][0]
            said = choice["message"]["content"] if self.settings.api == "chat" else choice["text"]
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise _Again(f"HTTP 200 with what is no answer: {text[:SHOWN]}") from error
        usage = answer.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        return Reply(
            # A refusal and an answer that is all thought have no content.
            text=said if isinstance(said, str) else "",
            complete=choice.get("finish_reason") != "length",
            input_tokens=_count(usage.get("prompt_tokens")),
            output_tokens=_count(usage.get("completion_tokens")),
        )

    def _safe(self, text: str) -> str:
        """Without the key: endpoints like to quote it."""
        return text.replace(self._key, "***") if self._key and len(self._key) >= SECRET_CHARACTERS else text


class _Again(Exception):
    """An attempt failed in a way that the next one may not. `wait`: the endpoint asks for so many seconds."""

    def __init__(self, what: str, wait: float = 0.0) -> None:
        super().__init__(what)
        self.wait = wait


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**8 else None


def _seconds(value: str | None) -> float:
    """Of a Retry-After; its other form, a date, is not worth a clock that agrees with ours."""
    return float(value) if value is not None and value.strip().isdigit() else 0.0


def _proxy_for(base_url: str) -> str | None:
    """The environment's proxy, and none for this machine."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return (
        None if local or urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(parts.scheme)
    )
