"""Lengths of answers with threads.

These tests promise that tokens, critical paths, blocks and threads are counted by the rules of the
reference's statistics, in any text that a policy can write.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.threads.format import TAGS as ALL_TAGS
from treetune.threads.format import TagIds
from treetune.threads.numbers import ThreadCounts, count_threads
from treetune.vocabulary import TokenIds

TAGS = TagIds(parallel=1, end_parallel=2, outlines=3, end_outlines=4, thread=5, end_thread=6)
OPEN, CLOSE, THREAD, END = (TAGS.parallel,), (TAGS.end_parallel,), (TAGS.thread,), (TAGS.end_thread,)


def text(length: int) -> TokenIds:
    return (7,) * length


def thread(length: int) -> TokenIds:
    return THREAD + text(length) + END


EXAMPLE = text(5) + OPEN + text(4) + thread(20) + thread(30) + text(1) + CLOSE + text(6)
WITH_A_USELESS_THREAD = text(5) + OPEN + text(4) + thread(20) + 2 * thread(30) + text(1) + CLOSE + text(6)


@pytest.mark.parametrize(
    ("answer", "total", "longest", "ratio", "threads"),
    [
        (EXAMPLE, 72, 52, 0.27778, 2),
        (text(10) + EXAMPLE, 82, 62, 0.24390, 2),  # a prompt in front would dilute the ratio
        (WITH_A_USELESS_THREAD, 104, 54, 0.48077, 3),  # the ratio rises although the critical path is longer
    ],
)
def test_the_example_of_the_reference(
    answer: TokenIds, total: int, longest: int, ratio: float, threads: int
) -> None:
    counts = count_threads(answer, TAGS)
    assert (counts.total_num_tokens, counts.num_tokens_in_the_longest_thread) == (total, longest)
    assert counts.acceleration_ratio == pytest.approx(ratio, abs=5e-6)
    assert counts.thread_counts_per_block == threads
    assert (counts.parallel_count, counts.with_parallel) == (1, True)
    if answer is EXAMPLE:
        assert counts.parallel_ratio == pytest.approx(0.81944, abs=5e-6)
        assert counts.avg_tokens_per_parallel_block == 59


@pytest.mark.parametrize(
    ("answer", "longest", "blocks", "threads"),
    [
        pytest.param((), 0, 0, 0, id="nothing"),
        pytest.param(text(9), 9, 0, 0, id="no block"),
        pytest.param(OPEN + THREAD + text(3), 5, 1, 1, id="unterminated"),
        pytest.param(OPEN + thread(3) + THREAD + text(1), 1 + 3 + 3, 1, 2, id="unterminated second thread"),
        pytest.param(OPEN + text(2), 3, 1, 0, id="a block without threads"),
        pytest.param(CLOSE + END + THREAD + text(1), 4, 0, 0, id="tags outside of blocks"),
        pytest.param(OPEN + END + thread(2) + END + CLOSE, 8, 1, 1, id="stray ends of threads"),
        pytest.param(OPEN + OPEN + thread(2) + thread(2) + CLOSE + CLOSE, 10, 1, 2, id="a block in a block"),
        pytest.param(
            OPEN + THREAD + OPEN + text(3) + THREAD + CLOSE + END + thread(1) + CLOSE,
            1 + 4 + 6 + 1,
            1,
            2,
            id="tags in a thread",
        ),
        pytest.param(2 * (OPEN + thread(4) + thread(6) + CLOSE), 2 * 12, 2, 2, id="two blocks"),
    ],
)
def test_tags_count_only_where_they_open_or_close_a_block_or_thread(
    answer: TokenIds, longest: int, blocks: int, threads: int
) -> None:
    counts = count_threads(answer, TAGS)
    assert (
        counts.total_num_tokens,
        counts.num_tokens_in_the_longest_thread,
        counts.parallel_count,
        counts.thread_counts_per_block,
    ) == (len(answer), longest, blocks, threads)


def test_the_numbers_of_an_empty_answer_are_0() -> None:
    counts = count_threads((), TAGS)
    numbers = (counts.acceleration_ratio, counts.parallel_ratio, counts.thread_counts_per_block)
    assert (*numbers, counts.avg_tokens_per_parallel_block) == (0.0, 0.0, 0.0, 0.0)


def test_without_tags_an_answer_has_one_path() -> None:
    assert count_threads(EXAMPLE, None) == ThreadCounts(72, 72)


def test_a_tokenizer_has_tags_only_if_each_is_one_token() -> None:
    tag_ids = {tag: (number,) for number, tag in enumerate(ALL_TAGS)}
    tags = TagIds.of(tag_ids.__getitem__)
    assert tags is not None and tags.end_thread == tag_ids["</Thread>"][0]
    assert TagIds.of(lambda text: (0,)) is None, "unknown"
    assert TagIds.of(lambda text: tuple(text.encode())) is None, "several tokens"

    def refuse(text: str) -> TokenIds:
        raise ValueError("not in the alphabet")

    assert TagIds.of(refuse) is None


def nested(inner: Sequence[int]) -> TokenIds:
    return OPEN + THREAD + text(2) + OPEN + thread(inner[0]) + thread(inner[1]) + CLOSE + text(1) + END


def test_blocks_within_threads_count_up_to_the_allowed_depth() -> None:
    answer = nested((5, 9)) + thread(4) + CLOSE
    counts = count_threads(answer, TAGS, depth=2)
    assert counts.total_num_tokens == len(answer)
    inner_thread = 2 + (2 + 4 + 9) + 1
    assert counts.num_tokens_in_the_longest_thread == 2 + 4 + inner_thread
    assert counts.threads_of_blocks == (2, 2)
    assert counts.tokens_of_blocks == (5 + 9 + 4, len(answer) - 2)
    assert counts.parallel_tokens == len(answer) - 2
    assert count_threads(answer, TAGS, depth=3) == counts
    # In the reference, the inner ``</Thread>`` ends the outer thread, the inner ``</Parallel>`` the block.
    flat = count_threads(answer, TAGS)
    assert (flat.threads_of_blocks, flat.tokens_of_blocks) == ((2,), (1 + 2 + 2 + 5 + 1 + 11,))


def test_a_thread_ends_at_its_tag_even_if_a_block_in_it_is_still_open() -> None:
    answer = OPEN + THREAD + OPEN + text(3) + END + thread(10) + CLOSE
    counts = count_threads(answer, TAGS, depth=2)
    assert counts.num_tokens_in_the_longest_thread == 2 + 4 + 10
    assert counts.threads_of_blocks == (0, 2)


any_answer = st.lists(st.sampled_from((*range(1, 7), 7, 7)), max_size=60).map(tuple)


@given(any_answer, st.integers(1, 3))
def test_in_any_text_every_token_is_counted_and_no_path_is_longer_than_the_text(
    answer: TokenIds, depth: int
) -> None:
    counts = count_threads(answer, TAGS, depth)
    assert counts.total_num_tokens == len(answer)
    assert 0 <= counts.num_tokens_in_the_longest_thread <= len(answer)
    assert bool(answer) == bool(counts.num_tokens_in_the_longest_thread)
    assert 0.0 <= counts.acceleration_ratio < 1.0
    assert 0.0 <= counts.parallel_ratio <= 1.0
    if max(counts.threads_of_blocks, default=0) < 2:
        assert counts.num_tokens_in_the_longest_thread == len(answer), "nothing ran beside anything"
    assert counts.with_parallel == (TAGS.parallel in answer)


blocks = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 3)),
    max_size=4,
)


@given(blocks, st.randoms(use_true_random=False))
def test_a_well_formed_answer_has_the_lengths_with_which_it_was_built(
    blocks_made: list[tuple[int, list[int], int]], draw: random.Random
) -> None:
    answer: TokenIds = ()
    longest = 0
    for before, threads, outlines in blocks_made:
        answer += text(before) + OPEN + text(outlines)
        for length in threads:
            answer += thread(length)
        answer += CLOSE
        longest += before + 2 + outlines + 2 * len(threads) + max(threads)
    tail = draw.randrange(5)
    counts = count_threads(answer + text(tail), TAGS)
    assert counts.num_tokens_in_the_longest_thread == longest + tail
    assert counts.threads_of_blocks == tuple(len(threads) for _, threads, _ in blocks_made)
