"""The scorers of reasoning_gym's data sets, each for its own problems."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import MinLen
from typing_extensions import override

from treetune.contracts import Finding, report_missing
from treetune.domains.sandbox.base import ProgramLimits, Sandbox
from treetune.domains.sandbox.bubblewrap import Bubblewrap
from treetune.domains.sandbox.served import LibraryScorer, shared_scorer
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import CLOSING_TAG, OPENING_TAG, last_between
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, GradeOutcome, Problem

SPARE_SECONDS = 300.0
"""Time for a new sandbox and the import of the library, in addition to the limit for scoring an answer. Only
a bug reaches this deadline."""


@Grader.register("reasoning_gym")
@dataclass(frozen=True, kw_only=True)
class ReasoningGymGrader(Grader):
    """Gives the score, from 0 to 1, that the library's scorer for the problem's data set gives. An answer
    with the score 1 is correct.

    The answer is the text between the last `opening` and the next `closing`, without the white space around
    it. It may have several lines.

    An empty answer has the outcome ``no_answer``, even if a scorer would give it 0.01. If a scorer raises an
    exception because of an answer, the answer is wrong, and the message of the grade has the exception.

    Scorers run in a sandbox, in a separate process for each answer. Some of them accept Python's literals,
    arithmetic or formulas. These are read as values, and never executed.
    """

    opening: Annotated[str, MinLen(1)] = OPENING_TAG
    """The tag before an answer."""
    closing: Annotated[str, MinLen(1)] = CLOSING_TAG
    """The tag after an answer."""
    unclosed: bool = False
    """Whether the answer may end without `closing`, because this is a stop string, which graders don't see.
    Then the answer is the text after the last `opening`, up to a `closing` if there is one."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    sandbox: Sandbox = field(default_factory=Bubblewrap)
    """The sandbox in which answers are scored."""
    limits: ProgramLimits = field(default_factory=lambda: ProgramLimits(seconds=10.0, memory_mib=2048))
    """Limits for scoring one answer, including the library."""

    @property
    @override
    def deadline(self) -> float | None:  # type: ignore[override]
        return self.limits.seconds + SPARE_SECONDS

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        # The scorers are a program that keeps running, and `can_begin` says that the sandbox can start such a
        # program.
        if self.sandbox.can_begin:
            yield from report_missing(self.sandbox.missing())
        else:
            name = type(self.sandbox).__name__
            yield Finding(
                f"reasoning_gym's scorers need the sandbox 'bubblewrap'; {name} can only run programs "
                "to their end",
                level="missing",
            )

    @override
    def prepare(self) -> None:
        self._scorer().prepare()

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        return last_between(response, self.opening, self.closing, unclosed=self.unclosed)

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        # The scorer needs neither `prompt` nor `gold`: `entry` is the problem as the library has it.
        library_problem = {name: problem.data[name] for name in ("dataset", "config", "question", "entry")}
        scored = self._scorer().score(extracted, library_problem)
        if scored.is_late or scored.has_crashed:
            outcome: GradeOutcome = "timeout" if scored.is_late else "error"
            return Grade(reward=0.0, outcome=outcome, message=scored.message)
        if scored.score is None:  # the answer made the scorer raise, and is wrong
            return Grade(reward=0.0, outcome="ok", message=scored.message)
        if not math.isfinite(scored.score):
            return Grade(reward=0.0, outcome="ok", message=f"the scorer returned {scored.score}")
        return Grade(reward=scored.score, outcome="ok", message=scored.message)

    def _scorer(self) -> LibraryScorer:
        return shared_scorer(self.sandbox, self.limits, "reasoning_gym_scores", "reasoning_gym")
