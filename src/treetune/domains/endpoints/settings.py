"""A language model behind an OpenAI-compatible address: where it is, and how it is asked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, MinLen
from typing_extensions import override

Message = tuple[Literal["system", "user", "assistant"], str]
"""Who says it, and what. A conversation ends with the user's."""

_OURS = (
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens"),
    *("temperature", "stop", "stream", "n"),
)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
"""Names as people choose them. Keys have small letters, hyphens, or both."""

_TURN_END = "\n\nUser:"


PER = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars per million tokens that go in and that come out."""

    input: Annotated[float, Ge(0)]
    """Dollars per million tokens of requests."""
    output: Annotated[float, Ge(0)]
    """Dollars per million tokens of answers."""

    def dollars(self, input_tokens: int, output_tokens: int) -> float:
        return (input_tokens * self.input + output_tokens * self.output) / PER


@dataclass(frozen=True)
class Place:
    """The address to which a request is sent, and the key that goes with it. `key_of` says where the key
    came from."""

    url: str
    key: str | None = field(default=None, repr=False)
    key_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Settings of requests to a language model behind an OpenAI-compatible API, wherever it is.

    A request that meets HTTP 429, 5xx, a broken connection, silence or what is no answer is sent again.
    """

    api: Literal["chat", "completions"] = "chat"
    """The path /chat/completions, or /completions for models without a chat template: the conversation
    becomes one text."""
    concurrency: Annotated[int, Gt(0)] = 16
    """Requests in flight at most."""
    timeout: Annotated[float, Gt(0)] = 900.0
    """Seconds for one request."""
    retries: Annotated[int, Ge(0)] = 5
    """How often a request that failed is sent again."""
    backoff: Annotated[float, Gt(0)] = 2.0
    """Seconds before the first retry, twice as many before the next, and so on, or as many as the endpoint
    asks for."""
    give_up_after: Annotated[int, Gt(0)] = 8
    """When so many requests in a row have come to nothing, the endpoint counts as down: a pipeline stops,
    a run goes on without its judge."""
    temperature: Annotated[float, Ge(0)] | None = None
    """The sampling temperature; null leaves it to the endpoint."""
    max_tokens: Annotated[int, Gt(0)] = 16384
    """Tokens of an answer at most, thought included."""
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The name under which `max_tokens` is sent."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further entries of every request, sent as they are."""

    def __post_init__(self) -> None:
        check_extra("extra", self.extra)

    def question(self, model: str, messages: Sequence[Message], extra: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the request that asks `model` for the next message."""
        body: dict[str, Any] = {"model": model, self.max_tokens_key: self.max_tokens}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.api == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            turns = [f"{role.capitalize()}:\n{text}" for role, text in messages]
            body |= {"prompt": "\n\n".join([*turns, "Assistant:\n"]), "stop": [_TURN_END]}
        return {**body, **self.extra, **extra}

    def url_below(self, base_url: str) -> str:
        path = "chat/completions" if self.api == "chat" else "completions"
        return f"{base_url.rstrip('/')}/{path}"


@dataclass(frozen=True, kw_only=True)
class EndpointSettings(Asking):
    """An OpenAI-compatible endpoint.

    The key is read from the environment, and written nowhere.
    """

    base_url: Annotated[str, MinLen(1)]
    """The address, up to where the API's own paths begin, mostly with ``/v1``."""
    model: Annotated[str, MinLen(1)]
    """The model's name there."""
    api_key_variable: Annotated[str, MinLen(1)] | None = None
    """The environment variable with the key; null: none is sent."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
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
        name = self.api_key_variable
        if name is not None and not _VARIABLE.fullmatch(name):
            raise ValueError(
                "api_key_variable should be the name of an environment variable, in capital letters, such as"
                " 'OPENAI_API_KEY'. What it says is not shown here: it may be the key itself, which belongs"
                " into the environment (export OPENAI_API_KEY=…) and into no file"
            )

    def key(self) -> str | None:
        """Returns the key from the environment. Raises ValueError, which doesn't show it."""
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
        """Writes the request that asks for the next message."""
        return self.question(self.model, messages, extra)

    @property
    def url(self) -> str:
        return self.url_below(self.base_url)

    def unreachable(self, seconds: float = 1.0) -> str | None:
        """Says why nothing can be sent there now, as far as a connection says, which may take so long;
        None where it is taken. Nothing is asked."""
        import socket
        import threading

        parts = urlsplit(self.base_url)
        address = parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
        results: list[str | None] = []

        def look() -> None:
            try:
                socket.create_connection(address, seconds).close()
                results.append(None)
            except OSError as error:
                results.append(error.strerror or str(error))

        # A name that nobody knows can take the resolver longer than any timeout of a connection.
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(seconds)
        return results[0] if results else f"no connection within {seconds:g} s"

    def place(self) -> Place:
        """Raises ValueError as `key` does."""
        return Place(self.base_url, self.key(), self.api_key_variable)


def check_extra(key: str, extra: Mapping[str, Any]) -> None:
    """Raises ValueError for what a request says anyway."""
    clash = [name for name in extra if name in _OURS]
    if clash:
        raise ValueError(
            f"{key} sets {', '.join(clash)}, which the other settings say or no answer could be read with"
        )
