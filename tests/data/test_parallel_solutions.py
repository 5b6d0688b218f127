"""Promises of the deterministic steps of `make_threads`, between a model's answers and the parallel
solution:

* any answer is either read or refused with `Unreadable`, and blocks that are kept lose no word of the
  solution;
* an edit applies where its source occurs exactly once, and sentences are counted as readers count them;
* the journal keeps complete answers and has one writer at a time;
* a request waits for what requests in flight may leave of the budget.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.thread_text import without_threads
from treetune.data.asking import Ledger, Prices, without_thought
from treetune.data.parallel_solutions import (
    ThreadedBlock,
    apply_edits,
    count_sentences,
    find_results,
    split_solution,
    write_parallel_text,
)
from treetune.data.thread_blocks import (
    BlockRule,
    LineRange,
    SolutionBlock,
    ThreadGroup,
    ThreadNumber,
    _read_self_check,
    cut_blocks,
    read_json_list,
    read_thread_groups,
    saved_characters,
)
from treetune.domains.endpoints.asking import AnsweredRequest, AnswerJournal
from treetune.exceptions import OutOfBudget, Unreadable
from treetune.threads.format import find_format_faults, text_segments

TAGS = ["<parallel>", "</parallel>", "<thread>", "</thread>", "<none/>"]
PIECES = st.sampled_from([*TAGS, "1-4", "7", "lines 2-3", "9–12", "\n", "so"])
LINES = st.lists(st.sampled_from(["", "a line", "and a longer line of words", "  indented"]), max_size=30)
RANGES = st.tuples(st.integers(-1, 32), st.integers(0, 12)).map(
    lambda pair: LineRange(pair[0], pair[0] + pair[1])
)


def without_spaces(text: str) -> str:
    return "".join(text.split())


@given(st.lists(PIECES, max_size=20).map("".join) | st.text())
def test_any_answer_is_groups_of_ranges_or_unreadable(answer: str) -> None:
    try:
        groups = read_thread_groups(answer)
    except Unreadable:
        return
    assert sum(map(len, groups)) == answer.lower().count("<thread>")
    assert len(groups) == answer.lower().count("<parallel>")


def test_groups_are_read_between_other_words() -> None:
    answer = (
        "So:\n```xml\n<parallel>\n <thread>lines 4-9</thread><thread> 10 – 17 </thread></parallel>\n```\n."
    )
    assert read_thread_groups(answer) == [[(4, 9), (10, 17)]]
    assert read_thread_groups("<parallel><thread>3</thread><thread>4</thread></parallel>") == [
        [(3, 3), (4, 4)]
    ]
    assert read_thread_groups("There is none: <none/>") == []


@pytest.mark.parametrize(
    "answer",
    [
        "<parallel>text<none/><thread>1</thread></parallel>",
        "<parallel><none/><thread>1</thread></parallel>",
        "<parallel><thread>7<none/>1-3</thread></parallel>",
    ],
)
def test_none_inside_of_an_element_is_refused(answer: str) -> None:
    with pytest.raises(Unreadable, match=r"<none/> is inside of <(parallel|thread)>"):
        read_thread_groups(answer)


@given(st.text() | st.lists(st.sampled_from(["[", "]", "{", "}", '"a"', ",", ":", "1", " x"])).map("".join))
def test_any_answer_is_a_json_list_or_unreadable(answer: str) -> None:
    with suppress(Unreadable):
        assert isinstance(read_json_list(answer), list)


@pytest.mark.parametrize("number", ["[1]", '{"a": 1}', '"1"', "null", "1.5"])
@pytest.mark.parametrize("key", ["group", "thread"])
def test_a_verdict_on_something_that_is_no_thread_is_unreadable(key: str, number: str) -> None:
    verdict = json.dumps({"group": 1, "thread": 1, "pass": True, key: json.loads(number)})
    with pytest.raises(Unreadable, match="a verdict is on an unknown thread"):
        _read_self_check({ThreadNumber(1, 1)}, f"[{verdict}]")


@given(groups=st.lists(st.lists(RANGES, max_size=4), max_size=6), lines=LINES, least=st.integers(1, 60))
def test_kept_blocks_do_not_overlap_are_in_order_lose_no_word_and_save_enough(
    groups: list[ThreadGroup], lines: list[str], least: int
) -> None:
    kept, dropped = cut_blocks(groups, lines, BlockRule(least, max_threads=3))
    assert len(kept) + len(dropped) == len(groups)
    assert all(block.last < next_block.first for block, next_block in pairwise(kept))
    for block in kept:
        assert 1 <= block.first <= block.last <= len(lines)
        assert 2 <= len(block.threads) <= 3
        assert all(thread.strip() == thread != "" for thread in block.threads)
        assert saved_characters(block.threads) >= least
        lines_of_block = lines[block.first - 1 : block.last]
        assert without_spaces("".join(block.threads)) == without_spaces("".join(lines_of_block))


@given(
    lines=LINES,
    groups=st.lists(st.lists(RANGES, max_size=4), max_size=6),
    opening=st.sampled_from(["", "<think>\n", "<think>"]),
    conclusion=st.sampled_from(["", "</think>\n\nThe answer.", "</think> a </think> b"]),
)
def test_a_parallel_text_has_the_words_of_the_solution_in_the_form_of_rollouts(
    lines: list[str], groups: list[ThreadGroup], opening: str, conclusion: str
) -> None:
    solution = opening + "\n".join(lines) + conclusion
    parts = split_solution(solution)
    assert parts[0] + parts[1] + parts[2] == solution
    lines_of_thought = parts[1].split("\n")
    kept, _ = cut_blocks(groups, lines_of_thought, BlockRule(1))
    blocks = []
    for block in kept:
        outlines = tuple("x" * len(block.threads))
        blocks.append(ThreadedBlock(block.first, block.last, outlines, block.threads))
    text = write_parallel_text(parts, lines_of_thought, blocks)
    assert "".join(piece.text for piece in text_segments(text)) == text
    assert find_format_faults(text, conclusions="refused", adjacent=True) == []
    assert text.count("<Parallel>") == len(kept)
    assert without_spaces(without_threads(text)) == without_spaces(solution)
    assert text.endswith(conclusion)


def test_only_the_thought_is_divided_into_threads() -> None:
    parts = split_solution("<think>\na\nb\n</think>\n\nThe answer is a.")
    assert parts == ("<think>\n", "a\nb\n", "</think>\n\nThe answer is a.")


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ([{"source": "b", "destination": ""}], "occurs 2 times"),
        ([{"source": "z", "destination": ""}], "occurs 0 times"),
        ([{"source": "", "destination": "x"}], "isn't a source and a destination"),
        ([{"source": "a"}], "isn't a source and a destination"),
        (["a"], "isn't a source and a destination"),
        ([{"source": "a", "destination": "</Thread>"}], "holds a tag"),
        ([{"source": "a b b", "destination": " "}], "nothing is left"),
        (json.loads(r'[{"source": "a", "destination": "\frac"}]'), "are backslashes doubled"),
        (json.loads(r'[{"source": "a", "destination": "\neq b"}]'), "are backslashes doubled"),
        ([{"source": "a", "destination": "b b"}, {"source": "b b b", "destination": "x"}], "occurs 2 times"),
    ],
)
def test_an_edit_whose_source_does_not_occur_exactly_once_or_that_is_malformed_is_refused(
    edits: list[Any], reason: str
) -> None:
    with pytest.raises(Unreadable, match=reason):
        apply_edits("a b b", edits)


def test_edits_apply_one_after_the_other() -> None:
    edits = [{"source": "like x, ", "destination": ""}, {"source": "y", "destination": "y"}]
    assert apply_edits("like x, find y", edits) == ("find y", [("like x, ", "")])


def test_a_number_of_an_outline_is_a_result_if_it_occurs_in_its_thread_alone() -> None:
    thread = "There are 33 of them, and 3.5 more in case 2."
    assert find_results("Find the 33.", "up to 200", thread, 2) == ["33"]
    assert find_results("Find 3.5 and 35.", "up to 200", thread, 2) == ["3.5"]
    assert find_results("Case 2, up to 200.", "up to 200", thread, 2) == []
    assert find_results("Find the 33.", "33 is known", thread, 2) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Find 3.5 of x, e.g. by trial. Then stop.", 2),
        ("No dot", 1),
        ("One! Two? Three.", 3),
        ("Check cf. Eq. 3 first", 1),
        ("Find A. Then find B. Compare them.", 3),
        ("Solve $f(x). G = 1$ for x. Check it.", 2),
        ("Multiply 3.5 by 2. 7 is added then, see Eq. 3 there. Stop.", 3),
        ("Use U.S. 5 as a base.", 1),
        ("Solve $f(x). 5 = 1$ for x. 7 is checked.", 2),
        ("Solve $x + 1.$ 5 is added (as in 2.) 3 remain.", 3),
        ("Encuentra x. ¿Es par? ¡Súmalo!", 3),
        ("先求第一个数。再求第二个数。最后相加。", 3),
        ("まず3.5倍する。次に足す！", 2),
        ("Найти корни. Проверить их, см. Рис. 2. Сложить.", 3),
        ("Найти точку А. Затем найти Б, т. е. Центр.", 2),
        ("Βρες το x. Είναι άρτιο; Γράψε το.", 3),
        ("أوجد القيمة. هل هي زوجية؟ اجمعها.", 3),
        ("पहला मान निकालो। फिर जोड़ो।", 2),
        ("Znajdź x. Żądaj, by y było parzyste. Šest. Tính z. Đếm.", 5),
    ],
)
def test_sentences_are_counted_in_spite_of_abbreviations_formulas_and_scripts(text: str, count: int) -> None:
    assert count_sentences(text) == count


def test_a_thought_before_an_answer_is_removed() -> None:
    assert without_thought("<think>\n[1] no\n</think>\n\n[2]") == "[2]"
    assert without_thought("[2] </think>") == "[2] </think>"


ANSWER = AnsweredRequest("k", "steps", "text \ud800", True, 10, 2, False)


def test_the_journal_keeps_complete_answers_and_has_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = AnswerJournal(path, lambda answer: None)
    journal.add(ANSWER)
    with pytest.raises(ValueError, match="another process is writing"):
        AnswerJournal(path, lambda answer: None)
    journal.close()
    with path.open("ab") as file:
        file.write(b"\0\0\n" + json.dumps({"key": "torn"}).encode())
    counted: list[AnsweredRequest] = []
    again = AnswerJournal(path, counted.append)
    later = AnsweredRequest("l", "check", "", False, 0, 0, True)
    again.add(later)
    assert counted == [ANSWER]
    assert again.get("k") == ANSWER
    assert again.get("l") == later
    assert again.get("torn") is None
    again.close()


def test_a_request_waits_for_what_requests_in_flight_may_leave_of_the_budget() -> None:
    async def spend() -> list[str]:
        ledger = Ledger(Prices(input=0, output=1e6), budget=10)
        order: list[str] = []

        async def request(name: str, most: int, really: int) -> None:
            try:
                async with ledger.reserve(0, most):
                    order.append(f"{name} begins")
                    await asyncio.sleep(0)
                    ledger.steps[name].add(0, really, False)
                    order.append(f"{name} ends")
            except OutOfBudget:
                order.append(f"{name} is refused")

        await asyncio.gather(request("a", 6, 2), request("b", 6, 4), request("c", 6, 4))
        assert ledger.dollars == 6
        return order

    assert asyncio.run(spend()) == ["a begins", "a ends", "b begins", "b ends", "c is refused"]


def test_a_block_is_dropped_with_its_reason() -> None:
    lines = ["a" * 300, "b" * 300, "c", "d" * 300]
    first, second, third, fourth = (LineRange(number, number) for number in (1, 2, 3, 4))
    groups = [[first, second], [second, fourth], [fourth, fourth], [third, fourth], []]
    kept, dropped = cut_blocks(groups, lines, BlockRule(200))
    assert kept == [SolutionBlock(1, 2, ("a" * 300, "b" * 300), (first, second))]
    assert sorted(block.reason for block in dropped) == [
        "fewer than two threads with text",
        "lines between threads that are in none",
        "threads overlap or are in disorder",
        "too little is saved",
    ]
