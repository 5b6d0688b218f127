"""Answers of an experiment: searched, filtered by anything that is known of them, sorted, in pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from treetune.vocabulary import CORRECT_SCORE
from treetune_view.notes import Note
from treetune_view.page import Page, View, digest
from treetune_view.store import NotThere
from treetune_view.store.answers import Answers
from treetune_view.store.notes import Place, labels_in_use, labels_of
from treetune_view.store.questions import OPERATORS, Filter, Question
from treetune_view.store.sources import Source
from treetune_view.store.verdicts import graded_by_both

SIZES = ("50", "20", "200")
"""Rows of one page; the first where the address doesn't say."""

OUTCOMES = ("ok", "no_answer", "timeout", "error", "unavailable")
VERDICTS = ("", "right", "wrong")
SEVERAL = ("everything", "iterations", "evaluations")
"""Which answers, where it is no single file. Without any word it is the newest iteration, or everything."""

ANY_NOTE = ","
"""In place of a label: whatever has a note. No label can have a comma."""

ALWAYS = (
    "source", "row", "answer", "problem", "sample", "score", "reward", "outcome", "unfinished", "tokens",
    "asked", "beginning",
)  # fmt: skip
USUAL = ("advantage_mean", "logprob_mean", "first_value")
"""Numbers that a row shows where there are any."""

NOT_FOR_SORTING = ("answer", "asked", "place", "row", "episode_place", "episode_last", "credited")

_CONDITION = re.compile(r"^\s*(\S.*?)\s*(<=|>=|!=|=|<|>|\shas\s)\s*(.+?)\s*$")


