"""Answers of other trainers and of Inspect are opened as their files are.

The tests hold that a folder of each format is listed, read and grouped by problem; that files without
answers are no run; that a pickle which would run code is refused; and that texts stay texts in a browser.
"""

import json
import re
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.view.conftest import Shown, Viewer
from tests.view.hostile import KINDS
from treetune.view.store.index import _foreign_sources

QUESTION, ANSWER = "What is 1+1?", "1+1 is 2. #2"


def chat(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def verl(folder: Path) -> None:
    """Writes as verl 0.9.1 does: a file for each step, where an answer's `uid` is unique over all steps."""
    for step in (2, 10):
        row = {"input": QUESTION, "output": ANSWER, "gts": "2", "score": 1.0, "step": step, "acc": True}
        other = {"score": float(step > 2), "output": "3", "uid": f"c{step}_1_0"}
        lines(folder / f"{step}.jsonl", row | {"uid": f"c{step}_0_0"}, row | other)


def verifiers(folder: Path) -> None:
    row = {"example_id": 0, "prompt": chat(QUESTION), "completion": chat("", ANSWER)[1:], "answer": "2"}
    fields = {"task": "sums", "reward": 1.0, "info": {}, "format_reward": 0.5}
    lines(folder / "results.jsonl", row | fields, row | fields | {"reward": 0.0})


def traces(folder: Path) -> None:
    """Writes traces as verifiers 0.4.0 does, without the fields that aren't read."""
    data = {"idx": 0, "prompt": QUESTION, "answer": "2"}
    nodes = [
        {"message": {"role": "user", "content": QUESTION}, "sampled": False},
        {"parent": 0, "message": {"role": "assistant", "content": ANSWER}, "sampled": True},
    ]
    rewards = {"right": {"score": 1.0, "weight": 1.0}, "short": {"score": 0.5, "weight": 0.1}, "late": None}
    task = {"type": "Sum", "data": data, "key": "sum"}
    row = {"env": {"id": ""}, "task": task, "ok": True, "traces": [{"nodes": nodes, "rewards": rewards}]}
    failed = row | {"ok": False, "traces": [], "errors": [{"type": "ProviderError", "message": "500"}]}
    lines(folder / "traces.jsonl", row, row, failed)


def inspect_log() -> dict[str, Any]:
    sample = {
        "id": "sum", "epoch": 1, "input": chat(QUESTION), "target": "2", "messages": [],
        "output": {"choices": [{"message": {"role": "assistant", "content": ANSWER}, "stop_reason": "stop"}]},
        "scores": {"match": {"value": "C", "answer": "2", "explanation": "alike"}},
    }  # fmt: skip
    other = sample | {"epoch": 2, "scores": {"match": {"value": "I", "answer": None}}}
    return {"version": 2, "status": "success", "eval": {"task": "sums"}, "samples": [sample, other]}


def inspect_json(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "log.json").write_text(json.dumps(inspect_log()))


def inspect_eval(folder: Path) -> None:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "log.eval", "w") as archive:
        for sample in inspect_log()["samples"]:
            archive.writestr(f"samples/sum_epoch_{sample['epoch']}.json", json.dumps(sample))
        archive.writestr("header.json", "{}")


def plain_rows(folder: Path) -> None:
    row = {"prompt": QUESTION, "response": ANSWER, "score": True}
    lines(folder / "mine.jsonl", row, row | {"score": 0})


