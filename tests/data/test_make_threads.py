"""Promises of `make_threads`, which rewrites solutions into parallel ones, against a scripted endpoint:

* a long solution becomes the expected parallel one, and a task can demonstrate it;
* whatever the endpoint answers, the work goes on or ends with one message;
* nothing is asked twice: neither after a kill, nor by other settings that need no new answer;
* the costs are counted, and the budget is never exceeded;
* the key is sent and written nowhere.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.data import command
from tests.data.command import read_lines
from tests.data.scripted import DATA, KEY, PARALLEL, PROBLEM, SOLUTION, Endpoint, hang, status
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.domains.endpoints.settings import EndpointSettings
from treetune.main import main
from treetune.tasks.base import Task

ROWS = [{"problem": f"{PROBLEM} ({i})", "solution": SOLUTION, "answer": "40", "level": i} for i in range(3)]
THREADED = [{**row, "parallel_solution": PARALLEL} for row in ROWS]
REQUESTS = 10
"""Requests for a solution of three threads: six about its lines, three about references, one for outlines."""


class Work(command.Work):
    def __init__(self, folder: Path, endpoint: Endpoint, rows: list[dict[str, Any]] = ROWS) -> None:
        super().__init__(folder, "make_threads", rows, prices={"input": 1.25, "output": 10})
        self.endpoint = {
            "base_url": endpoint.url, "model": "scripted", "api_key_variable": "SCRIPTED_KEY",
            "backoff": 0.01, "timeout": 20, "concurrency": 2,
        }  # fmt: skip

    def arguments(self, **settings: Any) -> list[str]:
        return super().arguments(**settings | {"endpoint": self.endpoint | settings.pop("endpoint", {})})

    @property
    def threads(self) -> list[dict[str, Any]]:
        return read_lines(self.output / "threads.jsonl")

    def record(self, number: int) -> dict[str, Any]:
        return json.loads((self.output / "solutions" / "0000" / f"{number:07d}.json").read_text())

    def everything_written(self) -> str:
        return "\n".join(path.read_text() for path in self.output.rglob("*") if path.is_file())


@pytest.fixture
def work(endpoint: Endpoint, tmp_path: Path) -> Work:
    return Work(tmp_path, endpoint)


@pytest.fixture
def single_work(endpoint: Endpoint, tmp_path: Path) -> Work:
    """Prepare the work on the first solution alone."""
    return Work(tmp_path, endpoint, ROWS[:1])


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def test_a_long_solution_becomes_the_parallel_one_at_a_known_cost_and_a_task_s_demonstration(
    endpoint: Endpoint, work: Work
) -> None:
    assert work.run() == 0
    assert work.threads == THREADED
    summary, usage = work.summary, work.summary["usage"]
    assert (summary["accepted"], summary["blocks"], summary["threads"]) == (3, 3, 9)
    [block] = work.record(0)["blocks"]
    lengths = [len(thread) for thread in block["threads"]]
    assert summary["critical_characters"] == 3 * (len(PARALLEL) - sum(lengths) + max(lengths))
    assert summary["sequential_characters"] == 3 * len(SOLUTION)
    assert usage["requests"] == 3 * REQUESTS == len(endpoint.asked)
    assert usage["dollars"] == pytest.approx(3 * REQUESTS * (1000 * 1.25 + 100 * 10) / 1e6)
    assert sum(step["dollars"] for step in usage["steps"].values()) == pytest.approx(usage["dollars"])
    assert usage["steps"]["references"]["requests"] == 9
    assert [(edit["thread"], edit["sibling"]) for edit in block["edits"]] == [(2, 1), (3, 1)]

    train = json.dumps([str(work.output / "threads.jsonl")])
    files = ["tasks/math.jsonnet", "tasks/parallel_solutions.jsonnet"]
    config = load(files, [f"{{task+: {{train: {train}}}}}"], environ={})
    task = build(Task, config.data["task"], Explanation(config), key=("task",))
    problem = task.problems("train")[1]
    assert (task.demonstration(problem, seed=0), problem.gold) == ("\n" + PARALLEL, "40")


def test_a_finished_folder_asks_nothing_again_also_with_other_settings_and_refuses_other_rows(
    endpoint: Endpoint, work: Work, capfd: pytest.CaptureFixture[str]
) -> None:
    work.run()
    before = work.everything_written()
    assert work.run() == 0
    assert work.threads == THREADED
    assert before.count(PROBLEM) == work.everything_written().count(PROBLEM)
    assert work.run(min_saved_characters=600) == 0
    assert work.summary["blocks_dropped"] == {"too little is saved": 3}
    assert len(endpoint.asked) == 3 * REQUESTS
    assert Work(work.folder, endpoint, ROWS[::-1]).run() == 2
    assert "is of another solution than" in capfd.readouterr().err


def test_a_killed_command_asks_nothing_twice_and_loses_nothing(endpoint: Endpoint, work: Work) -> None:
    endpoint.faults["outlines"] = [hang, hang]
    with work.started() as process:
        wait_until(lambda: endpoint.questions["outlines"] == 2, process)
        process.kill()
    journal = work.output / "journal.jsonl"
    assert len(journal.read_text().splitlines()) == 2 * (REQUESTS - 1)
    with journal.open("a") as file:
        file.write('{"key": "torn')
    assert work.run() == 0
    assert work.threads == THREADED
    # Only the two requests that got no answer are sent again.
    assert sorted(endpoint.texts().values()) == [1] * (3 * REQUESTS - 2) + [2, 2]
    assert work.summary["usage"]["requests"] == 3 * REQUESTS


def test_an_interrupted_command_ends_at_once_and_goes_on_later(endpoint: Endpoint, single_work: Work) -> None:
    endpoint.faults["outlines"] = [hang]
    with single_work.started() as process:
        wait_until(lambda: endpoint.questions["outlines"], process)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert single_work.run() == 0
    assert len(endpoint.asked) == REQUESTS + 1


USELESS = [tuple(line.values()) for line in read_lines(DATA / "useless_answers.jsonl")]


@pytest.mark.parametrize(
    ("question", "answer", "reason", "dropped"),
    [*USELESS, ("references 3<-2", "[" * 100_000, "no block was kept", "the edits can't be applied")],
)
def test_a_useless_answer_has_a_counted_end_and_the_next_solution_goes_on(
    question: str, answer: str, reason: str, dropped: str | None, endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.answers[question] = answer
    rows = [*ROWS[:1], {"problem": "1 + 1", "solution": "2"}, {"problem": "No more."}]
    work = Work(tmp_path, endpoint, rows)
    assert work.run(repairs=0) == 0
    of_the_other_rows = {"the solution is too short": 1, "the row has no problem and solution": 1}
    assert work.summary["reasons"] == {reason: 1, **of_the_other_rows}
    assert work.summary["blocks_dropped"] == ({dropped: 1} if dropped else {})
    assert work.threads == []
    assert work.summary["usage"]["requests"] == len(endpoint.asked)


def test_equal_questions_are_asked_once(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint, [ROWS[0]] * 4)
    assert work.run(endpoint={"concurrency": 4}) == 0
    assert len(work.threads) == 4
    assert len(endpoint.asked) == work.summary["usage"]["requests"] == REQUESTS


def test_without_the_self_check_it_is_not_asked_and_too_many_threads_leave_a_block_sequential(
    endpoint: Endpoint, single_work: Work
) -> None:
    assert single_work.run(self_check=False) == 0
    assert single_work.threads == THREADED[:1] and endpoint.questions["check"] == 0
    assert single_work.run(max_threads=2) == 0
    assert single_work.summary["blocks_dropped"] == {"too many threads": 1}


def test_wrong_settings_are_told_before_anything_is_asked(
    endpoint: Endpoint, work: Work, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def assert_refused(message: str, **settings: Any) -> None:
        assert work.run(**settings) == 2
        assert message in " ".join(capfd.readouterr().err.split())

    assert_refused("budget needs prices", prices=None, budget=1.0)
    assert_refused("output_field is 'solution'", output_field="solution")
    assert_refused("did you mean 'min_saved_characters'", min_saved_character=3)
    assert_refused("should be like 'https://host/v1'", endpoint={"base_url": "127.0.0.1:8000"})
    assert_refused("sets messages", endpoint={"extra": {"messages": []}})
    assert_refused("extra_for", extra_for={"edits": {}})
    assert_refused("has a 'level' already", output_field="level")
    assert_refused("contains the key itself", endpoint={"extra": {"user": KEY}})
    monkeypatch.delenv("SCRIPTED_KEY")
    assert_refused("SCRIPTED_KEY, which is not set")
    assert not work.output.exists() and endpoint.asked == []


@pytest.mark.parametrize("fragments", [[], ["data_pipelines/own_server.jsonnet"]])
def test_the_shipped_configurations_are_right(
    fragments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    configs = ",".join(["data_pipelines/make_threads.jsonnet", *fragments])
    assert main(["--configs", configs, "check_config"]) == 0
    assert "fine: make_threads" in capsys.readouterr().out
    assert main(["--configs", configs, "run_iteration_loop"]) == 2
    assert "this configuration is a data pipeline" in " ".join(capsys.readouterr().err.split())


def test_failing_requests_are_sent_again(endpoint: Endpoint, single_work: Work) -> None:
    endpoint.faults |= {
        "steps": [status(500), status(429, **{"Retry-After": "0"}), status(200, "<html>")],
        "check": [hang, status(200, '{"choices": []}')],
        "outlines": [status(503)],
    }
    assert single_work.run(endpoint={"timeout": 1}) == 0
    assert single_work.threads == THREADED[:1]
    assert (single_work.summary["failed_attempts"], single_work.summary["usage"]["requests"]) == (6, REQUESTS)


def test_a_solution_that_gets_no_answer_is_left_for_the_next_run(endpoint: Endpoint, work: Work) -> None:
    endpoint.faults["steps"] = [status(400, "too long"), status(500), status(500)]
    assert work.run(endpoint={"retries": 1, "concurrency": 1}) == 1
    assert (work.summary["accepted"], work.summary["unanswered"]) == (1, 2)
    assert "HTTP 400: too long" in work.record(0)["detail"] and "HTTP 500" in work.record(1)["detail"]
    assert work.run() == 0
    assert len(work.threads) == 3


@pytest.mark.parametrize(
    ("faults", "parts_of_message"),
    [
        ([status(401, f"wrong key {KEY}")], ["HTTP 401", "SCRIPTED_KEY", "***"]),
        ([status(500, f"down, {KEY}")] * 50, ["3 requests in a row", "HTTP 500: down, ***", "same command"]),
    ],
)
def test_an_endpoint_that_refuses_every_request_ends_the_work_with_one_message(
    faults: list[Any],
    parts_of_message: list[str],
    endpoint: Endpoint,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    endpoint.faults["any"] = faults
    work = Work(tmp_path, endpoint, [{**ROWS[0], "problem": str(i)} for i in range(20)])
    assert work.run(endpoint={"retries": 0, "give_up_after": 3, "concurrency": 1}) == 1
    message = capfd.readouterr().err
    assert [part for part in parts_of_message if part not in message] == []
    assert "Traceback" not in message and KEY not in message + work.everything_written()
    assert len(endpoint.asked) <= 3


def test_the_key_is_sent_and_written_nowhere(
    endpoint: Endpoint, single_work: Work, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint.answers["steps"] = f"Your key is {KEY}."
    endpoint.faults["outlines"] = [status(500, KEY)]
    assert main([*single_work.arguments(), "--debug"]) == 0
    assert endpoint.keys == {f"Bearer {KEY}"}
    captured, files = capfd.readouterr(), single_work.everything_written()
    assert "HTTP 500: ***" in files and KEY not in files + captured.out + captured.err


def test_the_budget_is_never_exceeded_and_can_be_raised(endpoint: Endpoint, work: Work) -> None:
    short_answers, budget = {"endpoint": {"max_tokens": 200}}, 0.03
    assert work.run(budget=budget, **short_answers) == 0
    summary, requests = work.summary, len(endpoint.asked)
    assert summary["budget_spent"] and summary["open"] > 0
    assert 0.5 * budget < summary["usage"]["dollars"] <= budget
    assert work.run(budget=budget, **short_answers) == 0
    assert len(endpoint.asked) == requests, "a spent budget asks nothing"
    assert work.run(budget=1.0, **short_answers) == 0
    assert len(work.threads) == 3 and not work.summary["budget_spent"]
    assert set(endpoint.texts().values()) == {1}


@pytest.mark.parametrize("usage", [None, "much", {"prompt_tokens": -1, "completion_tokens": True}])
def test_usage_that_the_endpoint_does_not_report_is_estimated_and_marked_as_estimated(
    usage: Any, endpoint: Endpoint, single_work: Work
) -> None:
    endpoint.usage = usage
    assert single_work.run() == 0
    counted = single_work.summary["usage"]
    assert counted["estimated"] == counted["requests"] == REQUESTS
    assert counted["input_tokens"] > REQUESTS * len(SOLUTION)


def test_an_answer_that_cannot_be_read_is_sent_back_once_with_the_reason(
    endpoint: Endpoint, single_work: Work
) -> None:
    choice = {"message": {"content": "<parallel>"}, "finish_reason": "stop"}
    useless = {"choices": [choice], "usage": endpoint.usage}
    endpoint.faults["ranges"] = [lambda request: web.json_response(useless)]
    # The reason names no task, and the script takes such a request for one about outlines.
    endpoint.answers["outlines"] = endpoint.answers["ranges"]
    single_work.run()
    last_messages = [body["messages"][-1]["content"] for body in endpoint.asked]
    assert sum("<parallel> isn't closed" in message for message in last_messages) == 1
    assert single_work.record(0)["reason"] == "no block was kept", "the outlines were answered with ranges"


def test_the_completions_interface_gives_the_same_rows(endpoint: Endpoint, single_work: Work) -> None:
    assert single_work.run(endpoint={"api": "completions"}) == 0
    assert single_work.threads == THREADED[:1]
    assert all("messages" not in body for body in endpoint.asked)


@pytest.mark.parametrize("key", ["sk-proj-Ab12cd34", "hf_abcdefghijklmnop", "0123456789abcdef", "A" * 80])
def test_a_key_in_place_of_its_variable_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="the name of an environment variable") as error:
        EndpointSettings(base_url="https://host/v1", model="m", api_key_variable=key)
    assert key not in str(error.value)


@pytest.mark.parametrize(
    "base_url",
    [
        "ftp://host/v1",
        "host:8000",
        "http://",
        "https://me:secret@host/v1",
        "me:secret@host/v1",
        "http://host/v1?key=secret",
        "http://h:x",
    ],
)
def test_a_malformed_address_is_refused_and_a_password_in_it_is_not_shown(base_url: str) -> None:
    with pytest.raises(ValueError, match="base_url") as error:
        EndpointSettings(base_url=base_url, model="m")
    assert "secret" not in str(error.value)
