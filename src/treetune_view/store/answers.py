"""Answers of an experiment by what they are: filtered, sorted, searched, in pages; and one of them whole."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune_view.store.catalogue import NotThere, Run
from treetune_view.store.index import BITS, ROWS, ROWS_IN_GROUP, Indexed, build, read_about
from treetune_view.store.queries import as_rows, connected, literal
from treetune_view.store.questions import Filter, Found, Question, among, condition, order
from treetune_view.store.signatures import SHORTEST, lowered, may_hold
from treetune_view.store.sources import Source, sources
from treetune_view.store.whole_answers import Answer, answer_at, texts_at

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa


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

LOG = logging.getLogger("treetune_view")


class Answers:
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

    def sources(self) -> list[Source]:
        """The files of answers that there are now."""
        return sources(self.run)

    def indexed(self) -> list[Indexed]:
        """All sources, each with its index as far as that is made; the rest is begun."""
        seen, found = self._seen
        if time.monotonic() - seen < self._look_again_s:
            return found
        found = self._look()
        self._seen = (time.monotonic(), found)
        return found

    def _look(self) -> list[Indexed]:
        found = [self._indexed(source) for source in self.sources()]
        missing = [one for one in found if one.is_awaited]
        if not missing:
            return found
        if sum(one.source.size for one in missing) <= AT_ONCE_BYTES:
            self._make(missing)
            return [self._indexed(one.source) for one in found]
        if self._working.acquire(blocking=False):
            threading.Thread(target=self._make_and_release, args=(missing,), daemon=True).start()
        return found

    def problems(self) -> list[str]:
        """What keeps files from being shown, in words."""
        links = list[Path]()
        sources(self.run, links)
        return [
            *(one.fault for one in self.indexed() if one.fault),
            *(f"{path} is not read: it is a symbolic link that leads out of the folder" for path in links),
        ]

    def mark(self) -> str:
        """Another one as soon as there are other answers, or more of them are indexed or can't be."""
        found = self.indexed()
        parts = [(one.source.name, one.source.mark, one.about is not None, one.fault) for one in found]
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()

    def _indexed(self, source: Source) -> Indexed:
        mark = source.mark
        known = self._known.get(source.name)
        if known is not None and known.about is not None and known.about.mark == mark:
            return known
        place = self._cache / source.name
        about = read_about(place)
        failed, fault = self._faults.get(source.name, ("", ""))
        whole = about if about is not None and about.mark == mark else None
        one = Indexed(source, place, whole, fault if whole is None and failed == mark else "")
        self._known[source.name] = one
        return one

    def _make_and_release(self, missing: Sequence[Indexed]) -> None:
        try:
            self._make(missing)
        finally:
            self._working.release()

    def _make(self, missing: Sequence[Indexed]) -> None:
        names = {source.name for source in self.sources()}
        for gone in [place for place in self._cache.glob("[ie]*") if place.name not in names]:
            shutil.rmtree(gone, ignore_errors=True)
        for one in missing:
            with self._building:
                if self._indexed(one.source).about is not None:
                    continue
                mark = one.source.mark
                try:
                    build(one.source, one.place)
                except Exception as error:  # whatever it is, the other files are shown, and this one is named
                    if one.source.mark == mark:  # else it was written anew meanwhile, and is read next time
                        fault = self._fault(one.source, error)
                        self._faults[one.source.name] = mark, fault
                        LOG.warning("%s", fault, exc_info=not isinstance(error, ValueError | OSError))

    def _fault(self, source: Source, error: Exception) -> str:
        """An OSError that names no file of the source is about the index."""
        if isinstance(error, OSError) and error.filename not in map(str, source.files):
            return (
                f"{source.words} is not shown, as its index can't be written to {self._cache} ({error}): make"
                " room there, or let it be written, and start the viewer again"
            )
        return f"{source.words} can't be read: {error}"

    # Questions

    def columns(self, sources: Sequence[str] = ()) -> dict[str, str]:
        """The columns of the index by name, with DuckDB's types: of these sources, or of all."""
        names = tuple(sources)
        relation, mark = self._relation(names), self.mark()
        if relation is None:
            return {}
        if self._columns.get(names, ("",))[0] != mark:
            rows = self._query(f"DESCRIBE SELECT * FROM {relation}").fetchall()
            found = {name: kind for name, kind, *_ in rows if name not in ("row", "place")}
            self._columns[names] = mark, found
        return self._columns[names][1]

    def ask(self, question: Question) -> Found:
        """A column that only other sources have is null in these. Raises ValueError for a column or an
        operator that isn't there."""
        relation = self._relation(question.sources)
        if relation is None:
            return Found([], 0, True)
        known, own = self.columns(), self.columns(question.sources)
        where, values = condition(question.filters, known, own)
        where = f"{where} AND {among(question.among)}"
        by = order(question, known, own)
        if question.search:
            return self._search(question, relation, where, values, by)
        [total] = self._query(f"SELECT count(*) FROM {relation} WHERE {where}", values).fetchone() or (0,)
        skipped = (question.page - 1) * question.size
        rest = f"FROM {relation} WHERE {where} ORDER BY {by} LIMIT {question.size} OFFSET {skipped}"
        if skipped < DEEP:
            return Found(self._rows(f"SELECT * {rest}", values), total, True)
        # What is sorted and passed over has two columns then, and not all.
        return Found(self._rows_at(self._query(f"SELECT source, row {rest}", values).fetchall()), total, True)

    def sql(self, text: str, values: Sequence[Any] = (), sources: Sequence[str] = ()) -> list[dict[str, Any]]:
        """A question in SQL to the table `answers`, for pages that count; values stand for `?`."""
        relation = self._relation(tuple(sources))
        return (
            []
            if relation is None
            else self._rows(f"WITH answers AS (SELECT * FROM {relation}) {text}", values)
        )

    def _search(self, question: Question, relation: str, where: str, values: list[Any], by: str) -> Found:
        """Answers whose signature lets hope, looked into in the order in which they are shown."""
        needed, started = question.page * question.size, time.monotonic()
        connection = self._cursor()
        candidates = self._candidates(question)
        if candidates is not None:
            connection.register("candidates", candidates)
            relation = f"(SELECT * FROM {relation} JOIN candidates USING (source, row))"
        wanted = f"FROM {relation} WHERE {where}"
        # All of a few at once: each further question would join anew.
        fits = candidates is not None and len(candidates) <= MOST_AT_ONCE
        whole = f"SELECT source, row, place {wanted} ORDER BY {by}"
        all_places = connection.execute(whole, values).fetchall() if fits else None
        if all_places is not None:
            total = len(all_places)
        else:
            [total] = connection.execute(f"SELECT count(*) {wanted}", values).fetchone() or (0,)
        kept = list[tuple[str, int]]()
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
                    if needed - question.size < hits <= needed:
                        kept.append((source, row))
            seen += len(places)
            taken = min(LOOKED_INTO, 2 * taken)
        exact = seen >= total
        rows = self._rows_at(kept)
        return Found(rows, hits if exact else max(hits, round(hits / max(1, seen) * total)), exact)

    def _rows_at(self, kept: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        """Rows of the index by source and number."""
        from pyarrow import parquet

        found: dict[tuple[str, int], dict[str, Any]] = {}
        for one in self._chosen({source for source, _ in kept}):
            own = sorted(row for source, row in kept if source == one.source.name)
            with parquet.ParquetFile(one.place / ROWS) as file:
                for group in range(file.num_row_groups):
                    start = group * ROWS_IN_GROUP
                    inside = [row - start for row in own if start <= row < start + ROWS_IN_GROUP]
                    if inside:
                        for row in file.read_row_group(group, use_threads=False).take(inside).to_pylist():
                            found[row["source"], row["row"]] = row
        return [found[key] for key in kept]

    def _candidates(self, question: Question) -> pa.Table | None:
        """Sources and rows in which the text may be; None where most may."""
        import pyarrow as pa

        if len(question.search.encode()) < SHORTEST:
            return None
        names, rows, everything = list[Any](), list[np.ndarray](), 0
        for one in self._chosen(question.sources):
            assert one.about is not None
            own = np.flatnonzero(may_hold(one.place / BITS, one.about.rows, question.search))
            names.append(pa.repeat(one.source.name, len(own)))
            rows.append(own)
            everything += one.about.rows
        found = np.concatenate(rows)
        if 2 * len(found) > everything:
            return None
        return pa.table({"source": pa.concat_arrays(names), "row": found})

    # Texts and whole answers

    def texts(self, places: Sequence[tuple[str, int]]) -> list[str]:
        """The whole texts of answers, by source and place."""
        return texts_at(places, {one.source.name: one for one in self._chosen({name for name, _ in places})})

    def answer(self, source: str, answer: str) -> Answer:
        """The answer `problem#sample` of a source. Raises NotThere."""
        rows = self.ask(Question(sources=(source,), filters=(Filter("answer", "=", answer),), size=1)).rows
        if not rows:
            raise NotThere(f"there is no answer {answer!r} in {source} of {self.run.name}")
        [one], row = self._chosen({source}), rows[0]
        return answer_at(one, row)

    # DuckDB

    def _chosen(self, names: Sequence[str] | set[str]) -> list[Indexed]:
        return [
            one for one in self.indexed() if one.about is not None and (not names or one.source.name in names)
        ]

    def _relation(self, names: Sequence[str]) -> str | None:
        chosen = [one for one in self._chosen(names) if one.about is not None and one.about.rows]
        if not chosen:
            return None
        files = ", ".join(literal(str(one.place / ROWS)) for one in chosen)
        return f"read_parquet([{files}], union_by_name=true)"

    def _query(self, text: str, values: Sequence[Any] = ()) -> duckdb.DuckDBPyConnection:
        return self._cursor().execute(text, list(values))

    def _rows(self, text: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        return as_rows(self._query(text, values))

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            if self._connection is None:
                self._connection = connected()
                self._connection.execute("SET parquet_metadata_cache = true")
        return self._connection.cursor()
