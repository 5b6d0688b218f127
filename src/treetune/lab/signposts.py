"""Signposts: ways along signs, on which it is known which choice decides and what every state is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, Protocol, runtime_checkable

from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import override

from treetune.contracts import Answers, Need
from treetune.credit.values.base import StepValues, Valuation, Value, ValueEstimator
from treetune.seeds import derived_random
from treetune.tasks.base import GeneratedTask, Task
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Problem


@runtime_checkable
class KnowsDecisions(Protocol):
    """A task whose answers are decided at a few places, by one character each.

    Whoever wants a policy's exact value can take both ways at these places, each with its probability, and
    sample what lies between.
    """

    def decision(self, problem: Problem, response: str) -> str | None:
        """The character that is right next, where the next one decides; None elsewhere."""
        ...

    def decided(self, problem: Problem, response: str) -> float | None:
        """Returns the reward of the answer however it goes on; None where that is still open."""
        ...


Rule = Literal["all", "first", "last", "once"]

SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHATTER = "abcdefghijklmnop"
BLANK = "."
"""In a prompt, where the way's lines have a choice and chatter; in a gold, where any choice is right."""


@Grader.register("signposts")
@dataclass(frozen=True, kw_only=True)
class SignpostsGrader(Grader):
    """Reads the choice on every line, its second character, and looks whether those that decide are right.

    The answer is correct where every one of the problem's groups of lines has a right choice on at least one
    of them. A line that isn't there is wrong. Where an answer has to be `whole`, one that is not as long as
    the teacher's is none: or else what is written behind the last line that counts could be left out.
    """

    whole: bool = False

    isolation = "inline"

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        if self.whole and len(response) != problem.data["length"]:
            return None
        said = [line[1:2] or BLANK for line in lines_of(problem, response)]
        return "".join(said) if response.strip() else None

    @override
    def verdict(self, extracted: str, problem: Problem) -> float:
        right = [said == gold for said, gold in zip(extracted, problem.gold)]
        return float(
            all(any(right[line] for line in group if line < len(right)) for group in groups(problem))
        )


def groups(problem: Problem) -> Sequence[Sequence[int]]:
    """Lines, counted from 0: of each group one right choice is needed."""
    found: Sequence[Sequence[int]] = problem.data["groups"]
    return found


def lines_of(problem: Problem, response: str) -> Sequence[str]:
    """The lines that may count, of those that are there."""
    first: int = problem.data["first"]
    return response.split("\n")[first : first + len(problem.gold)]


