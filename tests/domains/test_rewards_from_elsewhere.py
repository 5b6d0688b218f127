"""Reward functions in the forms of verl, TRL and verifiers run as they are, here and in another Python."""

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
from treetune.rollouts.numbers import add_measured_numbers, columns
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.conformance import Case, conformance
from treetune.tasks.graders.pool import GraderPool
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import Grade, Message, Problem, Segment, TextCodec, Trajectory

DATA = {"data_source": "sums", "extra_info": {"level": 3}}
PROBLEM = Problem(id="p", prompt="2 + 2?", gold="4", data=DATA)


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shutil.copy(Path(__file__).parent / "programs/foreign_rewards.txt", tmp_path / "foreign_rewards.py")
    monkeypatch.setattr(folders, "_OWN", folders.OwnFolders())
    finders = list(sys.meta_path)
    folders.search_in([tmp_path])
    yield
    sys.meta_path[:] = finders
    sys.modules.pop("foreign_rewards", None)


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has nothing installed."""
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
def test_a_function_in_another_library_s_form_runs_as_it_is_in_either_python(
    name: str, other_python: str
) -> None:
    here = FunctionGrader(path=f"foreign_rewards.py:{name}").grade("It is 4", PROBLEM)
    assert (here.outcome, here.reward) == ("ok", pytest.approx(REWARDS[name]))
    there = FunctionGrader(path=f"foreign_rewards.py:{name}", python=other_python)
    assert there.grade("It is 4", PROBLEM) == here


def test_what_else_is_counted_is_kept_and_what_does_not_apply_is_no_answer() -> None:
    told = FunctionGrader(path="foreign_rewards.py:told").grade("It is 4", PROBLEM)
    assert told.numbers == {"rewards/score": -0.5, "rewards/acc": 1.0, "rewards/words": 3.0}
    summed = FunctionGrader(path="foreign_rewards.py:rubric").grade("It is 5", PROBLEM)
    assert summed.numbers == {"rewards/exact": 0.0, "rewards/short": 0.5, "rewards/parsed": 0.0}
    others = replace(PROBLEM, data={"data_source": "words"})
    assert FunctionGrader(path="foreign_rewards.py:for_sums_alone").grade("4", others).outcome == "no_answer"


def test_weighted_functions_that_all_return_none_give_no_answer() -> None:
    def right(completion: Any) -> float | None:
        return 1.0 if "4" in str(completion) else None

    def never(completion: Any) -> None:
        return None

    row = {"prompt": "2 + 2?", "gold": "4", "domain": "", "data": {}, "messages": []}

    def rewards(text: str) -> list[float]:
        turn = [{"role": "assistant", "content": text}]
        rubric = SimpleNamespace(funcs=[right, never], weights=[0.5, 1.0])
        given, _ = foreign.grade_answer(
            rubric, "rubric", text, {**row, "transcript": (text, [turn], [0.0])}, {}
        )
        return given

    assert rewards("4") == [0.5]
    assert rewards("five") == []


def test_completions_are_conversations_where_prompts_are() -> None:
    chat = replace(PROBLEM, messages=(Message("system", "Add."), Message("user", "2 + 2?")))
    grader = FunctionGrader(path="foreign_rewards.py:of_chats")
    assert [grader.grade(said, chat).reward for said in ("4", "5")] == [1.0, 0.0]


# In several turns


def turn(said: str, *results: tuple[str, str], **arguments: int) -> list[dict[str, Any]]:
    """A turn that calls `multiply`, where there are arguments."""
    called = {"name": "multiply", "arguments": arguments}
    calls = {"tool_calls": [{"id": results[0][0], "type": "function", "function": called}]} if results else {}
    heard = [
        {"role": "tool", "name": "multiply", "tool_call_id": call, "content": text} for call, text in results
    ]
    return [{"role": "assistant", "content": said, **calls}, *heard]


CALLED = replace(
    PROBLEM,
    gold="816",
    messages=(Message("user", "12 times 34, twice?"),),
    transcript=(
        "So.\nuser\n408\nassistant\nSo.\nuser\n816\nassistant\nIt is 816, not 408.",
        [
            turn("So.", ("call00001", "408"), one=12, other=34),
            turn("So.", ("call00002", "816"), one=408, other=2),
            turn("It is 816, not 408."),
        ],
        [0.25, 0.0, 0.5],
    ),
)
BY_TURN: dict[str, tuple[float, ...]] = {
    "paid_for_turns": (0.0, 0.0, 1.0),
    "scores_of_turns": (1.25, 1.0, 1.5),
    "called": (0.0, 0.0, 1.05),
    "each_turn": (0.0, 0.0, 1.0),
    "stepped": (0.0, 0.25, 2.75),
    "traced": (0.0, 0.0, 1.0),
}


@pytest.mark.parametrize("name", BY_TURN)
def test_a_function_of_several_turns_has_what_its_own_library_gives_it_and_may_reward_each(
    name: str, other_python: str
) -> None:
    here = FunctionGrader(path=f"foreign_rewards.py:{name}").grade("It is 816, not 408.", CALLED)
    assert (here.outcome, here.step_rewards) == ("ok", pytest.approx(BY_TURN[name]))
    assert here.reward == pytest.approx(sum(BY_TURN[name]))
    there = FunctionGrader(path=f"foreign_rewards.py:{name}", python=other_python)
    assert there.grade("It is 816, not 408.", CALLED) == here
    of_text = replace(CALLED, messages=())  # which a chat's template has made a conversation
    assert FunctionGrader(path=f"foreign_rewards.py:{name}").grade("It is 816, not 408.", of_text) == here


def test_messages_are_of_verifiers_own_classes_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("verifiers.types")
    library.AssistantMessage = type("AssistantMessage", (SimpleNamespace,), {})
    monkeypatch.setitem(sys.modules, "verifiers.types", library)
    row = {"prompt": "", "gold": "", "data": {}, "domain": "", "messages": ()}
    first, heard, *_ = foreign.verifiers_state({**row, "transcript": CALLED.transcript})["completion"]
    assert isinstance(first, library.AssistantMessage) and first.tool_calls[0].name == "multiply"
    assert heard.content == heard["content"] == "408"


def test_verl_counts_the_prompt_and_what_stands_between_turns() -> None:
    wrong = FunctionGrader(path="foreign_rewards.py:paid_for_turns").grade("", replace(CALLED, gold="5"))
    assert wrong.reward == pytest.approx(-0.8)
    right = FunctionGrader(path="foreign_rewards.py:paid_for_turns").grade("", CALLED)
    assert right.numbers["rewards/scored"] == 0.75


def test_rewards_of_turns_are_weighted_and_equal_last_turns_of_other_conversations_are_told_apart() -> None:
    graders: dict[str, Grader] = {
        "turns": FunctionGrader(path="foreign_rewards.py:scores_of_turns"),
        "right": FunctionGrader(path="foreign_rewards.py:paid_for_turns"),
    }
    assert CALLED.transcript is not None
    silent = replace(CALLED, transcript=(*CALLED.transcript[:2], [0.0, 0.0, 0.5]))
    with GraderPool(Weighted(graders=graders, weights={"turns": 2.0}), workers=1) as pool:
        first, second = pool.grade_many([("It is 816", CALLED), ("It is 816", silent)])
    assert first.step_rewards == (2.5, 2.0, 4.0) and first.reward == 8.5
    assert second.step_rewards == (2.0, 2.0, 4.0)


def test_as_many_rewards_as_there_are_not_turns_are_an_error() -> None:
    grader = FunctionGrader(path="foreign_rewards.py:two")
    with pytest.raises(ValueError, match="or one for each of the 3 turns"):
        grader.grade("", CALLED)


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
    for name, (outcome, words) in FAILURES.items():
        python = other_python if elsewhere else None
        grader = FunctionGrader(path=f"foreign_rewards.py:{name}", python=python)
        with GraderPool(grader, workers=1, deadline=2.0) as pool:
            (grade,) = pool.grade_many([("It is 4", PROBLEM)])
        assert (grade.outcome, grade.reward) == (outcome, 0.0) and words in str(grade.message), name


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": "nowhere.py:f"}, "there is no file nowhere.py"),
        ({"path": "foreign_rewards.py:exactly"}, "has no 'exactly'"),
        ({"path": "foreign_rewards.py:exact", "python": "/no/python"}, "can't be run"),
        ({"path": "foreign_rewards.py:exact", "python": sys.executable, "isolation": "service"}, "leave one"),
    ],
)
def test_what_can_not_be_run_is_refused_at_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FunctionGrader(**given)


class Fixed(Grader):
    """Gives what the problem's data says."""

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
    assert columns(
        answers_of(add_measured_numbers(trees_of([answer]), TextCodec(encode=list, decode=str, eos_id=0)))
    ) == {
        "rewards/right": [1.0],
        "rewards/length": [-0.65],
    }
    for outcome in ("unavailable", "error", "timeout"):
        about = replace(PROBLEM, data={**DATA, "grade": {"reward": 0.0, "outcome": outcome, "message": "so"}})
        both = Weighted(graders={"one": graders["right"], "other": Fixed()})
        with GraderPool(both, workers=1) as pool:
            (grade,) = pool.grade_many([("4", about)])
        assert (grade.outcome, grade.reward, grade.message) == (outcome, 0.0, "other: so")
    with pytest.raises(ValueError, match="weights has size"):
        Weighted(graders=graders, weights={"size": 1.0})


def test_a_weighted_sum_stands_the_conformance_suite() -> None:
    right = FunctionGrader(path="foreign_rewards.py:compute_score")
    case = Case(PROBLEM, right=["It is 4"], wrong=["It is 5"], nearly=["4.5"], silent=[])
    conformance(Weighted(graders={"right": right}), [case], deadline=20.0)
