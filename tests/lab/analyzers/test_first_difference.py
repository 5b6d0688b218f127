"""The first difference of two runs.

These tests promise:

* Runs that differ only in times are the same.
* Any flipped bit is found, with its phase and its position.
* The first phase that differs is named, whatever differs after it.
* Files that can't be read, and folders without a run, are named.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support import tabular_mdp as mdp
from treetune.credit.rloo import Rloo
from treetune.engine.journal import journal_row
from treetune.engine.requests import Completion
from treetune.lab.analyzers.first_difference import find_first_difference
from treetune.main import main
from treetune.rollouts.storage import (
    read_episodes,
    read_trajectories,
    write_episodes,
    write_trajectories,
)
from treetune.store.checksums import seal_folder, write_record
from treetune.store.journal import Journal, sealed_line, unseal_line
from treetune.tree import trees_of

Runs, Captured = tuple[Path, Path], pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Returns a run of two iterations, and a copy of it."""
    run = tmp_path / "one"
    answers = [mdp.trajectory(answer, sample=i) for i, answer in enumerate(mdp.answers())]
    episodes, _ = Rloo().assign(mdp.context(), trees_of(answers))
    for number in (0, 1):
        iteration = run / "iterations" / f"{number:04d}"
        iteration.mkdir(parents=True)
        write_trajectories(iteration / "trajectories.arrow", answers)
        write_episodes(iteration / "episodes.arrow", episodes)
        for phase in ("rollout", "credit"):
            rows = [
                journal_row(f"{phase}{i}", [make_completion(i), make_completion(i + 1)]) for i in range(3)
            ]
            with Journal(iteration / "journal" / f"{phase}-0.jsonl") as journal:
                journal.add(*rows)
        write_record(iteration / "metrics.json", {"train/loss": 0.25, "seconds/training": 1.0})
        checkpoint = run / "checkpoints" / f"{number + 1:04d}"
        parts = ("policy", "adapter", "critic", "reward_model", "trainer")
        for part in parts:
            (checkpoint / part).mkdir(parents=True)
        tensors: dict[str, np.ndarray] = {
            "a": np.arange(6, dtype=np.float32).reshape(2, 3),
            "b": np.zeros(4, np.float32),
        }
        for part in parts[:-1]:
            save_file(tensors, checkpoint / part / "model.safetensors")
        (checkpoint / "trainer" / "state.pt").write_bytes(bytes(range(256)))
        for part in parts:
            seal_folder(checkpoint / part)
        evaluation = run / "evaluations" / f"{number + 1:04d}" / "test"
        evaluation.mkdir(parents=True)
        write_record(evaluation / "summary.json", {"pass_at_1": 0.5, "seconds": 3.0})
    copy = tmp_path / "other"
    shutil.copytree(run, copy)
    return run, copy


def make_completion(first: int) -> Completion:
    return Completion([first, 7], [-0.5, -0.25], "stop", 0, 0.1)


def flip_bit(data: bytes, position: int, bit: int = 0) -> bytes:
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def test_runs_that_differ_only_in_times_and_journals_of_order_are_the_same(
    runs: Runs, capsys: Captured
) -> None:
    run, copy = runs
    write_record(copy / "iterations/0000/metrics.json", {"train/loss": 0.25, "seconds/training": 9.0})
    write_record(copy / "evaluations/0001/test/summary.json", {"pass_at_1": 0.5, "seconds": 1.0})
    shutil.rmtree(copy / "checkpoints/0001")
    journal = copy / "iterations/0000/journal/rollout-0.jsonl"
    *lines, last = journal.read_bytes().splitlines(keepends=True)
    journal.write_text(sealed_line(unseal_line(last).decode().replace(",0.1]", ",7.5]")))
    journal.with_name("rollout-1.jsonl").write_bytes(b"".join(lines))
    shutil.rmtree(copy / "iterations/0001/journal")
    assert find_first_difference(run, copy) is None
    assert main(["bisect_runs", str(run), str(copy)]) == 0
    assert "the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("checkpoint", "change", "tensor", "at", "first"),
    [
        ("0002", lambda data: flip_bit(data, data.index(struct.pack("<f", 4.0))), "a", [1, 1], "4.0"),
        ("0001", lambda data: data[:-1] + b"\x80", "b", [3], "0.0"),  # a sign of zero
    ],
)
def test_one_flipped_bit_of_a_weight_is_found_with_its_position(
    runs: Runs, checkpoint: str, change: Callable[[bytes], bytes], tensor: str, at: list[int], first: str
) -> None:
    run, copy = runs
    path = copy / "checkpoints" / checkpoint / "policy/model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    difference, weights = find_first_difference(run, copy), load_file(path)[tensor]
    assert (difference.iteration, difference.phase, difference.first) == (int(checkpoint), "weights", first)
    assert f"tensor {tensor} at {at} (1 of {weights.size} numbers differ)" in difference.position
    assert weights[tuple(at)] == float(difference.second) and difference.second != first


