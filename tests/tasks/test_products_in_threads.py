"""Products in threads: written as documented, well-formed, and with the lines of the sequential solution."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.thread_text import without_threads
from tests.tasks.test_arithmetic_tasks import problem_of
from treetune.tasks.arithmetic import SLIPS
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.multiplication import Multiplication
from treetune_threads.format import faults, text_segments

WRITTEN_IN_THREADS = """\
<Parallel><Outlines><Outline>1:40</Outline><Outline>2:7</Outline></Outlines>
<Thread>
1:20*40=800
3*40=120
800+120=920
</Thread><Thread>
2:20*7=140
3*7=21
140+21=161
</Thread>
</Parallel>
920+161=1081
#1081"""

WRITTEN_IN_PAIRS = """\
<Parallel><Outlines><Outline>1:2*13</Outline><Outline>2:30*5</Outline></Outlines>
<Thread>
1:2*10=20
2*3=6
20+6=26
</Thread><Thread>
2:30*5=150
</Thread>
</Parallel>
<Parallel><Outlines><Outline>1:26*100</Outline><Outline>2:26*50</Outline></Outlines>
<Thread>
1:26*100=2600
</Thread><Thread>
2:26*50=1300
</Thread>
</Parallel>
2600+1300=3900
#3900"""

WRITTEN_IN_WORDS = """\
<think>
<Parallel>
<Outlines>
<Outline>1: Multiply 23 by 40.</Outline>
<Outline>2: Multiply 23 by 7.</Outline>
</Outlines>
<Thread>
1: 23*40=920
</Thread><Thread>
2: 23*7=161
</Thread>
</Parallel>
920+161=1081
</think>

The product is \\boxed{1081}."""

IN_WORDS = {"wording": "words", "grader": Numeric(without_marker="boxed")}


def test_products_in_threads_are_written_as_documented() -> None:
    digits = Multiplication(form="digits", detail="digits")
    assert digits.demonstration(problem_of(digits, 23, 47), 0) == WRITTEN_IN_THREADS
    assert digits.demonstration(problem_of(digits, 23, 40), 0) == "20*40=800\n3*40=120\n800+120=920\n#920"
    tree, tree_digits = (
        Multiplication(form=form, factors=4, min_value=0, max_value=30) for form in ("tree", "tree_digits")
    )
    in_pairs = tree.demonstration(problem_of(tree, 2, 13, 30, 5), 0)
    assert in_pairs.startswith(WRITTEN_IN_PAIRS[: WRITTEN_IN_PAIRS.index("<Parallel>", 1)])
    assert in_pairs.endswith("</Parallel>\n26*100=2600\n26*50=1300\n2600+1300=3900\n#3900")
    of_places = tree_digits.demonstration(problem_of(tree_digits, 2, 13, 30, 5), 0)
    assert "<Outline>1:2*10</Outline><Outline>2:2*3</Outline><Outline>3:30*5</Outline>" in of_places
    assert of_places.endswith(WRITTEN_IN_PAIRS[WRITTEN_IN_PAIRS.rindex("<Parallel>") :])
    words = Multiplication(form="digits", **IN_WORDS)
    assert words.demonstration(problem_of(words, 23, 47), 0) == WRITTEN_IN_WORDS
    assert "product of 23, 47 and 5?" in words._prompt((23, 47, 5))


threaded = st.builds(
    Multiplication,
    form=st.sampled_from(["tree", "digits", "tree_digits"]),
    factors=st.one_of(st.integers(4, 6), st.just((4, 7))),
    detail=st.sampled_from(["partials", "digits"]),
    parallelise=st.sampled_from([0.0, 0.5, 1.0]),
    demonstration_noise=st.sampled_from([0.0, 0.3]),
    min_value=st.just(0),
    max_value=st.sampled_from([9, 40, 1000]),
    train_size=st.just(3),
    validation_size=st.just(1),
    test_size=st.just(1),
)


@given(threaded, st.integers(0, 9))
@settings(max_examples=60)
def test_solutions_in_threads_are_well_formed_and_their_lines_go_on_from_each_other(
    task: Multiplication, seed: int
) -> None:
    for problem in task.problems("train"):
        text = task.demonstration(problem, seed)
        assert "".join(piece.text for piece in text_segments(text)) == text
        assert faults(text, adjacent=True, conclusions="refused") == []
        assert ("<Parallel>" in text) <= (task.parallelise > 0)
        lines = without_threads(text).split("\n")
        for asked, written in (line.split("=") for line in lines[:-1]):
            slips = SLIPS if task.demonstration_noise else ()
            assert int(written) - eval(asked) in (0, *slips)
        assert lines[-1] == f"#{written}"
        if not task.demonstration_noise:
            assert task.grader.grade(text, problem).reward == 1.0
        for piece in text_segments(text):
            assert set(re.sub("</?[A-Z][a-z]+>", "", piece.text)) <= set(task.alphabet())


@given(threaded, st.integers(0, 9))
@settings(max_examples=30)
def test_the_fold_in_threads_has_the_lines_of_the_sequential_solution_slips_included(
    task: Multiplication, seed: int
) -> None:
    task = replace(task, form="digits", demonstration_noise=0.3)
    for problem in task.problems("train"):
        sequential = task.sequential_demonstration(problem, seed)
        assert "<" not in sequential
        threads = without_threads(task.demonstration(problem, seed))
        assert sorted(threads.split("\n")) == sorted(sequential.split("\n"))


def test_a_share_of_the_blocks_is_opened() -> None:
    task = Multiplication(form="digits", parallelise=0.3, digits=3, train_size=400)
    opened = sum("<Parallel>" in task.demonstration(problem, 1) for problem in task.problems("train"))
    assert 80 < opened < 160


def test_the_teachers_value_of_products_digit_by_digit_is_exact_and_of_threads_unknown() -> None:
    task = Multiplication(detail="digits", demonstration_noise=0.1)
    problem = problem_of(task, 23, 47)
    assert task.teacher_value(problem, "20*40=800\n3*40=120\n") == pytest.approx(0.9**5)
    for otherwise in ({"form": "digits"}, {"factors": 3}, IN_WORDS):
        with pytest.raises(ValueError, match="only known for form 'sequential' and wording 'symbols'"):
            replace(task, **otherwise).teacher_value(problem, "")
