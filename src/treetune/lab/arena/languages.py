"""Languages with exact values: a policy is a table, so that values, advantages and gradients are known.

A token moves an answer from one status to another, and says so in one of several wordings that mean nothing.
An answer is correct by its last status. Credit of sampled answers is compared with the exact gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from treetune.credit.base import TokenCredit
from treetune.credit.literature.token_level import Distributions
from treetune.engine.base import Completion, Engine, Later, OnResult, Request, SamplingParams
from treetune.rollouts.context import AnswerSettings, RolloutContext, ShapingMemory
from treetune.tasks.base import Split, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Column, Episode, Grade, Problem, TextCodec, Trajectory

if TYPE_CHECKING:
    from numpy.typing import NDArray

EOS = 0


@dataclass(frozen=True, eq=False)
class Language:
    """One policy of one language. T tokens, S statuses, O ways to go on, at most W wordings of a token.

    The policy has a logit for each way at each place and status, and one for each wording.
    """

    after_TSO: NDArray[np.intp]
    """The status behind a token, for each way from a status."""
    chances_TSO: NDArray[np.float64]
    """The probability of each way."""
    wordings_TS: NDArray[np.intp]
    """How many wordings a token has, by the status before it. All are equally likely."""
    correct_S: NDArray[np.bool_]
    """Which statuses at the end are correct."""
    step: int = 1
    """Tokens of a step."""

    @property
    def length(self) -> int:
        return len(self.after_TSO)

    @cached_property
    def step_ends(self) -> tuple[int, ...]:
        """Where steps end. The end token, which is certain, belongs to the last one."""
        ends = range(self.step, self.length + 1, self.step)
        return (*ends[:-1], self.length + 1)

    @cached_property
    def values_TS(self) -> NDArray[np.float64]:
        """The probability of a correct answer before each token, and behind the last."""
        rows = [self.correct_S.astype(float)]
        for after_SO, chances_SO in zip(self.after_TSO[::-1], self.chances_TSO[::-1], strict=True):
            rows.append((chances_SO * rows[-1][after_SO]).sum(1))
        return np.array(rows[::-1])

    @cached_property
    def most_wordings(self) -> int:
        return int(self.wordings_TS.max())

    def statuses(self, token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.intp]:
        """Returns the status before each token of an answer, and behind the last. `token_ids` may end with
        the end token, or before."""
        ids = np.asarray(token_ids)[: self.length]
        ids = ids[ids != EOS]
        return np.concatenate([[0], (ids - 1) // self.most_wordings]).astype(np.intp)

    def sample(self, begun: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Completion]:
        """Returns the rest of each answer. A rest is drawn by its seed alone."""
        status_N = np.array([self.statuses(ids)[-1] for ids in begun])
        place_N = np.array([len(ids) for ids in begun])
        seed_N = np.array(seeds, np.uint64)
        ids_NT: NDArray[np.int32] = np.zeros((len(begun), self.length + 1), np.int32)
        logprobs_NT = np.zeros(ids_NT.shape)
        for place in range(int(place_N.min(initial=self.length)), self.length):
            active = np.flatnonzero(place_N <= place)
            before = status_N[active]
            way = _drawn(self.chances_TSO[place][before], _uniform(seed_N[active], 2 * place))
            status_N[active] = after = self.after_TSO[place][before, way]
            wordings = self.wordings_TS[place][before]
            wording = (wordings * _uniform(seed_N[active], 2 * place + 1)).astype(int)
            ids_NT[active, place] = 1 + after * self.most_wordings + wording
            logprobs_NT[active, place] = np.log(self.chances_TSO[place][before, way] / wordings)
        rests = zip(ids_NT, logprobs_NT, place_N, strict=True)
        return [Completion(ids[start:], column[start:], "stop", 0) for ids, column, start in rests]

    def distributions(self, rows: Sequence[Episode]) -> list[tuple[Column, Column]]:
        """Returns for each row Σ π² and the entropy in nats of the distribution of each token, the certain
        end token too."""
        chances_TSO, wordings_TS = self.chances_TSO, self.wordings_TS
        squares_TS = (chances_TSO**2).sum(2) / wordings_TS
        entropy_TS = np.log(wordings_TS) - np.where(
            chances_TSO > 0, chances_TSO * np.log(np.where(chances_TSO > 0, chances_TSO, 1)), 0
        ).sum(2)
        places = np.arange(self.length)
        found = []
        for row in rows:
            statuses = self.statuses(row.response_ids)[:-1]
            found.append(
                (np.append(squares_TS[places, statuses], 1.0), np.append(entropy_TS[places, statuses], 0.0))
            )
        return found

    def gradients(
        self, answers: Sequence[Trajectory], episodes: Sequence[Episode], groups: Sequence[int]
    ) -> NDArray[np.float32]:
        """Returns one row for each group, [groups, parameters]: the mean over its answers of Σ advantage ×
        ∇ log-prob over trained tokens. `groups` says how many answers each group has, in their order."""
        count = len(groups)
        owner: NDArray[np.intp] = np.repeat(np.arange(count), groups)
        status_NT = np.stack([self.statuses(one.response_ids) for one in answers])
        ids_NT = np.stack([one.response_ids[: self.length] for one in answers])
        advantages_NT = np.stack([(e.advantages * e.trained)[: self.length] for e in episodes])
        advantages_NT = advantages_NT / np.array(groups)[owner][:, None]
        wording_NT = (ids_NT - 1) % self.most_wordings
        rows = []
        statuses, ways = self.after_TSO.shape[1:]
        for place in range(self.length):
            before, after = status_NT[:, place], status_NT[:, place + 1]
            weight = advantages_NT[:, place]
            of_ways = np.zeros((count, statuses, ways))
            taken = (self.after_TSO[place][before] == after[:, None]) & (self.chances_TSO[place][before] > 0)
            np.add.at(of_ways, (owner, before), weight[:, None] * (taken - self.chances_TSO[place][before]))
            of_wordings = np.zeros((count, statuses, self.most_wordings))
            possible = self.wordings_TS[place][before][:, None]
            options = np.arange(self.most_wordings)[None, :]
            score = (options == wording_NT[:, place, None]) - (options < possible) / possible
            np.add.at(of_wordings, (owner, before), weight[:, None] * score)
            rows += [of_ways.reshape(count, -1), of_wordings.reshape(count, -1)]
        return np.concatenate(rows, 1).astype(np.float32)


def _drawn(chances_NO: NDArray[np.float64], uniform_N: NDArray[np.float64]) -> NDArray[np.intp]:
    return np.minimum((uniform_N[:, None] >= chances_NO.cumsum(1)).sum(1), (chances_NO > 0).sum(1) - 1)


def _uniform(seeds: NDArray[np.uint64], counter: int) -> NDArray[np.float64]:
    """Returns numbers from 0 to 1 by seed and counter alone, whatever is drawn beside them.

    They are splitmix64 of both (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        mixed = seeds + np.uint64(counter + 1) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(float) / 2.0**53


# The languages


def table(
    length: int,
    statuses: int,
    chances: Callable[[int, int], Mapping[int, float]],
    wordings: Callable[[int, int], int],
    correct: Sequence[int],
    step: int = 1,
) -> Language:
    """Returns the language in which ``chances(place, status)`` are the chances of each status behind a token,
    and ``wordings(place, status)`` the number of its wordings. Answers begin in status 0."""
    ways_TS = [
        [
            {one: chance for one, chance in chances(place, status).items() if chance}
            for status in range(statuses)
        ]
        for place in range(length)
    ]
    most = max(len(ways) for ways_S in ways_TS for ways in ways_S)
    after: NDArray[np.intp] = np.zeros((length, statuses, most), np.intp)
    of_way = np.zeros((length, statuses, most))
    for place, ways_S in enumerate(ways_TS):
        for status, ways in enumerate(ways_S):
            after[place, status, : len(ways)] = list(ways)
            of_way[place, status, : len(ways)] = list(ways.values())
    counts = [[wordings(place, status) for status in range(statuses)] for place in range(length)]
    return Language(after, of_way, np.array(counts), np.isin(np.arange(statuses), correct), step)


def decision(length: int, place: int, success: float = 0.25) -> Language:
    """One token decides, the one at `place`; all others are one of two free choices."""

    def chances(at: int, status: int) -> Mapping[int, float]:
        return {1: success, 2: 1 - success} if at == place and status == 0 else {status: 1.0}

    return table(length, 3, chances, lambda at, status: 1 if at == place else 2, [1])


def every_choice(length: int, success: float = 0.25) -> Language:
    """Every choice must be right. After a wrong one the others don't matter."""
    right = success ** (1 / length)
    return table(
        length,
        2,
        lambda at, status: {1: 1.0} if status else {0: right, 1: 1 - right},
        lambda at, status: 1 + status,
        [0],
    )


def majority(length: int, success: float = 0.25) -> Language:
    """More than half of the choices must be right. The status counts the right ones."""

    def of(right: float) -> Language:
        return table(
            length,
            length + 1,
            lambda place, status: (
                {status + 1: right, status: 1 - right} if status <= place else {status: 1.0}
            ),
            lambda place, status: 1,
            range(length // 2 + 1, length + 1),
        )

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle).values_TS[0, 0] < success else (low, middle)
    return of(low)


def luck(length: int, good: float = 0.6, bad: float = 0.1, success: float = 0.25) -> Language:
    """The first token decides how likely the last one is to be correct."""
    chosen = (success - bad) / (good - bad)

    def chances(place: int, status: int) -> Mapping[int, float]:
        if place == 0 and status == 0:
            return {1: chosen, 2: 1 - chosen}
        if place == length - 1 and status in (1, 2):
            right = good if status == 1 else bad
            return {3: right, 4: 1 - right}
        return {status: 1.0}

    return table(length, 5, chances, lambda place, status: 1 if place in (0, length - 1) else 2, [3])


def wordy(
    steps: int, statuses: int, chances: Callable[[int, int], Mapping[int, float]], correct: Sequence[int]
) -> Language:
    """Steps of three words, each said in one of four wordings; the first word of a step moves."""
    return table(
        3 * steps,
        statuses,
        lambda place, status: {status: 1.0} if place % 3 else chances(place // 3, status),
        lambda place, status: 4,
        correct,
        step=3,
    )


def slips(steps: int = 12, wrong: float = 0.11, repaired: float = 0.0) -> Language:
    """Each step may go wrong, and be `repaired` by a later one."""
    return wordy(
        steps,
        2,
        lambda step, status: {0: repaired, 1: 1 - repaired} if status else {0: 1 - wrong, 1: wrong},
        [0],
    )


def fork(steps: int = 12, good: float = 0.5, fails: float = 0.025, worse: float = 0.3) -> Language:
    """One step chooses between a good and a bad route, on which later steps fail now and then."""

    def chances(step: int, status: int) -> Mapping[int, float]:
        if status == 0:
            return {1: good, 2: 1 - good} if step == steps // 3 else {0: 1.0}
        lost = {1: fails, 2: worse}.get(status)
        return {3: 1.0} if lost is None else {status: 1 - lost, 3: lost}

    return wordy(steps, 4, chances, [1, 2])


def walk(steps: int = 12, up: float = 0.44, levels: int = 7) -> Language:
    """Every step moves the chances a little. Status 0 is the middle level, where answers begin."""
    order = [levels // 2, *(level for level in range(levels) if level != levels // 2)]

    def chances(step: int, status: int) -> Mapping[int, float]:
        level = order[status]
        below, above = order.index(max(level - 1, 0)), order.index(min(level + 1, levels - 1))
        return {above: up, below: 1 - up}

    return wordy(
        steps, levels, chances, [status for status, level in enumerate(order) if level > levels // 2]
    )


CHOICES: Mapping[str, Callable[[int, float], Language]] = {
    "first": lambda length, success: decision(length, 0, success),
    "middle": lambda length, success: decision(length, length // 2, success),
    "last": lambda length, success: decision(length, length - 1, success),
    "luck": lambda length, success: luck(length, success=success),
    "majority": majority,
    "all": every_choice,
}
"""Languages of so many choices and such a chance of a correct answer, by what decides."""
WORDY: Mapping[str, Callable[[], Language]] = {
    "slips": slips,
    "repair": partial(slips, wrong=0.16, repaired=0.11),
    "fork": fork,
    "walk": walk,
}
LANGUAGES = (
    *("first of 2", "first of 8", "first of 32"),
    *("middle of 8", "middle of 32"),
    *("last of 2", "last of 8", "last of 32"),
    *("majority of 9", "majority of 33", "luck of 16", "all of 8", "first of 8 at 5 %"),
    *WORDY,
)
"""The languages of the arena. They are frozen, so that scores of before can be compared with today's."""


def language_of(name: str) -> Language:
    """Returns a language by its name, such as ``slips``, ``first of 8`` or ``last of 12 at 5 %``, where a
    quarter of the answers is correct unless a share is given. Raises ValueError for an unknown one."""
    if name in WORDY:
        return WORDY[name]()
    known = re.fullmatch(r"(\w+) of ([1-9]\d?)(?: at ([1-9]\d?) %)?", name)
    if known is None or known[1] not in CHOICES:
        raise ValueError(
            f"there is no language {name!r}: take one of {', '.join(WORDY)}, or 'WHAT of N' or 'WHAT of N at"
            f" P %' with {', '.join(CHOICES)} for what decides and N choices"
        )
    return CHOICES[known[1]](int(known[2]), int(known[3] or 25) / 100)


# What credit and rollouts are lent


@dataclass(frozen=True, kw_only=True)
class LastStatus(Grader):
    """Looks at an answer's last status."""

    isolation = "inline"

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        language: Language = problem.data["language"]
        status = (int(response.rsplit(" ", 1)[-1]) - 1) // language.most_wordings
        return Grade(float(language.correct_S[status]), "ok")


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """`count` problems of one language. They differ by nothing: each is one more sample of the same."""

    language: Language
    count: int
    grader: Grader = field(default_factory=LastStatus)

    @override
    def step_boundaries(self, response: str) -> list[int]:
        words = response.split(" ")
        starts = range(self.language.step, len(words), self.language.step)
        return [0, *(len(" ".join(words[:start])) for start in starts), len(response)] if response else [0]

    @override
    def problems(self, split: Split) -> list[Problem]:
        data = {"language": self.language}
        return [Problem(id=f"{number:05d}", prompt="1", gold="", data=data) for number in range(self.count)]


class TableEngine(Engine):
    """Samples from a language's table. Every prompt is one token."""

    version = 0

    def __init__(self, language: Language) -> None:
        self._language = language
        self.tokens = 0

    @override
    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        # A request may be followed by others, which `on_result` returns: they are the next round.
        waiting = [one for one in requests if isinstance(one, Request)]
        assert len(waiting) == len(requests), "no answer here waits for anything"
        while waiting:
            begun = [one.prompt_ids[1:].tolist() for one in waiting for _ in range(one.n)]
            rests = iter(
                self._language.sample(begun, [one.seed + k for one in waiting for k in range(one.n)])
            )
            following: list[Request | Later] = []
            for one in waiting:
                results.append([next(rests) for _ in range(one.n)])
                self.tokens += sum(len(each.token_ids) for each in results[-1])
                if on_result is not None:
                    following += on_result(len(results) - 1, results[-1]) or ()
            waiting = [one for one in following if isinstance(one, Request)]
        return results


def context_of(language: Language, problems: int, seed: int) -> RolloutContext:
    """Returns the context of a phase in which credit and rollouts work on so many problems."""
    task = LanguageTask(language=language, count=problems)
    longest = language.length + 1
    return RolloutContext(
        task=task,
        engine=TableEngine(language),
        grader=GraderPool(task.grader),
        codec=TextCodec(
            encode=lambda text: [int(word) for word in text.split()],
            decode=lambda ids: " ".join(str(one) for one in ids if one != EOS),
            eos_id=EOS,
        ),
        seed=seed,
        iteration=0,
        settings=AnswerSettings(4096, SamplingParams(max_tokens=longest)),
        services=(ShapingMemory(), Distributions(language.distributions)),
    )


@dataclass(frozen=True, kw_only=True)
class TrueAdvantages(TokenCredit):
    """Gives each token the change of the exact probability of a correct answer, V(s_{t+1}) − V(s_t), at no
    cost. No credit knows these values; it shows what exact values would be worth."""

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        language: Language = answers[0].problem.data["language"]
        places = np.arange(language.length + 1)
        rows = []
        for answer in answers:
            values_T = language.values_TS[places, language.statuses(answer.response_ids)]
            # The end token, which is certain, changes nothing.
            rows.append([*np.diff(values_T).tolist(), 0.0])
        return rows
