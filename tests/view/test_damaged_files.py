"""Damaged and unusual files: impossible numbers, broken lines, names that are no text, and links.

The tests hold that every page still opens, that the page names what it leaves out, and that nothing outside
of the given folders is read.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import datasets
import pytest

from tests.view.conftest import Viewer
from treetune.store.journal import sealed_line
from treetune.view.store import Store

PAGES = ("/", "/run?run=x", "/run?run=x&run=y", "/timeline?run=x", "/timeline/trace?run=x", "/answers?run=x",
         "/compare?run=x&run=y", "/configuration?run=x", "/notes", "/problem?run=x&problem=train/0",
         "/answer?run=x&source=i1&answer=train/0%230", "/data")  # fmt: skip


def open_all(viewer: Viewer, *pages: str) -> None:
    """Opens pages; the first that can't be opened fails the test."""
    for page in pages:
        viewer.page(page)


@pytest.mark.parametrize("name", ["train/loss", "seconds/total", "wall_time", "iteration"])
def test_a_whole_number_of_400_digits_is_left_out_and_named(viewer: Viewer, name: str) -> None:
    run = viewer.record("x", iterations=2)
    viewer.record("y", iterations=2)
    run.append_metrics(run.read_metrics()[-1] | {"iteration": 2, name: 10**399})
    open_all(viewer, *PAGES)
    page = viewer.page("/run?run=x")
    assert f"{name} of a line of " in page and "is a whole number of 400 digits, and is left out" in page
    assert '<th scope="row">missing</th>' in page


UNUSUAL_LINES = {
    "nested": b'{"n": ' + b"[" * 300 + b"]" * 300 + b"}",
    "a nameless field": b'{"": 3}',
    "half a character": b'{"n": 3, "text": "\\ud800"}',
}
BAD_LINES = UNUSUAL_LINES | {
    "a list": b"[1, 2]",
    "a number": b"12",
    "a word": b'"x"',
    "torn": b'{"n": 3, "te',
    "no text": b'{"n": 3, "text": "\xff\xfe"}',
    "zeros": b"\0\0\0",
    "two on a line": b'{"n": 3} {"n": 4}',
}


