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
from treetune.runtime.directory import TRAJECTORIES, ExperimentDirectory

T = TypeVar("T")

PointChoice = tuple[Annotated[int, Ge(0)], ...] | Literal["last", "all"]
"""The numbers of the checkpoints or iterations to look at, or ``last`` or ``all`` of those that there are."""


@dataclass(frozen=True, kw_only=True)
class OfCheckpoints(Analyzer):
    """An analyzer that looks at the weights of checkpoints.

    An analyzer whose `judges_critic` is true also needs the critics of the checkpoints, if the experiment
    trains a critic."""

    name: str | None = None
    checkpoints: PointChoice = "last"
    """The checkpoints to look at: ``last``, ``all``, or a list of numbers of finished iterations. 0 is the
    start weights."""
    at_most: Annotated[int, Gt(0)] = 10
    """The largest number of checkpoints that are looked at with ``all``. They are evenly spaced, with the
    first and the last."""
    seed: Annotated[int, Ge(0)] = 0
    """The seed of everything that the analysis draws."""

    judges_critic = False

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        if self.needs_engine:
            yield from check_samples_answers(experiment)
        critic = experiment.credit.critic_settings
        if self.judges_critic and critic is not None and critic.template is not None:
            yield Finding(
                "it values states after the policy's prompt, and the critic has a prompt of its own",
                remedy="leave the analysis out, or set the critic's template to null",
            )
        yield from check_points("checkpoints", self.checkpoints, experiment.iterations)

    @override
    def points(self, config: PolicyIteration, directory: ExperimentDirectory) -> list[int]:
        checkpoints = directory.checkpoints()
        remedy = (
            f"there are {_comma_separated([0, *checkpoints])}. checkpoints: {{every: 5, keep_every: 5}} in"
            " the experiment keeps one every five iterations"
        )
        if self.checkpoints == "last" and not checkpoints:
            raise ValueError(
                f"{directory.path} has no checkpoint: train the experiment with `treetune run` first"
                " (checkpoints: [0] looks at the start weights)"
            )
        meaning = f"a checkpoint in {directory.path}"
        points = choose_points(self.checkpoints, [0, *checkpoints], self.at_most, meaning, remedy)
        if self.judges_critic and config.credit.needs_critic:
            for point in points:
                require_critic(config, directory, point)
        return points


@dataclass(frozen=True, kw_only=True)
class OfIterations(Analyzer):
    """An analyzer that reads the files of iterations. The first iteration is 0, and iteration i was sampled
    by the weights after i finished iterations."""

    name: str | None = None
    iterations: PointChoice = "all"
    """The iterations to look at: ``all``, ``last``, or a list of their numbers from 0 on."""
    at_most: Annotated[int, Gt(0)] = 10
    """The largest number of iterations that are looked at with ``all``. They are evenly spaced, with the
    first and the last."""

    file = TRAJECTORIES
    """The file that an iteration must have to be looked at."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        if self.file != TRAJECTORIES:
            return ()
        return (
            Need(SampledAnswers(), "it reads the stored answers of iterations", "leave the analysis out"),
        )

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        yield from check_points("iterations", self.iterations, experiment.iterations - 1)

    @override
    def points(self, config: PolicyIteration, directory: ExperimentDirectory) -> list[int]:
        what = f"an iteration with {self.file} in {directory.path}"
        iterations = self.stored_iterations(directory)
        remedy = f"there are {_comma_separated(iterations)}"
        return choose_points(self.iterations, iterations, self.at_most, what, remedy)

    def stored_iterations(self, directory: ExperimentDirectory) -> list[int]:
        """Returns the numbers of the iterations that can be analysed. Raises ValueError where there are
        none."""
        iterations = directory.iterations_with(self.file)
        if not iterations:
            raise ValueError(
                f"{directory.path} has no iteration with {self.file}, which `treetune run` writes"
                " if the rollout samples (supervised training doesn't)"
            )
        return iterations


def check_samples_answers(experiment: PolicyIteration) -> Iterator[Finding]:
    """Yields a finding where the experiment has no rollout that samples from the policy."""
    rollouts = (experiment.rollout, experiment.evaluation.rollout)
    if not any(rollout is not None and rollout.needs_engine for rollout in rollouts):
        yield Finding(
            "the analysis samples from the policy, and nothing in the experiment says how",
            "$.evaluation.rollout",
            "give it, e.g. {type: 'single_turn', max_tokens: 256}, or leave the analysis out",
        )


def check_points(key: str, choice: PointChoice, last: int) -> Iterator[Finding]:
    """Yields a finding where the setting `key` is an empty list, or has numbers that the experiment never
    reaches because they are larger than `last`."""
    beyond = [] if isinstance(choice, str) else [number for number in choice if number > last]
    if beyond:
        yield Finding(
            f"{_comma_separated(beyond)} is beyond the last, {last}", key, f"take numbers up to {last}"
        )
    elif not choice:
        yield Finding("there is nothing to look at in an empty list", key, "name some, or 'last', or 'all'")


def choose_points(
    choice: PointChoice, available: Sequence[int], at_most: int, meaning: str, remedy: str
) -> list[int]:
    """Returns those of the available numbers that the user chose, in rising order.

    Args:
        at_most: The largest number of points that "all" chooses. They are evenly spaced.
        meaning: For the error, the thing that each number stands for, such as "a checkpoint in runs/a".
        remedy: For the error, what the user can do.

    Raises:
        ValueError: A chosen number isn't available, or no number is chosen.
    """
    if choice == "last":
        return [available[-1]]
    if choice == "all":
        return spread_evenly(available, at_most)
    unknown_numbers = sorted(set(choice) - set(available))
    if unknown_numbers or not choice:
        raise ValueError(
            f"{_comma_separated(unknown_numbers) or 'nothing'} is not the number of {meaning}: {remedy}"
        )
    return sorted(set(choice))


def spread_evenly(items: Sequence[T], count: int) -> list[T]:
    """Returns `count` evenly spaced items, among them the first and the last.

    If there are at most `count` items, all are returned. If `count` is 1, only the last item is."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(number * (len(items) - 1) / (count - 1))] for number in range(count)]


def _comma_separated(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def require_critic(config: PolicyIteration, directory: ExperimentDirectory, point: int) -> None:
    """Raises ValueError where the experiment trains no critic, or the checkpoint `point` has none.

    Point 0 needs no file: a critic begins as a copy of the start weights."""
    if not config.credit.needs_critic:
        raise ValueError(
            f"{directory.path} trains no critic: experiments with the credit 'gae', or the values 'critic' or"
            " 'control_variate', do"
        )
    if point and not (directory.checkpoint_folder(point) / "critic").is_dir():
        raise ValueError(
            f"the checkpoint {directory.checkpoint_folder(point)} holds no critic (critic/ is missing): it"
            " was written before checkpoints kept it. Train again, or choose other checkpoints"
        )
