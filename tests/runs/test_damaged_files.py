"""What a run reads again is what it wrote: one flipped bit is named, with what to do, and that helps. Whoever
shows a run shows what was written, or says by name what is damaged."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pyarrow as pa
import pytest
import torch
from starlette.testclient import TestClient

from tests.support.small_run import sampled_requests, small, train, weights_of
from treetune.exceptions import Damaged
from treetune.models.policy_files import read_policy
from treetune.rollouts.storage import TOKENS, read_episodes, read_tokens, read_trajectories
from treetune.runtime.analysis import read_result, write_result
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.directory import ExperimentDirectory, verify_answers
from treetune.runtime.manifest import read_config
from treetune.store.checksums import CHECKSUMS_FILE, read_record, write_record
from treetune.store.journal import unseal_line
from treetune.view.app import make_application
from treetune.view.experiment import read_experiment
from treetune.view.report.write import write_report
from treetune.view.store import Store


def flip(path: Path, place: float = 0.5) -> None:
    """One bit, that share of the way into the file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def change(path: Path, before: bytes, after: bytes) -> None:
    data = path.read_bytes()
    assert before in data and len(before) == len(after)
    path.write_bytes(data.replace(before, after))


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


SETS = (EvaluationSet(split="test", problems=3, samples=1),)


