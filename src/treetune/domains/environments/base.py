"""Environments, which reply to the policy turn by turn, and the task that takes its problems from a game."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Finding
from treetune.tasks.base import GeneratedTask, Task
from treetune.tasks.graders.base import Grader, Isolation
from treetune.vocabulary import Grade, GradeOutcome, Problem

Reward = Literal["environment", "grader", "sum"]
"""The reward of an answer: the sum of its turns' rewards, the grader's reward for its last turn, or both."""

Again = Literal["replay", "copy", "never"]
"""The way to continue an answer from its middle; see `Environment.again`."""

LONGEST_OBSERVATION = 1 << 16
"""Observations are cut to so many characters before they are sent to the run's own process."""


@dataclass(frozen=True)
class Turn:
    """The reply of an environment to an action, which is what the policy wrote.

    Example: the reply to a guess, and to the right one::

        Turn(observation="My number is lower.")
        Turn(done=True, reward=1.0)
    """

    observation: str = ""
    """The text that the policy reads next. In the last turn it isn't used."""
    done: bool = False
    """Whether this is the last turn."""
    reward: float = 0.0
    """The reward of this turn only, not of the answer so far."""
    outcome: GradeOutcome = "ok"
    """Environments leave this at ``ok``. Their caller sets it if the environment hung (``timeout``), if it
    raised an exception or its process ended (``error``), or if a requirement was missing
    (``unavailable``)."""
    message: str | None = None
    """The reason of an outcome other than ``ok``."""
    results: tuple[tuple[str, str, str], ...] = ()
    """Results of native calls, each as its tool's name, the call's id and the text of the result. The policy
    reads them in place of the observation, in the form of its chat template."""
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Further metrics of the answer, such as ``rewards/speed``. They are read from the last turn. If a grader
    grades the answer, too, and gives a number of the same name, the grader's counts."""


class Environment(Registrable):
    """A game, a set of tools, or a simulated user: it replies to a policy.

    Sub-classes are frozen dataclasses, whose fields are configuration. The state of an answer is any object,
    which `reset` makes and `step` changes. An answer begins with its problem's prompt. All answers to a
    problem get the same seed, so that random events are the same for all of them, and the answers are
    comparable. Draw random numbers only from this seed.

    `reset` and `step` raise `Unavailable` if a requirement is missing. Such an answer is counted, and left
    out of training and measurements. Any other exception of `step` ends the answer with the outcome
    ``error``.
    """

    again: ClassVar[Again] = "replay"
    """The way to continue an answer from its middle, after a run was killed and for credit that continues
    answers. ``replay``: the actions are played again, since the same problem, seed and actions make the same
    observations. ``copy``: they don't, but states can be pickled, and a continuation gets a copy. ``never``:
    neither is possible. Then an answer that loses its worker process is left out, and credit that continues
    answers refuses the environment."""
    isolation: ClassVar[Isolation] = "process"
    """The place where the environment runs. ``process``: each answer has a process, which is killed if a step
    takes more than `deadline` seconds. ``inline``: in the run's own process, for environments that can't
    hang, crash or use unbounded memory, whatever the policy writes. ``service``: in threads of the run's
    process, for environments that wait for something outside."""
    earns: ClassVar[Reward] = "environment"
    """The reward of answers, unless the rollout's `reward` says otherwise."""
    deadline: float = 10.0
    """Seconds for one turn."""
    concurrency: int = 64
    """The most turns at the same time, for ``process`` and ``service``. Choose about the number of cores for
    an environment that computes, and more for one that waits."""
    reads_specials: bool = False
    """Whether the text of an action includes special tokens, except those that end a turn."""

    def prepare(self) -> None:
        """Called once, before the deadlines begin, in the process from which all answers' processes are
        forked. Do slow imports here, and start no threads."""

    def offered(self) -> Sequence[Mapping[str, Any]]:
        """Returns the JSON schemas of the tools that prompts offer through the model's chat template."""
        return ()

    def message(self, action: str) -> dict[str, Any]:
        """Returns an action as a message of a chat. Calls that can be read become its ``tool_calls``, in the
        form of OpenAI's API, but with arguments as objects and not as text."""
        return {"role": "assistant", "content": action}

    def reset(self, problem: Problem, seed: int) -> Any:
        """Returns the state in which an answer to the problem begins."""
        raise NotImplementedError

    def step(self, state: Any, action: str) -> Turn:
        """Returns the turn that follows an action.

        The action is the policy's text without stop strings, and without special tokens unless the
        environment `reads_specials`. If the prompt opened a thought, the text begins with the opening tag
        (``<think>``).
        """
        raise NotImplementedError


