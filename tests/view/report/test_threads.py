"""Answers with threads, as the report draws them.

Promises that these tests hold:

* All text of an answer is drawn once and in its order, however its tags lie.
* Threads stand side by side with tokens, seconds and credit; the critical path is marked.
* Injected text is marked, texts are escaped, and missing or damaged trajectories only lose the seconds.
* Numbers of threads have charts, and columns in the results.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.scripted_engine import ScriptedEngine
from tests.support.threads import CODEC as CHARACTERS
from tests.support.threads import context as generation_context
from tests.support.trees import answered
from tests.view.report.page import Page
from tests.view.report.synthetic import report, summary, write_experiment, write_summary
from tests.view.report.threaded import CODEC, Fork, Thread, episode, outlines, trajectory, write_answers
from treetune.credit.episodes import whole_answer_episodes
from treetune.engine.requests import Request
from treetune.rollouts.storage import TOKENS, write_episodes, write_tokens, write_trajectories
from treetune.threads.format import TagIds
from treetune.threads.numbers import count_threads_of_answer
from treetune.threads.parallel_threads import ParallelThreads
from treetune.view.drawings import ThreadedAnswer, threads_html
from treetune.vocabulary import Episode, Problem, Trajectory


def report_of(folder: Path, answer: Trajectory, row: Episode | None = None) -> Page:
    path = write_experiment(folder / "run", iterations=1, episodes=())
    write_answers(path / "iterations/0000", [answer], [row or episode(answer, (0.5,))])
    return report(path)


def draw(answer: Trajectory) -> Page:
    """Draws one answer, without a report around it."""
    row = episode(answer, (0.5,))
    tokens = [CODEC.decode([token]) for token in row.response_ids]
    page = Page(threads_html(ThreadedAnswer(tokens, row, answer, 1.0)))
    assert page.open == []
    return page


def words_of(count: int) -> str:
    return " w" * count


def thread(tokens: int, seconds: float | None = 1.0) -> Thread:
    """Builds a thread of `tokens` words and its closing tag."""
    return Thread(words_of(tokens) + "</Thread>", seconds)


def test_threads_have_their_tokens_and_seconds_and_the_longest_is_the_critical_path() -> None:
    block = Fork((thread(18, 0.5), thread(28, 0.25)))
    answer = trajectory([f" a b {outlines(2)}", block, "</Parallel> c d"])
    page = draw(answer)
    # The header's number and colon are a token of the thread, and the end of the line before it another.
    first, second = page.texts("thread")
    assert "20 tokens · 0.5 s" in first and "30 tokens · 0.25 s" in second
    assert "critical path" in second and "critical path" not in first
    (counts,) = page.texts("counts")
    total = len(answer.response_ids)
    assert f"{total} tokens, {total - 20} on the critical path" in counts
    assert f"acceleration ratio {20 / total:.3f}" in counts and "1 block of 2 threads" in counts
    # The texts before and behind took 0.1 s each; the thread with more tokens took less time.
    assert "0.7 s on the slowest path, 0.95 s in all requests" in counts
    assert "A +0.50 throughout" in counts


def test_a_block_holds_its_outlines_its_threads_and_its_end_and_no_more() -> None:
    block = Fork((thread(1), thread(2)))
    answer = trajectory([f"before {outlines(2)}", block, "</Parallel> after"])
    page = draw(answer)
    (text,) = page.texts("block")
    assert text.startswith("<Parallel>") and text.endswith("</Parallel>")
    assert "<Outline>2: the part of digit 2</Outline>" in text
    (line, *_) = page.texts("line")
    assert line.startswith("before") and line.endswith("after")
    assert [text.replace("↵", "") for text in page.texts("injected")] == [
        "\n", "<Thread>\n1:", "<Thread>\n2:", "\n"
    ]  # fmt: skip


def test_a_block_within_a_thread_is_drawn_in_it_and_only_the_critical_path_is_marked() -> None:
    def forking(*threads: Thread) -> Thread:
        return Thread(parts=(f" i {outlines(2)}", Fork(threads), "</Parallel></Thread>"), seconds=0.1)

    inner, other = forking(thread(3), thread(9)), forking(thread(1), thread(2))
    answer = trajectory([outlines(2), Fork((inner, other)), "</Parallel> end"])
    page = draw(answer)
    outer, *_ = page.texts("thread")
    assert "critical path" in outer and outer.count("tokens") == 3, (
        "the thread has its own, and those of two within"
    )
    assert len(page.texts("thread")) == 6
    marked = page.texts("thread", "critical")
    assert len(marked) == 2 and words_of(9) in marked[1] and words_of(9) in marked[0]
    assert "longest" in page.texts("thread")[5], (
        "the longest thread of a block that is not on the critical path"
    )


def test_a_forced_end_is_injected_and_the_rollouts_counts_are_shown() -> None:
    cut = Thread(" cut off", 0.1, forced_end=True)
    answer = trajectory([outlines(1), Fork((cut,)), "</Parallel>"], truncated=1, dropped=0)
    page = draw(answer)
    assert "truncated: 1" in page.texts("counts")[0] and "dropped" not in page.texts("counts")[0]
    assert page.texts("injected")[2].endswith("</Thread>")


def test_fifty_threads_are_closed_rows_except_the_longest() -> None:
    threads = tuple(thread(5 + 7 * i % 50) for i in range(50))
    answer = trajectory([outlines(50), Fork(threads), "</Parallel>"])
    page = draw(answer)
    rows = [attrs for tag, attrs in page.elements if tag == "details" and "class" in attrs]
    assert len(rows) == 50
    assert ["open" in attrs for attrs in rows] == ["critical" in (attrs["class"] or "") for attrs in rows]
    assert len(page.texts("block", "many")) == 1


def test_credit_that_differs_is_shown_where_steps_and_threads_begin(tmp_path: Path) -> None:
    answer = trajectory([outlines(2), Fork((thread(2), thread(3))), "</Parallel>"])
    advantages = (0.1, 0.0, 0.0, -0.25, 0.0, 0.75, 0.0, 0.1)
    page = report_of(tmp_path, answer, episode(answer, advantages, [i / 10 for i in range(8)]))
    assert page.texts("state") == ["V 0.00 A +0.10", "V 0.30 A -0.25", "V 0.50 A +0.75", "V 0.70 A +0.10"]
    assert ["A -0.25" in text.split("<")[0] for text in page.texts("thread")] == [True, False]
    assert page.count("span", "down") == 2, "in the note, and the first thread"
    assert "throughout" not in page.texts("counts")[0]


def test_without_the_trajectories_threads_are_drawn_without_seconds(tmp_path: Path) -> None:
    answer = trajectory([outlines(2), Fork((thread(2), thread(3))), "</Parallel>"])
    assert " s " in report_of(tmp_path, answer).texts("counts")[0]
    path = tmp_path / "run"
    file = path / "iterations/0000/trajectories.arrow"
    content = file.read_bytes()

    def report_without_seconds() -> Page:
        page = report(path)
        assert " s " not in page.texts("counts")[0] and len(page.texts("thread")) == 2
        return page

    file.unlink()
    assert len(report_without_seconds().texts("injected")) == 5, "all tokens that aren't trained"
    # Segments that don't join to the answer of the episode are not used.
    write_trajectories(file, [replace(answer, segments=answer.segments[:-1])])
    report_without_seconds()
    file.write_bytes(content[:-500])
    text = report_without_seconds().text
    assert "iteration 1 can't be read" in text and "trajectories.arrow" in text


def test_text_in_threads_is_escaped() -> None:
    hostile = Thread(" <script>alert(1)</script> </div></details></Thread>", 0.1)
    page = draw(trajectory([outlines(1), Fork((hostile,)), "</Parallel>"]))
    assert "script" not in {tag for tag, _ in page.elements}
    assert "<script>alert(1)</script>" in page.texts("thread")[0]


def test_an_answer_of_the_rollout_is_drawn_with_all_its_text_and_its_critical_path(tmp_path: Path) -> None:
    two = "<Parallel><Outlines><Outline>1:a</Outline><Outline>2:b</Outline></Outlines>"

    def script(before: str, request: Request) -> str:
        """Writes the next text; the first thread forks again."""
        if before.endswith("</Thread>\n"):
            is_inner = before.count("<Parallel>") - before.count("</Parallel>") == 2
            return "</Parallel>b\n</Thread>" if is_inner else "</Parallel>a$"
        if before.endswith("?"):
            return f"b{two}"
        return two if before.count("<Parallel>") == 1 and before.endswith("1:") else "aab\n</Thread>"

    context = generation_context(engine=ScriptedEngine(script), context_length=4096)
    rollout = ParallelThreads(samples=1, max_tokens=200, max_depth=2)
    trajectories, _ = answered(rollout.run(context, [Problem("train/0", "?", "")]))
    (row,), _ = whole_answer_episodes(context, trajectories, [0.5])
    path = write_experiment(tmp_path / "run", iterations=1, episodes=())
    write_trajectories(path / "iterations/0000/trajectories.arrow", trajectories)
    write_episodes(path / "iterations/0000/episodes.arrow", [row], CHARACTERS)
    write_tokens(path / TOKENS, CHARACTERS, CHARACTERS.eos_id)
    page = report(path)
    outer, first, second, last = page.texts("thread")
    assert "aab" in first and "aab" in second and "aab" in last and "</Parallel>b" in outer
    counts = count_threads_of_answer(trajectories[0], TagIds.of(CHARACTERS.encode))
    assert f"{counts.num_tokens_in_the_longest_thread} on the critical path" in page.texts("counts")[0]
    assert "".join(page.texts("run")).replace("↵", "") == trajectories[0].text


TEXT = st.text("ab \n", max_size=6)
TAG = st.sampled_from(["<Parallel>", "</Parallel>", "<Outlines>", "</Outlines>", "<Thread>", "</Thread>", ""])
SAMPLED = st.lists(st.tuples(TEXT, TAG), max_size=3).map(lambda parts: "".join(map("".join, parts)))
LINE = st.recursive(
    st.lists(SAMPLED, min_size=1, max_size=2),
    lambda lines: st.lists(
        st.one_of(
            SAMPLED,
            st.lists(lines.map(lambda parts: Thread(parts=tuple(parts))), min_size=1, max_size=3).map(
                lambda threads: Fork(tuple(threads))
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(parts=LINE)
def test_all_text_is_drawn_once_and_in_its_order_however_the_tags_lie(parts: list[str | Fork]) -> None:
    answer = trajectory(parts)
    assert "".join(draw(answer).texts("run")).replace("↵", "") == answer.text


def test_metrics_of_threads_are_a_group_of_charts(tmp_path: Path) -> None:
    assert "Threads:" not in report(write_experiment(tmp_path / "plain", iterations=3)).text
    metrics = {
        "threads/num_tokens_in_the_longest_thread": 50.0,
        "threads/num_tokens_in_the_longest_thread_right": 40.0,
        "threads/num_tokens_in_the_longest_thread_max": 90.0,
        "threads/truncated": 0.5,
        "threads/dropped_tokens": 0.0,
    }
    page = report(write_experiment(tmp_path / "run", iterations=3, metrics=lambda i: metrics))
    titles = {attrs.get("aria-label") or "" for _, attrs in page.elements}
    assert {"tokens in the longest thread (critical path)", "threads cut off at their limit"} <= titles
    assert not any("max" in title or "correct" in title for title in titles)
    assert "Always 0: tokens of threads that were left out." in page.text


OWN_NUMBERS = """
from treetune.rollouts.numbers import Number, NumberGroup

