"""The pages of an experiment's answers, which can be searched, filtered and sorted, and of its problems."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import RedirectResponse, Response

from treetune.exceptions import NotThere
from treetune.view.notes import Note, labels_in_use
from treetune.view.page import Page, PageRequest, choose_page
from treetune.view.store.answers import AnswerStore
from treetune.view.store.folders import short_hash
from treetune.view.store.index import AnswerFile
from treetune.view.store.queries import ColumnFilter, RowQuery, among_sql, condition_sql, parse_conditions
from treetune.view.store.tables import Histogram, HistogramBar
from treetune.vocabulary import CORRECT_SCORE

PAGE_SIZES = ("50", "20", "200")
"""The choices for the number of rows on a page; the first is the default."""

OUTCOME_CHOICES = ("ok", "no_answer", "timeout", "error", "unavailable")
VERDICT_CHOICES = ("", "right", "wrong")
EVERYTHING = "everything"
SEVERAL_FILES = (EVERYTHING, "iterations", "evaluations")
"""The values of `?of=` that choose several files of answers. The default of `?of=` is the newest iteration,
or "everything" if no iteration can be shown."""

ANY_NOTE = ","
"""The value of `?label=` for answers with any note. It is no label, because no label can contain a comma."""

# The columns of the index that the list always needs.
ALWAYS_LISTED_COLUMNS = (
    "source", "row", "answer", "problem", "sample", "score", "reward", "outcome", "unfinished", "tokens",
    "asked", "beginning",
)  # fmt: skip
SIZE_COLUMN = "advantage_size"
"""The default column to sort by: answers with the largest credit come first."""
DEFAULT_COLUMNS = ("advantage_mean", SIZE_COLUMN, "first_value")
"""The default columns of the list."""
HISTOGRAM_COLUMNS = ("reward", "tokens", SIZE_COLUMN)
"""The columns of the histograms above the list."""
STORED_ORDER = "place"
"""The value of `?sort=` for the order in which answers are stored."""

NOT_FOR_SORTING = ("answer", "asked", "row", "episode_place", "episode_last", "credited")

LIST_FIELDS = (
    "of", "group", "search", "problem", "domain", "outcome", "verdict", "unfinished", "label", "where",
    "column", "sort", "order", "size", "page",
)  # fmt: skip
"""The fields of an address that describe a list of answers. The page of an answer keeps them."""

MOST_EARLIER_FILES = 200
"""The most earlier files that are searched for a problem's last answers."""
MOST_ANSWERS_OF_PROBLEM = 32
"""The most answers whose advantages are drawn in the row of a problem."""
PROBLEM_SORT_COLUMNS = ("credit", "pass rate", "spread", "change", "tokens", "problem")
"""The columns that problems can be sorted by."""


