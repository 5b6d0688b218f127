"""Answers that are made to hang, crash or fill a grader get a grade like any other."""

from __future__ import annotations

import psutil
import pytest

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.conformance import hostile_answers
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem
from treetune_domains.graders.math import MathGrader
from treetune_domains.graders.minerva import Minerva

COUNT = 250
PATIENCE = 300.0


def test_hostile_answers_are_the_same_for_the_same_seed_and_of_many_kinds() -> None:
    first, again = list(hostile_answers(3, 50)), list(hostile_answers(3, 50))
    assert first == again
    assert first != list(hostile_answers(4, 50))
    assert max(len(response) for response, _ in hostile_answers(3, 200)) > 90_000


@pytest.mark.parametrize("grader", [MathGrader(), Minerva(), Numeric()])
def test_every_hostile_answer_gets_a_grade_and_no_process_is_left(grader: Grader) -> None:
    pairs = [
        (response, Problem(id=f"hostile/{number}", prompt="?", gold=gold))
        for number, (response, gold) in enumerate(hostile_answers(11, COUNT))
    ]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with GraderPool(grader, workers=1, deadline=60.0) as pool:
        grades = [future.result(timeout=PATIENCE) for future in [pool.submit(*pair) for pair in pairs]]
    assert len(grades) == COUNT
    assert {grade.outcome for grade in grades} <= {"ok", "no_answer", "error"}
    assert sum(grade.reward for grade in grades) == 0
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left
