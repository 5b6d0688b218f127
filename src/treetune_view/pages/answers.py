"""Answers of an experiment, searched, filtered by anything that is known of them, sorted, in pages; and all
answers to one problem along training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from treetune.vocabulary import CORRECT_SCORE
from treetune_view.notes import labels_in_use
from treetune_view.page import Page, View
from treetune_view.pages.agreement import graded_by_both
from treetune_view.store import NotThere, Run
from treetune_view.store.answers import Answers
from treetune_view.store.folders import digest
from treetune_view.store.queries import Filter, Question, parsed

SIZES = ("50", "20", "200")
"""Rows of one page; the first where the address doesn't say."""

OUTCOMES = ("ok", "no_answer", "timeout", "error", "unavailable")
VERDICTS = ("", "right", "wrong")
SEVERAL = ("everything", "iterations", "evaluations")
"""Choices of answers that are no single file. By default it is the newest iteration, or everything."""

ANY_NOTE = ","
"""A choice in place of a label: whatever has a note. No label can have a comma."""

ALWAYS = (
    "source", "row", "answer", "problem", "sample", "score", "reward", "outcome", "unfinished", "tokens",
    "asked", "beginning",
)  # fmt: skip
USUAL = ("advantage_mean", "logprob_mean", "first_value")
"""Numbers that a row shows where there are any."""

NOT_FOR_SORTING = ("answer", "asked", "place", "row", "episode_place", "episode_last", "credited")

MOST, LEAST = 2000, 16
"""Answers to a problem that are shown of an experiment, and of one file where that has so many files."""


