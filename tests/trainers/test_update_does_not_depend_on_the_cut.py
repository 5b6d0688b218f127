"""Design rule 2: micro-batch size, number of ranks, layout and sharding change speed, never the update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.trainers import update_program
from tests.trainers.helpers import launch

SETTINGS = {
    "learning_rate": 1e-3,
    "minibatch_size": 8,
    "adam_eps": 1e-4,  # Adam divides by it where a gradient is 0 up to rounding
    "advantage_normalisation": "whiten",
    "objective": {"kl_coef": 0.01, "entropy_coef": 0.01},
}
TOLERANCE = 1e-6


def update(tmp_path: Path, name: str, ranks: int = 1, **changes: object) -> tuple[dict, dict]:
    out = tmp_path / f"{name}.safetensors"
    launch(Path(update_program.__file__), [json.dumps(SETTINGS | changes), str(out)], ranks)
    return load_file(out), json.loads(out.with_suffix(".json").read_text())


def assert_same(one: tuple[dict, dict], other: tuple[dict, dict]) -> None:
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        assert (tensor - other[0][name]).abs().max() <= TOLERANCE, name
    for name in ("train/loss", "train/grad_norm", "train/kl", "train/entropy", "train/clip_fraction"):
        assert one[1].get(name) == pytest.approx(other[1].get(name), abs=1e-5), name


@pytest.fixture(scope="module")
def eight_at_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    return update(tmp_path_factory.mktemp("update"), "eight", sequences_per_micro_batch=8)


def test_two_ranks_packed_make_the_same_update_as_one_padded(tmp_path, eight_at_once):
    assert_same(eight_at_once, update(tmp_path, "two", ranks=2, sequences_per_micro_batch=3, layout="packed"))


def test_two_ranks_with_sharded_gradients_make_the_same_update(tmp_path, eight_at_once):
    """ZeRO-2 reduces in every backward pass: ranks with unequal work must not drift apart."""
    assert_same(eight_at_once, update(tmp_path, "zero2", ranks=2, sequences_per_micro_batch=3, zero_stage=2))


def test_two_ranks_make_the_same_update_from_pairs_as_one(tmp_path):
    """Five pairs a step: one rank has three of them, the other two."""
    pairs = {
        "kind": "dpo_positive",
        "minibatch_size": 5,
        "objective": {"positive_penalty": 5.0, "penalty_band": 0.1},
    }
    pairs["advantage_normalisation"] = "none"
    one = update(tmp_path, "pairs", sequences_per_micro_batch=8, **pairs)
    two = update(tmp_path, "pairs2", ranks=2, sequences_per_micro_batch=2, layout="packed", **pairs)
    assert_same(one, two)


@pytest.mark.slow
def test_two_ranks_with_sharded_parameters_make_the_same_update(tmp_path, eight_at_once):
    assert_same(eight_at_once, update(tmp_path, "zero3", ranks=2, sequences_per_micro_batch=3, zero_stage=3))
