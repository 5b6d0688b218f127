"""Answers graded per second, in the run's own process and in worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.pairs import Measurement, in_turns, rates, timed
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


@dataclass(frozen=True, kw_only=True)
class IsolatedFinalAnswer(FinalAnswer):
    """The same grader, sent to workers: what isolation costs per answer."""

    isolation: ClassVar[Isolation] = "process"


def measure(setting: Setting) -> dict[str, Measurement]:
    config = setting.configuration("grpo")
    problems = config.task.problems("train")[:ANSWERS]
    answers = [
        (config.task.demonstration(problem, derive_seed(config.seed, place)), problem)
        for place, problem in enumerate(problems)
    ]
    mathematical = [_mathematical(place) for place in range(MATH_ANSWERS)]
    return {
        f"grading/{name}": _against_calls(grader, pairs, workers, setting)
        for name, grader, pairs, workers in (
            ("in_process", FinalAnswer(), answers, config.grader_workers),
            ("isolated", IsolatedFinalAnswer(), answers, config.grader_workers),
            ("numeric", Numeric(), mathematical, CORES),
            ("math", MathGrader(), mathematical, CORES),
            ("minerva", Minerva(), mathematical, CORES),
        )
    }


def _mathematical(place: int) -> tuple[str, Problem]:
    """One of nine usual forms, every fourth one wrong, with numbers of its own: none is graded twice."""
    n, off = place + 2, int(place % 4 == 0)
    gold, answer = (
        (f"{n}", f"{n + off}"),
        (rf"\frac{{{n}}}{{{n + 1}}}", f"{n + off}/{n + 1}"),
        (f"{n},000", rf"\${n + off}{{,}}000"),
        (rf"{n}\sqrt{{3}}", rf"\sqrt{{{3 * n * n + off}}}"),
        (f"x^2+{2 * n}x+{n * n}", f"(x+{n + off})^2"),
        (f"({n},\\infty)", f"x > {n + off}"),
        (f"({n}, {n + 1})", rf"\left({n},{n + 1 + off}\right)"),
        (rf"{n}\text{{ cm}}", f"{n + off} cm"),
        (rf"\frac{{{n}\pi}}{{7}}", rf"\frac{{{n + off}}}{{7}}\pi"),
    )[place % 9]
    response = f"Let us see.\nIt is $\\boxed{{{answer}}}$.\n#### {answer}"
    return response, Problem(id=f"test/{place}", prompt="?", gold=gold)


def _against_calls(grader: Grader, answers: list, workers: int, setting: Setting) -> Measurement:
    grader.prepare()
    with GraderPool(grader, workers=workers, memo_size=0) as pool:
        pool.grade_many(answers[: 8 * workers])  # workers are up
        seconds = in_turns(
            {
                "ours": timed(lambda turn: pool.grade_many(answers)),
                "theirs": timed(lambda turn: [grader.grade(text, problem) for text, problem in answers]),
            },
            setting.repeats,
        )
    return Measurement(
        unit="answers/s",
        ours=rates(len(answers), seconds["ours"]),
        theirs=rates(len(answers), seconds["theirs"]),
        what={
            "ours": f"GraderPool, isolation={grader.isolation!r}",
            "theirs": "calls of the grader, unguarded",
        },
        details={"answers": len(answers), "workers": 0 if grader.isolation == "inline" else workers},
    )
