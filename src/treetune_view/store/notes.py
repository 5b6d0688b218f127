"""What people wrote on the answers of an experiment, and which of its answers these are today."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from treetune_view.notes import Note, answer_name, note_files, read_note
from treetune_view.store.answers import Answers
from treetune_view.store.catalogue import Run, stat_of

Place = tuple[str, int]
"""A source's name and a row of its index."""


class Notes:
    """All notes of one experiment; each file is read once, until it is another."""

    def __init__(self, run: Run, answers: Answers) -> None:
        self._folder, self._answers = run.directory.notes, answers
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[object, Note | str]] = {}
        """By file what it was when it was read, and the note, or what is wrong with it."""
        self._names: dict[tuple[str, str, str], tuple[int, str]] = {}
        """By a source, its mark and an answer: the answer's row, and its name."""

    def all(self) -> list[Note]:
        """The newest first."""
        found = [one for one in self._look() if isinstance(one, Note)]
        return sorted(found, key=lambda note: (-note.written, note.file_name))

    def problems(self) -> list[str]:
        """What keeps notes from being shown, in words."""
        return sorted(one for one in self._look() if isinstance(one, str))

    def of(self, name: str) -> list[Note]:
        """Those on the answer of that name."""
        return [note for note in self.all() if note.about.name == name]

    def mark(self) -> str:
        """Another one as soon as there are other notes."""
        parts = sorted((path.name, stat_of(path)) for path in note_files(self._folder))
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()

    def rows(self) -> dict[Place, list[Note]]:
        """Those on answers that are there today, by the row of the index, as far as there is one."""
        notes = self.all()
        if not notes:
            return {}
        by_name: dict[str, list[Note]] = {}
        for note in notes:
            by_name.setdefault(note.about.name, []).append(note)
        found: dict[Place, list[Note]] = {}
        for source, wanted in _by_source(notes).items():
            for row, name in self._named(source, wanted):
                if name in by_name:
                    found[source, row] = by_name[name]
        return found

    def _named(self, source: str, answers: Iterable[str]) -> list[tuple[int, str]]:
        """The row and the name of each of these answers that the source has; their texts are read once."""
        mark = next(
            (one.about.mark for one in self._answers.indexed() if one.source.name == source and one.about),
            None,
        )
        if mark is None:
            return []
        new = [one for one in answers if (source, mark, one) not in self._names]
        if new:
            signs = ", ".join("?" * len(new))
            rows = self._answers.sql(
                f"SELECT answer, row, place FROM answers WHERE answer IN ({signs})", new, [source]
            )
            texts = self._answers.texts([(source, row["place"]) for row in rows])
            for row, text in zip(rows, texts, strict=True):
                self._names[source, mark, row["answer"]] = (
                    row["row"],
                    answer_name(source, row["answer"], text),
                )
        return [self._names[source, mark, one] for one in answers if (source, mark, one) in self._names]

    def _look(self) -> list[Note | str]:
        with self._lock:
            there = {path: stat_of(path) for path in note_files(self._folder)}
            self._read = {path: own for path, own in self._read.items() if path in there}
            for path, stat in there.items():
                if stat is not None and self._read.get(path, (None,))[0] != stat:
                    self._read[path] = stat, _note_or_fault(path)
            return [one for _, one in self._read.values() if one]


def labels_in_use(several: Iterable[Notes]) -> list[str]:
    """Those of these notes, the most frequent first."""
    counts = Counter(label for notes in several for note in notes.all() for label in note.labels)
    return sorted(counts, key=lambda label: (-counts[label], label))


def labels_of(notes: Iterable[Note]) -> list[str]:
    """Each label once, whoever put it there."""
    return list(dict.fromkeys(label for note in notes for label in note.labels))


def _by_source(notes: Sequence[Note]) -> Mapping[str, list[str]]:
    found: dict[str, dict[str, None]] = {}
    for note in notes:
        found.setdefault(note.about.source, {})[note.about.answer] = None
    return {source: list(own) for source, own in found.items()}


def _note_or_fault(path: Path) -> Note | str:
    try:
        return read_note(path)
    except FileNotFoundError:  # it was taken away just now
        return ""
    except (ValueError, OSError) as error:
        return str(error)