def inspect_zstandard(folder: Path) -> None:
    """Writes as inspect-ai 0.3.285 does, with Zstandard, which zipfile lacks before Python 3.14."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    sizes = []
    with zipfile.ZipFile(folder / "log.eval", "w") as archive:
        for sample in inspect_log()["samples"]:
            text = json.dumps(sample).encode()
            archive.writestr(f"samples/sum_epoch_{sample['epoch']}.json", pa.compress(text, "zstd", True))
            sizes.append(len(text))
    data = bytearray((folder / "log.eval").read_bytes())
    # In each entry of the archive's directory: the method (93 is Zstandard), and the size of the text.
    for entry, size in zip(re.finditer(rb"PK\x01\x02", data), sizes, strict=True):
        struct.pack_into("<H", data, entry.start() + 10, 93)
        struct.pack_into("<I", data, entry.start() + 24, size)
    (folder / "log.eval").write_bytes(data)


def slime(folder: Path) -> None:
    """Writes as slime does with `--save-debug-rollout-data`."""
    import torch

    folder.mkdir(parents=True)
    row = {
        "group_index": 0, "index": 0, "prompt": QUESTION, "tokens": [1, 2, 3], "response": ANSWER,
        "label": "2", "response_length": 2, "reward": 1.0, "status": "completed", "metadata": {},
    }  # fmt: skip
    samples = [row, row | {"index": 1, "reward": {"score": 0.0, "format": 1.0}}]
    torch.save({"rollout_id": 7, "samples": samples}, folder / "rollout_7.pt")


@pytest.mark.parametrize(
    "write", [verl, verifiers, traces, inspect_json, inspect_eval, inspect_zstandard, plain_rows, slime]
)
def test_a_run_of_another_trainer_is_listed_read_and_grouped(viewer: Viewer, write: Any) -> None:
    write(viewer.folder / "theirs" / "dump")
    assert "answers written by another trainer" in viewer.page("/")
    listed = viewer.page("/answers", run="theirs/dump", of="everything")
    count = {verl: 4, traces: 3}.get(write, 2)
    assert f"<b>{count}</b> answers" in listed
    first = viewer.page(re.findall(r'data-href="([^"]+)"', listed)[0].replace("&amp;", "&"))
    assert QUESTION in first and ANSWER in first and ("not stored" in first) == (write is plain_rows)
    problems = viewer.page("/problems", run="theirs/dump", of="everything")
    graded = "of 2 <span" if write is traces else f"of {count}</td>"
    assert "<b>1</b> problem<" in problems and graded in problems


def test_steps_of_a_dump_follow_each_other_and_numbers_can_be_asked_for(viewer: Viewer) -> None:
    verl(viewer.folder / "dump")
    page = viewer.page("/problems", run="dump", of="e1-10.jsonl")
    assert "2 of 2" in page and 'title="2.jsonl">+0.50<' in page
    assert "<b>4</b> answers" in viewer.page(
        "/answers", run="dump", of="everything", where="number.numbers/acc = 1"
    )


def test_files_whose_paths_differ_in_a_hyphen_alone_have_names_of_their_own() -> None:
    folder = Path("dump")
    paths = [folder / path for path in ("step_1/b-c.jsonl", "step_1-b/c.jsonl", "step_2/c.jsonl", "c.jsonl")]
    run: Any = SimpleNamespace(path=folder, files=paths)
    names = [source.name for source in _foreign_sources(run)]
    assert len(set(names)) == 4 and names[2:] == ["e-step_2-c.jsonl", "e3-c.jsonl"]


class RunsCode:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


def test_a_dump_that_would_run_something_is_refused(viewer: Viewer, capsys: Any) -> None:
    import torch

    folder = viewer.folder / "theirs"
    folder.mkdir()
    row = {"prompt": QUESTION, "response": ANSWER, "reward": 1.0, "metadata": RunsCode()}
    torch.save({"rollout_id": 7, "samples": [row]}, folder / "0.pt")
    assert "can&#39;t be read" in viewer.page("/answers", run="theirs", of="everything")
    torch.save({"weights": torch.zeros(3)}, folder / "0.pt")
    assert viewer.store.runs() == [] and "it ran" not in capsys.readouterr().out


def test_files_that_hold_no_answers_are_no_run(viewer: Viewer) -> None:
    lines(viewer.folder / "data" / "train.jsonl", {"prompt": "1+1=", "answer": "2", "pass_rate": 0.5})
    (viewer.folder / "data" / "torn.jsonl").write_text('{"prompt": "a", "resp')
    (viewer.folder / "data" / "no.eval").write_text("no archive")
    (viewer.folder / "data" / "x.json").write_text("[1, 2]")
    (viewer.folder / "data" / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (viewer.folder / "data" / "number.jsonl").write_text("5\n")
    assert viewer.store.runs() == []


def test_the_whole_rows_of_a_file_that_is_being_written_are_shown(viewer: Viewer) -> None:
    plain_rows(viewer.folder / "theirs")
    path = viewer.folder / "theirs" / "mine.jsonl"
    path.write_text(path.read_text() + '5\n{"prompt": "a", "respon')
    (viewer.folder / "theirs" / f"{'9' * 200}.jsonl").write_text(path.read_text())
    assert "<b>4</b> answers" in viewer.page("/answers", run="theirs", of="everything")


def test_texts_of_other_trainers_models_stay_text_in_a_browser(shown: Shown) -> None:
    rows = [
        {"prompt": kind, "response": kind, "score": 0.5, "id": kind[:50]} for kind in KINDS if len(kind) < 400
    ]
    lines(shown.viewer.folder / "theirs" / "x.jsonl", *rows)
    pages = ["/", "/answers?run=theirs&of=everything&size=200", "/problems?run=theirs&of=everything"]
    for page in [*pages, "/answer?run=theirs&of=everything&page=1"]:
        shown.open(page)
        assert shown.harm() == [], page
