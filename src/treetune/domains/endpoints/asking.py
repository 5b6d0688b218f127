"""Asks a language model each question only once, and keeps the answers, which are paid for, in a journal."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treetune.domains.endpoints.client import EndpointClient
from treetune.domains.endpoints.settings import EndpointAddress
from treetune.store.journal import Journal


@dataclass(frozen=True)
class AnsweredRequest:
    """A request with its answer, as it is written to the journal."""

    key: str
    """The hash of the request."""
    step: str
    """The purpose of the request, e.g. ``judge``."""
    text: str
    """The answer."""
    complete: bool
    """Whether the answer wasn't cut off."""
    input_tokens: int
    output_tokens: int
    estimated: bool
    """Whether `input_tokens`, `output_tokens` or both are estimates, since the endpoint didn't report
    them."""


class AnswerJournal:
    """A journal of answers, in the file `path`, or in memory if that is None. Answers in
    `other_files` are found, too.

    Only one process at a time can open the file. Opening it raises ValueError while another process has it
    open. `count_answer` is called for every answer that is already in the journal. Rows that aren't answers
    are ignored. Safe to use from several threads.
    """

    def __init__(
        self,
        path: Path | None,
        count_answer: Callable[[AnsweredRequest], None] | None = None,
        other_files: Sequence[Path] = (),
    ) -> None:
        self._memory: dict[str, AnsweredRequest] = {}  # the answers by their keys, if there is no file
        # `exclusive` raises ValueError while another process has the file open. The rows of the files
        # `other_files` are read, too, and new rows are only added to the file `path`.
        self._journal = None if path is None else Journal(path, other_files, exclusive=True)
        # The caller may add up the answers that are stored already, e.g. their tokens.
        if self._journal is not None and count_answer is not None:
            for key in self._journal:
                if (answer := self.get(key)) is not None:  # rows that aren't answers are ignored
                    count_answer(answer)

    def get(self, key: str) -> AnsweredRequest | None:
        """Returns the answer to the request with this key; None if the journal doesn't have it."""
        if self._journal is None:  # there is no file
            return self._memory.get(key)
        row = self._journal.get(key)
        try:
            return None if row is None else AnsweredRequest(**row)
        except TypeError:  # a row with other fields, which isn't an answer
            return None

    def add(self, answer: AnsweredRequest) -> None:
        """Adds an answer. It is written to the file at once, and isn't lost if the process is killed."""
        if self._journal is None:
            self._memory[answer.key] = answer
        else:
            self._journal.add(asdict(answer))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close(durable=True)


class Asker:
    """Asks each question once. If the journal has the answer, that is returned. If the same question has been
    sent and has no answer yet, its answer is awaited.

    `identity` distinguishes the model from others with the same name in requests. Sub-classes override `_ask`
    to add limits and to decide when to give up.
    """

    def __init__(self, client: EndpointClient, journal: AnswerJournal, identity: str | None = None) -> None:
        self._client, self._journal, self._identity = client, journal, identity
        self._in_flight: dict[str, asyncio.Task[AnsweredRequest]] = {}
        self._tried_addresses: list[EndpointAddress] | None = None
        """If it is a list, the address of each request is appended to it."""

    async def answer(
        self, step: str, body: dict[str, Any], keep: Callable[[AnsweredRequest], bool] = lambda answer: True
    ) -> AnsweredRequest:
        """Returns the answer to a request. Raises the same as `EndpointClient.ask`.

        Args:
            step: The purpose of the request.
            body: The request.
            keep: Returns whether an answer is usable. An answer that isn't is neither written to the journal
                nor taken from it.
        """
        # Two models that requests give the same name must not share answers.
        question = body if self._identity is None else [self._identity, body]
        text = json.dumps(question, sort_keys=True)
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        journaled = self._journal.get(key)
        if journaled is not None and keep(journaled):
            return journaled
        if key not in self._in_flight:  # whoever asks the same meanwhile waits for this request
            self._in_flight[key] = asyncio.create_task(self._ask(key, step, body, keep))
            self._in_flight[key].add_done_callback(lambda _: self._in_flight.pop(key))
        return await self._in_flight[key]

    async def _ask(
        self, key: str, step: str, body: Mapping[str, Any], keep: Callable[[AnsweredRequest], bool]
    ) -> AnsweredRequest:
        """Sends a request, and writes the answer to the journal if it is usable."""
        reply = await self._client.ask(body, self._tried_addresses)
        input_tokens, output_tokens = reply.input_tokens, reply.output_tokens
        is_estimated = input_tokens is None or output_tokens is None  # the endpoint doesn't report them
        answer = AnsweredRequest(
            key=key,
            step=step,
            text=reply.text,
            complete=reply.complete,
            input_tokens=self.estimated_tokens(body) if input_tokens is None else input_tokens,
            output_tokens=self.estimated_tokens(reply.text) if output_tokens is None else output_tokens,
            estimated=is_estimated,
        )
        if keep(answer):
            self._journal.add(answer)
        return answer

    def estimated_tokens(self, content: Mapping[str, Any] | str) -> int:
        """Estimates the tokens of a request or a reply by the number of its bytes. This is an upper bound,
        since a token has at least one byte."""
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        return len(text.encode(errors="replace"))