def show(view: View) -> Response:
    """`?run=`, `?of=` (one file, or one of `SEVERAL`), `?search=` in the text, `?problem=`,
    `?domain=`, `?outcome=`, `?verdict=`, `?unfinished=1`, `?label=` (or `ANY_NOTE`), `?where=` (conditions),
    `?sort=`, `?order=down`."""
    answers = view.store.answers(view.run)
    indexed = answers.indexed()
    columns = answers.columns()
    by_name = {one.source.name: one.source for one in indexed}
    iterations = [one.source.name for one in indexed if one.about and one.source.kind == "iteration"]
    of = view.text("of") or (iterations[-1] if iterations else SEVERAL[0])
    notes = view.store.notes(view.run)
    noted = notes.rows()
    question = _question(view, answers, columns, of)
    if label := view.text("label"):
        among: dict[str, list[int]] = {}
        for (source, row), own in noted.items():
            if label == ANY_NOTE or any(label in note.labels for note in own):
                among.setdefault(source, []).append(row)
        question = replace(question, among=among)
    result = answers.ask(question)
    chosen = [one for name, one in by_name.items() if name in (question.sources or [name])]
    groups = {
        group: [one for one in reversed(by_name.values()) if one.kind == kind]  # newest first
        for group, kind in (("iterations", "iteration"), ("evaluations", "evaluation"))
    }
    domains = []
    if "domain" in columns:
        distinct = "SELECT DISTINCT domain FROM answers WHERE domain <> '' ORDER BY domain"
        domains = [row["domain"] for row in answers.sql(distinct, sources=question.sources)]
    # Further numbers of the rows: the usual ones, and what is asked about.
    further = dict.fromkeys([*USUAL, *(one.column for one in question.filters), question.sort])
    return view.render(
        "answers.html",
        question=question,
        of=of,
        result=result,
        contents=sorted({one.content for one in chosen} or {"answers"}),
        rows=whole(result.rows, columns),
        pages=max(1, -(-result.total // question.size)),
        waiting=[one.source.title for one in indexed if one.is_awaited],
        problems=[*answers.problems(), *notes.problems()],
        noted=noted,
        labels_of=lambda own: list(dict.fromkeys(label for note in own for label in note.labels)),
        labels=labels_in_use([notes]),
        any_note=ANY_NOTE,
        groups={group: own for group, own in groups.items() if own},
        title_of=lambda row: by_name[row["source"]].title if row["source"] in by_name else row["source"],
        outcomes=OUTCOMES,
        sizes=SIZES,
        both_graded=graded_by_both(columns),
        domains=domains,
        sortable=[name for name in columns if name not in NOT_FOR_SORTING],
        shown=[name for name in further if name in columns and name not in ALWAYS],
        address_of=lambda row: address_of(view, row),
    )


def address_of(view: View, row: Mapping[str, Any]) -> str:
    """Returns the address of one answer of the index."""
    return view.address("/answer", run=view.run.name, source=row["source"], answer=row["answer"])


def whole(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Returns rows of the index with None for what their file has nothing of."""
    blank = dict.fromkeys([*ALWAYS, *columns])
    return [blank | dict(row) for row in rows]


def _question(view: View, answers: Answers, columns: Mapping[str, str], of: str) -> Question:
    """Returns what the address asks for. Raises ValueError for what answers don't have, and NotThere for a
    kind of files that there are none of yet."""
    there = answers.sources()
    names: tuple[str, ...] = (of,)  # none for all
    if of in SEVERAL:
        names = tuple(one.name for one in there if f"{one.kind}s" == of)
        if of != SEVERAL[0] and not names:
            raise NotThere(f"{answers.run.name} has no answers of {of} yet")
    elif of not in [one.name for one in there]:
        raise ValueError(f"there are no answers {of!r}: there are {', '.join(one.name for one in there)}")
    return question_of(view, [*_filters(view), *parsed(view.text("where"), columns)], names)


def question_of(view: View, filters: Sequence[Filter], sources: tuple[str, ...] = ()) -> Question:
    """Returns the question with the search, the order and the page of the address."""
    return Question(
        sources=sources,
        filters=tuple(filters),
        search=view.text("search"),
        sort=view.text("sort"),
        descending=view.choice("order", ("up", "down")) == "down",
        page=view.integer("page", 1, least=1),
        size=int(view.choice("size", SIZES)),
    )


def _filters(view: View) -> Iterator[Filter]:
    if problem := view.text("problem"):
        yield Filter("problem", "has", problem)
    for name in ("domain", "outcome"):
        if value := view.text(name):
            yield Filter(name, "=", value)
    if verdict := view.choice("verdict", VERDICTS):
        yield Filter("score", ">=" if verdict == "right" else "<", CORRECT_SCORE)
    if view.choice("unfinished", ("", "1")):
        yield Filter("unfinished", "=", True)


# One problem along training


def show_problem(view: View) -> Response:
    """`?run=` (also several), `?problem=`."""
    problem = view.text("problem")
    by_run = {run.name: _answers_to(view, run, problem) for run in [view.run, *view.runs[1:]]}
    if not any(by_run.values()):
        raise NotThere(f"there is no answer to {problem!r} in {', '.join(by_run)}")
    asked = next(one["asked"] for rows in by_run.values() for row in rows for one in row["answers"])
    return view.render("problem_answers.html", problem=problem, asked=asked or "", by_run=by_run)


def _answers_to(view: View, run: Run, problem: str) -> list[dict[str, Any]]:
    """Returns the answers to a problem by file: how many, how many are right, and those that are shown."""
    answers = view.store.answers(run)
    if not answers.columns():
        return []
    sources = answers.sources()
    rows = answers.sql(
        """
        SELECT *, count(*) OVER own AS total, count(*) FILTER (score >= ?) OVER own AS right_ones
        FROM answers WHERE problem = ? WINDOW own AS (PARTITION BY source)
        QUALIFY row_number() OVER (PARTITION BY source ORDER BY row) <= ? ORDER BY row
        """,
        [CORRECT_SCORE, problem, max(LEAST, MOST // max(1, len(sources)))],
    )
    by_source: dict[str, list[dict[str, Any]]] = {}
    for row in whole(rows):
        by_source.setdefault(row["source"], []).append(row)
    return [
        {
            "source": source,
            "total": own[0]["total"],
            "right": own[0]["right_ones"],
            "answers": sorted(own, key=lambda row: row["sample"] or 0),
        }
        for source in sources
        if (own := by_source.get(source.name))
    ]


def mark_of_answers(view: View) -> str:
    """Returns the mark of pages about the answers of all experiments in the address."""
    return digest([view.store.answers(run).mark() for run in view.runs], view.request.url.query)


PAGES = (
    Page(
        "/answers",
        "Answers",
        show,
        place="run",
        key="a",
        mark=lambda view: digest(view.store.answers(view.run).mark(), view.store.notes(view.run).mark()),
    ),
    Page("/problem", "Problem", show_problem, mark=mark_of_answers),
)
