"""Notes and labels that people write on answers: a file in the run's folder for each answer and author.

An answer is identified by its source (an iteration, or an evaluation), its problem and sample, and its text.
If an iteration is sampled again and the answer changes, a note doesn't move to the new text. It still shows
the text that it was written on, because the note contains that text."""

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
from treetune.store.files import write_atomically
from treetune.view.experiment import read_experiment
from treetune.view.store.answers import AnswerStore
from treetune.view.store.folders import Run, short_hash, stat_of
from treetune.view.text import make_writable

LONGEST_NOTE = 20_000
"""The most characters of a note."""
LONGEST_LABEL, MOST_LABELS = 40, 20
"""The most characters of a label, and the most labels of a note."""

PATIENCE_S = 5.0
"""The seconds to wait for another process that is writing a note."""

NOTE_REMEDY = "delete it; the note is lost"
"""The advice in the message about a damaged note."""

EXPORT_FORMATS = ("parquet", "jsonl")
"""The formats in which notes can be written as a data set."""
# The columns of that data set, in order.
_COLUMNS_OF_NOTES = (
    "experiment", "source", "problem", "sample", "prompt", "answer", "gold", "score", "reward", "outcome",
    "advantage", "labels", "note", "author", "time",
)  # fmt: skip

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class NotedAnswer:
    """The answer that a note is about, as it was when the note was written."""

    source: str
    """``i4`` for iteration 4, counted from 1, and ``e4-test`` for the evaluation of the set ``test`` after 4
    iterations."""
    answer: str
    """The answer's name in its source: ``problem#sample``."""
    problem: str
    sample: int | None
    prompt: str
    text: str
    gold: str | None = None
    score: float | None = None
    """The score; None if the answer could not be graded."""
    reward: float | None = None
    """The reward; None if the answer has none."""
    outcome: str | None = None
    advantage: float | None = None
    """The mean advantage of the answer's trained tokens; None if it has no credit."""

    @property
    def name(self) -> str:
        """A name that is unique in the experiment (see `answer_name`)."""
        return answer_name(self.source, self.answer, self.text)


@dataclass(frozen=True)
class Note:
    """A note of an author on an answer."""

    about: NotedAnswer
    labels: tuple[str, ...]
    text: str
    author: str
    written: float
    """The time when it was written, in seconds since 1970."""

    @property
    def version(self) -> str:
        """A text that changes whenever the note does."""
        return _hash_text(json.dumps([self.labels, self.text, self.written]))

    @property
    def file_name(self) -> str:
        """The name of the note's file, from the answer's name and the author. Another author's note on the
        same answer has another file."""
        return f"{self.about.name}.{quote(self.author, safe='')}.json"


def answer_name(source: str, answer: str, text: str) -> str:
    """Returns a name for an answer: a hash of its source, its ``problem#sample`` (`answer`), and its text.

    If the same sample of a problem has another text, it has another name.
    """
    return _hash_text(json.dumps([source, answer, _hash_text(text)]))


def _hash_text(text: str) -> str:
    # The text may contain a lone surrogate (half a character), which UTF-8 encodes only with "surrogatepass".
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def system_user() -> str:
    """Returns the name of this process's owner, or the owner's number if this machine has no name for it."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def new_note(about: NotedAnswer, labels: Iterable[str], text: str) -> Note:
    """Returns a new note, written now by this process's owner.

    Raises ValueError for a text that is too long, and for labels that `check_labels` doesn't accept.
    """
    note_text = text.replace("\r\n", "\n").rstrip()
    if len(note_text) > LONGEST_NOTE:
        raise ValueError(f"a note has at most {LONGEST_NOTE:,} characters, and this one {len(note_text):,}")
    return Note(about, check_labels(labels), note_text, system_user(), round(time.time(), 3))


def check_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Returns each label once, without space around it.

    Each text of `labels` may have several labels, separated by commas: ["wrong, short", "wrong"] becomes
    ("wrong", "short"). Raises ValueError for a label that is too long or has control characters, and for too
    many labels.
    """
    parts: list[str] = []
    for text in labels:
        parts += [part.strip() for part in text.split(",")]
    distinct = tuple(dict.fromkeys(part for part in parts if part))
    for label in distinct:
        if len(label) > LONGEST_LABEL or _CONTROL_CHARACTER.search(label):
            raise ValueError(
                f"{label[: LONGEST_LABEL + 1]!r} can't be a label: it is one line of at most {LONGEST_LABEL}"
                " characters"
            )
    if len(distinct) > MOST_LABELS:
        raise ValueError(f"an answer has at most {MOST_LABELS} labels of one author, and not {len(distinct)}")
    return distinct


