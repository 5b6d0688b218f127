"""A credit of one's own: a wrong answer pays for its first wrong line, and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from treetune import Answers, Credit, Need, TokenCredit, Trajectory


def is_right(line: str) -> bool:
    """True for ``27+64=91``, and for the last line, ``#91``, which only repeats."""
    sum_, _, result = line.strip().partition("=")
    terms = sum_.split("+")
    if not result:
        return True
    return all(map(str.isdigit, [*terms, result])) and sum(map(int, terms)) == int(result)


@Credit.register("first_mistake")
@dataclass(frozen=True, kw_only=True)
class FirstMistake(TokenCredit):
    """GRPO's advantage r − mean r for all tokens of a right answer. In a wrong one, the first line whose sum
    is wrong gets it alone; where no line is, every token does. A token is a character here."""

    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def token_advantages(self, answers: Sequence[Trajectory]) -> list[list[float]]:
        mean, rows = fmean(answer.reward for answer in answers), []
        for answer in answers:
            row = [answer.reward - mean] * len(answer.response_ids)
            for start, end in zip((0, *answer.step_ends), answer.step_ends):
                if not answer.grade.correct and not is_right(answer.text[start:end]):
                    row = [x if start <= place < end else 0.0 for place, x in enumerate(row)]
                    break
            rows.append(row)
        return rows