@pytest.mark.parametrize("bad", BAD_LINES)
@pytest.mark.parametrize("position", [0, 3, 6])
def test_a_bad_line_is_an_empty_row_of_a_data_set_and_named(viewer: Viewer, bad: str, position: int) -> None:
    lines = [json.dumps({"n": i, "text": f"text {i}", "deep": {"a": [[i]]}}).encode() for i in range(6)]
    lines.insert(position, BAD_LINES[bad])
    (viewer.folder / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    rows = [viewer.page(f"/row?data=rows.jsonl&row={number}") for number in range(7)]
    open_all(viewer, "/data", "/histograms?data=rows.jsonl&histogram=n")
    assert bad in UNUSUAL_LINES or "unreadable line" in rows[position]
    page = viewer.page("/rows?data=rows.jsonl&sort=n")
    assert f"are shown as empty rows: {position}." in page
    assert all(f"text {i}" in page for i in range(6))
    assert "text 4" in viewer.page("/rows?data=rows.jsonl&where=n%20%3E%203")


def test_a_file_name_that_is_no_text_is_shown_with_replacement_characters(viewer: Viewer) -> None:
    folder = os.fsencode(viewer.folder)
    viewer.record("x")
    os.rename(folder + b"/x", folder + b"/x\xff")
    Path(os.fsdecode(folder + b"/rows\xff.jsonl")).write_text('{"n": 1}\n')
    name = "x%EF%BF%BD"
    pages = ["/", "/data", "/notes", f"/run?run={name}", f"/answers?run={name}", f"/timeline?run={name}"]
    open_all(viewer, *pages, f"/answer?run={name}&source=i1&answer=train/0%230")
    viewer.refusal("/rows", 400, data="rows\ufffd.jsonl")


def test_a_timeline_with_broken_characters_and_impossible_times_is_shown(viewer: Viewer) -> None:
    run = viewer.record("x")
    rows: list[dict[str, object]] = [
        {"process": 11, "host": "here\ud800", "at": 1e9},
        {"begin": 1, "lane": "phases", "name": "gene\ud800", "at": 1e9, "why\udc00": "so\udfff"},
        {"end": 1, "at": 1e9 + 5},
        {"begin": 2, "lane": "la\ud800ne", "name": "sync", "at": 1e9 + 1},
        *({"begin": 3 + n, "lane": "phases", "name": "sync", "at": at}
          for n, at in enumerate((10**400, 1e300, -1.0, float("nan"), "soon"))),
    ]  # fmt: skip
    text = "".join(sealed_line(json.dumps(row)) for row in rows)
    (run.logs_folder / "run.timeline.jsonl").write_text(text)
    Path(os.fsdecode(os.fsencode(run.logs_folder) + b"/en\xffgine.timeline.jsonl")).write_text(text)
    lanes = [quote(lane) for lane in ("run: la⟨U+D800⟩ne", "en⟨U+DCFF⟩gine: phases")]
    open_all(viewer, "/timeline/trace?run=x", *(f"/timeline?run=x&lane={lane}" for lane in lanes))
    page = viewer.page("/timeline?run=x")
    assert "gene⟨U+D800⟩" in page and "so⟨U+DFFF⟩" in page
    assert "run.timeline.jsonl, line 5, 6, 7, …" in page


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder that the viewer was not given."""
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


def replace_by_link(path: Path, elsewhere: Path) -> None:
    """Moves a file or folder elsewhere, and leaves a link to it."""
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)


def test_links_to_folders_and_files_elsewhere_are_not_followed(viewer: Viewer, elsewhere: Path) -> None:
    folder, store = viewer.folder, viewer.store
    viewer.record("own")
    shutil.copytree(folder / "own", elsewhere / "secret")
    (elsewhere / "rows.jsonl").write_text('{"n": 1}\n')
    (folder / "link").symlink_to(elsewhere)
    (folder / "rows.jsonl").symlink_to(elsewhere / "rows.jsonl")
    (folder / "again").symlink_to(folder / "own")
    assert [run.name for run in store.runs()] == ["again", "own"]
    viewer.refusal("/run?run=link/secret", 404)
    viewer.refusal("/rows?data=rows.jsonl", 404)
    for page in ("/", "/data"):
        text = viewer.page(page)
        assert "are not followed" in text and f"{folder}/link" in text and f"{folder}/again" not in text
    assert f"{folder}/rows.jsonl" in viewer.page("/data")
    both = Store([folder, elsewhere], store.cache, look_again_s=0.0)
    assert len(both.runs()) == 4 and not both.left_out


@pytest.mark.parametrize(
    "name",
    ["config.json", "metrics.jsonl", "tokens.arrow", "logs", "logs/run.log", "iterations", "iterations/0000",
     "evaluations/0001", "evaluations/0001/validation", "evaluations/0001/validation/answers.jsonl",
     "evaluations/0001/validation/summary.json"],
)  # fmt: skip
def test_an_experiment_with_a_link_out_of_its_folder_is_left_out_and_named(
    viewer: Viewer, elsewhere: Path, name: str
) -> None:
    run = viewer.record()
    (run.logs_folder / "run.log").write_text("a line\n")
    viewer.page("/run?run=run")
    replace_by_link(run.path / name, elsewhere)
    for page in ("run", "answers", "timeline", "notes"):
        viewer.refusal(f"/{page}?run=run", 404)
    assert f"{run.path / name}" in viewer.page("/")


@pytest.mark.parametrize("name", ["trajectories.arrow", "episodes.arrow", "token_signals.arrow"])
def test_answers_behind_a_link_are_left_out_and_named(viewer: Viewer, elsewhere: Path, name: str) -> None:
    run = viewer.record(iterations=2)
    replace_by_link(run.iteration_folder(0) / name, elsewhere)
    viewer.refusal("/answer?run=run&source=i1&answer=train/0%230", 404)
    viewer.page("/answer?run=run&source=i2&answer=train/0%230")
    message = f"{run.iteration_folder(0) / name} is not read: it is a symbolic link to a file outside of"
    assert message in viewer.page("/answers?run=run")


def test_an_experiment_with_linked_checkpoints_is_shown(viewer: Viewer, elsewhere: Path) -> None:
    run = viewer.record()
    (run.path / "checkpoints").mkdir()
    replace_by_link(run.path / "checkpoints", elsewhere)
    assert [run.name for run in viewer.store.runs()] == ["run"] and not viewer.store.left_out


def test_a_data_set_with_a_link_out_of_its_folder_is_refused(viewer: Viewer, elsewhere: Path) -> None:
    folder = viewer.folder / "saved"
    datasets.Dataset.from_list([{"n": 1}]).save_to_disk(str(folder))
    [file] = folder.glob("*.arrow")
    replace_by_link(file, elsewhere)
    assert f"{file} is a symbolic link to a file outside" in viewer.refusal("/rows?data=saved", 400)
