"""Continuations that are asked for as soon as an answer is graded, while others are still sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from treetune.inference.base import Completion, Later, SamplingParams
from treetune.inference.pipelined import PipelinedEngine
from treetune.rollouts.answers import with_unfinished
from treetune.rollouts.base import GenerationContext
from treetune.rollouts.values.base import Beginning, Budget, OpenState, StateRule
from treetune.vocabulary import Grade, Trajectory


@dataclass
class Ahead:
    """What credit asks for with each answer alone, so that it needn't wait for the slowest.

    The same requests with the same seeds that it would ask for afterwards: `begun` has the states that were
    gone on from, and who estimates them takes up there. `first_states` says of an answer with so many states
    which are wanted whatever the others are. Answers that nobody could grade cost nothing, nor do problems
    of which fewer than `least` answers could be graded, since these are left out of what is learnt from: an
    answer waits until so many of its problem's are there.
    """

    rule: StateRule
    budget: Budget
    sampling: SamplingParams
    first_states: Callable[[int], Sequence[int]]
    max_states: int | None = None
    least: int = 1
    purpose: str = "value"
    begun: dict[Any, OpenState] = field(default_factory=dict)
    engine: PipelinedEngine = field(init=False)
    _known: dict[str, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))

    def lent(self, context: GenerationContext) -> GenerationContext:
        """What the rollout is lent, so that continuations are asked for with its answers."""
        assert context.engine is not None, "answers that are sampled need an engine"
        self.engine = PipelinedEngine(context.engine)

        def on_answer(answer: Trajectory, grade: Future[Grade]) -> None:
            def graded() -> tuple[()]:
                self._graded(context, answer, grade)
                return ()  # what is asked for is on the side

            if grade.done():
                graded()
            else:
                self.engine.also([Later(grade, graded)], _unasked)

        return replace(context, engine=self.engine, on_answer=on_answer)

    def _graded(self, context: GenerationContext, answer: Trajectory, grade: Future[Grade]) -> None:
        if not with_unfinished(grade.result(), answer.finish_reason, context.unfinished_reward).is_known:
            return
        waiting = self._known[answer.problem.id]
        waiting.append(answer)
        if len(waiting) >= self.least:
            for one in waiting if len(waiting) == self.least else waiting[-1:]:
                self._begin(context, one)

    def _begin(self, context: GenerationContext, answer: Trajectory) -> None:
        starts = self.rule.step_starts(answer)[: self.max_states]
        for place in self.first_states(len(starts)):
            beginning = Beginning.of(answer.problem, answer.prompt_ids, answer.segments, starts[place])
            key = beginning.key, self.sampling, self.purpose
            if key not in self.begun:
                state = self.rule.begin(context, beginning, self.budget, self.sampling, self.purpose)
                self.begun[key] = state
                self.engine.also(state.ask(), state.answered)


def _unasked(index: int, completions: list[Completion]) -> None:
    raise AssertionError("nothing was asked")
