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
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from treetune.exceptions import Damaged, NoteChanged
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import read_record, write_record
from treetune.store.files import whole_file
from treetune.view.experiment import read_experiment
from treetune.view.store.answers import AnswerStore
from treetune.view.store.folders import Run, digest, stat_of
from treetune.view.text import writable

LONGEST_NOTE = 20_000
"""Characters of a note."""
LONGEST_LABEL, MOST_LABELS = 40, 20
"""Characters of a label, and labels of a note."""

PATIENCE_S = 5.0
"""How long another process that writes a note may take."""

REMEDY = "delete it; the note is lost"

FORMATS = ("parquet", "jsonl")
"""Formats of notes as a data set."""
_COLUMNS = (
    "experiment", "source", "problem", "sample", "prompt", "answer", "gold", "score", "reward", "outcome",
    "advantage", "labels", "note", "author", "time",
)  # fmt: skip

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
        """A name that no other answer of the experiment has, and another one for another text."""
        return answer_name(self.source, self.answer, self.text)


@dataclass(frozen=True)
class Note:
    """The words of `author` on an answer, and when they were written, in seconds since 1970."""

    about: NotedAnswer
    labels: tuple[str, ...]
    text: str
    author: str
    written: float

    @property
    def version(self) -> str:
        """Another text as soon as the note says something else."""
        return _hash(json.dumps([self.labels, self.text, self.written]))

    @property
    def file_name(self) -> str:
        return f"{self.about.name}.{quote(self.author, safe='')}.json"


def answer_name(source: str, answer: str, text: str) -> str:
    """Names an answer by where it is stored, ``problem#sample``, and its text."""
    return _hash(json.dumps([source, answer, _hash(text)]))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def system_user() -> str:
    """Returns the machine's name for the owner of this process; the number where it has no name."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def new_note(about: NotedAnswer, labels: Iterable[str], text: str) -> Note:
    """Returns this user's note of now. Raises ValueError for labels and texts that are none."""
    lines = text.replace("\r\n", "\n").rstrip()
    if len(lines) > LONGEST_NOTE:
        raise ValueError(f"a note has at most {LONGEST_NOTE:,} characters, and this one {len(lines):,}")
    return Note(about, checked_labels(labels), lines, system_user(), round(time.time(), 3))


def checked_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Returns each label once, without space around it; a text may have several, between commas. Raises
    ValueError."""
    parts = (part.strip() for text in labels for part in text.split(","))
    distinct = tuple(dict.fromkeys(filter(None, parts)))
    for label in distinct:
        if len(label) > LONGEST_LABEL or _CONTROL.search(label):
            raise ValueError(
                f"{label[: LONGEST_LABEL + 1]!r} can't be a label: it is one line of at most {LONGEST_LABEL}"
                " characters"
            )
    if len(distinct) > MOST_LABELS:
        raise ValueError(f"an answer has at most {MOST_LABELS} labels of one author, and not {len(distinct)}")
    return distinct


def save_note(directory: ExperimentDirectory, note: Note, seen: str) -> None:
    """Puts the note in the place of its author's last one on that answer; an empty one takes that away.

    `seen` is the version that the author has seen, empty for none. Raises NoteChanged where that isn't
    what is there, and OSError where the folder can't be written.
    """
    path = directory.notes / note.file_name
    with directory.locked("notes", PATIENCE_S):
        now = read_note(path) if path.is_file() else None
        if now is not None and (now.labels, now.text) == (note.labels, note.text):
            return
        if (now.version if now is not None else "") != seen:
            raise NoteChanged(now)
        if note.labels or note.text:
            fields = asdict(note)
            about = fields.pop("about")
            write_record(path, {**fields, "about": about})
        else:
            path.unlink(missing_ok=True)


def read_note(path: Path) -> Note:
    """Reads one file. Raises Damaged for what is no note."""
    row = read_record(path, REMEDY)
    try:
        about = NotedAnswer(**row["about"])
        return Note(about, tuple(row["labels"]), str(row["text"]), str(row["author"]), float(row["written"]))
    except (KeyError, TypeError) as error:
        raise Damaged(f"{path} is no note ({error!r}): {REMEDY}") from error


def note_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.json") if not path.name.startswith(".")]


def read_notes(folder: Path) -> list[Note]:
    """Reads an experiment's folder of notes, oldest first. Raises Damaged for one that can't be read."""
    return sorted(map(read_note, note_files(folder)), key=lambda note: (note.written, note.file_name))


# Notes and the answers of today


class Notes:
    """All notes of one experiment, and which of its answers they are on; each file is read once, until it is
    another."""

    def __init__(self, run: Run, answers: AnswerStore) -> None:
        self._folder, self._answers = run.directory.notes, answers
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[object, Note | str]] = {}
        """By file its time and size when it was read, and the note, or what is wrong with it."""
        self._names: dict[tuple[str, str, str], tuple[int, str]] = {}
        """By a source, its mark and an answer: the answer's row, and its name."""

    def all(self) -> list[Note]:
        """Returns the newest first."""
        notes = [one for one in self._look() if isinstance(one, Note)]
        return sorted(notes, key=lambda note: (-note.written, note.file_name))

    def problems(self) -> list[str]:
        """Returns messages on what keeps notes from being shown."""
        return sorted(one for one in self._look() if isinstance(one, str))

    def mark(self) -> str:
        """Returns another text as soon as there are other notes."""
        return digest(sorted((path.name, stat_of(path)) for path in note_files(self._folder)))

    def rows(self) -> dict[tuple[str, int], list[Note]]:
        """Returns the notes on answers that are there today, by source and row of the index, as far as there
        is one."""
        by_name: dict[str, list[Note]] = {}
        by_source: dict[str, dict[str, None]] = {}
        for note in self.all():
            by_name.setdefault(note.about.name, []).append(note)
            by_source.setdefault(note.about.source, {})[note.about.answer] = None
        if not by_name:
            return {}
        marks = {one.source.name: one.about.mark for one in self._answers.indexed() if one.about}
        rows: dict[tuple[str, int], list[Note]] = {}
        for source, answers in by_source.items():
            if source not in marks:
                continue
            mark = marks[source]
            if new := [answer for answer in answers if (source, mark, answer) not in self._names]:
                signs = ", ".join("?" * len(new))
                question = f"SELECT answer, row, place FROM answers WHERE answer IN ({signs})"
                stored = self._answers.sql(question, new, [source])
                texts = self._answers.texts([(source, one["place"]) for one in stored])
                for one, text in zip(stored, texts, strict=True):
                    named = one["row"], answer_name(source, one["answer"], text)
                    self._names[source, mark, one["answer"]] = named
            for answer in answers:
                row, name = self._names.get((source, mark, answer), (0, ""))
                if name in by_name:
                    rows[source, row] = by_name[name]
        return rows

    def _look(self) -> list[Note | str]:
        with self._lock:
            there = {path: stat_of(path) for path in note_files(self._folder)}
            self._read = {path: own for path, own in self._read.items() if path in there}
            for path, stat in there.items():
                if stat is not None and self._read.get(path, (None,))[0] != stat:
                    try:
                        self._read[path] = stat, read_note(path)
                    except FileNotFoundError:  # it was taken away just now
                        self._read[path] = stat, ""
                    except (ValueError, OSError) as error:
                        self._read[path] = stat, str(error)
            return [one for _, one in self._read.values() if one]


