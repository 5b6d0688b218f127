"""States in answers of one line, which are continued from their beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from treetune.contracts import Need, OneLine
from treetune.episode_generators.base import STATES_REMEDY, GenerationContext
from treetune.episode_generators.rollout.answers import before_stop, token_budget
from treetune.episode_generators.values.base import Beginning, Budget, Estimate, StateRule
from treetune.inference.base import Completion, Request, SamplingParams
from treetune.seeds import derive_seed
from treetune.vocabulary import Grade, joined


@dataclass(frozen=True, kw_only=True)
class OneLineStates(StateRule):
    """Anywhere in answers whose tokens were each sampled after all before it. Rules say where."""

    needs = (Need(OneLine(), "it continues answers from their beginnings", STATES_REMEDY),)

    def estimate(
        self,
        context: GenerationContext,
        beginnings: Sequence[Beginning],
        budget: Budget,
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
            count = budget.ask(state.turn, state.rewards)
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
        return [state.estimate(budget) for state in states]


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

    @property
    def own_sampling(self) -> SamplingParams:
        """The problem's: domains have stop strings and budgets of their own."""
        return self.context.task.of(self.beginning.problem).sampling(self.sampling)

    def request(self, count: int) -> Request:
        context, (problem, prompt_ids, _) = self.context, self.beginning
        begun_ids, sampling = self.beginning.token_ids, self.own_sampling
        place = (context.iteration, problem.id, repr(tuple(begun_ids.tolist())), self.purpose)
        budget = token_budget(context, prompt_ids, sampling.max_tokens)
        request = Request(
            prompt_ids=joined([prompt_ids, begun_ids]),
            seed=derive_seed(context.seed, *(place if self.turn == 0 else (*place, self.turn))),
            n=count,
            sampling=replace(sampling, max_tokens=budget - len(begun_ids)),
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
                context.grader.submit(before_stop(text, self.own_sampling.stop), self.beginning.problem)
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

    def estimate(self, budget: Budget) -> Estimate:
        rewards = self.rewards()
        counted = budget.counted(rewards)
        return Estimate(
            rewards=tuple(counted),
            unfinished=sum(one.finish_reason == "length" for one in self.completions),
            tokens=sum(len(one.token_ids) for one in self.completions),
            unavailable=len(self.completions) - len(rewards),
            set_aside=len(rewards) - len(counted),
        )
