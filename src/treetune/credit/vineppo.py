"""VinePPO's credit: a step's advantage is the difference of Monte-Carlo values before and after it.

Kazemnejad et al., arXiv:2410.01679, section 4. The value of a state is the mean reward of K fresh
continuations of it, so no critic is needed:

    answer         prompt ── step 1 ── step 2 ── step 3 ── reward 1
    values V            0.4       0.7       0.6       (the end is worth 0, and the reward comes with step 3)
    advantages A            0.3      −0.1       0.4           A_i = r_i + V_{i+1} − V_i

How `MonteCarlo.assign` gets there:

    trees ── states of each answer (`StateRule`) ── values of the states (`ValueEstimator`)
          ── `step_advantages` ── one training row for each answer (`make_episode`)

With other `states` (such as steps of n tokens) and other `values` (such as those of a critic, or the mean
rewards of the other answers), `MonteCarlo` is the credit of further methods: see `credit.states` and
`credit.values`.
"""

from __future__ import annotations

import itertools
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
from treetune.credit.base import (
    UNUSED_ADVANTAGES_REMEDY,
    ContinuingCredit,
    Credit,
    CriticSettings,
    TrainerScores,
)
from treetune.credit.episodes import advantage_metrics, make_episode
from treetune.credit.states.base import ContinuationPlan, Estimate, StateRule
from treetune.credit.states.early import EarlyContinuations
from treetune.credit.states.one_line import StepBoundaries
from treetune.credit.values.base import (
    StepValues,
    Valuation,
    Value,
    ValuedAnswer,
    ValueEstimator,
    rewards_below,
    value_of_rewards,
)
from treetune.credit.values.continuations import FreshContinuations, check_continuations
from treetune.engine.requests import SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.rollouts.unavailable import least_answers
from treetune.tree import Tree, answers_of, sharing_of
from treetune.vocabulary import Episode, Metrics


def step_advantages(
    values: Sequence[float | None],
    reward: float,
    baselines: Sequence[float | None] | None = None,
    lam: float = 0.0,
) -> list[float]:
    """Returns A_i = r_i + V_{i+1} − V_i for every step, or r_i + V_{i+1} − b_i with `baselines`.

    The reward belongs to the last step, and the terminal state is worth 0 (Kazemnejad et al.,
    arXiv:2410.01679, section 4, with γ = 1). So the advantages of an answer sum to reward − V(prompt), if
    every value is known, λ is 0, and there are no `baselines`.

    Example: ``step_advantages([0.4, 0.7, 0.6], reward=1.0)`` is about ``[0.3, -0.1, 0.4]``. Without a value
    before the second step, ``[0.4, None, 0.6]``, the first two steps are credited as one, and each of them
    has its advantage: ``[0.2, 0.2, 0.4]``. With ``lam=1`` each step is compared with the reward:
    ``[0.6, 0.3, 0.4]``.

    Args:
        values: V before each step; None where V is not known. The first must be known.
        reward: The answer's reward.
        baselines: b before each step, and None where `values` has None. An estimator gives them if it
            compares a step with another number than the value, such as the mean reward of the other answers
            (`Value.baseline`). Without them, b is V.
        lam: λ. In place of V_{i+1}, the step gets the λ-return G_i = (1 − λ) V_{i+1} + λ G_{i+1}, where G of
            the last step is the reward (Sutton and Barto, "Reinforcement learning", 2018, section 12.1).
    """
    advantages: list[float] = []
    baselines = values if baselines is None else baselines
    baseline = baselines[0]
    # The value after step i is the one before step i + 1; after the last step the reward takes its place.
    values_after = lambda_returns([*values[1:], reward], lam)
    for steps_so_far, value_after in enumerate(values_after, start=1):
        if value_after is None:
            continue  # no value is known here: this step is credited together with the next one
        assert baseline is not None, "without a first value there is nothing to compare the others with"
        uncredited_steps = steps_so_far - len(advantages)
        advantages += [value_after - baseline] * uncredited_steps
        # The baseline of the next step. After the last step there is no next one.
        baseline = baselines[steps_so_far] if steps_so_far < len(values) else None
    return advantages


