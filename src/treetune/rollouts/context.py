"""The context that a run gives rollout, shaping, credit and selection to work with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from treetune.engine.base import Engine
from treetune.engine.requests import ANSWER_PRIORITY, SamplingParams
from treetune.rollouts.model_scores import ModelScores
from treetune.tasks.base import Task
from treetune.vocabulary import Problem, TextCodec, TokenIds, Trajectory

if TYPE_CHECKING:
    from treetune.rollouts.base import Rollout
    from treetune.tasks.graders.pool import GraderPool

T = TypeVar("T")

FORMER_ATTRIBUTES = ("get", "find", "services", "with_services")
"""The attributes with which contexts of earlier versions looked objects up by their class."""


class RankGroup(Protocol):
    """The processes that share the work of a run. All communication between ranks goes through it."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Returns every rank's object, in rank order. Collective.

        Example: with two ranks, of which rank 0 passes 3 and rank 1 passes 5, both get ``[3, 5]``.
        """

    def hand_out(self, name: str, for_ranks: Sequence[Any]) -> list[Any]:
        """Sends the i-th of `for_ranks` to rank i, and returns the objects that all ranks have sent to this
        rank. Collective."""


@dataclass(frozen=True)
class OneRank:
    """A run with a single process."""

    rank: int = 0
    world_size: int = 1

    def exchange(self, name: str, value: Any) -> list[Any]:
        return [value]

    def hand_out(self, name: str, for_ranks: Sequence[Any]) -> list[Any]:
        return list(for_ranks)


@dataclass(frozen=True)
class AnswerSettings:
    """The settings of all answers that are made with a context."""

    context_length: int
    """Tokens of prompt and answer together."""
    sampling: SamplingParams | None = None
    """The policy's sampling parameters; None in a phase that doesn't sample."""
    unfinished_reward: float | None = 0.0
    """The reward of an answer that the budget cut off; None: it is graded like any other."""
    reads_logprobs: bool = True
    """Whether the engine's log-probs of answers are read. Training reads them; evaluation and values only
    grade answers, and don't request them. A rollout that reads them itself requests them anyway."""
    priority: int = ANSWER_PRIORITY
    """The priority of requests for answers, `ANSWER_PRIORITY` or `CONTINUATION_PRIORITY`. Continuations are
    sampled only to estimate the values of other answers' states. In the engine's queue they wait until
    answers are served."""

    def token_budget(self, prompt_ids: TokenIds, max_tokens: int) -> int:
        """Returns how many tokens an answer may have: `max_tokens`, or the rest of the context after the
        prompt if that is less.

        Example: with a context of 512 and a prompt of 400, ``token_budget(prompt_ids, 256)`` is 112.
        """
        return min(max_tokens, self.context_length - len(prompt_ids))


@dataclass(frozen=True)
class Log:
    """The run's log, for parts that write to it."""

    say: Callable[[str], None] = lambda message: None
    """Writes a line, once for all ranks."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Shows how much of a phase is done."""


