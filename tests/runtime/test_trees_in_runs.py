"""Whole runs of answers that grow out of each other: what is trained, and that a killed one goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_engine import FakeEngine
from tests.runtime import in_process
from tests.runtime.in_process import TASK, FakeSettings, directory_of, raises_after, sampled_requests, train
from treetune.inference.base import Engine, EngineError, EngineLaunch
from treetune.inference.settings import Engines
from treetune.models.policy_files import read_policy
from treetune.models.tokenizer import character_tokenizer
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime import generation
from treetune.runtime.base import PolicyIteration
from treetune.tree import trees_of
from treetune_lab.trees.branching import AtStates, LeastSure
from treetune_lab.trees.credit import TreeCredit
from treetune_lab.trees.rollout import TreeRollout
from treetune_lab.values.states import EveryNTokens


@dataclass(frozen=True, kw_only=True)
class OfTheModel(FakeSettings):
    """Engines that sample from the model that the trainer begins with."""

    def start(self, launch: EngineLaunch) -> Engine:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(launch.weights).eval()

        def probabilities(token_ids: tuple[int, ...], version: int) -> list[float]:
            with torch.no_grad():
                logits = model(torch.tensor([token_ids])).logits[0, -1].double()
            return logits.softmax(-1).tolist()

        tokenizer = character_tokenizer(TASK.alphabet(), 64)
        engine = FakeEngine(probabilities, tokenizer.eos_token_id)
        self.engines.append(engine)
        return engine


AT_STATES = AtStates(states=EveryNTokens(tokens=3), ways=(2, 2))


def small(folder: Path, **changes: Any) -> PolicyIteration:
    rollout = TreeRollout(samples=2, max_tokens=12, branching=AT_STATES, unfinished_reward=1.0)
    return in_process.small(folder, FakeSettings(), **{"rollout": rollout, "credit": TreeCredit()} | changes)


def weights(config: PolicyIteration) -> bytes:
    return (directory_of(config).checkpoint(2) / "policy" / "model.safetensors").read_bytes()


def test_what_was_sampled_is_stored_as_trees_and_each_of_its_tokens_is_trained_once(tmp_path: Path) -> None:
    config = small(tmp_path)
    assert isinstance(config.rollout, TreeRollout)
    sure = replace(config.rollout, branching=LeastSure(positions=2, ways=1, rounds=2))
    for part in (config, replace(config, rollout=sure, experiment_name="sure")):
        for folder in sorted(train(part).path.glob("iterations/*")):
            trees = trees_of(read_trajectories(folder / "trajectories.arrow"))
            rows = read_episodes(folder / "episodes.arrow")
            sampled = sum(len(node.segment.token_ids) for tree in trees for node in tree.nodes)
            assert sum(int(row.trained.sum()) for row in rows) == sampled
            assert len(rows) == sum(len(tree.leaves) for tree in trees) > len(trees) * 2
    (first, _) = directory_of(config).read_metrics()
    assert 0 < first["tree/shared"] < 1


@pytest.mark.parametrize("killed_after", [1, 5, 17])
def test_a_run_that_ended_anywhere_goes_on_to_the_same_weights_and_samples_nothing_twice(
    killed_after: int, tmp_path: Path
) -> None:
    whole = small(tmp_path / "whole")
    train(whole)
    broken = small(tmp_path / "broken")
    failing = Engines(policy=replace(broken.engines.policy, fail_after=killed_after))
    with pytest.raises(EngineError):
        train(replace(broken, engines=failing))
    train(broken)
    assert weights(broken) == weights(whole)
    assert sampled_requests(broken) == sampled_requests(whole) > killed_after


@pytest.mark.parametrize("place", ["write_trajectories", "write_episodes"])
def test_a_run_that_was_killed_between_phases_reads_its_trees_again(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, struck = small(tmp_path / "whole"), small(tmp_path / "struck")
    train(whole)
    with monkeypatch.context() as patch:
        patch.setattr(generation, place, raises_after(getattr(generation, place), 1, RuntimeError("struck")))
        with pytest.raises(RuntimeError, match="struck"):
            train(struck)
    train(struck)
    assert weights(struck) == weights(whole)


def test_the_update_is_that_of_rows_run_one_by_one_where_shared_tokens_are_computed_once(
    tmp_path: Path,
) -> None:
    found = []
    for layout in ("padded", "tree"):
        config = small(tmp_path / layout)
        train(replace(config, trainer=replace(config.trainer, layout=layout), iterations=1))
        policy, _ = read_policy(directory_of(config).checkpoint(1) / "policy")
        found.append(np.concatenate([policy[name].float().numpy().ravel() for name in sorted(policy)]))
    assert np.abs(found[0] - found[1]).max() < 1e-6


@pytest.mark.parametrize("layout", ["padded", "tree"])
def test_the_trainer_gives_each_token_the_log_prob_that_it_was_sampled_with(
    layout: str, tmp_path: Path
) -> None:
    config = small(tmp_path, engines=Engines(policy=OfTheModel()), iterations=1)
    directory = train(replace(config, trainer=replace(config.trainer, layout=layout, epochs=2)))
    (row,) = directory.read_metrics()
    assert row["tree/shared"] > 0
    assert row["engine/logprob_gap_max"] < 1e-4