def show(view: PageRequest) -> Response:
    """Shows the list of an experiment's answers.

    The address has `?run=`, `?of=` (one file, or one of `SEVERAL_FILES`), `?search=` (in the answers' texts),
    `?problem=` (a part of a problem's name), `?group=` (a problem's whole name), `?domain=`, `?outcome=`,
    `?verdict=`, `?unfinished=1`, `?label=` (a label, or `ANY_NOTE`), `?where=` (conditions), `?sort=`,
    `?order=down`, `?column=` (also several), `?size=` and `?page=`.
    """
    answers = view.store.answers(view.run)
    indexed = answers.list_indexed_sources()
    columns = answers.columns()
    sources = {item.source.name: item.source for item in indexed}
    notes = view.store.notes(view.run)
    question, files_choice = question_of_address(view, answers)
    result = answers.ask(question)
    # A question without sources is about all of them.
    chosen_sources = [
        source for name, source in sources.items() if not question.sources or name in question.sources
    ]
    domains = []
    if "domain" in columns:
        distinct = "SELECT DISTINCT domain FROM answers WHERE domain <> '' ORDER BY domain"
        domains = [row["domain"] for row in answers.sql(distinct, sources=question.sources)]
    # Further columns: those chosen, or the default ones, and those of filters and order.
    chosen_columns = view.request.query_params.getlist("column") or list(DEFAULT_COLUMNS)
    filtered_columns = [item.column for item in question.filters]
    further_columns = dict.fromkeys([*chosen_columns, *filtered_columns, question.sort])

    def labels_of(notes_on_answer: Sequence[Note]) -> list[str]:
        """Returns the labels of all notes on an answer, each once."""
        labels: dict[str, None] = {}
        for note in notes_on_answer:
            labels |= dict.fromkeys(note.labels)
        return list(labels)

    return view.render(
        "answers.html",
        question=question,
        of=files_choice,
        result=result,
        # What the page calls its rows; without any file yet, answers.
        contents=sorted({source.content for source in chosen_sources} or {"answers"}),
        rows=with_all_columns(result.rows, columns),
        pages=max(1, math.ceil(result.total / question.size)),
        waiting=[item.source.title for item in indexed if item.is_awaited],
        problems=[*answers.problems(), *notes.problems()],
        noted=notes.rows(),
        labels_of=labels_of,
        labels=labels_in_use([notes]),
        any_note=ANY_NOTE,
        files_by_kind=group_files_by_kind(answers),
        title_of=lambda row: sources[row["source"]].title if row["source"] in sources else row["source"],
        outcomes=OUTCOME_CHOICES,
        sizes=PAGE_SIZES,
        histograms="/answers/histograms" + view.here().removeprefix(view.page.path),
        # The id of the histograms' element. It changes with the answers and the address, and the page loads
        # the histograms again when it changes.
        drawn_as=short_hash(answers.fingerprint(), view.request.url.query),
        both_graded="number.judge" in columns and "number.rule" in columns,
        domains=domains,
        sortable=[name for name in columns if name not in NOT_FOR_SORTING],
        shown=[name for name in further_columns if name in columns and name not in ALWAYS_LISTED_COLUMNS],
        address_of=lambda row: address_of(view, row, **list_fields(view) | {"page": question.page}),
    )


def show_histograms(view: PageRequest) -> Response:
    """Draws histograms for the list of answers.

    The page of the list (`show`) loads the histograms after its rows, because histograms may take seconds.
    Their address has the same fields as the address of the list.
    """
    answers = view.store.answers(view.run)
    question, _ = question_of_address(view, answers)
    histograms = answers.make_histograms(question, HISTOGRAM_COLUMNS)
    varying = [histogram for histogram in histograms if len(histogram.bars) > 1]
    return render_histograms(view, varying, "answers", view.run.name)


def render_histograms(
    view: PageRequest, histograms: Sequence[Histogram], list_name: str, data_name: str
) -> Response:
    """Returns the histograms of a list as a response.

    Each bar is a link to the list, filtered by the bar's values.

    Args:
        view: The request.
        histograms: The histograms.
        list_name: The contents of the list, "rows" or "answers". It is also the path of the list's page.
        data_name: The name of the data set or the experiment.
    """

    def with_bar(histogram: Histogram, bar: HistogramBar) -> str:
        """Returns the address of the list with only the rows of a bar."""
        in_bar = f"{histogram.column} >= {bar.low!r}; {histogram.column} < {bar.high!r}"
        where = view.text("where").strip()
        conditions = f"{where}; {in_bar}" if where else in_bar
        return f"/{list_name}" + view.here(where=conditions, page=None).removeprefix(view.page.path)

    back = f"/{list_name}" + view.here().removeprefix(view.page.path)
    return view.render(
        "histograms.html", histograms=histograms, with_bar=with_bar, of=list_name, name=data_name, back=back
    )


def group_files_by_kind(answers: AnswerStore) -> dict[str, list[AnswerFile]]:
    """Returns the files of answers by kind, "iterations" and "evaluations", the newest first."""
    files_by_kind: dict[str, list[AnswerFile]] = {}
    for kind in SEVERAL_FILES[1:]:  # without "everything", which is not a kind of file
        sources = [source for source in reversed(answers.sources()) if f"{source.kind}s" == kind]
        if sources:
            files_by_kind[kind] = sources
    return files_by_kind


