"""Answers of other trainers are opened as they lie there: each format is a few names of fields."""

import json
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.view.conftest import Shown, Viewer
from tests.view.hostile import KINDS

ASKED, SAID = "What is 1+1?", "1+1 is 2. #2"


def chat(*said: str) -> list[dict[str, Any]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(said)]


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def verl(folder: Path) -> None:
    """As verl 0.9.1 writes: a file for each step, with an `uid` of each answer that no other step knows."""
    for step in (2, 10):
        row = {"input": ASKED, "output": SAID, "gts": "2", "score": 1.0, "step": step, "acc": True}
        other = {"score": float(step > 2), "output": "3", "uid": f"c{step}_1_0"}
        lines(folder / f"{step}.jsonl", row | {"uid": f"c{step}_0_0"}, row | other)


def verifiers(folder: Path) -> None:
    row = {"example_id": 0, "prompt": chat(ASKED), "completion": chat("", SAID)[1:], "answer": "2"}
    rest = {"task": "sums", "reward": 1.0, "info": {}, "format_reward": 0.5}
    lines(folder / "results.jsonl", row | rest, row | rest | {"reward": 0.0})


def traces(folder: Path) -> None:
    """As verifiers 0.4.0 writes them, less what isn't read."""
    data = {"idx": 0, "prompt": ASKED, "answer": "2"}
    nodes = [
        {"message": {"role": "user", "content": ASKED}, "sampled": False},
        {"parent": 0, "message": {"role": "assistant", "content": SAID}, "sampled": True},
    ]
    rewards = {"right": {"score": 1.0, "weight": 1.0}, "short": {"score": 0.5, "weight": 0.1}, "late": None}
    task = {"type": "Sum", "data": data, "key": "sum"}
    row = {"env": {"id": ""}, "task": task, "ok": True, "traces": [{"nodes": nodes, "rewards": rewards}]}
    failed = row | {"ok": False, "traces": [], "errors": [{"type": "ProviderError", "message": "500"}]}
    lines(folder / "traces.jsonl", row, row, failed)


def inspect_log() -> dict[str, Any]:
    sample = {
        "id": "sum", "epoch": 1, "input": chat(ASKED), "target": "2", "messages": [],
        "output": {"choices": [{"message": {"role": "assistant", "content": SAID}, "stop_reason": "stop"}]},
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


def anything(folder: Path) -> None:
    row = {"prompt": ASKED, "response": SAID, "score": True}
    lines(folder / "mine.jsonl", row, row | {"score": 0})


def inspect_zstandard(folder: Path) -> None:
    """As inspect-ai 0.3.285 packs them, which zipfile can't write before Python 3.14."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    sizes = []
    with zipfile.ZipFile(folder / "log.eval", "w") as archive:
        for sample in inspect_log()["samples"]:
            text = json.dumps(sample).encode()
            archive.writestr(f"samples/sum_epoch_{sample['epoch']}.json", pa.compress(text, "zstd", True))
            sizes.append(len(text))
    data = bytearray((folder / "log.eval").read_bytes())
    for one, size in zip(re.finditer(rb"PK\x01\x02", data), sizes, strict=True):  # the archive's own list
        struct.pack_into("<H", data, one.start() + 10, 93)
        struct.pack_into("<I", data, one.start() + 24, size)
    (folder / "log.eval").write_bytes(data)


def slime(folder: Path) -> None:
    """As `--save-debug-rollout-data` writes."""
    import torch

    folder.mkdir(parents=True)
    row = {
        "group_index": 0, "index": 0, "prompt": ASKED, "tokens": [1, 2, 3], "response": SAID, "label": "2",
        "response_length": 2, "reward": 1.0, "status": "completed", "metadata": {},
    }  # fmt: skip
    samples = [row, row | {"index": 1, "reward": {"score": 0.0, "format": 1.0}}]
    torch.save({"rollout_id": 7, "samples": samples}, folder / "rollout_7.pt")


@pytest.mark.parametrize(
    "write", [verl, verifiers, traces, inspect_json, inspect_eval, inspect_zstandard, anything, slime]
)
def test_a_run_of_another_trainer_is_listed_read_and_grouped(viewer: Viewer, write: Any) -> None:
    write(viewer.folder / "theirs" / "dump")
    assert "answers written by another trainer" in viewer.page("/")
    listed = viewer.page("/answers", run="theirs/dump", of="everything")
    count = {verl: 4, traces: 3}.get(write, 2)
    assert f"<b>{count}</b> answers" in listed
    first = viewer.page(re.findall(r'data-href="([^"]+)"', listed)[0].replace("&amp;", "&"))
    assert ASKED in first and SAID in first and ("not stored" in first) == (write is anything)
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


class Harm:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


def test_a_dump_that_would_run_something_is_refused(viewer: Viewer, capsys: Any) -> None:
    import torch

    folder = viewer.folder / "theirs"
    folder.mkdir()
    row = {"prompt": ASKED, "response": SAID, "reward": 1.0, "metadata": Harm()}
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


def test_a_file_that_is_being_written_has_the_answers_that_are_whole(viewer: Viewer) -> None:
    anything(viewer.folder / "theirs")
    path = viewer.folder / "theirs" / "mine.jsonl"
    path.write_text(path.read_text() + '5\n{"prompt": "a", "respon')
    (viewer.folder / "theirs" / f"{'9' * 200}.jsonl").write_text(path.read_text())
    assert "<b>4</b> answers" in viewer.page("/answers", run="theirs", of="everything")


def test_what_others_models_wrote_is_text(shown: Shown) -> None:
    rows = [
        {"prompt": kind, "response": kind, "score": 0.5, "id": kind[:50]} for kind in KINDS if len(kind) < 400
    ]
    lines(shown.viewer.folder / "theirs" / "x.jsonl", *rows)
    pages = ["/", "/answers?run=theirs&of=everything&size=200", "/problems?run=theirs&of=everything"]
    for page in [*pages, "/answer?run=theirs&of=everything&page=1"]:
        shown.open(page)
        assert shown.wrong() == [], page
