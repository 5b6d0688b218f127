"""Engine and trainer have a GPU's memory in turn, from the start on, and the run's results don't know it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.in_process import FakeSettings, directory_of, small, train
from treetune.inference.base import Engine, EngineLaunch
from treetune.runtime.base import Checkpoints, ChooseCheckpoint, Evaluation, EvaluationSet
from treetune.trainers.core import PolicyTrainer


@dataclass(frozen=True, kw_only=True)
class Sleeping(FakeSettings):
    """Engines that share their memory; `happened` tells who had it when."""

    happened: list[str]

    def start(self, launch: EngineLaunch) -> Engine:
        engine = super().start(launch)
        happened, sample, load = self.happened, engine.generate, engine.load

        @contextmanager
        def asleep() -> Iterator[None]:
            happened.append("engine sleeps")
            yield
            happened.append("engine may wake")

        def noted(what: str, do: Any) -> Any:
            def doing(*given: Any, **named: Any) -> Any:
                happened.append(what)
                return do(*given, **named)

            return doing

        engine.sleeps = True
        engine.wait_settled = lambda: happened.append("engine is settled")  # type: ignore[method-assign]
        engine.asleep = asleep  # type: ignore[method-assign,assignment]
        engine.generate = noted("engine samples", sample)  # type: ignore[method-assign]
        engine.load = noted("engine loads", load)  # type: ignore[method-assign]
        return engine


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real_init = PolicyTrainer.__init__

    def made(self: PolicyTrainer, *given: Any, **named: Any) -> None:
        seen.append("trainer: made")
        real_init(self, *given, **named)

    monkeypatch.setattr(PolicyTrainer, "__init__", made)
    for method in ("offload", "reload", "_step", "save", "load"):
        real = getattr(PolicyTrainer, method)

        def noted(self: PolicyTrainer, *given: Any, _real: Any = real, _name: str = method) -> Any:
            seen.append(f"trainer: {_name}")
            return _real(self, *given)

        monkeypatch.setattr(PolicyTrainer, method, noted)
    return seen


CHOICE = {
    "evaluation": Evaluation(sets=(EvaluationSet(split="validation", problems=2),)),
    "choose_checkpoint": ChooseCheckpoint(set="validation", rule="best"),
}


@pytest.mark.parametrize("changes", [{}, CHOICE], ids=["plain", "choosing"])
def test_whoever_needs_the_memory_has_it_alone(
    tmp_path: Path, happened: list[str], changes: dict[str, Any]
) -> None:
    config = small(tmp_path, engine=Sleeping(happened=happened), checkpoints=Checkpoints(every=1), **changes)
    train(config)
    assert happened[:4] == ["engine is settled", "engine sleeps", "trainer: made", "trainer: offload"]
    asleep, aside = False, True
    for what in happened:
        if what == "engine sleeps":
            asleep = True
        elif what == "engine may wake":
            asleep = False
        elif what in ("trainer: reload", "trainer: made"):
            aside = False
        elif what == "trainer: offload":
            aside = True
        elif what in ("engine samples", "engine loads"):
            assert aside and not asleep, what
        elif what.startswith("trainer: "):
            assert asleep and not aside, what
    assert {"engine samples", "engine loads", "trainer: _step", "trainer: save"} <= set(happened)


def test_a_run_that_goes_on_loads_its_trainer_while_the_engine_sleeps(
    tmp_path: Path, happened: list[str]
) -> None:
    train(small(tmp_path, iterations=1))
    happened.clear()
    train(small(tmp_path, engine=Sleeping(happened=happened)))
    before = happened[: happened.index("trainer: load")]
    assert before[-2:] == ["engine sleeps", "trainer: reload"]


def test_sharing_memory_changes_no_number(tmp_path: Path, happened: list[str]) -> None:
    alone, shared = small(tmp_path / "alone"), small(tmp_path / "shared", engine=Sleeping(happened=happened))
    train(alone)
    train(shared)

    def learnt(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k.startswith(("train/", "episodes/"))} for row in rows]

    assert learnt(directory_of(shared).read_metrics()) == learnt(directory_of(alone).read_metrics())
