"""The answers of an experiment: filtered, sorted and searched lists, and whole answers.

a page asks ──► AnswerStore.ask ──► DuckDB on the indexes that exist (`index.py`)
                    │
                    └─ missing indexes: small ones are made at once, while the page waits; large ones by
                       a thread, and the page asks again when its fingerprint changes
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.exceptions import NotThere
from treetune.runtime.directory import verify_answers
from treetune.view.store.folders import Run, short_hash
from treetune.view.store.foreign import answer_at
from treetune.view.store.index import (
    ROWS_FILE,
    ROWS_IN_GROUP,
    TEXTS_FILE,
    AnswerFile,
    Indexed,
    StreamLayout,
    build_index,
    find_sources,
    read_about,
    read_batch,
)
from treetune.view.store.queries import (
    ColumnFilter,
    RowPage,
    RowQuery,
    among_sql,
    as_rows,
    condition_sql,
    open_database,
    order_sql,
    quote_text,
)
from treetune.view.store.tables import Histogram, histograms_of
from treetune.view.text import make_writable

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from treetune.rollouts.storage import TokenSignals
    from treetune.vocabulary import Episode, Trajectory

MOST_BYTES_READ_AT_ONCE = 1_000_000
"""The most bytes of files without an index that are read while the page waits. More bytes are read by a
thread."""

DEEP_ROWS = 5000
"""The number of skipped rows from which on a page is read in two steps: see `AnswerStore.ask`."""
KEPT_SEARCHES = 4
"""The number of searches whose results are kept, for their further pages."""
LONGEST_SEARCH_S = 60.0
"""The seconds after which a search is given up."""

DEFAULT_ORDER = "source[1] DESC, length(source), source, row"
"""The order of rows that are not sorted by a column, or that are equal in it, as SQL.

Names of iterations (`i…`) come before those of evaluations (`e…`), and `i2` before `i10`, because the shorter
name comes first."""

LOG = logging.getLogger("treetune.view")


@dataclass(frozen=True)
class StoredAnswer:
    """A whole answer, with everything that is stored about it."""

    row: Mapping[str, Any]
    """The answer's row of the index."""
    source: AnswerFile
    trajectory: Trajectory | None = None
    """The answer as it was sampled; None for evaluations, and if only training rows are stored."""
    episodes: Sequence[Episode] = ()
    """The training rows that the answer was cut into."""
    line: Mapping[str, Any] = field(default_factory=dict)
    """The answer's line in an evaluation's file; empty for an iteration."""
    signals: Sequence[TokenSignals] = ()
    """The numbers that the trainer recorded for the tokens of each episode; empty if it recorded none."""

    @property
    def episode(self) -> Episode | None:
        """The training row with all tokens of the answer; None if no row has all of them.

        If only training rows are stored, it is the first of them.
        """
        if self.trajectory is None:  # only training rows are stored
            return self.episodes[0] if self.episodes else None
        for episode in self.episodes:
            if np.array_equal(episode.response_ids, self.trajectory.response_ids):
                return episode
        return None

    @property
    def text(self) -> str:
        if self.trajectory is not None:
            return self.trajectory.text
        return self.line.get("text") or (self.episodes[0].text if self.episodes else "")


