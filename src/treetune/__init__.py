"""Treetune: research experiments in reinforcement learning of language-model reasoning.

`__all__` lists everything that a part of your own may import: the nouns, the base class of each kind of part,
and the functions that parts share. Everything else is internal and may move between versions.

    from treetune import Credit, GroupCredit

    @Credit.register("rank")
    class Rank(GroupCredit): ...
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.waiting import wait_briefly

# For editors and type checkers. A running program imports a module when one of its names is first asked for
# (`__getattr__` below), so that commands which only read a configuration start without numpy and torch.
if TYPE_CHECKING:
    from treetune.config.folders import import_folders
    from treetune.contracts import (
        Advantages,
        Answers,
        CentredRewards,
        Continuations,
        CreditForRewards,
        CreditForTrees,
        CriticValues,
        Finding,
        Forks,
        Need,
        OneLine,
        Pairs,
        SampledAnswers,
        StaleAnswers,
        TaskDemonstrations,
        TextScores,
        Turns,
        UseOfAdvantages,
        UseOfPairs,
        WholeBatch,
    )
    from treetune.credit.base import ContinuingCredit, Credit, GroupCredit, TokenCredit, TrainerScores
    from treetune.credit.episodes import advantage_metrics
    from treetune.credit.gae import Gae, gae
    from treetune.credit.grpo import Group
    from treetune.credit.literature.token_level import OverAnotherCredit
    from treetune.credit.reward_models import RewardModelCredit
    from treetune.credit.states.base import Budget, FixedBudget
    from treetune.credit.states.one_line import OneLineStates
    from treetune.credit.values.base import StepValues, Valuation, Value, ValueEstimator
    from treetune.domains.environments.base import Again, Environment, Game, Turn
    from treetune.domains.environments.calls import NATIVE_FORMATS, calls_of_turn
    from treetune.domains.environments.tools import Tool
    from treetune.domains.sandbox.base import ProgramLimits, Sandbox
    from treetune.domains.sandbox.bubblewrap import choose_sandbox
    from treetune.domains.sandbox.python_tool import PythonTool
    from treetune.engine.base import Engine, EngineLaunch, Tolerance
    from treetune.engine.requests import Completion, Request, SamplingParams, ScoreRequest
    from treetune.engine.settings import EngineSettings
    from treetune.exceptions import SandboxUnavailable, Unavailable
    from treetune.lab.trees.branching import Branches, Branching
    from treetune.models.tokenizer import token_offsets
    from treetune.objectives.base import KlPenalty, Objective, TokenBatch
    from treetune.objectives.further_inputs import (
        DistributionObjective,
        MarkingObjective,
        ReferenceKlObjective,
        TeacherObjective,
    )
    from treetune.objectives.policy_gradient import ClippedPolicyGradient, PolicyGradient
    from treetune.rollouts.base import Rollout, Selection, Shaping
    from treetune.rollouts.context import FurtherProblems, RolloutContext
    from treetune.rollouts.metrics import trajectory_metrics
    from treetune.rollouts.numbers import Number, NumberGroup
    from treetune.rollouts.single_turn import SingleTurn, sample_answers
    from treetune.runtime.analysis import Analyzer, Findings
    from treetune.runtime.sinks import Sink
    from treetune.seeds import derived_random
    from treetune.tasks.base import GeneratedTask, Split, Task
    from treetune.tasks.drawing import DrawingContext, DrawingRule
    from treetune.tasks.graders.base import Grader
    from treetune.tasks.graders.conformance import Case, conformance
    from treetune.tasks.graders.extraction import fenced_blocks, find_values, last_between, last_box
    from treetune.tasks.graders.final_answer import FinalAnswer
    from treetune.tasks.mixed import MixedTask, TaskWithDomains, task_of
    from treetune.tasks.thoughts import after_thought
    from treetune.tree import Tree, answers_of
    from treetune.view.report.sections import ReportSection
    from treetune.vocabulary import (
        Episode,
        Grade,
        Message,
        Metrics,
        Problem,
        Segment,
        TextCodec,
        Trajectory,
    )

# OpenMP reads its settings once, when PyTorch is imported. Python runs this file before every other module of
# treetune: in commands, in the ranks of any launcher, in servers and workers, and in programs that use
# treetune as a library. So the call is here.
wait_briefly()

__version__ = "0.2.0"

# In groups, as a reader looks for them.
__all__ = [  # noqa: RUF022
    # Reading an existing run
    "open",
    # The nouns: from a problem to the rows that are trained on
    "Message",
    "Problem",
    "Grade",
    "Segment",
    "Trajectory",
    "Tree",
    "Episode",
    "Metrics",
    "TextCodec",
    "answers_of",
    # Randomness that depends only on the run's seed and a place, such as the iteration and the problem
    "derived_random",
    # Tasks: what is asked
    "Task",
    "GeneratedTask",
    "TaskWithDomains",
    "MixedTask",
    "task_of",
    "DrawingRule",
    "DrawingContext",
    "Split",
    # Graders: text and gold to a score, and the suite that tries a grader of yours
    "Grader",
    "FinalAnswer",
    "Unavailable",
    "Case",
    "conformance",
    # Finding the answer in a response
    "after_thought",
    "fenced_blocks",
    "find_values",
    "last_between",
    "last_box",
    # Rollouts: how answers grow from a problem
    "Rollout",
    "RolloutContext",
    "FurtherProblems",
    "SingleTurn",
    "sample_answers",
    "trajectory_metrics",
    # Credit: what each sampled token is worth
    "Credit",
    "GroupCredit",
    "TokenCredit",
    "OverAnotherCredit",
    "ContinuingCredit",
    "RewardModelCredit",
    "TrainerScores",
    "Gae",
    "Group",
    "gae",
    "advantage_metrics",
    "token_offsets",
    # Values of states for VinePPO's credit, and where an answer's states lie
    "ValueEstimator",
    "Budget",
    "FixedBudget",
    "Valuation",
    "Value",
    "StepValues",
    "OneLineStates",
    # Branching: what a tree samples next
    "Branching",
    "Branches",
    # Selection and shaping: which answers are trained on, and what they earn in addition to their score
    "Selection",
    "Shaping",
    # Objectives: what the trainer minimises
    "Objective",
    "TokenBatch",
    "KlPenalty",
    "DistributionObjective",
    "TeacherObjective",
    "ReferenceKlObjective",
    "MarkingObjective",
    "PolicyGradient",
    "ClippedPolicyGradient",
    # Environments and tools: what answers the policy between its turns
    "Environment",
    "Game",
    "Turn",
    "Again",
    "Tool",
    "NATIVE_FORMATS",
    "calls_of_turn",
    # Sandboxes: where programs of answers run
    "Sandbox",
    "SandboxUnavailable",
    "ProgramLimits",
    "PythonTool",
    "choose_sandbox",
    # Engines: what samples
    "EngineSettings",
    "EngineLaunch",
    "Engine",
    "Request",
    "ScoreRequest",
    "Completion",
    "SamplingParams",
    "Tolerance",
    # Measuring and showing: numbers of answers, analyses, mirrors of metrics, sections of a report
    "Number",
    "NumberGroup",
    "Analyzer",
    "Findings",
    "Sink",
    "ReportSection",
    # What a part says about a configuration: its findings, and its needs
    "Finding",
    "Need",
    # The features that a part gives and needs
    "TaskDemonstrations",
    "SampledAnswers",
    "Answers",
    "OneLine",
    "Forks",
    "Turns",
    "Continuations",
    "TextScores",
    "Advantages",
    "CentredRewards",
    "CriticValues",
    "CreditForRewards",
    "CreditForTrees",
    "UseOfAdvantages",
    "StaleAnswers",
    "Pairs",
    "UseOfPairs",
    "WholeBatch",
    # The folders in which users' modules are searched for, to pass on to another Python process
    "import_folders",
]

# The imports above once more, as data. A test checks that the three lists have the same names: the imports,
# `__all__` and this one.
_NAMES_IN = {
    "treetune.config.folders": ("import_folders",),
    "treetune.contracts": (
        "Advantages",
        "Answers",
        "CentredRewards",
        "Continuations",
        "CreditForRewards",
        "CreditForTrees",
        "CriticValues",
        "Finding",
        "Forks",
        "Need",
        "OneLine",
        "Pairs",
        "SampledAnswers",
        "StaleAnswers",
        "TaskDemonstrations",
        "TextScores",
        "Turns",
        "UseOfAdvantages",
        "UseOfPairs",
        "WholeBatch",
    ),
    "treetune.credit.base": ("ContinuingCredit", "Credit", "GroupCredit", "TokenCredit", "TrainerScores"),
    "treetune.credit.episodes": ("advantage_metrics",),
    "treetune.credit.gae": ("Gae", "gae"),
    "treetune.credit.grpo": ("Group",),
    "treetune.credit.literature.token_level": ("OverAnotherCredit",),
    "treetune.credit.reward_models": ("RewardModelCredit",),
    "treetune.credit.states.base": ("Budget", "FixedBudget"),
    "treetune.credit.states.one_line": ("OneLineStates",),
    "treetune.credit.values.base": ("StepValues", "Valuation", "Value", "ValueEstimator"),
    "treetune.domains.environments.base": ("Again", "Environment", "Game", "Turn"),
    "treetune.domains.environments.calls": ("NATIVE_FORMATS", "calls_of_turn"),
    "treetune.domains.environments.tools": ("Tool",),
    "treetune.domains.sandbox.base": ("ProgramLimits", "Sandbox"),
    "treetune.domains.sandbox.bubblewrap": ("choose_sandbox",),
    "treetune.domains.sandbox.python_tool": ("PythonTool",),
    "treetune.engine.base": ("Engine", "EngineLaunch", "Tolerance"),
    "treetune.engine.requests": ("Completion", "Request", "SamplingParams", "ScoreRequest"),
    "treetune.engine.settings": ("EngineSettings",),
    "treetune.exceptions": ("SandboxUnavailable", "Unavailable"),
    "treetune.lab.trees.branching": ("Branches", "Branching"),
    "treetune.models.tokenizer": ("token_offsets",),
    "treetune.objectives.base": ("KlPenalty", "Objective", "TokenBatch"),
    "treetune.objectives.further_inputs": (
        "DistributionObjective",
        "MarkingObjective",
        "ReferenceKlObjective",
        "TeacherObjective",
    ),
    "treetune.objectives.policy_gradient": ("ClippedPolicyGradient", "PolicyGradient"),
    "treetune.rollouts.base": ("Rollout", "Selection", "Shaping"),
    "treetune.rollouts.context": ("FurtherProblems", "RolloutContext"),
    "treetune.rollouts.metrics": ("trajectory_metrics",),
    "treetune.rollouts.numbers": ("Number", "NumberGroup"),
    "treetune.rollouts.single_turn": ("SingleTurn", "sample_answers"),
    "treetune.runtime.analysis": ("Analyzer", "Findings"),
    "treetune.runtime.sinks": ("Sink",),
    "treetune.seeds": ("derived_random",),
    "treetune.tasks.base": ("GeneratedTask", "Split", "Task"),
    "treetune.tasks.drawing": ("DrawingContext", "DrawingRule"),
    "treetune.tasks.graders.base": ("Grader",),
    "treetune.tasks.graders.conformance": ("Case", "conformance"),
    "treetune.tasks.graders.extraction": ("fenced_blocks", "find_values", "last_between", "last_box"),
    "treetune.tasks.graders.final_answer": ("FinalAnswer",),
    "treetune.tasks.mixed": ("MixedTask", "TaskWithDomains", "task_of"),
    "treetune.tasks.thoughts": ("after_thought",),
    "treetune.tree": ("Tree", "answers_of"),
    "treetune.view.report.sections": ("ReportSection",),
    "treetune.vocabulary": (
        "Episode",
        "Grade",
        "Message",
        "Metrics",
        "Problem",
        "Segment",
        "TextCodec",
        "Trajectory",
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports the module of a public name when the name is first asked for (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'treetune' has no attribute {name!r}", name=name)
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # Python finds it there the next time, and doesn't call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def open(directory: str | Path) -> Any:
    """Opens a run's directory to read: a `treetune.runtime.frames.RunFrames` with `metrics`, `answers`,
    `episodes` and `values` as pandas data frames. Raises ValueError if there is no run."""
    # The module is imported here and by its name, since it imports this package itself.
    return import_module("treetune.runtime.frames").RunFrames(Path(directory))
