"""The checkpoints and iterations of an experiment that an analyzer looks at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt
from typing_extensions import override

from treetune.contracts import Finding, Need, SampledAnswers
from treetune.runtime.analysis import Analyzer
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory

T = TypeVar("T")

Chosen = tuple[Annotated[int, Ge(0)], ...] | Literal["last", "all"]
"""Numbers of finished iterations, or the last there is, or all of them."""


@dataclass(frozen=True, kw_only=True)
class OfCheckpoints(Analyzer):
    """An analyzer that needs weights; one that `judges_critic` needs the critics of its checkpoints as well,
    in an experiment that trains one."""

    name: str | None = None
    checkpoints: Chosen = "last"
    """The checkpoints to look at: ``last``, ``all``, or a list of their numbers; 0 are the start weights."""
    at_most: Annotated[int, Gt(0)] = 10
    """The most of ``all`` that are taken, as evenly as can be, the first and the last among them."""
    seed: Annotated[int, Ge(0)] = 0
    """Decides on everything that the analysis draws."""

    judges_critic = False

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        if self.needs_engine:
            yield from unanswered(experiment)
        yield from never_there("checkpoints", self.checkpoints, experiment.iterations)

    @override
    def points(self, config: PolicyIteration, directory: ExperimentDirectory) -> list[int]:
        kept = directory.checkpoints()
        remedy = (
            f"there are {_listed([0, *kept])}. checkpoints: {{every: 5, keep_every: 5}} in the experiment"
            " keeps one every five iterations"
        )
        if self.checkpoints == "last" and not kept:
            raise ValueError(
                f"{directory.path} has no checkpoint: run_iteration_loop makes them (checkpoints: [0] looks"
                " at the start weights)"
            )
        what = f"a checkpoint in {directory.path}"
        points = choose(self.checkpoints, [0, *kept], self.at_most, what, remedy)
        if self.judges_critic and config.credit.needs_critic:
            for point in points:
                require_critic(config, directory, point)
        return points


@dataclass(frozen=True, kw_only=True)
class OfIterations(Analyzer):
    """An analyzer that reads what iterations left. Iteration i was sampled by the weights after i
    iterations: the first is 0."""

    name: str | None = None
    iterations: Chosen = "all"
    """The iterations to look at: ``all``, ``last``, or a list of their numbers from 0 on."""
    at_most: Annotated[int, Gt(0)] = 10
    """The most of ``all`` that are taken, as evenly as can be."""

    file = "trajectories.arrow"

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        if self.file != "trajectories.arrow":
            return ()
        return (Need(SampledAnswers(), "it looks at answers that iterations left", "leave the analysis out"),)

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        yield from never_there("iterations", self.iterations, experiment.iterations - 1)

    @override
    def points(self, config: PolicyIteration, directory: ExperimentDirectory) -> list[int]:
        what = f"an iteration with {self.file} in {directory.path}"
        kept = self.kept(directory)
        return choose(self.iterations, kept, self.at_most, what, f"there are {_listed(kept)}")

    def kept(self, directory: ExperimentDirectory) -> list[int]:
        """The iterations that can be read. Raises ValueError for none."""
        kept = iterations_with(directory, self.file)
        if not kept:
            raise ValueError(
                f"{directory.path} has no iteration with {self.file}: run_iteration_loop leaves them where"
                " the rollout samples (supervised training doesn't)"
            )
        return kept


def unanswered(experiment: PolicyIteration) -> Iterator[Finding]:
    """Yields what is wrong where nothing samples from the policy."""
    rollouts = (experiment.rollout, experiment.evaluation.rollout)
    if not any(rollout is not None and rollout.needs_engine for rollout in rollouts):
        yield Finding(
            "the analysis samples from the policy, and nothing in the experiment says how",
            "$.evaluation.rollout",
            "give it, e.g. {type: 'single_turn', max_tokens: 256}, or leave the analysis out",
        )


def never_there(key: str, wanted: Chosen, last: int) -> Iterator[Finding]:
    """Yields what is wrong with points that the experiment never comes to."""
    beyond = [] if isinstance(wanted, str) else [number for number in wanted if number > last]
    if beyond:
        yield Finding(f"{_listed(beyond)} is beyond the last, {last}", key, f"take numbers up to {last}")
    elif not wanted:
        yield Finding("there is nothing to look at in an empty list", key, "name some, or 'last', or 'all'")


def iterations_with(directory: ExperimentDirectory, file: str) -> list[int]:
    """The iterations that left this file."""
    found = (directory.path / "iterations").glob(f"[0-9]*/{file}")
    return sorted(int(path.parent.name) for path in found if path.parent.name.isdigit())


def choose(wanted: Chosen, kept: Sequence[int], at_most: int, what: str, remedy: str) -> list[int]:
    """The wanted ones of those that are kept. Raises ValueError for those that aren't."""
    if wanted == "last":
        return [kept[-1]]
    if wanted == "all":
        return evenly(kept, at_most)
    missing = sorted(set(wanted) - set(kept))
    if missing or not wanted:
        raise ValueError(f"{_listed(missing) or 'nothing'} is not the number of {what}: {remedy}")
    return sorted(set(wanted))


def evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, as evenly as can be, the first and the last among them (the last alone
    where `count` is 1); all where there are no more.
    """
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def require_critic(config: PolicyIteration, directory: ExperimentDirectory, point: int) -> None:
    """Raises ValueError where the critic of this point can't be had."""
    if not config.credit.needs_critic:
        raise ValueError(
            f"{directory.path} trains no critic: experiments with the credit 'gae', or the values 'critic' or"
            " 'control_variate', do"
        )
    if point and not (directory.checkpoint(point) / "critic").is_dir():
        raise ValueError(
            f"the checkpoint {directory.checkpoint(point)} holds no critic (critic/ is missing): it was"
            " written before checkpoints kept it. Train again, or choose other checkpoints"
        )