def save_note(directory: ExperimentDirectory, note: Note, seen_version: str) -> None:
    """Writes a note in place of its author's earlier note on that answer.

    A note without text and labels deletes the earlier one.

    Args:
        directory: The experiment.
        note: The new note.
        seen_version: The version of the earlier note that the author has seen; empty if there was none.

    Raises:
        NoteChanged: Another version than `seen_version` is on disk. It is not overwritten, so it can't get
            lost.
        OSError: The folder can't be written.
    """
    path = directory.notes_folder / note.file_name
    with directory.locked("notes", PATIENCE_S):
        stored_note = read_note(path) if path.is_file() else None
        if stored_note is not None and (stored_note.labels, stored_note.text) == (note.labels, note.text):
            return  # it is saved already, whatever version its author has seen
        version = stored_note.version if stored_note is not None else ""
        if version != seen_version:
            raise NoteChanged(stored_note)
        if note.labels or note.text:
            fields = asdict(note)
            # `about` is moved to the end, so that people who open the file see labels and text first.
            fields["about"] = fields.pop("about")
            write_record(path, fields)
        else:
            path.unlink(missing_ok=True)


def read_note(path: Path) -> Note:
    """Reads a note's file. Raises Damaged if its content isn't a note."""
    row = read_record(path, NOTE_REMEDY)
    try:
        about = NotedAnswer(**row["about"])
        return Note(about, tuple(row["labels"]), str(row["text"]), str(row["author"]), float(row["written"]))
    except (KeyError, TypeError) as error:
        raise Damaged(f"{path} is not a note ({error!r}): {NOTE_REMEDY}") from error


def note_files(folder: Path) -> list[Path]:
    """Returns the files of notes in a folder, without hidden files."""
    return [path for path in folder.glob("*.json") if not path.name.startswith(".")]


def read_notes(folder: Path) -> list[Note]:
    """Reads all notes in an experiment's folder of notes, the oldest first.

    Raises Damaged for a note that can't be read.
    """
    return sorted(map(read_note, note_files(folder)), key=lambda note: (note.written, note.file_name))


# Notes and the present answers


class Notes:
    """The notes of an experiment, and the rows of the index with the answers that the notes are on.

    A note's file is read once, and again when it has changed.
    """

    def __init__(self, run: Run, answers: AnswerStore) -> None:
        self._folder, self._answers = run.directory.notes_folder, answers
        self._lock = threading.Lock()
        self._stats_and_notes: dict[Path, tuple[object, Note | str]] = {}
        """For each file its stat when it was read, and its note, or a message on why it can't be read."""
        self._rows_and_names: dict[tuple[str, str, str], tuple[int, str]] = {}
        """For each answer its row in the index, and its name (see `answer_name`).

        The key is (name of the source, the source's fingerprint, ``problem#sample``). The fingerprint changes
        when the source's files change.
        """

    def all(self) -> list[Note]:
        """Returns all notes, the newest first."""
        notes = [item for item in self._read_all() if isinstance(item, Note)]
        return sorted(notes, key=lambda note: (-note.written, note.file_name))

    def problems(self) -> list[str]:
        """Returns messages on notes that can't be read."""
        return sorted(item for item in self._read_all() if isinstance(item, str))

    def fingerprint(self) -> str:
        """Returns a text that changes whenever the notes do."""
        return short_hash(sorted((path.name, stat_of(path)) for path in note_files(self._folder)))

    def rows(self) -> dict[tuple[str, int], list[Note]]:
        """Returns the notes on answers that still exist, by source and row of the index."""
        notes_by_name: dict[str, list[Note]] = {}
        answers_by_source: dict[str, dict[str, None]] = {}  # a dictionary as an ordered set
        for note in self.all():
            notes_by_name.setdefault(note.about.name, []).append(note)
            answers_by_source.setdefault(note.about.source, {})[note.about.answer] = None
        if not notes_by_name:
            return {}
        # Of each source that has an index, its fingerprint, which changes when the source's files change.
        fingerprints = {
            item.source.name: item.about.fingerprint
            for item in self._answers.list_indexed_sources()
            if item.about
        }
        rows: dict[tuple[str, int], list[Note]] = {}
        for source, answers in answers_by_source.items():
            if source not in fingerprints:
                continue
            fingerprint = fingerprints[source]
            self._read_names(source, fingerprint, list(answers))
            for answer in answers:
                key = source, fingerprint, answer
                if key not in self._rows_and_names:  # the source has no such answer any more
                    continue
                # A name is a hash of the answer's source, problem, sample and text. If the text has changed,
                # it is another name than the note's.
                row, name = self._rows_and_names[key]
                if name in notes_by_name:
                    rows[source, row] = notes_by_name[name]
        return rows

    def _read_names(self, source: str, fingerprint: str, answers: Sequence[str]) -> None:
        """Adds the rows and names of a source's `answers` to `_rows_and_names`, if they are not there yet.

        `answers` are texts ``problem#sample``. A name is a hash that includes the answer's text, so the text
        is read for each new name.
        """
        unread = [answer for answer in answers if (source, fingerprint, answer) not in self._rows_and_names]
        if not unread:
            return
        placeholders = ", ".join("?" * len(unread))
        query = f"SELECT answer, row, place FROM answers WHERE answer IN ({placeholders})"
        index_rows = self._answers.sql(query, unread, [source])
        # The column `place` is the answer's position in the source's file.
        texts = self._answers.texts([(source, index_row["place"]) for index_row in index_rows])
        for index_row, text in zip(index_rows, texts, strict=True):
            answer = index_row["answer"]
            name = answer_name(source, answer, text)
            self._rows_and_names[source, fingerprint, answer] = index_row["row"], name

    def _read_all(self) -> list[Note | str]:
        """Returns the note of each file, or a message on why the file can't be read."""
        with self._lock:
            stats = {path: stat_of(path) for path in note_files(self._folder)}
            # Files that don't exist any more are forgotten.
            self._stats_and_notes = {
                path: entry for path, entry in self._stats_and_notes.items() if path in stats
            }
            for path, stat in stats.items():
                if stat is None:  # the file has just been deleted
                    continue
                earlier_stat, _ = self._stats_and_notes.get(path, (None, ""))
                if earlier_stat == stat:  # the file hasn't changed
                    continue
                try:
                    self._stats_and_notes[path] = stat, read_note(path)
                except FileNotFoundError:  # deleted since the stat: "" is left out below
                    self._stats_and_notes[path] = stat, ""
                except (ValueError, OSError) as error:
                    self._stats_and_notes[path] = stat, str(error)
            return [item for _, item in self._stats_and_notes.values() if item]


