"""States out of a policy's answers, and what many continuations of them earn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune.rollouts.context import RolloutContext
from treetune.rollouts.unavailable import NothingGraded
from treetune.rollouts.values.base import Estimate, FixedBudget
from treetune.rollouts.values.estimation import Wanted, estimates
from treetune.rollouts.values.step_boundaries import StepBoundaries
from treetune.seeds import derived_random
from treetune.vocabulary import Segment, TokenIds, Trajectory, joined, token_array
from treetune_lab.analyzers.truth import Place

TRUTH, ESTIMATE = "analysis: truth", "analysis: estimate"
"""Purposes of continuations. Seeds derive from them: what judges shares none with what is judged, nor
with those that the run itself was credited by."""


@dataclass(frozen=True)
class ChosenState:
    """The state before step `step` (from 0: the prompt alone) of one of the policy's answers."""

    trajectory: Trajectory
    step: int

    @property
    def start(self) -> int:
        """How many of the answer's tokens belong to the state."""
        return (0, *self.trajectory.step_ends)[self.step]

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return tuple(self.trajectory.response_ids[: self.start].tolist())

    @property
    def position(self) -> float:
        """The share of the answer's tokens that lies behind it, in [0, 1)."""
        return self.start / self.trajectory.step_ends[-1]

    @property
    def token_ids(self) -> TokenIds:
        return joined([self.trajectory.prompt_ids, self.trajectory.response_ids[: self.start]])


def choose_states(
    trajectories: Sequence[Trajectory], count: int, seed: int, point: int, *, prompts: bool = False
) -> list[ChosenState]:
    """At most `count` different states between the steps of these answers, or their prompts.

    Drawn as often as the policy comes there: answers by chance, steps by chance, each distinct state
    once. The same for the same answers and `seed`.
    """
    places = [
        (i, step)
        for i, trajectory in enumerate(trajectories)
        for step in ([0] if prompts else range(1, len(trajectory.step_ends)))
    ]
    derived_random(seed, point, "prompts" if prompts else "states").shuffle(places)
    chosen: dict[tuple[str, tuple[int, ...]], ChosenState] = {}
    for i, step in places:
        if len(chosen) == count:
            break
        state = ChosenState(trajectories[i], step)
        chosen.setdefault((state.trajectory.problem.id, state.prefix_ids), state)
    return list(chosen.values())


def continued(
    context: RolloutContext,
    nodes: Sequence[tuple[Trajectory, tuple[int, ...]]],
    samples: int,
    purpose: str,
) -> list[Estimate]:
    """What `samples` continuations of each (an answer to the problem, prefix ids) earn, sampled as the
    answers were. The prefix need not be the answer's own.
    """
    places = [Place(one.problem, one.prompt_ids, token_array(prefix)) for one, prefix in nodes]
    return continued_places(context, places, samples, purpose)


def continued_places(
    context: RolloutContext, places: Sequence[Place], samples: int, purpose: str
) -> list[Estimate]:
    """What `samples` continuations of each place earn."""
    assert context.settings.sampling is not None, "the context is that of a rollout that samples"
    if not places:
        return []
    wanted = [
        Wanted(problem, prompt_ids, [[Segment(begun_ids)]], [(0, len(begun_ids))])
        for problem, prompt_ids, begun_ids in places
    ]
    found, everyones = estimates(
        context, wanted, StepBoundaries(), FixedBudget(samples), context.settings.sampling, purpose
    )
    if lost := sum(estimate.unavailable for estimate in everyones):
        raise NothingGraded(
            f"{lost} continuations could not be graded, and the analysis needs all of them: run it again when"
            " what grades them is there. What was sampled is kept"
        )
    return [estimate for [estimate] in found]
