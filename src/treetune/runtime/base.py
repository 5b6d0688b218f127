"""The root of an experiment's configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
from treetune.rollouts.single_turn import adapt_to_fixed_problems
from treetune.runtime.analysis import Analyzer
from treetune.runtime.diagnostics import Diagnostics
from treetune.runtime.first_prompt import describe_first_prompt
from treetune.runtime.first_reward import describe_first_reward
from treetune.runtime.machine import list_gpus
from treetune.runtime.sinks import Sink
from treetune.tasks.base import Split, Task
from treetune.tasks.drawing import Replacement
from treetune.tasks.mixed import parts_of
from treetune.trainer.base import Trainer


class Runtime(Registrable, Root, root="an experiment"):
    """The root of an experiment's configuration."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSet(Part):
    """A measurement: several samples for each problem of a split, or of a part of it.

    No problem is left out: if its prompt fills the context, it counts as not answered (`too_long` in the
    summary), and if it nearly does, its answers are shorter. `treetune evaluate` measures all sets.
    """

    split: Split
    """The task's split that problems are taken from."""
    name: str | None = None
    """The name of its folder, and its part of metric names; null: the split's name."""
    task: Task | None = None
    """Another task to measure on, with its own grader; null: the experiment's."""
    problems: Annotated[int, Gt(0)] | None = None
    """The number of the split's problems to measure; null: all."""
    choose: Literal["first", "random"] = "first"
    """If `problems` is smaller than the split, its ``first`` problems, or a ``random`` choice, drawn by
    `Evaluation.seed`."""
    samples: Annotated[int, Gt(0)] = 1
    """Answers to each problem."""
    temperature: Annotated[float, Ge(0)] | None = None
    """Sampling temperature; null: the rollout's."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """Probability mass of nucleus sampling; null: the rollout's."""
    max_tokens: Annotated[int, Gt(0)] | None = None
    """Longest answer; null: the rollout's."""
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
        rollout = adapt_to_fixed_problems(experiment.evaluation.rollout or experiment.rollout)
        settings = {
            "samples": self.samples,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            # The longest prompt that leaves room for an answer of one token. So the rollout leaves out no
            # problem, which the run's own limit might do.
            "max_prompt_tokens": experiment.context_length - 1,
        }
        # A user's rollout may not have all of these fields.
        names = {field.name for field in fields(rollout)}  # type: ignore[arg-type]
        changes = {name: value for name, value in settings.items() if value is not None and name in names}
        return replace(rollout, **changes)  # type: ignore[type-var]

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from check_name(self.label, "name", "a plain folder name", nested=False)
        yield from check_split(self.task or experiment.task, self.split, self.problems, "problems")
        try:
            rollout = self.rollout(experiment)
        except ValueError as error:
            yield Finding.of(error, self._find_key(str(error)))
            return
        # A rollout checks its `max_tokens` itself, but not the one that this set puts in its place.
        if self.max_tokens is not None and rollout.sampling is not None:
            yield from check_lengths(rollout, experiment.context_length)

    def _find_key(self, message: str) -> str:
        """Returns the set's key that an error message of the rollout is about.

        The rollout's keys have the same names as the set's. If the message names no key that is set here, the
        result is `samples`, the only key that always has a value.
        """
        for key in ("temperature", "samples", "max_tokens", "top_p"):
            if key in message and getattr(self, key) is not None:
                return key
        return "samples"


@dataclass(frozen=True, kw_only=True)
class Evaluation(Part):
    """Measurements of the weights, while training and at the end."""

    sets: tuple[EvaluationSet, ...] = ()
    """The measurements, each with a name of its own."""
    every: Annotated[int, Gt(0)] | None = None
    """Iterations between two measurements while training; null: at the end only."""
    seed: int = 0
    """The seed of all draws, fixed so that every checkpoint and every method is measured with the same
    ones."""
    rollout: Rollout | None = None
    """The rollout that makes answers; null: the run's. Needed if the run's rollout samples nothing
    (supervised training)."""

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from check_unique("sets", [evaluation_set.label for evaluation_set in self.sets])
        if self.sets and not (self.rollout or experiment.rollout).needs_engine:
            yield Finding(
                "the evaluation has sets, but neither the evaluation nor the experiment has a rollout that"
                " samples",
                "rollout",
                "give evaluation.rollout, e.g. {type: 'single_turn', max_tokens: 256}",
            )
        elif self.rollout is not None and adapt_to_fixed_problems(self.rollout) != self.rollout:
            # If a rollout can't answer a fixed list, `adapt_to_fixed_problems` returns another rollout.
            yield Finding(
                f"{type(self.rollout).__name__} can't answer a fixed list of problems, and every set needs"
                " the same number of samples for each problem of such a list",
                "rollout",
                "give {type: 'single_turn', ...} with its settings, or leave evaluation.rollout out: answers"
                " are then sampled one by one with the settings of the run's rollout",
            )


