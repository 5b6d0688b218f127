"""Whoever shows a run shows what was written, or says by name what is damaged."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from tests.runtime.in_process import small, train
from treetune.rollouts.storage import TOKENS, read_tokens
from treetune.runtime.analysis import read_result, write_result
from treetune.runtime.base import Evaluation, EvaluationSet
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import Damaged
from treetune_view.app import application
from treetune_view.report import write_report
from treetune_view.store import Store


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations, and an evaluation after each."""
    sets = (EvaluationSet(split="validation", samples=1),)
    return train(small(tmp_path_factory.mktemp("finished"), evaluation=Evaluation(every=1, sets=sets))).path


@pytest.fixture
def run(tmp_path: Path, finished: Path) -> ExperimentDirectory:
    """A copy, below the viewer's folder."""
    return ExperimentDirectory(Path(shutil.copytree(finished, tmp_path / "experiments" / "small")))


@pytest.fixture
def client(tmp_path: Path, run: ExperimentDirectory) -> TestClient:
    """A browser before the viewer."""
    store = Store([run.path.parent], tmp_path / "cache", look_again_s=0.0)
    made = TestClient(application(store, "token"), base_url="http://127.0.0.1")
    made.get("/", params={"token": "token"})
    return made


def change(path: Path, before: bytes, after: bytes) -> None:
    data = path.read_bytes()
    assert before in data and len(before) == len(after)
    path.write_bytes(data.replace(before, after))


def test_another_accuracy_in_a_summary_is_not_reported(run: ExperimentDirectory, client: TestClient) -> None:
    summary = run.evaluation(2, "validation") / "summary.json"
    change(summary, b'"pass_at_1": 0', b'"pass_at_1": 9')

    report = write_report([run.path]).read_text()
    assert str(summary) in report and "its checksum doesn&#39;t match" in report
    assert "9.500" not in report and "9.000" not in report
    page = client.get("/run", params={"run": "small"}).text
    assert "evaluations/0002/validation/summary.json is no evaluation" in page


def test_another_word_in_an_answer_is_not_shown(run: ExperimentDirectory, client: TestClient) -> None:
    answers = run.evaluation(2, "validation") / "answers.jsonl"
    change(answers, b'"reward": 1.0', b'"reward": 9.0')

    page = client.get("/answers", params={"run": "small", "source": "e2-validation"}).text
    assert "answers.jsonl is damaged (its checksum doesn&#39;t match its content)" in page


@pytest.mark.parametrize("name", ["trajectories.arrow", "episodes.arrow"])
def test_a_flipped_bit_of_an_iteration_is_named_and_the_others_are_shown(
    run: ExperimentDirectory, client: TestClient, name: str
) -> None:
    file = run.iteration(1) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    page = client.get("/answers", params={"run": "small"}).text
    assert f"{name} is damaged (its checksum doesn&#39;t match its content)" in page
    assert client.get("/answers", params={"run": "small", "source": "i1"}).text.count("<tr") > 1
    if name == "episodes.arrow":  # which the report shows
        assert f"{name} is damaged" in write_report([run.path]).read_text()


def test_damaged_texts_of_tokens_are_named_and_answers_shown_without(
    run: ExperimentDirectory, client: TestClient
) -> None:
    tokens = run.path / TOKENS
    data = bytearray(tokens.read_bytes())
    data[len(data) // 2] ^= 1
    tokens.write_bytes(data)

    assert f"{TOKENS} is damaged" in client.get("/run", params={"run": "small"}).text
    name = str(client.get("/answers", params={"run": "small", "source": "i1"}).text)
    assert "can&#39;t be read" not in name
    assert f"{TOKENS} is damaged" in write_report([run.path]).read_text()


@pytest.mark.parametrize("name", ["result.json", "states.jsonl"])
def test_another_number_of_an_analysis_is_not_reported(run: ExperimentDirectory, name: str) -> None:
    folder = run.analysis("looked")
    write_result(folder, {"analyzer": "x", "numbers": {"value": 0.5}}, [{"value": 0.5}], "states.jsonl")
    assert read_result(folder)["numbers"] == {"value": 0.5}
    change(folder / name, b"0.5", b"0.9")

    with pytest.raises(Damaged, match=f"looked/{name} is damaged"):
        read_result(folder)
    assert f"looked/{name} is damaged" in write_report([run.path]).read_text()


def test_no_flip_in_an_arrow_file_without_a_checksum_ends_the_process(run: ExperimentDirectory) -> None:
    tokens = run.path / TOKENS
    table = pa.table({"text": read_tokens(tokens)})
    with pa.ipc.new_stream(tokens, table.schema) as writer:  # as earlier versions wrote it
        writer.write_table(table)
    program = f"""
from pathlib import Path
from treetune.store.checksums import Damaged
from treetune.rollouts.storage import read_tokens
path = Path({str(tokens)!r})
data = path.read_bytes()
for place in range(len(data)):
    for bit in (1, 64, 128):
        path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        try:
            read_tokens(path)
        except ValueError:
            pass
print("alive")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, "alive"), ended.stderr[-2000:]
