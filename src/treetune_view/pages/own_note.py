"""The notes on one answer, and the form for one's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from treetune_view.notes import (
    LONGEST_NOTE,
    Changed,
    Note,
    NotedAnswer,
    checked_labels,
    new_note,
    save_note,
    system_user,
)
from treetune_view.page import Form, View
from treetune_view.store.notes import labels_in_use

SUGGESTED = 24
"""Labels in use that the form offers."""


@dataclass(frozen=True)
class Draft:
    """What was sent and not saved, as it was typed, and why."""

    labels: Sequence[str]
    text: str
    problem: str


@dataclass(frozen=True)
class OwnNote:
    """All `notes` on the answer, and what the form of this user says: `seen` is the version of the note that
    it was made from, `offered` are the labels that can be ticked. Nothing can be written where there is a
    `cannot`, which says why."""

    about: NotedAnswer
    notes: Sequence[Note]
    author: str
    labels: Sequence[str]
    text: str
    seen: str
    offered: Sequence[str]
    problem: str
    cannot: str
    longest: int = LONGEST_NOTE


def own_note(view: View, about: NotedAnswer, draft: Draft | None = None) -> OwnNote:
    author = system_user()
    notes = view.store.notes(view.run).of(about.name)
    own = next((note for note in notes if note.author == author), None)
    labels = draft.labels if draft else own.labels if own else ()
    return OwnNote(
        about=about,
        notes=notes,
        author=author,
        labels=labels,
        text=draft.text if draft else own.text if own else "",
        seen=own.version if own else "",
        offered=list(dict.fromkeys([*all_labels(view)[:SUGGESTED], *labels])),
        problem=draft.problem if draft else "",
        cannot=why_nothing_can_be_written(view),
    )


def all_labels(view: View) -> list[str]:
    """Those in use in any experiment, the most frequent first."""
    return labels_in_use(view.store.notes(run) for run in view.store.runs())


def why_nothing_can_be_written(view: View) -> str:
    """Empty where notes can be."""
    if view.store.read_only:
        return "this viewer was started with --read-only"
    folder = view.run.directory.notes
    place = folder if folder.is_dir() else view.run.path
    return "" if os.access(place, os.W_OK) else f"{place} can't be written by {system_user()}"


def save_form(view: View, about: NotedAnswer, form: Form) -> Draft | None:
    """Saves what the form says. What can't be is given back."""
    labels = [*form.get("label", ()), *form.get("labels", ())]
    text = "".join(form.get("note", ())[:1])
    if cannot := why_nothing_can_be_written(view):
        return Draft(labels, text, f"Nothing was saved: {cannot}")
    if form.get("about") != [about.name]:
        return Draft(
            labels, text, "Nothing was saved: the answer is another by now. Save again to put this on it."
        )
    try:
        labels = list(checked_labels(labels))
        save_note(view.run.directory, new_note(about, labels, text), "".join(form.get("seen", ())[:1]))
    except Changed as error:
        now = "taken away" if error.now is None else "changed"
        return Draft(
            labels,
            text,
            f"Not saved yet: your note was {now} meanwhile, in another window. Save again to put this in its"
            " place.",
        )
    except (ValueError, OSError) as error:
        return Draft(labels, text, f"Nothing was saved: {error}")
    return None
