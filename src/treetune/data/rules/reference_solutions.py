"""A rule against rows whose own reference solution doesn't pass their own grader."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Gt, MinLen
from typing_extensions import override

from treetune.data.rules.base import NumberedRow, Rows, Rule, RuleContext, Verdict
from treetune.data.templates import check_text, check_value, evaluate_expression, render_text
from treetune.domains.domain_rows import problem_of, row_key
from treetune.exceptions import MissingField
from treetune.findings import missing_requirements
from treetune.store.journal import Journal
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade

ROWS_OF_A_BATCH = 256
"""The number of rows whose references are graded at the same time, one reference of each row."""

REFERENCE = "reference"


@Rule.register("reference_solutions")
@dataclass(frozen=True, kw_only=True)
class ReferenceSolutions(Rule):
    """Grades each row's reference solution, and drops rows whose reference is not correct. Each grade is
    stored, and not made again after an interruption."""

    grader: Grader
    """The grader of references."""
    reference: Annotated[str, MinLen(1)] = "extra_info.reference"
    """An expression for a row's reference. Its value is a text, or a list of texts of which one has to
    pass."""
    answer: str = "{{ reference }}"
    """The template of the response that the grader gets for a reference, such as a code block around it."""
    without: Literal["keep", "drop"] = "keep"
    """What to do with rows without a reference: keep them, or drop them."""
    most: Annotated[int, Gt(0)] = 4
    """The most references of a row that are tried."""
    workers: Annotated[int, Gt(0)] = 2
    """Processes that grade."""
    deadline: Annotated[float, Gt(0)] = 30.0
    """Seconds for the grade of one reference."""
    name: str | None = None

    def __post_init__(self) -> None:
        check_value(self.reference, "reference")
        check_text(self.answer, "answer")

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Drops the rows none of whose reference solutions is graded as correct."""
        if absent := missing_requirements(self.grader.parts()):
            raise ValueError(f"reference solutions can't be graded here: {'; '.join(absent)}")
        dropped: dict[int, str] = {}
        without_reference = 0
        # A grade depends on these settings, so they are part of its key in the journal.
        settings = repr((self.grader, self.deadline))
        with (
            Journal(context.folder / "references.jsonl") as journal,
            GraderPool(self.grader, workers=self.workers, deadline=self.deadline) as pool,
        ):
            batch: list[_RowToGrade] = []
            for index, row in enumerate(rows):
                responses = self._responses(row.row)
                if responses:
                    batch.append(_RowToGrade(row, responses))
                else:
                    without_reference += 1
                    if self.without == "drop":
                        dropped[row.number] = "it has no reference solution"
                if len(batch) == ROWS_OF_A_BATCH:
                    dropped |= _grade_batch(batch, settings, journal, pool)
                    batch.clear()
                    context.progress(index + 1, len(rows))
            dropped |= _grade_batch(batch, settings, journal, pool)
        return Verdict(dropped, {"without_a_reference": without_reference})

    def _responses(self, row: Mapping[str, Any]) -> list[str]:
        """Returns what the grader is shown of a row: a response for each reference, at most `most`."""
        try:
            value = evaluate_expression(self.reference, row)
        except MissingField:
            return []
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        values = value if is_list else [value]
        references = []
        for reference in values:
            if isinstance(reference, str | int | float) and str(reference).strip():
                references.append(str(reference))
        return [render_text(self.answer, {**row, REFERENCE: text}) for text in references[: self.most]]


class _RowToGrade(NamedTuple):
    """A row with a response for each of its references."""

    row: NumberedRow
    responses: list[str]


def _grade_batch(
    batch: Sequence[_RowToGrade], settings: str, journal: Journal, pool: GraderPool
) -> dict[int, str]:
    """Grades the responses of a batch of rows. Returns the rows without a correct response: the reason for
    each, by the row's number.

    In each round, the next response of every row that has no correct one yet is graded, all rows side by
    side."""
    to_grade = {item.row.number: item for item in batch}
    why_by_number: dict[int, str] = {}
    rounds = max((len(item.responses) for item in batch), default=0)
    for attempt in range(rounds):
        submitted: list[_Submitted] = []
        for row, responses in to_grade.values():
            if attempt < len(responses):
                response = responses[attempt]
                key = _key_of_response(row, response, settings)
                verdict = journal.get(key)  # of an earlier command
                future = None if verdict else pool.submit(response, problem_of(row.row, row.location))
                submitted.append(_Submitted(row.number, key, verdict, future))
        for number, key, verdict, future in submitted:
            if verdict is None:
                assert future is not None, "a response without a verdict was submitted"
                verdict = _verdict_of_grade(key, future.result())
                journal.add(verdict)
            if verdict["correct"]:
                del to_grade[number]
                why_by_number.pop(number, None)
            else:
                why_by_number[number] = f"its reference solution gets {verdict['words']}"
    return why_by_number


class _Submitted(NamedTuple):
    """A response that is graded: the row's number, and the response's key in the journal. If an earlier
    command has graded the response, it has the verdict. If not, it has the future of the grade."""

    number: int
    key: str
    verdict: dict[str, Any] | None
    future: Future[Grade] | None


def _verdict_of_grade(key: str, grade: Grade) -> dict[str, Any]:
    """Returns the row of the journal for a graded response. Raises RuntimeError if the response could not be
    graded."""
    if grade.outcome == "unavailable":
        raise RuntimeError(
            f"answers can't be graded: {grade.message}. All grades so far are kept: the same command"
            " continues"
        )
    text = f"{grade.reward:g} ({grade.outcome})"
    if grade.message:
        text += f": {grade.message[:200]}"
    return {"key": key, "correct": grade.correct, "words": text}


def _key_of_response(row: NumberedRow, response: str, settings: str) -> str:
    """Returns a key of all that a grade depends on."""
    text = json.dumps([row_key(row.row), repr(row.row.get("extra_info")), response, settings])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
