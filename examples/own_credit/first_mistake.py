"""A credit of your own: only the first wrong line of a wrong answer gets its negative advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from treetune import (
    Answers,
    Credit,
    Episode,
    GroupCredit,
    Metrics,
    Need,
    RolloutContext,
    TextCodec,
    Tree,
    advantage_metrics,
    answers_of,
)


def is_right(line: str) -> bool:
    """True for ``27+64=91`` and for a line without a sum, such as ``#91``; false for ``27+64=92``."""
    left, _, result = line.strip().partition("=")
    terms = left.split("+")
    if not result:
        return True
    are_numbers = all(text.isdigit() for text in [*terms, result])
    return are_numbers and sum(map(int, terms)) == int(result)


def first_wrong_step(codec: TextCodec, episode: Episode) -> slice | None:
    """Returns the tokens of the first step that is a wrong line; None if no line is wrong."""
    for start, end in zip((0, *episode.step_ends), episode.step_ends):
        # Each step is decoded by itself: `start` and `end` count tokens, not characters of the answer's text.
        line = codec.decode(episode.response_ids[start:end])
        if not is_right(line):
            return slice(start, end)
    return None


def restrict_to_first_mistake(codec: TextCodec, episode: Episode) -> Episode:
    """Sets the advantages to 0 but those of the first wrong line. If no line is wrong, all of them stay."""
    mistake = first_wrong_step(codec, episode)
    if mistake is None:
        return episode
    assert episode.advantages is not None
    advantages = episode.advantages.copy()
    advantages[: mistake.start] = 0.0
    advantages[mistake.stop :] = 0.0
    return replace(episode, advantages=advantages)


@Credit.register("first_mistake")
@dataclass(frozen=True, kw_only=True)
class FirstMistake(GroupCredit):
    """The advantage of an answer is r − mean r, as in Dr. GRPO. All tokens of a correct answer get it. In a
    wrong answer, only the first line with a wrong sum gets it, and the others get 0. If no line has a wrong
    sum, all tokens get it."""

    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        mean = fmean(rewards)
        return [reward - mean for reward in rewards]

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, _ = super().assign(context, trees)  # all tokens of an answer share its advantage
        credited = []
        for answer, episode in zip(answers_of(trees), episodes, strict=True):
            if not answer.grade.correct:
                episode = restrict_to_first_mistake(context.codec, episode)
            credited.append(episode)
        return credited, advantage_metrics(context, credited)
