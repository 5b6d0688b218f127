"""All notes of an experiment, of several, or of all: by label, author and words; and as a data set."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.responses import Response

from treetune_view.exports.notes import writer_of
from treetune_view.notes import Note
from treetune_view.page import Page, View, digest
from treetune_view.report.text import one_line
from treetune_view.store import Run
from treetune_view.store.notes import labels_in_use

SHOWN = 100
"""Notes of one page."""

BEGINNING = 160
"""Characters of an answer that are shown."""

FORMATS = ("parquet", "jsonl")


@dataclass(frozen=True)
class Row:
    """A note. `is_there` where its answer is stored as it was; `beginning` is that of its text."""

    run: Run
    note: Note
    is_there: bool
    beginning: str


def show(view: View) -> Response:
    """`?run=` (also several; without any, all), `?label=`, `?author=`, `?search=`, `?page=`."""
    runs = chosen_runs(view)
    found = sorted(_chosen(view), key=lambda one: -one[1].written)
    number = view.integer("page", 1, least=1)
    notes = {run: view.store.notes(run) for run in runs}
    everything = [note for own in notes.values() for note in own.all()]
    return view.render(
        "notes.html",
        rows=_rows(view, found[(number - 1) * SHOWN : number * SHOWN]),
        total=len(found),
        of_all=len(everything),
        number=number,
        pages=max(1, -(-len(found) // SHOWN)),
        problems=[words for own in notes.values() for words in own.problems()],
        labels=labels_in_use(notes.values()),
        authors=sorted({note.author for note in everything}),
        formats=FORMATS,
    )


def data(view: View) -> Response:
    """What the page lists, whole, as a file: `?format=`, and the rest as for the page."""
    suffix = view.choice("format", FORMATS)
    written = io.BytesIO()
    found = sorted(_chosen(view), key=lambda one: one[1].written)
    writer_of(f".{suffix}")([(run.name, note) for run, note in found], written)
    kind = "application/vnd.apache.parquet" if suffix == "parquet" else "application/jsonl"
    headers = {"Content-Disposition": f'attachment; filename="notes.{suffix}"'}
    return Response(written.getvalue(), media_type=kind, headers=headers)


def chosen_runs(view: View) -> list[Run]:
    return view.runs or view.store.runs()


def _chosen(view: View) -> Iterator[tuple[Run, Note]]:
    label, author, wanted = view.text("label"), view.text("author"), view.text("search").casefold()
    for run in chosen_runs(view):
        for note in view.store.notes(run).all():
            words = " ".join([run.name, note.about.answer, note.text, *note.labels, note.about.text])
            if (
                (not label or label in note.labels)
                and (not author or author == note.author)
                and wanted in words.casefold()
            ):
                yield run, note


def _rows(view: View, found: list[tuple[Run, Note]]) -> list[Row]:
    there = {
        run: {note for own in view.store.notes(run).rows().values() for note in own}
        for run in {run for run, _ in found}
    }
    return [Row(run, note, note in there[run], one_line(note.about.text, BEGINNING)) for run, note in found]


def mark(view: View) -> str:
    """Answers too: one may be another, or have its index by now."""
    own = {run.name: view.store.notes(run) for run in chosen_runs(view)}
    answers = [view.store.answers(run).mark() for run in chosen_runs(view) if own[run.name].all()]
    return digest([(name, notes.mark()) for name, notes in own.items()], answers)


PAGE = Page("/notes", "Notes", show, place="both", key="n", mark=mark)
DATA = Page("/notes/data", "Notes", data, mark=mark)
