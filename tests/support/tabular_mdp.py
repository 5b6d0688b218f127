"""A language small enough to enumerate, and doubles of what samples, grades and exchanges in it.

An answer is one to three letters, ``a`` or ``b``, with ``;`` between them, and the end token: three
steps at most. The second letter likes to repeat the first; the end comes with probability 1/2 after
each letter but the third. It earns 1 with two or more ``a``. Every value and gradient is known exactly, so
that an estimate can be compared with it.
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

from tests.support.columns import plain
from tests.support.contexts import context_of
from tests.support.fake_engine import FakeEngine
from treetune.credit.base import Credit
from treetune.engine.base import Engine
from treetune.engine.requests import Completion, OnResult, Request, SamplingParams, ScoreRequest
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
    """Returns the probabilities of the next token."""
    letters = response[::2]
    if response and response[-1] != END_OF_STEP:
        return {EOS: 1.0} if len(letters) == 3 else {EOS: 0.5, END_OF_STEP: 0.5}
    if len(letters) == 1:
        return {A: 0.75, B: 0.25} if letters == (A,) else {A: 0.25, B: 0.75}
    return {A: 0.5, B: 0.5}


@cache
def answers(prefix: Ids = (), max_tokens: int = LONGEST) -> dict[Ids, float]:
    """Returns all answers that begin with `prefix`, cut at `max_tokens`, and their probabilities given it."""
    if prefix and (prefix[-1] == EOS or len(prefix) == max_tokens):
        return {prefix: 1.0}
    chances = {}
    for token, p in policy(prefix).items():
        for answer, q in answers((*prefix, token), max_tokens).items():
            chances[answer] = p * q
    return chances


def policy_logprobs(answer: Ids) -> list[float]:
    """Returns the policy's log-prob of each token of the answer."""
    return [math.log(policy(answer[:t])[token]) for t, token in enumerate(answer)]


def finish_reason(answer: Ids) -> FinishReason:
    return "stop" if answer[-1] == EOS else "length"


def reward(answer: Ids, unfinished_reward: float = 0.0) -> float:
    if finish_reason(answer) == "length":
        return unfinished_reward
    return float(answer.count(A) >= 2)


def value(prefix: Ids = (), max_tokens: int = LONGEST) -> float:
    """Returns the mean reward of the answers that begin with `prefix`."""
    return sum(p * reward(answer) for answer, p in answers(prefix, max_tokens).items())


def step_ends(answer: Ids) -> tuple[int, ...]:
    """Returns the step ends: after each ``;``, and after the end token."""
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
    """Grades at once, in this thread, and keeps what was submitted."""

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
    scores = True

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
            for request in wave:
                if isinstance(request, ScoreRequest):
                    results.append([score_text(request)])
                else:
                    results.append(drop_unread_logprobs(request, self._completions(request)))
            # A server reports results in any order; no result may depend on it.
            random.Random(0).shuffle(order)
            wave = []
            if on_result is not None:
                for index in order:
                    wave += on_result(index, results[index]) or ()
        return results

    def _completions(self, request: Request) -> list[Completion]:
        return [self._completion(request, random.Random(request.seed + i), i) for i in range(request.n)]

    def _completion(self, request: Request, rng: random.Random, sample: int) -> Completion:
        prefix = response_part(request.prompt_ids)
        answer = rng.choices(*zip(*answers(prefix, budget(request)).items(), strict=True))[0]
        return completion(answer[len(prefix) :])


class ExactEngine(TabularEngine):
    """Gives 64 samples of a request that are the distribution itself: every mean is an expectation."""

    def _completions(self, request: Request) -> list[Completion]:
        assert request.n == EXACT_SAMPLES
        prefix = response_part(request.prompt_ids)
        completions = []
        for answer, p in answers(prefix, budget(request)).items():
            completions += [completion(answer[len(prefix) :])] * round(p * EXACT_SAMPLES)
        assert len(completions) == EXACT_SAMPLES
        return completions


def chances(ids: Sequence[int], version: int) -> list[float]:
    """Returns the policy's probability of each token after these, in the form that a `FakeEngine` takes."""
    next_chances = policy(response_part(ids))
    return [next_chances.get(token, 0.0) for token in range(EOS + 1)]


def engine_of_even_letters() -> FakeEngine:
    """Returns an engine that samples both letters, the end of a step and the end token equally often."""
    even = [0.25 if token in (A, B, END_OF_STEP, EOS) else 0.0 for token in range(EOS + 1)]
    return FakeEngine(lambda ids, version: even, EOS, decode=decode, context_length=64)


def response_part(prompt_ids: Any) -> Ids:
    """Returns the token ids after the prompt, which ends with a question mark."""
    ids = plain(prompt_ids)
    return ids[ids.index(ALPHABET.index("?")) + 1 :]


def budget(request: Request) -> int:
    return len(response_part(request.prompt_ids)) + request.sampling.max_tokens


def drop_unread_logprobs(request: Request, completions: list[Completion]) -> list[Completion]:
    """Returns the completions without log-probs where the request asks for none."""
    if request.reads_logprobs:
        return completions
    return [replace(completion, logprobs=None) for completion in completions]


def score_text(request: ScoreRequest) -> Completion:
    """Returns the text with the policy's log-probs, and -9999 where it never says a token, as a server does.

    A prompt that begins with a letter tells the policy that its answer will earn 1.
    """
    prefix, text = response_part(request.prompt_ids), plain(request.text_ids)
    knows_it_is_right = int(request.prompt_ids[0]) in (A, B)
    logprobs = []
    for t, token in enumerate(text):
        before = (*prefix, *text[:t])
        chance = policy(before).get(token, 0.0)
        if knows_it_is_right and value(before):
            chance *= value((*before, token)) / value(before)
        logprobs.append(math.log(chance) if chance else -9999.0)
    return Completion(text, logprobs, "length", policy_version=3)


