"""Notes and labels that people put on answers, beside the run: one file for each answer and author.

An answer is named by where it is stored, its problem and sample, and its text. When an iteration is made anew
and the answer is another, its notes stay with the text that they were written on: each holds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import Damaged, read_record, write_record

LONGEST_NOTE = 20_000
"""Characters."""
LONGEST_LABEL, MOST_LABELS = 40, 20
"""Characters of a label, and labels of a note."""

PATIENCE_S = 5.0
"""How long another one that writes a note may take."""

REMEDY = "delete it; the note is lost"

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class NotedAnswer:
    """The answer of a note, as it was when the note was written.

    `source` is ``i4`` for iteration 4, counted from 1, and ``e4-test`` for the evaluation of the set ``test``
    after 4 iterations. `advantage` is the mean over the answer's trained tokens. `score` is None where nobody
    could grade; other numbers are None where the answer has none.
    """

    source: str
    answer: str
    problem: str
    sample: int | None
    prompt: str
    text: str
    gold: str | None = None
    score: float | None = None
    reward: float | None = None
    outcome: str | None = None
    advantage: float | None = None

    @property
    def name(self) -> str:
        """Its own among all answers of the experiment, and another one for another text."""
        return answer_name(self.source, self.answer, self.text)


@dataclass(frozen=True)
class Note:
    """What `author` wrote on an answer, and when, in seconds since 1970."""

    about: NotedAnswer
    labels: tuple[str, ...]
    text: str
    author: str
    written: float

    @property
    def version(self) -> str:
        """Another one as soon as the note says something else."""
        return _digest(json.dumps([self.labels, self.text, self.written]))

    @property
    def file_name(self) -> str:
        return f"{self.about.name}.{quote(self.author, safe='')}.json"


class Changed(Exception):
    """The note isn't any more what its writer has seen; `now` is what it is, None if it was taken away."""

    def __init__(self, now: Note | None) -> None:
        super().__init__("the note was changed meanwhile")
        self.now = now


def answer_name(source: str, answer: str, text: str) -> str:
    """Of an answer, by where it is stored, ``problem#sample``, and its text."""
    return _digest(json.dumps([source, answer, _digest(text)]))


def system_user() -> str:
    """Who this process belongs to, as the machine calls them; the number where it has no name."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def new_note(about: NotedAnswer, labels: Iterable[str], text: str) -> Note:
    """This user's, of now. Raises ValueError for labels and texts that are none."""
    lines = text.replace("\r\n", "\n").rstrip()
    if len(lines) > LONGEST_NOTE:
        raise ValueError(f"a note has at most {LONGEST_NOTE:,} characters, and this one {len(lines):,}")
    return Note(about, checked_labels(labels), lines, system_user(), round(time.time(), 3))


def checked_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Each once, without space around it; a text may have several, between commas. Raises ValueError."""
    found = list(dict.fromkeys(one for text in labels for one in map(str.strip, text.split(",")) if one))
    for one in found:
        if len(one) > LONGEST_LABEL or _CONTROL.search(one):
            raise ValueError(
                f"{one[: LONGEST_LABEL + 1]!r} can't be a label: it is one line of at most {LONGEST_LABEL}"
                " characters"
            )
    if len(found) > MOST_LABELS:
        raise ValueError(f"an answer has at most {MOST_LABELS} labels of one author, and not {len(found)}")
    return tuple(found)


def save_note(directory: ExperimentDirectory, note: Note, seen: str) -> None:
    """Puts the note in the place of its author's last one on that answer; an empty one takes that away.

    `seen` is the version that the author has seen, empty for none. Raises Changed where that isn't what is
    there, and OSError where the folder can't be written.
    """
    path = directory.notes / note.file_name
    with directory.locked("notes", PATIENCE_S):
        now = read_note(path) if path.is_file() else None
        if now is not None and (now.labels, now.text) == (note.labels, note.text):
            return
        if (now.version if now is not None else "") != seen:
            raise Changed(now)
        if note.labels or note.text:
            about = asdict(note.about)
            own = {name: value for name, value in asdict(note).items() if name != "about"}
            write_record(path, {**own, "about": about})
        else:
            path.unlink(missing_ok=True)


def read_note(path: Path) -> Note:
    """Raises Damaged for what is no note."""
    row = read_record(path, REMEDY)
    try:
        return _note(row)
    except (KeyError, TypeError) as error:
        raise Damaged(f"{path} is no note ({error!r}): {REMEDY}") from error


def read_notes(folder: Path) -> list[Note]:
    """All of an experiment's folder of notes, oldest first. Raises Damaged for one that can't be read."""
    return sorted(map(read_note, note_files(folder)), key=lambda note: (note.written, note.file_name))


def note_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.json") if not path.name.startswith(".")]


def _note(row: Mapping[str, Any]) -> Note:
    about = NotedAnswer(**row["about"])
    return Note(about, tuple(row["labels"]), str(row["text"]), str(row["author"]), float(row["written"]))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
