"""Answers of an experiment, searched, filtered by anything that is known of them, sorted, in pages; and all
answers to one problem along training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import RedirectResponse, Response

from treetune.exceptions import NotThere
from treetune.view.notes import labels_in_use
from treetune.view.page import Page, PageRequest, paged
from treetune.view.store.answers import AnswerStore
from treetune.view.store.folders import digest
from treetune.view.store.index import AnswerFile
from treetune.view.store.queries import ColumnFilter, RowQuery, among, condition, parsed
from treetune.view.store.tables import Histogram, HistogramBar
from treetune.vocabulary import CORRECT_SCORE

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
LARGEST = "advantage_size"
"""The column that answers are sorted by where the address doesn't say: those with the most credit first."""
USUAL = ("advantage_mean", LARGEST, "first_value")
"""Numbers that a row shows where there are any and the address names none."""
COUNTED = ("reward", "tokens", LARGEST)
"""What histograms above the list are of."""
PLACE = "place"
"""The order in which answers are stored, as addresses and the list call it."""

NOT_FOR_SORTING = ("answer", "asked", "row", "episode_place", "episode_last", "credited")

LISTED = (
    "of", "group", "search", "problem", "domain", "outcome", "verdict", "unfinished", "label", "where",
    "column", "sort", "order", "size", "page",
)  # fmt: skip
"""Fields of an address that say which answers are listed, and how: an answer's page keeps them."""

MOST = 2000
"""Answers to a problem that are shown of an experiment."""

MOST_EARLIER = 200
"""Earlier iterations in which a problem's last answers are looked for."""
IN_A_BAR = 32
"""Answers to a problem whose advantages are drawn in its row."""
OF_PROBLEMS = ("credit", "pass rate", "spread", "change", "tokens", "problem")
"""What problems are sorted by."""


def show(view: PageRequest) -> Response:
    """`?run=`, `?of=` (one file, or one of `SEVERAL`), `?search=` in the text, `?problem=` (a part of its
    name), `?group=` (all of it), `?domain=`, `?outcome=`, `?verdict=`, `?unfinished=1`, `?label=` (or
    `ANY_NOTE`), `?where=` (conditions), `?sort=`, `?order=down`, `?column=` (also several)."""
    answers = view.store.answers(view.run)
    indexed = answers.indexed()
    columns = answers.columns()
    by_name = {one.source.name: one.source for one in indexed}
    notes = view.store.notes(view.run)
    question, of = asked_of(view, answers)
    result = answers.ask(question)
    chosen = [one for name, one in by_name.items() if name in (question.sources or [name])]
    domains = []
    if "domain" in columns:
        distinct = "SELECT DISTINCT domain FROM answers WHERE domain <> '' ORDER BY domain"
        domains = [row["domain"] for row in answers.sql(distinct, sources=question.sources)]
    # Further numbers of the rows: those that are chosen, else the usual ones, and what is asked about.
    shown = view.request.query_params.getlist("column") or list(USUAL)
    further = dict.fromkeys([*shown, *(one.column for one in question.filters), question.sort])
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
        noted=notes.rows(),
        labels_of=lambda own: list(dict.fromkeys(label for note in own for label in note.labels)),
        labels=labels_in_use([notes]),
        any_note=ANY_NOTE,
        groups=files_of(answers),
        title_of=lambda row: by_name[row["source"]].title if row["source"] in by_name else row["source"],
        outcomes=OUTCOMES,
        sizes=SIZES,
        histograms="/answers/histograms" + view.here().removeprefix(view.page.path),
        drawn_as=digest(answers.mark(), view.request.url.query),
        both_graded="number.judge" in columns and "number.rule" in columns,
        domains=domains,
        sortable=[name for name in columns if name not in NOT_FOR_SORTING],
        shown=[name for name in further if name in columns and name not in ALWAYS],
        address_of=lambda row: address_of(view, row, **listed_as(view) | {"page": question.page}),
    )


def show_histograms(view: PageRequest) -> Response:
    """Takes the address of the list: what is counted above it comes after it."""
    answers = view.store.answers(view.run)
    question, _ = asked_of(view, answers)
    drawn = answers.histograms(question, COUNTED)
    return rendered_histograms(view, [one for one in drawn if len(one.bars) > 1], "answers", view.run.name)


def rendered_histograms(view: PageRequest, drawn: Sequence[Histogram], of: str, name: str) -> Response:
    """Shows histograms of a list of rows or answers, which their bars filter."""

    def with_bar(own: Histogram, bar: HistogramBar) -> str:
        inside = f"{own.column} >= {bar.low!r}; {own.column} < {bar.high!r}"
        where = "; ".join(filter(None, [view.text("where").strip(), inside]))
        return f"/{of}" + view.here(where=where, page=None).removeprefix(view.page.path)

    back = f"/{of}" + view.here().removeprefix(view.page.path)
    return view.render("histograms.html", histograms=drawn, with_bar=with_bar, of=of, name=name, back=back)