def question_of_address(view: PageRequest, answers: AnswerStore) -> tuple[RowQuery, str]:
    """Returns (question, of): the question to the store that the address asks, and the value of its `?of=`.

    That value is the name of a file, or one of `SEVERAL_FILES`. Raises ValueError for a column or a file that
    doesn't exist, and NotThere if `?of=` names a kind of files of which there are none.
    """
    columns = answers.columns()
    sources = {source.name: source for source in answers.sources()}
    # The iterations whose answers can be shown already. The newest of them is the default.
    iterations = [
        item.source.name
        for item in answers.list_indexed_sources()
        if item.about and item.source.kind == "iteration"
    ]
    files_choice = view.text("of") or (iterations[-1] if iterations else EVERYTHING)
    names: tuple[str, ...]
    if files_choice == EVERYTHING:
        names = ()  # a question without names is about all files
    elif files_choice in SEVERAL_FILES:  # "iterations" or "evaluations"
        names = tuple(name for name, source in sources.items() if f"{source.kind}s" == files_choice)
        if not names:
            raise NotThere(f"{answers.run.name} has no answers of {files_choice} yet")
    elif files_choice in sources:
        names = (files_choice,)
    else:
        raise ValueError(f"there are no answers {files_choice!r}; choose one of {', '.join(sources)}")
    filters = [*_filters_of_address(view), *parse_conditions(view.text("where"), columns)]
    question = make_question(view, filters, names)
    # If the answers have credit, they are by default sorted by `SIZE_COLUMN`, the column with the size of
    # credit.
    if not question.sort and SIZE_COLUMN in answers.columns(names):
        question = replace(question, sort=SIZE_COLUMN, descending=view.text("order", "down") == "down")
    elif question.sort == STORED_ORDER:
        question = replace(question, sort="")  # without a column, rows are in the order of the file
    if label := view.text("label"):
        rows_by_source: dict[str, list[int]] = {}
        for (source, row), notes in view.store.notes(answers.run).rows().items():
            if label == ANY_NOTE or any(label in note.labels for note in notes):
                rows_by_source.setdefault(source, []).append(row)
        question = replace(question, among=rows_by_source)
    return question, files_choice


def list_fields(view: PageRequest) -> dict[str, list[str]]:
    """Returns the values of those fields of the address that describe the list of answers (`LIST_FIELDS`)."""
    fields = {name: view.request.query_params.getlist(name) for name in LIST_FIELDS}
    return {name: values for name, values in fields.items() if any(values)}


def address_of(view: PageRequest, row: Mapping[str, Any], **query: Any) -> str:
    """Returns the address of the page of an answer, which is given by its row of the index."""
    return view.address("/answer", run=view.run.name, source=row["source"], answer=row["answer"], **query)


