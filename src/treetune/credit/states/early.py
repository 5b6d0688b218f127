"""Continuations that begin as soon as their answer is graded, while other answers are still sampled.

Without them, credit would wait for the slowest answer of the iteration before it samples its first
continuation. The seeds are the same, and so are the numbers:

    rollout phase     answer A sampled ── graded ── observe(A): continuations of A's states ──┐
                      answer B sampled ────────────── graded ── observe(B): ...  ─────────────┤
                      answer C sampled ─────────────────────────── graded ── observe(C): ... ─┤
                                                                                              ▼
    credit phase      StateRule.estimate takes each state's continuations with `find`, and samples the rest

The rollout awaits `observe` for each answer and ends when all have returned. Answers have priority over
continuations in the engine's queue, so that they don't become later.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treetune.credit.states.base import AnswerPrefix, ContinuationPlan, StateRule
from treetune.rollouts.context import AnswerObserver, RolloutContext
from treetune.vocabulary import Trajectory


@dataclass
class EarlyContinuations:
    """The continuations that credit samples with each answer.

    They are the requests, with the seeds, that credit would send after the rollout. Answers that could not be
    graded are not continued. Nor are those of problems with fewer than `least_answers` graded answers, since
    these are left out of training: an answer waits until so many of its problem's are graded.

    A rollout takes part through `attach`. In the credit phase this object is in the context, and estimates
    read what has `begun`.
    """

    rule: StateRule
    plan: ContinuationPlan
    first_states: Callable[[int], Sequence[int]]
    """Returns which of an answer's states to continue whatever the other answers are, given how many states
    it has. Example: ``range`` for all of them."""
    max_states: int | None = None
    """Bounds the states of an answer."""
    least_answers: int = 1
    """How many answers to a problem must be graded for the problem to be trained on."""
    begun: dict[bytes, Any] = field(default_factory=dict)
    """What `StateRule.begin` returned, by the state's key; None while it is still running."""
    _graded: dict[str, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))
    """The answers to each problem that could be graded, in the order in which they were graded."""

    def attach(self, context: RolloutContext) -> RolloutContext:
        """Returns the rollout's context with an observer that continues the states of each answer."""

        async def observe(answer: Trajectory) -> None:
            prefixes = self._new_states(answer)
            # `context` is the one without this observer: continuations must not be continued themselves.
            await asyncio.gather(*(self._begin(context, prefix) for prefix in prefixes))

        return replace(context, answer_observer=AnswerObserver(observe))

    def find(self, state_key: bytes, plan: object) -> Any:
        """Returns what was begun of the state with this key and this plan; None where nothing was."""
        return self.begun.get(state_key) if plan == self.plan else None

    def _new_states(self, answer: Trajectory) -> list[AnswerPrefix]:
        """Returns the states to continue now that this answer is graded.

        A state is the beginning of an answer up to the start of a step. The answers to a problem wait until
        `least_answers` of them are graded, since a problem with fewer isn't trained on.
        """
        if not answer.grade.is_known:
            return []
        graded = self._graded[answer.problem.id]
        graded.append(answer)
        if len(graded) < self.least_answers:
            return []
        # The first `least_answers` answers begin together, each later one by itself.
        ready_answers = graded if len(graded) == self.least_answers else [answer]
        new_states = []
        for ready in ready_answers:
            starts = self.rule.step_starts(ready)[: self.max_states]
            # `first_states` chooses the states that are continued whatever the other answers are.
            for index in self.first_states(len(starts)):
                prefix = AnswerPrefix.of(ready.problem, ready.prompt_ids, ready.segments, starts[index])
                if prefix.key not in self.begun:  # answers share states, at least that of the prompt
                    self.begun[prefix.key] = None
                    new_states.append(prefix)
        return new_states

    async def _begin(self, context: RolloutContext, prefix: AnswerPrefix) -> None:
        self.begun[prefix.key] = await self.rule.begin(context, prefix, self.plan)
