"""Promises about replies of endpoints:

* a reply is answered, cut off, empty, refused or to be repeated by its status, body and finish reason
  alone, for every caller alike;
* a reply that refuses one row stops no other row, and an endpoint that refuses everything ends the work;
* nothing that isn't a complete answer counts as a wrong answer or as a verdict;
* the pause that an endpoint asks for is kept, up to a bound.
"""

from __future__ import annotations

import asyncio
import errno
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_replies import Written, chat, error, replying
from treetune.data.difficulty.answering import AskingShard, AtAddresses, NoReply, PolicyReply, SampleQuestion
from treetune.domains.endpoints.client import LONGEST_WAIT_S, EndpointClient, requested_wait
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

# Status, body, the kind of the reply, and the text that is read.
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
def test_the_kind_of_a_reply_follows_from_status_body_and_finish_reason(
    status: int, body: str, kind: str, text: str
) -> None:
    reading = read_reply(status, body, is_chat=True)
    assert (reading.kind, reading.text) == (kind, text)
    assert reading.why or kind == "answered"


@pytest.mark.parametrize(("status", "body", "kind", "text"), TABLE)
def test_difficulty_rates_complete_answers_alone(
    status: int, body: str, kind: str, text: str, tmp_path: Path
) -> None:
    def reply(request: dict[str, Any]) -> Written:
        if request["messages"][0]["content"] == "odd":
            return status, body, {}
        return 200, chat("fine"), {}

    questions = [
        SampleQuestion(row, 0, 7, Problem(str(row), prompt, ""))
        for row, prompt in enumerate(("a", "odd", "b"))
    ]
    replies: dict[int, PolicyReply | NoReply | None] = {}
    failure_message = ""
    with replying(reply) as server:
        address = EndpointSettings(
            base_url=server.base_url, model="m", concurrency=1, retries=1, backoff=0.01, give_up_after=2
        )
        policy = AtAddresses(addresses=(address,), send_seed=False)
        with policy.open(SamplingParams(64), AskingShard(0, tmp_path, 0)) as ask:
            try:
                ask(questions, lambda question, reply_of_row: replies.update({question.row: reply_of_row}))
            except RuntimeError as failure:
                failure_message = str(failure)
    assert all("seed" not in request for request in server.asked)
    odd_reply = replies.get(1)
    if kind in ("answered", "cut_off"):
        assert isinstance(odd_reply, PolicyReply)
        assert (odd_reply.text, odd_reply.complete) == (text, kind == "answered")
    elif kind in ("empty", "refused"):
        assert isinstance(odd_reply, NoReply)
        assert odd_reply.outcome == kind
        assert odd_reply.why
    else:
        assert odd_reply is None
        assert failure_message
    assert (2 in replies) == (kind != "refused_all")
    assert ("row 1" in failure_message) == (kind == "again")
    # Three questions; "again" is one retry, and the question after "refused_all" isn't asked.
    assert len(server.asked) == {"again": 4, "refused_all": 2}.get(kind, 3)


@pytest.mark.parametrize(("status", "body", "kind", "text"), TABLE)
def test_a_judge_takes_a_verdict_from_a_complete_answer_alone(
    status: int, body: str, kind: str, text: str
) -> None:
    # The same replies, with a verdict in place of the text.
    for answer in ("It is 42", "It is 4", "I was ab", "Sorry"):
        body = body.replace(answer, "Verdict: correct")
    body = body.replace('"It is"', '"Verdict:"').replace('" 42"', '" correct"').replace('"42"', '"correct"')
    with replying(lambda request: (status, body, {})) as server:
        endpoint = EndpointSettings(base_url=server.base_url, model="m", retries=0, backoff=0.01)
        grader = JudgeGrader(endpoint=endpoint, again=0, verdict_pattern="(correct)")
        with GraderPool(grader, workers=1) as pool:
            (grade,) = pool.grade_many([("It is 42", Problem("a", "?", "42"))])
    assert grade.outcome == ("ok" if kind == "answered" else "unavailable")


def test_an_endpoint_that_refuses_everything_ends_the_work(tmp_path: Path) -> None:
    questions = [SampleQuestion(row, 0, 7, Problem(str(row), "?", "")) for row in range(20)]
    with replying(lambda request: (400, error(None, "no parameter seed"), {})) as server:
        address = EndpointSettings(base_url=server.base_url, model="m", concurrency=1, give_up_after=3)
        with (
            AtAddresses(addresses=(address,)).open(SamplingParams(64), AskingShard(0, tmp_path, 0)) as ask,
            pytest.raises(RuntimeError, match=r"the first 3 requests were refused.*no parameter seed"),
        ):
            ask(questions, lambda question, reply: None)
    assert len(server.asked) == 3


def test_an_answer_that_waits_for_graders_keeps_no_other_request_waiting(tmp_path: Path) -> None:
    kept: list[int] = []
    kept_at_once: list[int] = []

    def keep(question: SampleQuestion, reply: Any) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        kept_at_once.append(len(kept))
        time.sleep(0.01)
        kept.append(question.row)

    questions = [SampleQuestion(row, 0, 7, Problem(str(row), "?", "")) for row in range(6)]
    with replying(lambda request: (200, chat("fine"), {})) as server:
        address = EndpointSettings(base_url=server.base_url, model="m", concurrency=3)
        with AtAddresses(addresses=(address,)).open(SamplingParams(64), AskingShard(0, tmp_path, 0)) as ask:
            ask(questions, keep)
    assert sorted(kept) == list(range(6))
    assert kept_at_once == list(range(6)), "one answer is kept after the other"


def test_a_full_disk_ends_the_work_with_its_own_error(tmp_path: Path) -> None:
    """A job catches it, and writes it into its failure.json."""
    questions = [SampleQuestion(row, 0, 7, Problem(str(row), "?", "")) for row in range(20)]

    def keep(question: SampleQuestion, reply: PolicyReply | NoReply | None) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with replying(lambda request: (200, chat("fine"), {})) as server:
        address = EndpointSettings(base_url=server.base_url, model="m", concurrency=4)
        with (
            AtAddresses(addresses=(address,)).open(SamplingParams(64), AskingShard(0, tmp_path, 0)) as ask,
            pytest.raises(OSError, match="No space left"),
        ):
            ask(questions, keep)


def test_any_body_can_be_read_and_a_malformed_one_is_no_answer() -> None:
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
    assert requested_wait(headers, NOW) == seconds


@pytest.mark.parametrize("pause", ["9999", "Wed, 21 Oct 2099 07:28:00 GMT"])
def test_no_endpoint_is_waited_for_longer_than_the_bound(pause: str) -> None:
    messages: list[str] = []

    async def ask(url: str) -> None:
        settings = EndpointSettings(base_url=url, model="m", retries=1)
        # The client tells the first pause, and then stops instead of waiting.
        client = EndpointClient(settings, settings.address(), lambda: bool(messages), messages.append)
        async with client:
            await client.ask({})

    with replying(lambda _: (429, error(429), {"Retry-After": pause})) as server, pytest.raises(Unanswered):
        asyncio.run(ask(server.base_url))
    assert messages[0].endswith(f"again in {LONGEST_WAIT_S} s")