def show(view: View) -> Response:
    """`?run=`, `?of=` (one file, or one of `SEVERAL`), `?search=` in the text, `?problem=`,
    `?domain=`, `?outcome=`, `?verdict=`, `?unfinished=1`, `?label=` (or `ANY_NOTE`), `?where=` (conditions),
    `?sort=`, `?order=down`."""
    answers = view.store.answers(view.run)
    indexed = answers.indexed()
    columns = answers.columns()
    of = view.text("of") or _newest([one.source for one in indexed if one.about is not None])
    notes = view.store.notes(view.run)
    noted = notes.rows()
    question = replace(question_of(view, answers, columns, of), among=_among(view.text("label"), noted))
    found = answers.ask(question)
    own = [one.source for one in indexed if one.source.name in (question.sources or [one.source.name])]
    pages = max(1, -(-found.total // question.size))
    return view.render(
        "answers.html",
        question=question,
        of=of,
        found=found,
        things=sorted({one.things for one in own} or {"answers"}),
        rows=whole(found.rows, columns),
        pages=pages,
        waiting=[one.source.words for one in indexed if one.is_awaited],
        problems=[*answers.problems(), *notes.problems()],
        noted=noted,
        labels_of=labels_of,
        labels=labels_in_use([notes]),
        any_note=ANY_NOTE,
        groups=_groups([one.source for one in indexed]),
        words=lambda row: next(
            (one.source.words for one in indexed if one.source.name == row["source"]), row["source"]
        ),
        outcomes=OUTCOMES,
        sizes=SIZES,
        both_graded=graded_by_both(columns),
        domains=_domains(answers, question.sources) if "domain" in columns else [],
        sortable=[name for name in columns if name not in NOT_FOR_SORTING],
        shown=_shown(columns, question),
        address_of=lambda row: address_of(view, row),
    )


def _among(label: str, noted: Mapping[Place, Sequence[Note]]) -> Mapping[str, Sequence[int]] | None:
    """The rows of answers that have the label, or any note; None where nobody asks."""
    if not label:
        return None
    found: dict[str, list[int]] = {}
    for (source, row), notes in noted.items():
        if label == ANY_NOTE or label in labels_of(notes):
            found.setdefault(source, []).append(row)
    return found


def address_of(view: View, row: Mapping[str, Any]) -> str:
    """Where one answer of the index is shown."""
    return view.address("/answer", run=view.run.name, source=row["source"], answer=row["answer"])


def whole(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Rows of the index with None for what their file has nothing of."""
    blank = dict.fromkeys([*ALWAYS, *columns])
    return [blank | dict(row) for row in rows]


def question_of(view: View, answers: Answers, columns: Mapping[str, str], of: str) -> Question:
    """What the address asks for. Raises ValueError for what answers don't have."""
    conditions = list(_conditions(view, columns))
    return Question(
        sources=_sources(of, answers),
        filters=tuple(conditions),
        search=view.text("search"),
        sort=view.text("sort"),
        descending=view.choice("order", ("up", "down")) == "down",
        page=view.integer("page", 1, least=1),
        size=int(view.choice("size", SIZES)),
    )


def parsed(text: str, columns: Mapping[str, str], of: str = "answers") -> list[Filter]:
    """Conditions such as ``tokens >= 300; outcome = timeout``. Raises ValueError for what is none."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _CONDITION.match(part)
        if match is None:
            raise ValueError(
                f"{part!r} is no condition: write a name, one of {' '.join(OPERATORS)}, and a value, such as"
                " tokens >= 300, and ; between two of them"
            )
        name, operator, value = match[1], match[2].strip(), match[3]
        if name not in columns:
            raise ValueError(f"{of} have no {name!r}: there are {', '.join(sorted(columns))}")
        found.append(Filter(name, operator, _value(name, columns[name], operator, value)))
    return found


def _conditions(view: View, columns: Mapping[str, str]) -> Iterator[Filter]:
    if problem := view.text("problem"):
        yield Filter("problem", "has", problem)
    for name in ("domain", "outcome"):
        if value := view.text(name):
            yield Filter(name, "=", value)
    verdict = view.choice("verdict", VERDICTS)
    if verdict:
        yield Filter("score", ">=" if verdict == "right" else "<", CORRECT_SCORE)
    if view.choice("unfinished", ("", "1")):
        yield Filter("unfinished", "=", True)
    yield from parsed(view.text("where"), columns)


def _value(name: str, kind: str, operator: str, text: str) -> str | float | bool:
    if kind == "VARCHAR" or operator == "has":
        return text
    if kind == "BOOLEAN":
        if text not in ("true", "false"):
            raise ValueError(f"{name} is compared with true or false, and not with {text!r}")
        return text == "true"
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is compared with a number, and not with {text!r}")
    return number


def _sources(of: str, answers: Answers) -> tuple[str, ...]:
    """Names of files; none for all. Raises NotThere for a kind of files that there are none of yet."""
    there = answers.sources()
    if of == SEVERAL[0]:
        return ()
    if of in SEVERAL:
        names = tuple(one.name for one in there if f"{one.kind}s" == of)
        if not names:
            raise NotThere(f"{answers.run.name} has no answers of {of} yet")
        return names
    if of not in [one.name for one in there]:
        raise ValueError(f"there are no answers {of!r}: there are {', '.join(one.name for one in there)}")
    return (of,)


def _newest(there: Sequence[Source]) -> str:
    """The last iteration, or everything where there is none."""
    return next((one.name for one in reversed(there) if one.kind == "iteration"), SEVERAL[0])


def _groups(there: Sequence[Source]) -> dict[str, list[Source]]:
    """Newest first, as people look for them."""
    kinds = {"iterations": "iteration", "evaluations": "evaluation"}
    groups = {name: [one for one in reversed(there) if one.kind == kind] for name, kind in kinds.items()}
    return {name: own for name, own in groups.items() if own}


def _domains(answers: Answers, sources: Sequence[str]) -> list[str]:
    rows = answers.sql(
        "SELECT DISTINCT domain FROM answers WHERE domain <> '' ORDER BY domain", sources=sources
    )
    return [row["domain"] for row in rows]


def _shown(columns: Mapping[str, str], question: Question) -> list[str]:
    """Further numbers of the rows: the usual ones, and what is asked about."""
    asked = [one.column for one in question.filters] + [question.sort]
    names = dict.fromkeys([*USUAL, *asked])
    return [name for name in names if name in columns and name not in ALWAYS]


PAGE = Page(
    "/answers",
    "Answers",
    show,
    place="run",
    key="a",
    mark=lambda view: digest(view.store.answers(view.run).mark(), view.store.notes(view.run).mark()),
)
