"""What a run reads again is what it wrote: one flipped byte is named, with what to do, and that helps."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch

from tests.runtime.in_process import directory_of, sampled_requests, small, train
from treetune.rollouts.storage import read_episodes, read_tokens, read_trajectories
from treetune.runtime.base import Evaluation, EvaluationSet
from treetune.runtime.directory import ExperimentDirectory, verify_answers
from treetune.runtime.manifest import read_config
from treetune.store.checksums import SUMS, Damaged, read_record, write_record
from treetune_view.experiment import read_experiment


def flip(path: Path, place: float = 0.5) -> None:
    """One bit, that share of the way into the file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def weights(directory: ExperimentDirectory, number: int) -> bytes:
    return (directory.checkpoint(number) / "policy" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run of three iterations that nothing happened to."""
    return weights(train(small(tmp_path_factory.mktemp("three"), iterations=3)), 3)


def test_a_damaged_state_is_named_and_an_older_whole_one_is_gone_on_from(
    tmp_path: Path, three: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(small(tmp_path, iterations=2))
    hurt = largest(run.checkpoint(2) / "trainer")
    flip(hurt)
    train(small(tmp_path, iterations=3))
    assert f"{hurt} is damaged: going on from the checkpoint before it, 1" in caplog.text
    assert weights(run, 3) == three


def test_where_no_other_state_is_left_the_run_says_so_and_what_it_says_helps(
    tmp_path: Path, three: bytes
) -> None:
    run = train(small(tmp_path, iterations=2))
    for number in (1, 2):
        hurt = largest(run.checkpoint(number) / "trainer")
        flip(hurt)
    hurt = largest(run.checkpoint(1) / "trainer")
    with pytest.raises(Damaged, match="no older checkpoint holds a trainer's state: delete") as told:
        train(small(tmp_path, iterations=3))
    assert str(hurt) in str(told.value)
    shutil.rmtree(run.path / "checkpoints")
    longer = small(tmp_path, iterations=3)
    train(longer)
    assert weights(run, 3) == three
    assert sampled_requests(longer) == 4, "the first two iterations' answers are there"


def test_weights_that_another_run_would_start_from_are_verified(tmp_path: Path) -> None:
    from treetune.models.policy_files import read_policy

    run = train(small(tmp_path, iterations=1))
    policy = run.checkpoint(1) / "policy"
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


def test_a_checkpoint_that_would_run_code_runs_none(tmp_path: Path) -> None:
    run = train(small(tmp_path, iterations=1))
    (state,) = (run.checkpoint(1) / "trainer").rglob("mp_rank_00_model_states.pt")
    torch.save({"module": Hostile(tmp_path / "proof")}, state)
    (run.checkpoint(1) / "trainer" / SUMS).unlink()
    with pytest.raises(UnpicklingError, match="mkdir"):
        train(small(tmp_path, iterations=2))
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("name", ["episodes.arrow", "trajectories.arrow"])
@pytest.mark.parametrize("hurt", ["flipped", "cut", "empty"])
def test_damaged_answers_are_named_and_made_again_from_the_journals(
    tmp_path: Path, three: bytes, name: str, hurt: str
) -> None:
    run = train(small(tmp_path, iterations=3))
    shutil.rmtree(run.path / "checkpoints")
    file = run.iteration(1) / name
    if hurt == "flipped":
        flip(file, 0.9)
    else:
        file.write_bytes(file.read_bytes()[:-100] if hurt == "cut" else b"")
    if name == "trajectories.arrow":
        (run.iteration(1) / "episodes.arrow").unlink()  # as if the run had ended between the two
    with pytest.raises(ValueError, match=f"iterations/0001/{name} is .*delete it"):
        train(small(tmp_path, iterations=3))
    file.unlink()
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    again = small(tmp_path, iterations=3)
    train(again)
    assert weights(run, 3) == three
    assert sampled_requests(again) == 0


def test_a_damaged_line_of_a_journal_is_told_and_its_request_asked_again(
    tmp_path: Path, three: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(small(tmp_path, iterations=3))
    for path in (run.path / "checkpoints", *(run.iteration(i) for i in (1, 2))):
        for other in [one for one in path.rglob("*") if one.is_file() and one.suffix != ".jsonl"]:
            other.unlink()
    (journal,) = (run.iteration(1) / "journal").glob("rollout*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    hurt = bytearray(lines[1])
    place = hurt.index(b'"row":') + 60  # in the middle of what was sampled
    hurt[place] = ord("A") if hurt[place] != ord("A") else ord("B")
    journal.write_bytes(b"".join([lines[0], bytes(hurt), *lines[2:]]))
    again = small(tmp_path, iterations=3)
    train(again)
    assert f"line 2 of {journal} is damaged" in caplog.text
    assert sampled_requests(again) == 1
    assert weights(run, 3) == three


@pytest.mark.parametrize("content", ["", "{", '"text"'])
@pytest.mark.parametrize("name", ["iterations/0001/rollout.json", "config.json", "manifest.json"])
def test_an_empty_or_torn_record_is_named(tmp_path: Path, name: str, content: str) -> None:
    run = train(small(tmp_path, iterations=2))
    shutil.rmtree(run.path / "checkpoints")
    (run.path / name).write_text(content)
    with pytest.raises(Damaged, match=f"{name} is damaged .*: (delete|put it back)"):
        train(small(tmp_path, iterations=2))


def test_a_record_whose_numbers_changed_is_refused(tmp_path: Path) -> None:
    run = train(small(tmp_path, iterations=2))
    shutil.rmtree(run.path / "checkpoints")
    file = run.iteration(0) / "credit.json"
    text = file.read_text()
    assert '"tokens": 0' in text
    file.write_text(text.replace('"tokens": 0', '"tokens": 8'))
    with pytest.raises(Damaged, match=r"credit\.json is damaged \(its checksum"):
        train(small(tmp_path, iterations=2))


SEALED = (
    *("config.json", "manifest.json", "metrics.jsonl", "tokens.arrow", "checkpoints/0001/state.json"),
    *("evaluations/0001/test/summary.json", "evaluations/0001/test/answers.jsonl"),
    *("iterations/0000/episodes.arrow", "iterations/0000/trajectories.arrow", "iterations/0000/metrics.json"),
)


def read(run: ExperimentDirectory, name: str) -> Any:
    """What those who read the file make of it."""
    path = run.path / name
    if name == "config.json":
        return read_config(run.path)
    if name == "metrics.jsonl":
        return run.read_metrics()
    if name == "tokens.arrow":
        return read_tokens(path)
    if name.endswith("answers.jsonl"):
        verify_answers(path)
        return [json.loads(line) for line in path.read_text().splitlines()]
    if name.endswith("episodes.arrow"):
        return read_episodes(path)
    if name.endswith("trajectories.arrow"):
        return read_trajectories(path)
    return read_record(path, "")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> ExperimentDirectory:
    sets = (EvaluationSet(split="test", problems=3, samples=1),)
    config = small(tmp_path_factory.mktemp("one"), iterations=1, evaluation=Evaluation(sets=sets))
    return train(config, seed=1, model={"layers": 1})


@pytest.mark.parametrize("name", SEALED)
def test_no_flipped_bit_reads_as_other_content(measured: ExperimentDirectory, name: str) -> None:
    path, draw = measured.path / name, random.Random(name)
    whole, content = path.read_bytes(), read(measured, name)
    for _ in range(60):
        hurt = bytearray(whole)
        hurt[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(hurt)
        try:
            found = read(measured, name)
        except ValueError:  # Damaged is one
            continue
        assert found == content
    path.write_bytes(whole)


def test_the_word_that_says_that_a_record_is_sealed_is_sealed_itself(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_record(path, {"pass_at_1": 0.5})
    for word in ("checksum", "format"):
        text = path.read_text().replace(word, "x" + word[1:]).replace("0.5", "0.9")
        (tmp_path / "hurt.json").write_text(text)
        with pytest.raises(Damaged):
            read_record(tmp_path / "hurt.json", "")


def test_a_report_tells_what_is_damaged_and_leaves_it_out(
    measured: ExperimentDirectory, tmp_path: Path
) -> None:
    shutil.copytree(measured.path, tmp_path / "hurt")
    for name in ("metrics.jsonl", "evaluations/0001/test/summary.json"):
        path = tmp_path / "hurt" / name
        text = path.read_text()
        digit = re.search(r"[1-8]", text)
        assert digit is not None
        path.write_text(text[: digit.start()] + "9" + text[digit.end() :])
    found = read_experiment(tmp_path / "hurt")
    assert found.metrics == [] and found.evaluations == {} and found.config
    assert sum("damaged" in words for words in found.missing) == 2


def test_what_earlier_versions_wrote_is_read_as_it_is(tmp_path: Path) -> None:
    from treetune.store.journal import row_of

    old = tmp_path / "old.json"
    old.write_text('{"seconds": 1.0}')
    assert read_record(old, "") == {"seconds": 1.0}
    assert row_of(b'["key",[]]\n') == b'["key",[]]\n'
    run = train(small(tmp_path, iterations=1))
    for sums in directory_of(small(tmp_path)).path.rglob(SUMS):
        sums.unlink()
    train(small(tmp_path, iterations=2))
    assert run.checkpoints() == [1, 2]