ChoiceRule = Literal["first_maximum", "best"]


@dataclass(frozen=True, kw_only=True)
class ChooseCheckpoint(Part):
    """A choice, after an iteration's training, of the weights that do best on held-out problems.

    The candidates are the weights that training began with (epoch 0) and those after each epoch, or after
    every `every` optimiser steps and at the end. The next iteration samples from the chosen weights, the
    checkpoint holds them, and evaluations measure them.
    """

    set: str
    """The name of the evaluation set on which the pass@1 of each candidate is measured."""
    rule: ChoiceRule = "first_maximum"
    """``first_maximum`` trains until a candidate is not strictly better than the one before it, and chooses
    that one before it (the rule of RestEM in the VinePPO paper); ``best`` chooses the best of all candidates,
    and the earliest of equally good ones."""
    every: Annotated[int, Gt(0)] | None = None
    """Steps between candidates; null: after every epoch."""

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        labels = [evaluation_set.label for evaluation_set in experiment.evaluation.sets]
        if self.set not in labels:
            existing_sets = f"only {', '.join(labels)}" if labels else "no sets"
            yield Finding(
                f"choose_checkpoint measures on the evaluation set {self.set!r}, and the evaluation has"
                f" {existing_sets}",
                "set",
                "choose one of evaluation.sets, or add it there",
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Checkpoints of a run.

    The two newest hold the trainer's state, from which a run resumes, since one may be damaged. The
    iterations after a checkpoint are trained again from their stored episodes: nothing is sampled again, and
    the weights are bit-identical.
    """

    every: Annotated[int, Gt(0)] = 1
    """Iterations between two states to resume from."""
    keep_every: Annotated[int, Gt(0)] | None = None
    """Iterations between two checkpoints whose weights are kept; null: only the two newest are kept."""
    at_risk_minutes: Annotated[float, Gt(0)] | None = 10.0
    """Most minutes of work that a killed run loses. A checkpoint is written at the end of an iteration,
    earlier than `every` asks for, if more would be at risk; but not so often that checkpoints take more than
    2 % of the time. It changes no result. null: checkpoints are written by iterations alone."""
    grace: Annotated[float, Ge(0)] = 120.0
    """Most seconds that a run continues after SIGTERM, SIGHUP or the first Ctrl-C, to write a checkpoint at
    the end of the iteration. After SIGUSR1 it continues as long as the iteration lasts."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings of the estimates of memory and time that are made before a run starts."""

    check: bool = True
    """Whether a run that doesn't fit the machine by these estimates is refused."""
    answer_tokens: Annotated[float, Gt(0)] | None = None
    """Mean length of an answer; null: half of the longest possible answer."""
    prompt_tokens: Annotated[float, Gt(0)] | None = None
    """Mean length of a prompt; null: 256, or less if the limits are lower."""
    shared_prompt_tokens: Annotated[float, Ge(0)] = 0.0
    """Tokens with which all prompts begin, such as a system message and solved examples. Engines that keep
    prefixes, and the trainer's layout ``tree``, compute them once."""


@dataclass(frozen=True, kw_only=True)
class Preset(Part):
    """A published method that was appended to an experiment in `--configs`. The preset's file sets this
    entry.

    Example: ``Preset(name="dapo", on="sampled answers", after=("rollout", "trainer"))``.
    """

    name: str
    """The name of the preset in messages."""
    on: Literal["sampled answers", "demonstrations"] = "sampled answers"
    """The experiments that it can be appended to: those whose rollout samples, or those that learn from
    demonstrations."""
    after: tuple[str, ...] = ()
    """The keys that the files before the preset have set. Without ``rollout`` and ``trainer`` the preset
    comes before the experiment."""

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        kind_of_experiment = "sampled answers" if experiment.rollout.needs_engine else "demonstrations"
        # `self.after` lists the keys that are set before the preset. Every experiment sets these two.
        comes_after_experiment = {"rollout", "trainer"}.issubset(self.after)
        if not comes_after_experiment:
            yield Finding(
                f"the preset {self.name!r} comes before the experiment, so that the experiment"
                " overrides the preset's settings",
                "name",
                "put the preset's file after the experiment's",
            )
        elif self.on != kind_of_experiment:
            yield Finding(
                f"the preset {self.name!r} is for experiments with {self.on}, and this one has"
                f" {kind_of_experiment}",
                "name",
                "leave it out, or append it to an experiment of that kind",
            )


@dataclass(frozen=True, kw_only=True)
class StopAfter(Part):
    """Ends the run at a budget of sampled tokens, and after `iterations` at the latest.

    The budget counts the tokens of answers and of the continuations that give them credit, and not those of
    evaluations. The run ends at the end of the iteration that is nearest to the budget, if the next iteration
    is assumed to sample as many tokens as the last one. On average, methods with large and with small
    iterations then miss the budget by the same amount.
    """

    sampled_tokens: Annotated[int, Gt(0)]
    """Tokens of answers and continuations together."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (Need(SampledAnswers(), "it counts sampled tokens", "leave stop_after out"),)

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        # `length_matters` says why the results of iterations depend on the run's number of iterations.
        if experiment.length_matters is not None:
            yield Finding(
                "stop_after ends the run at an iteration that is not known beforehand, and"
                f" {experiment.length_matters}",
                "sampled_tokens",
                "choose a constant learning rate after warm-up steps, or leave stop_after out",
            )

    def further_iterations(self, tokens_by_iteration: Sequence[int]) -> int | None:
        """Estimates the number of further iterations, if each samples as many tokens as the last one.

        Args:
            tokens_by_iteration: The tokens that each finished iteration has sampled.

        Returns:
            0 if the run is over; None if there has been no iteration yet.
        """
        if not tokens_by_iteration:
            return None
        remaining_tokens = self.sampled_tokens - sum(tokens_by_iteration)
        # It is a divisor, so it is at least 1, although an iteration may have sampled nothing.
        tokens_of_last = max(1, tokens_by_iteration[-1])
        # The run ends at the end of the iteration that is nearest to the budget, before or after it. Halves
        # are rounded up, while `round` would round 0.5 to 0 and 1.5 to 2.
        rounded = math.floor(remaining_tokens / tokens_of_last + 0.5)
        return max(0, rounded)  # negative if the budget has been exceeded


Overlap = Literal["none", "one_step"]
NO_OVERLAP_REMEDY = "or leave overlap at 'none'"
"""The other way out, at the end of the remedies of `check_overlap`."""


@Runtime.register("policy_iteration")
@dataclass(frozen=True, kw_only=True)
class PolicyIteration(Runtime):
    """An experiment that samples, gives credit, trains and syncs the engine, `iterations` times."""

    task: Task
    model: ModelSource
    engines: Engines
    rollout: Rollout
    credit: Credit
    selection: Selection
    trainer: Trainer
    iterations: Annotated[int, Gt(0)]
    """The number of iterations of the run."""
    problems_per_iteration: Annotated[int, Gt(0)] | None
    """The number of problems of an iteration; null: the whole split."""
    context_length: Annotated[int, Gt(1)]
    """Most tokens of prompt and response together."""
    experiment_name: str
    """The name of the run's folder in `directory`."""
    shaping: tuple[Shaping, ...] = ()
    """Changes the rewards of answers before credit. The grader's scores stay as they are."""
    directory: str = "experiments"
    """The folder of all experiments."""
    share: bool = False
    """Whether other users may read the run's folder, as far as your umask allows."""
    seed: Annotated[int, Ge(0)] = 0
    """The seed of all draws: problems, samples, order of training."""
    problem_sampling: Replacement = "between_iterations"
    """``between_iterations`` draws each iteration's problems from all; ``epochs`` takes every problem once
    before it takes one again."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    analyzers: tuple[Analyzer, ...] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    on_empty_selection: Literal["stop", "skip"] = "stop"
    """Whether the run ends or skips the training if the selection keeps no episode."""
    restart: Literal["never", "every_iteration"] = "never"
    """``every_iteration`` begins each training with the start weights, a new optimiser and a new schedule, on
    the answers of the latest policy (RestEM)."""
    choose_checkpoint: ChooseCheckpoint | None = None
    """Chooses the epoch whose weights an iteration ends with; null: the last one."""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    grader_workers: Annotated[int, Gt(0)] = 2
    """The number of processes that grade."""
    grader_deadline: Annotated[float, Gt(0)] = 10.0
    """Most seconds to grade an answer. If grading takes longer, the outcome is ``timeout``."""
    rank_deadline: Annotated[float, Gt(0)] = 3600.0
    """Seconds that a rank waits for the others before the run ends with an error."""
    sinks: tuple[Sink, ...] = ()
    stop_after: StopAfter | None = None
    """Ends the run at a budget of sampled tokens; null: after all `iterations`."""
    presets: tuple[Preset, ...] = ()
    """The published methods that were appended to the experiment. The presets' files set them."""
    plan: PlanSettings = field(default_factory=PlanSettings)
    """The check before a start whether the run fits the machine."""
    changed_inputs: Literal["refuse", "accept"] = "refuse"
    """Whether a run may resume if its start model, its reference or its rows have changed since it began, by
    their digests. ``accept`` resumes with the present ones, logs the change and records it in the
    manifest."""
    overlap: Overlap = "none"
    """``one_step`` samples an iteration's answers and continuations while the iteration before it is trained,
    from the weights that this training begins with. All iterations but the first then learn from answers of
    weights that are one version old."""

    @property
    def needs_engine(self) -> bool:
        return self.rollout.needs_engine or bool(self.evaluation.sets)

    def stop_strings(self) -> list[str]:
        """Returns the strings that end answers, of all rollouts and tasks, each once."""
        stops: list[str] = []
        for rollout in (self.rollout, self.evaluation.rollout):
            if rollout is None or rollout.sampling is None:
                continue
            for task in self.all_tasks:
                for part in parts_of(task):
                    stops += part.adjust_sampling(rollout.sampling).stop
        return list(dict.fromkeys(stops))

    @property
    def all_tasks(self) -> list[Task]:
        """The experiment's task, and those of its evaluation sets."""
        tasks = [self.task]
        for evaluation_set in self.evaluation.sets:
            if evaluation_set.task is not None:
                tasks.append(evaluation_set.task)
        return tasks

    def missing_for_grades(self) -> list[str]:
        """Returns a message for each requirement of graders, rollouts and environments, such as a package or
        bubblewrap, that this machine doesn't have. Tasks of evaluation sets count, too."""
        graders = [part for task in self.all_tasks for part in task.grader.parts()]
        rollouts = [rollout for rollout in (self.rollout, self.evaluation.rollout) if rollout is not None]
        # A rollout in turns has its own environment, or else uses those of the tasks.
        uses_environments_of_tasks = any(
            isinstance(placed.part, MultiTurn) and placed.part.environment is None
            for placed in placed_parts(rollouts)
        )
        environments: list[Environment] = []
        if uses_environments_of_tasks:
            for task in self.all_tasks:
                for part in parts_of(task):
                    environment = environment_of(part)
                    if environment is not None:
                        environments.append(environment)
        return missing_requirements([*graders, *rollouts, *environments], self)

    def missing_devices(self) -> Iterator[Finding]:
        """Yields a finding for each setting of an engine that needs GPUs which this machine doesn't have."""
        engines = {"engines.policy": self.engines.policy}
        if self.engines.judge is not None:
            engines["engines.judge.server"] = self.engines.judge.server
        for key, engine in engines.items():
            # The settings are read by `getattr`, since not every type of engine has them. The servers at
            # `addresses` run already, perhaps on other machines, so their sleep needs no GPU here.
            named_devices = getattr(engine, "devices", None)
            sleeps_here = getattr(engine, "sleep", False) and getattr(engine, "addresses", None) is None
            if not named_devices and not sleeps_here:
                continue
            available = list_gpus()
            if sleeps_here and not available:
                yield Finding(
                    "sleep needs a GPU, and this machine has none",
                    f"{key}.sleep",
                    "set it to false to run on the CPU, or use a machine with a GPU",
                    level="missing",
                )
            absent = [device for device in named_devices or () if device >= len(available)]
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
        """Yields notes: on programs that run without a sandbox, on a smaller last training step in each
        epoch, and on the first prompt and its reward."""
        yield from describe_unsafe_keys(plain)
        note_on_last_step = self.trainer.uneven_steps(self)
        if note_on_last_step is not None:
            yield note_on_last_step
        yield from describe_first_prompt(self.model, self.task, self.stop_strings())
        yield from describe_first_reward(self.task, self.grader_deadline)

    @classmethod
    @override
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        """Returns the keys that may have other values when a run is resumed, since they change no result of
        the iterations so far."""
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
        # With `choose_checkpoint`, the evaluation chooses the weights, so a change of it changes training.
        if not settings.get("choose_checkpoint"):
            keys.add("evaluation")
        return frozenset(keys)

    @property
    def length_matters(self) -> str | None:
        """The reason, for messages, why the results of the iterations so far depend on the run's number of
        iterations, as with a learning rate that decays to the run's end. None if they don't depend on it."""
        return None if self.restart == "every_iteration" else self.trainer.length_matters

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from check_name(self.experiment_name, "experiment_name", "a relative folder name")
        yield from check_split(self.task, "train", self.problems_per_iteration, "problems_per_iteration")
        # Two fragments may add the same analyzer, which counts once.
        yield from check_unique("analyzers", [analyzer.label for analyzer in dict.fromkeys(self.analyzers)])
        preset_names = list(dict.fromkeys(preset.name for preset in self.presets))
        if len(preset_names) > 1:
            last_index = len(self.presets) - 1
            yield Finding(
                f"the experiment has two presets, {' and '.join(preset_names)}: a mixture of both is neither"
                " of the published methods",
                f"presets.{last_index}.name",
                "append one of them only, to an experiment without a preset",
            )
        labels = [shaping.label for shaping in self.shaping]
        yield from check_unique("shaping", labels, "give each kind of shaping once")
        if self.overlap == "one_step":
            yield from check_overlap(self)
        yield from self.missing_devices()


def find_keys_without_sandbox(plain: Any, key: str = "") -> list[str]:
    """Returns the keys of a configuration whose programs run without a sandbox.

    Args:
        plain: The configuration, or the value of `key` in it.

    Example: ``["task.grader.sandbox"]``.
    """
    keys = []
    if isinstance(plain, list):
        items: list[tuple[Any, Any]] = list(enumerate(plain))
    elif isinstance(plain, Mapping):
        items = list(plain.items())
        if plain.get("type") == "unsafe_local":
            keys.append(key)
    else:
        return []
    for name, value in items:
        keys += find_keys_without_sandbox(value, f"{key}.{name}" if key else str(name))
    return keys


def describe_unsafe_keys(plain: Mapping[str, Any]) -> list[str]:
    """Returns a warning for each key of a configuration whose programs run without a sandbox."""
    risk = "programs that the model writes run with your rights, and can reach your files and your network"
    return [f"{key} is unsafe_local: {risk}" for key in find_keys_without_sandbox(plain)]


LONGEST_NAME = 200
"""The most bytes of a folder's name. File systems allow 255, and some files have this name with a suffix."""


def check_name(name: str, key: str, expected: str, nested: bool = True) -> Iterator[Finding]:
    """Yields a finding if a name can't be that of a folder.

    Args:
        key: The configuration key of the name.
        expected: The kind of name for the remedy, such as ``a plain folder name``.
        nested: Whether the name may have several parts, separated by slashes.
    """
    parts = name.split("/") if nested else [name]
    # `strip` leaves "" of an empty part, of "." and of "..": none of them can be the name of a folder.
    has_unusable_part = any("/" in part or part.strip(" .") == "" for part in parts)
    if has_unusable_part or not name.isprintable():
        yield Finding(
            f"{name!r} can't be the name of a folder",
            key,
            f"give {expected}, of letters, digits, '-', '_' and '.'",
        )
        return
    for part in parts:
        if part.startswith("."):
            yield Finding(
                f"{part!r} begins with a dot, and folders with such names are not listed",
                key,
                "begin it with a letter",
            )
            return
    for part in parts:
        n_bytes = len(part.encode())
        if n_bytes > LONGEST_NAME:
            yield Finding(
                f"a name of {n_bytes} bytes is longer than file systems allow",
                key,
                f"give one of at most {LONGEST_NAME}",
            )
            return


def check_split(task: Task, split: Split, n_problems: int | None, key: str) -> Iterator[Finding]:
    """Yields a finding if a task doesn't have a split, or if the split has fewer problems than `n_problems`.

    Args:
        n_problems: The number of problems that are needed; None for all.
        key: The configuration key of that number.
    """
    try:
        n_existing = task.size(split)
    except ValueError as error:
        # An experiment has no key for the split that it trains on, so the key of the number is named.
        yield Finding.of(error, key if split == "train" else "split")
        return
    if n_existing is not None and n_problems is not None and n_problems > n_existing:
        yield Finding(
            f"{key} is {n_problems}, and the {split} split has {n_existing} problems",
            key,
            f"take {n_existing} or fewer, or make the split larger",
        )


def check_unique(
    key: str, labels: Sequence[str], remedy: str = "give each another name"
) -> Iterator[Finding]:
    """Yields a finding if several parts of a list have the same name."""
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        yield Finding(f"several entries of {key} have the same name: {', '.join(repeated)}", key, remedy)


def check_overlap(experiment: PolicyIteration) -> Iterator[Finding]:
    """Yields a finding for each setting that doesn't work with ``overlap: 'one_step'``.

    Such a setting samples nothing, learns from stale answers without a correction, reads the weights that are
    being trained, or uses trainer and engine in turn.
    """
    if not experiment.rollout.needs_engine:
        yield Finding(
            "overlap 'one_step' samples while it trains, and this rollout samples nothing",
            "overlap",
            "set it to 'none'",
        )
        return
    if StaleAnswers() not in experiment.trainer.gives:
        yield Finding(
            "overlap 'one_step' trains on answers of the previous weights, and the loss doesn't correct for"
            " that",
            "trainer.objective.importance_cap",
            f"{StaleAnswers.remedy}, {NO_OVERLAP_REMEDY}",
        )
    if experiment.credit.asks_critic:
        yield Finding(
            "the credit asks the trainer's critic, which is being trained while overlap 'one_step' samples",
            "credit",
            f"choose values that the engine gives, such as {{type: 'continuations'}}, {NO_OVERLAP_REMEDY}",
        )
    if experiment.credit.trainer_scores.reference:
        yield Finding(
            "the credit asks the trainer's reference model, which scores while overlap 'one_step' trains",
            "credit",
            f"set the credit's scorer to 'policy', {NO_OVERLAP_REMEDY}",
        )
    if experiment.credit.trainer_scores.distributions:
        yield Finding(
            "the credit asks the trainer for the policy's distributions, while overlap 'one_step' trains it",
            "credit",
            f"choose a credit that reads no entropies, such as 'probability_mask', {NO_OVERLAP_REMEDY}",
        )
    if experiment.choose_checkpoint is not None:
        yield Finding(
            "choose_checkpoint measures candidates in the middle of training, on the engine that overlap"
            " 'one_step' samples the next iteration with",
            "choose_checkpoint",
            f"leave it out, {NO_OVERLAP_REMEDY}",
        )
    if getattr(experiment.engines.policy, "sleep", False):  # not every type of engine has the setting
        yield Finding(
            "engines.policy.sleep lends the engine's memory to the trainer, and overlap 'one_step' needs both"
            " at the same time",
            "engines.policy.sleep",
            f"set it to false, so that both share the memory, or give the engine its own devices,"
            f" {NO_OVERLAP_REMEDY}",
        )
