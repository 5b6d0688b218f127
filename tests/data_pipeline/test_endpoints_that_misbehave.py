"""Whatever an endpoint does, the work goes on or ends with one message; costs are known and bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data_pipeline.command import REQUESTS, ROWS, Work
from tests.data_pipeline.scripted import KEY, PARALLEL, SOLUTION, Endpoint, hang, status
from treetune.main import main
from treetune_domains.endpoints.settings import EndpointSettings


def test_failing_requests_are_sent_again(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.faults |= {
        "steps": [status(500), status(429, **{"Retry-After": "0"}), status(200, "<html>")],
        "check": [hang, status(200, '{"choices": []}')],
        "outlines": [status(503)],
    }
    work = Work(tmp_path, endpoint, ROWS[:1])
    assert work.run(endpoint={"timeout": 1}) == 0
    assert work.rows[0]["parallel_solution"] == PARALLEL
    assert work.summary["failed_attempts"] == 6
    assert work.summary["usage"]["requests"] == REQUESTS


def test_a_solution_that_gets_no_answer_is_left_for_the_next_run(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.faults["steps"] = [status(400, "too long"), status(500), status(500)]
    work = Work(tmp_path, endpoint)
    assert work.run(endpoint={"retries": 1, "concurrency": 1}) == 1
    assert (work.summary["accepted"], work.summary["unanswered"]) == (1, 2)
    assert "HTTP 400: too long" in work.record(0)["detail"]
    assert "HTTP 500" in work.record(1)["detail"]
    assert work.run() == 0
    assert len(work.rows) == 3


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ([status(401, f"wrong key {KEY}")], ["HTTP 401", "SCRIPTED_KEY", "***"]),
        ([status(500, f"down, {KEY}")] * 50, ["3 requests in a row", "HTTP 500: down, ***", "same command"]),
    ],
)
def test_an_endpoint_that_answers_nobody_ends_the_work_with_one_message(
    faults: list[Any], words: list[str], endpoint: Endpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint.faults["any"] = faults
    work = Work(tmp_path, endpoint, [{**ROWS[0], "problem": str(i)} for i in range(20)])
    assert work.run(endpoint={"retries": 0, "give_up_after": 3, "concurrency": 1}) == 1
    told = capfd.readouterr().err
    assert [word for word in words if word not in told] == []
    assert "Traceback" not in told
    assert KEY not in told + work.everything_written()
    assert len(endpoint.asked) <= 3


def test_the_key_is_sent_and_written_nowhere(
    endpoint: Endpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint.answers["steps"] = f"Your key is {KEY}."
    endpoint.faults["outlines"] = [status(500, KEY)]
    work = Work(tmp_path, endpoint, ROWS[:1])
    assert main([*work.arguments(), "--debug"]) == 0
    assert endpoint.keys == {f"Bearer {KEY}"}
    assert "HTTP 500: ***" in work.everything_written()
    captured = capfd.readouterr()
    assert KEY not in work.everything_written() + captured.out + captured.err


def test_the_budget_is_never_exceeded_and_can_be_raised(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint)
    sparing = {"endpoint": {"max_tokens": 200}}
    budget = 0.03
    assert work.run(budget=budget, **sparing) == 0
    summary = work.summary
    assert summary["budget_spent"]
    assert summary["open"] > 0
    assert 0.5 * budget < summary["usage"]["dollars"] <= budget
    asked = len(endpoint.asked)
    assert work.run(budget=budget, **sparing) == 0
    assert len(endpoint.asked) == asked, "a spent budget asks nothing"
    assert work.run(budget=1.0, **sparing) == 0
    assert len(work.rows) == 3
    assert set(endpoint.texts().values()) == {1}
    assert not work.summary["budget_spent"]


@pytest.mark.parametrize("usage", [None, "much", {"prompt_tokens": -1, "completion_tokens": True}])
def test_usage_that_says_nothing_is_estimated_and_said_to_be(
    usage: Any, endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.usage = usage
    work = Work(tmp_path, endpoint, ROWS[:1])
    assert work.run() == 0
    found = work.summary["usage"]
    assert found["estimated"] == found["requests"] == REQUESTS
    assert found["input_tokens"] > REQUESTS * len(SOLUTION)


def test_an_answer_that_cannot_be_read_is_sent_back_once_with_the_reason(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    from aiohttp import web

    def useless(request: web.Request) -> web.Response:
        choice = {"message": {"content": "<parallel>"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": endpoint.usage})

    endpoint.faults["ranges"] = [useless]
    # The reason quotes no task, so that the script answers by the conversation's last words.
    endpoint.answers["outlines"], outlines = endpoint.answers["ranges"], endpoint.answers["outlines"]
    work = Work(tmp_path, endpoint, ROWS[:1])
    work.run()
    sent_back = [
        body for body in endpoint.asked if "<parallel> isn't closed" in body["messages"][-1]["content"]
    ]
    assert len(sent_back) == 1
    assert outlines
    assert work.record(0)["reason"] == "no block was kept", "the outlines were answered with ranges"


def test_the_completions_interface_gives_the_same_rows(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint, ROWS[:1])
    assert work.run(endpoint={"api": "completions"}) == 0
    assert work.rows[0]["parallel_solution"] == PARALLEL
    assert all("messages" not in body for body in endpoint.asked)


@pytest.mark.parametrize("key", ["sk-proj-Ab12cd34", "hf_abcdefghijklmnop", "0123456789abcdef", "A" * 80])
def test_a_key_in_place_of_its_variable_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="the name of an environment variable") as error:
        EndpointSettings(base_url="https://host/v1", model="m", api_key_variable=key)
    assert key not in str(error.value)