@NumberGroup.register("rounds", {"count": Number("rounds of an answer")})
def measure(trajectories, codec):
    return [{} for _ in trajectories]
"""


@pytest.mark.parametrize("module_exists", [True, False])
def test_the_command_shows_numbers_of_the_package_and_of_the_users_module(
    tmp_path: Path, module_exists: bool
) -> None:
    metrics = {"threads/parallel_ratio": 0.5, "rounds/count": 2.0}
    imports = ["own_numbers" if module_exists else "no_such_module"]
    path = write_experiment(tmp_path / "run", iterations=1, metrics=lambda i: metrics, imports=imports)
    (tmp_path / "own_numbers.py").write_text(OWN_NUMBERS)
    command = [sys.executable, "-m", "treetune.main", "report", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    page = (path / "report.html").read_text()
    assert "share of tokens within blocks" in page
    assert ("rounds of an answer" in page) == module_exists
    assert ("no_such_module" in done.stdout) == (not module_exists)


def test_results_have_columns_of_threads_where_an_evaluation_counted_them(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run", iterations=3, passes={3: 0.5})
    assert "longest thread" not in report(path).text
    threads = {"num_tokens_in_the_longest_thread": 61.24, "with_parallel": 0.4375}
    write_summary(path, 3, "validation", summary(0.5, threads=threads))
    page = report(path)
    assert "with threads longest thread" in page.words and "0.438 61.2" in page.words


@pytest.mark.parametrize("count", [1, 4, 5])
def test_up_to_four_threads_stand_side_by_side(count: int) -> None:
    answer = trajectory([outlines(count), Fork((thread(2),) * count), "</Parallel>"])
    assert bool(draw(answer).texts("threads", "side")) == (count <= 4)