def _change_answer(run: Path) -> None:
    path = run / "iterations/0001/trajectories.arrow"
    first, second, *others = read_trajectories(path)
    write_trajectories(path, [first, replace(second, text="z"), *others])


def _change_continuation(run: Path) -> None:
    """Changes the lowest bit of a log-prob, which changes no value."""
    path = run / "iterations/0001/journal/credit-0.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    key, rows = json.loads(unseal_line(second))
    rows[1][1] = base64.b64encode(flip_bit(base64.b64decode(rows[1][1]), 0)).decode()
    path.write_bytes(first + sealed_line(json.dumps([key, rows])).encode() + third)


def _change_credit(run: Path) -> None:
    path = run / "iterations/0001/episodes.arrow"
    *others, last = read_episodes(path)
    write_episodes(path, [*others, replace(last, advantages=np.nextafter(last.advantages, 9.0))])


def _change_state(run: Path) -> None:
    path = run / "checkpoints/0002/trainer/state.pt"
    path.write_bytes(flip_bit(path.read_bytes(), 77))


def _change_number(name: str, **numbers: float) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(json.dumps(numbers))


CHANGES: list[tuple[Callable[[Path], None], str, str]] = [
    (_change_answer, "sampling", "text"),
    (_change_credit, "credit", "advantages[0]"),
    (_change_continuation, "credit", "journal: the credit's request credit1, sample[1].logprobs[0]"),
    (
        _change_number("iterations/0001/metrics.json", **{"train/loss": 0.2500001}),
        "training (metrics)",
        "train/loss",
    ),
    (_change_state, "trainer's state", "byte 77"),
    (_change_number("evaluations/0002/test/summary.json", pass_at_1=0.5625), "evaluation", "pass_at_1"),
]


@pytest.mark.parametrize("first", range(len(CHANGES)))
def test_the_first_phase_that_differs_is_named_whatever_differs_after_it(
    runs: Runs, first: int, capsys: Captured
) -> None:
    run, copy = runs
    for change, *_ in CHANGES[first:]:
        change(copy)
    _, phase, position = CHANGES[first]
    difference = find_first_difference(run, copy)
    assert (difference.iteration, difference.phase) == (2, phase)
    assert position in difference.position
    assert main(["bisect_runs", str(run), str(copy)]) == 1
    assert phase in capsys.readouterr().out


FILES = {
    "iterations/0000/trajectories.arrow": "sampling",
    "iterations/0000/journal/rollout-0.jsonl": "sampling",
    "iterations/0000/episodes.arrow": "credit",
    "iterations/0000/journal/credit-0.jsonl": "credit",
    "iterations/0000/metrics.json": "training (metrics)",
    "checkpoints/0001/policy/model.safetensors": "weights",
    "checkpoints/0001/adapter/model.safetensors": "weights of the adapters",
    "checkpoints/0001/critic/model.safetensors": "weights of the critic",
    "checkpoints/0001/reward_model/model.safetensors": "weights of the reward model",
    "checkpoints/0001/trainer/state.pt": "trainer's state",
    "evaluations/0001/test/summary.json": "evaluation",
}


@pytest.mark.parametrize("name", FILES)
def test_any_single_bit_that_is_flipped_in_a_copy_is_found(runs: Runs, name: str) -> None:
    """The bit may change a number, make the file unreadable, or disagree with a checksum only."""
    run, copy = runs
    path = copy / name
    unchanged = path.read_bytes()
    rng = random.Random(name)
    for _ in range(6):
        position, bit = rng.randrange(len(unchanged)), rng.randrange(8)
        path.write_bytes(flip_bit(unchanged, position, bit))
        assert describe_difference(run, copy).startswith(
            (f"{path} ", f"the runs first differ in iteration 1, {FILES[name]}: ")
        ), position


def describe_difference(run: Path, copy: Path) -> str:
    try:
        return str(find_first_difference(run, copy))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("position", range(0, 88, 7))
def test_a_flipped_bit_anywhere_in_a_journal_is_found(runs: Runs, position: int) -> None:
    """It may be in a checksum, in a key, in encoded bytes, or in the punctuation of a line."""
    run, copy = runs
    path = copy / "iterations/0000/journal/rollout-0.jsonl"
    path.write_bytes(flip_bit(path.read_bytes(), position, 1))
    difference = find_first_difference(run, copy)
    assert (difference.iteration, difference.phase) == (1, "sampling")
    assert "the rollout's request" in difference.position and difference.first != difference.second


def test_damaged_files_and_folders_without_a_run_are_named(runs: Runs, tmp_path: Path) -> None:
    run, copy = runs
    path = copy / "iterations/0000/episodes.arrow"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"episodes\.arrow can't be read as a whole"):
        find_first_difference(run, copy)
    with pytest.raises(ValueError, match="give an experiment's folder"):
        find_first_difference(run, tmp_path)
