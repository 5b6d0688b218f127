"""Engine and trainer have a GPU's memory in turn, from the start on, and the run's results don't know it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import FakeSettings, computed, small, train, trained
from treetune.engine.base import Engine, EngineLaunch
from treetune.runtime.base import Checkpoints, ChooseCheckpoint, Evaluation, EvaluationSet
from treetune.trainer.core import PolicyTrainer


@dataclass(frozen=True, kw_only=True)
class Sleeping(FakeSettings):
    """Engines that share their memory; `happened` tells who had it when."""

    happened: list[str]

    def start(self, launch: EngineLaunch) -> Engine:
        engine: Any = super().start(launch)

        @contextmanager
        def asleep(*, keep_weights: bool = True) -> Iterator[None]:
            self.happened.append("engine sleeps" if keep_weights else "engine drops its weights")
            yield
            self.happened.append("engine may wake")

        engine.sleeps = True
        engine.wait_settled = lambda: self.happened.append("engine is settled")
        engine.asleep = asleep
        engine.generate = noted(self.happened, "engine samples", engine.generate)
        engine.load = noted(self.happened, "engine loads", engine.load)
        return engine


def noted(happened: list[str], what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def noting(*given: Any, **named: Any) -> Any:
        happened.append(what)
        return function(*given, **named)

    return noting


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who did what, in its order."""
    seen: list[str] = []
    for method in ("__init__", "offload", "reload", "take_step", "save", "load"):
        what = "trainer: made" if method == "__init__" else f"trainer: {method}"
        monkeypatch.setattr(PolicyTrainer, method, noted(seen, what, getattr(PolicyTrainer, method)))
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
    asleep, aside, whole = False, True, True
    for what in happened:
        if what in ("engine sleeps", "engine drops its weights"):
            asleep = True
            whole = whole and what == "engine sleeps"
        elif what == "engine may wake":
            asleep = False
        elif what in ("trainer: reload", "trainer: made"):
            aside = False
        elif what == "trainer: offload":
            aside = True
        elif what in ("engine samples", "engine loads"):
            whole = whole or what == "engine loads"
            assert aside and not asleep and whole, what
        elif what.startswith("trainer: "):
            assert asleep and not aside, what
    assert {"engine samples", "engine loads", "trainer: take_step", "trainer: save"} <= set(happened)
    steps = [number for number, what in enumerate(happened) if what == "trainer: take_step"]
    assert happened[steps[0] - 2] == "engine drops its weights", "others follow"


def test_a_run_that_goes_on_loads_its_trainer_while_the_engine_sleeps(
    tmp_path: Path, happened: list[str]
) -> None:
    train(small(tmp_path, iterations=1))
    happened.clear()
    train(small(tmp_path, engine=Sleeping(happened=happened)))
    before = happened[: happened.index("trainer: load")]
    assert before[-2:] == ["engine sleeps", "trainer: reload"]


def test_sharing_memory_changes_no_number(tmp_path: Path, happened: list[str]) -> None:
    alone = trained(small(tmp_path / "alone"))
    shared = trained(small(tmp_path / "shared", engine=Sleeping(happened=happened)))
    assert computed(shared) == computed(alone)
