"""The commands beside the loop, and the server that they share: it has the weights that somebody samples
from, and proves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs.standing_program import SETS
from tests.support.small_run import (
    MODEL,
    FakeSettings,
    directory_of,
    engines_of,
    small,
    train,
    trained,
    weights_of,
)
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.base import Tolerance
from treetune.engine.requests import Completion
from treetune.engine.settings import InProcessSettings
from treetune.exceptions import EngineError, FolderRefused
from treetune.models.policy_files import read_policy
from treetune.processes import lifetime
from treetune.runtime import commands, policy_server
from treetune.runtime.base import Checkpoints
from treetune.runtime.policy_server import PolicyServer, compute_stored_logprobs
from treetune.runtime.session import Session
from treetune.runtime.training import make_trainer
from treetune.vocabulary import token_array

PLAIN = {"type": "policy_iteration", "trainer": {"seed": 1}}


def test_episodes_sampled_ahead_are_those_that_the_run_would_sample(tmp_path: Path) -> None:
    """From the weights of the newest checkpoint, as the engine samples from the model here."""
    alone, ahead = (small(tmp_path / name, InProcessSettings(), iterations=3) for name in ("alone", "ahead"))
    episodes = train(alone).iteration_folder(2) / "episodes.arrow"
    train(small(tmp_path / "ahead", InProcessSettings()))
    commands.only_generate_episodes(ahead, PLAIN)
    sampled = directory_of(ahead).iteration_folder(2) / "episodes.arrow"
    assert sampled.read_bytes() == episodes.read_bytes()
    assert directory_of(ahead).checkpoints() == [1, 2], "nothing is trained"
    written = sampled.stat().st_mtime_ns
    train(ahead)
    assert weights_of(ahead) == weights_of(alone)
    assert sampled.stat().st_mtime_ns == written, "the run trains on what is there"


def test_clean_up_checkpoints_deletes_what_the_configuration_does_not_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(small(tmp_path, iterations=4))
    assert directory.checkpoints() == [1, 2, 3, 4]
    assert directory.resumable_checkpoints() == [3, 4], "the older one is for when the newest is damaged"
    commands.clean_up_checkpoints(small(tmp_path, checkpoints=Checkpoints(), iterations=4), {})
    assert "deleted 2 checkpoints, kept [3, 4]" in capsys.readouterr().out
    assert directory.checkpoints() == directory.resumable_checkpoints() == [3, 4]


def test_a_finished_run_is_known_and_not_held_against_a_smaller_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small(tmp_path))
    commands.check_finished(small(tmp_path), {})
    with pytest.raises(FolderRefused, match=r"2 of 3 iterations are done.*`treetune run` continues it"):
        commands.check_finished(small(tmp_path, iterations=3), {})
    with pytest.raises(ValueError, match="0 of 2 iterations"):
        commands.check_finished(small(tmp_path, experiment_name="another"), {})

    def refuse(config: object) -> None:
        raise ValueError("it doesn't fit")

    monkeypatch.setattr(commands, "refuse_what_does_not_fit", refuse)
    for name in ("exit_on_signals", "end_with_launcher"):  # the test's process keeps its own
        monkeypatch.setattr(lifetime, name, lambda: None)
    again = small(tmp_path)
    commands.run("run_iteration_loop", again, PLAIN)
    assert "is finished: all 2 iterations are done" in capsys.readouterr().out
    assert not engines_of(again)
    with pytest.raises(ValueError, match="it doesn't fit"):
        commands.run("run_iteration_loop", small(tmp_path, iterations=3), PLAIN)


# The server


@dataclass(frozen=True, kw_only=True)
class Strict(FakeSettings):
    """The fake engine's tokens are all equally likely, which no checkpoint's are."""

    def tolerance(self, device: str) -> Tolerance:
        return Tolerance(1e-4, 1e-4)


def test_an_engine_that_samples_from_other_weights_than_the_checkpoints_measures_nothing(
    tmp_path: Path,
) -> None:
    directory = train(small(tmp_path))
    with pytest.raises(EngineError, match="canary gap"):
        commands.run_evaluation(small(tmp_path, evaluation=SETS, engine=Strict()), {})
    assert not list(directory.path.glob("evaluations/*/*/summary.json"))


@pytest.mark.parametrize("limit", [policy_server.SCORED_WITH_BYTES, 30_000])
def test_stored_weights_are_scored_once_for_all_ranks_as_the_model_scores(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank has a server, and the servers of both sampled one answer alike."""
    config = trained(small(tmp_path))
    policy = directory_of(config).checkpoint_folder(2) / "policy"
    samples = [((3, 4, 5), (6, 7)), ((4,), (5, 6, 8)), ((3, 4, 5), (9,))]
    own = [samples[:2], samples[1:]]
    scored: list[Any] = []
    models: list[torch.nn.Module] = []
    load = AutoModelForCausalLM.from_pretrained

    def loaded(*arguments: Any, **options: Any) -> torch.nn.Module:
        models.append(load(*arguments, **options))
        return models[-1]

    def scores_of(rank: int) -> list[list[float]]:
        def from_first(name: str, value: Any) -> Any:
            scored.append(value)
            return scored[0]

        ranks = SimpleNamespace(is_first=rank == 0, exchange=lambda name, pairs: own, from_first=from_first)
        pairs = [(token_array(prompt), token_array(answer)) for prompt, answer in own[rank]]
        return compute_stored_logprobs(ranks, policy, 0.5, pairs)  # type: ignore[arg-type]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(policy_server, "SCORED_WITH_BYTES", limit)
    found = scores_of(0) + scores_of(1)
    (held,) = ([weight for weight in one.parameters() if weight.device.type == "cpu"] for one in models)
    assert sum(weight.nbytes for weight in held) <= limit, "others stay in their files"
    assert list(scored[0]) == samples and scored[1] == {}
    model = MODEL.load_model(0, config.task.alphabet)
    model.load_state_dict(read_policy(policy)[0], strict=False)
    for (prompt, answer), logprobs in zip(own[0] + own[1], found, strict=True):
        with torch.no_grad():
            logprobs_TV = (model.eval()(torch.tensor([[*prompt, *answer]])).logits[0] / 0.5).log_softmax(-1)
        expected = [float(logprobs_TV[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]
        assert logprobs == pytest.approx(expected, abs=1e-5)


def test_offered_weights_go_to_the_engine_when_somebody_samples_and_once(tmp_path: Path) -> None:
    config = small(tmp_path)
    with Session.open(config, {}) as session, PolicyServer.start(session, trains=True) as server:
        trainer = make_trainer(session)
        (engine,) = engines_of(config)
        server.offer(trainer, 1)
        server.offer(trainer, 2)
        assert engine.loaded == []
        server.wait_until_ready()
        server.wait_until_ready()
        assert [version for _, version in engine.loaded] == [2]


@pytest.mark.parametrize("credit", [None, MonteCarlo(samples=2)])
def test_sampled_tokens_per_second_are_those_that_the_engine_sampled(
    credit: MonteCarlo | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rollout and credit alike, and none that was put into an answer by others."""
    sampled: list[int] = []
    real = Completion.__init__

    def counting(self: Completion, *arguments: object, **named: object) -> None:
        real(self, *arguments, **named)  # type: ignore[arg-type]
        sampled.append(len(self.token_ids))

    monkeypatch.setattr(Completion, "__init__", counting)
    config = small(tmp_path, iterations=1, **({} if credit is None else {"credit": credit}))
    (row,) = train(config).read_metrics()
    seconds = row["seconds/generation"] + (row["seconds/credit"] if credit else 0.0)
    assert row["engine/tokens_per_second"] * seconds == pytest.approx(sum(sampled), rel=1e-3)
