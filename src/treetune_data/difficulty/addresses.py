"""Asks an OpenAI-compatible address for answers, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from treetune.inference.base import SamplingParams
from treetune_data.difficulty.policies import Keep, Question, Reply
from treetune_domains.endpoints.client import Client, EndpointError, Unanswered
from treetune_domains.endpoints.settings import EndpointSettings


def ask_address(
    settings: EndpointSettings, sampling: SamplingParams, questions: Sequence[Question], keep: Keep
) -> None:
    """Raises RuntimeError when requests come to nothing, after everything that was answered was kept."""
    asyncio.run(_ask(settings, sampling, questions, keep))


async def _ask(
    settings: EndpointSettings, sampling: SamplingParams, questions: Sequence[Question], keep: Keep
) -> None:
    failure: EndpointError | None = None
    unanswered, in_a_row = 0, 0

    async def worker(waiting: Iterator[Question]) -> None:
        nonlocal failure, unanswered, in_a_row
        for question in waiting:
            if failure is not None:
                return
            try:
                reply = await client.ask(_body(settings, sampling, question))
            except Unanswered as error:
                unanswered, in_a_row = unanswered + 1, in_a_row + 1
                if in_a_row >= settings.give_up_after:
                    failure = EndpointError(
                        f"{in_a_row} requests in a row came to nothing; the last: {error}"
                    )
                continue
            except EndpointError as error:
                failure = error
                return
            in_a_row = 0
            keep(question, Reply(reply.text, reply.complete, reply.output_tokens))

    async with Client.of(settings, lambda: failure is not None) as client:
        waiting = iter(questions)
        async with asyncio.TaskGroup() as group:
            for _ in range(settings.concurrency):
                group.create_task(worker(waiting))
    if failure is not None:
        raise failure
    if unanswered:
        raise EndpointError(f"{unanswered} requests came to nothing; the others are kept")


def _body(settings: EndpointSettings, sampling: SamplingParams, question: Question) -> dict[str, Any]:
    body = settings.body((), {})
    for ours in ("messages", "prompt", "stop"):
        body.pop(ours, None)
    problem = question.problem
    if settings.api == "chat":
        asked = [vars(message) for message in problem.messages]
        body["messages"] = asked or [{"role": "user", "content": problem.prompt}]
    else:
        body["prompt"] = problem.prompt
    body["seed"] = question.seed
    if sampling.top_p < 1:
        body["top_p"] = sampling.top_p
    if sampling.top_k > 0:
        body["top_k"] = sampling.top_k
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body
