"""Environments of Gymnasium, and of GEM, which has the same interface, as environments of treetune."""

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
    """An environment of the package `gymnasium`. Each problem has a level, which is the seed of its `reset`.
    The prompt is the first observation. The policy's turn is the action, or names one of `actions`. An answer
    counts as correct if its rewards add up to 1 or more.
    """

    id: str
    """The name under which it is registered."""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of its constructor."""
    instructions: str = ""
    """The text before the first observation."""
    modules: tuple[str, ...] = ()
    """Modules that are imported first: those that register your own environments."""
    actions: tuple[str, ...] = ()
    """The words for the actions 0, 1, …. Leave it out if the environment's actions are texts."""
    observe: Literal["observation", "rendered"] = "observation"
    """Whether the policy reads the observation, or the text of `render` (``arguments: {render_mode:
    'ansi'}``)."""
    again: Again = "replay"  # type: ignore[misc]  # each environment needs its own
    """How credit continues an answer from the middle. ``replay``: its actions are played again, which needs
    the same observations for the same seed and actions. ``copy``: the object is pickled after each turn.
    ``never``: not at all."""

    quick: ClassVar[bool] = False
    library: ClassVar[str] = "gymnasium"

    def check(self, experiment: Any) -> Iterable[Finding]:
        if importlib.util.find_spec(self.library) is None:
            yield Finding(
                f"the package {self.library!r} isn't installed, which the environment {self.id!r} needs",
                level="missing",
            )

    def prepare(self) -> None:
        for name in (self.library, *self.modules):
            importlib.import_module(name)

    def problem(self, id: str, level: int) -> Problem:
        self.prepare()
        _, observation = self.start(level)
        return Problem(id=id, prompt=self.instructions + observation, gold=self.id, data={"level": level})

    def reset(self, problem: Problem, seed: int) -> Any:
        environment, _ = self.start(problem.data["level"])
        return environment

    def step(self, state: Any, action: str) -> Turn:
        environment_action: Any = action
        if self.actions:
            word = action.strip()
            if word not in self.actions:
                return Turn(f"There is no action {word!r}.")
            environment_action = self.actions.index(word)
        observation, reward, terminated, truncated, info = state.step(environment_action)
        text = self.write_observation(state, observation, info)
        return Turn(text, done=bool(terminated or truncated), reward=float(reward))

    def start(self, level: int) -> tuple[Any, str]:
        """Returns a new environment at the start of a level, and the text of its first observation."""
        library = importlib.import_module(self.library)
        environment = library.make(self.id, **self.arguments)
        observation, info = environment.reset(seed=level)
        return environment, self.write_observation(environment, observation, info)

    def write_observation(self, environment: Any, observation: Any, info: Mapping[str, Any]) -> str:
        """Returns the text that the policy reads."""
        return str(environment.render()) if self.observe == "rendered" else str(observation)


@Environment.register("gem")
@dataclass(frozen=True, kw_only=True)
class Gem(Gymnasium):
    """An environment of GEM (the package `gem-llm`, Liu et al., arXiv:2510.01051). All environments in a
    process share a random generator, so the same actions need not give the same observations: they are
    copied, not replayed."""

    again: Again = "copy"  # type: ignore[misc]

    library: ClassVar[str] = "gem"

    def write_observation(self, environment: Any, observation: Any, info: Mapping[str, Any]) -> str:
        suffix = info.get("suffix")
        return f"{observation}\n{suffix}" if suffix else str(observation)
