"""GSM8K: grade-school word problems (Cobbe et al., 2021, arXiv:2110.14168)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.tasks.base import Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.json_lines import JsonLines
from treetune.tasks.steps.base import StepSplitter
from treetune.tasks.steps.lines import Lines

_CALCULATION = re.compile(r"<<[^<>\n]*>>")
NUMERIC, LINES = Numeric(), Lines()


@Task.register("gsm8k")
@dataclass(frozen=True, kw_only=True)
class Gsm8k(JsonLines):
    """The data set's own files, with `question` and `answer` in each row.

    373 of the 7,473 training problems are held out for validation, as many as in the VinePPO
    paper (7,100 / 373 / 1,319), chosen here with `split_seed`: not the paper's own 373.
    Demonstrations have no ``<<1+1=2>>`` calculator notes.
    """

    train: tuple[str, ...] = ("data/gsm8k/train.jsonl",)
    test: tuple[str, ...] = ("data/gsm8k/test.jsonl",)
    validation_size: Annotated[int, Gt(0)] | None = 373
    grader: Grader = NUMERIC
    steps: StepSplitter = LINES

    def solution(self, text: str) -> str:
        return _CALCULATION.sub("", text)
