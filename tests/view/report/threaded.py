"""Answers with threads, written by hand: their sampled and injected segments, and their episodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from treetune.rollouts.storage import TOKENS, write_episodes, write_tokens, write_trajectories
from treetune.threads.format import TAGS
from treetune.vocabulary import Branch, Episode, Grade, Problem, Segment, SegmentSpan, TextCodec, Trajectory

_TOKENS = re.compile("|".join([*map(re.escape, TAGS), r"\n", r" ?[^\s<]+", r"<", r"\s"]))
_VOCABULARY: list[str] = list(TAGS)


def _encode(text: str) -> tuple[int, ...]:
    """Encodes tags, and words with the space before them, as tokens; a new word gets the next id."""
    ids = []
    for token in _TOKENS.findall(text):
        if token not in _VOCABULARY:
            _VOCABULARY.append(token)
        ids.append(_VOCABULARY.index(token))
    return tuple(ids)


CODEC = TextCodec(encode=_encode, decode=lambda ids: "".join(_VOCABULARY[i] for i in ids), eos_id=10**6)


@dataclass(frozen=True)
class Thread:
    """The text that a thread sampled, or its `parts`: texts and blocks in turn."""

    text: str = ""
    seconds: float | None = None
    parts: tuple[str | Fork, ...] = ()
    forced_end: bool = False


@dataclass(frozen=True)
class Fork:
    """A block of threads; its outlines stand in the text before it."""

    threads: tuple[Thread, ...]


def segments_of(
    parts: Sequence[str | Fork], branch: Branch = (), seconds: float | None = 0.1
) -> Iterator[Segment]:
    """Yields the segments in the order in which a rollout joins them."""
    n_blocks = 0
    for part in parts:
        if isinstance(part, str):
            yield Segment(CODEC.encode(part), branch=branch, seconds=seconds)
            continue
        yield Segment(CODEC.encode("\n"), "injected", branch=branch)
        for position, thread in enumerate(part.threads):
            branch_of_thread = (*branch, (n_blocks, position))
            yield Segment(CODEC.encode(f"<Thread>\n{position + 1}:"), "injected", branch=branch_of_thread)
            yield from segments_of(thread.parts or (thread.text,), branch_of_thread, thread.seconds)
            if thread.forced_end:
                yield Segment(CODEC.encode("\n</Thread>"), "injected", branch=branch_of_thread)
        yield Segment(CODEC.encode("\n"), "injected", branch=branch)
        n_blocks += 1


def trajectory(parts: Sequence[str | Fork], **events: int) -> Trajectory:
    question = "What is the product of 6 and 7?"
    segments = tuple(segments_of(parts))
    ids = tuple(token for segment in segments for token in segment.token_ids)
    return Trajectory(
        problem=Problem("train/1", question, "42"),
        sample=0,
        prompt_ids=CODEC.encode(question),
        segments=segments,
        finish_reason="stop",
        text=CODEC.decode(ids),
        grade=Grade(1.0, "ok"),
        step_ends=(len(ids),),
        numbers={f"threads/{event}": float(times) for event, times in events.items()},
    )


def episode(
    answer: Trajectory, advantages: Sequence[float], values: Sequence[float] | None = None
) -> Episode:
    """Builds a row with an advantage for each segment, or one for all; with `values`, segments are steps."""
    ends, stretches, trained, by_token = [], [], [], []
    for position, segment in enumerate(answer.segments):
        size, sampled = len(segment.token_ids), segment.origin == "sampled"
        ends.append((ends[-1] if ends else 0) + size)
        stretches.append(SegmentSpan(ends[-1], segment.branch))
        trained += [sampled] * size
        advantage = advantages[position] if len(advantages) > 1 else advantages[0]
        by_token += [advantage if sampled else 0.0] * size
    return Episode(
        prompt_ids=answer.prompt_ids,
        response_ids=answer.response_ids,
        trained=tuple(trained),
        reward=answer.reward,
        group=answer.problem.id,
        trajectory=answer.id,
        policy_version=0,
        advantages=tuple(by_token),
        step_ends=tuple(ends) if values is not None else (ends[-1],),
        step_values=None if values is None else tuple(values),
        text=answer.text,
        stretches=tuple(stretches),
    )


def write_answers(folder: Path, answers: Sequence[Trajectory], episodes: Sequence[Episode]) -> None:
    write_trajectories(folder / "trajectories.arrow", answers)
    write_episodes(folder / "episodes.arrow", episodes, CODEC)
    write_tokens(folder.parents[2] / TOKENS, CODEC, len(_VOCABULARY))


def outlines(count: int) -> str:
    lines = "".join(f"\n<Outline>{i + 1}: the part of digit {i + 1}</Outline>" for i in range(count))
    return f"<Parallel>\n<Outlines>{lines}\n</Outlines>"
