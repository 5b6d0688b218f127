"""MATH and the two sets that models trained on it are measured on as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, MinLen

from treetune.tasks.base import Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.json_lines import JsonLines
from treetune.tasks.steps.base import StepSplitter
from treetune.tasks.steps.sentences import Sentences
from treetune_domains.graders.math import MathGrader

MATH_GRADER, SENTENCES = MathGrader(), Sentences()


@Task.register("math")
@dataclass(frozen=True, kw_only=True)
class Math(JsonLines):
    """MATH (Hendrycks et al., 2021, arXiv:2103.03874) in the split of Lightman et al. (2023,
    arXiv:2305.20050): 12,000 problems to train on and the 500 of MATH-500 to test on.

    500 of the 12,000 are held out for validation, as many as in the VinePPO paper (11,500 / 500 /
    500), chosen here with `split_seed`: not the paper's own 500. A row has a `problem`, a worked
    `solution` and its `answer`; where that is missing, the gold is the solution, out of which
    graders take the box. `level` and `type` (or `subject`) go into `Problem.data`.
    """

    train: tuple[str, ...] = ("data/math/train.jsonl",)
    test: tuple[str, ...] = ("data/math/test.jsonl",)
    validation_size: Annotated[int, Gt(0)] | None = 500
    problem_field: Annotated[str, MinLen(1)] = "problem"
    gold_fallback: str | None = "solution"
    demonstration_field: str | None = "solution"
    keep: tuple[str, ...] = ("level", "type", "subject")
    grader: Grader = MATH_GRADER
    steps: StepSplitter = SENTENCES


@dataclass(frozen=True, kw_only=True)
class OnlyTest(JsonLines):
    """A set to measure on: `problem` and `answer` in each row of the test split, and no solutions."""

    problem_field: Annotated[str, MinLen(1)] = "problem"
    grader: Grader = MATH_GRADER
    steps: StepSplitter = SENTENCES


@Task.register("college_math")
@dataclass(frozen=True, kw_only=True)
class CollegeMath(OnlyTest):
    """2,818 exercises from college textbooks (Tang et al., 2024, MathScale, arXiv:2403.02884)."""

    test: tuple[str, ...] = ("data/college_math/test.jsonl",)


@Task.register("olympiadbench")
@dataclass(frozen=True, kw_only=True)
class OlympiadBench(OnlyTest):
    """The open-ended English competition problems in text alone of OlympiadBench (He et al., 2024,
    arXiv:2402.14008): 674 of them."""

    test: tuple[str, ...] = ("data/olympiadbench/test.jsonl",)
    keep: tuple[str, ...] = ("type", "subject")
