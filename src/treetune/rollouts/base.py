"""Defines the base classes of three of the four parts of a method: rollouts, shapings and selections. The
fourth part is `treetune.credit`.

In an iteration the four parts work one after the other:

    problems ── Rollout.run ──> trees of graded answers ── Shaping.bonuses ──> answers with bonuses
             ── Credit.assign ──> episodes with advantages ── Selection.select ──> episodes to train on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from typing_extensions import override

from treetune import contracts
from treetune.config.registrable import Registrable
from treetune.contracts import Need
from treetune.engine.requests import SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.tasks.base import Task
from treetune.tree import Tree
from treetune.vocabulary import Episode, Metrics, Problem, TextCodec, Trajectory


class Rollout(Registrable):
    """Makes trees of graded answers to problems.

    Example: `single_turn` with ``samples: 2`` makes of the problem ``2+2=?`` a tree with two leaves, such as
    the answers ``4`` (reward 1) and ``5`` (reward 0), which share only the prompt.
    """

    samples: int = 1
    """The number of answers to each problem."""
    unfinished_reward: float | None = 0.0
    """The reward of an answer that the budget cut off. None: such an answer is graded like any other."""
    max_prompt_tokens: int | None = None
    """Problems with longer prompts are not trained on. None: there is no bound, but a prompt must leave room
    in the context for the largest answer, or else it is an error."""
    carries: bool = False
    """Whether the rollout keeps answers from one iteration to the next, in its context's `carry_over`."""

    @property
    @final
    def needs_engine(self) -> bool:
        return contracts.SampledAnswers() in self.gives

    @property
    def sampling(self) -> SamplingParams | None:
        """The policy's sampling parameters; None for a rollout that doesn't sample."""
        return None

    @property
    def rollout_for_fixed_problems(self) -> Rollout | None:
        """The rollout that answers fixed problems, as in evaluation and analyses. None stands for plain
        sampling with this rollout's settings: callers use `single_turn.adapt_to_fixed_problems`, which
        handles None."""
        return None

    def most_problems(self, problems: int) -> int:
        """Returns the largest number of problems that are answered in an iteration of `problems` problems. It
        is larger than `problems` if the rollout asks for further ones."""
        return problems

    def most_answers(self, problems: int) -> int:
        """Returns the largest number of answers that an iteration of `problems` problems can have."""
        return problems * self.samples

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """Returns the JSON schemas of the tools that all prompts of a run offer through the model's chat
        template.

        Returns none for a rollout without tools, or if answers call the tools in another format than the chat
        template's. May start the servers of tools, to ask them for their schemas.
        """
        return ()

    def check_at_start(self, codec: TextCodec) -> None:
        """Checks that the model's tokenizer has the tokens that the rollout needs, before sampling begins.

        `check` can't do it, since it takes seconds to load a tokenizer.

        Raises:
            ValueError: A token is missing.
        """

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        """Answers the problems of an iteration. Collective.

        Args:
            context: The context of the rollout phase.
            problems: All problems of the iteration, the same on all ranks.

        Returns:
            The trees of this rank's contiguous share of the problems (and of further ones that the rollout
            drew), in their order, and the metrics of all ranks.
        """
        raise NotImplementedError


class Shaping(Registrable):
    """Adds bonuses to the scores of answers, between rollout and credit."""

    remembers: bool = False
    """Whether the shaping uses the context's `shaping_memory`."""
    measures: tuple[str, ...] = ()
    """The names of the numbers that `assess` gives."""

    @property
    def label(self) -> str:
        """The shaping's name in metrics: the `type` under which the class is registered."""
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

    def check_at_start(self, problems: Sequence[Problem]) -> None:
        """Checks that all that the shaping needs for these training problems is there.

        Called when a run begins, before anything heavy is imported. `check` can't do it, since it takes long
        to read all problems.

        Raises:
            ValueError: Something is missing.
        """

    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        """Returns the number that is added to each trajectory's reward; negative for a penalty.

        All answers to a problem are among the trajectories. A bonus may depend on them, on their scores and
        on what the shaping remembers, but not on the bonuses of other shapings, and not on chance.
        """
        raise NotImplementedError

    def assess(
        self, context: RolloutContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[float], Mapping[str, Sequence[float]]]:
        """Returns the trajectories' bonuses (see `bonuses`), and numbers that the shaping measures, by name.

        Collective, and called once an iteration. A shaping that measures something overrides this, and lists
        the names in `measures`. The mean of a name's values over all ranks becomes the metric
        ``<label>/<name>``. A rank may have any number of values under each name.
        """
        return self.bonuses(context, trajectories), {}


class Selection(Registrable):
    """Chooses the episodes to train on. It may return none: the runtime then decides how the run
    continues."""

    at_most: int | None = None
    """The largest number of groups that the selection keeps. None: there is no bound."""
    keeps_groups: bool = True
    """Whether the selection keeps either all answers to a problem or none."""

    def most_kept(self, answers: int, problems: int) -> int:
        """Returns the largest number of rows (or pairs) that the selection keeps.

        Args:
            answers: The number of answers before the selection.
            problems: The number of problems that they answer.
        """
        return answers

    def select(self, context: RolloutContext, episodes: Sequence[Episode]) -> tuple[list[Episode], Metrics]:
        """Returns the episodes to train on, chosen from those of all ranks, and metrics about the choice.

        In `episodes`, all rows of a problem are neighbours, and the problems are in the iteration's order.
        Only the first rank calls this method, so it must not communicate with other ranks. Random choices
        derive from the context's seed and iteration.
        """
        raise NotImplementedError
