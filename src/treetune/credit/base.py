"""The base classes of credits, and the settings of the critic that some credits train.

A credit decides what each sampled token is worth. It takes the trees of graded answers that a rollout made,
and returns one training row (`Episode`) for each answer, with an advantage for each of its tokens:

    trees of answers  ──  Credit.assign  ──>  episodes with advantages

Four ways to write one, from the shortest on:

* `GroupCredit.advantages(rewards)`: one number for each answer, from the rewards of a problem's answers
  (GRPO, RLOO). Example: Dr. GRPO makes ``[0.67, -0.33, -0.33]`` of ``[1.0, 0.0, 0.0]``.
* `TokenCredit.token_advantages(answers)`: one number for each token, from a problem's answers (TEMPO).
* `OverAnotherCredit.weigh_tokens(context, episodes)`, in `credit.literature.token_level`: changes the
  advantages of another credit, or which of its tokens are trained (HICRA).
* `Credit.assign(context, trees)`: everything else, such as VinePPO, which samples continuations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, final

from annotated_types import Gt
from typing_extensions import override

from treetune import contracts
from treetune.config.registrable import Registrable
from treetune.contracts import Experiment, Finding, Part
from treetune.credit.critic_losses import CriticLoss, SquaredError
from treetune.credit.critic_prompts import GOLD_PLACEHOLDER, PROMPT_PLACEHOLDER, fill_template
from treetune.credit.episodes import advantage_metrics, make_episode, whole_answer_episodes
from treetune.credit.states.early import EarlyContinuations
from treetune.findings import placed_parts
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics, Trajectory

if TYPE_CHECKING:
    from treetune.models.sources import ModelSource

# Remedies that several credits name in their `needs`

THREADS_REMEDY = (
    "choose the credit 'group', or 'monte_carlo' with states {type: 'threads'}, or set the rollout's parallel"
    " to false"
)
UNUSED_ADVANTAGES_REMEDY = (
    "choose an objective that learns from advantages, such as 'ppo', or the credit 'none'"
)

MOST_EXAMPLE_PROBLEMS = 8
"""The number of problems in which a part's `check` looks for reference answers."""


@dataclass(frozen=True)
class TrainerScores:
    """The scores that `Credit.assign` asks the trainer for. A critic's values are not among them: see
    `Credit.asks_critic`.

    Example, for a credit that reads the entropy of the policy's distribution at each token::

        TrainerScores(distributions=True, passes=1)
    """

    reference: bool = False
    """Whether it asks for log-probs of given texts under the trainer's reference model."""
    distributions: bool = False
    """Whether it asks for numbers that the trainer computes from whole next-token distributions, such as
    their entropy and Σ π²."""
    compared_with: frozenset[Literal["reference", "group"]] = frozenset()
    """The distributions with which the trainer compares the policy's: those of the ``reference`` model, and
    those of the other answers to the problem (``group``). `treetune plan` estimates memory from it."""
    passes: int = 0
    """The number of forward passes over the iteration's answers that these scores take. `treetune plan`
    estimates time from it."""
    reference_model: ModelSource | None = None
    """The model that the trainer takes as its reference model; None: the start model."""


