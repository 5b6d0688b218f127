"""States in answers of one line, which are continued from their beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from treetune.contracts import Need, OneLine
from treetune.inference.base import CONTINUATIONS, Completion, Later, Request, SamplingParams
from treetune.rollouts.answers import before_stop
from treetune.rollouts.base import STATES_REMEDY
from treetune.rollouts.context import AnswerSettings, RolloutContext
from treetune.rollouts.values.base import Beginning, Budget, Estimate, OpenState, StateRule
from treetune.rollouts.values.early import EarlyContinuations
from treetune.seeds import derive_seed
from treetune.vocabulary import Grade, joined


@dataclass(frozen=True, kw_only=True)
class OneLineStates(StateRule):
    """Anywhere in answers whose tokens were each sampled after all before it. Rules say where."""

    needs = (Need(OneLine(), "it continues answers from their beginnings", STATES_REMEDY),)

    def begins(self, context: RolloutContext) -> bool:
        return True

    def begin(
        self,
        context: RolloutContext,
        beginning: Beginning,
        budget: Budget,
        sampling: SamplingParams,
        purpose: str,
    ) -> OneLineState:
        state = OneLineState(context, beginning, budget, sampling, purpose)
        # What services do for values is counted with the values, whose phase comes later.
        state.held = [] if context.grader.has_services else None
        return state

    def estimate(
        self,
        context: RolloutContext,
        beginnings: Sequence[Beginning],
        budget: Budget,
        sampling: SamplingParams,
        purpose: str,
    ) -> list[Estimate]:
        """A continuation may use the tokens that its beginning left of the answer's budget."""
        assert context.engine is not None, "Monte-Carlo values need an engine"
        states = [
            _taken_up(context, one, budget, sampling, purpose)
            or OneLineState(context, one, budget, sampling, purpose)
            for one in beginnings
        ]
        owners: list[OneLineState] = []  # of each request, in their order
        done = total = sum(len(state.completions) for state in states)

        def asked(state: OneLineState) -> list[Request | Later]:
            nonlocal total
            found: list[Request | Later] = []
            for one in state.ask():
                if isinstance(one, Later):
                    found.append(Later(one.ready, partial(asked, state)))
                else:
                    owners.append(state)
                    total += one.n
                    found.append(one)
            return found

        def on_result(index: int, completions: list[Completion]) -> list[Request | Later]:
            nonlocal done
            owners[index].take(completions)
            further = asked(owners[index])
            done += len(completions)
            context.log.progress(done, total)
            return further

        requests = [request for state in states for request in asked(state)]
        if requests:
            context.engine.generate(requests, on_result)
        return [state.estimate() for state in states]


def continuations_asked_for(
    settings: AnswerSettings,
    seed: int,
    iteration: int,
    beginning: Beginning,
    sampling: SamplingParams,
    purpose: str,
    turn: int,
    count: int,
) -> Request:
    """The request for `count` continuations of a state in a turn of its budget, counted from 0; `sampling` as
    its problem has it. The viewer asks too: the journal knows an answered request by what was asked."""
    problem, prompt_ids, _ = beginning
    begun_ids = beginning.token_ids
    place = (iteration, problem.id, repr(tuple(begun_ids.tolist())), purpose)
    budget = settings.token_budget(prompt_ids, sampling.max_tokens)
    return Request(
        prompt_ids=joined([prompt_ids, begun_ids]),
        seed=derive_seed(seed, *(place if turn == 0 else (*place, turn))),
        n=count,
        sampling=replace(sampling, max_tokens=budget - len(begun_ids)),
        priority=CONTINUATIONS,
        reads_logprobs=False,
    )


def _taken_up(
    context: RolloutContext, beginning: Beginning, budget: Budget, sampling: SamplingParams, purpose: str
) -> OneLineState | None:
    """The state, where it was begun with while answers were sampled."""
    early = context.find(EarlyContinuations)
    state = None if early is None else early.states.get((beginning.key, sampling, purpose))
    if not isinstance(state, OneLineState) or state.budget != budget:
        return None
    held, state.held = state.held, None
    state.grade(held or ())
    return state


@dataclass
class OneLineState(OpenState):
    """A state and what is known of it so far. `turn` counts its requests. Where `held` is a list, completions
    wait there to be graded."""

    context: RolloutContext
    beginning: Beginning
    budget: Budget
    sampling: SamplingParams
    purpose: str
    turn: int = 0
    completions: list[Completion] = field(default_factory=list)
    grades: list[Future[Grade] | None] = field(default_factory=list)
    held: list[Completion] | None = None
    over: bool = False

    def ask(self) -> list[Request | Later]:
        if self.over or self.held:
            return []
        if self.turn and self.budget.adaptive:
            missing = next((one for one in self.grades if one is not None and not one.done()), None)
            if missing is not None:  # whoever waited here would keep what else has come in waiting
                return [Later(missing, self.ask)]
        count = self.budget.ask(self.turn, self.rewards)
        self.over = not count
        return [self.request(count)] if count else []

    def answered(self, index: int, completions: list[Completion]) -> list[Request | Later]:
        self.take(completions)
        return self.ask()

    @property
    def own_sampling(self) -> SamplingParams:
        """The problem's: domains have stop strings and budgets of their own."""
        return self.context.task.of(self.beginning.problem).sampling(self.sampling)

    def request(self, count: int) -> Request:
        context = self.context
        request = continuations_asked_for(
            context.settings,
            context.seed,
            context.iteration,
            self.beginning,
            self.own_sampling,
            self.purpose,
            self.turn,
            count,
        )
        self.turn += 1
        return request

    def take(self, completions: Sequence[Completion]) -> None:
        self.completions += completions
        if self.held is None:
            self.grade(completions)
        else:
            self.held += completions

    def grade(self, completions: Sequence[Completion]) -> None:
        context, begun_ids = self.context, self.beginning.token_ids
        for one in completions:
            if one.finish_reason == "length" and context.settings.unfinished_reward is not None:
                self.grades.append(None)
                continue
            text = context.codec.decode(joined([begun_ids, one.token_ids]))
            self.grades.append(
                context.grader.submit(before_stop(text, self.own_sampling.stop), self.beginning.problem)
            )

    def rewards(self) -> list[float]:
        """Of those that could be graded."""
        unfinished = self.context.settings.unfinished_reward or 0.0
        grades = [None if grade is None else grade.result() for grade in self.grades]
        return [
            unfinished if grade is None else grade.reward
            for grade in grades
            if grade is None or grade.is_known
        ]

    def estimate(self) -> Estimate:
        rewards = self.rewards()
        counted = self.budget.counted(rewards)
        return Estimate(
            rewards=tuple(counted),
            unfinished=sum(one.finish_reason == "length" for one in self.completions),
            tokens=sum(len(one.token_ids) for one in self.completions),
            unavailable=len(self.completions) - len(rewards),
            set_aside=len(rewards) - len(counted),
        )
