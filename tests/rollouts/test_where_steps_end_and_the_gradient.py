"""The gradient of Monte-Carlo credit with exact values, by where a splitter ends the steps of an answer:
exact where a boundary depends on what stands before it alone, off by a stated share where it looks ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts.answers import steps_of
from treetune.rollouts.monte_carlo import step_advantages
from treetune.tasks.base import Task
from treetune.tasks.steps import Gsm8kReference, Lines, StepSplitter
from treetune.vocabulary import TextCodec, token_array
from treetune_domains.math_reference_steps import MathReference
from treetune_domains.math_tasks import Sentences

Ids = tuple[int, ...]
A, B, BREAK, MORE, EOS = range(5)
MOST = 3
"""Letters of an answer; two ``A`` earn 1."""

Texts = tuple[str, str, str, str]
Kind = Literal["between", "behind", "more"]


@dataclass(frozen=True)
class Language:
    """Letters with breaks between them, and what each token reads. After a letter comes a break or the end
    (`between`), always a break, behind which the answer may end (`behind`), or a break, the end, or more of
    the same line (`more`)."""

    kind: Kind
    texts: Texts

    def policy(self, answer: Ids) -> dict[int, float]:
        letters = [one for one in answer if one in (A, B)]
        after_letter = bool(answer) and answer[-1] in (A, B)
        if after_letter and len(letters) == MOST:
            return {EOS: 1.0}
        if after_letter:
            return {
                "between": {EOS: 0.5, BREAK: 0.5},
                "behind": {BREAK: 1.0},
                "more": {EOS: 0.25, BREAK: 0.5, MORE: 0.25},
            }[self.kind]
        end = 0.5 if self.kind == "behind" and letters else 0.0
        a = {A: 0.75, B: 0.25}[letters[0]] if len(letters) == 1 else 0.5
        chances = {A: (1 - end) * a, B: (1 - end) * (1 - a), EOS: end}
        return {token: chance for token, chance in chances.items() if chance}

    def answers(self, prefix: Ids = ()) -> dict[Ids, float]:
        if prefix and prefix[-1] == EOS:
            return {prefix: 1.0}
        return {
            answer: p * q
            for token, p in self.policy(prefix).items()
            for answer, q in self.answers((*prefix, token)).items()
        }

    def value(self, prefix: Ids) -> float:
        return math.fsum(p * (answer.count(A) >= 2) for answer, p in self.answers(prefix).items())

    def read(self, ids: object) -> str:
        return "".join(self.texts[one] for one in list(ids) if one != EOS)  # type: ignore[call-overload]


@dataclass(frozen=True, kw_only=True)
class Cut(Task):
    steps: StepSplitter

    def step_boundaries(self, response: str) -> list[int]:
        return self.steps.boundaries(response)

    def answer_boundaries(self, response: str) -> list[int]:
        return self.steps.answer_boundaries(response)


def bias(language: Language, steps: StepSplitter) -> float:
    """The length of the difference from the exact gradient, as a share of the exact one's."""
    codec = TextCodec(encode=lambda text: (), decode=language.read, eos_id=EOS)
    context = mdp.context(task=Cut(steps=steps), codec=codec)
    off: dict[tuple[Ids, int], float] = {}
    exact: dict[tuple[Ids, int], float] = {}
    for answer, probability in language.answers().items():
        ends = steps_of(context, mdp.problems(1)[0], token_array(answer), language.read(answer))
        values = [language.value(answer[:start]) for start in (0, *ends[:-1])]
        of_steps = step_advantages(values, language.value(answer))
        for place, taken in enumerate(answer):
            state = answer[:place]
            step = next(number for number, end in enumerate(ends) if place < end)
            true = language.value(answer[: place + 1]) - language.value(state)
            for token, chance in language.policy(state).items():
                slope = probability * ((token == taken) - chance)
                off[state, token] = off.get((state, token), 0.0) + slope * (of_steps[step] - true)
                exact[state, token] = exact.get((state, token), 0.0) + slope * true
    return _length(off) / _length(exact)


def _length(gradient: Mapping[tuple[Ids, int], float]) -> float:
    return math.sqrt(math.fsum(slope**2 for slope in gradient.values()))


LINES = ("a", "b", "\n", " ")
SENTENCES = ("This sentence says yes.", "This sentence says no.", " ", "")
CLAUSES = ("this one clause says yes", "this one clause says no", ", ", "")

CASES = [
    # Boundaries that the end hides: off where it belongs to the last step, exact where it has its own.
    ("between", LINES, Lines(), 0.4490, 0.0),
    ("between", LINES, Gsm8kReference(), 0.4490, 0.0),
    ("between", SENTENCES, Sentences(), 0.4490, 0.0),
    ("behind", LINES, Lines(), 0.4276, 0.0),
    ("behind", SENTENCES, Sentences(), 0.4276, 0.0),
    # Boundaries that depend on what stands before them, with the end of an answer among what may follow.
    ("between", LINES, Lines(newline="ends"), 0.0, 0.0),
    ("behind", LINES, Lines(newline="ends"), 0.4276, 0.0),
    ("more", LINES, Lines(newline="ends"), 0.0, 0.0),
    # A line that may also go on: whether it has ended, a later token says.
    ("more", LINES, Lines(), 0.3320, 0.2388),
    ("more", SENTENCES, Sentences(), 0.3320, 0.2388),
    # Parts that are cut by what follows them, and ends where no other token would begin a step.
    ("between", CLAUSES, Sentences(longest=60), 0.2141, 0.3973),
    ("between", CLAUSES, Sentences(longest=None), 0.0, 0.4827),
    ("between", SENTENCES, MathReference(), 0.4145, 0.1868),
]


def _name(part: object) -> str | None:
    return repr(part) if isinstance(part, StepSplitter) else None


@pytest.mark.parametrize(("kind", "texts", "steps", "in_last_step", "own_step"), CASES, ids=_name)
def test_the_gradient_is_as_far_off_as_stated(
    kind: Kind, texts: Texts, steps: StepSplitter, in_last_step: float, own_step: float
) -> None:
    found = [
        bias(Language(kind, texts), replace(steps, end_token=where)) for where in ("last_step", "own_step")
    ]
    for measured, stated in zip(found, (in_last_step, own_step), strict=True):
        assert measured == pytest.approx(stated, abs=5e-5 if stated else 1e-9)
