"""The page of all notes, which also exports them as a data set, and the part of an answer's page with its
notes and their form."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from treetune.exceptions import NoteChanged
from treetune.view.notes import (
    EXPORT_FORMATS,
    LONGEST_NOTE,
    Note,
    NotedAnswer,
    check_labels,
    labels_in_use,
    new_note,
    save_note,
    system_user,
    write_notes,
)
from treetune.view.page import Form, Page, PageRequest, choose_page
from treetune.view.store import Run
from treetune.view.store.folders import short_hash
from treetune.view.text import one_line

NOTES_PER_PAGE = 100
"""The most notes on a page."""

CHARACTERS_OF_ANSWER = 160
"""The most characters of an answer that the list of notes shows."""

MOST_SUGGESTED_LABELS = 24
"""The most labels that the form offers of those that are in use."""


def show(view: PageRequest) -> Response:
    """Shows the list of notes, the newest first.

    The address has `?run=` (also several; if it has none, all experiments), `?label=`, `?author=`, `?search=`
    and `?page=`.
    """
    notes_by_run = {run: view.store.notes(run) for run in view.runs or view.store.runs()}
    all_notes: list[Note] = []
    problems: list[str] = []
    for notes in notes_by_run.values():
        all_notes += notes.all()
        problems += notes.problems()
    newest_first = sorted(_matching_notes(view), key=lambda run_and_note: -run_and_note[1].written)
    listed = choose_page(view, newest_first, NOTES_PER_PAGE)
    # A note links to its answer if the answer is still stored unchanged: `rows()` has only such notes.
    linked: dict[Run, set[Note]] = {}
    for run in {run for run, _ in listed.rows}:
        linked[run] = set()
        for notes_on_answer in notes_by_run[run].rows().values():
            linked[run] |= set(notes_on_answer)
    rows = []
    for run, note in listed.rows:
        rows.append((run, note, note in linked[run], one_line(note.about.text, CHARACTERS_OF_ANSWER)))
    return view.render(
        "notes.html",
        listed=listed,
        rows=rows,
        of_all=len(all_notes),
        problems=problems,
        labels=labels_in_use(notes_by_run.values()),
        authors=sorted({note.author for note in all_notes}),
        formats=EXPORT_FORMATS,
    )


def download_notes(view: PageRequest) -> Response:
    """Returns all notes that match the filters of the address as a file, the oldest first.

    The address has `?format=` (one of `EXPORT_FORMATS`) and the filters of the list (`show`).
    """
    file_format = view.choice("format", EXPORT_FORMATS)
    file = io.BytesIO()
    oldest_first = sorted(_matching_notes(view), key=lambda run_and_note: run_and_note[1].written)
    write_notes([(run.name, note) for run, note in oldest_first], file, file_format)
    media_type = "application/vnd.apache.parquet" if file_format == "parquet" else "application/jsonl"
    headers = {"Content-Disposition": f'attachment; filename="notes.{file_format}"'}
    return Response(file.getvalue(), media_type=media_type, headers=headers)


def _matching_notes(view: PageRequest) -> list[tuple[Run, Note]]:
    """Returns the notes that match the filters of the address, each with its experiment."""
    label, author, search = view.text("label"), view.text("author"), view.text("search").casefold()
    matching = []
    for run in view.runs or view.store.runs():
        for note in view.store.notes(run).all():
            has_label = not label or label in note.labels
            has_author = not author or author == note.author
            text = " ".join([run.name, note.about.answer, note.text, *note.labels, note.about.text])
            if has_label and has_author and search in text.casefold():
                matching.append((run, note))
    return matching


def fingerprint_of_notes(view: PageRequest) -> str:
    """Returns a text that changes whenever the list of notes may have changed."""
    fingerprints: list[object] = []
    for run in view.runs or view.store.runs():
        notes = view.store.notes(run)
        fingerprints.append((run.name, notes.fingerprint()))
        if notes.all():
            # The list shows the answers that notes are about. They may be sampled again or be indexed later.
            fingerprints.append(view.store.answers(run).fingerprint())
    return short_hash(fingerprints)


# The notes on an answer


Draft = tuple[Sequence[str], str, str]
"""(labels, text, reason) of a form that could not be saved."""


def notes_on(view: PageRequest, about: NotedAnswer, draft: Draft | None = None) -> dict[str, Any]:
    """Returns the template's values for the notes on an answer and for this user's form.

    The form has the contents of `draft` if there is one, or else of the user's note. Among the values, `seen`
    is the version of the note that the form edits, `offered` has the labels that can be ticked, and `cannot`
    is the reason why notes can't be written, which is empty if they can.
    """
    author = system_user()
    notes = [note for note in view.store.notes(view.run).all() if note.about.name == about.name]
    users_note = next((note for note in notes if note.author == author), None)
    if draft is not None:
        labels, text, problem = draft
    elif users_note is not None:
        labels, text, problem = users_note.labels, users_note.text, ""
    else:
        labels, text, problem = (), "", ""
    return {
        "about": about,
        "notes": notes,
        "author": author,
        "labels": labels,
        "text": text,
        "seen": users_note.version if users_note is not None else "",
        # The form's labels are always among them, so that they can be unticked.
        "offered": list(dict.fromkeys([*all_labels(view)[:MOST_SUGGESTED_LABELS], *labels])),
        "problem": problem,
        "cannot": _why_not_writable(view),
        "longest": LONGEST_NOTE,
    }


def all_labels(view: PageRequest) -> list[str]:
    """Returns the labels in use in any experiment, the most frequent first."""
    return labels_in_use(view.store.notes(run) for run in view.store.runs())


def _why_not_writable(view: PageRequest) -> str:
    """Returns the reason why notes on this experiment can't be written. It is empty if they can."""
    if view.store.read_only:
        return "this viewer was started with --read-only"
    folder = view.run.directory.notes_folder
    parent = folder if folder.is_dir() else view.run.path  # the folder is created with the first note
    return "" if os.access(parent, os.W_OK) else f"{system_user()} has no permission to write into {parent}"


def save_form(view: PageRequest, about: NotedAnswer, form: Form) -> Draft | None:
    """Saves the note of a form.

    Returns None if it was saved, and a draft with the reason if it can't be saved.
    """
    # "label" has the labels that were ticked, and "labels" those that were typed.
    labels: Sequence[str] = [*form.get("label", ()), *form.get("labels", ())]
    text = next(iter(form.get("note", ())), "")
    # The version of the note that the user saw. `save_note` doesn't replace another version.
    seen_version = next(iter(form.get("seen", ())), "")
    why_not_writable = _why_not_writable(view)
    if why_not_writable:
        problem = f"Not saved: {why_not_writable}"
    elif form.get("about") != [about.name]:
        problem = (
            "Not saved: the answer was sampled again. Save once more to attach the note to the new answer."
        )
    else:
        try:
            labels = check_labels(labels)
            save_note(view.run.directory, new_note(about, labels, text), seen_version)
            return None
        except NoteChanged as error:
            problem = (
                f"Not saved: your note was {'deleted' if error.now is None else 'changed'} in another window."
                " Save once more to replace it."
            )
        except (ValueError, OSError) as error:
            problem = f"Not saved: {error}"
    return labels, text, problem


PAGES = (
    Page("/notes", "Notes", show, navigation="both", key="n", fingerprint=fingerprint_of_notes),
    Page("/notes/data", "Notes", download_notes, fingerprint=fingerprint_of_notes),
)
