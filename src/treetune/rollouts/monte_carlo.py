"""VinePPO's credit: the value of a step's start is the mean reward of fresh continuations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import pstdev
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

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
from treetune.engine.base import SamplingParams
from treetune.rollouts.base import UNUSED_REMEDY, Credit, CriticSettings
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import advantage_metrics, episode_of
from treetune.rollouts.metrics import mean
from treetune.rollouts.states import StepBoundaries
from treetune.rollouts.unavailable import least_answers
from treetune.rollouts.valuation import (
    FreshContinuations,
    StepValues,
    Valuation,
    Value,
    ValuedAnswer,
    ValueEstimator,
    check_continuations,
    mean_of,
    rewards_below,
)
from treetune.rollouts.values import ContinuationPlan, EarlyContinuations, Estimate, StateRule
from treetune.tree import Tree, answers_of, sharing_of
from treetune.vocabulary import Episode, Metrics


def step_advantages(
    values: Sequence[float | None], reward: float, baselines: Sequence[float | None] | None = None
) -> list[float]:
    """A_i = r_i + V_{i+1} − V_i for every step, where `values[i]` is V before step i.

    The reward belongs to the last step and the terminal state is worth 0, so the advantages of an
    answer sum to reward − V(prompt) (Kazemnejad et al., arXiv:2410.01679, section 4, with γ = 1).

    Where V before a step is not known (None), there is no boundary: the step and the one before it are one,
    and each has its advantage, so that the sum is then larger. The first V is known. With `baselines` it is
    A_i = r_i + V_{i+1} − b_i.
    """
    advantages: list[float] = []
    before_steps = values if baselines is None else baselines
    before = before_steps[0]
    for end, after in enumerate([*values[1:], reward], start=1):
        if after is not None:
            assert before is not None, "without a first value there is nothing to compare the others with"
            advantages += [after - before] * (end - len(advantages))
            before = before_steps[end] if end < len(values) else None
    return advantages


@Credit.register("monte_carlo")
@dataclass(frozen=True, kw_only=True)
class MonteCarlo(Credit):
    """Continuations from the prompt and from the beginning of every other step; `states` says what steps are.

    Continuations are sampled from token ids and graded together with the prefix that they continue, as in the
    rollout. They are never trained on. The gradient is unbiased where a boundary depends on what comes before
    it only; `Task.answer_boundaries` says what a task's steps and its end token's place make of that.

    Continuations that nobody could grade don't count. A state without any other is no state: the steps on
    its two sides are credited as one, which is coarser and still unbiased. Answers whose prompt has no
    value are left out. ``credit/value_unavailable`` counts such continuations, ``credit/value_unknown``
    states without a value, ``credit/unvalued`` answers that are left out.
    """

    samples: Annotated[int, Gt(0)] = 9
    """Continuations of a state."""
    states: StateRule = field(default_factory=StepBoundaries)
    """The rule that says where values are wanted."""
    values: ValueEstimator = field(default_factory=FreshContinuations)
    """The estimator of the values."""
    max_states: Annotated[int, Gt(0)] | None = None
    """Bounds the estimated states of an answer, its prompt included; None: there is no bound."""
    behind_max_states: Literal["no_advantage", "one_step"] = "no_advantage"
    """Credit of the steps behind the last estimated state. With ``one_step``, they are one step, which earns
    the observed reward less the last value, and the gradient stays unbiased. With ``no_advantage``, states
    behind it are worth the reward that was observed, so that nothing behind the first of them is trained
    (VinePPO's published code): **biased** by all that the policy could learn there. On the tests' language,
    three steps long, the gradient is off by 8 % of its length with two states and by 28 % with one, and where
    late steps decide by more."""
    siblings_count_into_prompt_value: bool = False
    """Adds the rewards of the other answers to the prompt's continuations. An answer's own reward stays out,
    so the estimate is independent of the answer and the gradient stays unbiased."""
    temperature: Annotated[float, Ge(0)] | None = None
    """Temperature of continuations; None: the rollout's."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """As the rollout's, for continuations; None: the rollout's."""
    top_k: Annotated[int, Ge(-1)] | None = None
    """As the rollout's, for continuations; None: the rollout's."""
    pipelined: bool = True
    """Whether an answer's continuations are requested as soon as it is graded, while others are sampled, as
    far as `values` wants them whatever the other answers are; answers go before them. With false they are
    requested when all answers are there. The numbers are the same, and so is what is sampled: nothing for
    answers that nobody could grade, and continuations of all others, since every answer gets its credit
    before a selection leaves any out (those of groups that ``until_mixed`` counts as dropped too)."""

    @classmethod
    @override
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"pipelined"})

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        sampled = (Continuations(),) if self.values.continues else ()
        learnt = () if self.critic_settings is None else (CriticValues(),)
        return (Advantages(before_training=True), CreditForTrees(), *sampled, *learnt)

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.values.critic_settings

    @property
    @override
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

    @override
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

    @override
    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        if not self.values.continues:
            return 0, 0
        bound = self.max_states or limit
        states = min(bound, self.states.usual_states(tokens))
        least, most = self.values.budget(self.samples).bounds
        return round(answers * states * least), answers * min(bound, limit) * most

    @override
    def is_unbiased(self, context: RolloutContext) -> bool:
        """Every part has to be: the values, the choice of states, what is credited behind the last of them,
        and continuations, which have to be sampled as the answers are."""
        if not self.values.unbiased or not self.states.looks_back(context.task):
            return False
        if self.max_states is not None and self.behind_max_states != "one_step":
            return False
        sampling = context.settings.sampling
        if not self.values.continues or sampling is None:
            return True
        return replace(sampling, **self._overrides()) == sampling  # type: ignore[arg-type]

    def _overrides(self) -> dict[str, float]:
        settings = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in settings.items() if value is not None}

    @override
    def early_continuations(self, context: RolloutContext) -> EarlyContinuations | None:
        if not (self.pipelined and self.states.begins_early(context) and self.values.first_states(1)):
            return None
        return EarlyContinuations(
            rule=self.states,
            plan=ContinuationPlan(self.values.budget(self.samples), self._sampling(context)),
            first_states=self.values.first_states,
            max_states=self.max_states,
            least=least_answers(self),
        )

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        sampling = self._sampling(context)
        valuation = Valuation(context, trees, self.states, sampling, self.samples, self.max_states)
        values = self.values.values(valuation)
        _check_values(self.values, valuation, values)
        episodes = []
        for answer, of_answer in zip(valuation.answers, values, strict=True):
            step_values = list(of_answer)
            if self.siblings_count_into_prompt_value:
                step_values[0] = self._prompt_value(valuation, answer)
            if step_values[0] is None:
                continue  # nothing is known of the answer
            earned = {}
            for at in answer.states:
                if (estimate := valuation.estimates.get(at.state)) is not None:
                    earned[at.length] = estimate.earned
            episode = self._episode(context, answer.tree, answer.leaf, step_values)
            episodes.append(replace(episode, continuations=earned))
        metrics = _value_metrics(valuation.all_estimates) | advantage_metrics(context, episodes)
        lost = _report_lost(context, valuation.all_estimates, len(answers_of(trees)) - len(episodes))
        return episodes, metrics | valuation.metrics | lost

    def _prompt_value(self, valuation: Valuation, answer: ValuedAnswer) -> Value | None:
        """Returns the mean of what the prompt's continuations and the other answers to the problem earned."""
        continued = valuation.estimates[answer.states[0].state].rewards
        answers = len(answer.tree.leaves)
        share_the_prompt = [[0] * answers for _ in range(answers)]
        siblings = rewards_below(answer.tree, share_the_prompt, answer.leaf, 0)
        return mean_of([*continued, *siblings])

    def _episode(self, context: RolloutContext, tree: Tree, leaf: int, step_values: StepValues) -> Episode:
        answer = tree.leaves[leaf]
        values = [None if value is None else value.value for value in step_values]
        baselines = [None if value is None else value.baseline_or_value for value in step_values]
        errors = [math.inf if value is None else math.sqrt(value.variance) for value in step_values]
        beyond = len(self.states.step_starts(answer)) - len(values)
        as_observed = self.behind_max_states == "no_advantage"
        values += [answer.reward if as_observed else None] * beyond
        baselines += [answer.reward if as_observed else None] * beyond
        errors += [0.0 if as_observed else math.inf] * beyond
        advantages = step_advantages(values, answer.reward, baselines)
        # Steps that are credited as one all have the value before the first.
        repeated: list[float] = []
        for value in values:
            repeated.append(repeated[-1] if value is None else value)
        rows = self.states.step_rows(answer, advantages, repeated, errors)
        episode = episode_of(
            context, replace(answer, step_ends=rows.ends), rows.advantages, rows.values, rows.errors
        )
        return sharing_of(tree).trained_once(leaf, episode) if tree.forked else episode

    def _sampling(self, context: RolloutContext) -> SamplingParams:
        if context.settings.sampling is None:
            raise ValueError(
                "monte_carlo continues what a policy sampled, and this rollout samples nothing; "
                "choose single_turn, or credit none for supervised training"
            )
        return replace(context.settings.sampling, **self._overrides())  # type: ignore[arg-type]


