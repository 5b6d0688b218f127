"""Where two runs part is found: the first phase that differs, down to one bit."""

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

from tests.rollouts import tabular_mdp as mdp
from treetune.credit.rloo import Rloo
from treetune.engine.journal import journal_row
from treetune.engine.requests import Completion
from treetune.lab.analyzers.first_difference import first_difference
from treetune.main import main
from treetune.rollouts.storage import (
    read_episodes,
    read_trajectories,
    write_episodes,
    write_trajectories,
)
from treetune.store.checksums import seal_folder, write_record
from treetune.store.journal import Journal, row_of, sealed_line
from treetune.tree import trees_of

Runs, Said = tuple[Path, Path], pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Two iterations of a run, and a copy of it."""
    one = tmp_path / "one"
    answers = [mdp.trajectory(answer, sample=i) for i, answer in enumerate(mdp.answers())]
    episodes, _ = Rloo().assign(mdp.context(), trees_of(answers))
    for number in (0, 1):
        iteration = one / "iterations" / f"{number:04d}"
        iteration.mkdir(parents=True)
        write_trajectories(iteration / "trajectories.arrow", answers)
        write_episodes(iteration / "episodes.arrow", episodes)
        for phase in ("rollout", "credit"):
            rows = [journal_row(f"{phase}{i}", [sampled(i), sampled(i + 1)]) for i in range(3)]
            with Journal(iteration / "journal" / f"{phase}-0.jsonl") as journal:
                journal.add(*rows)
        write_record(iteration / "metrics.json", {"train/loss": 0.25, "seconds/training": 1.0})
        checkpoint = one / "checkpoints" / f"{number + 1:04d}"
        for part in ("policy", "trainer"):
            (checkpoint / part).mkdir(parents=True)
        tensors: dict[str, np.ndarray] = {
            "a": np.arange(6, dtype=np.float32).reshape(2, 3),
            "b": np.zeros(4, np.float32),
        }
        save_file(tensors, checkpoint / "policy" / "model.safetensors")
        (checkpoint / "trainer" / "state.pt").write_bytes(bytes(range(256)))
        for part in ("policy", "trainer"):
            seal_folder(checkpoint / part)
        evaluation = one / "evaluations" / f"{number + 1:04d}" / "test"
        evaluation.mkdir(parents=True)
        write_record(evaluation / "summary.json", {"pass_at_1": 0.5, "seconds": 3.0})
    other = tmp_path / "other"
    shutil.copytree(one, other)
    return one, other


def sampled(first: int) -> Completion:
    return Completion([first, 7], [-0.5, -0.25], "stop", 0, 0.1)


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def test_runs_that_only_a_clock_tells_apart_are_the_same(runs: Runs, capsys: Said) -> None:
    one, other = runs
    write_record(other / "iterations/0000/metrics.json", {"train/loss": 0.25, "seconds/training": 9.0})
    write_record(other / "evaluations/0001/test/summary.json", {"pass_at_1": 0.5, "seconds": 1.0})
    shutil.rmtree(other / "checkpoints/0001")
    journal = other / "iterations/0000/journal/rollout-0.jsonl"
    *lines, last = journal.read_bytes().splitlines(keepends=True)
    journal.write_text(sealed_line(row_of(last).decode().replace(",0.1]", ",7.5]")))
    journal.with_name("rollout-1.jsonl").write_bytes(b"".join(lines))
    shutil.rmtree(other / "iterations/0001/journal")
    assert first_difference(one, other) is None
    assert main(["bisect_runs", str(one), str(other)]) == 0
    assert "the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("checkpoint", "change", "tensor", "at", "first"),
    [
        ("0002", lambda data: flipped(data, data.index(struct.pack("<f", 4.0))), "a", [1, 1], "4.0"),
        ("0001", lambda data: data[:-1] + b"\x80", "b", [3], "0.0"),  # a sign of zero
    ],
)
def test_one_flipped_bit_of_a_weight_is_found_with_its_place(
    runs: Runs, checkpoint: str, change: Callable[[bytes], bytes], tensor: str, at: list[int], first: str
) -> None:
    one, other = runs
    path = other / "checkpoints" / checkpoint / "policy/model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    found, weights = first_difference(one, other), load_file(path)[tensor]
    assert (found.iteration, found.phase, found.first) == (int(checkpoint), "weights", first)
    assert f"tensor {tensor} at {at} (1 of {weights.size} numbers differ)" in found.position
    assert weights[tuple(at)] == float(found.second) and found.second != first


def _change_answer(run: Path) -> None:
    path = run / "iterations/0001/trajectories.arrow"
    first, second, *rest = read_trajectories(path)
    write_trajectories(path, [first, replace(second, text="z"), *rest])


def _change_continuation(run: Path) -> None:
    """The lowest bit of a log-prob, which the value doesn't see."""
    path = run / "iterations/0001/journal/credit-0.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    key, rows = json.loads(row_of(second))
    rows[1][1] = base64.b64encode(flipped(base64.b64decode(rows[1][1]), 0)).decode()
    path.write_bytes(first + sealed_line(json.dumps([key, rows])).encode() + third)


