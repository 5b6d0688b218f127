"""Continuations that are requested as soon as an answer is graded, while others are still sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from treetune.inference.base import Completion, Later, SamplingParams
from treetune.inference.pipelined import PipelinedEngine
from treetune.rollouts.answers import with_unfinished
from treetune.rollouts.context import AnswerObserver, RolloutContext
from treetune.rollouts.values.base import Beginning, Budget, OpenState, StateRule
from treetune.vocabulary import Grade, Trajectory


@dataclass
class EarlyContinuations:
    """The continuations that credit requests with each answer, so that it needn't wait for the slowest one.

    They are the requests, with the seeds, that it would make afterwards. Answers that nobody could grade cost
    nothing, nor do problems of which fewer than `least` answers could be graded, since these are left out of
    training: an answer waits until so many of its problem's are there.

    A rollout takes part through `attached`; in the credit phase this object is a service of the context, and
    estimates take up the `states` that it began.
    """

    rule: StateRule
    budget: Budget
    sampling: SamplingParams
    first_states: Callable[[int], Sequence[int]]
    """Given how many states an answer has, returns those that are wanted whatever the others are."""
    max_states: int | None = None
    least: int = 1
    purpose: str = "value"
    states: dict[Any, OpenState] = field(default_factory=dict)
    """The states that were continued, by key, sampling and purpose."""
    engine: PipelinedEngine = field(init=False)
    _graded: dict[str, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))

    def attached(self, context: RolloutContext) -> RolloutContext:
        """Returns the rollout's context, with an engine that samples continuations among its answers."""
        assert context.engine is not None, "answers that are sampled need an engine"
        self.engine = PipelinedEngine(context.engine)

        def observe(answer: Trajectory, grade: Future[Grade]) -> None:
            def graded() -> tuple[()]:
                self._take(context, answer, grade.result())
                return ()  # the requests are made on the side

            if grade.done():
                graded()
            else:
                self.engine.also([Later(grade, graded)], _no_request)

        return context.with_services(AnswerObserver(observe), engine=self.engine)

    def _take(self, context: RolloutContext, answer: Trajectory, grade: Grade) -> None:
        if not with_unfinished(grade, answer.finish_reason, context.settings.unfinished_reward).is_known:
            return
        of_problem = self._graded[answer.problem.id]
        of_problem.append(answer)
        if len(of_problem) < self.least:
            return
        # The first `least` answers begin together, each later one by itself.
        for ready in of_problem if len(of_problem) == self.least else of_problem[-1:]:
            starts = self.rule.step_starts(ready)[: self.max_states]
            for index in self.first_states(len(starts)):
                beginning = Beginning.of(ready.problem, ready.prompt_ids, ready.segments, starts[index])
                key = beginning.key, self.sampling, self.purpose
                if key not in self.states:
                    state = self.rule.begin(context, beginning, self.budget, self.sampling, self.purpose)
                    self.states[key] = state
                    self.engine.also(state.ask(), state.answered)


def _no_request(index: int, completions: list[Completion]) -> None:
    raise AssertionError("nothing was requested")
