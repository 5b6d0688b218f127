"""Notes on answers.

Promises that these tests hold:

* A note is saved beside the run, shown, listed, filtered and exported.
* It stays with the text on which it was written, and is never shown on another answer.
* Writers at the same time lose nothing; only the viewer's own page can write, and only what a note may be.
* A damaged note is named, and hides no other.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from httpx import Response
from starlette.testclient import TestClient

from tests.view.conftest import FIRST, TOKEN, Viewer, fingerprint_of
from tests.view.recorded import answers, begin_run, record_iteration
from treetune.exceptions import Damaged, NoteChanged
from treetune.main import main
from treetune.runtime.directory import ExperimentDirectory
from treetune.view.app import MOST_SENT_BYTES, SEEN_FINGERPRINT_HEADER, make_application
from treetune.view.notes import NotedAnswer, check_labels, new_note, read_notes, save_note, system_user
from treetune.view.store import Store

ORIGIN = {"origin": "http://127.0.0.1"}
WHERE = {"run": "run", **FIRST}
HOSTILE = "</textarea><script>window.ran = 1</script>\u202e\nsecond line"


class Desk(Viewer):
    """A client that writes notes on the first answer of a run."""

    def form(self, where: Mapping[str, str] = WHERE, **fields: object) -> dict[str, object]:
        """Fills in the form of the page, whose hidden fields name the answer and the earlier note."""
        return {**hidden_fields(self.page("/answer", **where)), "note": "", **fields}

    def post(self, fields: Mapping[str, Any], where: Mapping[str, str] = WHERE, **headers: str) -> Response:
        return self.client.post("/answer", params=where, data=fields, headers=headers or ORIGIN)

    def write(self, where: Mapping[str, str] = WHERE, **fields: object) -> Response:
        """Reads the page, fills in its form, sends it and follows the answer, as a browser does."""
        return self.post(self.form(where, **fields), where)


def hidden_fields(page: str) -> dict[str, str]:
    return {name: page.split(f'name="{name}" value="')[1].split('"')[0] for name in ("seen", "about")}


@pytest.fixture
def desk(store: Store, client: TestClient) -> Desk:
    return Desk(store, client)


def texts(run: ExperimentDirectory) -> list[str]:
    return [note.text for note in read_notes(run.notes_folder)]


def test_a_note_lies_beside_the_run_and_is_shown_listed_filtered_and_exported(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = desk.record()
    fingerprint = fingerprint_of(desk.page("/answer", **WHERE))
    response = desk.write(label=["wrong step"], labels="lucky, wrong step", note=HOSTILE)
    assert response.status_code == 200 and response.url.path == "/answer"
    assert "<script>window" not in response.text and "⟨RLO⟩" in response.text
    assert desk.get("/answer", {SEEN_FINGERPRINT_HEADER: fingerprint}, **WHERE).status_code == 200, (
        "the page is sent anew"
    )
    [note] = read_notes(run.notes_folder)
    assert (note.labels, note.text, note.author) == (("wrong step", "lucky"), HOSTILE, system_user())
    assert (note.about.source, note.about.problem, note.about.sample) == ("i1", "train/0", 0)
    listed = desk.page("/answers?run=run&label=lucky")
    assert "<b>1</b> answer<" in listed and "✎ note" in listed and 'class="label">lucky' in listed
    assert "No answer matches" in desk.page("/answers?run=run&label=x")
    both = {"run": "run", "label": ",", "of": "everything", "search": "0+1=1\n1+2=3"}
    assert "<b>1</b> answer<" in desk.page("/answers", **both)
    for query in ({}, {"run": "run"}, {"label": "lucky", "search": "SECOND line"}):
        page = desk.page("/notes", **query)
        assert "<b>1</b> note " in page and 'href="/answer?run=run' in page
    assert "No note matches" in desk.page("/notes?label=none")

    [row] = parquet.read_table(io.BytesIO(desk.get("/notes/data?format=parquet").content)).to_pylist()
    assert row["labels"] == ["wrong step", "lucky"] and row["note"] == HOSTILE
    assert row["answer"].startswith("0+1=1\n") and row["score"] == 1.0
    assert row["advantage"] == note.about.advantage is not None
    output = tmp_path / "notes.jsonl"
    assert main(["export_notes", str(run.path), "--output", str(output)]) == 0
    [line] = map(json.loads, output.read_text().splitlines())
    assert {**line, "time": 0, "experiment": 0} == {**row, "time": 0, "experiment": 0}
    assert output.read_bytes() == desk.get("/notes/data?format=jsonl").content
    assert "1 note: " in capsys.readouterr().out

    desk.write()
    assert read_notes(run.notes_folder) == [] and "There are no notes yet" in desk.page("/notes")


def test_a_note_stays_with_its_text_when_the_iteration_is_sampled_again(desk: Desk) -> None:
    run = begin_run(desk.folder / "run")
    record_iteration(run, 0)
    form_of_first_text = desk.form(note="about the first")
    desk.write(note="about the first")
    record_iteration(run, 0, [replace(answers(0)[0], text="another"), *answers(0)[1:]])
    assert "about the first" not in desk.page("/answer", **WHERE)
    assert "✎" not in desk.page("/answers?run=run")
    assert "was deleted, or is still being read" in desk.page("/notes")
    refused = desk.post(form_of_first_text)
    assert refused.status_code == 409 and "the answer was sampled again" in refused.text
    assert len(read_notes(run.notes_folder)) == 1
    record_iteration(run, 0)
    assert "about the first" in desk.page("/answer", **WHERE), "the answer has its first text again"


def test_a_form_older_than_the_stored_note_is_refused_and_keeps_its_text(desk: Desk) -> None:
    run = desk.record()
    form_of_second_window = desk.form(note="from the second window")
    desk.write(note="from the first window")
    refused = desk.post(form_of_second_window)
    assert refused.status_code == 409 and "changed in another window" in refused.text
    assert "from the first window" in refused.text and "from the second window</textarea>" in refused.text
    assert texts(run) == ["from the first window"]
    assert desk.post({**form_of_second_window, **hidden_fields(refused.text)}).status_code == 200
    assert texts(run) == ["from the second window"]


def test_notes_that_are_written_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    about = NotedAnswer("i1", "train/0#0", "train/0", 0, "prompt", "text \ud800")

    def write(number: int) -> bool:
        """Saves a note of an author of its own, and one of the same author as all eight threads."""
        save_note(run, replace(new_note(about, ["x"], f"{number}"), author=f"DOMAIN\\../{number}"), "")
        try:
            save_note(run, new_note(about, [], f"{number}"), "")
        except NoteChanged:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        saved = list(threads.map(write, range(8)))

    notes = read_notes(run.notes_folder)
    assert {note.text for note in notes if note.labels} == set("01234567")
    assert saved.count(True) == 1 and len(notes) == 9
    assert all(path.parent == run.notes_folder for path in run.notes_folder.rglob("*"))


def test_other_authors_notes_are_shown_and_kept(desk: Desk) -> None:
    run = desk.record()
    desk.write(labels="mine")
    [my_note] = read_notes(run.notes_folder)
    save_note(run, replace(my_note, author="somebody", labels=("theirs",)), "")
    page = desk.write(labels="mine too").text
    assert "<b>somebody</b>" in page and 'value="theirs"' in page, "suggested too"
    assert sorted(note.labels for note in read_notes(run.notes_folder)) == [("mine too",), ("theirs",)]


def test_only_the_page_itself_can_write_and_only_notes(desk: Desk) -> None:
    run = desk.record()
    fields = desk.form(note="x")
    for origin in ("null", "http://127.0.0.1:8000"):
        assert desk.post(fields, origin=origin).status_code == 403
    assert desk.client.post("/answer", params=WHERE, data=fields).status_code == 403
    stranger = Desk(desk.store, TestClient(desk.client.app, base_url="http://127.0.0.1"))
    assert stranger.post(fields).status_code == 403
    assert desk.client.post("/answers", params=WHERE, data=fields, headers=ORIGIN).status_code == 405
    assert desk.post({**fields, "note": "x" * MOST_SENT_BYTES}).status_code == 413
    assert not run.notes_folder.exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": "x" * 41}, "at most 40 characters"),
        ({"labels": "a\nb"}, "is one line"),
        ({"labels": ",".join(map(str, range(21)))}, "at most 20 labels"),
        ({"note": "x" * 20_001}, "at most 20,000 characters"),
    ],
)
def test_too_long_notes_and_labels_are_refused_with_the_limit(
    desk: Desk, fields: dict[str, str], message: str
) -> None:
    run = desk.record()
    refused = desk.write(**fields)
    assert refused.status_code == 409 and message in refused.text
    assert not run.notes_folder.exists()


def test_a_viewer_that_cannot_write_says_so(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run = desk.record()
    store = Store(desk.store.folders, desk.store.cache, 0.0, read_only=True)
    reading = Desk(store, TestClient(make_application(store, TOKEN), base_url="http://127.0.0.1"))
    page = reading.page("/answer", **WHERE, token=TOKEN)
    assert "started with --read-only" in page and "<textarea" not in page
    refused = reading.post({"note": "x"})
    assert refused.status_code == 409
    assert "Not saved" in refused.text and "x</textarea>" in refused.text
    monkeypatch.setattr("os.access", lambda *_: False)
    page = desk.page("/answer", **WHERE)
    assert f"{system_user()} has no permission to write into {run.path}" in page and "<textarea" not in page


def test_a_damaged_note_is_named_and_hides_no_other(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    run = desk.record()
    for answer in ("train/0#0", "train/1#0"):
        desk.write({**WHERE, "answer": answer}, note=f"on {answer}")
    damaged, _ = sorted(run.notes_folder.glob("*.json"))
    damaged.write_text(damaged.read_text().replace("on train", "at train"))
    page = desk.page("/notes")
    assert "<b>1</b> note " in page and f"{damaged} is damaged" in page
    with pytest.raises(Damaged, match="checksum"):
        read_notes(run.notes_folder)
    output = desk.folder / "x.parquet"
    assert main(["export_notes", str(run.path), "--output", str(output)]) == 2
    assert "is damaged" in capsys.readouterr().err and not output.exists()


def test_labels_are_split_at_commas_and_kept_once() -> None:
    assert check_labels([" a , b", "b", "", "c d"]) == ("a", "b", "c d")