@Task.register("signposts")
@dataclass(frozen=True, kw_only=True)
class Signposts(GeneratedTask):
    r"""A way of `steps` lines. Each shows a sign, then the choice of a direction (a digit from 1 to
    `options`), then `chatter` letters that mean nothing: ``B3kea\nF1oab\nB2hhc\n``. Signs come round again
    after `period` lines. The prompt shows the first round with blanks, ``B....\nF....\n``, so that a tiny
    model finds each sign at the same distance.

    Which direction is right at a sign is the same in all problems, and the prompt doesn't say it. The `rule`
    says whose choices decide:

    | rule | an answer is correct where |
    |---|---|
    | ``all`` | every choice is right: one slip spoils all |
    | ``first`` | the first choice is right: a fork, and then a long way on which nothing matters |
    | ``last`` | the last choice is right: the reward comes late |
    | ``once`` | at every sign one of the choices is right: a wrong one can be repaired in the next round |

    Behind the way may stand a line of `wandering`: so many free choices at its last sign, ``F2F4F1``; or
    before it, at its first sign (`wandering_first`). They matter to nobody and look like those that do: an
    outcome that one choice earned seems to be worth as much to all of these, whose noise falls on the same
    weights. `names` letters in front of a prompt mean nothing either, and make more problems.

    The **teacher** chooses right with the rate of the sign's kind, else one of the other directions, each as
    likely; there are as many kinds as `rates`, and signs take turns in them. Chatter is drawn evenly from
    `letters` letters. So the value of each state is known (`teacher_value`).

    `seed` decides on what is right and what is held out, and is not the run's; the held-out problems don't
    change with `train_size`. Raises ValueError where there are too few different prompts.
    """

    steps: Annotated[int, Ge(1), Le(48)] = 6
    period: Annotated[int, Ge(1), Le(4)] = 3
    rule: Rule = "all"
    rates: Annotated[tuple[Annotated[float, Ge(0), Le(1)], ...], MinLen(1)] = (0.9,)
    options: Annotated[int, Ge(2), Le(9)] = 4
    chatter: Annotated[int, Ge(0), Le(64)] = 3
    letters: Annotated[int, Ge(1), Le(len(CHATTER))] = 8
    signs: Annotated[int, Ge(1), Le(len(SIGNS))] = 20
    """How many different signs there are."""
    wandering: Annotated[int, Ge(0), Le(64)] = 0
    wandering_first: bool = False
    names: Annotated[int, Ge(0), Le(4)] = 0
    train_size: Annotated[int, Gt(0)] = 6000
    validation_size: Annotated[int, Gt(0)] = 500
    test_size: Annotated[int, Gt(0)] = 1000
    seed: int = 0
    grader: Grader = SignpostsGrader()

    @override
    def __post_init__(self) -> None:
        needed, there_are = sum(self.sizes().values()), self.prompts()
        if needed > there_are:
            raise ValueError(
                f"train_size + validation_size + test_size is {needed}, but {self.period} signs out of"
                f" {self.signs} make only {there_are} different prompts: ask for fewer, or for more signs or"
                " names"
            )
        if self.period > self.steps:
            raise ValueError(f"period is {self.period}, more than the {self.steps} steps of a way")

    def prompts(self) -> int:
        """Returns how many different prompts there are."""
        return self.signs**self.period * self.letters**self.names

    @override
    def generate(self, count: int) -> Sequence[int]:
        return _prompts(self)[:count]

    @override
    def problem(self, id: str, generated: int) -> Problem:
        signs = tuple(generated // self.signs**digit % self.signs for digit in range(self.period))
        other = generated // self.signs**self.period
        name = "".join(CHATTER[other // self.letters**digit % self.letters] for digit in range(self.names))
        groups, right = self.groups(), _directions(self)
        decisive = {line for group in groups for line in group}
        gold = [right[signs[line % self.period]] if line in decisive else BLANK for line in range(self.steps)]
        length = self.steps * (3 + self.chatter) + (self.wandering * 2 + 1 if self.wandering else 0)
        return Problem(
            id=id,
            prompt=(f"{name}\n" if name else "")
            + "".join(f"{SIGNS[sign]}{BLANK * (1 + self.chatter)}\n" for sign in signs),
            gold="".join(gold),
            data={"signs": signs, "groups": groups, "length": length, "first": self._first()},
        )

    def right(self, sign: int) -> int:
        """Returns the right direction at the sign with this number, from 1."""
        return derived_random(self.seed, "direction", sign).randint(1, self.options)

    def rate(self, sign: int) -> float:
        """Returns the teacher's rate of right choices at a sign."""
        return self.rates[sign % len(self.rates)]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns groups of lines, each of which needs one right choice."""
        if self.rule == "once":
            return tuple(tuple(range(first, self.steps, self.period)) for first in range(self.period))
        lines = {"all": range(self.steps), "first": [0], "last": [self.steps - 1]}[self.rule]
        return tuple((line,) for line in lines)

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        """The teacher's way. Choices and chatter are drawn from `seed` and the problem."""
        generator = derived_random(seed, problem.id, "demonstration")
        lines = []
        for sign in self._signs(problem):
            choice = self.right(sign)
            if generator.random() >= self.rate(sign):
                choice = generator.choice([other for other in range(1, self.options + 1) if other != choice])
            chatter = "".join(generator.choices(CHATTER[: self.letters], k=self.chatter))
            lines.append(f"{SIGNS[sign]}{choice}{chatter}\n")
        if self.wandering:
            at = SIGNS[self._signs(problem)[0 if self.wandering_first else -1]]
            free = generator.choices(range(1, self.options + 1), k=self.wandering)
            wandered = "".join(f"{at}{choice}" for choice in free) + "\n"
            lines.insert(0 if self.wandering_first else len(lines), wandered)
        return "".join(lines)

    def _first(self) -> int:
        """Returns the number of the line on which the answer begins."""
        return int(self.wandering_first and self.wandering > 0)

    def teacher_value(self, problem: Problem, prefix: str) -> float:
        """The probability that the teacher, going on from `prefix`, ends with a correct answer.

        `prefix` is any number of complete lines, by the teacher or by a policy. Raises ValueError where it
        ends within a line.
        """
        *_, rest = prefix.split("\n")
        if rest:
            raise ValueError(f"the prefix {prefix!r} ends within a line; give complete lines")
        signs, written = self._signs(problem), prefix.split("\n")[self._first() : -1]
        right = [int(line[1:2] == str(self.right(sign))) for line, sign in zip(written, signs)]
        misses = [1.0 - chance for chance in [*right, *map(self.rate, signs[len(right) :])]]
        return math.prod(1.0 - math.prod(misses[line] for line in group) for group in groups(problem))

    def decision(self, problem: Problem, response: str) -> str | None:
        """Returns the right direction behind the sign of a line that counts, else None."""
        line = response.count("\n") - self._first()
        place = len(response) - response.rfind("\n") - 1
        if place != 1 or not 0 <= line < self.steps or problem.gold[line] == BLANK:
            return None
        return problem.gold[line]

    def decided(self, problem: Problem, response: str) -> float | None:
        """Returns the reward where it is certain before the answer's end, else None."""
        on_line = len(response) - response.rfind("\n") > 2
        chosen = max(0, response.count("\n") - self._first() + on_line)
        right = [line[1:2] == gold for line, gold in zip(lines_of(problem, response)[:chosen], problem.gold)]
        won = [any(right[line] for line in group if line < chosen) for group in groups(problem)]
        if all(won):
            is_open = isinstance(self.grader, SignpostsGrader) and self.grader.whole
            return None if is_open and len(response) != problem.data["length"] else 1.0
        lost = any(not good and group[-1] < chosen for good, group in zip(won, groups(problem), strict=True))
        return 0.0 if lost else None

    def _signs(self, problem: Problem) -> list[int]:
        """The number of each line's sign."""
        shown: Sequence[int] = problem.data["signs"]
        return [shown[line % self.period] for line in range(self.steps)]

    @override
    def alphabet(self) -> str:
        directions = "".join(str(one) for one in range(1, self.options + 1))
        return SIGNS[: self.signs] + directions + CHATTER[: self.letters] + BLANK + "\n"


@ValueEstimator.register("decided")
@dataclass(frozen=True, kw_only=True)
class Decided(ValueEstimator):
    """The reward where the task knows that it is decided (`KnowsDecisions`), and else the mean reward of the
    other answers to the problem.

    Where one choice decides, these are the true values but for what the others' mean is off: the ceiling of
    a comparison, which samples nothing and which no real task has. **Biased** where several decide."""

    unbiased = False

    needs = (Need(Answers(2), "before anything is decided it takes the mean of the others"),)

    @property
    @override
    def continues(self) -> bool:
        return False

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        context = valuation.context
        values: list[StepValues] = []
        for answer in valuation.answers:
            tree, ids = answer.tree, answer.trajectory.response_ids
            task = context.task.of(tree.problem)
            if not isinstance(task, KnowsDecisions):
                raise ValueError(
                    "credit.values 'decided' is for tasks that know what decides, such as 'signposts'"
                )
            total = sum(leaf.reward for leaf in tree.leaves)
            others = (total - answer.reward) / (len(tree.leaves) - 1)
            step_values: StepValues = []
            for at in answer.states:
                decided = task.decided(tree.problem, context.codec.decode(ids[: at.length].tolist()))
                step_values.append(Value(others if decided is None else decided, 0.0))
            values.append(step_values)
        return values


@lru_cache(maxsize=16)
def _prompts(task: Signposts) -> list[int]:
    """Returns all prompts, each a number in the base of the signs, shuffled."""
    prompts = list(range(task.prompts()))
    derived_random(task.seed, "signposts", task.signs, task.period).shuffle(prompts)
    return prompts


@lru_cache(maxsize=16)
def _directions(task: Signposts) -> list[str]:
    return [str(task.right(sign)) for sign in range(task.signs)]
