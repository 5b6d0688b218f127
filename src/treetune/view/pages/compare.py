"""Compares two sets of answers to the same problems: which problems flipped, and two answers side by side."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from starlette.responses import Response

from treetune.exceptions import NotThere
from treetune.lab.paired import compare_pairs
from treetune.view.curves import setting_without_seed
from treetune.view.page import Page, PageRequest, choose_page
from treetune.view.pages.answers import fingerprint_of_answers, with_all_columns
from treetune.view.store import Run
from treetune.view.store.index import AnswerFile
from treetune.view.store.queries import ColumnFilter, RowQuery
from treetune.view.text import cut_text, make_visible
from treetune.vocabulary import CORRECT_SCORE

PROBLEMS_PER_PAGE = 100
"""The most problems on a page."""

MOST_LINKED_ANSWERS = 64
"""The most answers of each side to which the comparison of two answers has links."""

COMPARED_CHARACTERS = 6000
"""The most characters of each text that are compared."""

KINDS_OF_CHANGE = ("flipped", "flipped to right", "flipped to wrong", "better", "worse", "all")
"""The values of `?which=`, which choose the problems that are listed. A problem has flipped if one side
answers it more often right than wrong, and the other doesn't."""

# The pieces that are compared: space, words, and single other characters.
_COMPARED_PIECE = re.compile(r"\s+|\w+|[^\w\s]")


Side = tuple[Run, AnswerFile]
"""One of the two sets of answers that are compared: an experiment, and a file of its answers."""


def show(view: PageRequest) -> Response:
    """Shows which problems the two sides answer differently.

    The address has `?run=` (one experiment, two, or the seeds of two settings), `?first=` and `?second=` (the
    names of the two files), `?which=` and `?page=`. With `?problem=`, the page also shows two answers to that
    problem side by side. `?a=` and `?b=` are the numbers of these answers among the problem's answers in the
    first and in the second file, from 0.
    """
    seeds = _pair_experiments(view)
    sides = _choose_sides(view, list(seeds[0]))
    (_, first_source), (_, second_source) = sides
    # For each seed the results of both sides, by problem.
    first_results = [_results_by_problem(view, run, first_source.name) for run, _ in seeds]
    second_results = [_results_by_problem(view, run, second_source.name) for _, run in seeds]
    common_problems = sorted(set(first_results[0]).intersection(*first_results, *second_results))

    differences: list[dict[str, float]] = []  # for each seed, by problem
    for first_of_seed, second_of_seed in zip(first_results, second_results, strict=True):
        differences.append(
            {name: second_of_seed[name].share - first_of_seed[name].share for name in common_problems}
        )

    problem_rows: list[dict[str, Any]] = []  # a row for each problem, with the means over seeds
    for name in common_problems:
        first_share = math.fsum(results[name].share for results in first_results) / len(seeds)
        second_share = math.fsum(results[name].share for results in second_results) / len(seeds)
        asked_text = first_results[0][name].asked
        kinds = _kinds_of_change(first_share, second_share)
        problem_rows.append(
            {
                "problem": name,
                "asked": asked_text,
                "first": first_share,
                "second": second_share,
                "kinds": kinds,
            }
        )
    problem_rows.sort(key=lambda row: -abs(row["second"] - row["first"]))

    which, problem = view.choice("which", KINDS_OF_CHANGE), view.text("problem")
    return view.render(
        "compare.html",
        sides=sides,
        files_of_sides=[view.store.answers(run).sources() for run, _ in sides],
        both=problem_rows,
        listed=choose_page(view, [row for row in problem_rows if which in row["kinds"]], PROBLEMS_PER_PAGE),
        which=which,
        counts={kind: sum(kind in row["kinds"] for row in problem_rows) for kind in KINDS_OF_CHANGE},
        seeds=len(seeds),
        test=compare_pairs(differences) if common_problems else None,
        problem=problem,
        pair=_compare_two_answers(view, sides, problem) if problem else None,
    )


def _kinds_of_change(first: float, second: float) -> set[str]:
    """Returns the values of `KINDS_OF_CHANGE` that list a problem, from the shares of correct answers of both
    sides.

    Example: ``_kinds_of_change(0.4, 0.6)`` is ``{"all", "better", "flipped", "flipped to right"}``.
    """
    kinds = {"all"}
    if second != first:
        kinds.add("better" if second > first else "worse")
    if (first > 0.5) != (second > 0.5):  # only one side is more often right than wrong
        kinds |= {"flipped", "flipped to right" if second > first else "flipped to wrong"}
    return kinds


class _ProblemResult(NamedTuple):
    """The result for a problem in one file."""

    share: float
    """The share of correct answers among the graded ones."""
    asked: str
    """The beginning of the problem's prompt."""


def _results_by_problem(view: PageRequest, run: Run, source: str) -> dict[str, _ProblemResult]:
    """Returns the result for each problem in a file, by the problem's name, without ungraded problems."""
    rows = view.store.answers(run).sql(
        f"SELECT problem, avg((score >= {CORRECT_SCORE})::INTEGER) AS share, any_value(asked) AS asked"
        " FROM answers WHERE score IS NOT NULL GROUP BY problem",
        sources=(source,),
    )
    return {row["problem"]: _ProblemResult(row["share"], row["asked"] or "") for row in rows}