class AnswerStore:
    """The answers of an experiment. Safe for several threads.

    Indexes are stored below the folder `cache`. The list of files is made again when it is older than
    `look_again_s` seconds.
    """

    def __init__(self, run: Run, cache: Path, look_again_s: float = 0.0) -> None:
        self.run = run
        # Runs in different folders may have the same name and share a cache, so the folder is named by the
        # path.
        run_digest = hashlib.blake2b(os.fsencode(run.path.resolve()), digest_size=8).hexdigest()
        self._cache = cache / run_digest

        self._look_again_s = look_again_s
        self._last_listed_at = -math.inf
        self._last_listed: list[Indexed] = []
        self._indexed_by_name: dict[str, Indexed] = {}
        self._faults: dict[str, tuple[str, str]] = {}
        """(fingerprint, reason) by a source's name: the state of its files in which it couldn't be read, and
        the reason why."""
        self._columns: dict[tuple[str, ...], tuple[str, dict[str, str]]] = {}
        """(fingerprint, types of columns) by the names of sources, where `fingerprint` is that of all answers
        when the columns were listed."""

        self._searches: OrderedDict[Hashable, pa.Table] = OrderedDict()
        """The rows that the last `KEPT_SEARCHES` searches found, the least recently used first."""
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._query_lock = threading.Lock()
        """Guards `_searches` and `_connection`."""
        self._build_lock = threading.Lock()
        """Held while an index is made, so that no index is made twice at the same time."""
        self._background_lock = threading.Lock()
        """Held while a thread makes indexes in the background, so that there is at most one such thread."""

    # Indexes

    def sources(self) -> list[AnswerFile]:
        """Returns the files of answers that exist now."""
        return find_sources(self.run)

    def list_indexed_sources(self) -> list[Indexed]:
        """Returns all sources, each with its index if that exists, and starts to make the missing indexes."""
        if time.monotonic() - self._last_listed_at < self._look_again_s:
            return self._last_listed
        indexed = [self._read_index(source) for source in self.sources()]
        # An index is missing if it doesn't exist, or if its file has grown since (`is_behind`). A file that
        # can't be read has a fault, and isn't tried again until it changes.
        without_index = [item for item in indexed if item.is_awaited or (item.is_behind and not item.fault)]
        # If the files are small, this call waits for their indexes. If not, a thread makes them, and a later
        # call finds them.
        if without_index and sum(item.source.size for item in without_index) <= MOST_BYTES_READ_AT_ONCE:
            self._make_indexes(without_index)
            indexed = [self._read_index(item.source) for item in indexed]
        elif without_index and self._background_lock.acquire(blocking=False):
            arguments = (without_index, self._background_lock)
            threading.Thread(target=self._make_indexes, args=arguments, daemon=True).start()
        self._last_listed_at, self._last_listed = time.monotonic(), indexed
        return indexed

    def read_now(self, source: AnswerFile) -> None:
        """Makes the index of a source. From then on, the store has only this source.

        Raises ValueError for a file that can't be read.
        """
        build_index(source, self._cache / source.name)
        self._look_again_s = math.inf  # the store never looks for other sources
        self._last_listed_at, self._last_listed = time.monotonic(), [self._read_index(source)]

    def problems(self) -> list[str]:
        """Returns messages on files that can't be shown."""
        links: list[Path] = []
        find_sources(self.run, left_out=links)  # called only to get the links
        indexed = self.list_indexed_sources()
        return [
            *(item.fault for item in indexed if item.fault),
            *(item.about.note for item in indexed if item.about is not None and item.about.note),
            *(
                f"{path} is not read: it is a symbolic link to a file outside of the viewer's folders"
                for path in links
            ),
        ]

    def fingerprint(self) -> str:
        """Returns a text that changes whenever answers, their indexes or the messages on them change."""
        parts = []
        for item in self.list_indexed_sources():
            index_fingerprint = item.about.fingerprint if item.about is not None else None
            parts.append((item.source.name, item.source.fingerprint, index_fingerprint, item.fault))
        return short_hash(parts)

    def _read_index(self, source: AnswerFile) -> Indexed:
        """Returns a source with its index, if it has one.

        An older index of a file that only grows counts as its index, too: a file to which another program
        keeps writing would otherwise never be shown.
        """
        fingerprint = source.fingerprint  # the state of the source's files
        cached = self._indexed_by_name.get(source.name)
        if cached is not None and cached.about is not None and cached.about.fingerprint == fingerprint:
            return cached
        folder = self._cache / source.name
        about = read_about(folder)
        failed_fingerprint, fault = self._faults.get(source.name, ("", ""))
        is_current = about is not None and about.fingerprint == fingerprint
        is_behind = about is not None and not is_current and source.grows and about.size <= source.size
        shown_index = about if is_current or is_behind else None
        # A fault counts only for the state of the files in which it was found.
        shown_fault = fault if not is_current and failed_fingerprint == fingerprint else ""
        indexed = Indexed(source, folder, shown_index, shown_fault, is_behind)
        self._indexed_by_name[source.name] = indexed
        return indexed

    def _make_indexes(self, missing: Sequence[Indexed], lock: threading.Lock | None = None) -> None:
        """Makes the missing indexes, and deletes those of files that were deleted.

        If it runs in a background thread, it gets the lock that the caller has acquired for this thread, and
        releases it at the end. The lock is None if the caller waits for the indexes.
        """
        try:
            names = {source.name for source in self.sources()}
            # The indexes of iterations (i4) and evaluations (e4-test).
            for folder in list(self._cache.glob("[ie]*")):
                if folder.name not in names:
                    shutil.rmtree(folder, ignore_errors=True)
            for item in missing:
                with self._build_lock:
                    self._make_index(item)
        finally:
            if lock is not None:
                lock.release()

    def _make_index(self, item: Indexed) -> None:
        """Makes the index of a source if it is still missing, or stores the reason why that failed."""
        newest = self._read_index(item.source)
        # Another thread may have made the index meanwhile. An index is behind if its file has grown since.
        if newest.about is not None and not newest.is_behind:
            return
        fingerprint = item.source.fingerprint
        try:
            build_index(item.source, item.folder)
        except Exception as error:  # any fault of one file must not keep the others from being shown
            # If the file has changed meanwhile, the next call tries it again.
            if item.source.fingerprint != fingerprint:
                return
            fault = self._describe_fault(item.source, error)
            self._faults[item.source.name] = fingerprint, fault
            LOG.warning("%s", fault, exc_info=not isinstance(error, ValueError | OSError))

    def _describe_fault(self, source: AnswerFile, error: Exception) -> str:
        """Returns a message on why the index of a source can't be made."""
        # An OSError that names none of the source's files is about the index.
        if isinstance(error, OSError) and error.filename not in map(str, source.files):
            return (
                f"{source.title} is not shown, because its index can't be written to {self._cache} ({error}):"
                " free space there or give write permission, and restart the viewer"
            )
        return f"{source.title} can't be read: {error}"

    # Questions

    def columns(self, sources: Sequence[str] = ()) -> dict[str, str]:
        """Returns DuckDB's types of the index's columns, by name.

        They are the columns of the sources with these names, or without names of all sources.
        """
        names = tuple(sources)
        relation, fingerprint = self._make_relation(names), self.fingerprint()
        if relation is None:
            return {}
        if names in self._columns:
            fingerprint_of_columns, columns = self._columns[names]
            if fingerprint_of_columns == fingerprint:  # nothing has changed since the columns were listed
                return columns
        rows = self._new_cursor().execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()
        # `row` and `place` are positions in files, by which nobody filters.
        columns = {name: kind for name, kind, *_ in rows if name not in ("row", "place")}
        self._columns[names] = fingerprint, columns
        return columns

    def ask(self, question: RowQuery) -> RowPage:
        """Returns the page of answers that a question asks for.

        If a source lacks a column that others have, the column is null for its answers. Raises ValueError for
        a column or an operator that doesn't exist, and for a search that takes too long.
        """
        relation = self._make_relation(question.sources)
        if relation is None:
            return RowPage([], 0)
        where, values, order = self._make_clauses(question)
        cursor = self._new_cursor()
        if question.search:
            cursor.register("matching", self._find_matching_rows(question))
            relation = f"(SELECT * FROM {relation} JOIN matching USING (source, row))"
        [(total,)] = cursor.execute(f"SELECT count(*) FROM {relation} WHERE {where}", values).fetchall()
        clauses = (
            f"FROM {relation} WHERE {where} ORDER BY {order}"
            f" LIMIT {question.size} OFFSET {question.rows_before_page}"
        )
        if question.rows_before_page < DEEP_ROWS:
            return RowPage(as_rows(cursor.execute(f"SELECT * {clauses}", values)), total)
        # Sorting many rows with all their columns takes long. So only the keys are sorted, and the columns of
        # this page's rows are read afterwards.
        keys = cursor.execute(f"SELECT source, row {clauses}", values).fetchall()
        return RowPage(self._read_rows_at(keys), total)

    def make_histograms(self, question: RowQuery, columns: Sequence[str]) -> list[Histogram]:
        """Returns histograms of columns, over the rows that the question's filters choose.

        The text that the question searches for is ignored.
        """
        relation, types = self._make_relation(question.sources), self.columns(question.sources)
        chosen = [name for name in columns if name in types]
        if relation is None or not chosen:
            return []
        where, values, _ = self._make_clauses(question)
        cursor = self._new_cursor()
        return histograms_of(lambda sql: cursor.execute(sql, values), f"{relation} WHERE {where}", chosen)

    def page_of(self, question: RowQuery, row: Mapping[str, Any]) -> int:
        """Returns the number of the question's page that has this row of the index; 1 if no page has it.

        The text that the question searches for is ignored.
        """
        relation = self._make_relation(question.sources)
        if relation is None:
            return 1
        where, values, order = self._make_clauses(question)
        numbered = (
            f"SELECT source, row, row_number() OVER (ORDER BY {order}) AS number"
            f" FROM {relation} WHERE {where}"
        )
        sql = f"SELECT number FROM ({numbered}) WHERE source = ? AND row = ?"
        result = self._new_cursor().execute(sql, [*values, row["source"], row["row"]]).fetchone()
        return 1 + (result[0] - 1) // question.size if result else 1

    def _make_clauses(self, question: RowQuery) -> tuple[str, list[Any], str]:
        """Returns the SQL after WHERE, the values of its `?`, and the SQL after ORDER BY.

        The SQL leaves out the text search (`question.search`), which `ask` adds as a join.
        """
        all_types, chosen_types = self.columns(), self.columns(question.sources)
        where, values = condition_sql(question.filters, all_types, chosen_types)
        order = order_sql(question, all_types, chosen_types, DEFAULT_ORDER)
        return f"{where} AND {among_sql(question.among)}", values, order

    def sql(self, text: str, values: Sequence[Any] = (), sources: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Returns the rows of a query on the table `answers`, for pages that count or sum up answers.

        Args:
            text: The query in SQL.
            values: The values of the query's `?`.
            sources: The names of the sources that the table has; empty for all.
        """
        relation = self._make_relation(tuple(sources))
        if relation is None:
            return []
        query = f"WITH answers AS (SELECT * FROM {relation}) {text}"
        return as_rows(self._new_cursor().execute(query, list(values)))

    def _find_matching_rows(self, question: RowQuery) -> pa.Table:
        """Returns a table with `source` and `row` of all answers whose text contains the searched text.

        The last few results are kept, so that the same search with another page or other filters doesn't read
        the texts again. Raises ValueError for a search that takes too long.
        """
        import duckdb

        key = self.fingerprint(), question.sources, question.search
        with self._query_lock:
            if key in self._searches:
                self._searches.move_to_end(key)
                return self._searches[key]
        files = ", ".join(
            quote_text(str(item.folder / TEXTS_FILE)) for item in self._sources_with_index(question.sources)
        )
        query = f"SELECT source, row FROM read_parquet([{files}]) WHERE contains(lower(text), lower(?))"
        # The stored texts were made writable, too, so a lone surrogate (half a character) is U+FFFD in both.
        searched_text = make_writable(question.search)
        cursor = self._new_cursor()
        deadline = threading.Timer(LONGEST_SEARCH_S, cursor.interrupt)
        deadline.start()
        try:
            matching = cursor.sql(query, params=[searched_text]).to_arrow_table()
        except duckdb.InterruptException as error:
            raise ValueError(
                f"the search for {question.search!r} took longer than {LONGEST_SEARCH_S:.0f} s: choose one"
                " iteration or evaluation to search in"
            ) from error
        finally:
            deadline.cancel()
        with self._query_lock:
            self._searches[key] = matching
            while len(self._searches) > KEPT_SEARCHES:
                self._searches.popitem(last=False)
        return matching

    def _read_rows_at(self, keys: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        """Returns the rows of the index with these keys (source, number of the row), in the order of the
        keys."""
        from pyarrow import parquet

        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for item in self._sources_with_index({source for source, _ in keys}):
            numbers = sorted(row for source, row in keys if source == item.source.name)
            # Only the row groups that have at least one of these rows are read.
            with parquet.ParquetFile(item.folder / ROWS_FILE) as file:
                for group in range(file.num_row_groups):
                    start = group * ROWS_IN_GROUP
                    in_group = [row - start for row in numbers if start <= row < start + ROWS_IN_GROUP]
                    if in_group:
                        table = file.read_row_group(group, use_threads=False).take(in_group)
                        for row in table.to_pylist():
                            rows[row["source"], row["row"]] = row
        return [rows[key] for key in keys]

    # Texts and whole answers

    def texts(self, places: Sequence[tuple[str, int]]) -> list[str]:
        """Returns the whole texts of answers, in the order of `places`.

        A place is (name of the source, `place`), where `place` is a column of the index: the answer's
        position in the source's file.
        """
        source_names = {name for name, _ in places}
        indexed = {item.source.name: item for item in self._sources_with_index(source_names)}
        texts: dict[tuple[str, int], str] = {}
        # The places by (source, batch), so that each batch is read only once.
        places_of_batches: dict[tuple[str, int], list[int]] = {}
        for name, place in places:
            layout = _layout_of_texts(indexed[name])
            if layout is None:  # the file is not an Arrow file, but an evaluation's or another program's
                texts[name, place] = _read_line(indexed[name].source, place).get("text") or ""
            else:
                places_of_batches.setdefault((name, layout.batch_of(place)), []).append(place)
        for (name, number), places_of_batch in places_of_batches.items():
            layout = _layout_of_texts(indexed[name])
            assert layout is not None
            column = read_batch(indexed[name].source.path, layout, number, ["text"])["text"]
            first_place = layout.rows[number]  # the place of the batch's first row
            for place in places_of_batch:
                texts[name, place] = column[place - first_place].as_py() or ""
        return [texts[name, place] for name, place in places]

    def answer(self, source: str, answer: str) -> StoredAnswer:
        """Returns the answer with the name `answer` (``problem#sample``) of a source.

        Raises NotThere if there is none, and ValueError if its file has been written again meanwhile.
        """
        rows = self.ask(
            RowQuery(sources=(source,), filters=(ColumnFilter("answer", "=", answer),), size=1)
        ).rows
        if not rows:
            raise NotThere(f"there is no answer {answer!r} in {source} of {self.run.name}")
        return self.read_whole_answer(rows[0])

    def read_whole_answer(self, row: Mapping[str, Any]) -> StoredAnswer:
        """Returns the whole answer of a row of the index.

        Raises ValueError if its file has been written again since the index was made.
        """
        [indexed] = self._sources_with_index({row["source"]})
        source, about_index = indexed.source, indexed.about
        assert about_index is not None
        if source.kind == "evaluation":
            return StoredAnswer(row, source, line=_read_line(source, row["place"]))
        # The layouts of the source's Arrow files, each of which is None if the source lacks the file.
        answers_layout = about_index.answers
        episodes_layout = about_index.episodes
        signals_layout = about_index.signals
        trajectory, episodes, signals = None, list[Any](), list[Any]()
        if answers_layout is not None:
            from treetune.rollouts.rows import trajectories_of

            [trajectory] = trajectories_of(_read_row(source.path, answers_layout, row["place"]))
            if trajectory.id != row["answer"]:
                raise ValueError(f"{source.path} was rewritten just now: reload the page")
        if episodes_layout is not None and source.episodes is not None:
            from treetune.rollouts.rows import episodes_of
            from treetune.rollouts.storage import signals_of

            if answers_layout is None:  # demonstrations: the episode is the answer
                first = last = row["place"]
            else:  # an answer that wasn't trained on has no episodes
                first, last = row.get("episode_place"), row.get("episode_last")
            places = range(first, last + 1) if first is not None and last is not None else ()
            for place in places:
                [episode] = episodes_of(_read_row(source.episodes, episodes_layout, place))
                # Episodes of other answers may be between the first and the last one.
                if episode.trajectory == row["answer"]:
                    episodes.append(episode)
                    if signals_layout is not None and source.signals is not None:
                        signals += signals_of(_read_row(source.signals, signals_layout, place))
        return StoredAnswer(row, source, trajectory, episodes, signals=signals)

    def group(self, source: str, problem: str) -> list[Episode]:
        """Returns the training rows of all answers to a problem, in the source's order."""
        from treetune.rollouts.rows import episodes_of

        [indexed] = self._sources_with_index({source})
        about_index, path = indexed.about, indexed.source.episodes
        if about_index is None or about_index.episodes is None or path is None:
            return []
        layout = about_index.episodes  # the positions of the batches in the file of training rows
        has_only_training_rows = about_index.answers is None  # as demonstrations have
        # The column of the index that has the place of an answer's first training row.
        column = "place" if has_only_training_rows else "episode_place"
        where = f"problem = ? AND {column} IS NOT NULL"
        rows = self.sql(
            f"SELECT {column} AS place FROM answers WHERE {where} ORDER BY row", [problem], [source]
        )
        places_of_batches: dict[int, list[int]] = {}
        for row in rows:
            places_of_batches.setdefault(layout.batch_of(row["place"]), []).append(row["place"])
        episodes = list[Any]()
        for number, places in places_of_batches.items():
            batch, first_place = read_batch(path, layout, number), layout.rows[number]
            episodes += episodes_of(batch.take([place - first_place for place in places]))
        return episodes

    # DuckDB

    def _sources_with_index(self, names: Sequence[str] | set[str]) -> list[Indexed]:
        """Returns the sources with these names that have an index, or without names all that have one."""
        indexed = [item for item in self.list_indexed_sources() if item.about is not None]
        return [item for item in indexed if not names or item.source.name in names]

    def _make_relation(self, names: Sequence[str]) -> str | None:
        """Returns SQL after FROM for the rows of the sources with these names, or without names of all.

        Returns None if there are no rows.
        """
        chosen = [
            item for item in self._sources_with_index(names) if item.about is not None and item.about.rows
        ]
        if not chosen:
            return None
        files = ", ".join(quote_text(str(item.folder / ROWS_FILE)) for item in chosen)
        return f"read_parquet([{files}], union_by_name=true)"

    def _new_cursor(self) -> duckdb.DuckDBPyConnection:
        """Returns a new cursor of the connection, which is made at the first call."""
        with self._query_lock:
            if self._connection is None:
                self._connection = open_database()
                self._connection.execute("SET parquet_metadata_cache = true")
        return self._connection.cursor()


def _layout_of_texts(indexed: Indexed) -> StreamLayout | None:
    """Returns the layout of the Arrow file that has the texts of a source; None if it isn't an Arrow file."""
    return indexed.about.answers or indexed.about.episodes if indexed.about else None


def _read_row(path: Path, layout: StreamLayout, place: int) -> pa.RecordBatch:
    """Returns a batch with a single row of an Arrow file.

    The row is copied (`take`), because functions that read a batch's raw buffers would ignore that it is a
    slice of a larger batch.
    """
    number = layout.batch_of(place)
    first_place = layout.rows[number]  # the place of the batch's first row
    return read_batch(path, layout, number).take([place - first_place])


def _read_line(source: AnswerFile, place: int) -> Mapping[str, Any]:
    """Returns the line of an evaluation, or of another program's file, that begins at the byte `place`."""
    if source.is_foreign:
        return answer_at(source.path, place)
    verify_answers(source.path)  # raises Damaged if the file has changed since its summary was written
    with source.path.open("rb") as file:
        file.seek(place)
        return json.loads(file.readline())
