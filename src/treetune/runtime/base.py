"""What an experiment is: the root of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from treetune.config.registrable import Registrable
from treetune.episode_generators.base import Credit, Rollout, Selection, Shaping
from treetune.inference.settings import EngineSettings
from treetune.models.sources import ModelSource
from treetune.runtime.analysis import Analyzer
from treetune.runtime.diagnostics import Diagnostics
from treetune.runtime.sinks import Sink
from treetune.tasks.base import Split, Task
from treetune.tasks.sampling import Replacement
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.base import Objective


class Runtime(Registrable, root=True):
    """The root of an experiment's configuration."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """One measurement: n samples for each of some problems of a split.

    `name` (the split's where left out) is its folder and its place in metric names. `task` is
    another one to measure on, with its own grader; None is the experiment's. `problems` takes that
    many, None all: the ``first``, or a ``random`` choice that `Evaluation.seed` makes. What is None
    among the sampling parameters is as in the rollout. `while_training` sets are measured every
    `Evaluation.every` iterations as well as at the end; the others at the end alone.
    `run_evaluation` measures all of them.

    No problem is left out: one whose prompt fills the context counts as not answered
    (`too_long` in the summary), and what another leaves of it bounds its answers.
    """

    split: Split
    name: str | None = None
    task: Task | None = None
    problems: Annotated[int, Gt(0)] | None = None
    choose: Literal["first", "random"] = "first"
    samples: Annotated[int, Gt(0)] = 1
    temperature: Annotated[float, Ge(0)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    max_tokens: Annotated[int, Gt(0)] | None = None
    while_training: bool = False

    @property
    def label(self) -> str:
        return self.name or self.split


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured, and how often while training (`every` iterations; None: at the end only).

    `seed` is fixed, so that every checkpoint and every method meets the same draws. `rollout` is
    how answers are made where the run's own rollout samples nothing (supervised training).
    """

    sets: tuple[EvaluationSet, ...] = ()
    every: Annotated[int, Gt(0)] | None = None
    seed: int = 0
    rollout: Rollout | None = None

    def __post_init__(self) -> None:
        labels = [one.label for one in self.sets]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two evaluation sets are called {', '.join(twice)}: give them names")


ChoiceRule = Literal["first_maximum", "best"]


@dataclass(frozen=True, kw_only=True)
class ChooseCheckpoint:
    """After an iteration's training, goes on with the weights that do best on held-out problems.

    Candidates are the weights that training began with (epoch 0) and those after each epoch. Each is
    measured on the evaluation set called `set`: its pass@1. ``first_maximum`` takes epochs as long
    as each is strictly better than the one before, and trains no further once one isn't (the rule
    of RestEM in the VinePPO paper, which there is applied to checkpoints every 500 steps); ``best``
    takes the best of all, the earliest of equals. The chosen weights are those that the next
    iteration samples from, that the checkpoint holds and that evaluations measure.
    """

    set: str
    rule: ChoiceRule = "first_maximum"


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Weights are kept every `keep_every` iterations (None: the newest only), the state to resume
    from is written every `every`. What happened since is made again from the stored episodes, bit
    for bit, without sampling.
    """

    every: Annotated[int, Gt(0)] = 1
    keep_every: Annotated[int, Gt(0)] | None = None


@Runtime.register("policy_iteration")
@dataclass(frozen=True, kw_only=True)
class PolicyIteration(Runtime):
    """Sample, credit, train, sync, as often as `iterations` says.

    `shaping` changes what answers earn, between rollout and credit; what was right stays what the grader
    said. `context_length` bounds prompt and response together, in tokens. `problems_per_iteration` None
    takes the whole split. `rank_deadline` (seconds) is how long a rank waits for the others before the
    run ends with an error. `restart` ``every_iteration`` trains the start weights anew each time, with a
    fresh optimiser and schedule, on what the latest policy sampled (RestEM). `choose_checkpoint` is about
    which epoch's weights an iteration ends with; None: the last one's.
    """

    task: Task
    model: ModelSource
    engine: EngineSettings
    rollout: Rollout
    credit: Credit
    selection: Selection
    trainer: Trainer
    iterations: Annotated[int, Gt(0)]
    problems_per_iteration: Annotated[int, Gt(0)] | None
    context_length: Annotated[int, Gt(1)]
    experiment_name: str
    shaping: tuple[Shaping, ...] = ()
    directory: str = "experiments"
    seed: Annotated[int, Ge(0)] = 0
    problem_sampling: Replacement = "between_iterations"
    evaluation: Evaluation = field(default_factory=Evaluation)
    analyzers: tuple[Analyzer, ...] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    on_empty_selection: Literal["stop", "skip"] = "stop"
    restart: Literal["never", "every_iteration"] = "never"
    choose_checkpoint: ChooseCheckpoint | None = None
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    grader_workers: Annotated[int, Gt(0)] = 2
    grader_deadline: Annotated[float, Gt(0)] = 10.0
    rank_deadline: Annotated[float, Gt(0)] = 3600.0
    sinks: tuple[Sink, ...] = ()

    @property
    def needs_engine(self) -> bool:
        return self.rollout.needs_engine or bool(self.evaluation.sets)

    def __post_init__(self) -> None:
        self.rollout.check(self.task)
        if self.credit.needs_engine and not self.rollout.needs_engine:
            raise ValueError(
                "credit samples continuations, and the rollout samples nothing: choose the rollout"
                " 'single_turn', or a credit that needs no engine, such as 'outcome'"
            )
        objective = getattr(self.trainer, "objective", None)
        if self.credit.needs_critic and objective is not None and not objective.needs_advantages:
            raise ValueError("credit 'gae' trains a critic whose advantages this objective doesn't use")
        self._check_threads()
        self._check_pairs(objective)
        self._check_shaping(objective)
        self._check_dynamic_sampling(objective)
        given = not self.credit.needs_critic and (objective is None or objective.needs_advantages)
        if self.trainer.skip_without_advantage and not given:
            raise ValueError(
                "skip_without_advantage looks at the advantages that credit gives, and here it gives none (a"
                " critic's come later, and are never all 0): set it to false"
            )
        if objective is not None and objective.importance_cap is not None and not self.rollout.needs_engine:
            raise ValueError(
                "the objective's importance_cap compares with the engine's log-probs, and this rollout"
                " samples nothing: set it to null"
            )
        if objective is not None and objective.needs_whole_batch and not self.selection.keeps_all:
            raise ValueError(
                "the objective divides by all answers of the batch, and the selection leaves some out before"
                " it counts them: choose the selection 'all'; the objective passes over wrong answers itself"
            )
        if self.restart == "every_iteration" and self.credit.needs_critic:
            raise ValueError(
                "restart 'every_iteration' throws away what was trained, and the critic of credit 'gae' goes"
                " on learning: set restart to 'never', or choose a credit without a critic, such as 'none'"
            )
        chosen = self.choose_checkpoint
        labels = [one.label for one in self.evaluation.sets]
        if chosen is not None and chosen.set not in labels:
            raise ValueError(
                f"choose_checkpoint measures on the evaluation set {chosen.set!r}, and the evaluation has "
                + (f"only {', '.join(labels)}" if labels else "no sets")
                + ": name one of them, or add it to evaluation.sets"
            )
        sampler = self.evaluation.rollout or self.rollout
        if self.evaluation.sets and not sampler.needs_engine:
            raise ValueError(
                "the evaluation has sets, and neither it nor the experiment has a rollout that samples:"
                " give evaluation.rollout, e.g. {type: 'single_turn', max_tokens: 256}"
            )
        longest = self.rollout.max_prompt_tokens
        if longest is not None and longest >= self.context_length:
            raise ValueError(
                f"rollout.max_prompt_tokens is {longest}, and a prompt of that length leaves nothing of the"
                f" context_length of {self.context_length} for an answer: lower the one or raise the other"
            )
        # The same one twice, from two fragments that both want it, is one.
        labels = [one.label for one in dict.fromkeys(self.analyzers)]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two different analyzers are called {', '.join(twice)}: give them names")
        if not self.experiment_name or self.experiment_name.startswith(("/", ".")):
            raise ValueError(f"experiment_name {self.experiment_name!r} must be a relative folder name")

    def _check_threads(self) -> None:
        if self.credit.needs_threads and not self.rollout.forks:
            raise ValueError(
                "credit 'monte_carlo_threads' values the threads of answers, and this rollout forks none:"
                " choose the rollout 'parallel_threads' (with parallel true), or the credit 'monte_carlo'"
            )
        if self.credit.reads_one_line and self.rollout.forks:
            raise ValueError(
                "this credit takes each token for sampled after all before it, and threads don't see their"
                " siblings: choose the credit 'monte_carlo_threads' or 'group', or set the rollout's parallel"
                " to false"
            )
        blind = [one.label for one in self.analyzers if one.reads_one_line]
        if blind and self.rollout.forks:
            raise ValueError(
                f"the analysis {blind[0]!r} continues answers from their beginnings, and threads don't see"
                " their siblings: leave it out, or set the rollout's parallel to false"
            )

    def _check_pairs(self, objective: Objective | None) -> None:
        needs = objective is not None and objective.needs_pairs
        if needs and not self.selection.makes_pairs:
            raise ValueError(
                "the objective compares answers in pairs, and the selection makes none: choose the selection"
                " 'preference_pairs'"
            )
        if self.selection.makes_pairs and not needs:
            raise ValueError(
                "the selection makes pairs of answers, and the objective compares none: choose the objective"
                " 'dpo' or 'dpo_positive', or the selection 'all'"
            )
        if needs and self.rollout.samples < 2:
            raise ValueError(
                "the objective compares answers to the same problem, and the rollout makes only one: choose"
                " the rollout 'single_turn' with samples of at least 2"
            )

    def _check_dynamic_sampling(self, objective: Objective | None) -> None:
        if not self.rollout.asks_further:
            return
        if self.problems_per_iteration is None:
            raise ValueError(
                "the rollout asks for further problems where answers don't differ, and problems_per_iteration"
                " null has none left: set it to a number below that of the training problems"
            )
        if objective is not None and not objective.needs_advantages:
            raise ValueError(
                "the rollout samples until answers to a problem differ, which is worth something where they"
                " are compared; this objective learns from no advantages: choose the rollout 'single_turn'"
            )
        most, groups = self.selection.at_most, self.rollout.groups
        if most is not None and groups is not None and most < groups:
            raise ValueError(
                f"the rollout samples until {groups} groups have spread (groups), and the selection trains on"
                f" {most} of them (at_most): make the two equal"
            )

    def _check_shaping(self, objective: Objective | None) -> None:
        if not self.shaping:
            return
        labels = [one.label for one in self.shaping]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"shaping has {', '.join(twice)} twice: each kind can be there once")
        if self.credit.needs_engine:
            raise ValueError(
                f"shaping ({', '.join(labels)}) changes what whole answers earn, and credit 'monte_carlo'"
                " grades continuations without it, so that its values would be of another reward: leave"
                " shaping empty, or choose another credit, such as 'group'"
            )
        if objective is not None and not objective.needs_advantages:
            raise ValueError(
                f"shaping ({', '.join(labels)}) changes rewards, and this objective learns from no"
                " advantages: nothing would come of it; leave shaping empty"
            )
        for one in self.shaping:
            one.check(self.rollout, self.task)
