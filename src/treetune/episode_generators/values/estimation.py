"""Values of states by going on from them, each distinct one once, the work dealt over the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from treetune.contracts import Finding
from treetune.episode_generators.base import GenerationContext
from treetune.episode_generators.values.base import Beginning, Budget, Estimate, StateRule
from treetune.inference.base import SamplingParams
from treetune.vocabulary import Problem, Segment, TokenIds


class Wanted(NamedTuple):
    """The states of one problem that are to be valued: each the place of a path, and how many of its tokens
    belong to the state."""

    problem: Problem
    prompt_ids: TokenIds
    paths: Sequence[Sequence[Segment]]
    states: Sequence[tuple[int, int]]


def estimates(
    context: GenerationContext,
    wanted: Sequence[Wanted],
    rule: StateRule,
    budget: Budget,
    sampling: SamplingParams,
    purpose: str = "value",
) -> tuple[list[list[Estimate]], list[Estimate]]:
    """The estimates of what this rank wants, in its order, and those of all ranks' distinct states.

    An estimate does not depend on the rank that makes it, and those for two purposes share no
    continuation. Collective.
    """
    everyones = context.exchange("value-states", [_lean(one) for one in wanted])
    distinct: dict[bytes, Beginning] = {}
    for problem in sorted((one for of_rank in everyones for one in of_rank), key=lambda one: one.problem.id):
        # Neighbours in this order share most of their tokens, so that dealing them out like cards gives
        # every rank about the same work.
        beginnings = sorted(_beginnings(problem), key=lambda one: one.token_ids.astype(">i4").tobytes())
        for beginning in beginnings:
            distinct.setdefault(_name(beginning), beginning)
    hand = list(distinct.values())[context.rank :: context.world_size]
    dealt = context.exchange("value-estimates", rule.estimate(context, hand, budget, sampling, purpose))
    found = {
        name: dealt[place % context.world_size][place // context.world_size]
        for place, name in enumerate(distinct)
    }
    own = [[found[_name(beginning)] for beginning in _beginnings(one)] for one in wanted]
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
        segments = []
        for segment in wanted.paths[path]:
            own = min(length, len(segment.token_ids))
            if not own:
                break
            segments.append(replace(segment, token_ids=segment.token_ids[:own], logprobs=None))
            length -= own
        yield Beginning(wanted.problem, wanted.prompt_ids, tuple(segments))


def _name(beginning: Beginning) -> bytes:
    """The same for equal states alone, on whichever rank."""
    digest = hashlib.blake2b(repr(beginning.problem.id).encode(), digest_size=16)
    for segment in beginning.segments:
        digest.update(repr((segment.branch, segment.origin, len(segment.token_ids))).encode())
        digest.update(segment.token_ids.tobytes())
    return digest.digest()
