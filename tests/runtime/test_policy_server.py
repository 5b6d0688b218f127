"""The server has the weights that somebody samples from, and proves it; what it samples is counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.runtime.in_process import FakeSettings, directory_of, small, train
from treetune.inference.base import Completion, EngineError, Tolerance
from treetune.models.sources import TinyModel
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.runtime import commands
from treetune.runtime.base import Evaluation, EvaluationSet
from treetune.runtime.policy_server import PolicyServer, stored_logprobs
from treetune.runtime.session import Session

SETS = Evaluation(sets=(EvaluationSet(split="validation", problems=4),))


@dataclass(frozen=True, kw_only=True)
class Strict(FakeSettings):
    """The fake engine's tokens are all equally likely, which no checkpoint's are."""

    def tolerance(self, device: str) -> Tolerance:
        return Tolerance(1e-4, 1e-4)


def test_an_engine_that_samples_from_other_weights_than_the_checkpoints_measures_nothing(
    tmp_path: Path,
) -> None:
    train(small(tmp_path))
    with pytest.raises(EngineError, match="canary gap"):
        commands.run_evaluation(small(tmp_path, evaluation=SETS, engine=Strict()), {})
    assert not list(directory_of(small(tmp_path)).path.glob("evaluations/*/*/summary.json"))


def test_stored_weights_are_scored_as_the_model_scores(tmp_path: Path) -> None:
    config = small(tmp_path)
    directory = train(config)
    policy = directory.checkpoint(2) / "policy"
    (found,) = stored_logprobs(policy, 0.5, [((3, 4, 5), (6, 7))])
    assert isinstance(config.model, TinyModel)
    model = config.model.load_model(0, config.task.alphabet)
    from treetune.models.policy_files import read_policy

    model.load_state_dict(read_policy(policy)[0], strict=False)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[3, 4, 5, 6, 7]])).logits[0] / 0.5
    assert found == pytest.approx(
        [float(logits[2].log_softmax(-1)[6]), float(logits[3].log_softmax(-1)[7])], abs=1e-5
    )


def test_offered_weights_go_to_the_engine_when_somebody_samples_and_once(tmp_path: Path) -> None:
    config = small(tmp_path)
    with Session.open(config, {}) as session, PolicyServer.start(session, trains=True) as server:
        from treetune.runtime.training import make_trainer

        trainer = make_trainer(session)
        (engine,) = config.engines.policy.engines  # type: ignore[attr-defined]
        server.offer(trainer, 1)
        server.offer(trainer, 2)
        assert engine.loaded == []
        server.ready()
        server.ready()
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
