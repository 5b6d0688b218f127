"""Languages whose true values are known: answers are chains of steps, and a policy is a table.

A step moves an answer from one status to another, and says so in words that don't matter. Whether it is
correct is decided by its last status. So a policy is a table of chances, the value of every state comes by
dynamic programming, and so does the exact gradient. What credit makes of such answers can be held against the
truth.

| language | how value changes |
|---|---|
| ``slips`` | each step may go wrong, for good: one step decides |
| ``repair`` | each step may go wrong or be put right |
| ``fork`` | one step in the middle chooses between a good and a bad route, late steps fail now and then |
| ``walk`` | every step moves the chances a little |
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from tests.support import contexts
from treetune.inference.base import Completion, Engine, Later, OnResult, Request, SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.seeds import derive_seed
from treetune.tasks.base import Split, Task
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import (
    Episode,
    Grade,
    Problem,
    TextCodec,
    Trajectory,
    logprob_array,
    token_array,
)

Language = Literal["slips", "repair", "fork", "walk"]
LANGUAGES: tuple[Language, ...] = ("slips", "repair", "fork", "walk")

WORDINGS, WORDS_OF_STEP = 4, 3
"""How many ways there are to say each word, and words of a step: the first tells its status."""
LEVELS = 7
EOS = 0

Gradient = dict[tuple[int, ...], float]
"""By the state, what is chosen there (0: a status, 1: a word) and which."""


@dataclass(frozen=True)
class Chain:
    """One problem's policy. `difficulty` (from 0) makes steps go wrong more often, `skill` (at most 1)
    less."""

    language: Language
    steps: int
    difficulty: int
    skill: float

    @property
    def statuses(self) -> int:
        return {"slips": 2, "repair": 2, "fork": 4, "walk": LEVELS}[self.language]

    @property
    def first(self) -> int:
        return LEVELS // 2 if self.language == "walk" else 0

    def chances(self, step: int, status: int) -> list[float]:
        """Of each status behind a step that begins in this one."""
        hard = (1 + 0.5 * self.difficulty) * (1 - self.skill)
        chances = [0.0] * self.statuses
        if self.language in ("slips", "repair"):
            wrong = min(0.9, 0.2 * hard)
            right = 0.25 * self.skill if self.language == "repair" else 0.0
            chances[:] = [1 - wrong, wrong] if status == 0 else [right, 1 - right]
        elif self.language == "fork":
            if status == 0 and step == self.steps // 3:
                good = min(0.95, 0.25 + 0.6 * self.skill)
                chances[1], chances[2] = good, 1 - good
            elif status in (1, 2):
                fails = min(0.9, 0.03 * hard if status == 1 else 0.35 * hard)
                chances[status], chances[3] = 1 - fails, fails
            else:
                chances[status] = 1.0
        else:
            up = min(0.9, max(0.1, 0.5 + 0.25 * (self.skill - 0.5) - 0.05 * self.difficulty))
            chances[max(status - 1, 0)] += 1 - up
            chances[min(status + 1, LEVELS - 1)] += up
        return chances

    def is_correct(self, status: int) -> bool:
        if self.language == "walk":
            return status > LEVELS // 2
        return status in (1, 2) if self.language == "fork" else status == 0

    def value(self, step: int, status: int) -> float:
        """Of the state behind `step` steps."""
        return _values(self)[step][status]


@cache
def _values(chain: Chain) -> list[list[float]]:
    """Backwards from the end."""
    rows = [[float(chain.is_correct(status)) for status in range(chain.statuses)]]
    for step in reversed(range(chain.steps)):
        after = rows[0]
        rows.insert(
            0,
            [
                math.fsum(p * v for p, v in zip(chain.chances(step, status), after, strict=True))
                for status in range(chain.statuses)
            ],
        )
    return rows


def token(status: int, word: int, wording: int) -> int:
    return 1 + (status * WORDS_OF_STEP + word) * WORDINGS + wording


def statuses_of(token_ids: Sequence[int], first: int) -> list[int]:
    """The status before each step of an answer that may not be at its end, and the one behind its last whole
    first word."""
    told = [
        (one - 1) // (WORDS_OF_STEP * WORDINGS)
        for place, one in enumerate(one for one in token_ids if one != EOS)
        if place % WORDS_OF_STEP == 0
    ]
    return [first, *told]


@dataclass(frozen=True, kw_only=True)
class ChainGrader(Grader):
    """Looks at the last status."""

    isolation = "inline"

    def grade(self, response: str, problem: Problem) -> Grade:
        chain: Chain = problem.data["chain"]
        status = statuses_of([int(word) for word in response.split()], chain.first)[-1]
        return Grade(float(chain.is_correct(status)), "ok")


@dataclass(frozen=True, kw_only=True)
class ChainTask(Task):
    """`count` problems of rising difficulty, over and over again."""

    language: Language
    steps: int = 12
    skill: float = 0.5
    count: int = 128
    difficulties: int = 4
    grader: Grader = field(default_factory=ChainGrader)

    def step_boundaries(self, response: str) -> list[int]:
        words = response.split(" ")
        ends = [len(" ".join(words[:end])) for end in range(WORDS_OF_STEP, len(words), WORDS_OF_STEP)]
        return [0, *ends, len(response)] if response else [0]

    def problems(self, split: Split) -> list[Problem]:
        return [
            Problem(
                id=f"{split}/{number}",
                prompt=str(number),
                gold="",
                data={"chain": Chain(self.language, self.steps, number % self.difficulties, self.skill)},
            )
            for number in range(self.count)
        ]


class InlineGrades:
    """Grades at once, in this thread: what stands for the pool of processes."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        future: Future[Grade] = Future()
        future.set_result(self._grader.grade(response, problem))
        return future


