"""Updates of one and of two ranks.

These tests promise that the size of micro-batches, the number of ranks, the layout and sharding change the
speed of an update, and never the update.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import treetune.parts  # noqa: F401  (registers them)
from tests.support.fork_server import run_forked_ranks
from tests.trainer import update_program
from treetune.objectives.base import Objective
from treetune.trainer.scoring import SHARE_AHEAD_METRIC, WAITING_SECONDS_METRIC

SETTINGS = {
    "learning_rate": 1e-3,
    "minibatch_size": 8,
    "adam_eps": 1e-4,  # Adam divides by it where a gradient is 0 up to rounding
    "advantage_normalisation": "whiten",
    "objective": {"type": "ppo", "kl_coef": 0.01, "entropy_coef": 0.01},
}
TOLERANCE = 1e-6


def run_updates(tmp_path: Path, changes: dict[str, dict], ranks: int = 1) -> dict[str, tuple[dict, dict]]:
    """Carries out several updates in the same processes, and returns the weights and metrics of each."""
    outs = {name: tmp_path / f"{name}.safetensors" for name in changes}
    settings = json.dumps([SETTINGS | changed for changed in changes.values()])
    arguments = [settings, *map(str, outs.values())]
    run_forked_ranks(Path(update_program.__file__), arguments, ranks, tmp_path)
    return {
        name: (load_file(out), json.loads(out.with_suffix(".json").read_text())) for name, out in outs.items()
    }


def assert_same_update(first: tuple[dict, dict], second: tuple[dict, dict]) -> None:
    assert first[0].keys() == second[0].keys()
    for name, tensor in first[0].items():
        assert (tensor - second[0][name]).abs().max() <= TOLERANCE, name
    for name in ("train/loss", "train/grad_norm", "train/kl", "train/entropy", "train/clip_fraction"):
        assert first[1].get(name) == pytest.approx(second[1].get(name), abs=5e-5), name
    assert first[1]["scores"] == pytest.approx(second[1]["scores"], abs=1e-5)
    distributions, expected_distributions = first[1]["distributions"], second[1]["distributions"]
    shared = min(
        len(distributions), len(expected_distributions)
    )  # ranks that share a sequence compare with no reference
    assert shared and distributions[:shared] == pytest.approx(expected_distributions[:shared], abs=1e-4)


RANK = {"type": "spo", "target": "rank", "divergence": "jsd", "max_rank": 8}
POSITIVE = {"type": "dpo_positive", "positive_penalty": 5.0, "penalty_band": 0.1}
OBJECTIVES = {
    "mle": {"type": "mle", "aggregation": "sequence"},
    "dual clip, constant length": {
        "type": "ppo",
        "dual_clip": 3.0,
        "aggregation": "constant",
        "constant_length": 20,
        "importance_cap": 2.0,
    },
    "kl in the reward": {"type": "ppo", "kl_coef": 0.1, "kl_estimator": "k1", "kl_placement": "reward"},
    "kl in the advantage": {"type": "ppo", "kl_coef": 0.1, "kl_placement": "advantage"},
    "gspo": {"type": "gspo", "clip_low": 0.01, "clip_high": 0.01},
    "cispo": {"type": "cispo"},
    "gmpo": {"type": "gmpo"},
    "sapo": {"type": "sapo"},
    "vimpo": {"type": "vimpo", "beta": 0.5, "actor_coef": 0.3, "lam": 0.9},
    "dppo": {"type": "dppo"},
    "distribution_distillation": {
        "type": "distribution_distillation",
        "divergence": "jsd",
        "top_k": 5,
        "importance_cap": 2.0,
    },
    "policy gradient and moving teacher": {
        "type": "distribution_distillation",
        "teacher": {"weights": "average", "decay": 0.5},
        "advantage_weight": 0.5,
        "aggregation": "sequence",
    },
    "clip_cov": {"type": "clip_cov", "share": 0.2, "least_covariance": -1.0},
    "kl_cov": {"type": "kl_cov", "share": 0.2},
    "dpo": {"type": "dpo"},
    "ipo": {"type": "dpo", "form": "ipo"},
    "dpo_positive": POSITIVE,
    "kto": {"type": "kto"},
    "simpo": {"type": "simpo"},
    "orpo": {"type": "orpo"},
    "spo_3_1": {"type": "spo", "normalise_by": "batch"},
    "spo_3_2": {"type": "spo", "detach_target": False, "entropy_coef": -0.5},
    "spo_3_3": {"type": "spo", "target": "fixed", "mask": "above", "importance_cap": 2.0},
    "rank": RANK,
    "corpus": {
        "type": "spo",
        "divergence": "jsd",
        "loss_on": "all",
        "normalise_by": "batch",
        "cross_entropy": 0.5,
    },
    "one correct answer": {"type": "spo", "target": "rank", "divergence": "jsd", "normalise_by": "batch"},
}


SEQUENCES_SHARED = {
    "padded": {"gae": True},
    "packed": {"layout": "packed", "minibatch_size": 5},
    "pairs": {"minibatch_size": 5, "advantage_normalisation": "none", "objective": POSITIVE},
    "spo": {"correct": 6, "objective": {"type": "spo"}, "advantage_normalisation": "none"},
    "lora": {"lora": {"rank": 4}, "gradient_checkpointing": True},
    # Row by row, so that a rank's stretch may lie in the prompt, with nothing to learn from.
    "rank": {"correct": 6, "objective": RANK, "advantage_normalisation": "none"},
    "reward model": {"prime": True, "minibatch_size": 5},
}


THREADS = {
    "ppo": {},
    "gspo": {"objective": OBJECTIVES["gspo"], "minibatch_size": 5},
    "dpo": {"objective": OBJECTIVES["dpo"], "minibatch_size": 5, "advantage_normalisation": "none"},
    "rank": {"correct": 6, "objective": RANK, "advantage_normalisation": "none"},
    "lora": {"lora": {"rank": 4}},
    "teacher": {"objective": OBJECTIVES["distribution_distillation"], "minibatch_size": 5},
}


ON_ONE_RANK = {
    "ppo": {"sequences_per_micro_batch": 8},
    # Large enough that ZeRO-3 deals it out, and run in chunks of three positions.
    "large head": {"model": {"vocabulary": 4096}, "logits_per_chunk": 3 * 4096},
    **{
        f"objective {name}": {
            "objective": objective,
            "minibatch_size": 5,  # one rank has three sequences or pairs, the other two
            "advantage_normalisation": "none",
            **({"correct": 1, "minibatch_size": None} if name == "one correct answer" else {}),
        }
        for name, objective in OBJECTIVES.items()
    },
    **{f"shared {name}": changed for name, changed in SEQUENCES_SHARED.items()},
    **{f"threads {name}": {"threads": True, **changed} for name, changed in THREADS.items()},
}
CUT = {"sequences_per_micro_batch": 3, "layout": "packed"}
ON_TWO_RANKS = {
    # By name: the update on one rank that it must equal, and how the work is cut.
    "packed": ("ppo", CUT),
    "sharded gradients": ("ppo", {"sequences_per_micro_batch": 3, "zero_stage": 2}),
    "sharded large head": ("large head", {"sequences_per_micro_batch": 1, "zero_stage": 3}),
    "sharded parameters": ("ppo", {"sequences_per_micro_batch": 3, "zero_stage": 3}),
    **{
        name: (name, CUT | {"sequences_per_micro_batch": 2, "zero_stage": stage})
        for name, stage in zip(
            [name for name in ON_ONE_RANK if name.startswith("objective ")],
            itertools.cycle((0, 2)),
            strict=False,
        )
    },
    **{
        f"shared {name}": (
            f"shared {name}",
            {
                "sequence_parallel_size": 2,
                "sequences_per_micro_batch": 1 if name == "rank" else 4,
                "zero_stage": min(stage, 3),
            },
        )
        for stage, name in enumerate(SEQUENCES_SHARED)
    },
    "trees": ("ppo", {"layout": "tree", "tokens_per_micro_batch": 100}),
    "reward model": ("shared reward model", CUT | {"zero_stage": 2}),
    "rows of threads": ("threads ppo", {"layout": "packed", "tokens_per_micro_batch": 300, "zero_stage": 2}),
    **{
        f"trees of threads {name}": (
            f"threads {name}",
            {
                "layout": "tree",
                "tokens_per_micro_batch": 300,
                "zero_stage": stage % 4,
                "gradient_checkpointing": stage > 1,
            },
        )
        for stage, name in enumerate(THREADS)
    },
}

KEEPING_RULES = {
    # Each rank keeps the tokens of the rows that it runs, and reads them from a file of the first rank.
    # A reference that scores answers ahead has scored some.
    "critic": {"gae": True, "epochs": 2},
    "pairs": {"objective": {"type": "dpo_positive"}, "advantage_normalisation": "none"},
    "threads": {"threads": True, "layout": "packed", "zero_stage": 2},
    "ahead": {"objective": {"type": "ppo", "kl_coef": 0.1}, "reference_scores": "while_sampling"},
}


@pytest.fixture(scope="module")
def by_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict, dict]]:
    return run_updates(tmp_path_factory.mktemp("one"), ON_ONE_RANK)


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict, dict]]:
    keeping_settings = {
        name: {"sequences_per_micro_batch": 3} | changes for name, changes in KEEPING_RULES.items()
    }
    changes = (
        {
            f"part {name}": rank_settings | {"stored": True, "heard": True}
            for name, rank_settings in keeping_settings.items()
        }
        | {
            f"all {name}": rank_settings | {"keeps_all": True}
            for name, rank_settings in keeping_settings.items()
        }
        | {
            name: ON_ONE_RANK[name_on_one_rank] | cut
            for name, (name_on_one_rank, cut) in ON_TWO_RANKS.items()
        }
    )
    return run_updates(tmp_path_factory.mktemp("two"), changes, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_make_the_same_update_as_one(name, by_one_rank, by_two_ranks):
    """Covers each objective, also where a rank has no correct answer, and each stage of ZeRO.

    ZeRO reduces in every backward pass, so ranks with unequal work must not drift apart. Ranks that share
    each sequence (Ulysses) are tested with a critic, with sequences of one row kept apart, and with losses of
    whole answers. Answers with threads, one of which has 50, run row by row and as prefix trees that are cut.
    """
    assert_same_update(by_one_rank[ON_TWO_RANKS[name][0]], by_two_ranks[name])


def test_every_registered_objective_is_tested_on_two_ranks():
    assert {objective["type"] for objective in OBJECTIVES.values()} == set(Objective.parts_by_name())


@pytest.mark.parametrize("name", KEEPING_RULES)
def test_ranks_that_keep_only_their_rows_make_the_bits_of_ranks_that_keep_everything(name, by_two_ranks):
    """Covers scoring before training, two epochs with a critic, pairs whose rows come twice, threads, and a
    reference that scored some answers ahead."""
    (weights, metrics), (all_weights, all_metrics) = (
        by_two_ranks[f"{kind} {name}"] for kind in ("part", "all")
    )
    assert weights.keys() == all_weights.keys()
    assert all((tensor == all_weights[name]).all() for name, tensor in weights.items())
    timing_names = {SHARE_AHEAD_METRIC, WAITING_SECONDS_METRIC}
    shares = [metrics_of_rank.get(SHARE_AHEAD_METRIC, 0.0) for metrics_of_rank in (metrics, all_metrics)]
    assert (0 < shares[0] < 1, shares[1]) == (name == "ahead", 0)
    assert all(
        (metrics_of_rank.get(WAITING_SECONDS_METRIC, 0.0) > 0) == (name == "ahead")
        for metrics_of_rank in (metrics, all_metrics)
    )
    assert {metric: value for metric, value in metrics.items() if metric not in timing_names} == {
        metric: value for metric, value in all_metrics.items() if metric not in timing_names
    }
