"""Answers graded per second, in the run's own process and in worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.pairs import Measurement, in_turns, rates, timed
from benchmarks.setting import Setting

from treetune.seeds import derive_seed
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.pool import GraderPool

ANSWERS = 4096


@dataclass(frozen=True, kw_only=True)
class IsolatedFinalAnswer(FinalAnswer):
    """The same grader, sent to workers: what isolation costs per answer."""

    isolated: ClassVar[bool] = True


def measure(setting: Setting) -> dict[str, Measurement]:
    config = setting.configuration("grpo")
    problems = config.task.problems("train")[:ANSWERS]
    answers = [
        (config.task.demonstration(problem, derive_seed(config.seed, place)), problem)
        for place, problem in enumerate(problems)
    ]
    return {
        f"grading/{name}": _against_calls(grader, answers, config.grader_workers, setting)
        for name, grader in (
            ("in_process", FinalAnswer()),
            ("isolated", IsolatedFinalAnswer()),
        )
    }


def _against_calls(grader: Grader, answers: list, workers: int, setting: Setting) -> Measurement:
    with GraderPool(grader, workers=workers, memo_size=0) as pool:
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
        what={"ours": f"GraderPool, isolated={grader.isolated}", "theirs": "calls of the grader, unguarded"},
        details={"answers": len(answers), "workers": workers if grader.isolated else 0},
    )
