"""The root of an experiment's configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Finding, Need, Part, Root, SampledAnswers, StaleAnswers
from treetune.credit.base import Credit
from treetune.domains.environments.base import Environment, environment_of
from treetune.domains.multi_turn import MultiTurn
from treetune.engine.settings import Engines
from treetune.findings import missing_requirements, placed_parts
from treetune.models.sources import ModelSource
from treetune.rollouts.answers import check_lengths
from treetune.rollouts.base import Rollout, Selection, Shaping
from treetune.rollouts.single_turn import for_fixed_problems
from treetune.runtime.analysis import Analyzer
from treetune.runtime.diagnostics import Diagnostics
from treetune.runtime.first_prompt import prompt_remarks
from treetune.runtime.machine import gpus
from treetune.runtime.sinks import Sink
from treetune.tasks.base import Split, Task
from treetune.tasks.drawing import Replacement
from treetune.trainer.base import Trainer


class Runtime(Registrable, Root, root="an experiment"):
    """The root of an experiment's configuration."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSet(Part):
    """A measurement: n samples for each of some problems of a split.

    No problem is left out: one whose prompt fills the context counts as not answered (`too_long` in the
    summary), and what another leaves of it bounds its answers. `treetune evaluate` measures all sets.
    """

    split: Split
    """The task's split that problems are taken from."""
    name: str | None = None
    """Its folder and its place in metric names; None: the split's name."""
    task: Task | None = None
    """Another task to measure on, with its own grader; None: the experiment's."""
    problems: Annotated[int, Gt(0)] | None = None
    """How many of the split's problems; None: all."""
    choose: Literal["first", "random"] = "first"
    """Which of the split's problems, where `problems` takes a part: the ``first``, or a ``random`` choice
    that `Evaluation.seed` makes."""
    samples: Annotated[int, Gt(0)] = 1
    """Answers to each problem."""
    temperature: Annotated[float, Ge(0)] | None = None
    """Sampling temperature; None: the rollout's."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """Nucleus of sampling; None: the rollout's."""
    max_tokens: Annotated[int, Gt(0)] | None = None
    """Longest answer; None: the rollout's."""
    while_training: bool = False
    """Whether it is measured every `Evaluation.every` iterations as well as at the end."""

    @property
    def label(self) -> str:
        return self.name or self.split

    def rollout(self, experiment: PolicyIteration) -> Rollout:
        """Returns the evaluation's rollout (or else the run's) with the settings of this set.

        Raises:
            ValueError: The settings don't go together.
        """
        rollout = for_fixed_problems(experiment.evaluation.rollout or experiment.rollout)
        settings = {
            "samples": self.samples,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "max_prompt_tokens": experiment.context_length - 1,  # no problem is left out
        }
        # A user's rollout may lack some of these fields.
        names = {field.name for field in fields(rollout)}  # type: ignore[arg-type]
        changes = {name: value for name, value in settings.items() if value is not None and name in names}
        return replace(rollout, **changes)  # type: ignore[type-var]

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from unfit_name(self.label, "name", "a plain folder name", nested=False)
        yield from unfit_split(self.task or experiment.task, self.split, self.problems, "problems")
        try:
            rollout = self.rollout(experiment)
        except ValueError as error:
            yield Finding.of(error, self._own_key(str(error)))
            return
        if self.max_tokens is not None and rollout.sampling is not None:
            yield from check_lengths(rollout, experiment.context_length)

    def _own_key(self, message: str) -> str:
        """Returns which of the set's keys an error is about, which the rollout called by the same name."""
        given = ("temperature", "samples", "max_tokens", "top_p")
        named = [key for key in given if key in message and getattr(self, key) is not None]
        return named[0] if named else "samples"