class ChainEngine(Engine):
    """Samples from the tables of these problems, whose number is the prompt."""

    version = 0

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._chains: list[Chain] = [problem.data["chain"] for problem in problems]
        self.tokens = 0

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        waiting = list(requests)
        for index, request in enumerate(waiting):  # what follows is put behind the rest
            assert isinstance(request, Request), "no answer here waits for anything"
            results.append([self._completion(request, sample) for sample in range(request.n)])
            if on_result is not None:
                waiting += on_result(index, results[index]) or ()
        return results

    def _completion(self, request: Request, sample: int) -> Completion:
        number, *begun = request.prompt_ids.tolist()
        rng = random.Random(request.seed + sample)
        completion = continued(self._chains[number], begun, rng)
        self.tokens += len(completion.token_ids)
        return completion


def continued(chain: Chain, begun: Sequence[int], rng: random.Random) -> Completion:
    """The rest of an answer."""
    status, place = statuses_of(begun, chain.first)[-1], len(begun)
    written: list[int] = []
    logprobs: list[float] = []
    while place < chain.steps * WORDS_OF_STEP:
        step, word = divmod(place, WORDS_OF_STEP)
        probability = 1.0
        if word == 0:
            chances = chain.chances(step, status)
            status = rng.choices(range(chain.statuses), chances)[0]
            probability = chances[status]
        written.append(token(status, word, rng.randrange(WORDINGS)))
        logprobs.append(math.log(probability / WORDINGS))
        place += 1
    ids, columns = token_array([*written, EOS]), logprob_array([*logprobs, 0.0])
    return Completion(ids, columns, "stop", policy_version=0)


def context_of(task: ChainTask, seed: int) -> RolloutContext:
    """What credit is lent."""
    length = task.steps * WORDS_OF_STEP + 1
    return contexts.context_of(
        task=task,
        engine=ChainEngine(task.problems("train")),
        grader=InlineGrades(task.grader),  # type: ignore[arg-type]
        codec=TextCodec(
            encode=lambda text: [int(word) for word in text.split()],
            decode=lambda ids: " ".join(str(one) for one in ids if one != EOS),
            eos_id=EOS,
        ),
        seed=seed,
        iteration=0,
        context_length=length + 1,
        sampling=SamplingParams(max_tokens=length),
    )


