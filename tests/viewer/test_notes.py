"""Notes on answers: saved beside the run, found again, never on another answer, and never lost."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from starlette.responses import Response
from starlette.testclient import TestClient

from tests.viewer.conftest import TOKEN
from tests.viewer.recorded import answers, begin_run, record_iteration, recorded_run
from treetune.main import main
from treetune.store.checksums import Damaged
from treetune_view.app import MOST_SENT_BYTES, SEEN, application
from treetune_view.notes import (
    Changed,
    NotedAnswer,
    checked_labels,
    new_note,
    read_notes,
    save_note,
    system_user,
)
from treetune_view.store import Store

ORIGIN = {"origin": "http://127.0.0.1"}
WHERE = {"run": "run", "source": "i1", "answer": "train/0#0"}
HOSTILE = "</textarea><script>window.ran = 1</script>\u202e\nsecond line"


def hidden(page: str) -> dict[str, str]:
    """What the form knows of the answer and of the note that it was made from."""
    return {name: page.split(f'name="{name}" value="')[1].split('"')[0] for name in ("seen", "about")}


def send(client: TestClient, where: dict[str, str] = WHERE, **said: object) -> Response:
    """As a browser does: reads the page, fills in the form, sends it, and follows."""
    fields = {**hidden(client.get("/answer", params=where).text), "note": "", **said}
    return client.post("/answer", params=where, data=fields, headers=ORIGIN)


def test_a_note_lies_beside_the_run_and_is_shown_listed_filtered_and_exported(
    client: TestClient, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(folder / "run", iterations=1)
    before = client.get("/answer", params=WHERE)
    mark = before.text.split('data-mark="')[1].split('"')[0]

    shown = send(client, label=["wrong step"], labels="lucky, wrong step", note=HOSTILE)

    assert shown.status_code == 200 and shown.url.path == "/answer"
    assert "<script>window" not in shown.text and "⟨RLO⟩" in shown.text
    assert client.get("/answer", params=WHERE, headers={SEEN: mark}).status_code == 200, "live"
    [note] = read_notes(run.notes)
    assert (note.labels, note.text, note.author) == (("wrong step", "lucky"), HOSTILE, system_user())
    assert (note.about.source, note.about.problem, note.about.sample) == ("i1", "train/0", 0)
    listed = client.get("/answers", params={"run": "run", "label": "lucky"}).text
    assert "<b>1</b> answer<" in listed and "✎ note" in listed and 'class="label">lucky' in listed
    assert "No answer is like that" in client.get("/answers", params={"run": "run", "label": "x"}).text
    both = {"run": "run", "label": ",", "of": "everything", "search": "0+1=1\n1+2=3"}
    assert "<b>1</b> answer<" in client.get("/answers", params=both).text
    for asked in ({}, {"run": "run"}, {"label": "lucky", "search": "SECOND line"}):
        page = client.get("/notes", params=asked).text
        assert "<b>1</b> note " in page and 'href="/answer?run=run' in page
    assert "No note is like that" in client.get("/notes", params={"label": "none"}).text
    table = parquet.read_table(io.BytesIO(client.get("/notes/data", params={"format": "parquet"}).content))
    [row] = table.to_pylist()
    assert row["labels"] == ["wrong step", "lucky"] and row["note"] == HOSTILE
    assert row["answer"].startswith("0+1=1\n") and row["score"] == 1.0
    assert row["advantage"] == note.about.advantage is not None
    output = tmp_path / "notes.jsonl"
    assert main(["export_notes", str(run.path), "--output", str(output)]) == 0
    [line] = map(json.loads, output.read_text().splitlines())
    assert {**line, "time": 0, "experiment": 0} == {**row, "time": 0, "experiment": 0}
    assert output.read_bytes() == client.get("/notes/data", params={"format": "jsonl"}).content
    assert "1 note: " in capsys.readouterr().out

    send(client)

    assert read_notes(run.notes) == [] and "Nobody has written" in client.get("/notes").text


def test_a_note_stays_with_its_text_when_the_iteration_is_made_anew(client: TestClient, folder: Path) -> None:
    run = begin_run(folder / "run")
    record_iteration(run, 0)
    form = {**hidden(client.get("/answer", params=WHERE).text), "note": "about the first"}
    send(client, note="about the first")

    record_iteration(run, 0, [replace(answers(0)[0], text="another"), *answers(0)[1:]])

    assert "about the first" not in client.get("/answer", params=WHERE).text
    assert "✎" not in client.get("/answers", params={"run": "run"}).text
    assert "is no more, or is still being read" in client.get("/notes").text
    late = client.post("/answer", params=WHERE, data=form, headers=ORIGIN)
    assert (
        late.status_code == 409
        and "the answer is another by now" in late.text
        and len(read_notes(run.notes)) == 1
    )
    record_iteration(run, 0)
    assert "about the first" in client.get("/answer", params=WHERE).text, (
        "as the undisturbed run has it again"
    )


def test_who_saves_over_an_unseen_change_is_told_and_nothing_is_lost(
    client: TestClient, folder: Path
) -> None:
    run = recorded_run(folder / "run", iterations=1)
    late = {**hidden(client.get("/answer", params=WHERE).text), "note": "from the second window"}
    send(client, note="from the first window")

    refused = client.post("/answer", params=WHERE, data=late, headers=ORIGIN)

    assert refused.status_code == 409 and "changed meanwhile" in refused.text
    assert "from the first window" in refused.text and "from the second window</textarea>" in refused.text
    assert [note.text for note in read_notes(run.notes)] == ["from the first window"]
    again = client.post("/answer", params=WHERE, data={**late, **hidden(refused.text)}, headers=ORIGIN)
    assert again.status_code == 200
    assert [note.text for note in read_notes(run.notes)] == ["from the second window"]


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    about = NotedAnswer("i1", "train/0#0", "train/0", 0, "prompt", "text \ud800")

    def write(number: int) -> bool:
        """On an answer that eight write on, one author each, and on one that all fight for."""
        save_note(run, replace(new_note(about, ["x"], f"{number}"), author=f"DOMAIN\\../{number}"), "")
        try:
            save_note(run, new_note(about, [], f"{number}"), "")
        except Changed:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(write, range(8)))

    notes = read_notes(run.notes)
    assert {note.text for note in notes if note.labels} == set("01234567")
    assert won.count(True) == 1 and len(notes) == 9
    assert all(path.parent == run.notes for path in run.notes.rglob("*"))


def test_other_authors_notes_are_shown_and_kept(client: TestClient, folder: Path) -> None:
    run = recorded_run(folder / "run", iterations=1)
    send(client, labels="mine")
    [own] = read_notes(run.notes)
    save_note(run, replace(own, author="somebody", labels=("theirs",)), "")

    page = send(client, labels="mine too").text

    assert "<b>somebody</b>" in page and 'value="theirs"' in page, "suggested too"
    assert sorted(note.labels for note in read_notes(run.notes)) == [("mine too",), ("theirs",)]


def test_only_the_page_itself_can_write_and_only_notes(client: TestClient, folder: Path) -> None:
    run = recorded_run(folder / "run", iterations=1)
    fields = {**hidden(client.get("/answer", params=WHERE).text), "note": "x"}

    for headers in ({}, {"origin": "null"}, {"origin": "http://127.0.0.1:8000"}):
        assert client.post("/answer", params=WHERE, data=fields, headers=headers).status_code == 403
    stranger = TestClient(client.app, base_url="http://127.0.0.1")
    assert stranger.post("/answer", params=WHERE, data=fields, headers=ORIGIN).status_code == 403
    assert client.post("/answers", params=WHERE, data=fields, headers=ORIGIN).status_code == 405
    much = {**fields, "note": "x" * MOST_SENT_BYTES}
    assert client.post("/answer", params=WHERE, data=much, headers=ORIGIN).status_code == 413
    assert not run.notes.exists()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"labels": "x" * 41}, "at most 40 characters"),
        ({"labels": "a\nb"}, "is one line"),
        ({"labels": ",".join(map(str, range(21)))}, "at most 20 labels"),
        ({"note": "x" * 20_001}, "at most 20,000 characters"),
    ],
)
def test_what_can_be_no_note_is_refused_in_words(
    client: TestClient, folder: Path, said: dict[str, str], words: str
) -> None:
    run = recorded_run(folder / "run", iterations=1)

    refused = send(client, **said)

    assert refused.status_code == 409 and words in refused.text
    assert not run.notes.exists()


def test_a_viewer_that_cannot_write_says_so(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded_run(folder / "run", iterations=1)
    reading = TestClient(
        application(Store(store.folders, store.cache, 0.0, read_only=True), TOKEN),
        base_url="http://127.0.0.1",
    )
    page = reading.get("/answer", params={**WHERE, "token": TOKEN}).text
    assert "started with --read-only" in page and "<textarea" not in page
    refused = reading.post("/answer", params=WHERE, data={"note": "x"}, headers=ORIGIN)
    assert (
        refused.status_code == 409 and "Nothing was saved" in refused.text and "x</textarea>" in refused.text
    )

    writing = TestClient(application(store, TOKEN), base_url="http://127.0.0.1")
    monkeypatch.setattr("os.access", lambda *_: False)
    page = writing.get("/answer", params={**WHERE, "token": TOKEN}).text
    assert f"{run.path} can&#39;t be written by {system_user()}" in page and "<textarea" not in page


def test_a_damaged_note_is_named_and_takes_no_other_along(
    client: TestClient, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(folder / "run", iterations=1)
    for answer in ("train/0#0", "train/1#0"):
        send(client, {**WHERE, "answer": answer}, note=f"on {answer}")
    one, _ = sorted(run.notes.glob("*.json"))
    one.write_text(one.read_text().replace("on train", "at train"))

    page = client.get("/notes").text

    assert "<b>1</b> note " in page and f"{one} is damaged" in page
    with pytest.raises(Damaged, match="checksum"):
        read_notes(run.notes)
    assert main(["export_notes", str(run.path), "--output", str(folder / "x.parquet")]) == 2
    assert "is damaged" in capsys.readouterr().err and not (folder / "x.parquet").exists()


def test_labels_are_said_once_and_between_commas() -> None:
    assert checked_labels([" a , b", "b", "", "c d"]) == ("a", "b", "c d")
