"""Signposts: a generated toy task in which the decisive choices and the value of every state are known
exactly.

An answer is a sequence of lines. Each line shows a sign, a chosen direction and some meaningless letters,
such as ``B3kea``. The reward depends only on the directions of some lines (`rule`). Because all values are
known, a credit can be compared with the true advantages. `Signposts` is the task, `SignpostsGrader` its
grader, and `Decided` a value estimator that uses the task's knowledge.
"""

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
from treetune.tasks.mixed import task_of
from treetune.vocabulary import Problem


@runtime_checkable
class KnowsDecisions(Protocol):
    """A task whose answers are decided at a few positions, by one character each.

    The exact value of a policy's state can be computed by taking each choice at these positions, with its
    probability, and sampling only the text between them.
    """

    def decision(self, problem: Problem, response: str) -> str | None:
        """Returns the right next character if the next character decides, else None."""
        ...

    def decided_reward(self, problem: Problem, response: str) -> float | None:
        """Returns the reward if it no longer depends on the rest of the answer, else None."""
        ...


SignpostRule = Literal["all", "first", "last", "once"]

SIGN_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHATTER_LETTERS = "abcdefghijklmnop"
"""The letters that mean nothing."""
BLANK = "."
"""In a prompt, a blank holds the place of a direction or of a chatter letter. In a reference answer, which
has one character for each line, it marks a line whose direction does not matter."""


@Grader.register("signposts")
@dataclass(frozen=True, kw_only=True)
class SignpostsGrader(Grader):
    """Reads the direction on every line, which is the line's second character, and compares the directions of
    the decisive lines with the reference.

    The answer is correct if every group of lines of the problem has a right direction on at least one of its
    lines. A missing line is wrong.
    """

    whole: bool = False
    """Whether an answer must be as long as the teacher's. If false, an answer may leave out the lines after
    the last decisive one."""

    isolation = "inline"

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        if self.whole and len(response) != problem.data["length"]:
            return None
        if not response.strip():
            return None
        # A line begins with its sign, and its direction follows. A line without a direction counts as blank.
        return "".join(line[1:2] or BLANK for line in lines_of(problem, response))

    @override
    def verdict(self, extracted: str, problem: Problem) -> float:
        is_right = [chosen == gold for chosen, gold in zip(extracted, problem.gold)]
        # Each group of lines needs at least one right line. The answer may have fewer lines than the gold,
        # and a missing line is not right.
        for group in groups(problem):
            if not any(is_right[line] for line in group if line < len(is_right)):
                return 0.0
        return 1.0


def groups(problem: Problem) -> Sequence[Sequence[int]]:
    """Returns the groups of lines. Each group needs a right direction on at least one of its lines.

    Lines are counted from 0.

    Example: ``[[0, 3], [1, 4], [2, 5]]`` under the rule ``once``, for 6 lines and 3 signs.
    """
    line_groups: Sequence[Sequence[int]] = problem.data["groups"]
    return line_groups


def lines_of(problem: Problem, response: str) -> Sequence[str]:
    """Returns the lines of the response that can be decisive."""
    first: int = problem.data["first"]
    return response.split("\n")[first : first + len(problem.gold)]


