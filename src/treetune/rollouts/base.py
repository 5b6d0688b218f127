"""Three of the four parts of a method (rollout, credit and selection), and shaping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, final

from annotated_types import Gt
from typing_extensions import override

from treetune import contracts
from treetune.config.registrable import Registrable
from treetune.contracts import Experiment, Finding, Need
from treetune.engine.base import SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.tasks.base import Task
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Metrics, Problem, TextCodec, Trajectory

if TYPE_CHECKING:
    from treetune.models.sources import ModelSource
    from treetune.rollouts.values import EarlyContinuations

THREADS_REMEDY = (
    "choose the credit 'group', or 'monte_carlo' with states {type: 'threads'}, or set the rollout's parallel"
    " to false"
)
STATES_REMEDY = (
    "choose the credit 'group', or 'monte_carlo' with states {type: 'threads'} for threads and"
    " {type: 'turns'} for turns"
)
UNUSED_REMEDY = "choose an objective that learns from advantages, such as 'ppo', or the credit 'none'"


class Rollout(Registrable):
    """Makes trees of graded answers to problems."""

    samples: int = 1
    """Answers to a problem."""
    unfinished_reward: float | None = 0.0
    max_prompt_tokens: int | None = None
    """Problems with longer prompts are not trained on. None: there must not be any."""
    carries: bool = False
    """Whether it keeps answers from one iteration to the next, in its context's `CarryOver`."""

    @property
    @final
    def needs_engine(self) -> bool:
        return contracts.SampledAnswers() in self.gives

    @property
    def sampling(self) -> SamplingParams | None:
        """The policy's sampling parameters; None where nothing is sampled."""
        return None

    @property
    def sampler(self) -> Rollout | None:
        """The rollout where problems are fixed, as in evaluation and analyzers; None for plain sampling with
        this rollout's settings. Everybody asks by `single_turn.for_fixed_problems`."""
        return None

    def most_answers(self, problems: int) -> int:
        """Returns how many answers there may be at most to an iteration of so many problems."""
        return problems * self.samples

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """Returns the JSON schemas of the tools that all prompts of a run offer through the model's chat
        template; empty where none are called so. May start what offers them."""
        return ()

    def prepare(self, codec: TextCodec) -> None:
        """Raises ValueError where the model's tokenizer has no tokens for what the rollout does, before
        anything is sampled."""

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        """Given all problems of the iteration, returns the trees of this rank's contiguous share of them (and
        of what else was rolled out), in their order, and the metrics of all ranks. Collective.
        """
        raise NotImplementedError


class Shaping(Registrable):
    """Adds bonuses to the scores of answers, between rollout and credit."""

    remembers: bool = False
    """Whether it uses the context's `ShapingMemory`."""
    measures: tuple[str, ...] = ()
    """The names of the numbers that `assess` gives."""

    @property
    def label(self) -> str:
        """Its name in metrics: the type under which it is registered."""
        return self.registered_name() or type(self).__name__

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (
            Need(
                contracts.UseOfAdvantages(),
                "it changes rewards, which reach the loss as advantages",
                "leave shaping empty, or choose an objective that learns from advantages, such as 'ppo'",
            ),
            Need(contracts.CreditForRewards(), "it changes what whole answers earn"),
        )

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Raises ValueError where something that it needs for these training problems isn't there.

        Called when a run begins, before anything heavy is imported.
        """

    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        """Returns the number that is added to each trajectory's reward; negative for a penalty.

        All answers to one problem are there. It may depend on them and their scores, on what it remembers,
        on nothing that another shaping gave, and not on chance.
        """
        raise NotImplementedError

    def assess(
        self, context: RolloutContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[float], Mapping[str, Sequence[float]]]:
        """Returns `bonuses`, and the numbers that it `measures`, whose means over all ranks become the
        metrics ``<label>/<name>``: as many on a rank as it has. Collective, and once an iteration.
        """
        return self.bonuses(context, trajectories), {}


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """Settings of the critic: a copy of the start model with a linear head and an optimiser of its own,
    which has the trainer's schedule, precision and sharding."""

    learning_rate: Annotated[float, Gt(0)] | None = None
    """Peak of its schedule; None: the policy's."""
    value_clip: Annotated[float, Gt(0)] | None = 0.2
    """Bounds how far a value may move from what it was before the iteration's training while that still
    lowers the loss (Schulman et al.'s code of PPO); None: there is no bound."""


@dataclass(frozen=True)
class Critic:
    """The critic of the run, as it is before the iteration's training: a service of contexts."""

    values: Callable[[Sequence[Trajectory]], list[Column]]
    """Returns for each answer of this rank the value of the state before each response token; nan before
    tokens that nobody sampled. Collective."""


def check_critic_goes_on(experiment: Experiment, what: str, remedy: str) -> Iterator[Finding]:
    """Returns a finding where training begins again in every iteration. `what` has the critic; `remedy` is
    one way to do without."""
    if experiment.restart == "every_iteration":
        yield Finding(
            f"restart 'every_iteration' throws away what was trained, and the critic of {what} goes on"
            " learning",
            "$.restart",
            f"set restart to 'never', or {remedy}",
        )


