"""Answers of an experiment by what they are: filtered, sorted, searched, in pages; and one of them whole."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.exceptions import NotThere
from treetune.runtime.directory import verify_answers
from treetune.view.store.folders import Run, digest
from treetune.view.store.foreign import answer_at
from treetune.view.store.index import (
    BITS,
    ROWS,
    ROWS_IN_GROUP,
    AnswerFile,
    Indexed,
    Layout,
    build,
    read_about,
    read_batch,
    sources,
)
from treetune.view.store.queries import (
    ColumnFilter,
    RowPage,
    RowQuery,
    among,
    as_rows,
    condition,
    connected,
    literal,
    order,
)
from treetune.view.store.signatures import SHORTEST, lowered, may_hold
from treetune.view.store.tables import Histogram, histograms_of

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from treetune.rollouts.storage import TokenSignals
    from treetune.vocabulary import Episode, Trajectory

AT_ONCE_BYTES = 1_000_000
"""An experiment whose answers that have no index yet are no more than this is read while somebody waits."""

LOOKED_INTO = 2000
"""Texts that a search looks into at a time."""
DEEP = 5000
"""Rows that are passed over before a page counts as far behind."""
MOST_AT_ONCE = 50_000
"""Answers in which a text may be, up to which their places are read at once."""
PATIENCE_S = 0.6
"""How long a search goes on looking into texts once it has a page to show."""
LONGEST_S = 3.0
"""How long it looks for a page: what is too short for signatures may stand nowhere in a million texts."""

AS_THEY_CAME = "source[1] DESC, length(source), source, row"
"""The order of what nobody sorted, and of equals: iterations, then evaluations, 2 before 10."""

LOG = logging.getLogger("treetune.view")


@dataclass(frozen=True)
class StoredAnswer:
    """An answer, whole: `row` of the index; the trajectory and its episodes where these are stored, and of
    each episode what the trainer recorded of its tokens, where that is; of an evaluation `line`, the file's.
    """

    row: Mapping[str, Any]
    source: AnswerFile
    trajectory: Trajectory | None = None
    episodes: Sequence[Episode] = ()
    line: Mapping[str, Any] = field(default_factory=dict)
    signals: Sequence[TokenSignals] = ()

    @property
    def episode(self) -> Episode | None:
        """The training row that has the answer's tokens; None where none has."""
        if self.trajectory is None:
            return self.episodes[0] if self.episodes else None
        ids = self.trajectory.response_ids
        return next((one for one in self.episodes if np.array_equal(one.response_ids, ids)), None)

    @property
    def text(self) -> str:
        if self.trajectory is not None:
            return self.trajectory.text
        return self.line.get("text") or (self.episodes[0].text if self.episodes else "")


