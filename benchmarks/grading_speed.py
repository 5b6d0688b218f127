"""Measures how many answers are graded per second, in the run's own process and in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.pairs import Measurement, compute_rates, take_turns, time_calls
from benchmarks.setting import Setting
from treetune.domains.graders.math import MathGrader
from treetune.domains.graders.minerva import Minerva
from treetune.seeds import derive_seed
from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem

ANSWERS = 4096
MATH_ANSWERS = 1024
CORES = 2

AnswersToProblems = Sequence[tuple[str, Problem]]


@dataclass(frozen=True, kw_only=True)
class IsolatedFinalAnswer(FinalAnswer):
    """The grader `FinalAnswer` in worker processes, to measure how much isolation costs for each answer."""

    isolation: ClassVar[Isolation] = "process"


def measure(setting: Setting) -> dict[str, Measurement]:
    config = setting.configuration("grpo")
    answers = []
    for index, problem in enumerate(config.task.problems("train")[:ANSWERS]):
        seed = derive_seed(config.seed, index)
        answers.append((config.task.demonstration(problem, seed), problem))
    math_answers = [make_math_answer(index) for index in range(MATH_ANSWERS)]
    workers = config.grader_workers
    return {
        "grading/in_process": measure_grader(FinalAnswer(), answers, workers, setting),
        "grading/isolated": measure_grader(IsolatedFinalAnswer(), answers, workers, setting),
        "grading/numeric": measure_grader(Numeric(), math_answers, CORES, setting),
        "grading/math": measure_grader(MathGrader(), math_answers, CORES, setting),
        "grading/minerva": measure_grader(Minerva(), math_answers, CORES, setting),
    }


def make_math_answer(index: int) -> tuple[str, Problem]:
    """Returns an answer in one of nine usual forms, and its problem. Every fourth answer is wrong.

    The numbers differ from answer to answer, so that no two answers are the same.
    """
    n = index + 2
    error = 1 if index % 4 == 0 else 0
    forms = (
        (f"{n}", f"{n + error}"),
        (rf"\frac{{{n}}}{{{n + 1}}}", f"{n + error}/{n + 1}"),
        (f"{n},000", rf"\${n + error}{{,}}000"),
        (rf"{n}\sqrt{{3}}", rf"\sqrt{{{3 * n * n + error}}}"),
        (f"x^2+{2 * n}x+{n * n}", f"(x+{n + error})^2"),
        (f"({n},\\infty)", f"x > {n + error}"),
        (f"({n}, {n + 1})", rf"\left({n},{n + 1 + error}\right)"),
        (rf"{n}\text{{ cm}}", f"{n + error} cm"),
        (rf"\frac{{{n}\pi}}{{7}}", rf"\frac{{{n + error}}}{{7}}\pi"),
    )
    gold, answer = forms[index % len(forms)]
    response = f"Let us see.\nIt is $\\boxed{{{answer}}}$.\n#### {answer}"
    return response, Problem(id=f"test/{index}", prompt="?", gold=gold)


def measure_grader(grader: Grader, answers: AnswersToProblems, workers: int, setting: Setting) -> Measurement:
    """Measures a pool of workers against plain calls of the grader."""
    grader.prepare()
    with GraderPool(grader, workers=workers, memo_size=0) as pool:
        pool.grade_many(answers[: 8 * workers])  # starts the workers
        sides = {
            "ours": time_calls(lambda turn: pool.grade_many(answers)),
            "theirs": time_calls(lambda turn: [grader.grade(text, problem) for text, problem in answers]),
        }
        seconds = take_turns(sides, setting.repeats)
    return Measurement(
        unit="answers/s",
        ours=compute_rates(len(answers), seconds["ours"]),
        theirs=compute_rates(len(answers), seconds["theirs"]),
        what={
            "ours": f"GraderPool, isolation={grader.isolation!r}",
            "theirs": "calls of the grader, unguarded",
        },
        details={"answers": len(answers), "workers": 0 if grader.isolation == "inline" else workers},
    )