def files_of(answers: AnswerStore) -> dict[str, list[AnswerFile]]:
    """Returns the files by what they are, the newest first."""
    there = answers.sources()
    groups = {kind: [one for one in reversed(there) if f"{one.kind}s" == kind] for kind in SEVERAL[1:]}
    return {kind: own for kind, own in groups.items() if own}


def asked_of(view: PageRequest, answers: AnswerStore) -> tuple[RowQuery, str]:
    """Returns what the address asks for, and what of (one file, or one of `SEVERAL`). Raises ValueError for
    what answers don't have, and NotThere for a kind of files that there are none of yet."""
    columns, there = answers.columns(), answers.sources()
    iterations = [
        one.source.name for one in answers.indexed() if one.about and one.source.kind == "iteration"
    ]
    of = view.text("of") or (iterations[-1] if iterations else SEVERAL[0])
    names: tuple[str, ...] = (of,)  # none for all
    if of in SEVERAL:
        names = tuple(one.name for one in there if f"{one.kind}s" == of)
        if of != SEVERAL[0] and not names:
            raise NotThere(f"{answers.run.name} has no answers of {of} yet")
    elif of not in [one.name for one in there]:
        raise ValueError(f"there are no answers {of!r}: there are {', '.join(one.name for one in there)}")
    filters = [*_filters(view), *parsed(view.text("where"), columns)]
    question = question_of(view, filters, names)
    if not question.sort and LARGEST in answers.columns(names):
        question = replace(question, sort=LARGEST, descending=view.text("order", "down") == "down")
    elif question.sort == PLACE:
        question = replace(question, sort="")
    if label := view.text("label"):
        labelled: dict[str, list[int]] = {}
        for (source, row), own in view.store.notes(answers.run).rows().items():
            if label == ANY_NOTE or any(label in note.labels for note in own):
                labelled.setdefault(source, []).append(row)
        question = replace(question, among=labelled)
    return question, of


def listed_as(view: PageRequest) -> dict[str, list[str]]:
    """Returns what the address says of the list."""
    given = {name: view.request.query_params.getlist(name) for name in LISTED}
    return {name: values for name, values in given.items() if any(values)}


def address_of(view: PageRequest, row: Mapping[str, Any], **query: Any) -> str:
    """Returns the address of one answer of the index."""
    return view.address("/answer", run=view.run.name, source=row["source"], answer=row["answer"], **query)


