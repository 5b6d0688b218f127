"""Values of prefixes by continuing them, each distinct prefix once, the work dealt over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

from treetune.contracts import Finding
from treetune.episode_generators.base import GenerationContext
from treetune.episode_generators.rollout.answers import before_stop, token_budget
from treetune.inference.base import Completion, Request, SamplingParams
from treetune.seeds import derive_seed
from treetune.vocabulary import Grade, Problem, TokenIds, Trajectory, joined, token_array


class State(NamedTuple):
    """A prefix of an answer, by token ids; equal ones are one node of the tree."""

    problem: str
    prefix_ids: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """What K continuations of a state earned; how many were cut off, and their tokens in all."""

    rewards: tuple[float, ...]
    unfinished: int
    tokens: int


def check_continuations(samples: int, temperature: float, key: str = "temperature") -> Iterator[Finding]:
    """What is wrong where all continuations of a state would be the same one."""
    if temperature == 0:
        same = f"{samples} continuations are" if samples > 1 else "a continuation is"
        yield Finding(
            f"{same} sampled at temperature 0, so that all of them earn the same",
            key,
            "sample above 0, or choose a credit without continuations, such as 'group'",
        )


def estimate_states(
    context: GenerationContext,
    trajectories: Sequence[Trajectory],
    states: Sequence[Sequence[State]],
    samples: int,
    sampling: SamplingParams,
    purpose: str = "value",
) -> dict[State, Estimate]:
    """Estimates of the distinct states of all ranks' trajectories; `states[i]` are those of
    `trajectories[i]`. Every rank gets all estimates, in the same order. Collective.

    A continuation may use the tokens that its prefix left of the answer's budget. Its seed is
    derived from the state and `purpose` alone, so the estimate does not depend on the rank that makes
    it, and estimates for two purposes share no continuation.
    """
    roots: dict[str, _Root] = {}
    for trajectory, of_trajectory in zip(trajectories, states, strict=True):
        root = roots.setdefault(
            trajectory.problem.id, _Root(trajectory.problem, trajectory.prompt_ids, set())
        )
        root.prefixes.update(state.prefix_ids for state in of_trajectory)
    merged: dict[str, _Root] = {}
    for rank in context.exchange("value-states", list(roots.values())):
        for root in rank:
            known = merged.setdefault(root.problem.id, _Root(root.problem, root.prompt_ids, set()))
            known.prefixes.update(root.prefixes)

    # Neighbours in this order share their problem and most of their prefix, so that dealing them out
    # like cards gives every rank about the same work.
    distinct = sorted(State(id_, prefix) for id_, root in merged.items() for prefix in root.prefixes)
    hand = distinct[context.rank :: context.world_size]
    own = _continue(context, [(state, merged[state.problem]) for state in hand], samples, sampling, purpose)
    dealt = context.exchange("value-estimates", own)
    return {
        state: dealt[position % context.world_size][position // context.world_size]
        for position, state in enumerate(distinct)
    }


class _Root(NamedTuple):
    """A problem and the prefixes that its answers went through."""

    problem: Problem
    prompt_ids: TokenIds
    prefixes: set[tuple[int, ...]]


def _continue(
    context: GenerationContext,
    hand: Sequence[tuple[State, _Root]],
    samples: int,
    sampling: SamplingParams,
    purpose: str,
) -> list[Estimate]:
    """Estimates of this rank's hand, by sampling."""
    assert context.engine is not None, "Monte-Carlo values need an engine"
    requests = [
        Request(
            prompt_ids=joined([root.prompt_ids, token_array(state.prefix_ids)]),
            seed=derive_seed(context.seed, context.iteration, state.problem, repr(state.prefix_ids), purpose),
            n=samples,
            sampling=replace(
                sampling,
                max_tokens=token_budget(context, root.prompt_ids, sampling.max_tokens)
                - len(state.prefix_ids),
            ),
        )
        for state, root in hand
    ]
    graded: dict[int, list[Future[Grade] | None]] = {}

    def on_result(index: int, completions: list[Completion]) -> None:
        state, root = hand[index]
        graded[index] = [
            None
            if completion.finish_reason == "length" and context.unfinished_reward is not None
            else context.grader.submit(
                before_stop(
                    context.codec.decode(joined([token_array(state.prefix_ids), completion.token_ids])),
                    sampling.stop,
                ),
                root.problem,
            )
            for completion in completions
        ]
        context.progress(len(graded) * samples, len(requests) * samples)

    completions = context.engine.generate(requests, on_result)
    assert len(graded) == len(requests), "the engine reports every request"
    return [
        Estimate(
            rewards=tuple(
                (context.unfinished_reward or 0.0) if grade is None else grade.result().reward
                for grade in graded[index]
            ),
            unfinished=sum(completion.finish_reason == "length" for completion in completions[index]),
            tokens=sum(len(completion.token_ids) for completion in completions[index]),
        )
        for index in range(len(requests))
    ]
