"""Rows whose own reference solution doesn't pass their own grader."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt, MinLen
from typing_extensions import override

from treetune.data.rules.base import Numbered, Rows, Rule, RuleContext, Verdict
from treetune.data.templates import check_text, check_value, text_of, value_of
from treetune.domains.domain_rows import problem_of, row_key
from treetune.exceptions import MissingField
from treetune.findings import missing_requirements
from treetune.store.journal import Journal
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade

AHEAD = 256
"""References that are with the graders at once."""

REFERENCE = "reference"


@Rule.register("reference_solutions")
@dataclass(frozen=True, kw_only=True)
class ReferenceSolutions(Rule):
    """Grades each row's reference solution, and drops rows whose reference is not correct. Grades are written
    down as they come and not made again."""

    grader: Grader
    """The grader of references."""
    reference: Annotated[str, MinLen(1)] = "extra_info.reference"
    """An expression: a text, or a list of texts of which one has to pass."""
    answer: str = "{{ reference }}"
    """Makes the response that the grader is shown of it, such as a code block."""
    without: Literal["keep", "drop"] = "keep"
    """Keeps rows without a reference, or drops them."""
    most: Annotated[int, Gt(0)] = 4
    """References of a row that are tried."""
    workers: Annotated[int, Gt(0)] = 2
    """Processes that grade."""
    deadline: Annotated[float, Gt(0)] = 30.0
    """Seconds for one of them."""
    name: str | None = None

    def __post_init__(self) -> None:
        check_value(self.reference, "reference")
        check_text(self.answer, "answer")

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        if absent := missing_requirements(self.grader.parts()):
            raise ValueError(f"reference solutions can't be graded here: {'; '.join(absent)}")
        found: dict[int, str] = {}
        without = 0
        settings = repr((self.grader, self.deadline))
        with (
            Journal(context.folder / "references.jsonl") as journal,
            GraderPool(self.grader, workers=self.workers, deadline=self.deadline) as pool,
        ):
            batch: list[tuple[Numbered, list[str]]] = []

            def settle() -> None:
                for number, why in _failures(batch, settings, journal, pool).items():
                    found[number] = why
                batch.clear()

            for done, one in enumerate(rows):
                answers = self._answers(one.row)
                if answers:
                    batch.append((one, answers))
                else:
                    without += 1
                    if self.without == "drop":
                        found[one.number] = "it has no reference solution"
                if len(batch) == AHEAD:
                    settle()
                    context.progress(done + 1, len(rows))
            settle()
        return Verdict(found, {"without_a_reference": without})

    def _answers(self, row: Mapping[str, Any]) -> list[str]:
        try:
            value = value_of(self.reference, row)
        except MissingField:
            return []
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        texts = [one for one in values if isinstance(one, str | int | float) and str(one).strip()]
        return [text_of(self.answer, {**row, REFERENCE: str(one)}) for one in texts[: self.most]]


def _failures(
    batch: Sequence[tuple[Numbered, list[str]]], settings: str, journal: Journal, pool: GraderPool
) -> dict[int, str]:
    """Why rows fail of which no reference passes. References are tried one after the other, the first of all
    rows side by side."""
    left = {one.number: (one, answers) for one, answers in batch}
    why: dict[int, str] = {}
    for attempt in range(max((len(answers) for _, answers in batch), default=0)):
        asked = []
        for one, answers in left.values():
            if attempt < len(answers):
                key = _key(one, answers[attempt], settings)
                known = journal.get(key)
                future = None if known else pool.submit(answers[attempt], problem_of(one.row, one.place))
                asked.append((one.number, key, known, future))
        for number, key, verdict, future in asked:
            if verdict is None:
                assert future is not None
                verdict = _verdict(key, future.result())
                journal.add(verdict)
            if verdict["correct"]:
                del left[number]
                why.pop(number, None)
            else:
                why[number] = f"its reference solution gets {verdict['words']}"
    return why


def _verdict(key: str, grade: Grade) -> dict[str, Any]:
    """Returns the row of a graded reference. Raises RuntimeError if it could not be graded."""
    if grade.outcome == "unavailable":
        raise RuntimeError(
            f"answers can't be graded: {grade.message}. What was graded is kept: the same command goes on"
        )
    words = f"{grade.reward:g} ({grade.outcome})" + (f": {grade.message[:200]}" if grade.message else "")
    return {"key": key, "correct": grade.correct, "words": words}


def _key(one: Numbered, answer: str, settings: str) -> str:
    text = json.dumps([row_key(one.row), repr(one.row.get("extra_info")), answer, settings])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
