"""Demonstrations with threads, as the segments that a rollout would have made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from treetune.contracts import Finding
from treetune.vocabulary import Problem, Segment, TextCodec, joined, token_array
from treetune_threads.grammar import has_threads, text_segments
from treetune_threads.tags import TAGS, TagIds

_MANY_TOKENS = "and the tokenizer takes several tokens for their tags, or has none"
_REMEDY = f"name them there: {', '.join(TAGS)}"


def lacking_tags(texts: Sequence[str], single_tokens: frozenset[str] | None) -> Iterator[Finding]:
    """A finding where demonstrations have threads, and the tags are none of the `single_tokens` (None: nobody
    knows them yet)."""
    if any(map(has_threads, texts)) and single_tokens is not None and not single_tokens.issuperset(TAGS):
        yield Finding(
            f"demonstrations of this task have threads, {_MANY_TOKENS}", "$.model.added_tokens", _REMEDY
        )


def demonstrated_segments(codec: TextCodec, problem: Problem, text: str) -> tuple[Segment, ...]:
    """A demonstration's segments, the last one with the end token; one, where it has no threads.

    Raises ValueError for threads that a rollout couldn't make.
    """
    end = token_array([codec.eos_id])
    if not has_threads(text):
        return (Segment(joined([codec.encode_answer(problem, text), end])),)
    if TagIds.of(codec.encode) is None:
        raise ValueError(
            f"the demonstration of problem {problem.id!r} has threads, {_MANY_TOKENS}: name them in"
            f" model.added_tokens ({', '.join(TAGS)})"
        )
    try:
        cut = text_segments(text)
    except ValueError as error:
        raise ValueError(f"the demonstration of problem {problem.id!r} can't be cut: {error}") from error
    encoded = [codec.encode_answer(problem, cut[0].text)]
    encoded += [token_array(codec.encode(segment.text)) for segment in cut[1:]]
    encoded[-1] = joined([encoded[-1], end])
    return tuple(
        Segment(token_ids=ids, origin="injected" if segment.injected else "sampled", branch=segment.branch)
        for segment, ids in zip(cut, encoded, strict=True)
    )