def answers_of_chains(task: ChainTask, samples: int, seed: int) -> list[Trajectory]:
    """`samples` answers to each problem."""
    answers = []
    for number, problem in enumerate(task.problems("train")):
        chain: Chain = problem.data["chain"]
        for sample in range(samples):
            rng = random.Random(derive_seed(seed, problem.id, sample))
            completion = continued(chain, [], rng)
            text = " ".join(map(str, completion.token_ids[:-1].tolist()))
            answers.append(
                Trajectory(
                    problem=problem,
                    sample=sample,
                    prompt_ids=token_array([number]),
                    segments=(completion.segment(),),
                    finish_reason="stop",
                    text=text,
                    grade=task.grader.grade(text, problem),
                    step_ends=step_ends(chain.steps),
                )
            )
    return answers


def step_ends(steps: int) -> tuple[int, ...]:
    """The end token belongs to the last step."""
    ends = [step * WORDS_OF_STEP for step in range(1, steps + 1)]
    return (*ends[:-1], ends[-1] + 1)


def true_values(answer: Trajectory) -> tuple[float, ...]:
    """Before each of its steps."""
    chain: Chain = answer.problem.data["chain"]
    statuses = statuses_of(answer.response_ids.tolist(), chain.first)
    return tuple(chain.value(step, statuses[step]) for step in range(chain.steps))


def gradient(answer: Trajectory, episode: Episode) -> Gradient:
    """Σ over its tokens of advantage × the gradient of the token's log-prob by the table's logits: of each
    status where one is chosen, of each wording of every word."""
    chain: Chain = answer.problem.data["chain"]
    statuses = statuses_of(answer.response_ids.tolist(), chain.first)
    advantages = episode.advantages
    assert advantages is not None
    found: Gradient = {}
    for place, one in enumerate(answer.response_ids.tolist()[:-1]):
        step, word = divmod(place, WORDS_OF_STEP)
        before, after, weight = statuses[step], statuses[step + 1], float(advantages[place])
        where = (chain.difficulty, step, before)
        if word == 0:
            _add(found, (*where, 0), chain.chances(step, before), after, weight)
        _add(found, (*where, after, 1, word), [1 / WORDINGS] * WORDINGS, (one - 1) % WORDINGS, weight)
    return found


def _add(found: Gradient, key: tuple[int, ...], chances: Sequence[float], chosen: int, weight: float) -> None:
    for option, chance in enumerate(chances):
        slot = (*key, option)
        found[slot] = found.get(slot, 0.0) + weight * ((option == chosen) - chance)


def exact_gradient(task: ChainTask) -> Gradient:
    """The expectation of `gradient` with true advantages: the mean over the problems."""
    total: Gradient = {}
    problems = task.problems("train")
    for problem in problems:
        chain: Chain = problem.data["chain"]
        there = {chain.first: 1.0}
        for step in range(chain.steps):
            following: dict[int, float] = {}
            for status, visits in there.items():
                chances = chain.chances(step, status)
                value = chain.value(step, status)
                for after, chance in enumerate(chances):
                    slot = (chain.difficulty, step, status, 0, after)
                    gain = chain.value(step + 1, after) - value
                    total[slot] = total.get(slot, 0.0) + visits * chance * gain / len(problems)
                    following[after] = following.get(after, 0.0) + visits * chance
            there = {status: visits for status, visits in following.items() if visits}
    return total


def length(one: Mapping[tuple[int, ...], float]) -> float:
    return math.sqrt(math.fsum(value * value for value in one.values()))


def cosine(one: Gradient, other: Gradient) -> float:
    norms = length(one) * length(other)
    return math.fsum(value * other.get(slot, 0.0) for slot, value in one.items()) / norms if norms else 0.0
