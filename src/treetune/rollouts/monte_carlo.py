"""VinePPO's credit: the value of a step's start is the mean reward of fresh continuations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import pstdev
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from treetune.contracts import (
    Advantages,
    Answers,
    Continuations,
    CreditForTrees,
    CriticValues,
    Experiment,
    Feature,
    Finding,
    Need,
    SampledAnswers,
    UseOfAdvantages,
)
from treetune.inference.base import SamplingParams
from treetune.rollouts.base import UNUSED_REMEDY, Credit, CriticSettings
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import advantage_metrics, episode_of
from treetune.rollouts.metrics import mean
from treetune.rollouts.states import StepBoundaries
from treetune.rollouts.unavailable import least_answers
from treetune.rollouts.valuation import (
    AlongAnswer,
    FreshContinuations,
    Place,
    Valuation,
    ValueEstimator,
    check_continuations,
    mean_of,
    rewards_below,
)
from treetune.rollouts.values import EarlyContinuations, Estimate, StateRule
from treetune.tree import Tree, answers_of, sharing_of
from treetune.vocabulary import Episode, Metrics


def step_advantages(
    values: Sequence[float | None], reward: float, baselines: Sequence[float | None] | None = None
) -> list[float]:
    """A_i = r_i + V_{i+1} − V_i for every step, where `values[i]` is V before step i.

    The reward belongs to the last step and the terminal state is worth 0, so the advantages of an
    answer sum to reward − V(prompt) (Kazemnejad et al., arXiv:2410.01679, section 4, with γ = 1).

    Where V before a step is not known (None), there is no boundary: the step and the one before it are one,
    and each has its advantage. The first V is known. With `baselines` it is A_i = r_i + V_{i+1} − b_i.
    """
    advantages: list[float] = []
    held_against = values if baselines is None else baselines
    before = held_against[0]
    for end, after in enumerate([*values[1:], reward], start=1):
        if after is not None:
            assert before is not None, "without a first value there is nothing to hold the others against"
            advantages += [after - before] * (end - len(advantages))
            before = held_against[end] if end < len(values) else None
    return advantages


@Credit.register("monte_carlo")
@dataclass(frozen=True, kw_only=True)
class MonteCarlo(Credit):
    """`samples` continuations from the prompt and from the beginning of every other step; what steps are,
    `states` says.

    Continuations are sampled from token ids and graded together with the prefix that they
    continue, as in the rollout; `temperature`, `top_p` and `top_k` are the rollout's unless given.
    They are never trained on. The gradient is unbiased where a boundary depends on what comes before it
    only; what a task's steps and its end token's place make of that, `Task.answer_boundaries` says.

    `max_states` bounds the estimated states of an answer, its prompt included. What stands behind them,
    `behind_max_states` says: with ``one_step``, the tail is one step, which earns the observed reward less
    the last value, and the gradient stays unbiased. With ``no_advantage``, states behind them are worth the
    reward that was observed, so that nothing behind the first of them is trained (VinePPO's published code):
    **biased** by all that the policy could learn there. On the tests' language, three steps long, the
    gradient is off by 8 % of its length with two states and by 28 % with one, and where late steps decide by
    more.

    `siblings_count_into_prompt_value` adds the rewards of the other answers to the prompt's
    continuations. An answer's own reward stays out, so the estimate is independent of the answer
    and the gradient stays unbiased.

    An answer's continuations are asked for as soon as it is graded, while others are still sampled, as far as
    `values` knows what it wants of an answer whatever the others are; answers go before them. With
    `pipelined` false they are asked for when all answers are there. The numbers are the same, and so is what
    is sampled: nothing for answers that nobody could grade, and continuations of all others, since every
    answer gets its credit before a selection leaves any out (those of groups that ``until_mixed`` counts as
    dropped too).

    Continuations that nobody could grade don't count. A state without any other is no state: the steps on
    its two sides are credited as one, which is coarser and still unbiased. Answers whose prompt has no
    value are left out. ``credit/value_unavailable`` counts such continuations, ``credit/value_unknown``
    states without a value, ``credit/unvalued`` answers that are left out.
    """

    samples: Annotated[int, Gt(0)] = 9
    states: StateRule = field(default_factory=StepBoundaries)
    """Where values are wanted."""
    values: ValueEstimator = field(default_factory=FreshContinuations)
    """How they are found."""
    max_states: Annotated[int, Gt(0)] | None = None
    behind_max_states: Literal["no_advantage", "one_step"] = "no_advantage"
    """What the steps behind the last estimated state earn."""
    siblings_count_into_prompt_value: bool = False
    temperature: Annotated[float, Ge(0)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1)] | None = None
    pipelined: bool = True
    """Whether continuations are asked for with each answer; false: when all are there."""

    @classmethod
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"pipelined"})

    @property
    def gives(self) -> tuple[Feature, ...]:
        sampled = (Continuations(),) if self.values.continues else ()
        learnt = () if self.critic_settings is None else (CriticValues(),)
        return (Advantages(before_training=True), CreditForTrees(), *sampled, *learnt)

    @property
    def critic_settings(self) -> CriticSettings | None:
        return self.values.critic_settings

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
        if sampling is not None and self.values.continues:
            yield from check_continuations(
                self.samples, sampling.temperature if self.temperature is None else self.temperature
            )

    def __post_init__(self) -> None:
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves no token to sample; use -1 for all tokens")
        if self.siblings_count_into_prompt_value and not isinstance(self.values, FreshContinuations):
            raise ValueError(
                "siblings_count_into_prompt_value adds to the mean of continuations: leave it out, or choose"
                " the values 'continuations'"
            )
        if self.siblings_count_into_prompt_value and self._overrides():
            raise ValueError(
                "siblings_count_into_prompt_value mixes answers of the rollout with continuations "
                f"sampled otherwise ({', '.join(self._overrides())}); give up one of the two"
            )

    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        if not self.values.continues:
            return 0, 0
        bound = self.max_states or limit
        states = min(bound, self.states.usual_states(tokens))
        least, most = self.values.budget(self.samples).bounds
        return round(answers * states * least), answers * min(bound, limit) * most

    def _overrides(self) -> dict[str, float]:
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in given.items() if value is not None}

    def early_continuations(self, context: RolloutContext) -> EarlyContinuations | None:
        if not (self.pipelined and self.states.begins(context) and self.values.first_states(1)):
            return None
        return EarlyContinuations(
            rule=self.states,
            budget=self.values.budget(self.samples),
            sampling=self._sampling(context),
            first_states=self.values.first_states,
            max_states=self.max_states,
            least=least_answers(self),
        )

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        valuation = Valuation(
            context, trees, self.states, self._sampling(context), self.samples, self.max_states
        )
        found = self.values.values(valuation)
        episodes = []
        for tree, ways, of_tree in zip(trees, valuation.ways, found, strict=True):
            for leaf, (way, along) in enumerate(zip(ways, of_tree, strict=True)):
                tree.values.update(
                    {s: v.value for (s, _), v in zip(way, along, strict=True) if v is not None}
                )
                values = [*along]
                if self.siblings_count_into_prompt_value:
                    at_prompt = valuation.found[way[0][0]].rewards
                    anywhere = [[0] * len(tree.leaves)] * len(tree.leaves)
                    values[0] = mean_of([*at_prompt, *rewards_below(tree, anywhere, Place(leaf, 0))])
                if values[0] is not None:
                    episodes.append(self._episode(context, tree, leaf, values))
        unvalued = len(answers_of(trees)) - len(episodes)
        metrics = _value_metrics(valuation.everyones) | advantage_metrics(context, episodes)
        return episodes, metrics | valuation.metrics | _told(context, valuation.everyones, unvalued)

    def _episode(self, context: RolloutContext, tree: Tree, leaf: int, along: AlongAnswer) -> Episode:
        answer = tree.leaves[leaf]
        values = [None if one is None else one.value for one in along]
        baselines = [None if one is None else one.held_against for one in along]
        errors = [math.inf if one is None else math.sqrt(one.variance) for one in along]
        beyond = len(self.states.step_starts(answer)) - len(values)
        as_observed = self.behind_max_states == "no_advantage"
        values += [answer.reward if as_observed else None] * beyond
        baselines += [answer.reward if as_observed else None] * beyond
        errors += [0.0 if as_observed else math.inf] * beyond
        advantages = step_advantages(values, answer.reward, baselines)
        # Of steps that are credited as one, each shows the value before the first.
        shown: list[float] = []
        for value in values:
            shown.append(shown[-1] if value is None else value)
        steps = self.states.laid_out(answer, advantages, shown, errors)
        whole = replace(answer, step_ends=steps.ends)
        episode = episode_of(context, whole, steps.advantages, steps.values, steps.errors)
        return sharing_of(tree).trained_once(leaf, episode) if tree.forked else episode

    def _sampling(self, context: RolloutContext) -> SamplingParams:
        if context.settings.sampling is None:
            raise ValueError(
                "monte_carlo continues what a policy sampled, and this rollout samples nothing; "
                "choose single_turn, or credit none for supervised training"
            )
        return replace(context.settings.sampling, **self._overrides())  # type: ignore[arg-type]


def _value_metrics(of_state: Sequence[Estimate]) -> Metrics:
    """Of the distinct states: how many, what they are worth, how sure, at which cost.

    ``credit/value_std`` is the mean over states of the standard deviation of their K rewards;
    ``credit/value_decided`` the share of states whose continuations all earned the same.
    """
    known = [e.rewards for e in of_state if e.rewards]
    if not known:
        return {}
    samples = sum(e.samples for e in of_state)
    return {
        "credit/value_states": float(len(of_state)),
        "credit/value_samples": float(samples),
        "credit/value_tokens": float(sum(e.tokens for e in of_state)),
        "credit/value_unfinished": sum(e.unfinished for e in of_state) / samples,
        "credit/value_mean": mean([mean(rewards) for rewards in known]),
        "credit/value_std": mean([pstdev(rewards) for rewards in known]),
        "credit/value_decided": mean([float(len(set(rewards)) == 1) for rewards in known]),
    }


def _told(context: RolloutContext, of_state: Sequence[Estimate], unvalued: int) -> Metrics:
    """What could not be graded, where there is any: said, and counted. Collective."""
    lost = sum(e.unavailable for e in of_state)  # of all ranks' states, so that all come to the same
    if not lost:
        return {}
    total = sum(e.samples for e in of_state)
    unknown = sum(not e.rewards for e in of_state)
    answers = sum(count for (count,) in context.ranks.exchange("unvalued", [unvalued]))
    context.log.say(
        f"iteration {context.iteration + 1}: {lost} of {total} continuations could not be graded and don't"
        f" count; {unknown} of {len(of_state)} states have no value, and {answers} answers are left out with"
        " their prompt's"
    )
    return {
        "credit/value_unavailable": float(lost),
        "credit/value_unknown": float(unknown),
        "credit/unvalued": float(answers),
    }