def labels_in_use(several: Iterable[Notes]) -> list[str]:
    """Returns the labels of these notes, the most frequent first."""
    counts = Counter(label for notes in several for note in notes.all() for label in note.labels)
    return sorted(counts, key=lambda label: (-counts[label], label))


# Notes as a data set


def notes_of(paths: Sequence[Path]) -> list[tuple[str, Note]]:
    """Reads all notes of these experiments, with the experiments' names. Raises ValueError where one has
    none, or one that can't be read."""
    named: list[tuple[str, Note]] = []
    for path in paths:
        experiment = read_experiment(path)
        notes = read_notes(ExperimentDirectory(path).notes)
        if not notes:
            raise ValueError(f"{path} has no notes: `treetune view` writes them, on the page of an answer")
        named += [(experiment.name, note) for note in notes]
    return named


def check_format(suffix: str) -> str:
    """Returns the format of a file's ending. Raises ValueError for one that is no format."""
    if suffix.removeprefix(".") not in FORMATS:
        formats = " or ".join(f".{one}" for one in FORMATS)
        raise ValueError(f"notes are written as {formats}, and not as {suffix or 'no ending'!r}")
    return suffix.removeprefix(".")


def export_notes(named: Iterable[tuple[str, Note]], path: Path) -> None:
    """Writes the file, whole, in the format that its ending says. Raises ValueError for an unknown one."""
    file_format = check_format(path.suffix)
    with whole_file(path, "wb") as file:
        write_notes(named, file, file_format)


def write_notes(named: Iterable[tuple[str, Note]], file: IO[bytes], file_format: str) -> None:
    """Writes a row per note, with the answer that it was written on. `time` is in UTC."""
    rows: list[dict[str, Any]] = []
    for experiment, note in named:
        about = asdict(note.about)
        about["answer"] = about.pop("text")
        texts = {"experiment": experiment, **about, "note": note.text, "author": note.author}
        row = {name: writable(value) if isinstance(value, str) else value for name, value in texts.items()}
        row["labels"] = list(map(writable, note.labels))
        row["time"] = datetime.fromtimestamp(note.written, UTC)
        rows.append({name: row[name] for name in _COLUMNS})
    if file_format == "jsonl":
        for row in rows:
            line = json.dumps({**row, "time": row["time"].isoformat()}, ensure_ascii=False)
            file.write(line.encode() + b"\n")
        return
    import pyarrow as pa
    from pyarrow import parquet

    kinds = {
        "sample": pa.int64(),
        "labels": pa.list_(pa.string()),
        "time": pa.timestamp("ms", tz="UTC"),
        **dict.fromkeys(("score", "reward", "advantage"), pa.float64()),
    }
    schema = pa.schema([pa.field(name, kinds.get(name, pa.large_string())) for name in _COLUMNS])
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), file, compression="zstd")