def _check_values(estimator: ValueEstimator, valuation: Valuation, values: Sequence[StepValues]) -> None:
    """Raises ValueError where an estimator doesn't give each state of each answer its value."""
    expected = [len(answer.states) for answer in valuation.answers]
    try:
        counts = [len(of_answer) for of_answer in values]
        fits = counts == expected and all(
            isinstance(value, Value | None) for of_answer in values for value in of_answer
        )
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{type(estimator).__name__}: give each state of each answer a Value or None, in a list for each"
            " of `Valuation.answers`"
        )


def _value_metrics(estimates: Sequence[Estimate]) -> Metrics:
    """Returns metrics of the distinct states: how many, their values, how sure these are, at which cost.

    ``credit/value_std`` is the mean over states of the standard deviation of their K rewards;
    ``credit/value_decided`` the share of states whose continuations all earned the same.
    """
    rewards_by_state = [estimate.rewards for estimate in estimates if estimate.rewards]
    if not rewards_by_state:
        return {}
    samples = sum(len(estimate.earned) for estimate in estimates)
    return {
        "credit/value_states": float(len(estimates)),
        "credit/value_samples": float(samples),
        "credit/value_tokens": float(sum(estimate.tokens for estimate in estimates)),
        "credit/value_unfinished": sum(estimate.unfinished for estimate in estimates) / samples,
        "credit/value_mean": mean([mean(rewards) for rewards in rewards_by_state]),
        "credit/value_std": mean([pstdev(rewards) for rewards in rewards_by_state]),
        "credit/value_decided": mean([float(len(set(rewards)) == 1) for rewards in rewards_by_state]),
    }


def _report_lost(context: RolloutContext, estimates: Sequence[Estimate], unvalued: int) -> Metrics:
    """Logs and counts continuations that could not be graded, if there are any. Collective."""
    # Of all ranks, so that all decide alike.
    lost = sum(estimate.earned.count(None) for estimate in estimates)
    if not lost:
        return {}
    total = sum(len(estimate.earned) for estimate in estimates)
    unknown = sum(not estimate.rewards for estimate in estimates)
    answers = sum(count for (count,) in context.ranks.exchange("unvalued", [unvalued]))
    context.log.say(
        f"iteration {context.iteration + 1}: {lost} of {total} continuations could not be graded and don't"
        f" count; {unknown} of {len(estimates)} states have no value, and {answers} answers are left out with"
        " their prompt's"
    )
    return {
        "credit/value_unavailable": float(lost),
        "credit/value_unknown": float(unknown),
        "credit/unvalued": float(answers),
    }
