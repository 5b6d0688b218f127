"""Settings of requests to a language model with an OpenAI-compatible API."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, MinLen
from typing_extensions import override

EndpointMessage = tuple[Literal["system", "user", "assistant"], str]
"""A role and a text: ``("user", "2 + 2 = ?")``. The last message of a conversation is the user's."""

_ENTRIES_OF_OTHER_SETTINGS = (
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens"),
    *("temperature", "stop", "stream", "n"),
)
"""Entries of requests that `extra` must not set."""
_NAME_OF_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
"""Usual names of environment variables. Keys don't match, because they have small letters, hyphens, or
both."""

_BEGINNING_OF_NEXT_TURN = "\n\nUser:"
"""The beginning of the user's next message in a conversation that is written as one text."""


TOKENS_PER_PRICE = 1_000_000
"""The number of tokens that a price is for."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars per million tokens."""

    input: Annotated[float, Ge(0)]
    """Dollars per million tokens of requests."""
    output: Annotated[float, Ge(0)]
    """Dollars per million tokens of answers."""

    def dollars(self, input_tokens: int, output_tokens: int) -> float:
        return (input_tokens * self.input + output_tokens * self.output) / TOKENS_PER_PRICE


@dataclass(frozen=True)
class EndpointAddress:
    """The address of an endpoint, with its key.

    Example: ``EndpointAddress("https://api.openai.com/v1", key="sk-…", key_variable="OPENAI_API_KEY")``.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    key_variable: str | None = None
    """The name of the environment variable that holds the key, for messages."""


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """Settings of requests to a language model with an OpenAI-compatible API, without the model's address.

    A request is sent again after HTTP 429 or 5xx, a broken connection, a timeout, or a reply that isn't an
    answer.
    """

    api: Literal["chat", "completions"] = "chat"
    """The path of requests: ``chat`` is /chat/completions, and ``completions`` is /completions, for models
    without a chat template. The conversation then becomes one text."""
    concurrency: Annotated[int, Gt(0)] = 16
    """The most requests in flight."""
    timeout: Annotated[float, Gt(0)] = 900.0
    """Seconds for one request."""
    retries: Annotated[int, Ge(0)] = 5
    """The most times that a failed request is sent again."""
    backoff: Annotated[float, Gt(0)] = 2.0
    """Seconds before the first retry. The pause doubles with each further retry. If the endpoint asks for a
    longer pause, that applies."""
    give_up_after: Annotated[int, Gt(0)] = 8
    """The number of requests in a row that fail, with all their retries, before the endpoint counts as down.
    Then a pipeline stops, and a run continues without its judge."""
    temperature: Annotated[float, Ge(0)] | None = None
    """The sampling temperature; null: the endpoint's default."""
    max_tokens: Annotated[int, Gt(0)] = 16384
    """The most tokens of an answer, including its thought."""
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The name of the entry with `max_tokens` in a request."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further entries of every request."""

    def __post_init__(self) -> None:
        check_extra("extra", self.extra)

    def request_body(
        self, model: str, messages: Sequence[EndpointMessage], extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the body of a request to `model` for the message that follows `messages`. The entries of
        `extra` are added to those of the setting `extra`."""
        body: dict[str, Any] = {"model": model, self.max_tokens_key: self.max_tokens}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.api == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            # "User:\n2 + 2 = ?\n\nAssistant:\n". The stop string ends a model that would continue with the
            # user's next message.
            turns = [f"{role.capitalize()}:\n{text}" for role, text in messages]
            body |= {"prompt": "\n\n".join([*turns, "Assistant:\n"]), "stop": [_BEGINNING_OF_NEXT_TURN]}
        return {**body, **self.extra, **extra}

    def url_below(self, base_url: str) -> str:
        path = "chat/completions" if self.api == "chat" else "completions"
        return f"{base_url.rstrip('/')}/{path}"


@dataclass(frozen=True, kw_only=True)
class EndpointSettings(RequestSettings):
    """An OpenAI-compatible endpoint. Its key is read from the environment, and is never written to a file."""

    base_url: Annotated[str, MinLen(1)]
    """The address before the API's own paths, usually with ``/v1`` at its end."""
    model: Annotated[str, MinLen(1)]
    """The model's name at the endpoint."""
    api_key_variable: Annotated[str, MinLen(1)] | None = None
    """The environment variable with the key; null: no key is sent."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parts = urlsplit(self.base_url)
            is_wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        except ValueError:  # e.g. a port that isn't a number
            is_wrong = True
        if is_wrong:
            value = repr(self.base_url)
            if any(mark in self.base_url for mark in "@?#"):
                value = "not an address (it is not shown, because it may contain a password or a key)"
            raise ValueError(f"base_url is {value}: it should be like 'https://host/v1'")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "base_url contains more than an address: leave out names, passwords and everything after a ?"
                " or #; a key belongs into the environment variable that api_key_variable names"
            )
        name = self.api_key_variable
        if name is not None and not _NAME_OF_VARIABLE.fullmatch(name):
            raise ValueError(
                "api_key_variable should be the name of an environment variable, in capital letters, such as"
                " 'OPENAI_API_KEY'. Its value is not shown, because it may be the key itself, which belongs"
                " into the environment (export OPENAI_API_KEY=…) and not into a file"
            )

    def key(self) -> str | None:
        """Returns the key from the environment; None if `api_key_variable` is None.

        Raises ValueError if the variable isn't set, or doesn't contain a key. The message doesn't show its
        value.
        """
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
            raise ValueError(
                f"the environment variable {name} doesn't contain a key: keys have only printable ASCII"
                " characters, and no spaces"
            )
        return value

    def body(self, messages: Sequence[EndpointMessage], extra: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the body of a request for the message that follows `messages` (see `question`)."""
        return self.request_body(self.model, messages, extra)

    @property
    def url(self) -> str:
        return self.url_below(self.base_url)

    def why_unreachable(self, seconds: float = 1.0) -> str | None:
        """Tries to connect to the endpoint, without a request. Returns None if this succeeds within
        `seconds`, and otherwise the reason why not."""
        import socket
        import threading

        parts = urlsplit(self.base_url)
        address = parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
        results: list[str | None] = []

        def connect() -> None:
            """Adds None to `results` if the connection succeeds, and otherwise the reason why not."""
            try:
                socket.create_connection(address, seconds).close()
                results.append(None)
            except OSError as error:
                results.append(error.strerror or str(error))

        # In a thread, because resolving an unknown name may take longer than the timeout of the connection.
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(seconds)
        return results[0] if results else f"no connection within {seconds:g} s"

    def address(self) -> EndpointAddress:
        """Returns the address with the key. Raises the same ValueError as `key`."""
        return EndpointAddress(self.base_url, self.key(), self.api_key_variable)


def check_extra(key: str, extra: Mapping[str, Any]) -> None:
    """Raises ValueError for entries of requests that `extra` must not set."""
    clash = [name for name in extra if name in _ENTRIES_OF_OTHER_SETTINGS]
    if clash:
        raise ValueError(
            f"{key} sets {', '.join(clash)}, which other settings determine, or with which answers can't be"
            " read: leave it out"
        )
