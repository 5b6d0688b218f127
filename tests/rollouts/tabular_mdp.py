"""A language small enough to enumerate, and doubles of what samples, grades and exchanges in it.

An answer is one to three letters, ``a`` or ``b``, with ``;`` between them, and the end token: three
steps at most. The second letter likes to repeat the first; the end comes with probability 1/2 after
each letter but the third. It earns 1 with two or more ``a``. Every value and gradient is known.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from tests.columns import plain
from tests.fake_engine import FakeEngine
from tests.support.contexts import context_of
from treetune.credit.base import Credit
from treetune.engine.base import Engine
from treetune.engine.requests import Completion, OnResult, Request, SamplingParams
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.tasks.base import Task
from treetune.tasks.graders.base import Grader
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import (
    Episode,
    FinishReason,
    Grade,
    Metrics,
    Problem,
    Segment,
    TextCodec,
    Trajectory,
)

T = TypeVar("T")

Ids = tuple[int, ...]
"""Token ids that can be compared and looked up."""

ALPHABET = "ab;?0123456789"
EOS = len(ALPHABET)
A, B, END_OF_STEP = 0, 1, 2
LONGEST = 6
EXACT_SAMPLES = 64
"""Every probability of an answer is a multiple of 1/64."""


def encode(text: str) -> Ids:
    return tuple(ALPHABET.index(character) for character in text)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(ALPHABET[token] for token in token_ids if token != EOS)


CODEC = TextCodec(encode=encode, decode=decode, eos_id=EOS)


def policy(response: Ids) -> dict[int, float]:
    """The probabilities of the next token."""
    letters = response[::2]
    if response and response[-1] != END_OF_STEP:
        return {EOS: 1.0} if len(letters) == 3 else {EOS: 0.5, END_OF_STEP: 0.5}
    if len(letters) == 1:
        return {A: 0.75, B: 0.25} if letters == (A,) else {A: 0.25, B: 0.75}
    return {A: 0.5, B: 0.5}


@cache
def answers(prefix: Ids = (), max_tokens: int = LONGEST) -> dict[Ids, float]:
    """All answers that begin with `prefix`, cut at `max_tokens`, with their probabilities given it."""
    if prefix and (prefix[-1] == EOS or len(prefix) == max_tokens):
        return {prefix: 1.0}
    return {
        answer: p * q
        for token, p in policy(prefix).items()
        for answer, q in answers((*prefix, token), max_tokens).items()
    }


def policy_logprobs(answer: Ids) -> list[float]:
    """Of each of its tokens, by the policy."""
    return [math.log(policy(answer[:t])[token]) for t, token in enumerate(answer)]


def finish_reason(answer: Ids) -> FinishReason:
    return "stop" if answer[-1] == EOS else "length"


def reward(answer: Ids, unfinished_reward: float = 0.0) -> float:
    if finish_reason(answer) == "length":
        return unfinished_reward
    return float(answer.count(A) >= 2)


def value(prefix: Ids = (), max_tokens: int = LONGEST) -> float:
    return sum(p * reward(answer) for answer, p in answers(prefix, max_tokens).items())


def step_ends(answer: Ids) -> tuple[int, ...]:
    """A step ends behind its ``;``; the last one, with the end token, where the answer does."""
    return (*range(2, len(answer), 2), len(answer))


@dataclass(frozen=True, kw_only=True)
class LetterGrader(Grader):
    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(reward=float(response.count("a") >= 2), outcome="ok", extracted=response[-1:])


@dataclass(frozen=True, kw_only=True)
class LetterTask(Task):
    grader: Grader = field(default_factory=LetterGrader)

    def demonstration(self, problem: Problem, seed: int) -> str:
        return random.Random(seed).choice(["a;a", "a;b;a", "b;a;b"])

    def step_boundaries(self, response: str) -> list[int]:
        ends = [i + 1 for i, character in enumerate(response) if character == ";"]
        return [0, *(e for e in ends if e < len(response)), len(response)] if response else [0]


class InlinePool:
    """Grades at once, in this thread, and keeps what it was given."""

    has_services = False

    def __init__(self) -> None:
        self.submitted: list[tuple[str, str]] = []

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        self.submitted.append((problem.id, response))
        future: Future[Grade] = Future()
        future.set_result(LetterGrader().grade(response, problem))
        return future


class TabularEngine(Engine):
    """Samples from `policy`; sample i of a request depends on ``seed + i`` alone."""

    version = 0

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def generate(
        self, requests: Sequence[Request], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        wave = list(requests)
        while wave:
            self.requests += wave
            order = list(range(len(results), len(results) + len(wave)))
            results += [as_read(request, self._completions(request)) for request in wave]
            random.Random(0).shuffle(order)
            wave = [
                further
                for index in order
                if on_result is not None
                for further in on_result(index, results[index]) or ()
            ]
        return results

    def _completions(self, request: Request) -> list[Completion]:
        return [self._completion(request, random.Random(request.seed + i), i) for i in range(request.n)]

    def _completion(self, request: Request, rng: random.Random, sample: int) -> Completion:
        prefix = response_part(request.prompt_ids)
        drawn = rng.choices(*zip(*answers(prefix, budget(request)).items(), strict=True))[0]
        return completion(drawn[len(prefix) :])


class ExactEngine(TabularEngine):
    """Its 64 samples of a request are the distribution itself: every mean is an expectation."""

    def _completions(self, request: Request) -> list[Completion]:
        assert request.n == EXACT_SAMPLES
        prefix = response_part(request.prompt_ids)
        counted = [
            completion(answer[len(prefix) :])
            for answer, p in answers(prefix, budget(request)).items()
            for _ in range(round(p * EXACT_SAMPLES))
        ]
        assert len(counted) == EXACT_SAMPLES
        return counted


def chances(ids: Sequence[int], version: int) -> list[float]:
    """Of each token behind these, by the policy: what a fake engine is made of."""
    following = policy(response_part(ids))
    return [following.get(token, 0.0) for token in range(EOS + 1)]


def even_letters() -> FakeEngine:
    """Both letters, the end of a step and the end token are equally likely, whatever came before."""
    even = [0.25 if token in (A, B, END_OF_STEP, EOS) else 0.0 for token in range(EOS + 1)]
    return FakeEngine(lambda ids, version: even, EOS, decode=decode, context_length=64)


def response_part(prompt_ids: Any) -> Ids:
    """What stands behind the prompt, which ends with a question mark."""
    ids = plain(prompt_ids)
    return ids[ids.index(ALPHABET.index("?")) + 1 :]


def budget(request: Request) -> int:
    return len(response_part(request.prompt_ids)) + request.sampling.max_tokens


def as_read(request: Request, completions: list[Completion]) -> list[Completion]:
    """Without log-probs where the request asks for none."""
    return completions if request.reads_logprobs else [replace(one, logprobs=None) for one in completions]


def completion(token_ids: Ids) -> Completion:
    return Completion(token_ids, (-0.5,) * len(token_ids), finish_reason(token_ids), policy_version=3)


def problems(count: int) -> list[Problem]:
    return [Problem(id=f"train/{i}", prompt=f"{i}?", gold="") for i in range(count)]


def trajectory(
    answer: Ids,
    problem: Problem | None = None,
    sample: int = 0,
    unfinished_reward: float = 0.0,
    logprobs: Sequence[float] | None = None,
) -> Trajectory:
    problem = problem or problems(1)[0]
    return Trajectory(
        problem=problem,
        sample=sample,
        prompt_ids=encode(problem.prompt),
        segments=(Segment(answer, logprobs=logprobs or (-0.5,) * len(answer), policy_version=3),),
        finish_reason=finish_reason(answer),
        text=decode(answer),
        grade=Grade(reward(answer, unfinished_reward), "ok"),
        step_ends=step_ends(answer),
    )


def all_trajectories(max_tokens: int = LONGEST) -> list[Trajectory]:
    return [trajectory(answer, sample=i) for i, answer in enumerate(answers((), max_tokens))]


def context(**given: Any) -> RolloutContext:
    defaults: dict[str, Any] = {
        "task": LetterTask(),
        "engine": TabularEngine(),
        "grader": InlinePool(),
        "codec": CODEC,
        "iteration": 3,
        "sampling": SamplingParams(max_tokens=LONGEST),
    }
    return context_of(**defaults | given)


def rolled_out(rollout: Rollout, count: int, **given: Any) -> tuple[list[Trajectory], Metrics]:
    """The answers to so many problems."""
    trees, metrics = rollout.run(context(**given), problems(count))
    return answers_of(trees), metrics


def credited(
    credit: Credit, answers: Sequence[Trajectory] | None = None, **given: Any
) -> tuple[list[Episode], Metrics]:
    """Of these answers, or of all of the language."""
    return credit.assign(context(**given), trees_of(all_trajectories() if answers is None else answers))


def asked_for(credit: Credit, answers: Sequence[Trajectory] | None = None, **given: Any) -> list[Request]:
    """The continuations that this takes."""
    engine = TabularEngine()
    credited(credit, answers, engine=engine, **given)
    return engine.requests


@dataclass(frozen=True)
class ThreadRank:
    """A rank that is a thread."""

    rank: int
    world_size: int
    exchange: Callable[[str, Any], list[Any]]
    hand_out: Callable[[str, Sequence[Any]], list[Any]]


def on_ranks(world_size: int, work: Callable[[RolloutContext], T], **given: Any) -> list[T]:
    """What `work` returns on each of `world_size` ranks, which are threads that exchange objects."""
    barrier = threading.Barrier(world_size, timeout=20)
    boards: dict[tuple[str, int], dict[int, list[Any]]] = {}

    def rank_of(rank: int) -> ThreadRank:
        turns: Iterator[int] = itertools.count()

        def exchange(name: str, own: list[Any]) -> list[list[Any]]:
            board = boards.setdefault((name, next(turns)), {})
            board[rank] = own
            barrier.wait()
            return [board[r] for r in range(world_size)]

        def hand_out(name: str, own: list[Any]) -> list[Any]:
            return [of_rank[rank] for of_rank in exchange(f"{name} for each", own)]

        return ThreadRank(rank, world_size, exchange, hand_out)

    with ThreadPoolExecutor(world_size) as pool:
        lent = [{key: make() for key, make in given.items()} for _ in range(world_size)]
        futures = [pool.submit(work, context(ranks=rank_of(rank), **own)) for rank, own in enumerate(lent)]
        return [future.result(timeout=30) for future in futures]


def assert_ranks_agree(
    world_size: int, work: Callable[[RolloutContext], tuple[Sequence[Any], Any]], **given: Any
) -> tuple[Sequence[Any], Any]:
    """`work` returns rows of a rank's own and what every rank knows: together, one rank's."""
    ((alone, known),) = on_ranks(1, work, **given)
    by_rank = on_ranks(world_size, work, **given)
    assert [row for own, _ in by_rank for row in own] == list(alone)
    assert all(of_rank == known for _, of_rank in by_rank)
    return alone, known


Gradient = dict[tuple[Ids, int], float]


def exact_gradient(max_tokens: int = LONGEST, earns: Callable[[Ids], float] = reward) -> Gradient:
    """∂J/∂logit(s, a) = P(s) π(a|s) (Q(s, a) − V(s)), for a softmax over a state's tokens, of what answers of
    at most so many tokens earn."""

    def worth(prefix: Ids) -> float:
        return sum(p * earns(answer) for answer, p in answers(prefix, max_tokens).items())

    gradient = {}
    everything = answers((), max_tokens)
    for state in {answer[:n] for answer in everything for n in range(len(answer))}:
        reached = sum(p for answer, p in everything.items() if answer[: len(state)] == state)
        for token, p in policy(state).items():
            gradient[state, token] = reached * p * (worth((*state, token)) - worth(state))
    return gradient


def score_gradient(answer: Ids, advantages: Sequence[float]) -> Gradient:
    """Σ_t A_t ∇ log π(token_t | what went before), the gradient that the trainer takes."""
    gradient = {}
    for t, (taken, advantage) in enumerate(zip(answer, advantages, strict=True)):
        for token, p in policy(answer[:t]).items():
            gradient[answer[:t], token] = advantage * (float(token == taken) - p)
    return gradient


def gradient_of(episode: Episode) -> Gradient:
    """Of its trained tokens."""
    return score_gradient(plain(episode.response_ids), (episode.advantages * episode.trained).tolist())


def add(total: Gradient, term: Gradient, weight: float) -> None:
    for key, slope in term.items():
        total[key] = total.get(key, 0.0) + weight * slope
