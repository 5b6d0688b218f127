"""Promises of the grader that asks a language model for its verdict:

* the last verdict in the requested form is the reward, and a reply without one is asked about again;
* no question is asked twice, not even by another process;
* a judge that is down is waited for within bounds, noticed when it is back, and costs no answer its reward:
  the outcome is `unavailable`;
* questions, tokens, costs and the agreement with a rule are counted;
* the key is sent and written nowhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stand_in_judge import StandIn, stand_in_judge
from treetune.domains.endpoints.settings import EndpointAddress, EndpointSettings, Prices, RequestSettings
from treetune.domains.graders.judge import JudgeGrader, RunningJudge
from treetune.findings import missing_requirements
from treetune.main import main
from treetune.store.journal import unseal_line
from treetune.tasks.graders.base import ServiceContext
from treetune.tasks.graders.conformance import Case, conformance
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade, Problem

PROBLEM = Problem(id="test/0", prompt="What is 3 + 4?", gold="7")
KEY = "sk-judge-0123456789abcdef"


@pytest.fixture
def judge() -> Iterator[StandIn]:
    with stand_in_judge() as running:
        yield running


def grader(judge: StandIn, *, endpoint: dict[str, Any] | None = None, **settings: Any) -> JudgeGrader:
    asking = {"timeout": 30.0, "retries": 1, "backoff": 0.05, "give_up_after": 3} | (endpoint or {})
    return JudgeGrader(endpoint=EndpointSettings(base_url=judge.base_url, model="m", **asking), **settings)


def grades(
    grader: JudgeGrader,
    *responses: str,
    folder: Path | None = None,
    run: str = "run-0",
    served: RunningJudge | None = None,
) -> tuple[list[Grade], dict[str, float]]:
    """Grade responses, and return the grades and what was counted; a folder holds the journals of runs."""
    context = ServiceContext(folder, run, served)
    with GraderPool(grader, workers=1, context=context) as pool:
        of_responses = [pool.submit(response, PROBLEM).result(60) for response in responses]
        counts = {name: value / (over or 1) for name, (value, over) in pool.take_counts().items()}
    context.close()
    return of_responses, counts


def test_the_verdict_of_a_judge_is_the_reward(judge: StandIn) -> None:
    (right, wrong, empty), counts = grades(grader(judge), "It is 7", "It is 8", "<think>7</think>  ")
    assert [right.reward, wrong.reward, empty.outcome] == [1.0, 0.0, "no_answer"]
    assert (counts["judge/asked"], counts["judge/correct"]) == (2.0, 0.5)
    question = judge.asked[0]["messages"][-1]["content"]
    assert all(part in question for part in ("What is 3 + 4?", "Reference answer:\n7", "It is 7"))


def test_a_judge_conforms(judge: StandIn) -> None:
    case = Case(PROBLEM, right=["It is 7"], wrong=["It is 8"], nearly=["7.5"], silent=["<think>7</think>"])
    conformance(grader(judge), [case])


def test_braces_in_an_answer_are_no_placeholders_and_only_the_end_of_it_is_shown(judge: StandIn) -> None:
    grades(grader(judge, last_characters=30), "x" * 1000 + "{gold} {problem} {response} 7")
    answer = judge.asked[0]["messages"][-1]["content"].partition("compared:\n")[2].partition("\n\nDoes")[0]
    assert answer == "x{gold} {problem} {response} 7"


def test_nothing_is_asked_twice_not_even_by_another_process(judge: StandIn, tmp_path: Path) -> None:
    for name, new in (("run-0", 2), ("run-0", 0), ("run-1", 0)):
        (right, wrong), counts = grades(grader(judge), "It is 7", "It is 8", folder=tmp_path, run=name)
        assert (right.reward, wrong.reward) == (1.0, 0.0)
        assert (counts.get("judge/asked", 0), counts.get("judge/known", 0)) == (new, 2 - new)
    assert len(judge.asked) == 2


def test_another_prompt_or_temperature_is_another_question(judge: StandIn, tmp_path: Path) -> None:
    for settings in ({}, {"prompt": "{problem} {gold} {response}?"}, {"endpoint": {"temperature": 0.5}}):
        grades(grader(judge, **settings), "It is 7", folder=tmp_path)
    assert len(judge.asked) == 3


def test_the_key_is_sent_and_written_nowhere(
    judge: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level("DEBUG")
    asking = grader(judge, endpoint={"api_key_variable": "JUDGE_KEY"})
    grades(asking, "It is 7", folder=tmp_path)
    judge.mood = "401"
    (lost,), _ = grades(asking, "It is 8", folder=tmp_path)
    assert judge.keys == [KEY, KEY]
    files = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY not in files + caplog.text + str(lost) + repr(asking)
    assert lost.outcome == "unavailable" and "JUDGE_KEY" in (lost.message or "")


def test_a_missing_key_is_told_before_the_run(judge: StandIn) -> None:
    (message,) = missing_requirements([grader(judge, endpoint={"api_key_variable": "NO_SUCH_KEY"})])
    assert "export NO_SUCH_KEY" in message


def test_a_judge_that_is_down_is_noted_at_the_start_and_told_with_a_grade(
    judge: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge_grader = grader(judge)
    config = tmp_path / "judged.jsonnet"
    endpoint = {"base_url": judge_grader.endpoint.base_url, "model": judge_grader.endpoint.model}
    config.write_text(
        "(import 'quickstart/grpo.jsonnet') +"
        f" {{task+: {{grader: {json.dumps({'type': 'judge', 'endpoint': endpoint})}}}}}"
    )
    assert main(["--configs", str(config), "check_config", "--config-only"]) == 0
    assert "judge" not in capsys.readouterr().err
    judge.close()
    assert main(["--configs", str(config), "check_config", "--config-only"]) == 0
    note = " ".join(capsys.readouterr().err.split())
    assert f"the judge at {judge_grader.endpoint.base_url} can't be reached now (Connection refused)" in note
    (grade,), _ = grades(judge_grader, "It is 7")
    assert grade.outcome == "unavailable" and "ClientConnectorError" in (grade.message or "")


def test_a_judge_that_is_back_in_time_costs_nothing(judge: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "treetune")
    replies = iter([(503, "busy"), (200, "<html>")])
    usual_reply = judge.reply
    judge.reply = lambda body, key: next(replies, None) or usual_reply(body, key)  # type: ignore[method-assign]
    (grade,), counts = grades(grader(judge, endpoint={"retries": 3}), "It is 7")
    assert (grade.reward, counts["judge/failed_attempts"]) == (1.0, 2.0)
    first_message, last_message = [
        record.getMessage() for record in caplog.records if "graders.judge" in record.name
    ]
    assert "the judge gives no answer" in first_message
    assert "HTTP 503" in first_message
    assert "the judge answers, after 2 failures" in last_message


@pytest.mark.parametrize("mood", ["down", "nonsense", "html", "silent", "403", "413"])
def test_an_answer_without_a_verdict_is_ungraded_and_not_wrong(judge: StandIn, mood: str) -> None:
    judge.mood = mood
    (grade,), counts = grades(grader(judge, endpoint={"timeout": 0.3}), "It is 7")
    assert (grade.outcome, grade.correct) == ("unavailable", False)
    assert counts["judge/unavailable"] == 1
    assert grade.message


def test_a_judge_that_is_down_is_asked_no_more_until_it_is_back(
    judge: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge.mood = "down"
    asking = grader(judge, endpoint={"retries": 0, "give_up_after": 3, "concurrency": 1})
    with GraderPool(asking) as pool:
        lost = pool.grade_many([(f"{i} 7", PROBLEM) for i in range(20)])
        assert {grade.outcome for grade in lost} == {"unavailable"}
        assert len(judge.asked) == 3
        assert "the judge is down" in (lost[-1].message or "")
        judge.mood = "well"
        monkeypatch.setattr("treetune.domains.graders.judge.PROBE_S", 0.0)
        assert pool.grade_many([("0 7", PROBLEM), ("1 7", PROBLEM)])[-1].reward == 1.0


def test_a_reply_without_a_verdict_is_asked_about_again_and_not_kept(judge: StandIn, tmp_path: Path) -> None:
    judge.mood = "nonsense"
    (lost,), counts = grades(grader(judge, again=2), "It is 7", folder=tmp_path)
    assert (lost.outcome, lost.message) == ("unavailable", "the judge's replies hold no verdict")
    assert (counts["judge/asked"], counts["judge/without_verdict"]) == (3, 3)
    assert [len(body["messages"]) for body in judge.asked] == [1, 3, 5]
    judge.mood = "well"
    (graded,), _ = grades(grader(judge, again=2), "It is 7", folder=tmp_path)
    assert graded.reward == 1.0


def test_a_rule_beside_the_judge_measures_how_often_they_agree(judge: StandIn) -> None:
    asking = grader(judge, rule=Numeric(without_marker="last_number"))
    (agreed, apart), counts = grades(asking, "It is 7", "It is 7.0")
    assert (agreed.numbers, apart.numbers) == ({"judge": 1.0, "rule": 1.0}, {"judge": 0.0, "rule": 1.0})
    assert (agreed.extracted, apart.reward) == ("7", 0.0)
    assert counts["judge/agreement"] == 0.5


def test_a_judge_that_is_asked_about_what_the_rule_rejects_costs_less(judge: StandIn) -> None:
    asking = grader(judge, rule=FinalAnswer(), when="rule_rejects")
    (accepted, mended, rejected), counts = grades(asking, "#7", "It is 7", "#8")
    assert [accepted.reward, mended.reward, rejected.reward] == [1.0, 1.0, 0.0]
    assert (len(judge.asked), counts["judge/spared"]) == (2, 1)


def test_tokens_and_costs_are_counted(judge: StandIn) -> None:
    _, counts = grades(grader(judge, prices=Prices(input=1e6, output=2e6)), "It is 7", "It is 8")
    tokens = counts["judge/input_tokens"], counts["judge/output_tokens"]
    assert min(tokens) > 0
    assert counts["judge/dollars"] == pytest.approx(tokens[0] + 2 * tokens[1])


DECISION = {"verdict_pattern": r"Final Decision: (\w+)", "scores": {"Yes": 1, "No": 0}}


@pytest.mark.parametrize(
    ("settings", "reply", "reward"),
    [
        ({}, "Verdict: incorrect, no: **Verdict:** Correct.", 1.0),
        ({}, "It is correct.", None),
        (DECISION, "final decision: yes", 1),
        (DECISION, "Final Decision: ok", None),
        ({"verdict_pattern": r"score: ([\d.]+)", "scores": None}, "Score: 0.25", 0.25),
        ({"verdict_pattern": r"score: ([\d.]+)", "scores": None}, "Score: 10", None),
    ],
)  # fmt: skip
def test_a_verdict_is_the_last_one_in_the_form_that_was_asked_for(
    settings: dict[str, Any], reply: str, reward: float | None
) -> None:
    assert JudgeGrader(**settings).reward(reply) == reward


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "{problem} {answer}"}, "prompt has {answer}"),
        ({"prompt": "{problem}"}, "prompt has no {response}"),
        ({"verdict_pattern": "("}, "not a regular expression"),
        ({"verdict_pattern": "yes|no"}, "0 groups"),
        ({"scores": {"yes": 0.5}}, "earns 1 or more"),
        ({"when": "rule_rejects"}, "needs a rule"),
        ({}, "no model is served here"),
    ],
)
def test_settings_that_give_no_verdict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraderPool(JudgeGrader(**settings))


def test_a_judge_that_the_run_serves_is_asked_at_its_present_address(judge: StandIn) -> None:
    places = iter(["http://127.0.0.1:9/v1", judge.base_url])
    events: list[str] = []
    served = RunningJudge(
        request_settings=RequestSettings(retries=1, backoff=0.05, timeout=30.0),
        choose_server=lambda: EndpointAddress(next(places), "its key"),
        name="policy",
        identity="a model",
        report_success=lambda: events.append("succeeded"),
    )
    (grade,), counts = grades(JudgeGrader(), "It is 7", served=served)
    assert (grade.reward, counts["judge/failed_attempts"], events) == (1.0, 1.0, ["succeeded"])
    assert (judge.asked[0]["model"], judge.keys) == ("policy", ["its key"])


def test_the_owner_of_a_served_judge_is_told_once_that_it_is_down() -> None:
    failed_addresses: list[str] = []
    served = RunningJudge(
        request_settings=RequestSettings(retries=0, give_up_after=2, timeout=30.0, concurrency=1),
        choose_server=lambda: EndpointAddress("http://127.0.0.1:9/v1"),
        name="policy",
        identity="a model",
        report_failure=lambda address, reason: failed_addresses.append(address.url),
    )
    graded, _ = grades(JudgeGrader(), "1", "2", "3", "4", served=served)
    assert {grade.outcome for grade in graded} == {"unavailable"}
    assert failed_addresses == ["http://127.0.0.1:9/v1"]


def test_a_question_has_its_deadline(judge: StandIn) -> None:
    judge.mood = "silent"
    began = time.monotonic()
    (grade,), _ = grades(grader(judge, deadline=1.0, endpoint={"timeout": 100.0}), "It is 7")
    assert grade.outcome == "unavailable" and "deadline" in (grade.message or "")
    assert time.monotonic() - began < 30


def test_a_judge_that_misses_the_deadline_says_so(judge: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def miss_deadline(*_: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr("treetune.domains.graders.judge._JudgeThread.run", miss_deadline)
    (grade,), _ = grades(grader(judge), "It is 7")
    assert (grade.message or "").endswith("the judge gave no answer: no reply within the deadline")


def test_a_journal_with_malformed_lines_is_read_without_them(judge: StandIn, tmp_path: Path) -> None:
    grades(grader(judge), "It is 7", folder=tmp_path)
    journal = (tmp_path / "run-0.jsonl").read_text()
    assert json.loads(unseal_line(journal.encode()))["step"] == "judge"
    (tmp_path / "run-0.jsonl").write_text("{}\n" + journal + journal[:20])
    grades(grader(judge), "It is 7", folder=tmp_path, run="run-1")
    assert len(judge.asked) == 1


def test_check_says_that_a_judge_is_down(judge: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = f"{{ base_url: '{judge.base_url}', model: 'm' }}"
    override = f"{{ task+: {{ grader: {{ type: 'judge', endpoint: {endpoint} }} }} }}"
    arguments = [
        "--configs",
        "configs/quickstart/ppo.jsonnet",
        "--override",
        override,
        "check",
        "--config-only",
    ]
    assert main(arguments) == 0
    assert "can't be reached now" not in capsys.readouterr().err
    judge.close()
    assert main(arguments) == 0
    notes = " ".join(capsys.readouterr().err.split())
    assert f"the judge at {judge.base_url} can't be reached now (Connection refused)" in notes


def test_a_reply_that_was_cut_off_is_no_verdict_and_asked_about_again(judge: StandIn, tmp_path: Path) -> None:
    cut = {"choices": [{"message": {"content": "Verdict: correct"}, "finish_reason": "length"}]}
    judge.reply = lambda body, key: (200, json.dumps(cut))  # type: ignore[method-assign]
    (lost,), counts = grades(grader(judge), "It is 7", folder=tmp_path)
    assert lost.outcome == "unavailable"
    assert "cut off before a verdict: raise max_tokens" in (lost.message or "")
    assert (counts["judge/without_verdict"], counts["judge/unavailable"]) == (2, 1)


def test_a_thought_that_was_cut_off_is_not_sent_back_to_the_judge(judge: StandIn) -> None:
    thought = {"choices": [{"message": {"content": "<think>If it were 7, Verdict: correct, but"}}]}
    usual_reply, conversations = judge.reply, []

    def reply(body: dict[str, Any], key: str) -> tuple[int, str]:
        conversations.append(body["messages"])
        return (200, json.dumps(thought)) if len(conversations) == 1 else usual_reply(body, key)

    judge.reply = reply  # type: ignore[method-assign]
    (grade,), _ = grades(grader(judge), "It is 8")
    assert (grade.outcome, grade.reward) == ("ok", 0.0)
    assert [len(messages) for messages in conversations] == [1, 1]
    assert "came to no verdict" in conversations[1][-1]["content"]
