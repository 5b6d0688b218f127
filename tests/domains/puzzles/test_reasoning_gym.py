"""Promises of the tasks from the library reasoning_gym:

* every data set is known by its name, and a setting that the library refuses is told with its key;
* problems are the same in every process, and can be stored with their answers;
* golds score in full, empty answers don't, and an answer on which a scorer raises is wrong.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import cases
from treetune.domains.graders.reasoning_gym import ReasoningGymGrader
from treetune.domains.puzzles import reasoning_gym as library
from treetune.domains.puzzles.reasoning_gym import ReasoningGym, data_sets, missing_packages
from treetune.domains.sandbox.inside.reasoning_gym_scores import pack, unpack
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem

pytestmark = pytest.mark.skipif(
    bool(missing_packages()), reason=f"not installed: {', '.join(missing_packages())}"
)


CASES = Path(__file__).parent / "cases/reasoning_gym.txt"


def small(dataset: str, **settings: Any) -> ReasoningGym:
    return ReasoningGym(dataset=dataset, train_size=30, validation_size=10, test_size=10, **settings)


def questions(task: ReasoningGym, split: Any) -> list[str]:
    return [problem.data["question"] for problem in task.problems(split)]


def test_every_data_set_of_the_library_is_known_by_its_name() -> None:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    assert reasoning_gym
    assert set(data_sets()) == set(DATASETS) - {"composite"}


@pytest.mark.parametrize(("settings", "key", "part_of_message"), cases(CASES, "refused settings"))
def test_a_setting_that_the_library_refuses_is_told_with_its_key(
    settings: dict[str, Any], key: str, part_of_message: str
) -> None:
    (finding,) = ReasoningGym(**settings).check(None)  # type: ignore[arg-type]
    assert finding.key == key
    assert part_of_message in f"{finding.what} {finding.remedy}"


@pytest.mark.parametrize("wrong", [{"question": "(a)(b)"}, {"question": "(a"}, {"prompt": "no place"}])
def test_a_prompt_without_a_placeholder_and_a_question_without_one_group_are_refused(
    wrong: dict[str, str],
) -> None:
    with pytest.raises(ValueError, match=r"one group|expression|\{question\}"):
        ReasoningGym(dataset="spell_backward", **wrong)  # type: ignore[arg-type]


def test_too_few_different_problems_are_told() -> None:
    with pytest.raises(ValueError, match="gave only"):
        small("count_bits", config={"min_n": 1, "max_n": 20}).problems("train")


@pytest.mark.parametrize("dataset", ["ransom_note", "list_functions"])
def test_problems_are_the_same_whatever_the_process_drew_or_hashed_before(
    dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = small(dataset).problems("test")
    library._ask_maker.cache_clear()
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    # Another template is another task, whose problems are not kept yet.
    again = small(dataset, prompt="{question}?").problems("test")
    assert [(p.data, p.gold) for p in again] == [(p.data, p.gold) for p in before]


def test_a_data_set_that_never_ends_is_refused_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MAKE_SECONDS", 0.001)
    with pytest.raises(ValueError, match="made no problems within 0 s: ask for fewer"):
        small("chain_sum", prompt="{question} never ends").problems("train")


def test_levels_and_settings_say_how_hard_it_is() -> None:
    def digits(task: ReasoningGym) -> set[int]:
        words = " ".join(questions(task, "train")).replace("+", " ").replace("-", " ").split()
        return {len(word) for word in words if word.isdigit()}

    assert max(digits(small("chain_sum", levels={"num_digits": 2}))) == 3
    assert min(digits(small("chain_sum", levels={"num_digits": 2}, level_mode="upper_bound"))) == 3
    assert digits(small("chain_sum", level=2, config={"min_digits": 1, "max_digits": 1})) == {1}


def test_enumerations_of_the_library_are_written_as_texts() -> None:
    (problem, *_) = small("word_sorting", config={"transformation": "uppercase"}).problems("test")
    assert problem.gold == problem.gold.upper()
    assert ReasoningGymGrader().grade(f"<answer>{problem.gold}</answer>", problem).correct


def test_golds_score_in_full_and_empty_answers_do_not() -> None:
    names = ["spell_backward", "chain_sum", "countdown", "letter_jumble", "mini_sudoku", "gsm_symbolic"]
    problems: list[Problem] = []
    for name in names:
        problems += small(name).problems("test")
    problems = [replace(problem, id=f"{number}") for number, problem in enumerate(problems)]
    golds = [(f"so: <answer>\n{problem.gold}\n</answer>", problem) for problem in problems]
    empty_answers = [("<answer> </answer>", problem) for problem in problems]
    with GraderPool(ReasoningGymGrader(), workers=1) as pool:
        grades_of_golds = pool.grade_many(golds)
        grades_of_empty = pool.grade_many(empty_answers)
    assert [grade.reward for grade in grades_of_golds] == [1.0] * len(problems)
    assert {(grade.reward, grade.outcome) for grade in grades_of_empty} == {(0.0, "no_answer")}


def test_an_answer_on_which_a_scorer_raises_is_wrong_and_says_so() -> None:
    problem = small("prime_factorization").problems("test")[0]
    grade = ReasoningGymGrader().grade("<answer>two times three</answer>", problem)
    assert (grade.reward, grade.outcome) == (0.0, "ok")
    assert grade.message is not None and "ValueError" in grade.message


def test_a_scorer_sees_the_whole_question_where_the_prompt_holds_a_part() -> None:
    task = small("spell_backward", question=r"nus\): (\w+)", prompt="{question}>")
    problem = task.problems("test")[0]
    word = problem.prompt.removesuffix(">")
    assert problem.data["question"].endswith(f": {word}") and word[::-1] == problem.gold
    assert task.grader.grade(f"<answer>{problem.gold}</answer>", problem).correct


def test_a_noisy_teacher_gives_answers_to_other_problems() -> None:
    task = small("spell_backward", demonstration_noise=0.5)
    right = []
    for seed, problem in enumerate(task.problems("train") * 10):
        right.append(task.grader.grade(task.demonstration(problem, seed), problem).correct)
    # Half of the demonstrations are of other problems, and some of those have the same answer.
    assert 0.4 < sum(right) / len(right) < 0.65


def test_a_data_set_without_answers_has_no_demonstrations() -> None:
    with pytest.raises(ValueError, match="only scores"):
        small("rush_hour").demonstration(small("rush_hour").problems("train")[0], 0)


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.fractions(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.integers()), inner)
    ),
    max_leaves=12,
)


@given(DATA)
def test_values_for_scorers_are_unpacked_as_they_were(value: Any) -> None:
    json.loads(pack(value))
    assert repr(unpack(pack(value))) == repr(value)


def test_problems_can_be_stored_with_answers() -> None:
    problem = small("graph_color").problems("test")[0]
    assert json.loads(json.dumps(problem.data)) == problem.data
    assert isinstance(problem, Problem)
