"""Early continuations: they begin as soon as their answer is graded, while other answers are still sampled.

Without them, credit would wait for the slowest answer of the iteration before it samples its first
continuation. Early continuations have the same seeds as those that credit would sample later, so the results
are the same:

    rollout phase     answer A sampled ── graded ── observe(A): continuations of A's states ──┐
                      answer B sampled ────────────── graded ── observe(B): ...  ─────────────┤
                      answer C sampled ─────────────────────────── graded ── observe(C): ... ─┤
                                                                                              ▼
    credit phase      StateRule.estimate takes each state's continuations with `find`, and samples the rest

The rollout awaits `observe` for each answer, and ends when all these calls have returned. In the engine's
queue, answers have priority over continuations, so continuations don't delay them.
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
    """Samples the continuations of each answer during the rollout, and keeps them for the credit phase.

    The requests and their seeds are those that credit would send after the rollout. Answers that could not be
    graded are not continued. Problems with fewer than `least_answers` graded answers are left out of
    training, so their answers are not continued either: the first answers to a problem wait until
    `least_answers` of them are graded.

    A rollout takes part through `attach`. In the credit phase this object is in the context, and
    `StateRule.estimate` reads from it what has `begun`.
    """

    rule: StateRule
    plan: ContinuationPlan
    first_states: Callable[[int], Sequence[int]]
    """Returns the indices of the states that are continued whatever the other answers are, given the number
    of an answer's states. Example: ``range``, for all states."""
    max_states: int | None = None
    """The largest number of states of an answer; None: there is no bound."""
    least_answers: int = 1
    """The number of answers to a problem that must be graded for the problem to be trained on."""
    begun: dict[bytes, Any] = field(default_factory=dict)
    """The return value of `StateRule.begin`, by the state's key; None while `begin` is still running."""
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
        """Returns what `StateRule.begin` returned for the state with this key; None if the state was not
        begun, or was begun with another plan."""
        return self.begun.get(state_key) if plan == self.plan else None

    def _new_states(self, answer: Trajectory) -> list[AnswerPrefix]:
        """Returns the states to continue now that this answer is graded.

        The answers to a problem wait until `least_answers` of them are graded, since a problem with fewer
        isn't trained on. So this answer's states may come with those of the answers before it, or not yet.
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
            # Whether the other states of an answer are continued is decided after the rollout.
            for index in self.first_states(len(starts)):
                prefix = AnswerPrefix.of(ready.problem, ready.prompt_ids, ready.segments, starts[index])
                # Answers share states, at least that of the prompt. Each state is begun once.
                if prefix.key not in self.begun:
                    self.begun[prefix.key] = None  # until `_begin` has the continuations
                    new_states.append(prefix)
        return new_states

    async def _begin(self, context: RolloutContext, prefix: AnswerPrefix) -> None:
        self.begun[prefix.key] = await self.rule.begin(context, prefix, self.plan)
