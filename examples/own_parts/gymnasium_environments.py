"""Environments of Gymnasium, and of GEM, which has the same interface."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from treetune import Again, Environment, Finding, Game, Problem, Turn


@Environment.register("gymnasium")
@dataclass(frozen=True, kw_only=True)
class Gymnasium(Game):
    """An environment of Gymnasium's (the package `gymnasium`). A level is the seed that it is reset with, and
    its first observation is the prompt. Where its actions are texts, the policy's turn is one. Where rewards
    for a success don't add up to 1, no answer counts as correct.
    """

    id: str
    """The name that it is registered under."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of its constructor."""
    instructions: str = ""
    """The beginning of the prompt."""
    modules: tuple[str, ...] = ()
    """Modules that are imported first: those that register your own environments."""
    actions: tuple[str, ...] = ()
    """Words for the actions 0, 1, …, where these are numbers."""
    observe: Literal["observation", "rendered"] = "observation"
    """Whether the policy reads the observation, or the text of `render` (``arguments: {render_mode:
    'ansi'}``)."""
    again: Again = "replay"  # type: ignore[misc]  # only who wrote it knows
    """Whether the same seed and actions give the same answers (``replay``), or its object is pickled after
    each turn (``copy``), or neither (``never``)."""

    quick: ClassVar[bool] = False
    library: ClassVar[str] = "gymnasium"

    def check(self, experiment: Any) -> Iterable[Finding]:
        if importlib.util.find_spec(self.library) is None:
            what = f"the package {self.library!r} isn't installed, which the environment {self.id!r} needs"
            yield Finding(what, level="missing")

    def prepare(self) -> None:
        for name in (self.library, *self.modules):
            importlib.import_module(name)

    def problem(self, id: str, level: int) -> Problem:
        self.prepare()
        _, observation = self.begun(level)
        return Problem(id=id, prompt=self.instructions + observation, gold=self.id, data={"level": level})

    def reset(self, problem: Problem, seed: int) -> Any:
        return self.begun(problem.data["level"])[0]

    def step(self, state: Any, action: str) -> Turn:
        read: Any = action
        if self.actions:
            if action.strip() not in self.actions:
                return Turn(f"There is no action {action.strip()!r}.")
            read = self.actions.index(action.strip())
        observation, reward, terminated, truncated, info = state.step(read)
        return Turn(self.as_text(state, observation, info), bool(terminated or truncated), float(reward))

    def begun(self, level: int) -> tuple[Any, str]:
        """Returns the environment at the beginning of a level, and the text that it begins with."""
        made = importlib.import_module(self.library).make(self.id, **self.arguments)
        observation, info = made.reset(seed=level)
        return made, self.as_text(made, observation, info)

    def as_text(self, environment: Any, observation: Any, info: Mapping[str, Any]) -> str:
        """Returns the text that the policy reads."""
        return str(environment.render()) if self.observe == "rendered" else str(observation)


@Environment.register("gem")
@dataclass(frozen=True, kw_only=True)
class Gem(Gymnasium):
    """An environment of GEM's (the package `gem-llm`, Liu et al., arXiv:2510.01051). They share one generator
    of chances in a process, so that they are copied and not played again."""

    again: Again = "copy"  # type: ignore[misc]

    library: ClassVar[str] = "gem"

    def as_text(self, environment: Any, observation: Any, info: Mapping[str, Any]) -> str:
        suffix = info.get("suffix")
        return f"{observation}\n{suffix}" if suffix else str(observation)
