"""Rows of other trainers' formats, with everything that real files of them hold.

The rows have failures, several scores, turns, thoughts, equal ids, and texts in the place of numbers. The
tests hold that each row is read with its reward, end and problem, and that rows that can't be read are
counted with the reason and hide no other.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.view.conftest import Viewer
from tests.view.exports.measured import ANSWERS, write_experiment
from treetune.view.exports.evaluations import choose_evaluation
from treetune.view.exports.inspect_log import write_inspect_log
from treetune.view.store import Store
from treetune.view.store.foreign import FileReport, answers_in, holds_answers
from treetune.view.store.foreign.layout import step_of
from treetune.view.store.queries import RowQuery

PROMPT_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6*7?"}]
CALL = {"id": "c", "type": "function", "function": {"name": "times", "arguments": '{"a": 6, "b": 7}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "reasoning_content": "I compute.", "tool_calls": [CALL]},
    {"role": "tool", "name": "times", "tool_call_id": "c", "content": "42"},
    {"role": "assistant", "content": [{"type": "text", "text": "It is 42."}]},
]
PARTS_OF_TURNS = (
    "<think>\nI compute.\n</think>",
    '{"name": "times", "arguments": {"a": 6, "b": 7}}',
    "tool times: 42",
)


def lines(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [answer for _, answer in answers_in(path)]


# Inspect


def sample(number: int | str = 1, **changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "42", "source": "generate"}
    return {
        "id": number, "epoch": 1, "input": "What is 6*7?", "target": ["42"],
        "messages": [{"role": "user", "content": "What is 6*7?", "source": "input"}, message],
        "output": {
            "model": "m", "choices": [{"message": message, "stop_reason": "stop"}],
            "usage": {"output_tokens": 3},
        },
        "model_usage": {"m": {"output_tokens": 7}, "judge": {"output_tokens": 99}},
        "scores": {"match": {"value": "C", "answer": "42"}},
    } | changes  # fmt: skip


def log(path: Path, *samples: Any, task: str = "sums", **header: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for number, member in enumerate(samples):
            if isinstance(member, dict):
                name = f"samples/{member['id']}_epoch_{member['epoch']}.json"
                archive.writestr(name, json.dumps(member))
            else:  # a text, such as a damaged member
                archive.writestr(f"samples/{number}.json", member)
        archive.writestr("header.json", json.dumps({"version": 2, "eval": {"task": task}} | header))
    return path


@pytest.mark.parametrize(
    ("value", "reward", "numbers"),
    [
        ("C", 1.0, {"s": 1.0}),
        ("P", 0.5, {"s": 0.5}),
        ("N", 0.0, {"s": 0.0}),
        (True, 1.0, {"s": 1.0}),
        ("0.25", 0.25, {"s": 0.25}),
        ("yes", 1.0, {"s": 1.0}),
        ({"helpful": "C", "brief": 0.5}, 1.0, {"s/helpful": 1.0, "s/brief": 0.5}),
        (["I", "C"], 0.0, {"s/0": 0.0, "s/1": 1.0}),
        (math.nan, None, {}),
        (None, None, {}),
        ("well done", None, {}),
    ],
)
def test_a_score_of_inspect_is_a_number_whatever_its_form(
    tmp_path: Path, value: Any, reward: float | None, numbers: dict[str, float]
) -> None:
    [answer] = read(log(tmp_path / "a.eval", sample(scores={"s": {"value": value}})))
    assert answer["reward"] == reward
    scores = {name: score for name, score in answer["numbers"].items() if name.startswith("s")}
    assert scores == numbers
    assert answer["outcome"] == ("ok" if reward is not None else "unavailable")


def test_samples_of_inspect_that_failed_were_cut_or_have_no_score_differ_in_outcome_and_finish_reason(
    tmp_path: Path,
) -> None:
    path = log(
        tmp_path / "a.eval",
        sample("train/1"),
        sample(2, error={"message": "RuntimeError('gone')", "traceback": "…"}, scores={}),
        sample(3, limit={"type": "token", "limit": 100}),
        sample(10, scores=None),
    )
    by_problem = {answer["problem"]: answer for answer in read(path)}
    assert list(by_problem) == ["sums/2", "sums/3", "sums/10", "sums/train/1"], "sorted as numbers"
    good, failed = by_problem["sums/train/1"], by_problem["sums/2"]
    assert (good["reward"], good["tokens"], good["gold"], good["finish_reason"]) == (1.0, 7, "42", "stop")
    assert failed["outcome"] == "error" and "RuntimeError('gone')" in failed["message"]
    assert failed["reward"] is None
    assert by_problem["sums/3"]["finish_reason"] == "length" and "token" in by_problem["sums/3"]["message"]
    assert by_problem["sums/10"]["outcome"] == "unavailable"


def test_turns_thoughts_and_attachments_of_inspect_are_shown(tmp_path: Path) -> None:
    thought = [{"type": "reasoning", "reasoning": "I compute."}, {"type": "text", "text": ""}]
    call = {"id": "c", "function": "times", "arguments": {"a": 6, "b": 7}, "type": "function"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "attachment://abc"},
        {"role": "assistant", "content": "an example"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": thought, "tool_calls": [call]},
        {"role": "tool", "function": "times", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    prompt = messages[1:4]
    [answer] = read(
        log(tmp_path / "a.eval", sample(input=prompt, messages=messages, attachments={"abc": "Long."}))
    )
    assert answer["prompt"].startswith("system: Be brief.\n\nuser: Long.") and "And?" in answer["prompt"]
    assert "an example" in answer["prompt"] and "an example" not in answer["text"]
    assert all(part in answer["text"] for part in PARTS_OF_TURNS) and answer["text"].endswith(
        "assistant: It is 42."
    )


def test_the_answer_begins_behind_an_input_of_inspect_with_a_system_message_without_marks(
    tmp_path: Path,
) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}]
    call = {"id": "c", "function": "times", "arguments": {"a": 6, "b": 7}, "type": "function"}
    messages = [
        *prompt,
        {"role": "assistant", "content": "I multiply.", "tool_calls": [call]},
        {"role": "tool", "function": "times", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    [answer] = read(log(tmp_path / "a.eval", sample(input=prompt, messages=messages)))
    assert answer["prompt"] == "system: Be brief.\n\nuser: 6*7?"
    assert "I multiply." in answer["text"] and answer["text"].endswith("assistant: It is 42.")


def test_arguments_of_a_call_in_inspect_may_have_the_names_of_parts_of_a_sample(tmp_path: Path) -> None:
    arguments = {"store": "Rome", "events": ["sale"], "attachments": "attachment://abc"}
    call = {"id": "c", "function": "search", "arguments": arguments, "type": "function"}
    prompt = {"role": "user", "content": "Where?"}
    reply = {"role": "assistant", "content": "", "tool_calls": [call], "source": "generate"}
    attachments = {"abc": "a photo"}
    [answer] = read(
        log(tmp_path / "a.eval", sample(messages=[prompt, reply], attachments=attachments, events=[{"x": 1}]))
    )
    assert all(text in answer["text"] for text in ("Rome", "sale", "a photo"))


def test_a_member_that_is_damaged_or_written_twice_hides_no_other(tmp_path: Path, viewer: Viewer) -> None:
    path = log(
        viewer.folder / "a.eval", sample(1), "{half", sample(3), status="error", error={"message": "out"}
    )
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("samples/3_epoch_1.json", json.dumps(sample(3, scores={"s": {"value": "I"}})))
    assert [answer["reward"] for answer in read(path)] == [1.0, 0.0]
    page = viewer.page("/answers", run=viewer.folder.name, of="everything")
    assert "3 rows, 2 shown" in page and "samples/1.json" in page
    assert "status is error: out" in page


def test_the_inspect_log_that_treetune_exports_is_read_with_the_same_answers(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path / "run")
    for name in ("log.eval", "log.json"):
        write_inspect_log(choose_evaluation(experiment, None, None), tmp_path / name)
        assert holds_answers(tmp_path / name)
        answers = read(tmp_path / name)
        assert len(answers) == len(ANSWERS)
        for answer, written in zip(answers, ANSWERS, strict=True):
            assert answer["problem"].endswith(f"/{written['problem']}")
            for field in ("sample", "reward", "outcome", "finish_reason", "tokens", "extracted"):
                assert answer[field] == written.get(field), field
            assert (written.get("message") or "") in answer["message"]
            assert answer["prompt"] == written["prompt"]


def test_equal_ids_of_two_tasks_are_two_problems(viewer: Viewer) -> None:
    log(viewer.folder / "logs" / "a.eval", sample(1), task="sums")
    log(viewer.folder / "logs" / "b.eval", sample(1), task="products")
    row = {"example_id": 0, "completion": "x", "reward": 1.0, "is_completed": True}
    lines(
        viewer.folder / "envs" / "results.jsonl",
        row | {"prompt": "a"},
        row | {"prompt": "b"},
        row | {"prompt": "a"},
    )
    for run in ("logs", "envs"):
        assert "<b>2</b> problems" in viewer.page("/problems", run=run, of="everything")


# verifiers and prime-rl


def test_a_result_of_verifiers_says_how_it_ended(tmp_path: Path) -> None:
    row = {
        "example_id": 3,
        "task": "sums",
        "prompt": PROMPT_MESSAGES,
        "completion": TURNS,
        "answer": "42",
        "reward": 1.0,
    }
    row |= {"is_completed": True, "is_truncated": False, "stop_condition": "max_turns_reached"}
    row |= {"metrics": {"num_turns": 2.0}, "token_usage": {"input_tokens": 5.0, "output_tokens": 9.0}}
    failed = {"completion": [], "reward": 0.0, "error": "ModelError('500')", "stop_condition": "has_error"}
    named = {"error": "ModelError", "error_chain_repr": "ModelError() -> Timeout()"}
    path = lines(
        tmp_path / "results.jsonl",
        row, row | {"is_truncated": True}, row | {"stop_condition": "prompt_too_long"}, row | failed,
        row | failed | {"error": named}, row | {"reward": None}, row | {"completion": None, "reward": None},
    )  # fmt: skip
    answers = read(path)
    whole, *unfinished = answers[:3]
    assert (
        all(part in whole["text"] for part in PARTS_OF_TURNS)
        and whole["finish_reason"] == "max_turns_reached"
    )
    assert (whole["tokens"], whole["numbers"]["metrics/num_turns"]) == (9, 2.0)
    assert [answer["finish_reason"] for answer in unfinished] == ["length", "length"]
    assert [answer["outcome"] for answer in answers[3:]] == ["error", "error", "unavailable", "unavailable"]
    assert [answer["reward"] for answer in answers[3:]] == [None] * 4
    assert "500" in answers[3]["message"] and "Timeout" in answers[4]["message"]
    assert len({answer["problem"] for answer in answers}) == 1
    assert [answer["sample"] for answer in answers] == list(range(7))


def trace(*messages: Any, **more: Any) -> dict[str, Any]:
    nodes_of_messages = [
        {"message": message, "sampled": message["role"] == "assistant"} for message in messages
    ]
    rewards = {"right": {"score": 1.0, "weight": 1.0}, "short": {"score": 0.5, "weight": 0.2}, "late": None}
    return {
        "nodes": nodes_of_messages,
        "rewards": rewards,
        "stop_condition": "agent_completed",
        "ok": True,
    } | more


def test_episodes_and_traces_of_verifiers_are_read_and_one_that_failed_hides_no_other(tmp_path: Path) -> None:
    task = {"key": "k", "data": {"idx": 0, "prompt": "What is 6*7?", "answer": "42"}}
    good = {"env": {"id": "e"}, "task": task, "ok": True, "traces": [trace(*PROMPT_MESSAGES, *TURNS)]}
    error = {"type": "ProviderError", "message": "upstream 500"}
    path = lines(
        tmp_path / "traces.jsonl",
        good,
        good | {"ok": False, "traces": [trace(ok=False, errors=[error], rewards={})]},
        good | {"ok": False, "traces": [], "errors": [error]},
        good
        | {
            "traces": [trace(*PROMPT_MESSAGES, *TURNS, rewards={"right": {"score": math.nan, "weight": 1.0}})]
        },
        good | {"traces": [trace(*PROMPT_MESSAGES, *TURNS, stop_condition="max_output_tokens")]},
        trace(*PROMPT_MESSAGES, *TURNS, task=task, env_name="e"),
    )
    answers = read(path)
    outcomes = [answer["outcome"] for answer in answers]
    assert outcomes == ["ok", "error", "error", "unavailable", "ok", "ok"]
    assert answers[0]["reward"] == pytest.approx(1.1) and all(
        part in answers[0]["text"] for part in PARTS_OF_TURNS
    )
    assert "upstream 500" in answers[1]["message"] and answers[2]["prompt"] == "What is 6*7?"
    assert answers[4]["finish_reason"] == "length" and answers[5]["reward"] == pytest.approx(1.1)
    assert len({answer["problem"] for answer in answers}) == 1


def test_folders_of_steps_are_one_run_with_a_curve(viewer: Viewer) -> None:
    folder = viewer.folder / "out" / "rollouts"
    task = {"key": "k", "data": {"prompt": "What?", "answer": "42"}}
    for step in (1, 2, 10):
        right = {"right": {"score": float(step > 1), "weight": 1.0}}
        row = {"task": task, "traces": [trace(*PROMPT_MESSAGES, *TURNS, rewards=right)]}
        for kind, part in (("train", "all"), ("train", "effective"), ("eval", "all")):
            lines(folder / f"step_{step}" / kind / part / "traces.jsonl", row)
    [run] = viewer.store.runs()
    assert run.name == "out/rollouts"
    titles = [source.title for source in viewer.store.answers(run).sources()]
    steps = ["step 1 eval", "step 1 train", "step 2 eval", "step 2 train", "step 10 eval", "step 10 train"]
    assert titles == steps
    page = viewer.page("/run", run=run.name)
    assert "mean reward of the answers" in page and "step 10 train" in page
    assert "<b>6</b> answers" in viewer.page("/answers", run=run.name, of="everything")
    source = viewer.store.answers(run).sources()[3].name
    assert 'title="step 1 train">+1.00<' in viewer.page("/problems", run=run.name, of=source)


def test_earlier_prime_rl_has_files_of_training_and_evaluation_in_a_step(viewer: Viewer) -> None:
    row = {"example_id": 0, "prompt": "a", "completion": "b", "reward": 1.0, "is_truncated": False}
    for step in (0, 1):
        lines(viewer.folder / f"step_{step}" / "train_rollouts.jsonl", row)
        lines(viewer.folder / f"step_{step}" / "eval_rollouts.jsonl", row)
    [run] = viewer.store.runs()
    titles = [source.title for source in viewer.store.answers(run).sources()]
    assert titles[:2] == ["step 0 eval_rollouts", "step 0 train_rollouts"] and len(titles) == 4


# SkyRL, verl, slime, TRL, W&B


def test_a_dump_of_skyrl_has_rewards_of_tokens_and_stop_reasons(viewer: Viewer) -> None:
    row = {
        "input_prompt": "What is 6*7?", "output_response": "42", "score": [0.0, 0.0, 1.0],
        "stop_reason": "stop", "env_class": "gsm8k", "data_source": "gsm8k",
        "env_extras": {"reward_spec": {"ground_truth": "42"}},
    }  # fmt: skip
    rows = [row, row | {"score": 0.0, "stop_reason": "length"}, row | {"score": None, "stop_reason": "abort"}]
    folder = viewer.folder / "exports" / "dumped_evals"
    for step in (5, 10):
        path = lines(folder / f"global_step_{step}_evals" / "gsm8k.jsonl", *rows)
        lines(
            folder / f"global_step_{step}_evals" / "aggregated_results.jsonl", {"eval/gsm8k/avg_score": 0.5}
        )
    answers = read(path)
    assert [answer["reward"] for answer in answers] == [1.0, 0.0, None]
    assert [answer["outcome"] for answer in answers] == ["ok", "ok", "error"]
    assert answers[1]["finish_reason"] == "length" and answers[0]["gold"] == "42"
    [run] = viewer.store.runs()
    titles = [source.title for source in viewer.store.answers(run).sources()]
    assert titles == ["step 5 evals gsm8k", "step 10 evals gsm8k"]


def test_a_reward_that_is_no_number_is_not_graded_and_leaves_the_others_alone(viewer: Viewer) -> None:
    row = {"input": "What is 6*7?", "output": "42", "gts": "42", "step": 1, "acc": True}
    path = viewer.folder / "dump" / "1.jsonl"
    lines(path, *(row | {"score": score} for score in (None, math.nan, math.inf, 1.0, 0.0)))
    assert [answer["reward"] for answer in read(path)] == [None, None, None, 1.0, 0.0]
    page = viewer.page("/problems", run="dump", of="everything")
    assert '1 of 2 <span class="note">3 not graded' in page and "mean advantage +0.500" in page
    assert "nan" not in page.partition("<main")[2].casefold()
    lines(path, row | {"score": None}, row | {"score": None})
    page = viewer.page("/problems", run="dump", of="everything")
    assert '<span class="label">not graded</span>' in page and '"label">no signal' not in page


def test_tables_of_trl_have_a_reward_of_several_functions(viewer: Viewer) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {
            "step": 5,
            "prompt": "a",
            "completion": "b",
            "right_reward": 1.0,
            "form_reward": 0.5,
            "advantage": 0.7,
        },
        {
            "step": 5,
            "prompt": "a",
            "completion": "c",
            "right_reward": 0.0,
            "form_reward": None,
            "advantage": -0.7,
        },
        {
            "step": 5,
            "prompt": "a",
            "completion": "d",
            "right_reward": None,
            "form_reward": None,
            "advantage": 0.0,
        },
    ]
    folder = viewer.folder / "out" / "completions"
    folder.mkdir(parents=True)
    for step in (5, 10):
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"completions_{step:05d}.parquet")
    answers = read(folder / "completions_00005.parquet")
    assert [answer["reward"] for answer in answers] == [1.5, 0.0, None]
    assert "sum of right_reward, form_reward" in answers[0]["message"]
    [run] = viewer.store.runs()
    assert [source.number for source in viewer.store.answers(run).sources()] == [5, 10]
    parquet.write_table(pa.table({"prompt": ["a"], "completion": ["b"]}), viewer.folder / "data.parquet")
    assert viewer.store.runs() == [run], "a data set is no run"


def test_a_table_of_wandb_is_a_data_set_and_has_answers(viewer: Viewer) -> None:
    table = {
        "columns": ["step", "prompt", "completion", "reward"],
        "data": [["1", "a", "b", 1.0], ["1", "a", "c", None]],
    }
    path = viewer.folder / "media" / "completions_3_ab12.table.json"
    path.parent.mkdir()
    path.write_text(json.dumps(table | {"ncols": 4, "nrows": 2}))
    assert [answer["reward"] for answer in read(path)] == [1.0, None]
    assert "completions_3_ab12.table.json" in viewer.page("/data")
    page = viewer.page("/rows", data="media/completions_3_ab12.table.json")
    assert "<b>2</b> rows" in page
    columns = ["step", "input_1", "output_1", "score_1", "input_2", "output_2", "score_2"]
    wide = {
        "columns": columns,
        "data": [[step, "asked", "x", 0.5, "asked too", "y", step] for step in range(3)],
    }
    (viewer.folder / "validation.table.json").write_text(json.dumps(wide))
    assert "<b>6</b> rows" in viewer.page("/rows", data="validation.table.json")


# Rows that can't be mapped, and files that grow


def test_rows_that_are_no_answers_are_shown_as_they_are_and_counted_with_the_reason(viewer: Viewer) -> None:
    row = {"prompt": "a", "response": "b", "score": 1.0}
    path = lines(
        viewer.folder / "mine" / "x.jsonl",
        {"run": "a header"}, row, {"prompt": "a", "score": 1.0}, row | {"response": ["b", "c"]}, 5, row,
    )  # fmt: skip
    path.write_text(path.read_text().replace("\n5\n", "\n5\n{broken}\n"))
    report = FileReport()
    answers = [answer for _, answer in answers_in(path, report)]
    assert (report.rows, len(answers)) == (7, 5)
    outcomes = [answer["outcome"] for answer in answers]
    assert outcomes == ["unavailable", "ok", "unavailable", "unavailable", "ok"]
    page = viewer.page("/answers", run="mine", of="everything")
    assert "x.jsonl: 7 rows, 5 shown; 3 of these as JSON" in page
    for reason in (
        "it has no prompt",
        "it has no answer",
        "a list of 2 values: line 4",
        "not a JSON object: line 5",
    ):
        assert reason in page, reason
    assert "a header" in page and "not valid JSON: line 6" in page


def test_a_conversation_in_one_field_and_an_endpoints_reply_are_answers(tmp_path: Path) -> None:
    [answer] = read(lines(tmp_path / "a.jsonl", {"messages": [*PROMPT_MESSAGES, *TURNS], "reward": 1.0}))
    assert answer["prompt"].endswith("user: What is 6*7?") and all(
        part in answer["text"] for part in PARTS_OF_TURNS
    )
    choice = {"message": {"role": "assistant", "content": "4"}, "finish_reason": "length"}
    reply = {"choices": [choice], "usage": {"completion_tokens": 1}}
    [answer] = read(lines(tmp_path / "b.jsonl", {"question": "6*7?", "output": reply, "score": "0"}))
    assert (answer["text"], answer["finish_reason"], answer["tokens"]) == ("4", "length", 1)
    assert not holds_answers(lines(tmp_path / "c.jsonl", {"messages": PROMPT_MESSAGES, "pass_rate": 0.5}))


def test_a_row_too_deep_or_with_endless_numbers_hides_no_other(tmp_path: Path) -> None:
    row = {"prompt": "a", "response": "b", "score": 1.0}
    deep: Any = "x"
    for _ in range(400):
        deep = {"prompt": [deep]}
    path = lines(tmp_path / "x.jsonl", row, row | {"prompt": deep}, row | {"response_length": 10**30})
    path.write_text(path.read_text() + json.dumps(row | {"score": 1}).replace(": 1}", f": 1{'0' * 400}}}"))
    answers = read(path)
    assert len(answers) == 4 and answers[2]["tokens"] is None and answers[3]["reward"] is None


def test_only_some_numbers_in_file_names_are_steps(tmp_path: Path) -> None:
    steps = {
        name: step_of(tmp_path / name, tmp_path)
        for name in ("10.jsonl", "completions_00005.parquet", "rollout_7.pt", "eval-3.jsonl", "step_4.jsonl",
                     "aime_2024.jsonl", "math500.jsonl", "2026-01-01T00-00-00_t_7.eval")
    }  # fmt: skip
    assert [step.number for step in steps.values()] == [10, 5, 7, 3, 4, None, None, None]
    assert steps["eval-3.jsonl"].label == "eval"


def test_a_file_that_grows_is_shown_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes between every two requests: the earlier index is shown until the next is built."""
    monkeypatch.setattr("treetune.view.store.answers.MOST_BYTES_READ_AT_ONCE", 0)
    store = Store([tmp_path], tmp_path / "cache", look_again_s=0.0)
    row = {"prompt": "a", "response": "b", "score": 1.0}
    path = lines(tmp_path / "theirs" / "1.jsonl", row, row)
    [run] = store.runs()
    answers = store.answers(run)
    answers.read_now(answers.sources()[0])
    answers._look_again_s, answers._last_listed_at = 0.0, -math.inf
    monkeypatch.setattr(answers, "_make_indexes", lambda missing, working=None: working and working.release())
    for count in (3, 4):
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        assert answers.ask(RowQuery()).total == 2, f"as it was before, while {count} are read"
    with path.open("a") as file:
        file.write(json.dumps(row)[:10])
    answers.read_now(answers.sources()[0])
    answers._look_again_s, answers._last_listed_at = 0.0, -math.inf
    assert answers.ask(RowQuery()).total == 4
    assert "its last line is incomplete" in "".join(answers.problems())
    os.truncate(path, 0)
    assert answers.ask(RowQuery()).total == 0, "a file that shrank is read anew"
