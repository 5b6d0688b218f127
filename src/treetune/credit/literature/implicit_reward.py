"""PRIME's implicit process reward: the reward of a token is β times the log of how much more likely a reward
model finds it than the policy does (arXiv:2502.01456).

    answer ──┬── sampled with ──────> log π_old(y_t) ──┐
             └── scored by a model ──> log π_φ(y_t) ───┴──> r_t = β · (log π_φ(y_t) − log π_old(y_t))

Example, with β = 0.05: the policy sampled a token with probability 0.2, and the reward model gives it 0.4.
Its implicit reward is 0.05 · log 2 = 0.035.

A reward model's log-prob below −100 counts as −100, so that no reward is infinite.

The sources are the paper (eq. 3 and 5) and the authors' recipe in verl. Where they differ, this module
follows the paper. In the recipe, a part of the mean of the answer itself is subtracted, too, and the last
token has no process reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import (
    Answers,
    Experiment,
    Finding,
    Need,
    OneLine,
    SampledAnswers,
    UseOfAdvantages,
    innermost_rollout,
)
from treetune.credit.base import THREADS_REMEDY, UNUSED_ADVANTAGES_REMEDY, Credit, TrainerScores
from treetune.credit.episodes import advantage_metrics, make_episode
from treetune.credit.literature.scored_texts import (
    LEAST_LOGPROB,
    check_reference_model,
    check_uncut_sampling,
    score_texts,
)
from treetune.credit.rloo import leave_one_out_advantages
from treetune.models.sources import ModelSource
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.model_scores import ScoredText
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Metrics


@Credit.register("implicit_reward")
@dataclass(frozen=True, kw_only=True)
class ImplicitReward(Credit):
    """PRIME's implicit process reward (Cui et al., arXiv:2502.01456). For token t of answer i it is

    A_i,t = `weight` · Σ_{s≥t} γ^(s−t) (r_i,s − mean_{j≠i} r̄_j) + `outcome_weight` · (R_i − mean_{j≠i} R_j)

    with r_i,t = β (log π_φ(y_t) − log π_old(y_t)), the implicit reward of the token, and r̄_j the mean of r
    over the tokens of answer j. π_old is the policy that sampled the answers, and π_φ the `reward_model`,
    which the trainer runs in place of the start model; log π_φ is raised to at least −100. Sum and mean are
    only over tokens that the policy sampled.

    An implicit reward model is a language model that was trained so that the sum of r over an answer predicts
    whether the answer is correct, e.g. with the cross-entropy of σ(Σ_t r_t) (Yuan et al., arXiv:2412.01981).

    **Not all of PRIME**: the paper trains π_φ on the outcomes of each iteration's answers, as the credit
    `prime` does. Here π_φ never changes, so it fits the policy less and less, and the policy can exploit it.
    The authors' code whitens the advantages (`trainer.advantage_normalisation`).

    **Biased** unless, in each state, the sum of the rewards from a token on equals the token's true advantage
    plus a number that is the same for all tokens. On the tests' language, with two answers, β = 0.3 and a
    reward model that mixes the policy half and half with one that knows that the answer will be correct, the
    expected gradient is off by 79 % of its length (cosine 0.98); with the process rewards alone, by 47 %
    (cosine 0.89)."""

    reward_model: ModelSource
    """The implicit reward model π_φ. It must have the start model's tokenizer."""
    beta: Annotated[float, Gt(0)] = 0.05
    """β, the factor of the log-ratio in a reward. Set it to the β of the reward model's training."""
    gamma: Annotated[float, Gt(0), Le(1)] = 1.0
    """γ, the discount per token of the rewards of later tokens."""
    weight: Annotated[float, Gt(0)] = 1.0
    """The weight of the process rewards."""
    outcome_weight: Annotated[float, Ge(0)] = 1.0
    """The weight of the answers' rewards."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        # `OneLine(turns=True)`: answers without parallel threads, with or without an environment's turns.
        return (
            Need(SampledAnswers(), "it compares the reward model with the probabilities of sampling"),
            Need(OneLine(turns=True), "it scores an answer token by token", THREADS_REMEDY),
            Need(Answers(2), "it compares each answer with the others to its problem"),
            Need(UseOfAdvantages(), "it scores all answers to compute advantages", UNUSED_ADVANTAGES_REMEDY),
        )

    @property
    @override
    def trainer_scores(self) -> TrainerScores:
        # The reward model, as the trainer's reference model, runs once over the answers.
        return TrainerScores(reference=True, passes=1, reference_model=self.reward_model)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from check_reference_model(
            experiment,
            "the reward model is the trainer's reference model",
            "reward_model",
            "choose a credit without a reward model, such as 'group'",
        )
        trainer = experiment.trainer
        if getattr(trainer.objective, "kl_coef", 0) > 0:  # only some objectives have this setting
            yield Finding(
                "the reward model takes the place of the start model as the trainer's reference, and the"
                " objective's KL would keep the policy close to the reward model",
                "$.trainer.objective.kl_coef",
                "set it to 0",
            )
        elif trainer.objective.needs_reference:
            yield Finding(
                f"the objective {trainer.objective.registered_name()!r} compares the policy with the"
                " reference, which would be the reward model",
                "$.trainer.objective",
                "choose the objective 'ppo'",
            )
        if trainer.lora is not None:
            yield Finding(
                "with adapters the reference model is the policy without them, and not the reward model",
                "$.trainer.lora",
                "train all weights",
            )
        yield from check_uncut_sampling(
            experiment, "the reward model's log-probs are those of whole distributions"
        )
        sampling = experiment.rollout.sampling
        if sampling is not None and sampling.temperature != 1:
            _, key = innermost_rollout(experiment.rollout)
            yield Finding(
                f"the reward model scores at the rollout's temperature of {sampling.temperature:g}, and"
                " implicit reward models are trained at temperature 1: the rewards aren't those of the"
                " trained model",
                f"{key}.temperature",
                "set it to 1",
                level="warning",
            )

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        import numpy as np

        answers = answers_of(trees)
        texts = [ScoredText(answer.prompt_ids, answer.response_ids) for answer in answers]
        # The trainer's reference model is the reward model (`trainer_scores`).
        model_logprobs, metrics = score_texts(context, texts, "reference")
        plain_episodes = [make_episode(context, answer) for answer in answers]
        # The process rewards of the sampled tokens of each answer. _T: an array over an answer's tokens.
        rewards_by_answer: list[Column] = []
        for episode, model_T in zip(plain_episodes, model_logprobs, strict=True):
            assert episode.behaviour_logprobs is not None, "sampled answers have log-probs"
            policy_T = np.asarray(episode.behaviour_logprobs, np.float64)
            # The model may give a sampled token the probability 0. The clip keeps the reward finite.
            finite_T = np.asarray(model_T, np.float64).clip(min=LEAST_LOGPROB)
            rewards_T = self.beta * (finite_T - policy_T)  # r_t = β (log π_φ − log π_old)
            rewards_by_answer.append(rewards_T[episode.trained])
        advantages: list[Column] = []
        for tree in trees:
            # `rewards_by_answer` lists the answers tree by tree. `advantages` has the answers of the trees
            # before this one, so its length is the position of this tree's first answer.
            first = len(advantages)
            rewards_of_tree = rewards_by_answer[first : first + len(tree.leaves)]
            process_of_tree = process_advantages(rewards_of_tree, self.gamma)
            outcomes_of_tree = leave_one_out_advantages([leaf.reward for leaf in tree.leaves])
            for process_T, outcome in zip(process_of_tree, outcomes_of_tree, strict=True):
                advantages.append(self.weight * process_T + self.outcome_weight * outcome)
        episodes = []
        for episode, advantages_of_sampled in zip(plain_episodes, advantages, strict=True):
            advantages_T = np.zeros(len(episode.response_ids))
            advantages_T[episode.trained] = advantages_of_sampled
            episodes.append(replace(episode, advantages=advantages_T))
        return episodes, metrics | advantage_metrics(context, episodes)


def process_advantages(rewards: Sequence[Column], gamma: float) -> list[Column]:
    """Returns Σ_{s≥t} γ^(s−t) (r_i,s − mean_{j≠i} r̄_j) for each token t of each answer i of a group, where
    r̄_j is the mean reward of the tokens of answer j.

    Example, with γ = 1: two answers have the rewards ``[0.2, 0.0]`` and ``[0.1]``. The mean of each is 0.1,
    which is the baseline of the other. Their advantages are ``[0.0, -0.1]`` and ``[0.0]``.

    Args:
        rewards: The rewards of the trained tokens of each answer.
        gamma: The discount γ.
    """
    import numpy as np

    means = [float(rewards_T.mean()) for rewards_T in rewards]
    advantages = []
    for number, rewards_T in enumerate(rewards):
        means_of_others = means[:number] + means[number + 1 :]
        centred_T = rewards_T - sum(means_of_others) / len(means_of_others)
        returns_T = np.zeros(len(centred_T))
        later_return = 0.0  # the return from the next token on
        for t in range(len(centred_T) - 1, -1, -1):
            later_return = float(centred_T[t]) + gamma * later_return
            returns_T[t] = later_return
        advantages.append(returns_T)
    return advantages
