"""Promises of reward functions in the forms of verl, TRL and verifiers:

* each runs unchanged, with the arguments that its library gives it, in this Python and in another one;
* a function of several turns may reward each turn;
* nonsense, hanging and dying cost an answer its reward and nothing else;
* a weighted sum keeps each reward as a number and takes the outcome of a part that fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from treetune.config import folders
from treetune.domains import foreign
from treetune.domains.graders.function import FunctionGrader
from treetune.domains.graders.weighted import Weighted
from treetune.rollouts.numbers import add_measured_numbers, collect_number_columns
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.conformance import Case, conformance
from treetune.tasks.graders.pool import GraderPool
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import Grade, Message, Problem, Segment, TextCodec, Trajectory, Transcript

DATA = {"data_source": "sums", "extra_info": {"level": 3}}
PROBLEM = Problem(id="p", prompt="2 + 2?", gold="4", data=DATA)


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shutil.copy(Path(__file__).parent / "programs/foreign_rewards.txt", tmp_path / "foreign_rewards.py")
    monkeypatch.setattr(folders, "_OWN_FOLDERS", folders.OwnFolders())
    finders = list(sys.meta_path)
    folders.set_search_folders([tmp_path])
    yield
    sys.meta_path[:] = finders
    sys.modules.pop("foreign_rewards", None)


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a Python in which nothing is installed, and return its path."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return str(folder / "bin/python")


REWARDS: dict[str, Any] = {
    "compute_score": 1.0,
    "with_extra_info": 0.3,
    "told": -0.5,
    "asked": 1.0,
    "compute_scores": 4.0,
    "reward_len": -0.65,
    "columns": 1.0,
    "for_sums_alone": 0.25,
    "exact": 1.0,
    "short": 0.5,
    "rubric": 3.05,
    "load_environment": 3.05,
    "last_reply": 1.0,
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_function_in_the_form_of_another_library_runs_unchanged_in_either_python(
    name: str, other_python: str
) -> None:
    grade = FunctionGrader(path=f"foreign_rewards.py:{name}").grade("It is 4", PROBLEM)
    assert (grade.outcome, grade.reward) == ("ok", pytest.approx(REWARDS[name]))
    grader_elsewhere = FunctionGrader(path=f"foreign_rewards.py:{name}", python=other_python)
    assert grader_elsewhere.grade("It is 4", PROBLEM) == grade


def test_other_numbers_of_a_function_are_kept_and_a_function_that_does_not_apply_gives_no_answer() -> None:
    of_dictionary = FunctionGrader(path="foreign_rewards.py:told").grade("It is 4", PROBLEM)
    assert of_dictionary.numbers == {"rewards/score": -0.5, "rewards/acc": 1.0, "rewards/words": 3.0}
    of_rubric = FunctionGrader(path="foreign_rewards.py:rubric").grade("It is 5", PROBLEM)
    assert of_rubric.numbers == {"rewards/exact": 0.0, "rewards/short": 0.5, "rewards/parsed": 0.0}
    of_another_source = replace(PROBLEM, data={"data_source": "words"})
    assert (
        FunctionGrader(path="foreign_rewards.py:for_sums_alone").grade("4", of_another_source).outcome
        == "no_answer"
    )


def test_weighted_functions_that_all_return_none_give_no_answer() -> None:
    def right(completion: Any) -> float | None:
        return 1.0 if "4" in str(completion) else None

    def never(completion: Any) -> None:
        return None

    row = {"prompt": "2 + 2?", "gold": "4", "domain": "", "data": {}, "messages": []}

    def rewards(response: str) -> list[float]:
        turn = [{"role": "assistant", "content": response}]
        rubric = SimpleNamespace(funcs=[right, never], weights=[0.5, 1.0])
        rewards_of_functions, _ = foreign.grade_answer(
            rubric, "rubric", response, {**row, "transcript": (response, [turn], [0.0])}, {}
        )
        return rewards_of_functions

    assert rewards("4") == [0.5]
    assert rewards("five") == []


def test_completions_are_conversations_where_prompts_are() -> None:
    chat = replace(PROBLEM, messages=(Message("system", "Add."), Message("user", "2 + 2?")))
    grader = FunctionGrader(path="foreign_rewards.py:of_chats")
    assert [grader.grade(response, chat).reward for response in ("4", "5")] == [1.0, 0.0]


# In several turns


def turn(content: str, *results: tuple[str, str], **arguments: int) -> list[dict[str, Any]]:
    """Write a turn's messages; with results, which are pairs of id and text, it has called `multiply`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if results:
        function = {"name": "multiply", "arguments": arguments}
        message["tool_calls"] = [{"id": results[0][0], "type": "function", "function": function}]
    messages = [message]
    for call_id, text in results:
        messages.append({"role": "tool", "name": "multiply", "tool_call_id": call_id, "content": text})
    return messages


