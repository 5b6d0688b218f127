"""The grammar of threads in text.

These tests promise:

* A well-formed text is cut into the segments that a rollout samples and injects, without loss.
* Any other text is refused or cut without loss, and each broken rule is named.
* Outlines are read as laxly as in the published code.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import cases
from tests.support.thread_text import without_threads
from treetune.threads.format import (
    TAGS,
    OutlineNumbers,
    TextSegment,
    find_format_faults,
    outline_numbers,
    text_segments,
)
from treetune.vocabulary import Branch

CASES = Path(__file__).parent / "cases/threads.txt"
BLOCK = (
    "<Parallel>\n<Outlines>\n<Outline>1: one</Outline>\n<Outline>2: two</Outline>\n</Outlines>\n"
    "<Thread>\n1: first\n</Thread><Thread>\n2: second\n</Thread>\n</Parallel>"
)
CONCLUDED = BLOCK.replace("\n</Parallel>", "\n<Conclusion>\nboth</Conclusion>\n</Parallel>")


@dataclass
class TextWithThreads:
    """A text with threads, and the segments and lines of which it was built."""

    segments: list[TextSegment]
    lines: list[str]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


plain = st.text("ab<T> 1:=\n", max_size=6).filter(lambda text: not any(tag in text for tag in TAGS))
line = st.text("ab1:= ", min_size=1, max_size=6).filter(lambda text: text.strip() == text)


@st.composite
def texts_with_threads(draw: st.DrawFn, branch: Branch = (), depth: int = 2) -> TextWithThreads:
    """Builds lines and blocks as a rollout samples and injects them."""
    segments: list[TextSegment] = []
    lines = draw(st.lists(line, max_size=2))
    sampled = "".join(f"{text}\n" for text in lines)
    for block in range(draw(st.integers(0, 2)) if depth else 0):
        numbers = draw(st.lists(st.sampled_from(["1", "2", "3", "7", "1.2", "10"]), min_size=1, unique=True))
        space = draw(st.sampled_from(["", "\n", " \n"]))
        outlines = "".join(f"<Outline>{number}:{draw(line)}</Outline>{space}" for number in numbers)
        segments.append(
            TextSegment(f"{sampled}<Parallel>{space}<Outlines>{outlines}</Outlines>", False, branch)
        )
        segments.append(TextSegment("\n", True, branch))
        for thread, number in enumerate(numbers):
            inside = (*branch, (block, thread))
            inner = draw(texts_with_threads(branch=inside, depth=depth - 1))
            segments.append(TextSegment(f"<Thread>\n{number}:", True, inside))
            *inner_segments, last = inner.segments or [TextSegment("", False, inside)]
            closing = "</Thread>" if last.text.endswith("\n") else "\n</Thread>"
            segments += [*inner_segments, TextSegment(last.text + closing, False, inside)]
            lines += inner.lines
        concluded = draw(st.booleans())
        segments.append(TextSegment("\n<Conclusion>\n" if concluded else "\n", True, branch))
        conclusion = draw(line) if concluded else ""
        lines += [conclusion] if concluded else []
        sampled = f"{conclusion}</Conclusion>\n</Parallel>\n" if concluded else "</Parallel>\n"
        later_lines = draw(st.lists(line, max_size=2))
        lines += later_lines
        sampled += "".join(f"{text}\n" for text in later_lines)
    if sampled:
        segments.append(TextSegment(sampled, False, branch))
    return TextWithThreads(segments, lines)


@given(texts_with_threads())
def test_a_text_is_cut_into_what_was_sampled_and_what_was_injected(
    text_with_threads: TextWithThreads,
) -> None:
    assert text_segments(text_with_threads.text) == text_with_threads.segments
    text_left = without_threads(text_with_threads.text)
    assert [text for text in text_left.split("\n") if text] == text_with_threads.lines
    assert not any(tag in text_left for tag in TAGS)


@given(plain)
def test_text_without_blocks_is_one_segment_and_stays_as_it_is(text: str) -> None:
    assert text_segments(text) == ([TextSegment(text, False, ())] if text else [])
    assert without_threads(text) == text
    assert find_format_faults(text) == []


@given(st.lists(st.sampled_from([*TAGS, "1:", "2:", "\n", " ", "a"]), max_size=30).map("".join))
def test_any_text_at_all_is_cut_without_loss_or_refused(text: str) -> None:
    without_threads(text)
    with contextlib.suppress(ValueError):
        assert "".join(segment.text for segment in text_segments(text)) == text


@pytest.mark.parametrize(("right", "wrong", "message"), cases(CASES, "refused"))
def test_text_that_no_rollout_writes_is_refused(right: str, wrong: str, message: str) -> None:
    assert right in BLOCK
    assert text_segments(BLOCK)
    with pytest.raises(ValueError, match=message):
        text_segments(BLOCK.replace(right, wrong, 1))


@pytest.mark.parametrize(("text", "numbers", "duplicates"), cases(CASES, "outlines"))
def test_outlines_are_read_as_laxly_as_published(text: str, numbers: list[str], duplicates: int) -> None:
    assert outline_numbers(f"{text}</Outlines>") == OutlineNumbers(tuple(numbers), duplicates)


NESTED = BLOCK.replace(" first", f" first\n{BLOCK}")
INNER = BLOCK.index(" first") + len(" first\n")


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (BLOCK.replace("</Parallel>", ""), {}, "1 <Parallel> and 0 </Parallel>"),
        (NESTED, {}, f"the block at character {INNER} is within another"),
        (BLOCK.replace("<Outline>2: two</Outline>\n", ""), {}, "has 1 <Outline>, 1 </Outline>, 2 <Thread>"),
        ("<Parallel></Parallel>", {}, "has 0 <Outline>, 0 </Outline>, 0 <Thread>"),
        (BLOCK, {"most_threads": 1}, "has 2 threads, more than 1"),
        (BLOCK, {"conclusions": "required"}, "has no conclusion"),
        (CONCLUDED, {"conclusions": "refused"}, "has a conclusion"),
        (CONCLUDED.replace("both", " \n"), {}, "has an empty conclusion"),
        (CONCLUDED.replace("</Conclusion>", ""), {}, "has 1 <Conclusion> and 0 </Conclusion>"),
        (BLOCK.replace("<Outline>2:", "<Outline>3:"), {}, "numbers its outlines 1, 3, which should be 1 to"),
        (BLOCK.replace("\n2: sec", "\n1: sec"), {}, "numbers its threads 1, 1, which should be 1 to 2"),
        (BLOCK.replace("2: sec", "sec"), {}, "has thread 2 without a number and a colon"),
        (BLOCK.replace("second", "<Outlines>"), {}, "has <Outlines> in thread 2"),
        (BLOCK.replace("two", "<Conclusion>"), {}, "<Conclusion>"),
        (BLOCK.replace("</Thread><Th", "</Thread>and<Th"), {}, "is not <Outlines>, outlines, </Outlines>"),
        (BLOCK.replace("</Thread><Th", "</Thread>T2<Th"), {}, "is not <Outlines>, outlines, </Outlines>"),
        (BLOCK.replace("</Outline>\n</O", "</Outline>1O\n</O"), {}, "is not <Outlines>, outlines"),
        (BLOCK.replace("\n2: sec", f"\n{'2' * 5000}: sec"), {}, "has thread 2 without a number and a colon"),
        (BLOCK.replace("<Outlines>\n", "", 1), {}, "is not <Outlines>, outlines, </Outlines>"),
        (BLOCK.replace("</Thread><", "</Thread>\n<"), {"adjacent": True}, "has white space between threads"),
        (
            f"{BLOCK}\n<Thread>\n3: more\n</Thread>",
            {},
            f"<Thread> at character {len(BLOCK) + 1} is outside of",
        ),
    ],
)
def test_each_broken_rule_is_named(text: str, settings: dict[str, object], message: str) -> None:
    assert message in "; ".join(find_format_faults(text, **settings))  # type: ignore[arg-type]


def test_well_formed_blocks_have_no_faults_with_the_settings_that_allow_them() -> None:
    assert find_format_faults(f"a\n{BLOCK}\nb\n{CONCLUDED}\nc", adjacent=True) == []
    assert find_format_faults(BLOCK, conclusions="refused") == []
    assert find_format_faults(CONCLUDED, conclusions="required") == []
    assert find_format_faults(NESTED, nesting=True) == []
    assert find_format_faults(NESTED.replace("</Thread><", "</Thread>\n<"), nesting=True) == []
    inner_fault = NESTED.replace("second", "<Outlines>", 1)
    assert find_format_faults(inner_fault, nesting=True) == [
        f"the block at character {INNER} has <Outlines> in thread 2"
    ]


def test_very_deep_blocks_are_refused() -> None:
    opening = "<Parallel><Outlines><Outline>1:a</Outline></Outlines>\n<Thread>\n1:\n"
    with pytest.raises(ValueError, match="more than 100 deep"):
        text_segments(opening * 2000)


@given(texts_with_threads(depth=1))
def test_the_text_of_a_rollout_breaks_no_rule_but_those_of_numbers(
    text_with_threads: TextWithThreads,
) -> None:
    other_faults = [
        fault
        for fault in find_format_faults(text_with_threads.text, adjacent=True)
        if "numbers its" not in fault
    ]
    assert all("without a number" in fault for fault in other_faults)
    numbered = all(
        segment.text[len("<Thread>\n") : -1] == str(segment.branch[-1][1] + 1)
        for segment in itertools.chain(text_with_threads.segments)
        if segment.injected and segment.text.startswith("<Thread>")
    )
    assert (find_format_faults(text_with_threads.text) == []) == numbered