def run_of(base: Path, iterations: int) -> PolicyIteration:
    """Begins or goes on, with an engine that counts this one's own requests."""
    config = small(base, iterations=iterations, evaluation=Evaluation(every=1, sets=SETS))
    train(config, seed=1, model={"layers": 1})
    return config


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    """Two iterations, and an evaluation after them. Not to be changed: take a copy."""
    return run_of(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def three(two: PolicyIteration, tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    base = tmp_path_factory.mktemp("three")
    shutil.copytree(two.directory, base, dirs_exist_ok=True)
    return run_of(base, 3)


@pytest.fixture
def of_two(two: PolicyIteration, tmp_path: Path) -> ExperimentDirectory:
    shutil.copytree(two.directory, tmp_path, dirs_exist_ok=True)
    return ExperimentDirectory(tmp_path / "small")


@pytest.fixture
def of_three(three: PolicyIteration, tmp_path: Path) -> ExperimentDirectory:
    shutil.copytree(three.directory, tmp_path, dirs_exist_ok=True)
    return ExperimentDirectory(tmp_path / "small")


# A run that goes on


def test_a_damaged_state_is_named_and_an_older_whole_one_is_gone_on_from(
    of_two: ExperimentDirectory, three: PolicyIteration, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hurt = largest(of_two.checkpoint_folder(2) / "trainer")
    flip(hurt)
    config = run_of(tmp_path, 3)
    assert f"{hurt} is damaged: resuming from the checkpoint before it, 1" in caplog.text
    assert weights_of(config) == weights_of(three)


def test_where_no_other_state_is_left_the_run_says_so_and_what_it_says_helps(
    of_two: ExperimentDirectory, three: PolicyIteration, tmp_path: Path
) -> None:
    for number in (2, 1):
        hurt = largest(of_two.checkpoint_folder(number) / "trainer")
        flip(hurt)
    with pytest.raises(Damaged, match="no older checkpoint holds a trainer's state: delete") as told:
        run_of(tmp_path, 3)
    assert str(hurt) in str(told.value)
    shutil.rmtree(of_two.path / "checkpoints")
    config = run_of(tmp_path, 3)
    assert weights_of(config) == weights_of(three)
    assert sampled_requests(config) == 4 + 3, "the first two iterations' answers are there"


def test_weights_that_another_run_would_start_from_are_verified(of_two: ExperimentDirectory) -> None:
    policy = of_two.checkpoint_folder(1) / "policy"
    assert read_policy(policy)[0]
    flip(policy / "model.safetensors")
    with pytest.raises(Damaged, match=r"model\.safetensors is damaged"):
        read_policy(policy)


class Hostile:
    """Runs a command where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def test_a_checkpoint_that_would_run_code_runs_none(of_two: ExperimentDirectory, tmp_path: Path) -> None:
    (state,) = (of_two.checkpoint_folder(2) / "trainer").rglob("mp_rank_00_model_states.pt")
    torch.save({"module": Hostile(tmp_path / "proof")}, state)
    (of_two.checkpoint_folder(2) / "trainer" / CHECKSUMS_FILE).unlink()
    with pytest.raises(UnpicklingError, match="mkdir"):
        run_of(tmp_path, 3)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("name", ["episodes.arrow", "trajectories.arrow"])
@pytest.mark.parametrize("hurt", ["flipped", "cut", "empty"])
def test_damaged_answers_are_named_and_made_again_from_the_journals(
    of_three: ExperimentDirectory, three: PolicyIteration, tmp_path: Path, name: str, hurt: str
) -> None:
    shutil.rmtree(of_three.path / "checkpoints")
    file = of_three.iteration_folder(1) / name
    if hurt == "flipped":
        flip(file, 0.9)
    else:
        file.write_bytes(file.read_bytes()[:-100] if hurt == "cut" else b"")
    if name == "trajectories.arrow":
        (of_three.iteration_folder(1) / "episodes.arrow").unlink()  # as if the run had ended between the two
    with pytest.raises(ValueError, match=f"iterations/0001/{name} is .*delete it"):
        run_of(tmp_path, 3)
    file.unlink()
    shutil.rmtree(of_three.path / "checkpoints", ignore_errors=True)
    config = run_of(tmp_path, 3)
    assert weights_of(config) == weights_of(three)
    assert sampled_requests(config) == 0


def test_a_damaged_line_of_a_journal_is_told_and_its_request_asked_again(
    of_three: ExperimentDirectory, three: PolicyIteration, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (of_three.path / "checkpoints", *(of_three.iteration_folder(i) for i in (1, 2))):
        for other in [one for one in path.rglob("*") if one.is_file() and one.suffix != ".jsonl"]:
            other.unlink()
    (journal,) = (of_three.iteration_folder(1) / "journal").glob("rollout*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    hurt = bytearray(lines[1])
    place = hurt.index(b'"row":') + 60  # in the middle of what was sampled
    hurt[place] = ord("A") if hurt[place] != ord("A") else ord("B")
    journal.write_bytes(b"".join([lines[0], bytes(hurt), *lines[2:]]))
    config = run_of(tmp_path, 3)
    assert f"line 2 of {journal} is damaged" in caplog.text
    assert sampled_requests(config) == 1
    assert weights_of(config) == weights_of(three)


@pytest.mark.parametrize("content", ["", "{", '"text"'])
@pytest.mark.parametrize("name", ["iterations/0001/rollout.json", "config.json", "manifest.json"])
def test_an_empty_or_torn_record_is_named(
    of_two: ExperimentDirectory, tmp_path: Path, name: str, content: str
) -> None:
    shutil.rmtree(of_two.path / "checkpoints")
    (of_two.path / name).write_text(content)
    with pytest.raises(Damaged, match=f"{name} is damaged .*: (delete|put it back)"):
        run_of(tmp_path, 2)


def test_a_record_whose_numbers_changed_is_refused(of_two: ExperimentDirectory, tmp_path: Path) -> None:
    shutil.rmtree(of_two.path / "checkpoints")
    change(of_two.iteration_folder(0) / "credit.json", b'"tokens": 0', b'"tokens": 8')
    with pytest.raises(Damaged, match=r"credit\.json is damaged \(its checksum"):
        run_of(tmp_path, 2)


def test_what_earlier_versions_wrote_is_read_as_it_is(of_two: ExperimentDirectory, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text('{"seconds": 1.0}')
    assert read_record(old, "") == {"seconds": 1.0}
    assert unseal_line(b'["key",[]]\n') == b'["key",[]]\n'
    for sums in of_two.path.rglob(CHECKSUMS_FILE):
        sums.unlink()
    run_of(tmp_path, 3)
    assert of_two.checkpoints() == [1, 2, 3]


# Readers

SEALED = (
    *("config.json", "manifest.json", "metrics.jsonl", TOKENS, "checkpoints/0001/state.json"),
    *("evaluations/0002/test/summary.json", "evaluations/0002/test/answers.jsonl"),
    *("iterations/0000/episodes.arrow", "iterations/0000/trajectories.arrow", "iterations/0000/metrics.json"),
)


def read(run: ExperimentDirectory, name: str) -> Any:
    """What those who read the file make of it."""
    path = run.path / name
    if name == "config.json":
        return read_config(run.path)
    if name == "metrics.jsonl":
        return run.read_metrics()
    if name == TOKENS:
        return read_tokens(path)
    if name.endswith("answers.jsonl"):
        verify_answers(path)
        return [json.loads(line) for line in path.read_text().splitlines()]
    if name.endswith("episodes.arrow"):
        return read_episodes(path)
    if name.endswith("trajectories.arrow"):
        return read_trajectories(path)
    return read_record(path, "")


@pytest.mark.parametrize("name", SEALED)
def test_no_flipped_bit_reads_as_other_content(of_two: ExperimentDirectory, name: str) -> None:
    path, draw = of_two.path / name, random.Random(name)
    whole, content = path.read_bytes(), read(of_two, name)
    drawn = [(draw.randrange(len(whole)), draw.randrange(8)) for _ in range(60)]
    for place, bit in [
        *drawn,
        *itertools.product((-1, -2), range(8)),
    ]:  # an end says if it is torn
        hurt = bytearray(whole)
        hurt[place] ^= 1 << bit
        path.write_bytes(hurt)
        try:
            found = read(of_two, name)
        except ValueError:  # Damaged is one
            continue
        assert found == content


def test_the_word_that_says_that_a_record_is_sealed_is_sealed_itself(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_record(path, {"pass_at_1": 0.5})
    for word in ("checksum", "format"):
        text = path.read_text().replace(word, "x" + word[1:]).replace("0.5", "0.9")
        (tmp_path / "hurt.json").write_text(text)
        with pytest.raises(Damaged):
            read_record(tmp_path / "hurt.json", "")


def test_no_flip_in_an_arrow_file_without_a_checksum_ends_the_process(of_two: ExperimentDirectory) -> None:
    tokens = of_two.path / TOKENS
    table = pa.table({"text": read_tokens(tokens)})
    with pa.ipc.new_stream(tokens, table.schema) as writer:  # as earlier versions wrote it
        writer.write_table(table)
    program = f"""
from pathlib import Path
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


# The report and the viewer


@pytest.fixture
def client(tmp_path: Path, of_two: ExperimentDirectory) -> TestClient:
    """A browser before the viewer."""
    store = Store([tmp_path], tmp_path / "cache", look_again_s=0.0)
    made = TestClient(make_application(store, "token"), base_url="http://127.0.0.1")
    made.get("/", params={"token": "token"})
    return made


def test_a_report_tells_what_is_damaged_and_leaves_it_out(of_two: ExperimentDirectory) -> None:
    for name in ("metrics.jsonl", "evaluations/0002/test/summary.json"):
        path = of_two.path / name
        text = path.read_text()
        digit = re.search(r"[1-8]", text)
        assert digit is not None
        path.write_text(text[: digit.start()] + "9" + text[digit.end() :])
    found = read_experiment(of_two.path)
    assert [row["iteration"] for row in found.metrics] == [1] and found.evaluations == {} and found.config
    assert sum("damaged" in words for words in found.missing) == 2


def test_another_accuracy_in_a_summary_is_not_reported(
    of_two: ExperimentDirectory, client: TestClient
) -> None:
    summary = of_two.evaluation_folder(2, "test") / "summary.json"
    accuracy = 9 + json.loads(summary.read_text())["pass_at_1"]
    change(summary, b'"pass_at_1": 0', b'"pass_at_1": 9')
    report = write_report([of_two.path]).read_text()
    assert str(summary) in report and "its checksum doesn&#39;t match" in report
    assert f"{accuracy:.3f}" not in report
    page = client.get("/run", params={"run": "small"}).text
    assert "evaluations/0002/test/summary.json is not an evaluation" in page


def test_another_word_in_an_answer_is_not_shown(of_two: ExperimentDirectory, client: TestClient) -> None:
    change(of_two.evaluation_folder(2, "test") / "answers.jsonl", b'"reward": ', b'"reward":9')
    page = client.get("/answers", params={"run": "small", "source": "e2-test"}).text
    assert "answers.jsonl is damaged (its checksum doesn&#39;t match its content)" in page


@pytest.mark.parametrize("name", ["trajectories.arrow", "episodes.arrow"])
def test_a_flipped_bit_of_an_iteration_is_named_and_the_others_are_shown(
    of_two: ExperimentDirectory, client: TestClient, name: str
) -> None:
    flip(of_two.iteration_folder(1) / name)
    page = client.get("/answers", params={"run": "small"}).text
    assert f"{name} is damaged (its checksum doesn&#39;t match its content)" in page
    assert client.get("/answers", params={"run": "small", "source": "i1"}).text.count("<tr") > 1
    if name == "episodes.arrow":  # which the report shows
        assert f"{name} is damaged" in write_report([of_two.path]).read_text()


def test_damaged_texts_of_tokens_are_named_and_answers_shown_without(
    of_two: ExperimentDirectory, client: TestClient
) -> None:
    flip(of_two.path / TOKENS)
    assert f"{TOKENS} is damaged" in client.get("/run", params={"run": "small"}).text
    page = client.get("/answers", params={"run": "small", "source": "i1"}).text
    assert "can&#39;t be read" not in page
    assert f"{TOKENS} is damaged" in write_report([of_two.path]).read_text()


@pytest.mark.parametrize("name", ["result.json", "states.jsonl"])
def test_another_number_of_an_analysis_is_not_reported(of_two: ExperimentDirectory, name: str) -> None:
    folder = of_two.analysis_folder("looked")
    write_result(folder, {"analyzer": "x", "numbers": {"value": 0.5}}, [{"value": 0.5}], "states.jsonl")
    assert read_result(folder)["numbers"] == {"value": 0.5}
    change(folder / name, b"0.5", b"0.9")
    with pytest.raises(Damaged, match=f"looked/{name} is damaged"):
        read_result(folder)
    assert f"looked/{name} is damaged" in write_report([of_two.path]).read_text()
