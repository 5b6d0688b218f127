"""Self-distillation: the policy, with a privileged text in its prompt, is the teacher of its own answers
(arXiv:2601.18734, arXiv:2601.20802, arXiv:2607.14614).

Example: the policy sampled the two tokens of an answer with the probabilities 0.5 and 0.2. With the reference
answer in its prompt, it gives the same tokens the probabilities 0.9 and 0.1. So the tokens get the advantages
log(0.9 / 0.5) = 0.59 and log(0.1 / 0.2) = −0.69.

    own prompt         "2 + 3?"                       ── answer ──>  log π(y_t | x, y_<t), from sampling
    privileged prompt  "2 + 3?  The answer is 5."     ── answer ──>  log π(y_t | c, x, y_<t), scored
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from typing_extensions import override

from treetune.contracts import (
    Advantages,
    Answers,
    CreditForRewards,
    Experiment,
    Feature,
    Finding,
    Need,
    OneLine,
    SampledAnswers,
    TextScores,
    UseOfAdvantages,
    innermost_rollout,
)
from treetune.credit.base import THREADS_REMEDY, UNUSED_ADVANTAGES_REMEDY, Credit, TrainerScores
from treetune.credit.critic_prompts import privileged_prompt
from treetune.credit.episodes import advantage_metrics, make_episode
from treetune.credit.grpo import group_advantages
from treetune.credit.literature.scored_texts import (
    LEAST_LOGPROB,
    check_reference_answers,
    check_reference_model,
    score_texts,
)
from treetune.credit.teacher_prompts import (
    CONTEXT_PLACEHOLDER,
    DEFAULT_TEMPLATE,
    PrivilegedText,
    privileged_text,
    refuse_template,
)
from treetune.engine.requests import SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.model_scores import ScoredText
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Metrics


@Credit.register("self_distillation")
@dataclass(frozen=True, kw_only=True)
class SelfDistillation(Credit):
    """Self-distillation: A_t = `weight` · δ_t + `outcome_weight` · A_out with
    δ_t = log π_T(y_t | c, x, y_<t) − log π(y_t | x, y_<t). Here x is the problem, y the answer, and c a
    privileged text that the teacher π_T sees and the policy π doesn't. A_out is GRPO's advantage.

    * OPSD (Zhao et al., arXiv:2601.18734, sampled-token objective): c is the reference answer. The teacher is
      the start model (`scorer` ``reference``) or the policy itself. Rewards aren't used.
    * SDPO (Hübotter et al., arXiv:2601.20802): c is another right answer of the group, or the grader's
      feedback. Of SDPO's variants, this credit is the reverse KL at the sampled token, with the present
      policy as the teacher. For the variants with top-k or whole distributions, and for those with a moving
      average of weights as the teacher, see the objective `distribution_distillation`.
    * CPO (Xu et al., arXiv:2607.14614): δ_t shapes A_out, and `keeps_sign` limits it so that the sign of
      A_out remains. The formula is from the abstract and from public summaries.

    For answers that were sampled from π, the expected gradient with the advantages δ is −∇ KL(π ‖ π_T) at
    each of their tokens, with π_T held fixed. The tokens of an answer without a privileged text have δ = 0,
    and ``credit/without_context`` is the share of such answers. ``credit/teacher_kl`` estimates KL(π ‖ π_T)
    in nats per token: it is the mean of −δ, before `clip`, over the sampled tokens of the answers with a
    privileged text.

    **Biased**: δ leads to the teacher, and not to rewards. Suppose that the privileged text says only that
    the answer will be right, and that the teacher follows Bayes' rule. Then δ_t is
    log(V(s_{t+1}) / V(s_t)), where V(s) is the probability that the answer will be right after s. On the
    tests' language, the cosine of the expected gradient with the gradient of the mean reward is then 0.87
    with `clip` 1, and 0.57 without a bound: a token after which no answer is right gets about −100. A real
    teacher also prefers tokens that only repeat the privileged text."""

    context: PrivilegedText = "gold"
    """The privileged text: the problem's reference answer (``gold``), the text of another right answer to the
    same problem (``right_answer``), or the grader's message on the answer (``feedback``)."""
    template: str = DEFAULT_TEMPLATE
    """The privileged prompt. ``{prompt}`` is the problem's text (of a conversation, its last message), and
    ``{context}`` the privileged text. The model's chat template is put around it, as around every prompt."""
    weight: Annotated[float, Ge(0)] = 1.0
    """The weight of δ. With 0, δ is only measured (``credit/teacher_kl``)."""
    clip: Annotated[float, Gt(0)] | None = None
    """The largest absolute value of δ; null: there is no bound."""
    outcome_weight: Annotated[float, Ge(0)] = 0.0
    """The weight of A_out."""
    keeps_sign: bool = False
    """Whether a token's advantage is set to 0 if it has another sign than A_out. If A_out is 0, the advantage
    is not changed."""
    std: bool = True
    """Whether A_out is divided by the standard deviation of the group's rewards."""
    scorer: Literal["policy", "reference"] = "policy"
    """The teacher. ``policy``: the policy that sampled the answers, and the engine scores. ``reference``: the
    trainer's reference model, which is the start model."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        advantages = Advantages(before_training=True)
        # Rewards enter only into A_out. Without A_out, `CreditForRewards` is left out, so that reward shaping
        # is refused: it would have no effect.
        return (advantages, CreditForRewards()) if self.outcome_weight else (advantages,)

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        needs = [
            Need(SampledAnswers(), "it compares the teacher with the probabilities of sampling"),
            # Answers in one line have no parallel threads. With `turns=True`, they may have several turns.
            Need(OneLine(turns=True), "it scores an answer token by token", THREADS_REMEDY),
            Need(UseOfAdvantages(), "it scores all answers to compute advantages", UNUSED_ADVANTAGES_REMEDY),
        ]
        if self.scorer == "policy":
            needs.append(Need(TextScores(), "it scores all answers after other prompts"))
        if self.outcome_weight or self.context == "right_answer":
            needs.append(Need(Answers(2), "it compares or shows an answer with the others to its problem"))
        return tuple(needs)

    @property
    @override
    def trainer_scores(self) -> TrainerScores:
        if self.scorer == "policy":  # the engine scores the answers
            return TrainerScores()
        return TrainerScores(reference=True, passes=1)  # the teacher scores each answer once

    def __post_init__(self) -> None:
        refuse_template(self.template)
        if not self.weight and not self.outcome_weight:
            raise ValueError(
                "weight and outcome_weight are both 0, so nothing is learned: set one of them to 1"
            )
        if self.keeps_sign and not self.outcome_weight:
            raise ValueError(
                "keeps_sign compares with the group's advantage, and outcome_weight is 0: set outcome_weight"
                " to 1, or keeps_sign to false"
            )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.context == "gold":
            yield from check_reference_answers(experiment)
        if self.scorer == "reference":
            yield from check_reference_model(experiment)
        sampling = experiment.rollout.sampling
        if sampling is not None and not _samples_whole_distributions(sampling):
            _, key = innermost_rollout(experiment.rollout)
            yield Finding(
                "the teacher's log-probs are those of whole distributions at temperature 1, and answers are"
                f" sampled at temperature {sampling.temperature:g} with top_p {sampling.top_p:g} and top_k"
                f" {sampling.top_k}",
                f"{key}.temperature",
                "set rollout's temperature and top_p to 1 and top_k to -1",
            )

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        import numpy as np

        answers = answers_of(trees)
        outcome_advantages: list[float] = []
        texts: list[ScoredText | None] = []  # for each answer
        for tree in trees:
            rewards = [leaf.reward for leaf in tree.leaves]
            outcome_advantages += group_advantages(rewards, self.std, eps=1e-6)
            for leaf in range(len(tree.leaves)):
                texts.append(self._make_scored_text(context, tree, leaf))
        scores, metrics = score_texts(context, [text for text in texts if text is not None], self.scorer)

        # The teacher's log-probs, one entry for each answer that has a text, in the order of the answers.
        upcoming_scores = iter(scores)
        episodes = []
        # δ is the teacher's log-prob of a token minus the policy's. The mean of −δ over the tokens that the
        # teacher scored estimates the KL divergence of the policy from the teacher. Each rank adds up −δ, and
        # counts these tokens.
        logprob_gap, compared_tokens = 0.0, 0
        for answer, text, outcome_advantage in zip(answers, texts, outcome_advantages, strict=True):
            episode = make_episode(context, answer)
            differences_T = np.zeros(len(answer.response_ids))  # δ
            if text is not None:
                differences_T = _subtract_policy_logprobs(episode, teacher_T=next(upcoming_scores))
                logprob_gap -= float(differences_T.sum())
                compared_tokens += int(episode.trained.sum())
            advantages_T = self._compute_advantages(differences_T, outcome_advantage)
            episodes.append(replace(episode, advantages=advantages_T))

        teacher_kl = _mean_over_ranks(context, "teacher-gap", logprob_gap, compared_tokens)
        if teacher_kl is not None:
            metrics["credit/teacher_kl"] = teacher_kl
        without_context = _mean_over_ranks(context, "without-context", texts.count(None), len(texts))
        if without_context is not None:
            metrics["credit/without_context"] = without_context
        return episodes, metrics | advantage_metrics(context, episodes)

    def _make_scored_text(self, context: RolloutContext, tree: Tree, leaf: int) -> ScoredText | None:
        """Returns the text for the teacher to score: the answer after its privileged prompt. Returns None if
        there is no privileged text, or if prompt and answer together don't fit into the context."""
        answer = tree.leaves[leaf]
        privileged = privileged_text(tree, leaf, self.context)
        if not privileged:
            return None
        prompt_ids = privileged_prompt(
            context.codec, answer.problem, self.template, CONTEXT_PLACEHOLDER, privileged
        )
        # The length has to be strictly less, since vLLM samples one token after the text that it scores.
        fits = len(prompt_ids) + len(answer.response_ids) < context.settings.context_length
        return ScoredText(prompt_ids, answer.response_ids) if fits else None

    def _compute_advantages(self, differences_T: Column, outcome_advantage: float) -> Column:
        """Returns the advantages of an answer's tokens.

        Args:
            differences_T: δ of each token: the teacher's log-prob minus the policy's.
            outcome_advantage: The answer's advantage in its group, A_out.
        """
        import numpy as np

        if self.clip is not None:
            differences_T = differences_T.clip(-self.clip, self.clip)
        advantages_T = self.weight * differences_T + self.outcome_weight * outcome_advantage
        if self.keeps_sign and outcome_advantage != 0:  # 0 has no sign that could be kept
            has_sign_of_outcome_T = advantages_T * outcome_advantage > 0
            advantages_T = np.where(has_sign_of_outcome_T, advantages_T, 0.0)
        return advantages_T


def _mean_over_ranks(context: RolloutContext, name: str, total: float, count: int) -> float | None:
    """Returns the mean over all ranks, from the sum and the number of this rank's values. Returns None if no
    rank has a value. Collective."""
    totals, counts = zip(*context.ranks.exchange(name, (total, count)), strict=True)  # by rank
    if sum(counts) == 0:
        return None
    return sum(totals) / sum(counts)


def _subtract_policy_logprobs(episode: Episode, teacher_T: Column) -> Column:
    """Returns δ of an answer's tokens: the teacher's log-prob of each token minus the log-prob with which the
    policy sampled it."""
    import numpy as np

    assert episode.behaviour_logprobs is not None, "sampled answers have log-probs"
    # The teacher may give a sampled token the probability 0. The clip keeps δ finite.
    differences_T = teacher_T.clip(min=LEAST_LOGPROB) - episode.behaviour_logprobs.astype(np.float64)
    # Tokens that the policy didn't sample, such as those of a tool, get the difference 0.
    return np.where(episode.trained, differences_T, 0.0)


def _samples_whole_distributions(sampling: SamplingParams) -> bool:
    return sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k <= 0
