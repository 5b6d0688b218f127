"""Solutions become parallel ones against a scripted endpoint, whatever that does."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data_pipeline.command import REQUESTS, ROWS, Work
from tests.data_pipeline.scripted import KEY, PARALLEL, PROBLEM, SOLUTION, Endpoint, hang
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.main import main
from treetune.tasks.base import Task


def until(condition: Callable[[], object], command: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.02)


def test_a_long_solution_becomes_the_parallel_one(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint)
    assert work.run() == 0
    assert work.rows == [{**row, "parallel_solution": PARALLEL} for row in ROWS]
    summary = work.summary
    assert (summary["accepted"], summary["blocks"], summary["threads"]) == (3, 3, 9)
    longest = max(len(text) for text in work.record(0)["blocks"][0]["threads"])
    others = sum(len(text) for text in work.record(0)["blocks"][0]["threads"]) - longest
    assert summary["critical_characters"] == 3 * (len(PARALLEL) - others)
    assert summary["sequential_characters"] == 3 * len(SOLUTION)
    usage = summary["usage"]
    assert usage["requests"] == 3 * REQUESTS == len(endpoint.asked)
    assert usage["dollars"] == pytest.approx(3 * REQUESTS * (1000 * 1.25 + 100 * 10) / 1e6)
    assert sum(step["dollars"] for step in usage["steps"].values()) == pytest.approx(usage["dollars"])
    assert usage["steps"]["references"]["requests"] == 9
    edits = work.record(0)["blocks"][0]["edits"]
    assert [(edit["thread"], edit["sibling"]) for edit in edits] == [(2, 1), (3, 1)]


def test_a_task_loads_the_rows_with_the_parallel_text_as_its_demonstration(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    work = Work(tmp_path, endpoint)
    work.run()
    train = json.dumps([str(work.output / "threads.jsonl")])
    files = ["tasks/math.jsonnet", "tasks/parallel_solutions.jsonnet"]
    config = load(files, [f"{{task+: {{train: {train}}}}}"], environ={})
    task = build(Task, config.data["task"], Explanation(config), key=("task",))
    problem = task.problems("train")[1]
    assert task.demonstration(problem, seed=0) == "\n" + PARALLEL
    assert problem.gold == "40"


def test_a_finished_folder_asks_nothing_again(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint)
    work.run()
    written, asked = work.everything_written(), len(endpoint.asked)
    assert work.run() == 0
    assert len(endpoint.asked) == asked
    assert work.rows == [{**row, "parallel_solution": PARALLEL} for row in ROWS]
    assert written.count(PROBLEM) == work.everything_written().count(PROBLEM)


def test_a_killed_command_asks_nothing_twice_and_loses_nothing(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint)
    endpoint.faults["outlines"] = [hang, hang]
    with work.started() as command:
        until(lambda: endpoint.questions["outlines"] == 2, command)
        command.kill()
    journal = work.output / "journal.jsonl"
    answered = len(journal.read_text().splitlines())
    assert answered == 2 * (REQUESTS - 1)
    with journal.open("a") as file:
        file.write('{"key": "torn')
    assert work.run() == 0
    assert work.rows == [{**row, "parallel_solution": PARALLEL} for row in ROWS]
    assert sorted(endpoint.texts().values()) == [1] * (3 * REQUESTS - 2) + [2, 2], (
        "only what hung is asked again"
    )
    assert work.summary["usage"]["requests"] == 3 * REQUESTS


@pytest.mark.parametrize(
    ("question", "answer", "reason", "dropped"),
    [
        ("ranges", "<parallel><thread>3-5</thread>", "the analysis can't be read", None),
        ("ranges", "<parallel><thread>a-b</thread></parallel>", "the analysis can't be read", None),
        ("ranges", "I don't know.", "the analysis can't be read", None),
        ("steps", "", "the analysis can't be read", None),
        ("ranges", "<none/>", "no independent parts were found", None),
        (
            "ranges",
            "<parallel><thread>3-5</thread><thread>6-99</thread></parallel>",
            "no block was kept",
            "lines that are not there",
        ),
        (
            "ranges",
            "<parallel><thread>3-7</thread><thread>6-10</thread></parallel>",
            "no block was kept",
            "threads overlap or are in disorder",
        ),
        ("check", "[]", "the self-check can't be read", None),
        (
            "check",
            json.dumps([{"group": 1, "thread": i, "pass": i != 2, "note": "uses 33"} for i in (1, 2, 3)]),
            "no block was kept",
            "failed the self-check",
        ),
        (
            "references 2<-1",
            '[{"source": "one", "destination": ""}]',
            "no block was kept",
            "the edits can't be applied",
        ),
        ("references 3<-2", "[" * 100_000, "no block was kept", "the edits can't be applied"),
        ("outlines", r'["Find \times.", "b", "c"]', "no block was kept", "the outlines can't be used"),
        ("outlines", '["a", "b"]', "no block was kept", "the outlines can't be used"),
        (
            "outlines",
            '["Find that there are 33.", "b", "c"]',
            "no block was kept",
            "the outlines can't be used",
        ),
    ],
)
def test_a_useless_answer_has_a_counted_end_and_the_next_solution_goes_on(
    question: str, answer: str, reason: str, dropped: str | None, endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.answers[question] = answer
    work = Work(
        tmp_path, endpoint, [*ROWS[:1], {"problem": "1 + 1", "solution": "2"}, {"problem": "No more."}]
    )
    assert work.run(repairs=0) == 0
    summary = work.summary
    assert summary["reasons"] == {
        reason: 1, "the solution is too short": 1, "the row has no problem and solution": 1
    }  # fmt: skip
    assert summary["blocks_dropped"] == ({dropped: 1} if dropped else {})
    assert work.rows == []
    assert summary["usage"]["requests"] == len(endpoint.asked)


def test_equal_questions_are_asked_once(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint, [ROWS[0]] * 4)
    assert work.run(endpoint={"concurrency": 4}) == 0
    assert len(work.rows) == 4
    assert len(endpoint.asked) == work.summary["usage"]["requests"] == REQUESTS


def test_without_the_self_check_it_is_not_asked(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint, ROWS[:1])
    assert work.run(self_check=False) == 0
    assert work.rows[0]["parallel_solution"] == PARALLEL
    assert endpoint.questions["check"] == 0


def test_more_threads_than_allowed_leave_a_block_sequential(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint, ROWS[:1])
    assert work.run(max_threads=2) == 0
    assert work.summary["blocks_dropped"] == {"too many threads": 1}


def test_an_interrupted_command_ends_at_once_and_goes_on_later(endpoint: Endpoint, tmp_path: Path) -> None:
    work = Work(tmp_path, endpoint, ROWS[:1])
    endpoint.faults["outlines"] = [hang]
    with work.started() as command:
        until(lambda: endpoint.questions["outlines"], command)
        command.send_signal(signal.SIGINT)
        assert command.wait(20) == 130
    assert work.run() == 0
    assert len(endpoint.asked) == REQUESTS + 1


def test_wrong_settings_are_told_before_anything_is_asked(
    endpoint: Endpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(tmp_path, endpoint)

    def told(*words: str, **settings: Any) -> None:
        assert work.run(**settings) == 2
        message = " ".join(capfd.readouterr().err.split())
        assert [word for word in words if word not in message] == [], message

    told("budget needs prices", prices=None, budget=1.0)
    told("output_field is 'solution'", output_field="solution")
    told("did you mean 'min_saved_characters'", min_saved_character=3)
    told("should be like 'https://host/v1'", endpoint={"base_url": "127.0.0.1:8000"})
    told("sets messages", endpoint={"extra": {"messages": []}})
    told("extra_for", extra_for={"edits": {}})
    told("has a 'level' already", output_field="level")
    monkeypatch.delenv("SCRIPTED_KEY")
    told("SCRIPTED_KEY, which is not set")
    monkeypatch.setenv("SCRIPTED_KEY", KEY)
    told("holds the key itself", endpoint={"extra": {"user": KEY}})
    assert not work.output.exists()
    assert endpoint.asked == []


def test_another_inputs_folder_is_refused(
    endpoint: Endpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    work = Work(tmp_path, endpoint)
    work.run()
    Work(tmp_path, endpoint, ROWS[::-1])
    assert work.run() == 2
    assert "is of another solution than" in capfd.readouterr().err


def test_other_settings_work_on_the_solutions_anew_and_pay_only_for_new_questions(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    work = Work(tmp_path, endpoint)
    work.run()
    asked = len(endpoint.asked)
    assert work.run(min_saved_characters=600) == 0
    assert work.summary["blocks_dropped"] == {"too little is saved": 3}
    assert len(endpoint.asked) == asked


@pytest.mark.parametrize("right", [[], ["data_pipelines/own_server.jsonnet"]])
def test_the_shipped_configurations_are_right(right: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    configs = ",".join(["data_pipelines/make_threads.jsonnet", *right])
    assert main(["--configs", configs, "check_config"]) == 0
    assert "fine: make_threads" in capsys.readouterr().out
    assert main(["--configs", configs, "run_iteration_loop"]) == 2
    assert "this configuration is a data pipeline" in " ".join(capsys.readouterr().err.split())
