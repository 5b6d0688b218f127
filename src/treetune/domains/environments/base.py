"""Environments: each answers what the policy wrote, turn by turn; and the task whose problems a game
makes."""

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
"""The reward of an answer: its turns' rewards together, the grader's for its last turn, or both."""

Again = Literal["replay", "copy", "never"]
"""The way to continue an answer from its middle; see `Environment`."""

LONGEST_OBSERVATION = 1 << 16
"""The most characters of an observation that reach the run's own process."""


@dataclass(frozen=True)
class Turn:
    """The answer of an environment to what the policy wrote."""

    observation: str = ""
    """The text that the policy reads next; unread where the turn is the last one."""
    done: bool = False
    """This is the last turn."""
    reward: float = 0.0
    """The reward of this turn alone."""
    outcome: GradeOutcome = "ok"
    """Set by whoever calls the environment: it hung (``timeout``), raised or died (``error``), or a
    requirement was missing (``unavailable``)."""
    message: str | None = None
    """The reason of an outcome other than ``ok``."""
    results: tuple[tuple[str, str, str], ...] = ()
    """Results of native calls, each with its tool, the call's id and a text: the policy reads them as its
    chat template has results of tools, in place of the observation."""
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    """What else was counted of the answer, in its last turn: metrics, ``rewards/…``."""


class Environment(Registrable):
    """A game, a set of tools, a simulated user: whatever answers a policy.

    Sub-classes are frozen dataclasses, whose fields are configuration. An answer's state is any object, which
    `reset` makes and `step` changes. The beginning of an answer is its problem's prompt. All answers to a
    problem get the same seed, so that they meet the same chances and compare with each other; draw from it
    alone.

    `reset` and `step` raise `Unavailable` where a requirement is missing: such an answer is left out of
    training and measurements, and counted. Anything else that `step` raises ends the answer as ``error``.
    """

    again: ClassVar[Again] = "replay"
    """The way to continue an answer from its middle, for a run that was killed and for credit that continues
    answers. ``replay``: the same problem, seed and actions make the same observations. ``copy``: they don't,
    but states can be pickled, and a continuation has a copy. ``never``: neither. An answer that loses its
    worker process is left out, and credit that continues answers refuses such an environment."""
    isolation: ClassVar[Isolation] = "process"
    """Where it runs, as for graders. ``process``: in a process of each answer, which is killed where a step
    takes more than `deadline` seconds. ``inline``: in the run's own process, for what can't hang, crash or
    allocate without bound whatever the policy writes. ``service``: in threads of the run's process, for what
    waits for something outside."""
    earns: ClassVar[Reward] = "environment"
    """The reward of answers unless the rollout sets another."""
    deadline: float = 10.0
    """Seconds for one turn."""
    concurrency: int = 64
    """Turns at a time, of ``process`` and ``service``: more for what waits, about the cores for what
    computes."""
    reads_specials: bool = False
    """Whether it is shown the special tokens of what the policy wrote, but for those that end it."""

    def prepare(self) -> None:
        """Called once, before the deadlines begin, in the process that all answers' processes are forked off:
        slow imports belong here, and threads don't."""

    def offered(self) -> Sequence[Mapping[str, Any]]:
        """Returns the JSON schemas of the tools that prompts offer through the model's chat template."""
        return ()

    def message(self, action: str) -> dict[str, Any]:
        """Returns what the policy wrote as a message of a chat: calls that can be read are its ``tool_calls``
        (objects of OpenAI's form, the arguments not yet text)."""
        return {"role": "assistant", "content": action}

    def reset(self, problem: Problem, seed: int) -> Any:
        """Returns the state in which an answer to the problem begins."""
        raise NotImplementedError

    def step(self, state: Any, action: str) -> Turn:
        """Returns the turn that follows from the policy's text, which comes without stop strings, and without
        special tokens unless it `reads_specials`. Where the prompt opened a thought, the text begins with the
        tag that did (``<think>``)."""
        raise NotImplementedError


def environment_of(task: Task) -> Environment | None:
    """Returns the environment in which a task's problems are played, where answers have several turns: its
    attribute `environment`."""
    environment: Environment | None = getattr(task, "environment", None)
    return environment


@dataclass(frozen=True)
class NoEnvironment(Environment):
    """The absence of an environment: the first turn is the answer, which the task's grader judges."""

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
    """Whether a problem is made at once and without another library, while a configuration is checked."""

    @property
    def levels(self) -> int | None:
        """The number of different problems; None: no end of them."""
        return None

    def problem(self, id: str, level: int) -> Problem:
        """Returns the problem of a level, always the same one; its prompt is the beginning of an answer."""
        raise NotImplementedError

    def alphabet(self) -> str:
        """Returns every character that prompts, actions and observations may hold.

        Raises ValueError for a game in natural language.
        """
        raise ValueError(f"environment {type(self).__name__} has no small alphabet: use a real tokenizer")


@dataclass(frozen=True)
class EarnedInTurns(Grader):
    """Stands for the grader where an environment's rewards are all that there is."""

    isolation: ClassVar[Isolation] = "inline"

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(reward=0.0, outcome="no_answer", message="an environment says what its answers earn")


@Task.register("environment")
@dataclass(frozen=True, kw_only=True)
class EnvironmentTask(GeneratedTask):
    """The levels of a game: numbers, from which the game makes its problems. The rollout `multi_turn` plays
    them, and an answer earns the game's rewards; a grader is needed where the rollout's `reward` says so.
    """

    environment: Game = field()
    """The game that makes the problems, and answers in them."""
    train_size: Annotated[int, Gt(0)] = 1000
    validation_size: Annotated[int, Gt(0)] = 100
    test_size: Annotated[int, Gt(0)] = 200
    grader: Grader = field(default_factory=EarnedInTurns)

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        there = self.environment.levels
        needed = sum(self.sizes().values())
        if there is not None and needed > there:
            yield Finding(
                f"train_size + validation_size + test_size is {needed}, and the environment has {there}"
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
        return super().examples(count) if self.environment.quick else ()

    @override
    def step_boundaries(self, response: str) -> list[int]:
        """Returns one step for a response; the rollout knows its turns."""
        return [0, len(response)] if response else [0]

    @override
    def alphabet(self) -> str:
        return self.environment.alphabet()
