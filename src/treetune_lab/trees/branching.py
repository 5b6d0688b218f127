"""Where a problem's tree branches while it is sampled, and into how many answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from treetune.config.registrable import Registrable
from treetune.rollouts.values.base import StateRule
from treetune.vocabulary import Trajectory


class Branches(NamedTuple):
    """So many `further` answers that begin with the first `tokens` response tokens of an answer."""

    sample: int
    tokens: int
    further: int


class Branching(Registrable):
    """Where a tree branches. It grows in rounds: each branches from answers that are there, and all branches
    are sampled to their ends."""

    to_declare = ("unbiased",)

    unbiased: bool
    """Whether it depends on nothing behind the state that branches. Then branches are fair samples of what
    follows from the state, and weighted by their `reach` they give the expectation of independent answers."""

    def most_answers(self, samples: int) -> int:
        """How many answers a tree may have at most that begins with `samples` from the prompt."""
        raise NotImplementedError

    def branches(self, answers: Sequence[Trajectory], number: int) -> list[Branches]:
        """What to sample in a round, counted from 0, given all answers so far, whose place is their `sample`;
        nothing where the tree is grown.

        They have no grades yet. It must depend on the answers alone, so that a tree grows alike whenever its
        answers come in.
        """
        raise NotImplementedError


def forks_along(answers: Sequence[Trajectory]) -> list[list[int]]:
    """Where the way of each answer has branched so far, in tokens from the prompt on, rising."""
    along: list[list[int]] = []
    for answer in answers:
        own = {
            one.fork.tokens for one in answers if one.fork is not None and one.fork.sample == answer.sample
        }
        if answer.fork is not None:
            own |= {answer.fork.tokens}
            own |= {tokens for tokens in along[answer.fork.sample] if tokens < answer.fork.tokens}
        along.append(sorted(own))
    return along


def next_states(rule: StateRule, answers: Sequence[Trajectory], number: int) -> list[tuple[int, int]]:
    """Of each answer whose way has branched so often, its `sample` and the first state of the rule behind the
    last branching, where there is one before its end."""
    found = []
    for answer, forks in zip(answers, forks_along(answers), strict=True):
        if len(forks) != number:
            continue
        behind = forks[-1] if forks else 0
        following = [start for start in rule.step_starts(answer) if behind < start < len(answer.response_ids)]
        if following:
            found.append((answer.sample, following[0]))
    return found