def _change_credit(run: Path) -> None:
    path = run / "iterations/0001/episodes.arrow"
    *rest, last = read_episodes(path)
    write_episodes(path, [*rest, replace(last, advantages=np.nextafter(last.advantages, 9.0))])


def _change_state(run: Path) -> None:
    path = run / "checkpoints/0002/trainer/state.pt"
    path.write_bytes(flipped(path.read_bytes(), 77))


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
def test_the_first_phase_that_differs_is_told_whatever_differs_after_it(
    runs: Runs, first: int, capsys: Said
) -> None:
    one, other = runs
    for change, *_ in CHANGES[first:]:
        change(other)
    _, phase, place = CHANGES[first]
    found = first_difference(one, other)
    assert (found.iteration, found.phase) == (2, phase)
    assert place in found.position
    assert main(["bisect_runs", str(one), str(other)]) == 1
    assert phase in capsys.readouterr().out


FILES = {
    "iterations/0000/trajectories.arrow": "sampling",
    "iterations/0000/journal/rollout-0.jsonl": "sampling",
    "iterations/0000/episodes.arrow": "credit",
    "iterations/0000/journal/credit-0.jsonl": "credit",
    "iterations/0000/metrics.json": "training (metrics)",
    "checkpoints/0001/policy/model.safetensors": "weights",
    "checkpoints/0001/trainer/state.pt": "trainer's state",
    "evaluations/0001/test/summary.json": "evaluation",
}


@pytest.mark.parametrize("name", FILES)
def test_any_single_bit_that_is_flipped_in_a_copy_is_found(runs: Runs, name: str) -> None:
    """Whether numbers change by it, or the file can't be read, or only its checksum knows."""
    one, other = runs
    path = other / name
    whole = path.read_bytes()
    rng = random.Random(name)
    for _ in range(6):
        at, bit = rng.randrange(len(whole)), rng.randrange(8)
        path.write_bytes(flipped(whole, at, bit))
        assert told(one, other).startswith(
            (f"{path} ", f"the runs first differ in iteration 1, {FILES[name]}: ")
        ), at


def told(one: Path, other: Path) -> str:
    try:
        return str(first_difference(one, other))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("place", range(0, 88, 7))
def test_a_flipped_bit_of_a_journal_is_found_wherever_it_lies(runs: Runs, place: int) -> None:
    """In a checksum, in a key, in bytes as text, in what holds a line together."""
    one, other = runs
    path = other / "iterations/0000/journal/rollout-0.jsonl"
    path.write_bytes(flipped(path.read_bytes(), place, 1))
    found = first_difference(one, other)
    assert (found.iteration, found.phase) == (1, "sampling")
    assert "the rollout's request" in found.position and found.first != found.second


def test_what_is_damaged_is_named_and_a_folder_without_a_run_as_well(runs: Runs, tmp_path: Path) -> None:
    one, other = runs
    path = other / "iterations/0000/episodes.arrow"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"episodes\.arrow can't be read as a whole"):
        first_difference(one, other)
    with pytest.raises(ValueError, match="give an experiment's folder"):
        first_difference(one, tmp_path)
