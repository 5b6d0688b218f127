"""How long correct answers were in an evaluation that was made before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from treetune.vocabulary import CORRECT_SCORE, Problem


@dataclass(frozen=True)
class MeasuredLengths:
    """By problem: `prompts` of all that were asked, mean tokens of their correct answers."""

    path: str
    prompts: dict[str, str]
    tokens: dict[str, float]

    def of(self, problem: Problem) -> float | None:
        """None where it has no correct answer. ValueError for a problem that reads otherwise there."""
        prompt = self.prompts.get(problem.id, problem.prompt)
        if prompt != problem.prompt:
            raise ValueError(
                f"problem {problem.id!r} reads {prompt!r} in {self.path} and {problem.prompt!r} here: the"
                " answers are of another task, or of the same with other settings"
            )
        return self.tokens.get(problem.id)

    def require_some(self, problems: Sequence[Problem]) -> None:
        """ValueError where no problem has a length, or where any reads otherwise."""
        lengths = [self.of(problem) for problem in problems]
        if all(length is None for length in lengths):
            raise ValueError(
                f"{self.path} has correct answers to {len(self.tokens)} problems, to none of the"
                f" {len(problems)} that are trained on: evaluate the sequential experiment on the split"
                " 'train' (evaluation.sets) and name that set's answers.jsonl"
            )


@lru_cache(maxsize=4)
def measured_lengths(path: str) -> MeasuredLengths:
    """What an evaluation's ``answers.jsonl`` says. ValueError where it isn't there or isn't such a file."""
    prompts: dict[str, str] = {}
    lengths: dict[str, list[int]] = {}
    number = 0
    try:
        with Path(path).open() as file:
            for line in file:
                number += 1
                row = json.loads(line)
                prompts[row["problem"]] = row["prompt"]
                if (row["reward"] or 0.0) >= CORRECT_SCORE:  # null where nobody could grade it
                    lengths.setdefault(row["problem"], []).append(row["tokens"])
    except OSError as error:
        raise ValueError(
            f"the answers that shaping compares lengths with can't be read ({error}): run the evaluation of"
            " the sequential experiment first, or choose another reference"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"line {number} of {path} is no row of an evaluation's answers.jsonl"
            f" ({type(error).__name__}: {error})"
        ) from error
    return MeasuredLengths(path, prompts, {problem: fmean(tokens) for problem, tokens in lengths.items()})