class Credit(Registrable):
    """Turns trees into episodes: one for each answer, with an advantage for each of its tokens.

    By default, `gives` declares that the credit turns the rewards of answers into advantages before training.
    A credit that does something else overrides it. Example: from two answers to a problem, which have 3 and 2
    tokens and earned 1 and 0, GRPO's credit without `std` makes::

        Episode(..., reward=1.0, advantages=array([0.5, 0.5, 0.5]))
        Episode(..., reward=0.0, advantages=array([-0.5, -0.5]))

    `gae`, `vapo` and `prime` return episodes without advantages, since the trainer computes these advantages:
    for `gae` and `vapo` from the critic's values (`Gae.from_values`), for `prime` from the rewards of the
    reward model (`RewardModelCredit.from_implicit_rewards`). With the credit `none`, there are no advantages.
    """

    @property
    @override
    def gives(self) -> tuple[contracts.Feature, ...]:
        return contracts.Advantages(before_training=True), contracts.CreditForRewards()

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        """Returns one episode for each answer of this rank's trees, in their order, and the metrics of all
        ranks. All answers to one problem are in one tree.

        Collective: all ranks have to call it, since they exchange data in it.
        """
        raise NotImplementedError

    def is_unbiased(self, context: RolloutContext) -> bool:
        """Returns whether the expected gradient is the policy gradient.

        The expectation is over the answers that the context's rollout samples to the context's problems. A
        credit overrides this, or has the attribute ``unbiased = True``. A credit that does neither counts as
        biased: where credits are compared with exact advantages (`treetune arena`), its bias is measured.
        """
        return bool(getattr(self, "unbiased", False))

    # What `assign` asks of the trainer

    @property
    def critic_settings(self) -> CriticSettings | None:
        """Settings of the critic; None for credit without a critic."""
        return None

    @property
    def trainer_scores(self) -> TrainerScores:
        """The scores of other models, or of whole distributions. By default none."""
        return TrainerScores()

    # Derived from `gives`, `needs` and the properties above; not to be overridden

    @property
    @final
    def needs_engine(self) -> bool:
        """True where `assign` samples continuations or scores texts."""
        return contracts.Continuations() in self.gives or self.scores_texts

    @property
    @final
    def scores_texts(self) -> bool:
        """True where `assign` asks the engine for the log-probs of given texts (`Engine.score`): where the
        credit or a part of it needs `TextScores`."""
        needs = list(self.needs)
        # Adds the needs of the parts within this credit. If the credit is a dataclass, `placed_parts` yields
        # it as well. Its needs are then listed twice, which doesn't change the result.
        for placed in placed_parts(self):
            if isinstance(placed.part, Part):  # other dataclasses need nothing
                needs += placed.part.needs
        return any(isinstance(need.feature, contracts.TextScores) for need in needs)

    @property
    @final
    def needs_critic(self) -> bool:
        """True where a critic is trained, whether `assign` or the trainer reads its values."""
        return contracts.CriticValues() in self.gives

    @property
    @final
    def asks_critic(self) -> bool:
        """True where `assign` reads the critic's values itself, and does not leave them to the trainer."""
        return self.needs_critic and contracts.Advantages(before_training=True) in self.gives

    @property
    @final
    def leaves_values_to_trainer(self) -> bool:
        """True where the trainer makes the advantages, with `Gae.from_values`, once its critic has valued the
        answers."""
        return self.needs_critic and not self.asks_critic

    @property
    @final
    def asks_trainer(self) -> bool:
        """True where `assign` asks the trainer for something, so the trainer must be open before `assign`
        is called."""
        return self.asks_critic or self.trainer_scores.reference or self.trainer_scores.distributions

    @property
    @final
    def trainer_passes(self) -> int:
        """The number of forward passes over the iteration's answers that the trainer makes for `assign`.
        `treetune plan` reads it."""
        return int(self.asks_critic) + self.trainer_scores.passes


class ContinuingCredit(Credit):
    """Credit that samples continuations of answers, or further answers."""

    @property
    def further_answers(self) -> int:
        """The number of further answers to each problem, each from its prompt to its end, for plans. By
        default 0."""
        return 0

    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        """Estimates how many continuations an iteration samples, for plans.

        Args:
            answers: The number of answers in the iteration.
            tokens: The mean number of tokens of an answer.
            limit: The largest number of tokens of an answer.

        Returns:
            The expected number of continuations, and the largest possible one.
        """
        raise NotImplementedError

    def early_continuations(self, context: RolloutContext) -> EarlyContinuations | None:
        """Returns the continuations to sample as soon as their answer is graded, while other answers are
        still sampled; None where there are none."""
        return None


class GroupCredit(Credit):
    """Credit that reads only the rewards of a problem's answers. All tokens of an answer share its advantage.

    The shortest way to write a credit: override `advantages`.
    """

    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        """Returns one advantage for each answer to a problem, from the answers' rewards.

        Example: ``[1.0, 0.0, 0.0]`` becomes ``[1.0, -0.5, -0.5]`` under RLOO.
        """
        raise NotImplementedError

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        advantages: list[float] = []
        for tree in trees:
            rewards = [answer.reward for answer in tree.leaves]
            try:
                tree_advantages = self.advantages(rewards)
                wrong_count = _describe_wrong_count(tree_advantages, len(rewards))
                if wrong_count is not None:
                    raise ValueError(
                        f"advantages() returned {wrong_count}; return one number per answer ({len(rewards)})"
                    )
                advantages += map(float, tree_advantages)
            # This is the error above, an error in a user's `advantages`, or one of `float`, which can't
            # convert an advantage.
            except (TypeError, ValueError) as error:
                raise ValueError(f"{type(self).__name__}, problem {tree.problem.id!r}: {error}") from error
        return whole_answer_episodes(context, answers_of(trees), advantages)


def _describe_wrong_count(returned: Any, expected_count: int) -> str | None:
    """Returns a description of a return value that does not have `expected_count` items; None if it has.

    Example: with `expected_count` 3, ``[0.5, 1.0]`` is described as ``"2 values"``, and None as ``"None"``.
    """
    try:
        count = len(returned)
    except TypeError:  # neither a list nor an array
        return repr(returned)
    if count == expected_count:
        return None
    return "1 value" if count == 1 else f"{count} values"


