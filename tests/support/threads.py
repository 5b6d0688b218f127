"""Answers with threads in a language of tags and single letters, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tests.support import tabular_mdp as mdp
from treetune.engine.base import Engine
from treetune.rollouts.context import RolloutContext
from treetune.threads.format import TAGS, TagIds
from treetune.threads.parallel_threads import ParallelThreads
from treetune.vocabulary import Branch, Grade, Problem, Segment, TextCodec, Trajectory

TOKENS = (*TAGS, *"ab;?0123456789.:\n ")


def encode(text: str) -> tuple[int, ...]:
    ids = []
    while text:
        token = next(token for token in TOKENS if text.startswith(token))
        ids.append(TOKENS.index(token))
        text = text[len(token) :]
    return tuple(ids)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(TOKENS[token] for token in token_ids if token < len(TOKENS))


CODEC = TextCodec(encode=encode, decode=decode, eos_id=len(TOKENS))
TAG_IDS = TagIds.of(encode)


def context(**changed: Any) -> RolloutContext:
    return mdp.context(**{"codec": CODEC, **changed})


class TextPool:
    """A grader pool that grades an answer at once, by its text alone."""

    has_services = False

    def __init__(self, reward_of_text: Callable[[str], float]) -> None:
        self._reward_of_text = reward_of_text

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        future: Future[Grade] = Future()
        future.set_result(Grade(self._reward_of_text(response), "ok"))
        return future


def sampling_context(engine: Engine, rollout: ParallelThreads, pool: TextPool) -> RolloutContext:
    """Returns a context in which the rollout samples with the engine, and the pool grades."""
    return context(
        engine=engine, context_length=4096, grader=pool, sampling=rollout.sampling, rollout=rollout
    )


def part(text: str, seconds: float | None = None, branch: Branch = ()) -> Segment:
    """Returns a sampled segment if it has a time, and an injected one if not."""
    sampled = seconds is not None
    return Segment(
        encode(text),
        origin="sampled" if sampled else "injected",
        logprobs=(-0.5,) * len(encode(text)) if sampled else None,
        policy_version=0 if sampled else None,
        branch=branch,
        seconds=seconds,
    )


def answer(
    *segments: Segment | str, right: bool = True, problem: str = "train/0", sample: int = 0
) -> Trajectory:
    """Returns an answer of these parts; a text is a sample that took a second."""
    parts = tuple(part(segment, 1.0) if isinstance(segment, str) else segment for segment in segments)
    length = sum(len(segment.token_ids) for segment in parts)
    return Trajectory(
        problem=Problem(id=problem, prompt="?", gold=""),
        sample=sample,
        prompt_ids=encode("?"),
        segments=parts,
        finish_reason="stop",
        text=decode([token for segment in parts for token in segment.token_ids]),
        grade=Grade(float(right), "ok"),
        step_ends=(length,),
    )


def block(*lengths: int, outlines: int = 0) -> str:
    """Returns a block with threads of these many letters, as text."""
    threads = "".join(thread(length) for length in lengths)
    return f"<Parallel>{'b' * outlines}{threads}</Parallel>"


def thread(length: int) -> str:
    return f"<Thread>{'a' * length}</Thread>"


EXAMPLE = "a" * 5 + "<Parallel>" + "b" * 4 + thread(20) + thread(30) + "b" + "</Parallel>" + "a" * 6
"""The example of the reference: 72 tokens, 52 of them on the critical path."""
USELESS_THREAD = EXAMPLE.replace("b</Parallel>", f"{thread(30)}b</Parallel>")
"""The example with a third thread of 30 tokens, which adds nothing."""
