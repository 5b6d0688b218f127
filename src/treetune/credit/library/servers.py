"""Continues answers on vLLM servers that the caller has started, and whose weights the caller updates.

    "http://127.0.0.1:8000", a list of addresses,
    or {"type": "plain_vllm", "addresses": [...]}  ──read_servers──>  `CallersServers`
                                                   ──open_servers──>  an `Engine` for one call

The library loads no weights into the servers. Each call of the library connects anew, since a trainer gives
its servers new weights between two calls: the prefixes that they have cached for an earlier call may then be
those of older weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from treetune.config.build import build
from treetune.engine.addressed import ANSWER_TIMEOUT_S
from treetune.engine.base import Engine, EngineLaunch
from treetune.engine.client import Address
from treetune.engine.engine import start_plain_vllm
from treetune.engine.plain_client import SERVE_COMMAND, PlainClient
from treetune.engine.settings import EngineSettings, PlainVllmSettings
from treetune.exceptions import EngineError, ServerFailure, TemporaryFailure
from treetune.vocabulary import TextCodec, TokenIds

URL_SCHEMES = ("http://", "https://")

PATH_WITHOUT_WEIGHTS = Path(os.devnull)
"""Stands for the folder of weights that an engine usually loads. Nothing is read from it."""

MOST_COMPARED_TOKENS = 64
"""The largest number of tokens of an answer that are compared. The server encodes their text, to compare its
tokenizer with the caller's."""
EXCERPT_CHARACTERS = 40
"""The largest number of characters of this text in a message."""


@dataclass(frozen=True, kw_only=True)
class CallersServers(PlainVllmSettings):
    """The servers of a caller of the library. They keep their weights."""

    key_path: ClassVar[str] = "engine"


def read_servers(engine: Any) -> CallersServers | None:
    """Returns the settings of servers that a caller names by their addresses; None for other engines.

    Args:
        engine: An address, a list of addresses, a configuration such as ``{"type": "plain_vllm",
            "addresses": ["http://127.0.0.1:8000"], "key_variable": "VLLM_API_KEY"}``, or a
            `PlainVllmSettings`.

    Raises:
        ConfigError: The configuration is wrong.
        ValueError: An address is wrong, or it is the configuration of another engine.
    """
    if is_address(engine):
        return CallersServers(addresses=(_without_slash(engine),), weight_transfer="none")
    if isinstance(engine, list | tuple):
        not_addresses = [address for address in engine if not is_address(address)]
        if not_addresses:
            raise ValueError(
                f"engine is a list with {_hide_secret(not_addresses[0])}: list addresses of servers with the"
                " same model, such as 'http://127.0.0.1:8000'"
            )
        return CallersServers(addresses=tuple(map(_without_slash, engine)), weight_transfer="none")
    settings = engine
    if isinstance(engine, Mapping):
        settings = build(EngineSettings, dict(engine), key=("engine",))
        if not isinstance(settings, PlainVllmSettings):
            raise ValueError(
                f"engine has the type {settings.registered_name()!r}: give {{'type': 'plain_vllm',"
                " 'addresses': [...]}, or a folder with a model"
            )
    if not isinstance(settings, PlainVllmSettings):
        return None
    if settings.weight_transfer == "file":
        raise ValueError(
            "engine.weight_transfer is 'file', and the library loads no weights into servers: leave it out"
        )
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    values["weight_transfer"] = "none"  # in place of ``auto``, which would look for a way to load weights
    return CallersServers(**values)


def is_address(engine: Any) -> bool:
    return isinstance(engine, str) and engine.startswith(URL_SCHEMES)


def _hide_secret(entry: Any) -> str:
    """Returns the description of an entry for a message. An address with a user name or a query is not shown,
    since these may be secret."""
    is_secret = isinstance(entry, str) and any(mark in entry for mark in "@?#")
    return "an address that is not shown here" if is_secret else repr(entry)


def _without_slash(address: str) -> str:
    return address.rstrip("/")


