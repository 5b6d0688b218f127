"""Values of states by going on from them, each distinct one once, the work dealt over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from treetune.contracts import Finding
from treetune.inference.base import SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.values.base import Beginning, Budget, Estimate, StateRule
from treetune.vocabulary import Problem, Segment, TokenIds


class Wanted(NamedTuple):
    """The states of one problem that are to be valued: each the place of a path, and how many of its tokens
    belong to the state."""

    problem: Problem
    prompt_ids: TokenIds
    paths: Sequence[Sequence[Segment]]
    states: Sequence[tuple[int, int]]


def estimates(
    context: RolloutContext,
    wanted: Sequence[Wanted],
    rule: StateRule,
    budget: Budget,
    sampling: SamplingParams,
    purpose: str = "value",
    dealt: bool = True,
) -> tuple[list[list[Estimate]], list[Estimate]]:
    """The estimates of what this rank wants, in its order, and those of all ranks' distinct states.

    An estimate does not depend on the rank that makes it, and those for two purposes share no
    continuation. The work is `dealt` out, or else each state stays with the first rank that wants it, which
    has begun with it. Collective.
    """
    everyones = context.ranks.exchange("value-states", [_lean(one) for one in wanted])
    distinct: dict[bytes, Beginning] = {}
    ranks: dict[bytes, int] = {}
    of_ranks = [(rank, one) for rank, of_rank in enumerate(everyones) for one in of_rank]
    for rank, problem in sorted(of_ranks, key=lambda one: one[1].problem.id):
        # Neighbours in this order share most of their tokens, so that dealing them out like cards gives
        # every rank about the same work.
        beginnings = sorted(_beginnings(problem), key=lambda one: one.token_ids.astype(">i4").tobytes())
        for beginning in beginnings:
            key = beginning.key
            if key not in distinct:
                distinct[key] = beginning
                ranks[key] = len(ranks) % context.ranks.world_size if dealt else rank
    hand = [beginning for key, beginning in distinct.items() if ranks[key] == context.ranks.rank]
    made = context.ranks.exchange("value-estimates", rule.estimate(context, hand, budget, sampling, purpose))
    of_rank = [iter(one) for one in made]
    found = {key: next(of_rank[rank]) for key, rank in ranks.items()}
    own = [[found[beginning.key] for beginning in _beginnings(one)] for one in wanted]
    return own, list(found.values())


def check_continuations(samples: int, temperature: float, key: str = "temperature") -> Iterator[Finding]:
    """What is wrong where all continuations of a state would be the same one."""
    if temperature == 0:
        same = f"{samples} continuations are" if samples > 1 else "a continuation is"
        yield Finding(
            f"{same} sampled at temperature 0, so that all of them earn the same",
            key,
            "sample above 0, or choose a credit without continuations, such as 'group'",
        )


def _lean(one: Wanted) -> Wanted:
    """Without what nobody needs to go on from there."""
    return one._replace(paths=[[replace(s, logprobs=None) for s in path] for path in one.paths])


def _beginnings(wanted: Wanted) -> Iterator[Beginning]:
    for path, length in wanted.states:
        yield Beginning.of(wanted.problem, wanted.prompt_ids, wanted.paths[path], length)