@dataclass(frozen=True)
class RolloutContext:
    """The objects and settings that a rollout, a shaping, a credit or a selection works with, in one phase of
    a run.

    Seeds of what a part samples or draws derive from `seed` and `iteration` (`treetune.seeds.derive_seed`).
    Only some parts use the fields after `log`. Such a field, or a field of `model_scores`, is None in phases
    that don't provide it. A part that can't work without a field reads it through `require`, whose error
    names the field.
    ``dataclasses.replace(context, engine=…)`` returns a context with another engine.
    """

    task: Task
    engine: Engine | None
    """None in a run that doesn't sample, as in supervised training."""
    grader: GraderPool
    codec: TextCodec
    seed: int
    iteration: int
    settings: AnswerSettings
    ranks: RankGroup = field(default_factory=OneRank)
    log: Log = field(default_factory=Log)
    rollout: Rollout | None = None
    """The phase's rollout as it answers fixed problems (`adapt_to_fixed_problems`). Credit continues
    answers with it."""
    model_scores: ModelScores = field(default_factory=ModelScores)
    """The numbers that models compute from answers for the credit, such as the critic's values."""
    early_continuations: BegunContinuations | None = None
    """The continuations that were sampled for the credit while other answers were still being sampled."""
    answer_observer: AnswerObserver | None = None
    """Gets each answer as soon as it is graded."""
    further_problems: FurtherProblems | None = None
    """Problems that the iteration doesn't have yet. Only the rollout of an iteration has them."""
    carry_over: CarryOver | None = None
    """Answers from the previous iteration, for a rollout that `carries`."""
    shaping_memory: ShapingMemory | None = None
    """The data that shapings keep from earlier iterations."""
    environments: EnvironmentPlayer | None = None
    """Plays the environments of answers with turns."""
    turn_journal: TurnStore | None = None
    """Stores the turns of environments, so that a restarted run doesn't play them again."""

    if not TYPE_CHECKING:  # a type checker reports these names by itself

        def __getattr__(self, name: str) -> Any:
            """Called for names that the context doesn't have: explains those that it once had."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in FORMER_ATTRIBUTES:
                message += (
                    ": read a field by its name, such as context.further_problems in place of"
                    " context.get(FurtherProblems), and set one with dataclasses.replace(context, …)"
                )
            raise AttributeError(message, name=name, obj=self)


def require(value: T | None, name: str) -> T:
    """Returns the value of a context's field. Raises LookupError with the name if it is None.

    Example: ``require(context.model_scores.critic, "critic")``.
    """
    if value is None:
        raise LookupError(f"this phase of the run has no {name}")
    return value


# The types of fields that only some features need


@dataclass(frozen=True)
class FurtherProblems:
    """The training problems that are not in the iteration, for rollouts that sample more of them
    (`until_mixed`)."""

    draw: Callable[[], Sequence[Problem]]
    """Returns all of these problems, in an order that derives from seed and iteration and is the same on all
    ranks."""


@dataclass(frozen=True)
class CarryOver:
    """Answers that a rollout carries over from one iteration to the next (`Rollout.carries`)."""

    answers: Sequence[Trajectory]
    """The answers that all ranks carried over from the previous iteration, in rank order."""
    keep: Callable[[Sequence[Trajectory]], None]
    """Takes the answers that this rank carries over. The rollout calls it before its `run` returns.
    Collective."""


class ShapingMemory(dict[str, Any]):
    """The data that shapings keep from one iteration to the next. It consists of JSON types, and is the same
    on all ranks.

    A shaping that `remembers` changes the entry under its label, in the same way on all ranks. The runtime
    stores the memory with the iteration. Example: the mean length of sequential answers to a problem,
    ``{"acceleration": {"train/17": 212.4}}``.
    """


@dataclass(frozen=True)
class AnswerObserver:
    """Gets each answer as soon as it is graded, while others are still sampled: see
    `treetune.credit.states.early`."""

    observe: Callable[[Trajectory], Awaitable[None]]
    """Takes a graded answer. May await samples of the same engine. The rollout waits for it before it
    ends."""


class BegunContinuations(Protocol):
    """The continuations that credit has sampled with each answer: `treetune.credit.states.early`."""

    def find(self, state_key: bytes, plan: object) -> Any:
        """Returns what `StateRule.begin` returned for a state; None if it was not called with this plan.

        The package `rollouts` must not import `credit`, so the types of credit are `object` and `Any` here.

        Args:
            state_key: The state's key (`AnswerPrefix.key`).
            plan: How the state is continued: a `ContinuationPlan`.
        """


class EnvironmentPlayer(Protocol):
    """Plays the environments of answers with turns: `treetune.domains.environments.pool`."""

    def begin(
        self,
        environment: Any,
        problem: Problem,
        seed: int,
        actions: Sequence[str],
        snapshot: Any,
        journal: Any,
        seconds: float,
    ) -> Any:
        """Returns the object that plays the turns of an answer: a `Play`. `EnvironmentPool.begin` describes
        the arguments.

        The package `rollouts` must not import `domains`, so the types of environments are `Any` here.
        """


class TurnStore(Protocol):
    """The stored turns of environments: `treetune.domains.environments.pool.TurnJournal`."""

    def close(self) -> None:
        """Closes its file, which opens again for the next turn."""
