"""All notes of an experiment, of several, or of all, by label, author and words, also as a data set; and the
notes on one answer, with the form for one's own."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from treetune.exceptions import NoteChanged
from treetune.view.notes import (
    FORMATS,
    LONGEST_NOTE,
    Note,
    NotedAnswer,
    checked_labels,
    labels_in_use,
    new_note,
    save_note,
    system_user,
    write_notes,
)
from treetune.view.page import Form, Page, PageRequest, paged
from treetune.view.store import Run
from treetune.view.store.folders import digest
from treetune.view.text import one_line

SHOWN = 100
"""Notes of one page."""

BEGINNING = 160
"""Characters of an answer that are shown."""

SUGGESTED = 24
"""Labels in use that the form offers."""


def show(view: PageRequest) -> Response:
    """`?run=` (also several; without any, all), `?label=`, `?author=`, `?search=`, `?page=`."""
    notes = {run: view.store.notes(run) for run in view.runs or view.store.runs()}
    everything = [note for own in notes.values() for note in own.all()]
    listed = paged(view, sorted(_chosen(view), key=lambda one: -one[1].written), SHOWN)
    there = {
        run: {note for own in notes[run].rows().values() for note in own}
        for run in {run for run, _ in listed.rows}
    }
    # Each with whether its answer is stored as it was, and the beginning of its text.
    rows = [
        (run, note, note in there[run], one_line(note.about.text, BEGINNING)) for run, note in listed.rows
    ]
    return view.render(
        "notes.html",
        listed=listed,
        rows=rows,
        of_all=len(everything),
        problems=[message for own in notes.values() for message in own.problems()],
        labels=labels_in_use(notes.values()),
        authors=sorted({note.author for note in everything}),
        formats=FORMATS,
    )


def data(view: PageRequest) -> Response:
    """`?format=`, and the rest as for the page: what it lists, whole, as a file."""
    suffix = view.choice("format", FORMATS)
    written = io.BytesIO()
    chosen = sorted(_chosen(view), key=lambda one: one[1].written)
    write_notes([(run.name, note) for run, note in chosen], written, suffix)
    kind = "application/vnd.apache.parquet" if suffix == "parquet" else "application/jsonl"
    headers = {"Content-Disposition": f'attachment; filename="notes.{suffix}"'}
    return Response(written.getvalue(), media_type=kind, headers=headers)


def _chosen(view: PageRequest) -> list[tuple[Run, Note]]:
    label, author, search = view.text("label"), view.text("author"), view.text("search").casefold()
    chosen = []
    for run in view.runs or view.store.runs():
        for note in view.store.notes(run).all():
            words = " ".join([run.name, note.about.answer, note.text, *note.labels, note.about.text])
            matches = (not label or label in note.labels) and (not author or author == note.author)
            if matches and search in words.casefold():
                chosen.append((run, note))
    return chosen


def mark(view: PageRequest) -> str:
    """Changes with answers too: one may be another, or have its index by now."""
    notes = {run: view.store.notes(run) for run in view.runs or view.store.runs()}
    answers = [view.store.answers(run).mark() for run, own in notes.items() if own.all()]
    return digest([(run.name, own.mark()) for run, own in notes.items()], answers)


# The notes on one answer


Draft = tuple[Sequence[str], str, str]
"""The labels and the text of a form that was not saved, as they were typed, and why it wasn't."""


def notes_on(view: PageRequest, about: NotedAnswer, draft: Draft | None = None) -> dict[str, Any]:
    """Returns all `notes` on the answer, and the content of this user's form: `seen` is the version of the
    note that it was made from, `offered` are the labels that can be ticked. Nothing can be written where
    there is a `cannot`, which says why."""
    author = system_user()
    notes = [note for note in view.store.notes(view.run).all() if note.about.name == about.name]
    own = next((note for note in notes if note.author == author), None)
    saved = (own.labels, own.text) if own else ((), "")
    labels, text, problem = draft or (*saved, "")
    return {
        "about": about,
        "notes": notes,
        "author": author,
        "labels": labels,
        "text": text,
        "seen": own.version if own else "",
        "offered": list(dict.fromkeys([*all_labels(view)[:SUGGESTED], *labels])),
        "problem": problem,
        "cannot": _why_nothing_can_be_written(view),
        "longest": LONGEST_NOTE,
    }


def all_labels(view: PageRequest) -> list[str]:
    """Returns the labels in use in any experiment, the most frequent first."""
    return labels_in_use(view.store.notes(run) for run in view.store.runs())


def _why_nothing_can_be_written(view: PageRequest) -> str:
    """Returns nothing where notes can be written."""
    if view.store.read_only:
        return "this viewer was started with --read-only"
    folder = view.run.directory.notes
    written_to = folder if folder.is_dir() else view.run.path
    return "" if os.access(written_to, os.W_OK) else f"{written_to} can't be written by {system_user()}"


def save_form(view: PageRequest, about: NotedAnswer, form: Form) -> Draft | None:
    """Saves the note of a form. What can't be saved is given back."""
    labels: Sequence[str] = [*form.get("label", ()), *form.get("labels", ())]
    text, seen = ("".join(form.get(name, ())[:1]) for name in ("note", "seen"))
    if cannot := _why_nothing_can_be_written(view):
        problem = f"Nothing was saved: {cannot}"
    elif form.get("about") != [about.name]:
        problem = "Nothing was saved: the answer is another by now. Save again to put this on it."
    else:
        try:
            labels = checked_labels(labels)
            save_note(view.run.directory, new_note(about, labels, text), seen)
            return None
        except NoteChanged as error:
            problem = (
                f"Not saved yet: your note was {'taken away' if error.now is None else 'changed'} meanwhile,"
                " in another window. Save again to put this in its place."
            )
        except (ValueError, OSError) as error:
            problem = f"Nothing was saved: {error}"
    return labels, text, problem


PAGES = (
    Page("/notes", "Notes", show, place="both", key="n", mark=mark),
    Page("/notes/data", "Notes", data, mark=mark),
)