PROBLEM_OF_TURNS = replace(
    PROBLEM,
    gold="816",
    messages=(Message("user", "12 times 34, twice?"),),
    transcript=Transcript(
        "So.\nuser\n408\nassistant\nSo.\nuser\n816\nassistant\nIt is 816, not 408.",
        [
            turn("So.", ("call00001", "408"), one=12, other=34),
            turn("So.", ("call00002", "816"), one=408, other=2),
            turn("It is 816, not 408."),
        ],
        [0.25, 0.0, 0.5],
    ),
)
REWARDS_OF_TURNS: dict[str, tuple[float, ...]] = {
    "paid_for_turns": (0.0, 0.0, 1.0),
    "scores_of_turns": (1.25, 1.0, 1.5),
    "called": (0.0, 0.0, 1.05),
    "each_turn": (0.0, 0.0, 1.0),
    "stepped": (0.0, 0.25, 2.75),
    "traced": (0.0, 0.0, 1.0),
}


@pytest.mark.parametrize("name", REWARDS_OF_TURNS)
def test_a_function_of_several_turns_has_the_arguments_of_its_library_and_may_reward_each_turn(
    name: str, other_python: str
) -> None:
    grade = FunctionGrader(path=f"foreign_rewards.py:{name}").grade("It is 816, not 408.", PROBLEM_OF_TURNS)
    assert (grade.outcome, grade.step_rewards) == ("ok", pytest.approx(REWARDS_OF_TURNS[name]))
    assert grade.reward == pytest.approx(sum(REWARDS_OF_TURNS[name]))
    grader_elsewhere = FunctionGrader(path=f"foreign_rewards.py:{name}", python=other_python)
    assert grader_elsewhere.grade("It is 816, not 408.", PROBLEM_OF_TURNS) == grade
    without_messages = replace(PROBLEM_OF_TURNS, messages=())  # a prompt of text, as a conversation
    grader = FunctionGrader(path=f"foreign_rewards.py:{name}")
    assert grader.grade("It is 816, not 408.", without_messages) == grade


def test_messages_are_of_verifiers_own_classes_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("verifiers.types")
    library.AssistantMessage = type("AssistantMessage", (SimpleNamespace,), {})
    monkeypatch.setitem(sys.modules, "verifiers.types", library)
    row = {"prompt": "", "gold": "", "data": {}, "domain": "", "messages": ()}
    message, tool_message, *_ = foreign.verifiers_state({**row, "transcript": PROBLEM_OF_TURNS.transcript})[
        "completion"
    ]
    assert isinstance(message, library.AssistantMessage) and message.tool_calls[0].name == "multiply"
    assert tool_message.content == tool_message["content"] == "408"


def test_the_score_in_verls_form_stands_at_the_end_of_all_tokens_of_the_turns() -> None:
    wrong = FunctionGrader(path="foreign_rewards.py:paid_for_turns").grade(
        "", replace(PROBLEM_OF_TURNS, gold="5")
    )
    assert wrong.reward == pytest.approx(-0.8)
    right = FunctionGrader(path="foreign_rewards.py:paid_for_turns").grade("", PROBLEM_OF_TURNS)
    assert right.numbers["rewards/scored"] == 0.75


def test_rewards_of_turns_are_weighted_and_equal_last_turns_of_other_conversations_are_told_apart() -> None:
    graders: dict[str, Grader] = {
        "turns": FunctionGrader(path="foreign_rewards.py:scores_of_turns"),
        "right": FunctionGrader(path="foreign_rewards.py:paid_for_turns"),
    }
    assert PROBLEM_OF_TURNS.transcript is not None
    without_rewards = replace(
        PROBLEM_OF_TURNS, transcript=PROBLEM_OF_TURNS.transcript._replace(rewards=[0.0, 0.0, 0.5])
    )
    with GraderPool(Weighted(graders=graders, weights={"turns": 2.0}), workers=1) as pool:
        grade, grade_without_rewards = pool.grade_many(
            [("It is 816", PROBLEM_OF_TURNS), ("It is 816", without_rewards)]
        )
    assert grade.step_rewards == (2.5, 2.0, 4.0) and grade.reward == 8.5
    assert grade_without_rewards.step_rewards == (2.0, 2.0, 4.0)


def test_a_wrong_number_of_rewards_is_an_error() -> None:
    grader = FunctionGrader(path="foreign_rewards.py:two")
    with pytest.raises(ValueError, match="or one for each of the 3 turns"):
        grader.grade("", PROBLEM_OF_TURNS)


