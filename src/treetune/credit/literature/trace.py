"""TRACE: a step gets credit for making the reference answer more likely (arXiv:2607.13988).

Example: the mean log-prob of the reference answer's tokens is −1.9 before the first of three steps, −0.9
before the second and −0.4 before the third. With ε = 0.1 the gaps are 2, 1 and 0.5. The values are log(2 / 2)
= 0, log(2 / 1) = 0.69 and log(2 / 0.5) = 1.39, so their changes are 0.69 and 0.69.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Finding, Need, UseOfAdvantages
from treetune.credit.base import UNUSED_ADVANTAGES_REMEDY, Credit, TrainerScores
from treetune.credit.episodes import advantage_metrics, make_episode
from treetune.credit.literature.scored_texts import GoldScores, ProblemState
from treetune.credit.states.base import StateRule
from treetune.credit.states.one_line import StepBoundaries
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Metrics, Trajectory, concatenate


@Credit.register("trace")
@dataclass(frozen=True, kw_only=True)
class Trace(GoldScores, Credit):
    """TRACE: A_i = `outcome_weight` · A_out + `step_weight` · c_i for step i. A_out is the answer's advantage
    in its group, (reward − mean) / σ with the population's σ. c_i is the credit of the step for its effect on
    the probability of the reference answer y* (Tao et al., arXiv:2607.13988, algorithm 1; formula and
    defaults as public reimplementations report them).

    * ℓ_i is the mean log-prob of the tokens of y*, if they follow directly after the state before step i.
      d_i = −ℓ_i + ε is the gap that remains, and V_i = log(d_0 / d_i) is the value of the state.
    * c_i = Σ_{j<K} γ^j (V_{i+j+1} − V_{i+j}) / Σ_{j<K} γ^j. If these K steps reach the last state, number T,
      `terminal_weight` · γ^(T−i) · A_out is added.

    The last step, which writes the result, has no c_i, so it only gets A_out. The same holds for steps after
    a state at which y* doesn't fit into the context. In the paper, steps are turns with tools, and the scorer
    is a frozen reference. A multi-turn rollout has the paper's states with ``states: {type: 'turns'}``.

    **Biased**: V is not the expected reward, and A_out has the answer's own reward in its mean. On the tests'
    language, with the reference answer ``a``, three answers and no division by σ, the expected gradient is
    off by 15 % of its length (cosine 0.99). If the advantages are only the steps' changes of V (K = 1), the
    cosine is 0.80; with ``log_probability``, it is 0.69."""

    states: StateRule = field(default_factory=StepBoundaries)
    """The rule that says where the states of an answer lie."""
    value: Literal["log_gap", "log_probability"] = "log_gap"
    """The value of a state: ``log_gap`` is TRACE's log(d_0 / d_i); ``log_probability`` is the log-prob of the
    whole y*. Others describe RREDCoT (arXiv:2606.06475) by the changes of the latter."""
    gap_offset: Annotated[float, Gt(0)] = 0.1
    """ε, which is added to the gap."""
    td_steps: Annotated[int, Gt(0)] = 3
    """K, the number of changes of V in a step's credit. With 1, only the change by the step itself counts."""
    discount: Annotated[float, Gt(0), Le(1)] = 0.8
    """γ, the discount per step: of later changes of V, and of A_out in c_i, which comes at the last state."""
    outcome_weight: Annotated[float, Ge(0)] = 1.0
    """The weight of A_out."""
    step_weight: Annotated[float, Gt(0)] = 0.2
    """The weight of c_i."""
    terminal_weight: Annotated[float, Ge(0)] = 2.0
    """The weight of A_out within c_i."""
    std: bool = True
    """Whether A_out is divided by the standard deviation of the group's rewards."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (
            Need(Answers(2), "it compares each answer with the others to its problem"),
            Need(UseOfAdvantages(), "it scores the reference answer for them", UNUSED_ADVANTAGES_REMEDY),
            *self.gold_needs(),
        )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return self.check_gold(experiment)

    @property
    @override
    def trainer_scores(self) -> TrainerScores:
        return TrainerScores(reference=self.scorer == "reference")

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        answers = answers_of(trees)
        states = []
        for answer in answers:
            for length in self.states.step_starts(answer):
                token_ids = concatenate([answer.prompt_ids, answer.response_ids[:length]])
                states.append(ProblemState(answer.problem, token_ids))
        logprobs, metrics = self.gold_logprobs(context, states)
        outcome_advantages: list[float] = []
        for tree in trees:
            rewards = [leaf.reward for leaf in tree.leaves]
            outcome_advantages += standardize_rewards(rewards) if self.std else centre_rewards(rewards)
        upcoming = iter(logprobs)
        episodes = []
        for answer, outcome_advantage in zip(answers, outcome_advantages, strict=True):
            logprobs_of_answer = [next(upcoming) for _ in self.states.step_starts(answer)]
            episodes.append(self._make_training_row(context, answer, logprobs_of_answer, outcome_advantage))
        return episodes, metrics | advantage_metrics(context, episodes)

    def _make_training_row(
        self,
        context: RolloutContext,
        answer: Trajectory,
        logprobs_of_states: Sequence[Column | None],
        outcome_advantage: float,
    ) -> Episode:
        """Returns the training row of an answer.

        Args:
            context: The context of the credit phase.
            answer: The answer.
            logprobs_of_states: For each state of the answer, the log-probs of the tokens of the reference
                answer y* after that state; None if state and y* together don't fit into the context.
            outcome_advantage: The advantage of the answer's reward within its group.
        """
        # States get longer along an answer, so those after which y* doesn't fit are the last ones.
        fitting = [logprobs_T for logprobs_T in logprobs_of_states if logprobs_T is not None]
        if self.value == "log_gap":
            values = log_gap_values([float(logprobs_T.mean()) for logprobs_T in fitting], self.gap_offset)
        else:
            values = [float(logprobs_T.sum()) for logprobs_T in fitting]
        terminal = self.terminal_weight * outcome_advantage
        step_credits = td_credits(values, self.td_steps, self.discount, terminal)
        steps = len(logprobs_of_states)
        advantages = [self.outcome_weight * outcome_advantage] * steps
        # A step has a credit if the states before and after it have values. So the last step never has one.
        for step, step_credit in enumerate(step_credits):
            advantages[step] += self.step_weight * step_credit
        # Steps without a value get the last value before them, for the viewer.
        last_value = values[-1] if values else 0.0
        values_of_steps = values + [last_value] * (steps - len(values))
        # The values are not means of samples, so their standard errors are unknown (inf).
        unknown_errors = [math.inf] * steps
        rows = self.states.step_rows(answer, advantages, values_of_steps, unknown_errors)
        # The row has the steps of the rule `states`, which may differ from the answer's.
        cut_into_steps = replace(answer, step_ends=rows.ends)
        return make_episode(context, cut_into_steps, rows.advantages, rows.values, rows.errors)


def log_gap_values(mean_logprobs: Sequence[float], offset: float) -> list[float]:
    """Returns the value V_i = log(d_0 / d_i) of each state i, with the gap d_i = −ℓ_i + `offset`.

    ℓ_i is the mean log-prob of the tokens of the reference answer, directly after state i. `offset` (above 0)
    keeps a gap above 0.

    Example: ``log_gap_values([-1.9, -0.9, -0.4], 0.1)`` is about ``[0.0, 0.69, 1.39]``.
    """
    gaps = [offset - logprob for logprob in mean_logprobs]
    return [math.log(gaps[0] / gap) for gap in gaps]


def td_credits(values: Sequence[float], td_steps: int, discount: float, terminal: float) -> list[float]:
    """Returns the credit c_i of each step but the last: the discounted mean of the next `td_steps` changes of
    the value. If these changes reach the last state T, `terminal` · γ^(T−i) is added.

    Example: ``td_credits([0.0, 1.0, 3.0], td_steps=1, discount=0.5, terminal=4.0)`` is ``[1.0, 4.0]``: the
    changes are 1 and 2, and 4 · 0.5 is added for the second step, which reaches the last state.
    """
    # Step i leads from state i to state i + 1. So the number of changes is the index T of the last state.
    changes = [after - before for before, after in pairwise(values)]
    last_state = len(changes)
    step_credits = []
    for step in range(last_state):
        next_changes = changes[step : step + td_steps]
        weights = [discount**offset for offset in range(len(next_changes))]
        weighted_changes = [weight * change for weight, change in zip(weights, next_changes, strict=True)]
        step_credit = math.fsum(weighted_changes) / math.fsum(weights)
        if step + td_steps >= last_state:
            step_credit += terminal * discount ** (last_state - step)
        step_credits.append(step_credit)
    return step_credits


def centre_rewards(rewards: Sequence[float]) -> list[float]:
    """Returns the rewards of a group minus their mean. Equal rewards become exact zeros."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean_reward = fmean(rewards)
    return [reward - mean_reward for reward in rewards]


def standardize_rewards(rewards: Sequence[float]) -> list[float]:
    """Returns the rewards of a group minus their mean, divided by their standard deviation, which is that of
    the population (divided by n, not by n − 1)."""
    centred_rewards = centre_rewards(rewards)
    if not any(centred_rewards):
        return centred_rewards
    deviation = pstdev(rewards)
    return [reward / deviation for reward in centred_rewards]