class TokenCredit(Credit):
    """Credit that gives each token its own advantage, computed from the answers to one problem.

    Override `token_advantages`.
    """

    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        """Returns, for each of a problem's answers, one advantage for each token of its `response_ids`.

        Injected tokens, such as a tool's reply, need an advantage too, but it is not used.
        Example, for two answers of 3 and 2 tokens: ``[[0.5, 0.5, 1.0], [-0.5, -1.0]]``.
        """
        raise NotImplementedError

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        import numpy as np

        episodes: list[Episode] = []
        for tree in trees:
            rows = self.token_advantages(tree.leaves)
            message = f"{type(self).__name__}, problem {tree.problem.id!r}: token_advantages() returned"
            wrong_count = _describe_wrong_count(rows, len(tree.leaves))
            if wrong_count is not None:
                raise ValueError(
                    f"{message} {wrong_count}; return one list per answer ({len(tree.leaves)}), with one"
                    " number per token"
                )
            for number, (row, answer) in enumerate(zip(rows, tree.leaves, strict=True)):
                tokens = len(answer.response_ids)
                wrong_count = _describe_wrong_count(row, tokens)
                if wrong_count is not None:
                    raise ValueError(
                        f"{message} {wrong_count} for answer {number}; return one number per token ({tokens})"
                    )
            for answer, row in zip(tree.leaves, rows, strict=True):
                episode = make_episode(context, answer)
                episodes.append(replace(episode, advantages=np.array(row, np.float64)))
        return episodes, advantage_metrics(context, episodes)


# The critic


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Part):
    """Settings of the critic. The critic is a copy of the start model with a linear head. It has its own
    optimiser, with the trainer's schedule, precision and sharding."""

    loss: CriticLoss = field(default_factory=SquaredError)
    """How the critic learns returns, and what the outputs of its head mean."""
    learning_rate: Annotated[float, Gt(0)] | None = None
    """The peak of the critic's learning rate; null: the policy's."""
    value_clip: Annotated[float, Gt(0)] | None = 0.2
    """The clip of PPO's value loss (Schulman et al.'s code): once the value of a token has moved further than
    this from what it was before the iteration's training, moving it further doesn't lower the loss. null: no
    clip. Only the loss `squared_error` reads it."""
    template: str | None = None
    """The critic's own prompt, which shows it the reference answer, such as ``"{prompt}\nAnswer: {gold}\n"``;
    null: the policy's prompt. ``{prompt}`` is the problem's text (of a conversation, its last message),
    ``{gold}`` its reference answer. The model's chat template is put around it, as around every prompt.

    Where there is no reference answer, or the prompt doesn't fit into the context with the answer, the critic
    sees the policy's prompt: ``critic/without_own_prompt`` is the share of such answers."""

    def __post_init__(self) -> None:
        if self.template is None:
            return
        missing = [
            placeholder
            for placeholder in (PROMPT_PLACEHOLDER, GOLD_PLACEHOLDER)
            if placeholder not in self.template
        ]
        if missing:
            raise ValueError(
                f"template doesn't contain {' and '.join(missing)}: put the problem's text and its reference"
                " answer into it"
            )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.template is None:
            return
        examples = experiment.task.examples(MOST_EXAMPLE_PROBLEMS)
        if examples and not any(problem.gold for problem in examples):
            yield Finding(
                "the critic's prompt shows the problems' reference answers, and the first problems of the"
                " task have none",
                "template",
                "choose a task with reference answers, or set the critic's template to null",
            )
            return
        sampling = experiment.rollout.sampling
        prompts = [
            fill_template(self.template, problem.prompt, GOLD_PLACEHOLDER, problem.gold)
            for problem in examples
        ]
        lengths = experiment.model.prompt_tokens(prompts)
        # A rollout of demonstrations has no bound on answers, and `prompt_tokens` is empty for models whose
        # tokenizer has to be loaded first.
        if sampling is None or not lengths:
            return
        longest = max(lengths) + sampling.max_tokens
        if longest > experiment.context_length:
            yield Finding(
                f"the critic's prompt of a problem of this task has {max(lengths)} tokens, and with an answer"
                f" of {sampling.max_tokens} tokens it exceeds the context_length of"
                f" {experiment.context_length}: for such answers the critic sees the policy's prompt, unless"
                f" context_length is {longest} or more",
                "template",
                level="warning",
            )


def check_critic_is_kept(experiment: Experiment, part: str, remedy: str) -> Iterator[Finding]:
    """Yields an error if `restart` is 'every_iteration', since each restart would discard the critic.

    Args:
        experiment: The experiment's configuration.
        part: The name of the part with the critic for the message, such as ``"the values 'critic'"``.
        remedy: A way to do without the critic, such as ``"choose the values 'continuations'"``.
    """
    if experiment.restart == "every_iteration":
        yield Finding(
            f"restart 'every_iteration' discards the trained weights, and the critic of {part} has to keep"
            " learning over iterations",
            "$.restart",
            f"set restart to 'never', or {remedy}",
        )