@Task.register("signposts")
@dataclass(frozen=True, kw_only=True)
class Signposts(GeneratedTask):
    r"""An answer has `steps` lines. Each shows a sign, then a direction (a digit from 1 to `options`), then
    `chatter` letters that mean nothing: ``B3kea\nF1oab\nB2hhc\n``. Signs repeat after `period` lines. The
    prompt shows the first `period` lines with blanks, ``B....\nF....\n``, so that a tiny model finds each
    sign at the same distance.

    The right direction at a sign is the same in all problems, and the prompt doesn't show it. The `rule` says
    which directions decide:

    | rule | an answer is correct where |
    |---|---|
    | ``all`` | every direction is right: one wrong direction spoils the answer |
    | ``first`` | the first direction is right; the other lines don't matter |
    | ``last`` | the last direction is right: the reward comes late |
    | ``once`` | at every sign one of the directions is right: a wrong one can be repaired at the sign's next
      line |

    With `wandering` > 0, the answer has one more line, with `wandering` free directions at the answer's last
    sign: ``F2F4F1`` for 3. With `wandering_first`, this line is the first one, at the answer's first sign.
    Free directions don't influence the reward but look like the decisive ones: a credit for whole answers
    gives them the same advantage, and this noise reaches the same weights. With `names` > 0, a prompt begins
    with a line of `names` letters. They mean nothing either, and make more problems possible.

    The **teacher** chooses the right direction with the rate of its sign, otherwise one of the others
    uniformly. Sign i has the rate i modulo the number of `rates`. Chatter is drawn uniformly from `letters`
    letters. So the teacher's value of each state is known (`teacher_value`).

    The right directions and the split into problem sets derive from `seed`, not from the run's seed. The
    held-out problems don't change with `train_size`. Raises ValueError where there are too few different
    prompts.
    """

    steps: Annotated[int, Ge(1), Le(48)] = 6
    period: Annotated[int, Ge(1), Le(4)] = 3
    rule: SignpostRule = "all"
    rates: Annotated[tuple[Annotated[float, Ge(0), Le(1)], ...], MinLen(1)] = (0.9,)
    options: Annotated[int, Ge(2), Le(9)] = 4
    chatter: Annotated[int, Ge(0), Le(64)] = 3
    letters: Annotated[int, Ge(1), Le(len(CHATTER_LETTERS))] = 8
    signs: Annotated[int, Ge(1), Le(len(SIGN_LETTERS))] = 20
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
        needed, possible = sum(self.sizes().values()), self.number_of_prompts()
        if needed > possible:
            raise ValueError(
                f"train_size + validation_size + test_size is {needed}, but {self.period} signs out of"
                f" {self.signs} make only {possible} different prompts: ask for fewer, or for more signs or"
                " names"
            )
        if self.period > self.steps:
            raise ValueError(f"period is {self.period}, more than the {self.steps} steps of a way")

    def number_of_prompts(self) -> int:
        """Returns the number of different prompts."""
        return self.signs**self.period * self.letters**self.names

    @override
    def generate(self, count: int) -> Sequence[int]:
        return _shuffled_prompts(self)[:count]

    @override
    def problem(self, id: str, generated: int) -> Problem:
        # `generated` is the number of the problem. Its lowest digits, in base `self.signs`, are the signs of
        # a period. What is left above them is written in base `self.letters`: its digits are the letters of
        # the name, of which there are `self.names`.
        signs = tuple(generated // self.signs**digit % self.signs for digit in range(self.period))
        name_number = generated // self.signs**self.period
        letters = [name_number // self.letters**digit % self.letters for digit in range(self.names)]
        name = "".join(CHATTER_LETTERS[letter] for letter in letters)
        prompt = f"{name}\n" if name else ""
        for sign in signs:
            blanks = BLANK * (1 + self.chatter)  # for the direction and the chatter of an answer's line
            prompt += f"{SIGN_LETTERS[sign]}{blanks}\n"

        groups, right_directions = self.groups(), _right_directions(self)
        decisive_lines: set[int] = set()
        for group in groups:
            decisive_lines |= set(group)
        gold = ""
        for line in range(self.steps):
            sign = signs[line % self.period]
            gold += right_directions[sign] if line in decisive_lines else BLANK
        length = self.steps * (3 + self.chatter)  # a line has a sign, a direction, chatter and a line break
        if self.wandering:  # one more line: a sign and a direction for each free choice, and a line break
            length += self.wandering * 2 + 1
        return Problem(
            id=id,
            prompt=prompt,
            gold=gold,
            data={
                "signs": signs,
                "groups": groups,
                "length": length,
                "first": self._wandering_lines_at_start(),  # the number of the first line that can decide
            },
        )

    def right(self, sign: int) -> int:
        """Returns the right direction, from 1 on, at the sign with this number."""
        return derived_random(self.seed, "direction", sign).randint(1, self.options)

    def rate(self, sign: int) -> float:
        """Returns the teacher's rate of right choices at a sign."""
        return self.rates[sign % len(self.rates)]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of lines. Each group needs a right direction on at least one of its lines."""
        if self.rule == "once":
            # The lines of a sign are a group: signs repeat after `period` lines.
            return tuple(tuple(range(first, self.steps, self.period)) for first in range(self.period))
        # Under all other rules, each line that decides is a group by itself.
        lines = {"all": range(self.steps), "first": [0], "last": [self.steps - 1]}[self.rule]
        return tuple((line,) for line in lines)

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns an answer of the teacher. Directions and chatter are drawn from `seed` and the problem.

        At each sign the teacher takes the right direction with the probability `rate`, and otherwise one of
        the others. With `wandering`, one more line has free directions that don't influence the reward.
        """
        generator = derived_random(seed, problem.id, "demonstration")
        lines = []
        for sign in self._signs(problem):
            choice = self.right(sign)
            if generator.random() >= self.rate(sign):
                wrong_directions = [other for other in range(1, self.options + 1) if other != choice]
                choice = generator.choice(wrong_directions)
            chatter = "".join(generator.choices(CHATTER_LETTERS[: self.letters], k=self.chatter))
            lines.append(f"{SIGN_LETTERS[sign]}{choice}{chatter}\n")
        if self.wandering:
            signs = self._signs(problem)
            sign_letter = SIGN_LETTERS[signs[0] if self.wandering_first else signs[-1]]
            free_choices = generator.choices(range(1, self.options + 1), k=self.wandering)
            wandering_line = "".join(f"{sign_letter}{choice}" for choice in free_choices) + "\n"
            lines = [wandering_line, *lines] if self.wandering_first else [*lines, wandering_line]
        return "".join(lines)

    def _wandering_lines_at_start(self) -> int:
        """Returns 1 if an answer begins with a line of wandering, else 0. No such line can be decisive."""
        return int(self.wandering_first and self.wandering > 0)

    def teacher_value(self, problem: Problem, prefix: str) -> float:
        """Returns the probability that the teacher completes `prefix` to a correct answer.

        Args:
            problem: The problem.
            prefix: Any number of complete lines, written by the teacher or by a policy.

        Raises:
            ValueError: The prefix ends within a line.
        """
        *lines, unfinished_line = prefix.split("\n")
        if unfinished_line:
            raise ValueError(f"the prefix {prefix!r} ends within a line; give complete lines")
        written_lines = lines[self._wandering_lines_at_start() :]  # those that can be decisive
        # The probability that each line is wrong: 0 or 1 for written ones.
        wrong_probabilities: list[float] = []
        for number, sign in enumerate(self._signs(problem)):
            if number < len(written_lines):
                is_right = written_lines[number][1:2] == str(self.right(sign))
                wrong_probabilities.append(1.0 - int(is_right))
            else:
                wrong_probabilities.append(1.0 - self.rate(sign))
        # An answer is correct if each group of lines has at least one right line. The lines are independent.
        value = 1.0
        for group in groups(problem):
            all_wrong = math.prod(wrong_probabilities[line] for line in group)
            value *= 1.0 - all_wrong
        return value

    def decision(self, problem: Problem, response: str) -> str | None:
        """Returns the right direction if the response ends where a decisive direction follows, else None.

        A line begins with the letter of its sign, and the second character is the direction. The direction of
        a line is decisive if the reward depends on it.
        """
        # The number of the line at which the response ends. Some answers begin with wandering: lines without
        # a direction that counts. They aren't numbered, because the reference answer `problem.gold` has no
        # character for them.
        line = response.count("\n") - self._wandering_lines_at_start()
        characters_on_line = len(response) - response.rfind("\n") - 1
        ends_after_sign = characters_on_line == 1
        if not ends_after_sign or not 0 <= line < self.steps:
            return None
        right_direction = problem.gold[line]
        return None if right_direction == BLANK else right_direction

    def decided_reward(self, problem: Problem, response: str) -> float | None:
        """Returns the reward if it no longer depends on the rest of the answer, else None."""
        characters_on_line = len(response) - response.rfind("\n") - 1
        has_direction = characters_on_line >= 2  # the last line's sign is followed by a direction
        # A line of wandering at the start can't be decisive: it isn't counted, and `lines_of` leaves it out.
        finished_lines = response.count("\n") - self._wandering_lines_at_start()
        lines_with_direction = max(0, finished_lines + has_direction)
        lines = lines_of(problem, response)[:lines_with_direction]
        is_right = [line[1:2] == gold for line, gold in zip(lines, problem.gold)]
        # An answer is correct if each group of lines has at least one line with the right direction.
        all_have_right_line = True
        for group in groups(problem):
            has_right_line = any(is_right[line] for line in group if line < lines_with_direction)
            if has_right_line:
                continue
            all_have_right_line = False
            if group[-1] < lines_with_direction:
                return 0.0  # none of the group's lines is right, and all of them are written
        if not all_have_right_line:
            return None
        # A grader of whole answers also needs the right length, which only a finished answer has.
        needs_length = isinstance(self.grader, SignpostsGrader) and self.grader.whole
        if needs_length and len(response) != problem.data["length"]:
            return None
        return 1.0

    def _signs(self, problem: Problem) -> list[int]:
        """Returns the number of each line's sign."""
        signs_of_prompt: Sequence[int] = problem.data["signs"]
        return [signs_of_prompt[line % self.period] for line in range(self.steps)]

    @override
    def alphabet(self) -> str:
        directions = "".join(str(direction) for direction in range(1, self.options + 1))
        return SIGN_LETTERS[: self.signs] + directions + CHATTER_LETTERS[: self.letters] + BLANK + "\n"


@ValueEstimator.register("decided")
@dataclass(frozen=True, kw_only=True)
class Decided(ValueEstimator):
    """Takes the reward as the value of a state in which the task knows that the reward is decided
    (`KnowsDecisions`), and the mean reward of the problem's other answers in every other state. Nothing is
    sampled.

    Where a single choice decides, these values are the true ones, except for the error of the mean of the
    other answers. They then serve as an upper bound in comparisons; real tasks don't have such a bound.
    **Biased** where several choices decide."""

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
            task = task_of(context.task, tree.problem)
            if not isinstance(task, KnowsDecisions):
                raise ValueError(
                    "credit.values 'decided' is for tasks that know what decides, such as 'signposts'"
                )
            total = sum(leaf.reward for leaf in tree.leaves)
            # The value of a state in which nothing is decided yet. `needs` demands two answers or more.
            mean_of_others = (total - answer.reward) / (len(tree.leaves) - 1)
            step_values: StepValues = []
            for answer_state in answer.states:
                text = context.codec.decode(ids[: answer_state.length].tolist())
                decided = task.decided_reward(tree.problem, text)  # the reward, or None: not decided yet
                # 0.0 is the variance of the value: nothing is sampled to estimate it.
                step_values.append(Value(mean_of_others if decided is None else decided, 0.0))
            values.append(step_values)
        return values


@lru_cache(maxsize=16)
def _shuffled_prompts(task: Signposts) -> list[int]:
    """Returns the numbers of all prompts, shuffled."""
    prompts = list(range(task.number_of_prompts()))
    derived_random(task.seed, "signposts", task.signs, task.period).shuffle(prompts)
    return prompts


@lru_cache(maxsize=16)
def _right_directions(task: Signposts) -> list[str]:
    """Returns the right direction at each sign."""
    return [str(task.right(sign)) for sign in range(task.signs)]
