"""VinePPO's credit: the value of each step's start is the mean reward of fresh continuations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import pstdev
from typing import Annotated

from annotated_types import Ge, Gt, Le

from treetune.contracts import (
    Advantages,
    Answers,
    Continuations,
    Experiment,
    Finding,
    Need,
    OneLine,
    SampledAnswers,
    UseOfAdvantages,
)
from treetune.episode_generators.base import THREADS_REMEDY, UNUSED_REMEDY, Credit, GenerationContext
from treetune.episode_generators.credit.episodes import advantage_metrics, episode_of, groups_of
from treetune.episode_generators.credit.states import Estimate, State, check_continuations, estimate_states
from treetune.episode_generators.metrics import mean
from treetune.inference.base import SamplingParams
from treetune.vocabulary import Episode, Metrics, Trajectory


def step_advantages(values: Sequence[float], reward: float) -> list[float]:
    """A_i = r_i + V_{i+1} − V_i for every step, where `values[i]` is V before step i.

    The reward belongs to the last step and the terminal state is worth 0, so the advantages of an
    answer sum to reward − V(prompt) (Kazemnejad et al., arXiv:2410.01679, section 4, with γ = 1).
    """
    following = [*values[1:], reward]
    return [after - before for before, after in zip(values, following, strict=True)]


@Credit.register("monte_carlo")
@dataclass(frozen=True, kw_only=True)
class MonteCarlo(Credit):
    """`samples` continuations from the prompt and from every step boundary but the last.

    Continuations are sampled from token ids and graded together with the prefix that they
    continue, as in the rollout; `temperature`, `top_p` and `top_k` are the rollout's unless given.
    They are never trained on. The gradient is unbiased where a task's boundary depends on what comes
    before it only: an end token straight behind a boundary belongs to the step before, though other
    tokens there would begin a new one.

    `max_states` bounds the estimated states of an answer, its prompt included: later ones are
    worth the reward that was observed, which gives the steps between them no advantage.

    `siblings_count_into_prompt_value` adds the rewards of the other answers to the prompt's
    continuations. An answer's own reward stays out, so the estimate is independent of the answer
    and the gradient stays unbiased.
    """

    samples: Annotated[int, Gt(0)] = 9
    max_states: Annotated[int, Gt(0)] | None = None
    siblings_count_into_prompt_value: bool = False
    temperature: Annotated[float, Ge(0)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1)] | None = None

    gives = (Advantages(before_training=True), Continuations())

    @property
    def needs(self) -> tuple[Need, ...]:
        needs = (
            Need(SampledAnswers(), "it goes on from them as the policy sampled them"),
            Need(OneLine(), "it continues answers from their beginnings", THREADS_REMEDY),
            Need(UseOfAdvantages(), "its continuations cost most of an iteration", UNUSED_REMEDY),
        )
        siblings = Need(
            Answers(2),
            "siblings_count_into_prompt_value counts the others to the same problem",
            "set siblings_count_into_prompt_value to false, or the rollout's samples to 2 or more",
        )
        return (*needs, siblings) if self.siblings_count_into_prompt_value else needs

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        sampling = experiment.rollout.sampling
        if sampling is not None:
            yield from check_continuations(
                self.samples, sampling.temperature if self.temperature is None else self.temperature
            )

    def __post_init__(self) -> None:
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves no token to sample; use -1 for all tokens")
        if self.siblings_count_into_prompt_value and self._overrides():
            raise ValueError(
                "siblings_count_into_prompt_value mixes answers of the rollout with continuations "
                f"sampled otherwise ({', '.join(self._overrides())}); give up one of the two"
            )

    def _overrides(self) -> dict[str, float]:
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in given.items() if value is not None}

    def assign(
        self, context: GenerationContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Episode], Metrics]:
        states = [self._states(trajectory) for trajectory in trajectories]
        estimates = estimate_states(context, trajectories, states, self.samples, self._sampling(context))
        siblings = self._sibling_rewards(trajectories)
        episodes = []
        for position, trajectory in enumerate(trajectories):
            rewards = [estimates[state].rewards for state in states[position]]
            rewards[0] = (*rewards[0], *siblings[position])
            values = [mean(rewards_of_state) for rewards_of_state in rewards]
            values += [trajectory.reward] * (len(trajectory.step_ends) - len(values))
            advantages = step_advantages(values, trajectory.reward)
            episodes.append(episode_of(context, trajectory, advantages, values))
        return episodes, _value_metrics(estimates) | advantage_metrics(context, episodes)

    def _states(self, trajectory: Trajectory) -> list[State]:
        """The states before each step, up to `max_states` of them."""
        response_ids = tuple(trajectory.response_ids.tolist())
        starts = (0, *trajectory.step_ends[:-1])[: self.max_states]
        return [State(trajectory.problem.id, response_ids[:start]) for start in starts]

    def _sampling(self, context: GenerationContext) -> SamplingParams:
        if context.sampling is None:
            raise ValueError(
                "monte_carlo continues what a policy sampled, and this rollout samples nothing; "
                "choose single_turn, or credit none for supervised training"
            )
        return replace(context.sampling, **self._overrides())  # type: ignore[arg-type]

    def _sibling_rewards(self, trajectories: Sequence[Trajectory]) -> list[tuple[float, ...]]:
        """For each answer, the rewards of the others to its problem, if they are to count."""
        siblings: list[tuple[float, ...]] = [()] * len(trajectories)
        if self.siblings_count_into_prompt_value:
            for group in groups_of(trajectories).values():
                for position in group:
                    siblings[position] = tuple(trajectories[p].reward for p in group if p != position)
        return siblings


def _value_metrics(estimates: dict[State, Estimate]) -> Metrics:
    """Of the distinct states: how many, what they are worth, how sure, at which cost.

    ``credit/value_std`` is the mean over states of the standard deviation of their K rewards;
    ``credit/value_decided`` the share of states whose continuations all earned the same.
    """
    if not estimates:
        return {}
    of_state = list(estimates.values())
    samples = sum(len(e.rewards) for e in of_state)
    return {
        "credit/value_states": float(len(of_state)),
        "credit/value_samples": float(samples),
        "credit/value_tokens": float(sum(e.tokens for e in of_state)),
        "credit/value_unfinished": sum(e.unfinished for e in of_state) / samples,
        "credit/value_mean": mean([mean(e.rewards) for e in of_state]),
        "credit/value_std": mean([pstdev(e.rewards) for e in of_state]),
        "credit/value_decided": mean([float(len(set(e.rewards)) == 1) for e in of_state]),
    }
