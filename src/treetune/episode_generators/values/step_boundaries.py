"""States at the task's step boundaries: an answer in one line, continued from its beginning."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from treetune.contracts import Need, OneLine
from treetune.episode_generators.base import STATES_REMEDY, GenerationContext
from treetune.episode_generators.rollout.answers import before_stop, token_budget
from treetune.episode_generators.values.base import Beginning, Estimate, StateRule, ValueEstimator
from treetune.inference.base import Completion, Request, SamplingParams
from treetune.seeds import derive_seed
from treetune.vocabulary import Grade, Trajectory, joined


@StateRule.register("step_boundaries")
@dataclass(frozen=True, kw_only=True)
class StepBoundaries(StateRule):
    """Before every step of the answer (Kazemnejad et al., arXiv:2410.01679, section 4)."""

    needs = (Need(OneLine(), "it continues answers from their beginnings", STATES_REMEDY),)

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return (0, *trajectory.step_ends[:-1])

    def estimate(
        self,
        context: GenerationContext,
        beginnings: Sequence[Beginning],
        estimator: ValueEstimator,
        sampling: SamplingParams,
        purpose: str,
    ) -> list[Estimate]:
        """A continuation may use the tokens that its beginning left of the answer's budget."""
        assert context.engine is not None, "Monte-Carlo values need an engine"
        states = [_State(context, beginning, sampling, purpose) for beginning in beginnings]
        owners: list[_State] = []  # of each request, in their order
        done = total = 0

        def asked(state: _State) -> list[Request]:
            nonlocal total
            count = estimator.ask(state.turn, state.rewards)
            if not count:
                return []
            owners.append(state)
            total += count
            return [state.request(count)]

        def on_result(index: int, completions: list[Completion]) -> list[Request]:
            nonlocal done
            owners[index].take(completions)
            further = asked(owners[index])
            done += len(completions)
            context.progress(done, total)
            return further

        requests = [request for state in states for request in asked(state)]
        if requests:
            context.engine.generate(requests, on_result)
        return [state.estimate() for state in states]


@dataclass
class _State:
    """A state and what is known of it so far. `turn` counts its requests."""

    context: GenerationContext
    beginning: Beginning
    sampling: SamplingParams
    purpose: str
    turn: int = 0
    completions: list[Completion] = field(default_factory=list)
    grades: list[Future[Grade] | None] = field(default_factory=list)

    def request(self, count: int) -> Request:
        context, (problem, prompt_ids, _) = self.context, self.beginning
        begun_ids = self.beginning.token_ids
        place = (context.iteration, problem.id, repr(tuple(begun_ids.tolist())), self.purpose)
        budget = token_budget(context, prompt_ids, self.sampling.max_tokens)
        request = Request(
            prompt_ids=joined([prompt_ids, begun_ids]),
            seed=derive_seed(context.seed, *(place if self.turn == 0 else (*place, self.turn))),
            n=count,
            sampling=replace(self.sampling, max_tokens=budget - len(begun_ids)),
        )
        self.turn += 1
        return request

    def take(self, completions: Sequence[Completion]) -> None:
        context, begun_ids = self.context, self.beginning.token_ids
        for one in completions:
            if one.finish_reason == "length" and context.unfinished_reward is not None:
                self.grades.append(None)
                continue
            text = context.codec.decode(joined([begun_ids, one.token_ids]))
            self.grades.append(
                context.grader.submit(before_stop(text, self.sampling.stop), self.beginning.problem)
            )
        self.completions += completions

    def rewards(self) -> list[float]:
        """Of those that could be graded."""
        unfinished = self.context.unfinished_reward or 0.0
        grades = [None if grade is None else grade.result() for grade in self.grades]
        return [
            unfinished if grade is None else grade.reward
            for grade in grades
            if grade is None or grade.is_known
        ]

    def estimate(self) -> Estimate:
        rewards = tuple(self.rewards())
        return Estimate(
            rewards=rewards,
            unfinished=sum(one.finish_reason == "length" for one in self.completions),
            tokens=sum(len(one.token_ids) for one in self.completions),
            unavailable=len(self.completions) - len(rewards),
        )
