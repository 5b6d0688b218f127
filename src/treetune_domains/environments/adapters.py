"""Environments that others have written for Gymnasium's interface, as games: `reset` and `step`, in text."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from treetune.vocabulary import Problem
from treetune_domains.environments.base import Again, Environment, Game, Turn


@dataclass(frozen=True, kw_only=True)
class Adapted(Game):
    """What adapters have in common. A level is the seed that the environment is reset with, and what that
    shows is the prompt, behind the `instructions`.

    `modules` are imported first: those that register environments of one's own. Where rewards for a success
    don't add up to 1, no answer counts as correct.
    """

    id: str
    """The name that it is registered under."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Given to it where it is made."""
    instructions: str = ""
    modules: tuple[str, ...] = ()
    again: Again = "replay"  # type: ignore[misc]  # who adapts one has to say it
    """Whether the same seed and actions give the same answers (``replay``), or its object is pickled after
    each turn (``copy``), or neither (``never``)."""

    quick: ClassVar[bool] = False
    library: ClassVar[str]

    def missing(self) -> Sequence[str]:
        if importlib.util.find_spec(self.library) is None:
            return [f"the package {self.library!r} isn't installed, which the environment {self.id!r} needs"]
        return ()

    def prepare(self) -> None:
        for name in (self.library, *self.modules):
            importlib.import_module(name)

    def problem(self, id: str, level: int) -> Problem:
        self.prepare()
        _, shown = self._begun(level)
        return Problem(id=id, prompt=self.instructions + shown, gold=self.id, data={"level": level})

    def reset(self, problem: Problem, seed: int) -> Any:
        return self._begun(problem.data["level"])[0]

    def step(self, state: Any, action: str) -> Turn:
        meant = self.read(state, action)
        if meant is None:
            return Turn(f"There is no action {action.strip()!r}.")
        observation, reward, terminated, truncated, info = state.step(meant)
        return Turn(self.shown(state, observation, info), bool(terminated or truncated), float(reward))

    def _begun(self, level: int) -> tuple[Any, str]:
        made = importlib.import_module(self.library).make(self.id, **self.arguments)
        observation, info = made.reset(seed=level)
        return made, self.shown(made, observation, info)

    def read(self, environment: Any, action: str) -> Any:
        """The action that the policy's text stands for; None for none."""
        return action

    def shown(self, environment: Any, observation: Any, info: Mapping[str, Any]) -> str:
        """What the policy reads."""
        return str(observation)


@Environment.register("gymnasium")
@dataclass(frozen=True, kw_only=True)
class Gymnasium(Adapted):
    """An environment of Gymnasium's (the package `gymnasium`). Where its actions are texts, the policy's turn
    is one; where they are numbers, `actions` are the words for 0, 1, … in their order. With ``rendered``, the
    policy reads what `render` draws in text (``arguments: {render_mode: 'ansi'}``)."""

    actions: tuple[str, ...] = ()
    observe: Literal["observation", "rendered"] = "observation"
    """What the policy reads of it."""

    library: ClassVar[str] = "gymnasium"

    def read(self, environment: Any, action: str) -> Any:
        if not self.actions:
            return action
        word = action.strip()
        return self.actions.index(word) if word in self.actions else None

    def shown(self, environment: Any, observation: Any, info: Mapping[str, Any]) -> str:
        return str(environment.render()) if self.observe == "rendered" else str(observation)


@Environment.register("gem")
@dataclass(frozen=True, kw_only=True)
class Gem(Adapted):
    """An environment of GEM's (the package `gem-llm`, Liu et al., arXiv:2510.01051). They share one generator
    of chances in a process, so that they are copied and not played again."""

    again: Again = "copy"  # type: ignore[misc]

    library: ClassVar[str] = "gem"

    def shown(self, environment: Any, observation: Any, info: Mapping[str, Any]) -> str:
        suffix = info.get("suffix")
        return f"{observation}\n{suffix}" if suffix else str(observation)