def _pair_experiments(view: PageRequest) -> list[tuple[Run, Run]]:
    """Returns the pairs of experiments to compare.

    There is a single pair if the address names one or two experiments. If it names more, they must be seeds
    of two settings, and there is a pair for each seed that both settings have. Raises ValueError if they are
    not.
    """
    if len(view.runs) < 3:
        # The first and the last are the two experiments. A single experiment is both sides: two of its files
        # are compared.
        return [(view.run, view.runs[-1])]
    settings: dict[str, dict[Any, Run]] = {}
    for run in view.runs:
        config = view.store.experiment(run).config
        settings.setdefault(setting_without_seed(config), {})[config.get("seed")] = run
    common_seeds = set.intersection(*(set(runs_by_seed) for runs_by_seed in settings.values()))
    if len(settings) != 2 or not common_seeds:
        raise ValueError(
            f"these {len(view.runs)} experiments are {len(settings)} settings with {len(common_seeds)} seeds"
            " in common: compare two experiments, or the seeds of two settings"
        )
    first, second = settings.values()
    return [(first[seed], second[seed]) for seed in sorted(common_seeds, key=str)]


def _choose_sides(view: PageRequest, runs: Sequence[Run]) -> list[Side]:
    """Returns the two files to compare, which the address names.

    If it doesn't, two different runs are compared in the newest evaluation that both have. For a single run,
    the first and the last evaluation of a set are compared. Iterations take the place of evaluations if the
    first run has none.
    """
    sources = []
    for run in runs:
        sources_of_run = {source.name: source for source in view.store.answers(run).sources()}
        if not sources_of_run:
            raise NotThere(f"{run.name} has no answers yet")
        sources.append(sources_of_run)
    first, second = sources
    # The names of evaluations, or if there are none of iterations, from the oldest to the newest.
    candidates = [name for name, source in first.items() if source.kind == "evaluation"] or list(first)
    if runs[0] == runs[1]:
        label = first[candidates[-1]].label
        names_of_set = [name for name in candidates if first[name].label == label]
        default_first, default_second = names_of_set[0], names_of_set[-1]
    else:
        common_names = [name for name in candidates if name in second]
        if common_names:
            default_first = default_second = common_names[-1]
        else:
            default_first, default_second = candidates[-1], list(second)[-1]
    names = [view.text("first", default_first), view.text("second", default_second)]
    for run, sources_of_run, name in zip(runs, sources, names, strict=True):
        if name not in sources_of_run:
            raise NotThere(f"{run.name} has no answers {name!r}; it has {', '.join(sources_of_run)}")
    return [(run, by_name[name]) for run, by_name, name in zip(runs, sources, names, strict=True)]


def _compare_two_answers(view: PageRequest, sides: Sequence[Side], problem: str) -> dict[str, Any]:
    """Returns two answers to a problem, with their differences marked, as values for ``compare.html``."""
    rows_of_sides, chosen_rows, texts, left_out = [], [], [], []
    for (run, source), key in zip(sides, ("a", "b"), strict=True):
        answers = view.store.answers(run)
        same_problem = ColumnFilter("problem", "=", problem)
        question = RowQuery((source.name,), (same_problem,), size=MOST_LINKED_ANSWERS)
        answer_rows = with_all_columns(answers.ask(question).rows)
        if not answer_rows:
            raise NotThere(
                f"{run.name} has no answer to {problem!r} in {source.title}, or is still being read"
            )
        # `?a=` and `?b=` choose the answer on each side. A number that is too large chooses the last answer.
        row = answer_rows[min(view.integer(key, 0), len(answer_rows) - 1)]
        rows_of_sides.append(answer_rows)
        chosen_rows.append(row)
        [text] = answers.texts([(source.name, row["place"])])
        beginning, characters_left_out = cut_text(text, COMPARED_CHARACTERS)
        texts.append(beginning)
        left_out.append(characters_left_out)
    return {
        "rows": rows_of_sides,
        "chosen": chosen_rows,
        "marked": compare_texts(*texts),
        "left_out": left_out,
    }


class Piece(NamedTuple):
    """A piece of a text that is compared with another text."""

    text: str
    is_different: bool
    """Whether the other text doesn't have this piece at its place."""


def compare_texts(first: str, second: str) -> list[list[Piece]]:
    """Splits two texts into pieces that both have and pieces that differ, and returns the pieces of each.

    `compare_texts("a b", "a c")` is `[[("a ", False), ("b", True)], [("a ", False), ("c", True)]]`.
    """
    words = [_COMPARED_PIECE.findall(first), _COMPARED_PIECE.findall(second)]
    # `autojunk` ignores very frequent words when it looks for matches. Without it, long texts with few
    # different words would take minutes.
    matcher = difflib.SequenceMatcher(None, words[0], words[1], autojunk=True)
    operations = matcher.get_opcodes()

    def pieces(side: int) -> Iterator[Piece]:
        """Yields the pieces of the first (0) or the second (1) text."""
        for kind, begin_in_first, end_in_first, begin_in_second, end_in_second in operations:
            begin, end = (begin_in_first, end_in_first) if side == 0 else (begin_in_second, end_in_second)
            if begin < end:
                text = make_visible("".join(words[side][begin:end]))
                yield Piece(text, is_different=kind != "equal")

    return [list(pieces(0)), list(pieces(1))]


PAGES = (Page("/compare", "Compare", show, navigation="run", key="m", fingerprint=fingerprint_of_answers),)