@contextmanager
def open_servers(
    settings: CallersServers,
    codec: TextCodec,
    special_ids: Mapping[str, int],
    example_ids: TokenIds,
    context_length: int,
    seconds_left: float | None,
) -> Iterator[Engine]:
    """Connects to servers for one call. When the block ends, only the connection is closed, and the servers
    continue to run.

    Args:
        settings: The servers.
        codec: The codec of the caller's tokenizer.
        special_ids: The ids of the tokenizer's special tokens, by their texts.
        example_ids: The tokens of an answer. The servers' tokenizer must encode their text as the codec does.
        context_length: The largest number of tokens of prompt and answer together.
        seconds_left: The seconds until the call's deadline. None: there is no deadline.

    Raises:
        EngineError: A server can't be reached or used.
        ValueError: The API key or the certificate can't be read.
    """
    timeout = ANSWER_TIMEOUT_S if seconds_left is None else min(ANSWER_TIMEOUT_S, seconds_left)
    _check_servers(settings, codec, example_ids, timeout)
    launch = EngineLaunch(
        weights=PATH_WITHOUT_WEIGHTS,
        logs=Path(),  # unused: servers that run already have their own logs
        seed=0,  # each request has a seed of its own
        context_length=context_length,
        device="cuda",  # the servers' device, on which the precision is bfloat16 unless `dtype` is set
        end_ids=codec.end_ids,
        special_ids=special_ids,
    )
    engine = start_plain_vllm(settings, launch)
    try:
        yield engine
    finally:
        engine.close()


def _check_servers(settings: CallersServers, codec: TextCodec, example_ids: TokenIds, timeout: float) -> None:
    """Raises EngineError if nothing listens at an address, or if a server can't be used for the call.

    Later in a call the engine waits for a server that doesn't answer. At the beginning of a call, the address
    is more likely wrong, so an address at which nothing listens is an error.
    """
    key = settings.api_key()
    client = PlainClient(settings)
    try:
        for url in settings.addresses:
            address = Address(url, epoch=0, key=key)  # `epoch` counts the server's restarts
            try:
                # `settings.servers` are the servers behind a router, whose address is in `addresses`.
                facts = client.meet(address, timeout, is_router=settings.servers is not None)
                _compare_tokenizers(client, address, facts.name, codec, example_ids, timeout)
            except TemporaryFailure as failure:
                if _is_unreachable(failure):  # other failures are left to the engine, as below
                    raise EngineError(
                        f"nothing listens at {url} ({failure.__cause__}): start a server there, such as"
                        f" `{SERVE_COMMAND}`, or correct the address in engine"
                    ) from failure
            except ServerFailure:
                pass  # The server is busy, or its reply is wrong. The engine asks again, and reports it.
    finally:
        client.close()


def _is_unreachable(failure: TemporaryFailure) -> bool:
    """Returns whether no program accepts connections at an address, or no machine has its name."""
    import aiohttp

    return isinstance(failure.__cause__, aiohttp.ClientConnectorError)


def _compare_tokenizers(
    client: PlainClient,
    address: Address,
    model: str,
    codec: TextCodec,
    example_ids: TokenIds,
    timeout: float,
) -> None:
    """Raises EngineError if the server's tokenizer isn't the caller's.

    With another tokenizer, the server would continue other texts than those of the answers, and graders would
    read other texts than the server has sampled.
    """
    # The cut after `MOST_COMPARED_TOKENS` may split a character, whose first bytes are decoded as U+FFFD.
    text = codec.decode(example_ids[:MOST_COMPARED_TOKENS]).rstrip("\ufffd")
    tokens_of_server = client.tokenize(address, model, text, timeout) if text else None
    if tokens_of_server is None:
        return  # there is nothing to compare: no text, or a server that doesn't tokenize
    tokens_of_codec = list(map(int, codec.encode(text)))
    if tokens_of_server == tokens_of_codec:
        return
    excerpt = text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "…"
    raise EngineError(
        f"the server at {address.url} has the model {model!r}, whose tokenizer is not the given one: it"
        f" encodes {excerpt!r} as {_describe_ids(tokens_of_server)}, and the given one as"
        f" {_describe_ids(tokens_of_codec)}. Give the tokenizer of the server's model, or the"
        " address of a server that has the policy"
    )


def _describe_ids(token_ids: Sequence[int]) -> str:
    """Returns the first token ids, for a message."""
    return f"{list(token_ids[:8])}" + (" …" if len(token_ids) > 8 else "")
