"""VinePPO's credit: the value of each step's start is the mean reward of fresh continuations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
    SampledAnswers,
    UseOfAdvantages,
)
from treetune.episode_generators.base import UNUSED_REMEDY, Credit, GenerationContext
from treetune.episode_generators.credit.episodes import advantage_metrics, episode_of
from treetune.episode_generators.metrics import mean
from treetune.episode_generators.values.base import Estimate, FixedContinuations, StateRule
from treetune.episode_generators.values.estimation import Wanted, check_continuations, estimates
from treetune.episode_generators.values.step_boundaries import StepBoundaries
from treetune.inference.base import SamplingParams
from treetune.tree import State, Tree
from treetune.vocabulary import Episode, Metrics


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
    """`samples` continuations from the prompt and from the beginning of every other step; what steps are,
    `states` says.

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
    states: StateRule = field(default_factory=StepBoundaries)
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

    def assign(self, context: GenerationContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        of_leaves = [[self._states(tree, leaf) for leaf in range(len(tree.leaves))] for tree in trees]
        wanted, distinct = [], []
        for tree, ways in zip(trees, of_leaves, strict=True):
            first: dict[State, tuple[int, int]] = {}
            for leaf, way in enumerate(ways):
                for state, length in way:
                    first.setdefault(state, (leaf, length))
            distinct.append(list(first))
            paths = [leaf.segments for leaf in tree.leaves]
            wanted.append(Wanted(tree.problem, tree.prompt_ids, paths, list(first.values())))
        own, everyones = estimates(
            context, wanted, self.states, FixedContinuations(self.samples), self._sampling(context)
        )
        episodes = []
        for tree, ways, states, found in zip(trees, of_leaves, distinct, own, strict=True):
            tree.values.update({state: estimate.value for state, estimate in zip(states, found, strict=True)})
            at_prompt = found[0].rewards if found else ()
            for leaf, way in enumerate(ways):
                values = [tree.values[state] for state, _ in way]
                if self.siblings_count_into_prompt_value:
                    others = [other.reward for place, other in enumerate(tree.leaves) if place != leaf]
                    values[0] = mean([*at_prompt, *others])
                episodes.append(self._episode(context, tree, leaf, values))
        return episodes, _value_metrics(everyones) | advantage_metrics(context, episodes)

    def _states(self, tree: Tree, leaf: int) -> list[tuple[State, int]]:
        """The states before each step, up to `max_states` of them, and how many tokens stand before it."""
        starts = self.states.step_starts(tree.leaves[leaf])[: self.max_states]
        return [(tree.state(leaf, start), start) for start in starts]

    def _episode(self, context: GenerationContext, tree: Tree, leaf: int, values: list[float]) -> Episode:
        answer = tree.leaves[leaf]
        values += [answer.reward] * (len(self.states.step_starts(answer)) - len(values))
        advantages = step_advantages(values, answer.reward)
        return episode_of(context, answer, *self.states.laid_out(answer, advantages, values))

    def _sampling(self, context: GenerationContext) -> SamplingParams:
        if context.sampling is None:
            raise ValueError(
                "monte_carlo continues what a policy sampled, and this rollout samples nothing; "
                "choose single_turn, or credit none for supervised training"
            )
        return replace(context.sampling, **self._overrides())  # type: ignore[arg-type]


def _value_metrics(of_state: Sequence[Estimate]) -> Metrics:
    """Of the distinct states: how many, what they are worth, how sure, at which cost.

    ``credit/value_std`` is the mean over states of the standard deviation of their K rewards;
    ``credit/value_decided`` the share of states whose continuations all earned the same.
    """
    if not of_state:
        return {}
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