@dataclass(frozen=True, kw_only=True)
class Evaluation(Part):
    """Measurements of the weights, while training and at the end."""

    sets: tuple[EvaluationSet, ...] = ()
    """The measurements, each with a name of its own."""
    every: Annotated[int, Gt(0)] | None = None
    """Iterations between two measurements while training; None: at the end only."""
    seed: int = 0
    """Fixed, so that every checkpoint and every method meets the same draws."""
    rollout: Rollout | None = None
    """How answers are made where the run's own rollout samples nothing (supervised training)."""

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from twice("sets", [one.label for one in self.sets])
        if self.sets and not (self.rollout or experiment.rollout).needs_engine:
            yield Finding(
                "the evaluation has sets, and neither it nor the experiment has a rollout that samples",
                "rollout",
                "give evaluation.rollout, e.g. {type: 'single_turn', max_tokens: 256}",
            )
        elif self.rollout is not None and for_fixed_problems(self.rollout) != self.rollout:
            yield Finding(
                f"{type(self.rollout).__name__} says nothing of how it answers problems that are fixed, where"
                " every set asks for so many samples of each",
                "rollout",
                "give {type: 'single_turn', ...} with its settings, or leave evaluation.rollout out: then"
                " answers are sampled plainly, as the run samples them",
            )


ChoiceRule = Literal["first_maximum", "best"]


