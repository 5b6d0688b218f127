"""A number, a line or a name that nobody expected leaves every page as it is, and is told."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from tests.viewer.recorded import recorded_run
from treetune.store.journal import sealed_line
from treetune_view.store import Store

PAGES = ("/", "/run?run=x", "/run?run=x&run=y", "/timeline?run=x", "/timeline/trace?run=x", "/answers?run=x",
         "/compare?run=x&run=y", "/configuration?run=x", "/notes", "/problem?run=x&problem=train/0",
         "/answer?run=x&source=i1&answer=train/0%230", "/data")  # fmt: skip


def refused(client: TestClient, pages: Sequence[str] = PAGES) -> list[tuple[str, str]]:
    """Pages that don't open."""
    answers = {page: client.get(page) for page in pages}
    return [(page, answer.text) for page, answer in answers.items() if answer.status_code != 200]


@pytest.mark.parametrize("name", ["train/loss", "seconds/total", "wall_time", "iteration"])
def test_a_whole_number_of_400_digits_is_left_out_and_told(
    client: TestClient, store: Store, name: str
) -> None:
    run = recorded_run(store.folders[0] / "x", iterations=2)
    recorded_run(store.folders[0] / "y", iterations=2)
    run.append_metrics(run.read_metrics()[-1] | {"iteration": 2, name: 10**399})

    assert not refused(client)
    told = client.get("/run?run=x").text
    assert f"{name} of a line of " in told and "is a whole number of 400 digits, and is left out" in told
    assert "not here (yet)" in told


READ_ALL_THE_SAME = {
    "nested": b'{"n": ' + b"[" * 300 + b"]" * 300 + b"}",
    "a nameless field": b'{"": 3}',
    "half a character": b'{"n": 3, "text": "\\ud800"}',
}
BAD = READ_ALL_THE_SAME | {
    "a list": b"[1, 2]",
    "a number": b"12",
    "a word": b'"x"',
    "torn": b'{"n": 3, "te',
    "no text": b'{"n": 3, "text": "\xff\xfe"}',
    "zeros": b"\0\0\0",
    "two on a line": b'{"n": 3} {"n": 4}',
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 3, 6])
def test_one_bad_line_is_an_empty_row_of_a_data_set_and_told(
    client: TestClient, store: Store, bad: str, place: int
) -> None:
    lines = [json.dumps({"n": i, "text": f"text {i}", "deep": {"a": [[i]]}}).encode() for i in range(6)]
    lines.insert(place, BAD[bad])
    (store.folders[0] / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")

    rows = [f"/row?data=rows.jsonl&row={number}" for number in range(7)]
    assert not refused(client, ["/data", "/histograms?data=rows.jsonl&histogram=n", *rows])
    assert bad in READ_ALL_THE_SAME or "unreadable line" in client.get(rows[place]).text
    page = client.get("/rows?data=rows.jsonl&sort=n").text
    assert f"stand here as empty rows: {place}." in page
    assert all(f"text {i}" in page for i in range(6))
    assert "text 4" in client.get("/rows?data=rows.jsonl&where=n%20%3E%203").text


def test_a_name_that_is_no_text_is_shown_with_a_sign_for_what_is_none(
    client: TestClient, store: Store
) -> None:
    folder = os.fsencode(store.folders[0])
    recorded_run(store.folders[0] / "x", iterations=1)
    os.rename(folder + b"/x", folder + b"/x\xff")
    Path(os.fsdecode(folder + b"/rows\xff.jsonl")).write_text('{"n": 1}\n')

    name = "x%EF%BF%BD"
    pages = ["/", "/data", "/notes", f"/run?run={name}", f"/answers?run={name}", f"/timeline?run={name}"]
    assert not refused(client, [*pages, f"/answer?run={name}&source=i1&answer=train/0%230"])
    assert client.get("/rows", params={"data": "rows\ufffd.jsonl"}).status_code == 400


def test_half_a_character_in_a_timelines_names_and_times_beyond_all_calendars(
    client: TestClient, store: Store
) -> None:
    run = recorded_run(store.folders[0] / "x", iterations=1)
    rows: list[dict[str, object]] = [
        {"process": 11, "host": "here\ud800", "at": 1e9},
        {"begin": 1, "lane": "phases", "name": "gene\ud800", "at": 1e9, "why\udc00": "so\udfff"},
        {"end": 1, "at": 1e9 + 5},
        {"begin": 2, "lane": "la\ud800ne", "name": "sync", "at": 1e9 + 1},
        *({"begin": 3 + n, "lane": "phases", "name": "sync", "at": at}
          for n, at in enumerate((10**400, 1e300, -1.0, float("nan"), "soon"))),
    ]  # fmt: skip
    text = "".join(sealed_line(json.dumps(row)) for row in rows)
    (run.logs / "run.timeline.jsonl").write_text(text)
    Path(os.fsdecode(os.fsencode(run.logs) + b"/en\xffgine.timeline.jsonl")).write_text(text)

    lanes = [
        f"/timeline?run=x&lane={quote(lane)}" for lane in ("run: la⟨U+D800⟩ne", "en⟨U+DCFF⟩gine: phases")
    ]
    assert not refused(client, ["/timeline?run=x", "/timeline/trace?run=x", *lanes])
    page = client.get("/timeline?run=x").text
    assert "gene⟨U+D800⟩" in page and "so⟨U+DFFF⟩" in page
    assert "run.timeline.jsonl, line 5, 6, 7, …" in page
