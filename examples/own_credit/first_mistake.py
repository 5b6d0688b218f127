"""A credit of one's own: a wrong answer pays for its first wrong line, and for nothing else."""

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
    """True for ``27+64=91``, and for the last line, ``#91``, which only repeats."""
    sum_, _, result = line.strip().partition("=")
    terms = sum_.split("+")
    if not result:
        return True
    return all(map(str.isdigit, [*terms, result])) and sum(map(int, terms)) == int(result)


def first_wrong_step(codec: TextCodec, episode: Episode) -> slice | None:
    """Returns the tokens of the first step that is a wrong line; None if no line is wrong."""
    for start, end in zip((0, *episode.step_ends), episode.step_ends):
        # Each step is decoded by itself: `start` and `end` count tokens, not characters of the answer's text.
        line = codec.decode(episode.response_ids[start:end])
        if not is_right(line):
            return slice(start, end)
    return None


@Credit.register("first_mistake")
@dataclass(frozen=True, kw_only=True)
class FirstMistake(GroupCredit):
    """GRPO's advantage r − mean r for all tokens of a right answer. In a wrong one, the first line whose sum
    is wrong gets it alone; where no line is, every token does."""

    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        mean = fmean(rewards)
        return [reward - mean for reward in rewards]

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, _ = super().assign(context, trees)  # all tokens of an answer share its advantage
        credited = []
        for answer, episode in zip(answers_of(trees), episodes, strict=True):
            mistake = None if answer.grade.correct else first_wrong_step(context.codec, episode)
            if mistake is not None:
                assert episode.advantages is not None
                advantages = episode.advantages.copy()
                advantages[: mistake.start] = 0.0
                advantages[mistake.stop :] = 0.0
                episode = replace(episode, advantages=advantages)
            credited.append(episode)
        return credited, advantage_metrics(context, credited)