def labels_in_use(notes_of_experiments: Iterable[Notes]) -> list[str]:
    """Returns the labels of the notes of several experiments, the most frequent first."""
    counts: Counter[str] = Counter()
    for notes in notes_of_experiments:
        for note in notes.all():
            counts.update(note.labels)
    return sorted(counts, key=lambda label: (-counts[label], label))


# Notes as a data set


def notes_of(paths: Sequence[Path]) -> list[tuple[str, Note]]:
    """Reads all notes of the experiments in `paths`, and returns (name of the experiment, note) for each
    note.

    Raises ValueError for an experiment without notes, and for a note that can't be read.
    """
    named_notes: list[tuple[str, Note]] = []
    for path in paths:
        experiment = read_experiment(path)
        notes = read_notes(ExperimentDirectory(path).notes_folder)
        if not notes:
            raise ValueError(f"{path} has no notes: `treetune view` writes them, on the page of an answer")
        named_notes += [(experiment.name, note) for note in notes]
    return named_notes


def check_format(suffix: str) -> str:
    """Returns the format that a file's suffix names: "parquet" for ".parquet".

    Raises ValueError for a suffix of another format.
    """
    file_format = suffix.removeprefix(".")
    if file_format not in EXPORT_FORMATS:
        suffixes = " or ".join(f".{name}" for name in EXPORT_FORMATS)
        raise ValueError(f"notes are written as {suffixes}, and not as {suffix or 'no ending'!r}")
    return file_format


def export_notes(named_notes: Iterable[tuple[str, Note]], path: Path) -> None:
    """Writes (name of the experiment, note) pairs into a file, in the format that its suffix names.

    Raises ValueError for a suffix of another format.
    """
    file_format = check_format(path.suffix)
    with write_atomically(path, "wb") as file:
        write_notes(named_notes, file, file_format)


def write_notes(named_notes: Iterable[tuple[str, Note]], file: IO[bytes], file_format: str) -> None:
    """Writes a row for each (name of the experiment, note), with the answer that the note is about.

    The column `time` is in UTC.
    """
    rows: list[dict[str, Any]] = []
    for experiment, note in named_notes:
        answer_fields = asdict(note.about)
        # In the data set, "answer" is the answer's text. In a note, it is ``problem#sample``, which the
        # columns "problem" and "sample" have.
        answer_fields["answer"] = answer_fields.pop("text")
        fields = {"experiment": experiment, **answer_fields, "note": note.text, "author": note.author}
        row = {
            name: make_writable(value) if isinstance(value, str) else value for name, value in fields.items()
        }
        row["labels"] = list(map(make_writable, note.labels))
        row["time"] = datetime.fromtimestamp(note.written, UTC)
        rows.append({name: row[name] for name in _COLUMNS_OF_NOTES})
    if file_format == "jsonl":
        for row in rows:
            line = json.dumps({**row, "time": row["time"].isoformat()}, ensure_ascii=False)
            file.write(line.encode() + b"\n")
        return
    import pyarrow as pa
    from pyarrow import parquet

    column_types = {
        "sample": pa.int64(),
        "labels": pa.list_(pa.string()),
        "time": pa.timestamp("ms", tz="UTC"),
        **dict.fromkeys(("score", "reward", "advantage"), pa.float64()),
    }
    schema = pa.schema(
        [pa.field(name, column_types.get(name, pa.large_string())) for name in _COLUMNS_OF_NOTES]
    )
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), file, compression="zstd")
