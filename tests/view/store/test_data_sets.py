"""Data sets in the viewer: which are listed, and the pages and histograms of their rows.

Promises that these tests hold:

* Only data sets that lie below a given folder or that an experiment or the user names are read.
* Rows of every format are shown whole; damaged ones are counted, and damaged files explained.
* Filters, search, sorting and pages give exactly the right rows; histograms count each number once.
* An estimate of difficulty is shown the same before and after its shards are joined.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.view.prepared import HOSTILE, ROWS, SAMPLES, rows, save, write_data_sets, write_estimate
from tests.view.recorded import begin_run
from treetune.exceptions import NotThere
from treetune.view.store import Store
from treetune.view.store.queries import ColumnFilter, RowQuery
from treetune.view.store.readers import DataSet, answers_to
from treetune.view.store.tables import ROW_NUMBER, DataSetTable, Histogram, bin_step


def table_of(path: Path, kind: Any) -> DataSetTable:
    return DataSetTable(DataSet(path.name, path, kind, "for a test"))


def test_only_data_sets_that_were_named_or_lie_below_a_folder_are_listed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    write_data_sets(elsewhere)
    save(elsewhere / "saved")
    folder = tmp_path / "experiments"
    write_data_sets(folder / "data")
    shutil.copytree(elsewhere / "saved", folder / "data" / "saved")
    write_estimate(folder / "weak")
    (folder / "data" / "settings.json").write_text("{}")
    begin_run(folder / "run", task={"type": "rows", "train": [str(elsewhere / "trips.jsonl"), "gone.jsonl"]})
    source = {"type": "disk", "path": str(elsewhere / "saved")}
    begin_run(folder / "deep", task={"domains": {"a": {"task": {"source": source}}}})

    store = Store([folder], tmp_path / "cache", 0.0, [elsewhere / "sums.parquet"])
    kinds = {data_set.name: data_set.kind for data_set in store.data.all()}

    assert kinds == {
        str(elsewhere / "sums.parquet"): "parquet",
        "data/saved/test": "saved",
        "data/saved/train": "saved",
        "data/sums.parquet": "parquet",
        "data/trips.jsonl": "lines",
        "weak": "estimate",
        str(elsewhere / "saved/test"): "saved",
        str(elsewhere / "saved/train"): "saved",
        str(elsewhere / "trips.jsonl"): "lines",
    }
    for name in (str(elsewhere / "sums2.parquet"), "data/../data/sums.parquet", "/etc/passwd", ""):
        with pytest.raises(NotThere, match="there is no data set"):
            store.data.find_data_set(name)
    begin_run(folder / "later")
    (elsewhere / "trips.jsonl").unlink()
    assert str(elsewhere / "trips.jsonl") not in {data_set.name for data_set in store.data.all()}


@pytest.mark.parametrize(
    ("name", "message"),
    [("notes.txt", "is not a data set: give"), ("gone.parquet", "there is no file")],
)
def test_a_file_that_holds_no_rows_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=message):
        Store([], tmp_path / "cache", files=[tmp_path / name])


def test_a_split_of_a_saved_data_set_that_lies_elsewhere_is_not_read(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "saved")
    saved = tmp_path / "data" / "saved"
    saved.mkdir(parents=True)
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["../../elsewhere/saved/train", ".."]}))
    assert Store([tmp_path / "data"], tmp_path / "cache").data.all() == []

    state = tmp_path / "elsewhere" / "saved" / "train" / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "../test/data-00000-of-00001.arrow"}]}))
    with pytest.raises(ValueError, match="names files elsewhere"):
        table_of(state.parent, "saved")


def test_rows_of_every_kind_have_columns_and_are_shown_whole(tmp_path: Path) -> None:
    write_data_sets(tmp_path)
    sums = table_of(tmp_path / "sums.parquet", "parquet")
    assert sums.total == ROWS
    assert sums.kinds["prompt"] == "VARCHAR" and sums.kinds["extra_info.words"] == "BIGINT"
    [first] = sums.ask(RowQuery(size=1), ["prompt", "prompt.characters"]).rows
    assert first["prompt.characters"] == len(HOSTILE) and HOSTILE.startswith(first["prompt"][:100])
    assert sums.row(5) == rows()[5] and sums.row(0)["extra_info"]["note"] == HOSTILE

    trips = table_of(tmp_path / "trips.jsonl", "lines")
    assert trips.total == 8 and trips.note.startswith("2 lines can't be read as JSON objects")
    assert [row["odd"] for row in trips.ask(RowQuery(size=3), ["odd"]).rows] == ["even", "1", "even"]
    assert trips.row(5) == {"question": "trip 5", "answer": 15, "odd": 5}
    assert trips.row(6) == {"question": "half \ud800"}
    assert trips.row(7) == {"unreadable line": '{"question": "torn'}

    saved = table_of(save(tmp_path / "saved") / "train", "saved")
    assert saved.row(3) == {"q": "question 3", "a": 1.5, "tags": ["x"]}
    with pytest.raises(NotThere, match="it has rows 0 to 4"):
        saved.row(5)


@pytest.mark.parametrize(
    ("name", "kind", "text", "message"),
    [
        ("x.parquet", "parquet", "nothing", "x.parquet can't be read"),
        ("x.jsonl", "lines", "[1]\n[1, 2]\n", "x.jsonl has no row: none of its lines is a JSON object"),
    ],
)
def test_a_damaged_file_is_explained(tmp_path: Path, name: str, kind: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        table_of(tmp_path / name, kind)


def test_columns_whose_names_collide_and_columns_of_odd_types_are_kept_apart(tmp_path: Path) -> None:
    folder = tmp_path / "domain=math" / "[1]*"
    folder.mkdir(parents=True)
    row = {"a.b": ["own"], "a": [{"b": 1, "c": {"d": True}}], "blob": [b"\xff"], 'q"uote': [1.5]}
    parquet.write_table(pa.table(row | {"nothing": pa.nulls(1)}), folder / "x.parquet")

    table = table_of(folder / "x.parquet", "parquet")

    assert table.names() == ["a.b", "a", "blob", 'q"uote', "nothing"]
    [row] = table.ask(RowQuery(filters=(ColumnFilter('q"uote', ">", 1.0),)), ["a.b", "a.c.d", 'q"uote']).rows
    assert row == {ROW_NUMBER: 0, "a.b": "own", "a.c.d": True, 'q"uote': 1.5}


RECORDS = [
    {"x": x, "word": word}
    for x, word in zip(
        [None, -1.0, 0.25, math.nan, 2.0, math.inf, 0.25, None, -math.inf, 2.0, 0.0, 1.0] * 2,
        ["a", None, "Ab", "é", "%", "_", "'", "", "aA", "bé", "b"] * 3,
        strict=False,
    )
]
TEXTS = st.text("aAbé%_'", max_size=2)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> DataSetTable:
    path = tmp_path_factory.mktemp("records") / "x.parquet"
    parquet.write_table(pa.Table.from_pylist(RECORDS), path)
    return table_of(path, "parquet")


@settings(max_examples=20, deadline=None, database=None)
@given(
    least=st.none() | st.sampled_from([-1.0, 0.25, 2.0]),
    search=TEXTS,
    sort=st.sampled_from(["", "x"]),
    descending=st.booleans(),
    size=st.integers(5, 30),
)
def test_pages_are_what_filtering_sorting_and_cutting_give(
    records: DataSetTable, least: float | None, search: str, sort: str, descending: bool, size: int
) -> None:
    filters = () if least is None else (ColumnFilter("x", ">=", least),)
    shown: list[int] = []
    for number in range(1, len(RECORDS)):
        page = records.ask(RowQuery((), filters, search, sort, descending, number, size), ["x"])
        shown += [row[ROW_NUMBER] for row in page.rows]
        if len(page.rows) < size:
            break

    def matches(x: float | None, word: str | None) -> bool:
        # In DuckDB, NaN is above all numbers.
        above = least is None or (x is not None and (math.isnan(x) or x >= least))
        return above and (not search or (word is not None and search.lower() in word.lower()))

    def sort_key(number: int) -> tuple[bool, float, float, int]:
        """Sorts rows without a number last, and equal rows in the order of the file."""
        x = RECORDS[number]["x"]
        sign = -1 if descending else 1
        is_number = x is not None and not math.isnan(x)
        return x is None, sign * (x is not None and not is_number), sign * x if is_number else 0.0, number

    matching = [number for number, record in enumerate(RECORDS) if matches(record["x"], record["word"])]
    assert shown == (sorted(matching, key=sort_key) if sort else matching)
    assert page.total == len(matching)


def histogram(table: DataSetTable, column: str, *filters: ColumnFilter) -> Histogram | None:
    return next(iter(table.make_histograms([column], filters, "")), None)


def test_histograms_count_every_number_once_and_have_round_bounds(tmp_path: Path) -> None:
    write_data_sets(tmp_path)
    sums = table_of(tmp_path / "sums.parquet", "parquet")
    rates = histogram(sums, "pass_rate")
    assert rates.counted == ROWS
    counts = {bar.low: bar.count for bar in rates.bars if bar.count}
    assert counts == {0.0: 5, 0.25: 5, 0.5: 5, 0.75: 5, 1.0: 4}
    assert rates.bars[3].low == 0.15  # and not 0.15000000000000002
    few = histogram(sums, "pass_rate", ColumnFilter("pass_rate", ">", 0.5))
    assert few.counted == 9
    assert histogram(sums, "pass_rate", ColumnFilter("pass_rate", ">", 2.0)) is None
    with pytest.raises(ValueError, match="is not a column of numbers: there are"):
        histogram(sums, "prompt")

    odd = pa.table({"x": [-1e308, 1e308, math.inf, math.nan, None], "same": [1e-12] * 5})
    parquet.write_table(odd, tmp_path / "odd.parquet")
    table = table_of(tmp_path / "odd.parquet", "parquet")
    wide, same = histogram(table, "x"), histogram(table, "same")
    assert (sum(bar.count for bar in wide.bars), wide.missing) == (2, 3)
    assert [bar.count for bar in same.bars] == [5]
    assert bin_step(0, 1000, whole=True) == 50 and bin_step(3, 3, whole=True) == 1


def test_an_estimate_is_the_same_before_and_after_its_shards_are_joined(tmp_path: Path) -> None:
    done = table_of(write_estimate(tmp_path / "done"), "estimate")
    unfinished_folder = write_estimate(tmp_path / "going", finished=False)
    with (unfinished_folder / "shards" / "0001" / "grades.jsonl").open("a") as file:
        second_grade = {
            "row": ROWS - 1,
            "sample": 0,
            "reward": 1.0,
            "correct": True,
            "outcome": "ok",
            "tokens": 7,
        }
        # One answer is graded twice, and a kill has cut off the last line.
        file.write(json.dumps(second_grade) + '\n{"row": 1')
    unfinished = table_of(unfinished_folder, "estimate")

    columns = ["correct", "answers", "pass_rate"]
    assert unfinished.note and not done.note
    assert unfinished.ask(RowQuery(size=50), columns).rows == done.ask(RowQuery(size=50), columns).rows
    assert done.row(7)["prompt"] == rows()[7]["prompt"]
    answers = answers_to(tmp_path / "done", ROWS - 1)
    right = round(rows()[-1]["pass_rate"] * SAMPLES)
    assert [answer["sample"] for answer in answers] == list(range(SAMPLES))
    assert [answer["correct"] for answer in answers] == [sample < right for sample in range(SAMPLES)]
    assert answers[0]["text"].startswith("answer 0") and answers[0]["extracted"] == HOSTILE
    with pytest.raises(NotThere, match="no rate of row 99"):
        unfinished.row(99)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no answer is graded yet"):
        table_of(tmp_path / "empty", "estimate")
