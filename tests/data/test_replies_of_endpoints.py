"""Promises: a reply is told by its status, body and finish reason, for every caller alike; what a row is
refused for ends nothing; nothing that isn't a whole answer counts as a wrong one."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_replies import Written, chat, error, replying
from treetune.data.difficulty.answering import AskingShard, AtAddresses, NoReply, PolicyReply, SampleQuestion
from treetune.domains.endpoints.client import LONGEST_WAIT_S, EndpointClient, wait_asked_for
from treetune.domains.endpoints.replies import read_reply
from treetune.domains.endpoints.settings import EndpointSettings
from treetune.domains.graders.judge import JudgeGrader
from treetune.engine.requests import SamplingParams
from treetune.exceptions import Unanswered
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem

STREAM = "".join(
    f"data: {json.dumps({'choices': [{'delta': {'content': part}, 'finish_reason': None}]})}\n\n"
    for part in ("It is", " 42")
)
LONG = "maximum context length is 4096 tokens"

TABLE: list[tuple[int, str, str, str]] = [
    (200, chat("It is 42"), "answered", "It is 42"),
    (200, chat("It is 42", None), "answered", "It is 42"),
    (200, chat("It is 42", "eos"), "answered", "It is 42"),
    (200, chat([{"type": "thinking", "thinking": "41?"}, {"type": "text", "text": "42"}]), "answered", "42"),
    (200, STREAM + "data: [DONE]\n", "answered", "It is 42"),
    (200, chat("It is 4", "length"), "cut_off", "It is 4"),
    (200, chat(None, "length", reasoning_content="Hm"), "cut_off", ""),
    (200, chat(None, reasoning_content="It is 42"), "empty", ""),
    (200, chat(None, reasoning="It is 42"), "empty", ""),
    (200, chat(""), "empty", ""),
    (200, chat(None, "tool_calls", tool_calls=[{"id": "a"}]), "empty", ""),
    (200, chat("I was ab", "abort"), "again", "I was ab"),
    (200, chat("I was ab", "error"), "again", "I was ab"),
    (200, chat("Sorry", "content_filter"), "refused", "Sorry"),
    (200, chat(None, refusal="I can't help with that."), "refused", ""),
    (200, '{"choices": []}', "again", ""),
    (200, '{"choices": null}', "again", ""),
    (200, chat("It is 42")[:-9], "again", ""),
    (200, "<html>It works!</html>", "again", ""),
    (200, STREAM, "again", ""),
    (200, "[]", "again", ""),
    (200, error("context_length_exceeded"), "refused", ""),
    (200, error(429), "again", ""),
    (200, error(400), "refused", ""),
    (400, error("content_filter"), "refused", ""),
    (400, error(None, LONG), "refused", ""),
    (400, error("model_not_found"), "refused_all", ""),
    (401, error(), "refused_all", ""),
    (402, "", "refused_all", ""),
    (403, error("moderation"), "refused", ""),
    (403, error("permission_denied"), "refused_all", ""),
    (404, "<html>", "refused_all", ""),
    (307, "", "refused_all", ""),
    (408, "", "again", ""),
    (413, "", "refused", ""),
    (422, "", "refused", ""),
    (429, error("rate_limit_exceeded"), "again", ""),
    (429, error("insufficient_quota"), "refused_all", ""),
    (500, "<html>", "again", ""),
    (503, "", "again", ""),
    (529, error(None, type="overloaded_error"), "again", ""),
]


@pytest.mark.parametrize(("status", "body", "kind", "text"), TABLE)
def test_a_reply_is_told_by_status_body_and_finish_reason(
    status: int, body: str, kind: str, text: str
) -> None:
    reading = read_reply(status, body, is_chat=True)
    assert (reading.kind, reading.text) == (kind, text)
    assert reading.why or kind == "answered"


@pytest.mark.parametrize(("status", "body", "kind", "text"), TABLE)
def test_difficulty_rates_whole_answers_alone(
    status: int, body: str, kind: str, text: str, tmp_path: Path
) -> None:
    def reply(asked: dict[str, Any]) -> Written:
        if asked["messages"][0]["content"] == "odd":
            return status, body, {}
        return 200, chat("fine"), {}

    questions = [
        SampleQuestion(row, 0, 7, Problem(str(row), prompt, ""))
        for row, prompt in enumerate(("a", "odd", "b"))
    ]
    kept: dict[int, PolicyReply | NoReply | None] = {}
    raised = ""
    with replying(reply) as server:
        address = EndpointSettings(
            base_url=server.base_url, model="m", concurrency=1, retries=1, backoff=0.01, give_up_after=2
        )
        policy = AtAddresses(addresses=(address,), send_seed=False)
        with policy.opened(SamplingParams(64), AskingShard(0, tmp_path, 0)) as ask:
            try:
                ask(questions, lambda question, got: kept.update({question.row: got}))
            except RuntimeError as failure:
                raised = str(failure)
    assert all("seed" not in asked for asked in server.asked)
    odd = kept.get(1)
    if kind in ("answered", "cut_off"):
        assert isinstance(odd, PolicyReply)
        assert (odd.text, odd.complete) == (text, kind == "answered")
    elif kind in ("empty", "refused"):
        assert isinstance(odd, NoReply)
        assert odd.outcome == kind
        assert odd.why
    else:
        assert odd is None
        assert raised
    assert (2 in kept) == (kind != "refused_all")
    assert ("row 1" in raised) == (kind == "again")
    assert len(server.asked) == {"again": 4, "refused_all": 2}.get(kind, 3)


@pytest.mark.parametrize(("status", "body", "kind", "text"), TABLE)
def test_a_judge_gives_no_verdict_with_what_is_no_whole_answer(
    status: int, body: str, kind: str, text: str
) -> None:
    # The same replies, with a verdict in place of the text.
    for said in ("It is 42", "It is 4", "I was ab", "Sorry"):
        body = body.replace(said, "Verdict: correct")
    body = body.replace('"It is"', '"Verdict:"').replace('" 42"', '" correct"').replace('"42"', '"correct"')
    with replying(lambda asked: (status, body, {})) as server:
        endpoint = EndpointSettings(base_url=server.base_url, model="m", retries=0, backoff=0.01)
        grader = JudgeGrader(endpoint=endpoint, again=0, verdict_pattern="(correct)")
        with GraderPool(grader, workers=1) as pool:
            (grade,) = pool.grade_many([("It is 42", Problem("a", "?", "42"))])
    assert grade.outcome == ("ok" if kind == "answered" else "unavailable")


def test_an_endpoint_that_refuses_everything_ends_the_work(tmp_path: Path) -> None:
    questions = [SampleQuestion(row, 0, 7, Problem(str(row), "?", "")) for row in range(20)]
    with replying(lambda asked: (400, error(None, "no parameter seed"), {})) as server:
        address = EndpointSettings(base_url=server.base_url, model="m", concurrency=1, give_up_after=3)
        with (
            AtAddresses(addresses=(address,)).opened(SamplingParams(64), AskingShard(0, tmp_path, 0)) as ask,
            pytest.raises(RuntimeError, match=r"the first 3 requests were refused.*no parameter seed"),
        ):
            ask(questions, lambda question, got: None)
    assert len(server.asked) == 3


def test_reading_takes_any_body() -> None:
    for body in (
        "",
        "null",
        "[" * 100_000,
        "data: x",
        "data: 3",
        '{"error": "no"}',
        '{"choices": [3]}',
        "\0",
    ):
        for status in (200, 204, 302, 400, 418, 599):
            assert read_reply(status, body, is_chat=True).kind not in ("answered", "cut_off", "empty")


NOW = datetime(2026, 10, 21, 7, 28, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "20"}, 20.0),
        ({"Retry-After": " 0.5 "}, 0.5),
        ({"Retry-After-Ms": "250", "Retry-After": "20"}, 0.25),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT"}, 30.0),
        ({"Retry-After": "Wednesday, 21-Oct-26 07:28:30 GMT"}, 30.0),
        ({"Retry-After": "Wed Oct 21 07:28:30 2026"}, 30.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:20:00 GMT"}, 0.0),
        # The endpoint's clock is an hour ahead of ours.
        ({"Date": "Wed, 21 Oct 2026 08:28:00 GMT", "Retry-After": "Wed, 21 Oct 2026 08:28:10 GMT"}, 10.0),
        ({"Date": "now", "Retry-After": "Wed, 21 Oct 2026 07:28:10 GMT"}, 10.0),
        ({"Retry-After": "soon"}, 0.0),
        ({"Retry-After": "-5"}, 0.0),
        ({"Retry-After": "Wed, 41 Oct 2026 07:28:00 GMT"}, 0.0),
        ({"Retry-After": ""}, 0.0),
        ({}, 0.0),
    ],
)
def test_an_endpoint_says_in_seconds_or_as_a_date_how_long_to_wait(
    headers: dict[str, str], seconds: float
) -> None:
    assert wait_asked_for(headers, NOW) == seconds


@pytest.mark.parametrize("asked", ["9999", "Wed, 21 Oct 2099 07:28:00 GMT"])
def test_no_endpoint_is_waited_for_longer_than_the_bound(asked: str) -> None:
    told: list[str] = []

    async def ask(url: str) -> None:
        settings = EndpointSettings(base_url=url, model="m", retries=1)
        async with EndpointClient(settings, settings.place(), lambda: bool(told), told.append) as client:
            await client.ask({})

    with replying(lambda _: (429, error(429), {"Retry-After": asked})) as server, pytest.raises(Unanswered):
        asyncio.run(ask(server.base_url))
    assert told[0].endswith(f"again in {LONGEST_WAIT_S} s")