def environment_of(task: Task) -> Environment | None:
    """Returns the environment for answers of several turns to a task's problems: its attribute
    `environment`."""
    environment: Environment | None = getattr(task, "environment", None)
    return environment


@dataclass(frozen=True)
class NoEnvironment(Environment):
    """The absence of an environment: the first turn is the answer, which the task's grader grades."""

    isolation: ClassVar[Isolation] = "inline"
    earns: ClassVar[Reward] = "grader"

    @override
    def reset(self, problem: Problem, seed: int) -> None:
        return None

    @override
    def step(self, state: None, action: str) -> Turn:
        return Turn(done=True)


NOTHING = NoEnvironment()


class Game(Environment):
    """An environment that makes its own problems, one for each level, for the task `environment`."""

    quick: ClassVar[bool] = True
    """Whether making a problem takes little time and needs no other library. Then checks of a configuration
    may make some problems."""

    @property
    def levels(self) -> int | None:
        """The number of different problems; None: unlimited."""
        return None

    def problem(self, id: str, level: int) -> Problem:
        """Returns the problem of a level, which is always the same. Answers begin after its prompt."""
        raise NotImplementedError

    def alphabet(self) -> str:
        """Returns every character that prompts, actions and observations may contain.

        Raises ValueError for a game in natural language.
        """
        raise ValueError(f"environment {type(self).__name__} has no small alphabet: use a real tokenizer")


@dataclass(frozen=True)
class EarnedInTurns(Grader):
    """The grader of tasks whose answers earn only their environment's rewards."""

    isolation: ClassVar[Isolation] = "inline"

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(reward=0.0, outcome="no_answer", message="an environment says what its answers earn")


@Task.register("environment")
@dataclass(frozen=True, kw_only=True)
class EnvironmentTask(GeneratedTask):
    """The levels of a game, which are numbers that the game turns into problems.

    The rollout `multi_turn` plays them, and an answer earns the game's rewards. A grader is only needed if
    the rollout's `reward` is ``grader`` or ``sum``.
    """

    environment: Game = field()
    """The game that makes the problems and replies to the policy."""
    train_size: Annotated[int, Gt(0)] = 1000
    validation_size: Annotated[int, Gt(0)] = 100
    test_size: Annotated[int, Gt(0)] = 200
    grader: Grader = field(default_factory=EarnedInTurns)

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        levels = self.environment.levels
        needed = sum(self.sizes().values())
        if levels is not None and needed > levels:
            yield Finding(
                f"train_size + validation_size + test_size is {needed}, and the environment has {levels}"
                " levels",
                "train_size",
                "lower the sizes, or make the environment larger",
            )

    @override
    def generate(self, count: int) -> Sequence[int]:
        return range(count)

    @override
    def problem(self, id: str, generated: int) -> Problem:
        return self.environment.problem(id, generated)

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        # A slow game, or one of another library, is not started for a check of the configuration.
        return super().examples(count) if self.environment.quick else ()

    @override
    def step_boundaries(self, response: str) -> list[int]:
        """Returns the whole response as one step. In an answer of several turns, the rollout makes a step of
        each turn and doesn't ask for these."""
        return [0, len(response)] if response else [0]

    @override
    def alphabet(self) -> str:
        return self.environment.alphabet()
