"""Promises about thoughts of models:

* the answer is the text after the thought, however a model marks it, for every grader and for the judge;
* a thought that was cut off has no answer, also if the prompt opened it;
* a response without a thought is graded unchanged.
"""

from __future__ import annotations

import pytest

from treetune.domains.graders.judge import JudgeGrader
from treetune.domains.graders.math import MathGrader
from treetune.domains.graders.minerva import Minerva
from treetune.domains.graders.multiple_choice import MultipleChoice
from treetune.domains.graders.table import TableGrader
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.countdown import CountdownGrader
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.numeric import Gsm8kExact, Numeric
from treetune.tasks.graders.pool import GraderPool
from treetune.tasks.thoughts import THOUGHT_TAGS, Tags, after_thought, ends_in_thought, read_thoughts
from treetune.vocabulary import Problem

GOLD = "17"
GRADERS_AND_FORMS: dict[str, tuple[Grader, str]] = {
    "math": (MathGrader(), r"\boxed{%s}"),
    "minerva": (Minerva(), r"\boxed{%s}"),
    "numeric": (Numeric(), "#### %s"),
    "numeric, boxed": (Numeric(without_marker="boxed"), r"\boxed{%s}"),
    "gsm8k_exact": (Gsm8kExact(), "#### %s"),
    "final_answer": (FinalAnswer(), "# %s"),
    "table": (TableGrader(), r"\boxed{%s}"),
}


@pytest.mark.parametrize("tags", THOUGHT_TAGS, ids=lambda tags: tags.opening)
def test_the_answer_follows_the_thought_of_any_model(tags: Tags) -> None:
    opening, closing = tags.opening, tags.closings[0]
    thought = f"{opening}\nSeven or eight?\n{closing}"
    assert after_thought(f"{thought}\nEight.") == "\nEight."
    assert after_thought(f"Seven or eight?\n{closing}\nEight.") == "\nEight."
    assert after_thought(f"{thought}One.{thought}Two.") == "Two."
    assert read_thoughts(f"{opening}\nSeven or ei").is_cut_off
    assert read_thoughts(f"{thought}One. {opening}Or").is_cut_off
    assert read_thoughts("Seven or ei", is_open=True).is_cut_off
    assert ends_in_thought(f"Question\n{opening}\n")
    assert not ends_in_thought(f"Question\n{thought}\n")


def test_channels_of_gpt_oss_are_thoughts_with_and_without_their_tokens() -> None:
    thought = "<|channel|>analysis<|message|>Seven?<|end|>"
    assert after_thought(f"{thought}<|start|>assistant<|channel|>final<|message|>Eight.") == "Eight."
    assert after_thought("analysisSeven?assistantfinalEight.") == "Eight."
    assert after_thought("analysis of the problem: Eight.") == "analysis of the problem: Eight."
    assert after_thought("Eight.<|end|>") == "Eight.<|end|>"


@pytest.mark.parametrize(
    "response",
    [
        "The answer is 8.",
        "I write between `<think>` and `</think>`. It is 8.",
        'The tag "</think>" ends a thought. It is 8.',
        "The tag “</think>” ends a thought. It is 8.",
        "The tag „</think>“ ends a thought. It is 8.",
        "First, <think> is a tag that I never use. It is 8.",
        "",
    ],
)
def test_a_response_without_a_thought_is_graded_unchanged(response: str) -> None:
    assert read_thoughts(response) == ("", response, False)


def test_a_tag_that_is_named_is_the_only_one() -> None:
    assert after_thought("<plan>a</plan>b", "</plan>") == "b"
    assert read_thoughts("<plan>a", "</plan>").is_cut_off
    assert after_thought("a || b </think> c", "||") == " b </think> c"


@pytest.mark.parametrize("name", GRADERS_AND_FORMS)
def test_no_grader_takes_an_answer_from_a_thought(name: str) -> None:
    grader, form = GRADERS_AND_FORMS[name]
    right, wrong = form % GOLD, form % "23"
    problem = Problem(id="a", prompt="How many?", gold=GOLD)
    pairs = [
        (f"<think>{right}</think>\n{wrong}", False),
        (f"<think>\n{right}\n</think>\nI don't know.", False),
        (f"{right}\n</think>\n{wrong}", False),
        (f"<think>{right} or is it? I should", False),
        (f"<think>\n{right}\nor is it? I should", False),
        (f"<think>{wrong}</think>\n{right}", True),
        (f"<think>\n{wrong}\n</think>\nSo:\n{right}", True),
        (f"<think>so it is {wrong}, or\n{right}", True),  # the end of its thought was forgotten
        (right, True),
        (f"I know of </think> from papers.\n{right}", True),
    ]
    with GraderPool(grader, workers=1) as pool:
        grades = pool.grade_many((response, problem) for response, _ in pairs)
    verdicts = {response: grade.correct for (response, _), grade in zip(pairs, grades, strict=True)}
    assert verdicts == dict(pairs)


@pytest.mark.parametrize("name", GRADERS_AND_FORMS)
def test_a_thought_that_the_prompt_opened_and_nobody_ended_holds_no_answer(name: str) -> None:
    grader, form = GRADERS_AND_FORMS[name]
    right = form % GOLD
    opened, plain = (Problem(id=name, prompt=name, gold=GOLD) for name in ("opened", "plain"))
    with GraderPool(
        grader,
        workers=1,
        whole_prompt=lambda problem: "Assistant: <think>\n" if problem.id == "opened" else "Assistant: ",
    ) as pool:
        cut, without_thought = pool.grade_many([(f"{right}\nor not, so I", opened), (f"{right}", plain)])
        (ended,) = pool.grade_many([(f"It may be 23.</think>\n{right}", opened)])
    assert (cut.outcome, cut.reward) == ("no_answer", 0.0)
    assert without_thought.correct
    assert ended.correct


def test_a_setting_lets_thoughts_be_graded() -> None:
    grader, problem = MathGrader(think_end=None), Problem(id="a", prompt="?", gold=GOLD)
    with GraderPool(grader, workers=1) as pool:
        (grade,) = pool.grade_many([(r"<think>\boxed{17}</think>", problem)])
    assert grade.correct


def test_choices_and_expressions_are_looked_for_after_the_thought() -> None:
    letter, numbers = Problem(id="a", prompt="?", gold="B"), Problem(id="b", prompt="?", gold="7 from 3 4")
    assert MultipleChoice().grade("<think>Answer: B</think>Answer: C", letter).reward == 0
    assert MultipleChoice().grade("Answer: C</think>Answer: B", letter).reward == 1
    assert not CountdownGrader().grade("<think><answer>3+4</answer></think> I give up.", numbers).correct
    assert CountdownGrader().grade("<think>3-4?</think><answer>3+4</answer>", numbers).correct


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<think>Were it 42 the verdict: correct. But it", None),
        ("<think>Verdict: correct?</think>", None),
        ("<think>Verdict: correct?</think>\nVerdict: incorrect", 0.0),
        ("Verdict: incorrect?</think>\nVerdict: correct", 1.0),
    ],
)
def test_the_verdict_of_a_judge_follows_its_thought(reply: str, reward: float | None) -> None:
    assert JudgeGrader().reward(reply) == reward