class Credit(Registrable):
    """Makes episodes of trees, one for each answer, with advantages or (`gae`) without.

    Credit turns the rewards of answers into advantages, unless its own `gives` says otherwise.
    """

    @property
    @override
    def gives(self) -> tuple[contracts.Feature, ...]:
        return contracts.Advantages(before_training=True), contracts.CreditForRewards()

    @property
    @final
    def needs_engine(self) -> bool:
        return contracts.Continuations() in self.gives

    @property
    @final
    def needs_critic(self) -> bool:
        return contracts.CriticValues() in self.gives

    @property
    @final
    def asks_critic(self) -> bool:
        """True where `assign` asks the critic, rather than leave its values to the trainer."""
        return self.needs_critic and contracts.Advantages(before_training=True) in self.gives

    @property
    def reference(self) -> ModelSource | None:
        """A model that the trainer scores as the reference, in place of the start model."""
        return None

    @property
    @final
    def leaves_values_to_trainer(self) -> bool:
        """True where the trainer makes the advantages, with `from_values`, once its critic has valued the
        answers."""
        return self.needs_critic and not self.asks_critic

    @property
    def critic_settings(self) -> CriticSettings | None:
        """Settings of the critic, for credit that needs one."""
        return None

    def is_unbiased(self, context: RolloutContext) -> bool:
        """Returns whether its expected gradient, on answers that the context's rollout samples to the
        context's problems, is the policy gradient. Credit that says nothing of it counts as biased: a
        comparison then measures the bias, and takes none on trust."""
        return bool(getattr(self, "unbiased", False))

    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        """Returns, for plans, how many continuations it samples for answers of so many tokens on average and
        `limit` at most: usually and at most. Credit that doesn't say so is planned as if it sampled none."""
        return 0, 0

    def early_continuations(self, context: RolloutContext) -> EarlyContinuations | None:
        """Returns the continuations that it requests with each answer, while others are sampled."""
        return None

    def from_values(
        self, rewards: Sequence[float], values: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Makes the advantages of one answer, and the returns that the critic learns, from the critic's
        values. All four have one number for each trained token, in their order.

        `rewards` holds what each token earned, less the penalties that the objective puts into the reward;
        `values` holds V of the state before each token. The trainer runs this for credit that
        `leaves_values_to_trainer`. A method whose policy and critic take different λ returns the advantages
        of one recursion and the returns of another.
        """
        # Not every credit has to write it, so that it doesn't raise NotImplementedError.
        raise TypeError(f"the credit {type(self).__name__} leaves values to the trainer without from_values")

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        """Returns one episode for each answer of this rank's trees, in their order, and the metrics of all
        ranks. All answers to one problem are in one tree. Collective.
        """
        raise NotImplementedError


class GroupCredit(Credit):
    """Credit from the rewards of a problem's answers alone: all tokens of an answer share its advantage.

    The short way to a credit of your own: `advantages` is all that there is to write.
    """

    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        """Returns one advantage for each answer to a problem, from what they earned."""
        raise NotImplementedError

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        from treetune.rollouts.credit import whole_answer

        advantages: list[float] = []
        for tree in trees:
            rewards = [leaf.reward for leaf in tree.leaves]
            try:
                group_advantages = self.advantages(rewards)
                wrong = _wrong_count(group_advantages, len(rewards))
                if wrong is not None:
                    raise ValueError(
                        f"advantages() returned {wrong}; return one number per answer ({len(rewards)})"
                    )
                advantages += map(float, group_advantages)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{type(self).__name__}, problem {tree.problem.id!r}: {error}") from error
        return whole_answer(context, answers_of(trees), advantages)


def _wrong_count(returned: Any, wanted: int) -> str | None:
    """Returns what a method gave in place of so many values, such as "None" or "2 values"; None if it gave as
    many."""
    try:
        count = len(returned)
    except TypeError:  # neither a list nor an array
        return repr(returned)
    if count == wanted:
        return None
    return "1 value" if count == 1 else f"{count} values"


class TokenCredit(Credit):
    """Credit that tells the tokens of an answer apart, from the answers to its problem alone.

    The short way to such a credit of your own: `token_advantages` is all that there is to write.
    """

    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        """Returns, for each of a problem's answers, one advantage for each token of its `response_ids`. Those
        of injected tokens, which nobody trains, don't count."""
        raise NotImplementedError

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        import numpy as np

        from treetune.rollouts.credit import advantage_metrics, episode_of

        episodes: list[Episode] = []
        for tree in trees:
            advantages = self.token_advantages(tree.leaves)
            returned = f"{type(self).__name__}, problem {tree.problem.id!r}: token_advantages() returned"
            wrong = _wrong_count(advantages, len(tree.leaves))
            if wrong is not None:
                raise ValueError(
                    f"{returned} {wrong}; return one list per answer ({len(tree.leaves)}), with one number"
                    " per token"
                )
            for number, (row, leaf) in enumerate(zip(advantages, tree.leaves, strict=True)):
                wrong = _wrong_count(row, len(leaf.response_ids))
                if wrong is not None:
                    raise ValueError(
                        f"{returned} {wrong} for answer {number}; return one number per token"
                        f" ({len(leaf.response_ids)})"
                    )
            for leaf, row in zip(tree.leaves, advantages, strict=True):
                episode = episode_of(context, leaf)
                episodes.append(replace(episode, advantages=np.array(row, np.float64)))
        return episodes, advantage_metrics(context, episodes)


class Selection(Registrable):
    """Chooses the episodes that are trained on. An empty choice is returned as such: the runtime decides."""

    at_most: int | None = None
    """How many groups it keeps at most. None: there is no bound."""
    keeps_groups: bool = True
    """Whether it keeps all answers to a problem or none."""

    def most_kept(self, answers: int, problems: int) -> int:
        """Returns the most rows (pairs, where it makes such) it keeps of so many answers and problems."""
        return answers

    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        """Returns a part of all ranks' `episodes`, problem after problem in their order; groups are whole.

        Called on the first rank alone, so that it may ask no other: what is drawn derives from the context's
        seed and iteration. Metrics are of `episodes`.
        """
        raise NotImplementedError
