"""What an environment is: it is told what the policy wrote, and says what follows, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from treetune.config.registrable import Registrable
from treetune.tasks.base import Task
from treetune.tasks.graders.base import Isolation
from treetune.vocabulary import GradeOutcome, Problem

Reward = Literal["environment", "grader", "sum"]
"""What an answer earns: its turns' rewards together, what the task's grader gives its last turn, or both."""

Again = Literal["replay", "copy", "never"]
"""How an answer can be gone on with from its middle; see `Environment`."""

LONGEST_OBSERVATION = 1 << 16
"""Characters of an observation that reach the run's own process, however long it is."""


@dataclass(frozen=True)
class Turn:
    """What an environment says to what the policy wrote.

    `observation` is what the policy reads next; nobody reads it where the turn is the last one (`done`).
    `reward` is for this turn alone. `outcome` and `message` are for whoever calls the environment: it hung
    (``timeout``), raised or died (``error``), or what it needs wasn't there (``unavailable``).
    """

    observation: str = ""
    done: bool = False
    reward: float = 0.0
    outcome: GradeOutcome = "ok"
    message: str | None = None


class Environment(Registrable):
    """A game, a set of tools, a simulated user: whatever answers a policy.

    Sub-classes are frozen dataclasses, whose fields are configuration. What happens in an answer is in a
    state, any object, that `reset` makes and `step` changes. What a policy is shown first is its problem's
    prompt. All answers to a problem get the same seed, so that they meet the same chances and compare with
    each other; draw from it alone.

    `again` says how an answer can be gone on with from its middle, by a run that was killed and by credit
    that continues answers:

    * ``replay``: the same problem, seed and actions make the same observations.
    * ``copy``: they don't, but states can be pickled. What goes on with an answer has a copy.
    * ``never``: neither. An answer that loses its worker process is left out, and credit that continues
      answers refuses such an environment.

    `isolation` says where it runs, as for graders: ``process`` in worker processes, which are killed where a
    step takes more than `deadline` seconds; ``inline`` in the run's own process, for what can't hang, crash
    or allocate without bound whatever the policy writes; ``service`` in threads of the run's process,
    `concurrency` at a time, for what waits for something outside.

    `reset` and `step` raise `Unavailable` where what they need isn't there: such an answer is left out of
    training and measurements, and counted. Anything else that `step` raises ends the answer as ``error``.
    """

    again: ClassVar[Again] = "replay"
    isolation: ClassVar[Isolation] = "process"
    earns: ClassVar[Reward] = "environment"
    """What answers earn unless the rollout says otherwise."""
    deadline: float = 10.0
    """Seconds for one turn."""
    concurrency: int = 16
    """Turns of a ``service`` at a time."""

    def prepare(self) -> None:
        """Called once in each worker process, before the deadlines begin: slow imports belong here."""

    def missing(self) -> Sequence[str]:
        """What it needs and isn't there (a package, a sandbox), in words, with what to do about it."""
        return ()

    def reset(self, problem: Problem, seed: int) -> Any:
        """The state in which an answer to the problem begins."""
        raise NotImplementedError

    def step(self, state: Any, action: str) -> Turn:
        """What follows from what the policy wrote in its turn, without stop strings and special tokens."""
        raise NotImplementedError


def environment_of(task: Task) -> Environment | None:
    """Returns the environment in which a task's problems are played, where answers have several turns: its
    attribute `environment`."""
    environment: Environment | None = getattr(task, "environment", None)
    return environment


@dataclass(frozen=True)
class Nothing(Environment):
    """Where there is no environment: the first turn is the answer, which the task's grader judges."""

    isolation: ClassVar[Isolation] = "inline"
    earns: ClassVar[Reward] = "grader"

    def reset(self, problem: Problem, seed: int) -> None:
        return None

    def step(self, state: None, action: str) -> Turn:
        return Turn(done=True)


NOTHING = Nothing()


class Game(Environment):
    """An environment that makes its own problems, one for each level, for the task `environment`."""

    quick: ClassVar[bool] = True
    """Whether a problem is made at once and without another library, while a configuration is checked."""

    @property
    def levels(self) -> int | None:
        """How many different problems there are; None: no end of them."""
        return None

    def problem(self, id: str, level: int) -> Problem:
        """The problem of a level, always the same one; what the policy is shown first is its prompt."""
        raise NotImplementedError

    def alphabet(self) -> str:
        """Every character that prompts, actions and observations may hold.

        Raises ValueError for a game in natural language.
        """
        raise ValueError(f"environment {type(self).__name__} has no small alphabet: use a real tokenizer")