@dataclass(frozen=True, kw_only=True)
class ChooseCheckpoint(Part):
    """A choice, after an iteration's training, of the weights that do best on held-out problems.

    Candidates are the weights that training began with (epoch 0) and those after each epoch, or after every
    so many optimiser steps and at the end. The chosen weights are those that the next iteration samples from,
    that the checkpoint holds and that evaluations measure.
    """

    set: str
    """The evaluation set, by its name, on which each candidate is measured: its pass@1."""
    rule: ChoiceRule = "first_maximum"
    """``first_maximum`` takes candidates as long as each is strictly better than the one before, and trains
    no further once one isn't (the rule of RestEM in the VinePPO paper); ``best`` takes the best of all, the
    earliest of equals."""
    every: Annotated[int, Gt(0)] | None = None
    """Steps between candidates; None: after every epoch."""

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        labels = [one.label for one in experiment.evaluation.sets]
        if self.set not in labels:
            there = f"only {', '.join(labels)}" if labels else "no sets"
            yield Finding(
                f"the choice is made on the evaluation set {self.set!r}, and the evaluation has {there}",
                "set",
                "name one of them, or add it to evaluation.sets",
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Checkpoints of a run. The state to resume from is kept in the two newest, since one may be damaged;
    what happened since is made again from the stored episodes, bit for bit, without sampling."""

    every: Annotated[int, Gt(0)] = 1
    """Iterations between two states to resume from."""
    keep_every: Annotated[int, Gt(0)] | None = None
    """Iterations between two weights that are kept; None: those of the two newest checkpoints only."""
    at_risk_minutes: Annotated[float, Gt(0)] | None = 10.0
    """Most minutes of work that a killed run loses, as far as ends of iterations allow: a checkpoint comes
    before `every` says so, unless checkpoints would take more than a fiftieth of the time. It changes no
    result. None: checkpoints come by iterations alone."""
    grace: Annotated[float, Ge(0)] = 120.0
    """Most seconds that SIGTERM, SIGHUP or the first Ctrl-C wait for the end of the iteration, where the run
    writes a checkpoint and ends. SIGUSR1 waits as long as the iteration lasts."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings of the look at the machine before a start."""

    check: bool = True
    """False: the run starts, whatever the estimates say."""
    answer_tokens: Annotated[float, Gt(0)] | None = None
    """Mean length of an answer; null is assumed to be half of the longest."""
    prompt_tokens: Annotated[float, Gt(0)] | None = None
    """Mean length of a prompt; null is assumed to be 256, or what the limits leave of it."""


@dataclass(frozen=True, kw_only=True)
class Preset(Part):
    """A published method that was put on an experiment, as its file says of itself."""

    name: str
    """What messages call it."""
    on: Literal["sampled answers", "demonstrations"] = "sampled answers"
    """The experiments that it goes on: those whose rollout samples, or those that learn from
    demonstrations."""
    after: tuple[str, ...] = ()
    """The experiment's parts that stood on its left."""

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        here = "sampled answers" if experiment.rollout.needs_engine else "demonstrations"
        if not {"rollout", "trainer"}.issubset(self.after):
            yield Finding(
                f"the preset {self.name!r} stands on the left of the experiment, which then sets again what"
                " the preset sets",
                "name",
                "put its file on the right of the experiment's",
            )
        elif self.on != here:
            yield Finding(
                f"the preset {self.name!r} goes on experiments with {self.on}, and this one has {here}",
                "name",
                "leave it out, or put it on an experiment of that kind",
            )


@dataclass(frozen=True, kw_only=True)
class StopAfter(Part):
    """Ends the run when it has sampled so many tokens to train on: those of answers and those of the
    continuations that gave them credit. Evaluations are not among them. `iterations` stays the bound.

    Iterations stay whole. The run ends at that end of an iteration that is nearest to `sampled_tokens`, the
    next iteration being taken to sample as much as the last, so that methods with large and with small
    iterations are on average equally far from the budget.
    """

    sampled_tokens: Annotated[int, Gt(0)]
    """Tokens of answers and continuations together."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (Need(SampledAnswers(), "it counts sampled tokens", "leave stop_after out"),)

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        if experiment.length_matters is not None:
            yield Finding(
                f"stop_after ends the run at an iteration that nobody knows, and {experiment.length_matters}",
                "sampled_tokens",
                "choose a constant learning rate after warm-up steps, or leave stop_after out",
            )

    def further_iterations(self, of_iterations: Sequence[int]) -> int | None:
        """Estimates the number of further iterations, if each samples as many tokens as the last one.

        Args:
            of_iterations: The tokens that each iteration has sampled so far.

        Returns:
            0 if the run is over; None if there has been no iteration yet.
        """
        if not of_iterations:
            return None
        remaining_tokens = self.sampled_tokens - sum(of_iterations)
        # Rounded to the nearest end of an iteration; a half is rounded up.
        return max(0, math.floor(remaining_tokens / max(1, of_iterations[-1]) + 0.5))


Overlap = Literal["none", "one_step"]
WITHOUT_OVERLAP = "or leave overlap at 'none'"


@Runtime.register("policy_iteration")
@dataclass(frozen=True, kw_only=True)
class PolicyIteration(Runtime):
    """Sample, credit, train, sync, as often as `iterations` says."""

    task: Task
    model: ModelSource
    engines: Engines
    rollout: Rollout
    credit: Credit
    selection: Selection
    trainer: Trainer
    iterations: Annotated[int, Gt(0)]
    """How many iterations the run has."""
    problems_per_iteration: Annotated[int, Gt(0)] | None
    """How many problems an iteration takes; None: the whole split."""
    context_length: Annotated[int, Gt(1)]
    """Bound of prompt and response together, in tokens."""
    experiment_name: str
    """Folder of the run below `directory`."""
    shaping: tuple[Shaping, ...] = ()
    """Changes what answers earn, between rollout and credit; what was right stays what the grader said."""
    directory: str = "experiments"
    """Where experiments are kept."""
    share: bool = False
    """Whether other users may read the run's folder, as far as your umask lets them."""
    seed: Annotated[int, Ge(0)] = 0
    """Of everything that is drawn: problems, samples, order of training."""
    problem_sampling: Replacement = "between_iterations"
    """``between_iterations`` draws an iteration's problems anew from all; ``epochs`` takes every problem
    once before any comes again."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    analyzers: tuple[Analyzer, ...] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    on_empty_selection: Literal["stop", "skip"] = "stop"
    """What to do where nothing is left to train on."""
    restart: Literal["never", "every_iteration"] = "never"
    """``every_iteration`` trains the start weights anew each time, with a fresh optimiser and schedule, on
    what the latest policy sampled (RestEM)."""
    choose_checkpoint: ChooseCheckpoint | None = None
    """Which epoch's weights an iteration ends with; None: the last one's."""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    grader_workers: Annotated[int, Gt(0)] = 2
    """Processes that grade."""
    grader_deadline: Annotated[float, Gt(0)] = 10.0
    """Seconds for one answer; then its outcome is ``timeout``."""
    rank_deadline: Annotated[float, Gt(0)] = 3600.0
    """Seconds that a rank waits for the others before the run ends with an error."""
    sinks: tuple[Sink, ...] = ()
    stop_after: StopAfter | None = None
    """Ends the run at a budget of sampled tokens; None: after all `iterations`."""
    presets: tuple[Preset, ...] = ()
    """The published methods that were put on the experiment; their files say so."""
    plan: PlanSettings = field(default_factory=PlanSettings)
    """Whether the machine is looked at before the start."""
    changed_inputs: Literal["refuse", "accept"] = "refuse"
    """What to do where the start model, the reference or the rows of a run that goes on are others than it
    began with, by their digests. ``accept`` goes on with what is there now, says so, and keeps it in the
    manifest."""
    overlap: Overlap = "none"
    """``one_step`` samples each iteration's answers and continuations while the iteration before is trained,
    from the weights that this one begins with: all but the first are one version old."""

    @property
    def needs_engine(self) -> bool:
        return self.rollout.needs_engine or bool(self.evaluation.sets)

    def stop_strings(self) -> list[str]:
        """Returns the strings that end answers, of all rollouts and tasks."""
        tasks = [
            self.task,
            *(held_out.task for held_out in self.evaluation.sets if held_out.task is not None),
        ]
        parts = [part for task in tasks for part in task.parts()]
        stops: list[str] = []
        for rollout in (self.rollout, self.evaluation.rollout):
            if rollout is not None and rollout.sampling is not None:
                stops += [stop for part in parts for stop in part.sampling(rollout.sampling).stop]
        return list(dict.fromkeys(stops))

    def missing_for_grades(self) -> list[str]:
        """Returns what graders, rollouts and the environments of answers need and this machine lacks."""
        tasks = [self.task, *(chosen.task for chosen in self.evaluation.sets if chosen.task is not None)]
        graders = [part for task in tasks for part in task.grader.parts()]
        rollouts = [rollout for rollout in (self.rollout, self.evaluation.rollout) if rollout is not None]
        # A rollout in turns uses its own environment, which is a part of it, or else those of the tasks.
        uses_environments_of_tasks = any(
            isinstance(placed.part, MultiTurn) and placed.part.environment is None
            for placed in placed_parts(rollouts)
        )
        environments: list[Environment] = []
        for task in tasks if uses_environments_of_tasks else ():
            for part in task.parts():
                environment = environment_of(part)
                if environment is not None:
                    environments.append(environment)
        return missing_requirements([*graders, *rollouts, *environments], self)

    def missing_devices(self) -> Iterator[Finding]:
        """Yields the GPUs that engines name and that this machine doesn't have."""
        engines = {"engines.policy": self.engines.policy}
        if self.engines.judge is not None:
            engines["engines.judge.server"] = self.engines.judge.server
        for key, engine in engines.items():
            named = getattr(engine, "devices", None)
            if not named:
                continue
            available = gpus()
            absent = [device for device in named if device >= len(available)]
            if absent:
                count = len(available) or "no"
                yield Finding(
                    f"devices names GPU {', '.join(map(str, absent))}, and this machine has {count} GPUs",
                    f"{key}.devices",
                    "leave devices out: the engine then shares the trainer's GPUs, or runs on the CPU",
                    level="missing",
                )

    @override
    def examine(self, plain: Mapping[str, Any]) -> Iterator[str]:
        """Yields what runs without a sandbox, what to know about batches, and the first prompt."""
        yield from unsafe_remarks(plain)
        uneven = self.trainer.uneven_steps(self)
        if uneven is not None:
            yield uneven
        yield from prompt_remarks(self)

    @classmethod
    @override
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        keys = {
            "analyzers",
            "changed_inputs",
            "checkpoints",
            "diagnostics",
            "directory",
            "grader_deadline",
            "grader_workers",
            "imports",
            "iterations",
            "plan",
            "rank_deadline",
            "share",
            "sinks",
            "stop_after",
        }
        # An evaluation that chooses the weights to go on with is a part of training.
        return frozenset(keys if settings.get("choose_checkpoint") else keys | {"evaluation"})

    @property
    def length_matters(self) -> str | None:
        """Returns why another number of iterations would have trained those so far otherwise; None where
        not."""
        return None if self.restart == "every_iteration" else self.trainer.length_matters

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from unfit_name(self.experiment_name, "experiment_name", "a relative folder name")
        yield from unfit_split(self.task, "train", self.problems_per_iteration, "problems_per_iteration")
        # The same one twice, from two fragments that both want it, is one.
        yield from twice("analyzers", [one.label for one in dict.fromkeys(self.analyzers)])
        names = list(dict.fromkeys(one.name for one in self.presets))
        if len(names) > 1:
            yield Finding(
                f"two presets are put on each other: {' and '.join(names)}; some of the first is left under"
                " the second, and it is neither",
                ("presets", str(len(self.presets) - 1), "name"),
                "take one of them, on an experiment without one",
            )
        yield from twice("shaping", [one.label for one in self.shaping], "each kind can be there once")
        if self.overlap == "one_step":
            yield from unfit_overlap(self)
        yield from self.missing_devices()


def without_sandbox(plain: Any, key: str = "") -> list[str]:
    """Returns the keys of a configuration whose programs run without a sandbox."""
    if isinstance(plain, list):
        plain = dict(enumerate(plain))
    if not isinstance(plain, Mapping):
        return []
    below = (without_sandbox(one, f"{key}.{name}" if key else str(name)) for name, one in plain.items())
    return [*([key] if plain.get("type") == "unsafe_local" else []), *chain.from_iterable(below)]


def unsafe_remarks(plain: Mapping[str, Any]) -> list[str]:
    """Returns the remarks for a person on programs without a sandbox."""
    words = "programs that the model writes run as you do, with your files and your network"
    return [f"{key} is unsafe_local: {words}" for key in without_sandbox(plain)]


LONGEST_NAME = 200
"""Bytes of a folder's name: file systems allow 255, and files beside it have longer names."""


def unfit_name(name: str, key: str, should: str, nested: bool = True) -> Iterator[Finding]:
    """Yields what is wrong with a name that folders are called by."""
    steps = name.split("/") if nested else [name]
    if not all(name.isprintable() and step.strip(" .") and "/" not in step for step in steps):
        yield Finding(
            f"{name!r} is no name for a folder", key, f"give {should}, of letters, digits, '-', '_' and '.'"
        )
    elif hidden := [step for step in steps if step.startswith(".")]:
        yield Finding(
            f"{hidden[0]!r} begins with a dot: such a folder is never listed", key, "begin it with a letter"
        )
    elif longest := [step for step in steps if len(step.encode()) > LONGEST_NAME]:
        yield Finding(
            f"a name of {len(longest[0].encode())} bytes is longer than file systems allow",
            key,
            f"give one of at most {LONGEST_NAME}",
        )


def unfit_split(task: Task, split: Split, wanted: int | None, key: str) -> Iterator[Finding]:
    """Yields what is wrong where a split isn't there, or is known to have fewer problems than are wanted."""
    try:
        there = task.size(split)
    except ValueError as error:
        yield Finding.of(error, key if split == "train" else "split")
        return
    if there is not None and wanted is not None and wanted > there:
        yield Finding(
            f"{wanted} problems are asked for, and the {split} split has {there}",
            key,
            f"take {there} or fewer, or make the split larger",
        )


def twice(key: str, labels: Sequence[str], remedy: str = "give each a name of its own") -> Iterator[Finding]:
    """Yields what is wrong where parts of a list have the same name."""
    several = sorted({label for label in labels if labels.count(label) > 1})
    if several:
        yield Finding(f"two different ones are called {', '.join(several)}", key, remedy)


def unfit_overlap(experiment: PolicyIteration) -> Iterator[Finding]:
    """Yields what is wrong with an overlap of one step: parts that need trainer and engine in turn, or the
    weights that training is just changing, can't have them while both are at work."""
    if not experiment.rollout.needs_engine:
        yield Finding(
            "overlap 'one_step' samples while it trains, and this rollout samples nothing",
            "overlap",
            "set it to 'none'",
        )
        return
    if StaleAnswers() not in experiment.trainer.gives:
        yield Finding(
            "overlap 'one_step' trains on answers of the version before, and nothing in the loss corrects for"
            " that",
            "trainer.objective.importance_cap",
            f"{StaleAnswers.remedy}, {WITHOUT_OVERLAP}",
        )
    if experiment.credit.asks_critic:
        yield Finding(
            "the credit asks the trainer's critic, which is being trained while overlap 'one_step' samples",
            "credit",
            f"choose values that the engine gives, such as {{type: 'continuations'}}, {WITHOUT_OVERLAP}",
        )
    if experiment.choose_checkpoint is not None:
        yield Finding(
            "choose_checkpoint measures candidates in the middle of training, on the engine that overlap"
            " 'one_step' samples the next iteration with",
            "choose_checkpoint",
            f"leave it out, {WITHOUT_OVERLAP}",
        )
    if getattr(experiment.engines.policy, "sleep", False):
        yield Finding(
            "engines.policy.sleep gives the engine's memory to the trainer, and overlap 'one_step' has both"
            " at work at once",
            "engines.policy.sleep",
            f"set it to false and let both fit, or give the engine devices of its own, {WITHOUT_OVERLAP}",
        )