FAILURES = {
    "nan": ("error", "finite number"),
    "two": ("error", "a list with one number (or"),
    "raises": ("error", "KeyError: 'level'"),
    "hangs": ("timeout", "no result within 2 s"),
    "dies": ("error", "ended with exit code 3"),
}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_nonsense_hanging_and_dying_cost_an_answer_its_reward_in_either_python(
    elsewhere: bool, other_python: str
) -> None:
    for name, (outcome, message) in FAILURES.items():
        python = other_python if elsewhere else None
        grader = FunctionGrader(path=f"foreign_rewards.py:{name}", python=python)
        with GraderPool(grader, workers=1, deadline=2.0) as pool:
            (grade,) = pool.grade_many([("It is 4", PROBLEM)])
        assert (grade.outcome, grade.reward) == (outcome, 0.0) and message in str(grade.message), name


def test_after_a_death_the_next_answer_has_another_process_and_what_is_printed_is_no_reward(
    other_python: str,
) -> None:
    grader = FunctionGrader(path="foreign_rewards.py:dies", python=other_python)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="exit code 3"):
            grader.grade("4", PROBLEM)
    assert (
        FunctionGrader(path="foreign_rewards.py:prints", python=other_python).grade("4", PROBLEM).reward == 1
    )


def test_a_grade_of_a_function_in_another_python_is_the_same_as_in_this_one() -> None:
    path = "foreign_rewards.py:graded"
    with_treetune = FunctionGrader(path=path, python=sys.executable)
    grade = with_treetune.grade("It is 4", PROBLEM)
    assert grade == FunctionGrader(path=path).grade("It is 4", PROBLEM)
    assert grade.step_rewards == (0.25, 0.5) and grade.numbers == {"tests": 3.0}


def test_a_result_of_another_python_that_is_no_json_is_an_error_with_its_reason(other_python: str) -> None:
    grader = FunctionGrader(path="foreign_rewards.py:without_json", python=other_python)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="TypeError: Object of type object is not JSON serializable"):
            grader.grade("4", PROBLEM)


def test_an_object_with_other_fields_than_a_grade_is_an_error_that_says_so(other_python: str) -> None:
    grader = FunctionGrader(path="foreign_rewards.py:with_other_fields", python=other_python)
    with pytest.raises(RuntimeError, match=r"an object that isn't a Grade: .*points"):
        grader.grade("4", PROBLEM)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere.py:f"}, "there is no file nowhere.py"),
        ({"path": "foreign_rewards.py:exactly"}, "has no 'exactly'"),
        ({"path": "foreign_rewards.py:exact", "python": "/no/python"}, "can't be run"),
        ({"path": "foreign_rewards.py:exact", "python": sys.executable, "isolation": "service"}, "leave one"),
    ],
)
def test_a_path_or_python_that_cannot_be_run_is_refused_at_once(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionGrader(**settings)


class Fixed(Grader):
    """Return the grade in the problem's data."""

    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(**problem.data["grade"])


def test_a_weighted_sum_has_each_reward_as_a_number_and_the_outcome_of_what_fails() -> None:
    path = "foreign_rewards.py"
    graders: dict[str, Grader] = {
        "right": FunctionGrader(path=f"{path}:compute_score"),
        "length": FunctionGrader(path=f"{path}:reward_len"),
    }
    grader = Weighted(graders=graders, weights={"length": 0.5})
    with GraderPool(grader, workers=1) as pool:
        (grade,) = pool.grade_many([("It is 4", PROBLEM)])
    assert (grade.outcome, grade.reward) == ("ok", pytest.approx(0.675))
    assert grade.numbers == {"rewards/right": 1.0, "rewards/length": -0.65}
    answer = Trajectory(PROBLEM, 0, (1,), (Segment((2,)),), "stop", "4", grade, (1,))
    trees = add_measured_numbers(trees_of([answer]), TextCodec(encode=list, decode=str, eos_id=0))
    assert collect_number_columns(answers_of(trees)) == {"rewards/right": [1.0], "rewards/length": [-0.65]}
    for outcome in ("unavailable", "error", "timeout"):
        failing_grade = {"reward": 0.0, "outcome": outcome, "message": "so"}
        problem = replace(PROBLEM, data={**DATA, "grade": failing_grade})
        both = Weighted(graders={"one": graders["right"], "other": Fixed()})
        with GraderPool(both, workers=1) as pool:
            (grade,) = pool.grade_many([("4", problem)])
        assert (grade.outcome, grade.reward, grade.message) == (outcome, 0.0, "other: so")
    with pytest.raises(ValueError, match="weights has size"):
        Weighted(graders=graders, weights={"size": 1.0})


def test_a_weighted_sum_passes_the_conformance_suite() -> None:
    right = FunctionGrader(path="foreign_rewards.py:compute_score")
    case = Case(PROBLEM, right=["It is 4"], wrong=["It is 5"], nearly=["4.5"], silent=[])
    conformance(Weighted(graders={"right": right}), [case], deadline=20.0)