class AnswerStore:
    """The answers of one experiment. Indexes lie in `cache`; a thread makes those of large files.

    What is known of the files may be `look_again_s` old.
    """

    def __init__(self, run: Run, cache: Path, look_again_s: float = 0.0) -> None:
        self.run = run
        self._look_again_s = look_again_s
        self._seen: tuple[float, list[Indexed]] = (-math.inf, [])
        self._cache = cache / hashlib.blake2b(os.fsencode(run.path.resolve()), digest_size=8).hexdigest()
        self._lock, self._building, self._working = threading.Lock(), threading.Lock(), threading.Lock()
        self._known: dict[str, Indexed] = {}
        self._faults: dict[str, tuple[str, str]] = {}
        """By a source's name: the mark that it had, and what was wrong."""
        self._columns: dict[tuple[str, ...], tuple[str, dict[str, str]]] = {}
        self._connection: duckdb.DuckDBPyConnection | None = None

    # Indexes

    def sources(self) -> list[AnswerFile]:
        """Returns the files of answers that there are now."""
        return sources(self.run)

    def indexed(self) -> list[Indexed]:
        """Returns all sources, each with its index as far as that is made; the rest is begun."""
        seen, indexed = self._seen
        if time.monotonic() - seen < self._look_again_s:
            return indexed
        indexed = [self._indexed(source) for source in self.sources()]
        missing = [one for one in indexed if one.is_awaited or (one.is_behind and not one.fault)]
        if missing and sum(one.source.size for one in missing) <= AT_ONCE_BYTES:
            self._make(missing)
            indexed = [self._indexed(one.source) for one in indexed]
        elif missing and self._working.acquire(blocking=False):
            threading.Thread(target=self._make, args=(missing, self._working), daemon=True).start()
        self._seen = (time.monotonic(), indexed)
        return indexed

    def read_now(self, source: AnswerFile) -> None:
        """Makes the index of one source, and asks no other from now on. Raises ValueError for a file that
        can't be read."""
        build(source, self._cache / source.name)
        self._look_again_s, self._seen = math.inf, (time.monotonic(), [self._indexed(source)])

    def problems(self) -> list[str]:
        """Returns messages on what keeps files from being shown."""
        links = list[Path]()
        sources(self.run, links)
        return [
            *(one.fault for one in self.indexed() if one.fault),
            *(one.about.note for one in self.indexed() if one.about is not None and one.about.note),
            *(f"{path} is not read: it is a symbolic link that leads out of the folder" for path in links),
        ]

    def mark(self) -> str:
        """Returns another text as soon as there are other answers, or more of them are indexed or can't
        be."""
        return digest(
            [
                (one.source.name, one.source.mark, one.about and one.about.mark, one.fault)
                for one in self.indexed()
            ]
        )

    def _indexed(self, source: AnswerFile) -> Indexed:
        mark = source.mark
        known = self._known.get(source.name)
        if known is not None and known.about is not None and known.about.mark == mark:
            return known
        folder = self._cache / source.name
        about = read_about(folder)
        failed, fault = self._faults.get(source.name, ("", ""))
        is_current = about is not None and about.mark == mark
        # A file that is being written would never be shown if its index had to be of what it holds now.
        is_behind = about is not None and not is_current and source.grows and about.size <= source.size
        shown = about if is_current or is_behind else None
        one = Indexed(source, folder, shown, fault if not is_current and failed == mark else "", is_behind)
        self._known[source.name] = one
        return one

    def _make(self, missing: Sequence[Indexed], working: threading.Lock | None = None) -> None:
        """Makes the indexes, and takes away those of files that are gone; releases `working` at the end."""
        try:
            names = {source.name for source in self.sources()}
            for gone in [folder for folder in self._cache.glob("[ie]*") if folder.name not in names]:
                shutil.rmtree(gone, ignore_errors=True)
            for one in missing:
                with self._building:
                    newest = self._indexed(one.source)
                    if newest.about is not None and not newest.is_behind:
                        continue
                    mark = one.source.mark
                    try:
                        build(one.source, one.folder)
                    except Exception as error:  # whatever it is, other files are shown, and this one is named
                        if one.source.mark == mark:  # else it was written anew, and is read next time
                            fault = self._fault(one.source, error)
                            self._faults[one.source.name] = mark, fault
                            LOG.warning("%s", fault, exc_info=not isinstance(error, ValueError | OSError))
        finally:
            if working is not None:
                working.release()

    def _fault(self, source: AnswerFile, error: Exception) -> str:
        """Describes an error. An OSError that names no file of the source is about the index."""
        if isinstance(error, OSError) and error.filename not in map(str, source.files):
            return (
                f"{source.title} is not shown, as its index can't be written to {self._cache} ({error}): make"
                " room there, or let it be written, and start the viewer again"
            )
        return f"{source.title} can't be read: {error}"

    # Questions

    def columns(self, sources: Sequence[str] = ()) -> dict[str, str]:
        """Returns the columns of the index by name, with DuckDB's types: of these sources, or of all."""
        names = tuple(sources)
        relation, mark = self._relation(names), self.mark()
        if relation is None:
            return {}
        if self._columns.get(names, ("",))[0] != mark:
            rows = self._cursor().execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()
            columns = {name: kind for name, kind, *_ in rows if name not in ("row", "place")}
            self._columns[names] = mark, columns
        return self._columns[names][1]

    def ask(self, question: RowQuery) -> RowPage:
        """Returns a page of answers. A column that only other sources have is null in these. Raises
        ValueError for a column or an operator that isn't there."""
        relation = self._relation(question.sources)
        if relation is None:
            return RowPage([], 0, True)
        known, own = self.columns(), self.columns(question.sources)
        where, values = condition(question.filters, known, own)
        where = f"{where} AND {among(question.among)}"
        by = order(question, known, own, AS_THEY_CAME)
        if question.search:
            return self._search(question, relation, where, values, by)
        cursor = self._cursor()
        [total] = cursor.execute(f"SELECT count(*) FROM {relation} WHERE {where}", values).fetchone() or (0,)
        rest = f"FROM {relation} WHERE {where} ORDER BY {by} LIMIT {question.size} OFFSET {question.skipped}"
        if question.skipped < DEEP:
            return RowPage(as_rows(cursor.execute(f"SELECT * {rest}", values)), total, True)
        # What is sorted and passed over has two columns then, and not all.
        keys = cursor.execute(f"SELECT source, row {rest}", values).fetchall()
        return RowPage(self._rows_at(keys), total, True)

    def histograms(self, question: RowQuery, columns: Sequence[str]) -> list[Histogram]:
        """Counts columns of the answers that the question is about, but for its search."""
        relation, own = self._relation(question.sources), self.columns(question.sources)
        chosen = [name for name in columns if name in own]
        if relation is None or not chosen:
            return []
        where, values = condition(question.filters, self.columns(), own)
        rows, cursor = f"{relation} WHERE {where} AND {among(question.among)}", self._cursor()
        return histograms_of(lambda text: cursor.execute(text, values), rows, chosen)

    def page_of(self, question: RowQuery, row: Mapping[str, Any]) -> int:
        """Returns the page of the question (but for its search) that has this row of the index; 1 where none
        has."""
        relation, known = self._relation(question.sources), self.columns()
        if relation is None:
            return 1
        own = self.columns(question.sources)
        where, values = condition(question.filters, known, own)
        by = order(question, known, own, AS_THEY_CAME)
        numbered = (
            f"SELECT source, row, row_number() OVER (ORDER BY {by}) AS number"
            f" FROM {relation} WHERE {where} AND {among(question.among)}"
        )
        text = f"SELECT number FROM ({numbered}) WHERE source = ? AND row = ?"
        found = self._cursor().execute(text, [*values, row["source"], row["row"]]).fetchone()
        return 1 + (found[0] - 1) // question.size if found else 1

    def sql(self, text: str, values: Sequence[Any] = (), sources: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Asks the table `answers` a question in SQL, for pages that count; values stand for `?`."""
        relation = self._relation(tuple(sources))
        if relation is None:
            return []
        question = f"WITH answers AS (SELECT * FROM {relation}) {text}"
        return as_rows(self._cursor().execute(question, list(values)))

    def _search(self, question: RowQuery, relation: str, where: str, values: list[Any], by: str) -> RowPage:
        """Looks into the answers whose signature lets hope, in the order in which they are shown."""
        needed, started = question.page * question.size, time.monotonic()
        connection = self._cursor()
        candidates = self._candidates(question)
        if candidates is not None:
            connection.register("candidates", candidates)
            relation = f"(SELECT * FROM {relation} JOIN candidates USING (source, row))"
        matching = f"FROM {relation} WHERE {where}"
        # All of a few at once: each further question would join anew.
        fits = candidates is not None and len(candidates) <= MOST_AT_ONCE
        whole = f"SELECT source, row, place {matching} ORDER BY {by}"
        all_places = connection.execute(whole, values).fetchall() if fits else None
        if all_places is not None:
            total = len(all_places)
        else:
            [total] = connection.execute(f"SELECT count(*) {matching}", values).fetchone() or (0,)
        keys = list[tuple[str, int]]()
        seen = hits = 0
        taken = question.size + question.size // 4
        while seen < total and time.monotonic() - started < (PATIENCE_S if hits >= needed else LONGEST_S):
            if all_places is not None:
                places = all_places[seen : seen + taken]
            else:
                places = connection.execute(f"{whole} LIMIT {taken} OFFSET {seen}", values).fetchall()
            texts = self.texts([(source, place) for source, _, place in places])
            for (source, row, _), text in zip(places, texts, strict=True):
                if lowered(question.search) in lowered(text):
                    hits += 1
                    if question.skipped < hits <= needed:
                        keys.append((source, row))
            seen += len(places)
            taken = min(LOOKED_INTO, 2 * taken)
        exact = seen >= total
        estimated = hits if exact else max(hits, round(hits / max(1, seen) * total))
        return RowPage(self._rows_at(keys), estimated, exact)

    def _rows_at(self, keys: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        """Returns rows of the index by source and number."""
        from pyarrow import parquet

        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for one in self._chosen({source for source, _ in keys}):
            own = sorted(row for source, row in keys if source == one.source.name)
            with parquet.ParquetFile(one.folder / ROWS) as file:
                for group in range(file.num_row_groups):
                    start = group * ROWS_IN_GROUP
                    inside = [row - start for row in own if start <= row < start + ROWS_IN_GROUP]
                    if inside:
                        for row in file.read_row_group(group, use_threads=False).take(inside).to_pylist():
                            rows[row["source"], row["row"]] = row
        return [rows[key] for key in keys]

    def _candidates(self, question: RowQuery) -> pa.Table | None:
        """Returns sources and rows in which the text may be; None where most may."""
        import pyarrow as pa

        if len(question.search.encode()) < SHORTEST:
            return None
        names, rows, count = list[Any](), list[np.ndarray](), 0
        for one in self._chosen(question.sources):
            assert one.about is not None
            own = np.flatnonzero(may_hold(one.folder / BITS, one.about.rows, question.search))
            names.append(pa.repeat(one.source.name, len(own)))
            rows.append(own)
            count += one.about.rows
        chosen = np.concatenate(rows)
        if 2 * len(chosen) > count:
            return None
        return pa.table({"source": pa.concat_arrays(names), "row": chosen})

    # Texts and whole answers

    def texts(self, places: Sequence[tuple[str, int]]) -> list[str]:
        """Returns the whole texts of answers, by source and place."""
        by_source = {one.source.name: one for one in self._chosen({name for name, _ in places})}
        batches: dict[tuple[str, int], list[int]] = {}
        texts = [""] * len(places)
        for i, (name, place) in enumerate(places):
            layout = _layout_of_texts(by_source[name])
            batches.setdefault((name, layout.batch_of(place) if layout else -1), []).append(i)

        def read(key: tuple[str, int], own: list[int]) -> None:
            name, number = key
            one = by_source[name]
            layout = _layout_of_texts(one)
            if layout is None:
                for i in own:
                    texts[i] = _line(one.source, places[i][1]).get("text") or ""
                return
            column = read_batch(one.source.path, layout, number, ["text"])["text"]
            for i in own:
                texts[i] = column[places[i][1] - layout.rows[number]].as_py() or ""

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(read, *item) for item in batches.items()]:
                done.result()
        return texts

    def answer(self, source: str, answer: str) -> StoredAnswer:
        """Returns the answer `problem#sample` of a source. Raises NotThere, and ValueError where its file is
        another by now."""
        rows = self.ask(
            RowQuery(sources=(source,), filters=(ColumnFilter("answer", "=", answer),), size=1)
        ).rows
        if not rows:
            raise NotThere(f"there is no answer {answer!r} in {source} of {self.run.name}")
        return self.whole(rows[0])

    def whole(self, row: Mapping[str, Any]) -> StoredAnswer:
        """Returns the answer of a row of the index. Raises ValueError where its file is another by now."""
        [one] = self._chosen({row["source"]})
        about, files = one.about, one.source
        assert about is not None
        if files.kind == "evaluation":
            return StoredAnswer(row, files, line=_line(files, row["place"]))
        trajectory, episodes, signals = None, list[Any](), list[Any]()
        if about.answers is not None:
            from treetune.rollouts.rows import trajectories_of

            [trajectory] = trajectories_of(_one_row(files.path, about.answers, row["place"]))
            if trajectory.id != row["answer"]:
                raise ValueError(f"{files.path} was written anew just now: ask again")
        if about.episodes is not None and files.episodes is not None:
            from treetune.rollouts.rows import episodes_of
            from treetune.rollouts.storage import signals_of

            first = row["place"] if about.answers is None else row.get("episode_place")
            last = first if about.answers is None else row.get("episode_last")
            for place in range(first, last + 1) if first is not None and last is not None else ():
                [episode] = episodes_of(_one_row(files.episodes, about.episodes, place))
                if episode.trajectory == row["answer"]:
                    episodes.append(episode)
                    if about.signals is not None and files.signals is not None:
                        signals += signals_of(_one_row(files.signals, about.signals, place))
        return StoredAnswer(row, files, trajectory, episodes, signals=signals)

    def group(self, source: str, problem: str) -> list[Episode]:
        """Returns the training rows of all answers to a problem, in the source's order."""
        from treetune.rollouts.rows import episodes_of

        [one] = self._chosen({source})
        about, episodes = one.about, list[Any]()
        if about is None or about.episodes is None or one.source.episodes is None:
            return []
        place = "place" if about.answers is None else "episode_place"
        where = f"problem = ? AND {place} IS NOT NULL"
        rows = self.sql(f"SELECT {place} AS at FROM answers WHERE {where} ORDER BY row", [problem], [source])
        by_batch: dict[int, list[int]] = {}
        for row in rows:
            by_batch.setdefault(about.episodes.batch_of(row["at"]), []).append(row["at"])
        for number, own in by_batch.items():
            batch = read_batch(one.source.episodes, about.episodes, number)
            episodes += episodes_of(batch.take([at - about.episodes.rows[number] for at in own]))
        return episodes

    # DuckDB

    def _chosen(self, names: Sequence[str] | set[str]) -> list[Indexed]:
        return [
            one for one in self.indexed() if one.about is not None and (not names or one.source.name in names)
        ]

    def _relation(self, names: Sequence[str]) -> str | None:
        chosen = [one for one in self._chosen(names) if one.about is not None and one.about.rows]
        if not chosen:
            return None
        files = ", ".join(literal(str(one.folder / ROWS)) for one in chosen)
        return f"read_parquet([{files}], union_by_name=true)"

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            if self._connection is None:
                self._connection = connected()
                self._connection.execute("SET parquet_metadata_cache = true")
        return self._connection.cursor()


def _layout_of_texts(one: Indexed) -> Layout | None:
    """Returns the layout of the Arrow file with the texts; None for an evaluation's lines."""
    return one.about.answers or one.about.episodes if one.about else None


def _one_row(path: Path, layout: Layout, place: int) -> pa.RecordBatch:
    """Returns a batch of the one row, in buffers of its own: whoever reads columns may ignore a slice."""
    number = layout.batch_of(place)
    return read_batch(path, layout, number).take([place - layout.rows[number]])


def _line(source: AnswerFile, place: int) -> Mapping[str, Any]:
    """Returns the row of an evaluation, or of somebody else's file, at its place."""
    if source.is_foreign:
        return answer_at(source.path, place)
    verify_answers(source.path)
    with source.path.open("rb") as file:
        file.seek(place)
        return json.loads(file.readline())