def completion(token_ids: Ids) -> Completion:
    return Completion(token_ids, (-0.5,) * len(token_ids), finish_reason(token_ids), policy_version=3)


def problems(count: int) -> list[Problem]:
    """Returns problems whose reference answer is the letter that earns; some credits score its likelihood."""
    return [Problem(id=f"train/{i}", prompt=f"{i}?", gold="a") for i in range(count)]


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


def context(**changed: Any) -> RolloutContext:
    defaults: dict[str, Any] = {
        "task": LetterTask(),
        "engine": TabularEngine(),
        "grader": InlinePool(),
        "codec": CODEC,
        "iteration": 3,
        "sampling": SamplingParams(max_tokens=LONGEST),
    }
    return context_of(**defaults | changed)


def roll_out(rollout: Rollout, count: int, **changed: Any) -> tuple[list[Trajectory], Metrics]:
    """Returns the answers to this many problems."""
    trees, metrics = rollout.run(context(**changed), problems(count))
    return answers_of(trees), metrics


def assign_credit(
    credit: Credit, answers: Sequence[Trajectory] | None = None, **changed: Any
) -> tuple[list[Episode], Metrics]:
    """Assigns credit to these answers, or to all answers of the language."""
    return credit.assign(context(**changed), trees_of(all_trajectories() if answers is None else answers))


def sampled_requests(
    credit: Credit, answers: Sequence[Trajectory] | None = None, **changed: Any
) -> list[Request]:
    """Returns the requests for continuations with which the credit is assigned."""
    engine = TabularEngine()
    assign_credit(credit, answers, engine=engine, **changed)
    return engine.requests


@dataclass(frozen=True)
class ThreadRank:
    """A rank that is a thread."""

    rank: int
    world_size: int
    exchange: Callable[[str, Any], list[Any]]
    hand_out: Callable[[str, Sequence[Any]], list[Any]]


def on_ranks(world_size: int, work: Callable[[RolloutContext], T], **factories: Callable[[], Any]) -> list[T]:
    """Returns what `work` returns on each of `world_size` ranks, which are threads that exchange objects.

    Each factory makes one part of a rank's context.
    """
    barrier = threading.Barrier(world_size, timeout=20)
    boards: dict[tuple[str, int], dict[int, list[Any]]] = {}

    def make_rank(rank: int) -> ThreadRank:
        turns: Iterator[int] = itertools.count()

        def exchange(name: str, value: list[Any]) -> list[list[Any]]:
            board = boards.setdefault((name, next(turns)), {})
            board[rank] = value
            barrier.wait()
            return [board[r] for r in range(world_size)]

        def hand_out(name: str, value: list[Any]) -> list[Any]:
            return [values[rank] for values in exchange(f"{name} for each", value)]

        return ThreadRank(rank, world_size, exchange, hand_out)

    with ThreadPoolExecutor(world_size) as pool:
        contexts = []
        for rank in range(world_size):
            parts = {name: make() for name, make in factories.items()}
            contexts.append(context(ranks=make_rank(rank), **parts))
        futures = [pool.submit(work, rank_context) for rank_context in contexts]
        return [future.result(timeout=30) for future in futures]


def assert_ranks_agree(
    world_size: int,
    work: Callable[[RolloutContext], tuple[Sequence[Any], Any]],
    **factories: Callable[[], Any],
) -> tuple[Sequence[Any], Any]:
    """Asserts that several ranks return what one rank returns.

    `work` returns the rows of a rank, which are those of one rank when put together, and a value that is the
    same on every rank.
    """
    ((expected_rows, expected_value),) = on_ranks(1, work, **factories)
    by_rank = on_ranks(world_size, work, **factories)
    rows = list(itertools.chain.from_iterable(rows_of_rank for rows_of_rank, _ in by_rank))
    assert rows == list(expected_rows)
    assert all(value == expected_value for _, value in by_rank)
    return expected_rows, expected_value


Gradient = dict[tuple[Ids, int], float]


def exact_gradient(max_tokens: int = LONGEST, earns: Callable[[Ids], float] = reward) -> Gradient:
    """Returns ∂J/∂logit(s, a) = P(s) π(a|s) (Q(s, a) − V(s)), for a softmax over a state's tokens.

    J is the mean of what answers of at most `max_tokens` tokens earn.
    """

    def mean_reward(prefix: Ids) -> float:
        return sum(p * earns(answer) for answer, p in answers(prefix, max_tokens).items())

    gradient = {}
    all_answers = answers((), max_tokens)
    for state in {answer[:n] for answer in all_answers for n in range(len(answer))}:
        reach_probability = sum(p for answer, p in all_answers.items() if answer[: len(state)] == state)
        for token, p in policy(state).items():
            gradient[state, token] = (
                reach_probability * p * (mean_reward((*state, token)) - mean_reward(state))
            )
    return gradient


def score_gradient(answer: Ids, advantages: Sequence[float]) -> Gradient:
    """Returns Σ_t A_t ∇ log π(token_t | what went before), the gradient that the trainer takes."""
    gradient = {}
    for t, (sampled_token, advantage) in enumerate(zip(answer, advantages, strict=True)):
        for token, p in policy(answer[:t]).items():
            gradient[answer[:t], token] = advantage * (float(token == sampled_token) - p)
    return gradient


def gradient_of(episode: Episode) -> Gradient:
    """Returns the gradient of the episode's trained tokens."""
    return score_gradient(plain(episode.response_ids), (episode.advantages * episode.trained).tolist())


def add(total: Gradient, term: Gradient, weight: float) -> None:
    for key, slope in term.items():
        total[key] = total.get(key, 0.0) + weight * slope