def lambda_returns(values_after: Sequence[float | None], lam: float) -> list[float | None]:
    """Returns G_i = (1 − λ) V_{i+1} + λ G_{i+1} for every step; see `step_advantages`.

    Example: ``lambda_returns([0.8, None, 0.0, 1.0], lam=0.5)`` is ``[0.65, None, 0.5, 1.0]``.

    Args:
        values_after: The value after each step, None where it is not known. The last one is the reward.
        lam: λ; with 0, the values are returned as they are.
    """
    returns = list(values_after)
    later_return = returns[-1]
    assert later_return is not None, "G of the last step is the reward"
    for step in range(len(returns) - 2, -1, -1):
        value = returns[step]
        if value is not None:
            later_return = (1 - lam) * value + lam * later_return
            returns[step] = later_return
    return returns


@Credit.register("monte_carlo")
@dataclass(frozen=True, kw_only=True)
class MonteCarlo(ContinuingCredit):
    """VinePPO (Kazemnejad et al., arXiv:2410.01679): A_i = V(s_{i+1}) − V(s_i), where V is the mean reward of
    continuations from a state.

    There is a state before every step, the prompt first; `states` says what steps are. Continuations are
    sampled from token ids and graded together with the prefix that they continue, as in the rollout. They are
    never trained on. The gradient is unbiased if the position of each step boundary depends only on the
    tokens before it. `Task.answer_boundaries` says what this means for the end token.

    Continuations that could not be graded don't count. A state without graded continuations is left out: the
    steps before and after it are credited as one, which is coarser and still unbiased. Answers whose prompt
    has no value are left out, and ``credit/unvalued`` counts them. If some continuations could not be graded,
    ``credit/value_unavailable`` counts them, and ``credit/value_unknown`` the states without a value.
    """

    samples: Annotated[int, Gt(0)] = 9
    """The usual number of continuations of a state: K in the paper."""
    states: StateRule = field(default_factory=StepBoundaries)
    """The rule that says where the states of an answer lie."""
    values: ValueEstimator = field(default_factory=FreshContinuations)
    """The estimator of the values."""
    max_states: Annotated[int, Gt(0)] | None = None
    """The largest number of estimated states of an answer, its prompt included; null: there is no bound."""
    behind_max_states: Literal["no_advantage", "one_step"] = "one_step"
    """Credit of the steps after the last estimated state, if an answer has more than `max_states` states.
    With ``one_step``, they are credited as one step, with the observed reward minus the last value, and the
    gradient stays unbiased. With ``no_advantage`` (VinePPO's published code), every state after the last
    estimated one is worth the observed reward. The step from the last estimated state is then credited with
    the reward minus the value of this state, and each later step with 0: **biased** by all that the policy
    could learn from the later steps. In the small language of this project's tests, in which the exact
    gradient can be computed and answers have three steps, the gradient is off by 8 % of its norm with two
    states and by 28 % with one, and by more where late steps decide."""
    siblings_count_into_prompt_value: bool = False
    """Whether the rewards of the other answers to the problem count as rewards of the prompt's continuations.
    An answer's own reward is left out, so the estimate is independent of the answer and the gradient stays
    unbiased."""
    temperature: Annotated[float, Ge(0)] | None = None
    """Temperature of continuations; null: the rollout's."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """`top_p` of continuations; null: the rollout's."""
    top_k: Annotated[int, Ge(-1)] | None = None
    """`top_k` of continuations; null: the rollout's."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.0
    """λ, the weight of what the answer itself earned after the next state. With 0, the advantage of a step is
    the value after it minus the value before it: VinePPO. With 1, it is the answer's own reward minus the
    value before the step. With the states `turns` and λ = 1, this is C3's replay (arXiv:2603.06859): the
    answer's turn is compared with `samples` other turns that are sampled in the same context, and doesn't
    count in their mean. The gradient stays unbiased if the values are. A larger λ makes advantages noisier,
    unless the values after a step are very noisy."""
    pipelined: bool = True
    """When continuations are requested. False: when all answers are sampled. True: as soon as their answer is
    graded, during the rollout, with a lower priority than all requests for answers. Some continuations are
    requested later nevertheless: those whose number depends on other answers, those of trees, and those of
    turns and threads if a grader uses services such as a judge. The samples and the numbers are the same
    either way, since credit continues every graded answer: also one that a selection leaves out later, or
    whose group ``until_mixed`` counts as dropped."""

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        sampling = self._sampling_of_continuations(context)
        valuation = Valuation(context, trees, self.states, sampling, self.samples, self.max_states)
        # The estimator samples continuations of the states, and returns each state's value, answer by answer.
        # Continuations that were begun during the rollout are not sampled again.
        values = self.values.values(valuation)
        _check_values(self.values, valuation, values)
        episodes = []
        for answer, estimated_values in zip(valuation.answers, values, strict=True):
            step_values = list(estimated_values)
            if self.siblings_count_into_prompt_value:
                step_values[0] = self._prompt_value(valuation, answer)
            if step_values[0] is None:
                continue  # the prompt has no value: there is nothing to compare the other values with
            episodes.append(self._make_training_row(context, valuation, answer, step_values))
        metrics = _value_metrics(valuation.all_estimates) | advantage_metrics(context, episodes)
        unvalued_answers = len(answers_of(trees)) - len(episodes)
        metrics_of_ungraded = _report_ungraded(context, valuation.all_estimates, unvalued_answers)
        return episodes, metrics | valuation.metrics | metrics_of_ungraded

    def _prompt_value(self, valuation: Valuation, answer: ValuedAnswer) -> Value | None:
        """Returns the mean reward of the prompt's continuations and of the other answers to the problem."""
        prompt = answer.states[0].state
        rewards_of_continuations = valuation.estimates[prompt].rewards
        # `rewards_below` takes the other answers that share at least `length` response tokens with this one.
        # For the prompt, `length` is 0, and any two answers share at least 0 tokens. So the answers aren't
        # compared, and all numbers of shared tokens are set to 0.
        answer_count = len(answer.tree.leaves)
        shared_tokens = [[0] * answer_count for _ in range(answer_count)]
        rewards_of_siblings = rewards_below(answer.tree, shared_tokens, answer.leaf, length=0)
        return value_of_rewards([*rewards_of_continuations, *rewards_of_siblings])

    def _make_training_row(
        self,
        context: RolloutContext,
        valuation: Valuation,
        answer: ValuedAnswer,
        estimated_values: StepValues,
    ) -> Episode:
        """Returns the training row of an answer.

        Args:
            context: The context of the credit phase.
            valuation: Has the rewards of the continuations, which are stored with the row.
            answer: The answer and its states; with `max_states`, only its first states.
            estimated_values: The value of each state of the answer; None where it is not known.
        """
        trajectory = answer.trajectory
        values = [None if value is None else value.value for value in estimated_values]
        baselines = [None if value is None else value.baseline_or_value for value in estimated_values]
        # An infinite error marks a step without a value. For such a step, the training row repeats the value
        # of the step before it (see `values_of_steps`).
        errors = [math.inf if value is None else math.sqrt(value.variance) for value in estimated_values]

        # With `max_states`, `estimated_values` has no entry for the states after the first `max_states`.
        states_behind = len(self.states.step_starts(trajectory)) - len(values)
        if self.behind_max_states == "no_advantage":
            # All of these states are worth the reward, so the differences between them are 0.
            values += [trajectory.reward] * states_behind
            baselines += [trajectory.reward] * states_behind
            errors += [0.0] * states_behind
        else:
            # These states have no value. `step_advantages` therefore credits all steps after the last state
            # with a value as one step.
            values += [None] * states_behind
            baselines += [None] * states_behind
            errors += [math.inf] * states_behind
        advantages = step_advantages(values, trajectory.reward, baselines, self.lam)

        # If several steps are credited as one, each of them gets the value before the first of them.
        values_of_steps: list[float] = []
        for value in values:
            values_of_steps.append(values_of_steps[-1] if value is None else value)
        # The steps of the training row. They may be more than the answer has states: with threads, for
        # example, an injected segment is a step of the row.
        steps = self.states.step_rows(trajectory, advantages, values_of_steps, errors)
        trajectory_with_steps = replace(trajectory, step_ends=steps.ends)
        episode = make_episode(context, trajectory_with_steps, steps.advantages, steps.values, steps.errors)
        if answer.tree.has_forks:
            # A token that several answers share was sampled once, and is trained in the first of them.
            episode = sharing_of(answer.tree).train_tokens_once(answer.leaf, episode)

        # For the viewer and analyses: the rewards of each state's continuations, by the state's length.
        rewards_of_continuations = {}
        for answer_state in answer.states:
            estimate = valuation.estimates.get(answer_state.state)
            if estimate is not None:
                rewards_of_continuations[answer_state.length] = estimate.all_rewards
        return replace(episode, continuations=rewards_of_continuations)

    # Declarations for the configuration's checks and plans

    @classmethod
    @override
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"pipelined"})  # results don't depend on it

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        # `CreditForRewards` is left out, so that a configuration with shaping is refused. Shaping would
        # change the rewards of answers, but not those of their continuations.
        features: list[Feature] = [Advantages(before_training=True), CreditForTrees()]
        if self.values.continues:
            features.append(Continuations())
        if self.critic_settings is not None:
            features.append(CriticValues())
        return tuple(features)

    @property
    @override
    def trainer_scores(self) -> TrainerScores:
        return TrainerScores(reference=self.values.asks_reference)

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.values.critic_settings

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        because = "its continuations cost most of an iteration"
        if not self.values.continues:
            because = "it estimates values only to make advantages of them"
        needs = [
            Need(SampledAnswers(), "it continues them as the policy sampled them"),
            Need(UseOfAdvantages(), because, UNUSED_ADVANTAGES_REMEDY),
        ]
        if self.siblings_count_into_prompt_value:
            needs.append(
                Need(
                    Answers(2),
                    "siblings_count_into_prompt_value counts the others to the same problem",
                    "set siblings_count_into_prompt_value to false, or the rollout's samples to 2 or more",
                )
            )
        return tuple(needs)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        sampling = experiment.rollout.sampling
        if sampling is not None and self.values.continues:
            temperature = sampling.temperature if self.temperature is None else self.temperature
            yield from check_continuations(temperature)

    def __post_init__(self) -> None:
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves no token to sample; use -1 for all tokens")
        if self.siblings_count_into_prompt_value and not isinstance(self.values, FreshContinuations):
            raise ValueError(
                "siblings_count_into_prompt_value adds to the mean of continuations: leave it out, or choose"
                " the values 'continuations'"
            )
        if self.siblings_count_into_prompt_value and self._sampling_overrides():
            raise ValueError(
                "siblings_count_into_prompt_value mixes answers of the rollout with continuations "
                f"sampled otherwise ({', '.join(self._sampling_overrides())}); give up one of the two"
            )

    @override
    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        # Returns the usual and the largest total. An answer has `tokens` tokens on average, at most `limit`.
        if not self.values.continues:
            return 0, 0
        most_states = limit  # at most, there is a state before every token
        if self.max_states is not None:
            most_states = min(self.max_states, limit)
        usual_states = min(most_states, self.states.usual_states(tokens))
        # The smallest and the largest number of continuations of a state. The usual total counts the smallest
        # for each state.
        least_samples, most_samples = self.values.budget(self.samples).bounds
        usual_continuations = round(answers * usual_states * least_samples)
        most_continuations = answers * most_states * most_samples
        return usual_continuations, most_continuations

    @override
    def is_unbiased(self, context: RolloutContext) -> bool:
        """True if every part is unbiased: the values, the positions of states, the credit after the last
        state, and the continuations, which have to be sampled as the answers are."""
        # `looks_back`: the position of a state depends only on the tokens before the state.
        if not self.values.unbiased or not self.states.looks_back(context.task):
            return False
        if self.max_states is not None and self.behind_max_states == "no_advantage":
            return False  # the steps after the last state get the advantage 0, whatever they change
        sampling = context.settings.sampling
        if not self.values.continues or sampling is None:
            return True  # without continuations, none can be sampled in another way than the answers
        return replace(sampling, **self._sampling_overrides()) == sampling  # type: ignore[arg-type]

    def _sampling_overrides(self) -> dict[str, float]:
        """Returns the sampling parameters that differ between continuations and answers, by name."""
        settings = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in settings.items() if value is not None}

    @override
    def early_continuations(self, context: RolloutContext) -> EarlyContinuations | None:
        """Returns what is continued while other answers are still sampled; None if nothing is."""
        # `first_states(n)` returns which of an answer's n states are continued whatever the other answers
        # are. If these are none of a single state, they are none of any number: the estimator has to see all
        # answers first.
        needs_all_answers = not self.values.first_states(1)
        if not self.pipelined or needs_all_answers or not self.states.begins_early(context):
            return None
        return EarlyContinuations(
            rule=self.states,
            plan=ContinuationPlan(self.values.budget(self.samples), self._sampling_of_continuations(context)),
            first_states=self.values.first_states,
            max_states=self.max_states,
            least_answers=least_answers(self),
        )

    def _sampling_of_continuations(self, context: RolloutContext) -> SamplingParams:
        """Returns the sampling parameters of continuations: those of the answers, except for
        `_sampling_overrides`."""
        if context.settings.sampling is None:
            raise ValueError(
                "monte_carlo continues what a policy sampled, and this rollout samples nothing; "
                "choose single_turn, or credit none for supervised training"
            )
        return replace(context.settings.sampling, **self._sampling_overrides())  # type: ignore[arg-type]