def with_all_columns(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Returns rows of the index with all columns of `ALWAYS_LISTED_COLUMNS` and `columns`; those that a row
    lacks are None."""
    empty_row = dict.fromkeys([*ALWAYS_LISTED_COLUMNS, *columns])
    return [empty_row | dict(row) for row in rows]


def make_question(
    view: PageRequest, filters: Sequence[ColumnFilter], sources: tuple[str, ...] = ()
) -> RowQuery:
    """Returns a question with these filters and sources, and the search, order and page of the address."""
    return RowQuery(
        sources=sources,
        filters=tuple(filters),
        search=view.text("search"),
        sort=view.text("sort"),
        descending=view.choice("order", ("up", "down")) == "down",
        page=view.integer("page", 1, least=1),
        size=int(view.choice("size", PAGE_SIZES)),
    )


def _filters_of_address(view: PageRequest) -> Iterator[ColumnFilter]:
    """Yields the filters of the address. `problem` is a part of a problem's name, `group` the whole name."""
    if problem := view.text("problem"):
        yield ColumnFilter("problem", "has", problem)
    if problem := view.text("group"):
        yield ColumnFilter("problem", "=", problem)
    for name in ("domain", "outcome"):
        if value := view.text(name):
            yield ColumnFilter(name, "=", value)
    if verdict := view.choice("verdict", VERDICT_CHOICES):
        yield ColumnFilter("score", ">=" if verdict == "right" else "<", CORRECT_SCORE)
    if view.choice("unfinished", ("", "1")):
        yield ColumnFilter("unfinished", "=", True)


# Problems


def show_problems(view: PageRequest) -> Response:
    """Shows a row for each problem.

    The address has `?run=`, `?of=` (one file, or one of `SEVERAL_FILES`), `?problem=` and the other filters
    of answers, `?signal=` (`some`, or `none` for problems without a training signal), `?problems=` (the
    column that the problems are sorted by), `?order=` and `?page=`.
    """
    answers = view.store.answers(view.run)
    question, files_choice = question_of_address(view, answers)
    selection = _Selection.of_question(question, answers)
    rows = _rows_of_problems(answers, selection, files_choice)

    signal = view.choice("signal", ("", "some", "none"))
    matching_rows = [row for row in rows if not signal or row["signal"] == (signal == "some")]

    sort = view.choice(
        "problems", PROBLEM_SORT_COLUMNS, "credit" if SIZE_COLUMN in selection.columns else "spread"
    )
    # The default order has the largest numbers first, or names in alphabetical order.
    descending = view.choice("order", ("down", "up") if sort != "problem" else ("up", "down")) == "down"

    def sort_key(row: Mapping[str, Any]) -> Any:
        if sort == "change":  # by its size, whether the pass rate rose or fell
            return abs(row["change"] or 0.0)
        return row[sort] if row[sort] is not None else -math.inf

    matching_rows.sort(key=sort_key, reverse=descending)
    listed = choose_page(view, matching_rows, question.size)

    bars_by_problem = _bars_of_problems(answers, selection, [row["problem"] for row in listed.rows])
    # All bars of the page have the same scale.
    largest_bar = 0.0
    for bars in bars_by_problem.values():
        for bar in bars:
            largest_bar = max(largest_bar, abs(bar["advantage"] or 0.0))
    return view.render(
        "problems.html",
        of=files_choice,
        files_by_kind=group_files_by_kind(answers),
        listed=listed,
        total=len(rows),
        silent=sum(not row["signal"] for row in rows),
        sort=sort,
        sorts=PROBLEM_SORT_COLUMNS,
        descending=descending,
        bars=bars_by_problem,
        largest=largest_bar or 1.0,
        first_of=lambda row: view.address(
            "/answer", run=view.run.name, of=files_choice, group=row["problem"], page=1
        ),
        address_of=lambda row: address_of(view, row, of=files_choice, group=row["problem"]),
    )


@dataclass(frozen=True)
class _Selection:
    """The answers that an address asks for, as a condition of SQL."""

    sources: tuple[str, ...]
    """The names of the files; empty: all files."""
    columns: Collection[str]
    """The columns that these files have."""
    where: str
    """The condition, such as ``true AND "domain" = CAST(? AS VARCHAR) AND true``."""
    values: list[Any]
    """The values of the condition's question marks, in order."""

    @staticmethod
    def of_question(question: RowQuery, answers: AnswerStore) -> _Selection:
        """Returns the answers that a question's filters select, on all of its pages."""
        columns = answers.columns(question.sources)
        # A filter may name a column that only other files have. It then selects no answer, and is no error.
        where, values = condition_sql(question.filters, all_types=answers.columns(), chosen_types=columns)
        # With `?label=` in the address, `question.among` lists the only rows that may be selected: those of
        # answers whose notes have this label. It is None without `?label=`: then any row may be selected.
        where = f"{where} AND {among_sql(question.among)}"
        return _Selection(question.sources, columns, where, list(values))


def _rows_of_problems(answers: AnswerStore, selection: _Selection, files_choice: str) -> list[dict[str, Any]]:
    """Returns a row for each problem, in alphabetical order, with its numbers over the selected answers.

    Example: ``{"problem": "train/17", "asked": "How many …", "answers": 8, "graded": 8, "right_ones": 3,
    "spread": 0.48, "tokens": 212.5, "credit": 0.62, "pass rate": 0.375, "before": "iteration 3",
    "change": 0.125, "signal": True}``.

    Args:
        files_choice: The name of the file of answers, or one of `SEVERAL_FILES`.
    """
    if not answers.columns():
        return []  # no answers are stored yet
    credit = f"max({SIZE_COLUMN})" if SIZE_COLUMN in selection.columns else "NULL"
    rows = answers.sql(
        f"""
        SELECT problem, any_value(asked) AS asked, count(*) AS answers, count(score) AS graded,
            count(*) FILTER (score >= ?) AS right_ones,
            coalesce(stddev_pop(reward), 0) AS spread, avg(tokens) AS tokens, {credit} AS credit
        FROM answers WHERE {selection.where} GROUP BY problem ORDER BY problem
        """,
        [CORRECT_SCORE, *selection.values],
        selection.sources,
    )
    earlier_rates = _earlier_rates(answers, files_choice)
    for row in rows:
        row["pass rate"] = row["right_ones"] / row["graded"] if row["graded"] else None
        # "before" is the title of the file in which the problem was asked the last time before this file.
        row["before"], earlier_rate = earlier_rates.get(row["problem"], ("", None))
        row["change"] = None
        if earlier_rate is not None and row["pass rate"] is not None:
            row["change"] = row["pass rate"] - earlier_rate
        # A problem has a training signal if an answer to it has credit. In a file without credit, it has a
        # signal if its answers have different rewards.
        row["signal"] = bool(row["spread"] if row["credit"] is None else row["credit"])
    return rows


def _bars_of_problems(
    answers: AnswerStore, selection: _Selection, problems: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the first `MOST_ANSWERS_OF_PROBLEM` answers to each of the problems, with their advantages, by
    problem."""
    if not problems:
        return {}
    # An answer without credit is drawn with its score minus the mean score of the problem's answers.
    mean_advantage = "advantage_mean" if "advantage_mean" in selection.columns else "NULL::DOUBLE"
    bars = answers.sql(
        f"""
        SELECT problem, source, answer, score,
            coalesce({mean_advantage}, score - avg(score) OVER (PARTITION BY problem)) AS advantage
        FROM answers WHERE {selection.where} AND list_contains(?, problem)
        QUALIFY row_number() OVER (PARTITION BY problem ORDER BY source, row) <= {MOST_ANSWERS_OF_PROBLEM}
        ORDER BY source, row
        """,
        [*selection.values, list(problems)],
        selection.sources,
    )
    bars_by_problem: dict[str, list[dict[str, Any]]] = {}
    for bar in bars:
        bars_by_problem.setdefault(bar["problem"], []).append(bar)
    return bars_by_problem


def _earlier_rates(answers: AnswerStore, files_choice: str) -> dict[str, tuple[str, float | None]]:
    """Returns each problem's pass rate in an earlier file than the chosen one.

    Earlier files are those of the same kind, such as evaluations of the same set, with a smaller number. Of
    those that have answers to a problem, the newest counts.

    Args:
        answers: The answers of the experiment.
        files_choice: The name of the chosen file. For a choice of several files (`SEVERAL_FILES`), the result
            is empty.

    Returns:
        (title of the earlier file, share of correct answers in it) by problem. The share is None if none of
        these answers was graded.
    """
    sources = {source.name: source for source in answers.sources()}
    if files_choice not in sources:
        return {}
    this_file = sources[files_choice]
    earlier_files = []
    for source in sources.values():
        is_same_kind = (source.kind, source.label) == (this_file.kind, this_file.label)
        if is_same_kind and source.number < this_file.number:
            earlier_files.append(source)
    earlier_files.sort(key=lambda source: source.number)
    names = [source.name for source in earlier_files[-MOST_EARLIER_FILES:]]
    if not names:
        return {}
    rows = answers.sql(
        "SELECT problem, source, avg((score >= ?)::INTEGER) AS rate FROM answers GROUP BY problem, source",
        [CORRECT_SCORE],
        names,
    )
    # Later rows replace earlier ones in the dictionary, so the newest file must come last.
    rows.sort(key=lambda row: sources[row["source"]].number)
    return {row["problem"]: (sources[row["source"]].title, row["rate"]) for row in rows}


def show_problem(view: PageRequest) -> Response:
    """Redirects to the list of all answers to a problem, in the order of training.

    The address has `?run=` (also several) and `?problem=` (its whole name).
    """
    query = {"run": [run.name for run in view.runs], "group": view.text("problem")}
    return RedirectResponse(view.address("/answers", **query, of="everything", sort=STORED_ORDER), 303)


def fingerprint_of_answers(view: PageRequest) -> str:
    """Returns the fingerprint of a page about the answers of the experiments that the address names."""
    return short_hash([view.store.answers(run).fingerprint() for run in view.runs], view.request.url.query)


PAGES = (
    Page(
        "/answers",
        "Answers",
        show,
        navigation="run",
        key="a",
        fingerprint=lambda view: short_hash(
            view.store.answers(view.run).fingerprint(), view.store.notes(view.run).fingerprint()
        ),
    ),
    Page("/answers/histograms", "Histograms", show_histograms, fingerprint=fingerprint_of_answers),
    Page(
        "/problems", "Problems", show_problems, navigation="run", key="p", fingerprint=fingerprint_of_answers
    ),
    Page("/problem", "Problem", show_problem, fingerprint=fingerprint_of_answers),
)
