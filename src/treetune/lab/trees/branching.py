"""Rules for where a problem's tree branches while it is sampled, and into how many answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Gt, MinLen
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.credit.states.base import StateRule
from treetune.vocabulary import Trajectory, joined


class Branches(NamedTuple):
    """A branch point: `further` answers that begin with the first `tokens` response tokens of an answer."""

    sample: int
    tokens: int
    further: int


class Branching(Registrable):
    """A rule for where a tree branches. It grows in rounds: each branches from answers that are there, and
    all branches are sampled to their ends."""

    to_declare = ("unbiased",)

    unbiased: bool
    """Whether it depends on nothing behind the state that branches. Then branches are fair samples of what
    follows from the state, and weighted by their `reach` they give the expectation of independent answers."""

    def most_answers(self, samples: int) -> int:
        """Returns how many answers a tree may have at most that begins with `samples` from the prompt."""
        raise NotImplementedError

    def branches(self, answers: Sequence[Trajectory], number: int) -> list[Branches]:
        """Returns what to sample in a round, counted from 0, given all answers so far, in the order of their
        `sample`; nothing where the tree is grown.

        They have no grades yet. It must depend on the answers alone, so that a tree grows alike whenever its
        answers come in.
        """
        raise NotImplementedError


def forks_along(answers: Sequence[Trajectory]) -> list[list[int]]:
    """Returns where the path of each answer has branched so far, in tokens from the prompt on, rising."""
    branched: list[list[int]] = []
    for answer in answers:
        own = {
            one.fork.tokens for one in answers if one.fork is not None and one.fork.sample == answer.sample
        }
        if answer.fork is not None:
            own |= {answer.fork.tokens}
            own |= {tokens for tokens in branched[answer.fork.sample] if tokens < answer.fork.tokens}
        branched.append(sorted(own))
    return branched


def next_states(rule: StateRule, answers: Sequence[Trajectory], number: int) -> list[tuple[int, int]]:
    """Returns for each answer whose path has branched so often its `sample` and the first state of the rule
    behind the last branching, where there is one before its end."""
    states = []
    for answer, forks in zip(answers, forks_along(answers), strict=True):
        if len(forks) != number:
            continue
        behind = forks[-1] if forks else 0
        following = [start for start in rule.step_starts(answer) if behind < start < len(answer.response_ids)]
        if following:
            states.append((answer.sample, following[0]))
    return states


@Branching.register("at_states")
@dataclass(frozen=True, kw_only=True)
class AtStates(Branching):
    """Trees in which every answer goes on in ``ways[0]`` ways from its first state, each of these in
    ``ways[1]`` ways from its second, and so on. An answer that ends before has no more of them.

    With `states` at every 600 tokens, six answers from the prompt and `ways` [6, 6] this is the tree of
    SPO-tree (Guo et al., arXiv:2505.23564). There it grows by segments; here by whole answers, which go
    on as they began in one of the ways. The trees are the same in distribution.
    """

    unbiased = True

    states: StateRule
    """Where it branches: a rule that looks at nothing behind a state keeps the gradient unbiased."""
    ways: Annotated[tuple[Annotated[int, Gt(1)], ...], MinLen(1)]
    """In how many ways an answer goes on from its first state, from its second, …"""

    @override
    def most_answers(self, samples: int) -> int:
        return samples * math.prod(self.ways)

    @override
    def branches(self, answers: Sequence[Trajectory], number: int) -> list[Branches]:
        if number == len(self.ways):
            return []
        return [
            Branches(sample, tokens, self.ways[number] - 1)
            for sample, tokens in next_states(self.states, answers, number)
        ]


@Branching.register("up_to_width")
@dataclass(frozen=True, kw_only=True)
class UpToWidth(Branching):
    """Lets the answers that are still being written at a state of the rule share what is left of `width`
    answers; none goes on in more than `most_ways` ways.

    With `states` at even distances these are TreePO's trees (Li et al., arXiv:2508.17445, section 3), without
    its early stops and its restarts from random places: answers that end early leave their share to the
    others. Who is being written at a state is known there, so that branches are fair samples.
    """

    unbiased = True

    states: StateRule
    """The rule for the states at which it branches."""
    width: Annotated[int, Gt(1)]
    """Answers of a tree."""
    most_ways: Annotated[int, Gt(1)] = 2
    """Answers that go on from a state at most."""

    @override
    def most_answers(self, samples: int) -> int:
        return max(samples, self.width)

    @override
    def branches(self, answers: Sequence[Trajectory], number: int) -> list[Branches]:
        going_on = next_states(self.states, answers, number)
        left = self.width - len(answers)
        branches = []
        for index, (sample, tokens) in enumerate(going_on):
            share, more = divmod(max(left, 0), len(going_on))
            count = min(share + (index < more), self.most_ways - 1)
            if count:
                branches.append(Branches(sample, tokens, count))
        return branches


@Branching.register("least_sure")
@dataclass(frozen=True, kw_only=True)
class LeastSure(Branching):
    """Branches every tree that an answer from the prompt began, in each of `rounds` rounds, before the
    `positions` tokens that were sampled with the least probability, into `ways` further answers each
    (TreeRL's entropy-guided search, Hou et al., arXiv:2506.11902, section 3.1, which takes −log p of the
    sampled token for its uncertainty). M answers from the prompt make M (1 + rounds · positions · ways).

    A position branches once. **Biased**: whether it branches depends on the token that was sampled there and
    on all other positions, so the answer that shows it is no fair sample of what follows. On the tests'
    language the expected gradient of the credit `tree` is off by 11 % of its length (cosine 0.998).
    """

    unbiased = False

    positions: Annotated[int, Gt(0)] = 2
    """Tokens of a tree before which it branches in a round."""
    ways: Annotated[int, Gt(0)] = 2
    """Further answers at each of them."""
    rounds: Annotated[int, Gt(0)] = 1
    """Rounds of branching."""

    @override
    def most_answers(self, samples: int) -> int:
        return samples * (1 + self.rounds * self.positions * self.ways)

    @override
    def branches(self, answers: Sequence[Trajectory], number: int) -> list[Branches]:
        if number == self.rounds:
            return []
        of_tree: dict[int, list[tuple[float, int, int]]] = {}
        roots: list[int] = []
        for answer, forks in zip(answers, forks_along(answers), strict=True):
            roots.append(answer.sample if answer.fork is None else roots[answer.fork.sample])
            begins = 0 if answer.fork is None else answer.fork.tokens
            logprobs = joined([one.logprobs for one in answer.segments if one.logprobs is not None])
            of_tree.setdefault(roots[-1], []).extend(
                (logprob, answer.sample, tokens)
                for tokens, logprob in enumerate(logprobs.tolist())
                if tokens > begins and tokens not in forks
            )
        return [
            Branches(sample, tokens, self.ways)
            for places in of_tree.values()
            for _, sample, tokens in sorted(places)[: self.positions]
        ]