def _check_values(estimator: ValueEstimator, valuation: Valuation, values: Sequence[StepValues]) -> None:
    """Raises ValueError where an estimator doesn't give each state of each answer its value."""
    if not _has_value_of_each_state(valuation, values):
        raise ValueError(
            f"{type(estimator).__name__}: give each state of each answer a Value or None, in a list for each"
            " of `Valuation.answers`"
        )


def _has_value_of_each_state(valuation: Valuation, values: Sequence[StepValues]) -> bool:
    """Returns whether there is a `Value` or None for each state of each answer. `values` may be anything,
    since the estimator may be a user's."""
    try:
        counts = [len(step_values) for step_values in values]
        if counts != [len(answer.states) for answer in valuation.answers]:
            return False
        all_values = itertools.chain.from_iterable(values)
        return all(isinstance(value, Value | None) for value in all_values)
    except TypeError:  # `values` is no sequence, or an entry of it has no length
        return False


def _value_metrics(estimates: Sequence[Estimate]) -> Metrics:
    """Returns metrics of the distinct states: their number, their values, the spread of their rewards, and
    the cost of their continuations.

    ``credit/value_std`` is the mean over states of the standard deviation of a state's rewards;
    ``credit/value_decided`` is the share of states whose continuations all have the same reward.
    """
    # `Estimate.rewards` has the rewards that count towards a state's value, `Estimate.all_rewards` has one
    # entry for each continuation.
    rewards_of_states = [estimate.rewards for estimate in estimates if estimate.rewards]
    if not rewards_of_states:
        return {}
    samples = sum(len(estimate.all_rewards) for estimate in estimates)
    return {
        "credit/value_states": float(len(estimates)),
        "credit/value_samples": float(samples),
        "credit/value_tokens": float(sum(estimate.tokens for estimate in estimates)),
        "credit/value_unfinished": sum(estimate.unfinished for estimate in estimates) / samples,
        "credit/value_mean": mean([mean(rewards) for rewards in rewards_of_states]),
        "credit/value_std": mean([pstdev(rewards) for rewards in rewards_of_states]),
        "credit/value_decided": mean([float(len(set(rewards)) == 1) for rewards in rewards_of_states]),
    }