def whole(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Returns rows of the index with None for what their file has nothing of."""
    blank = dict.fromkeys([*ALWAYS, *columns])
    return [blank | dict(row) for row in rows]


def question_of(
    view: PageRequest, filters: Sequence[ColumnFilter], sources: tuple[str, ...] = ()
) -> RowQuery:
    """Returns the question with the search, the order and the page of the address."""
    return RowQuery(
        sources=sources,
        filters=tuple(filters),
        search=view.text("search"),
        sort=view.text("sort"),
        descending=view.choice("order", ("up", "down")) == "down",
        page=view.integer("page", 1, least=1),
        size=int(view.choice("size", SIZES)),
    )


def _filters(view: PageRequest) -> Iterator[ColumnFilter]:
    if problem := view.text("problem"):
        yield ColumnFilter("problem", "has", problem)
    if problem := view.text("group"):
        yield ColumnFilter("problem", "=", problem)
    for name in ("domain", "outcome"):
        if value := view.text(name):
            yield ColumnFilter(name, "=", value)
    if verdict := view.choice("verdict", VERDICTS):
        yield ColumnFilter("score", ">=" if verdict == "right" else "<", CORRECT_SCORE)
    if view.choice("unfinished", ("", "1")):
        yield ColumnFilter("unfinished", "=", True)


# Problems


def show_problems(view: PageRequest) -> Response:
    """`?run=`, `?of=`, `?problem=` and other filters of answers, `?signal=none` (no answer has any credit) or
    `some`, `?problems=` (what they are sorted by), `?order=`, `?page=`: a row for each problem."""
    answers = view.store.answers(view.run)
    question, of = asked_of(view, answers)
    columns, own = answers.columns(), answers.columns(question.sources)
    where, values = condition(question.filters, columns, own)
    where = f"{where} AND {among(question.among)}"
    size = f"max({LARGEST})" if LARGEST in own else "NULL"
    rows = (
        answers.sql(
            f"""
        SELECT problem, any_value(asked) AS asked, count(*) AS answers, count(score) AS graded,
            count(*) FILTER (score >= ?) AS right_ones,
            coalesce(stddev_pop(reward), 0) AS spread, avg(tokens) AS tokens, {size} AS credit
        FROM answers WHERE {where} GROUP BY problem ORDER BY problem
        """,
            [CORRECT_SCORE, *values],
            question.sources,
        )
        if columns
        else []
    )
    earlier = _earlier_rates(answers, of)
    for row in rows:
        row["pass rate"] = row["right_ones"] / row["graded"] if row["graded"] else None
        row["before"], rate = earlier.get(row["problem"], ("", None))
        is_known = rate is not None and row["pass rate"] is not None
        row["change"] = row["pass rate"] - rate if is_known else None
        row["signal"] = bool(row["spread"] if row["credit"] is None else row["credit"])
    signal = view.choice("signal", ("", "some", "none"))
    chosen = [row for row in rows if signal in ("", "some" if row["signal"] else "none")]
    sort = view.choice("problems", OF_PROBLEMS, "credit" if LARGEST in own else "spread")
    descending = view.choice("order", ("down", "up") if sort != "problem" else ("up", "down")) == "down"
    if sort == "change":  # the largest in either direction
        chosen.sort(key=lambda row: abs(row["change"] or 0.0), reverse=descending)
    else:
        chosen.sort(key=lambda row: row[sort] if row[sort] is not None else -math.inf, reverse=descending)
    listed = paged(view, chosen, question.size)
    bars: dict[str, list[dict[str, Any]]] = {}
    if listed.rows:
        mean = "advantage_mean" if "advantage_mean" in own else "NULL::DOUBLE"
        names = [row["problem"] for row in listed.rows]
        for one in answers.sql(
            f"""
            SELECT problem, source, answer, score,
                coalesce({mean}, score - avg(score) OVER (PARTITION BY problem)) AS advantage FROM answers
            WHERE {where} AND list_contains(?, problem)
            QUALIFY row_number() OVER (PARTITION BY problem ORDER BY source, row) <= {IN_A_BAR}
            ORDER BY source, row
            """,
            [*values, names],
            question.sources,
        ):
            bars.setdefault(one["problem"], []).append(one)
    sizes = [abs(one["advantage"] or 0.0) for own_bars in bars.values() for one in own_bars]
    return view.render(
        "problems.html",
        of=of,
        groups=files_of(answers),
        listed=listed,
        total=len(rows),
        silent=sum(not row["signal"] for row in rows),
        sort=sort,
        sorts=OF_PROBLEMS,
        descending=descending,
        bars=bars,
        largest=max(sizes, default=0.0) or 1.0,
        first_of=lambda row: view.address("/answer", run=view.run.name, of=of, group=row["problem"], page=1),
        address_of=lambda row: address_of(view, row, of=of, group=row["problem"]),
    )


def _earlier_rates(answers: AnswerStore, of: str) -> dict[str, tuple[str, float | None]]:
    """Returns by problem the last file of the same kind before `of` that has answers to it, and the share of
    these that was right, None where none was graded; nothing where `of` are several files."""
    there = {one.name: one for one in answers.sources()}
    if of not in there:
        return {}
    this = there[of]
    before = [
        one
        for one in there.values()
        if (one.kind, one.label) == (this.kind, this.label) and one.number < this.number
    ]
    names = [one.name for one in sorted(before, key=lambda one: one.number)][-MOST_EARLIER:]
    if not names:
        return {}
    rows = answers.sql(
        "SELECT problem, source, avg((score >= ?)::INTEGER) AS rate FROM answers GROUP BY problem, source",
        [CORRECT_SCORE],
        names,
    )
    rows.sort(key=lambda row: there[row["source"]].number)
    return {row["problem"]: (there[row["source"]].title, row["rate"]) for row in rows}


def show_problem(view: PageRequest) -> Response:
    """Leads to all answers to a problem along training: `?run=` (also several) and `?problem=`."""
    query = {"run": [run.name for run in view.runs], "group": view.text("problem")}
    return RedirectResponse(view.address("/answers", **query, of="everything", sort=PLACE), 303)


def mark_of_answers(view: PageRequest) -> str:
    """Returns the mark of pages about the answers of all experiments in the address."""
    return digest([view.store.answers(run).mark() for run in view.runs], view.request.url.query)


PAGES = (
    Page(
        "/answers",
        "AnswerStore",
        show,
        place="run",
        key="a",
        mark=lambda view: digest(view.store.answers(view.run).mark(), view.store.notes(view.run).mark()),
    ),
    Page("/answers/histograms", "Histograms", show_histograms, mark=mark_of_answers),
    Page("/problems", "Problems", show_problems, place="run", key="p", mark=mark_of_answers),
    Page("/problem", "Problem", show_problem, mark=mark_of_answers),
)