def _report_ungraded(
    context: RolloutContext, estimates: Sequence[Estimate], unvalued_answers: int
) -> Metrics:
    """Logs how many continuations could not be graded and how many answers are left out, and returns these
    numbers as metrics. Without any of them, logs nothing and returns no metrics. Collective.

    Args:
        context: The context of the credit phase.
        estimates: The estimates of all ranks.
        unvalued_answers: The number of this rank's answers that are left out, since their prompt has no
            value.
    """
    # `all_rewards` has None for a continuation that could not be graded.
    ungraded = sum(estimate.all_rewards.count(None) for estimate in estimates)
    left_out = sum(context.ranks.exchange("unvalued", unvalued_answers))  # answers of all ranks
    if not ungraded and not left_out:
        return {}
    if not ungraded:  # the estimator gave prompts no value for another reason
        context.log.say(
            f"iteration {context.iteration + 1}: {left_out} answers are left out, since their prompt has no"
            " value"
        )
        return {"credit/unvalued": float(left_out)}
    total = sum(len(estimate.all_rewards) for estimate in estimates)
    unknown_states = sum(not estimate.rewards for estimate in estimates)
    context.log.say(
        f"iteration {context.iteration + 1}: {ungraded} of {total} continuations could not be graded and"
        f" don't count; {unknown_states} of {len(estimates)} states have no value, and {left_out} answers are"
        " left out, since their prompt has no value"
    )
    return {
        "credit/value_unavailable": float(ungraded),
        "credit/value_unknown": float(unknown_states),
        "credit/unvalued": float(left_out),
    }
