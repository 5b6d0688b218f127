"""Compares what a credit needs with what answers from elsewhere, an engine and a grader give.

In a run, `treetune.findings` compares the parts of the configuration with each other. Here it compares the
credit with substitutes: `AnswersElsewhere` for the rollout, `ScoringEngine` for the engine, and
`OtherTrainer` for the trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from treetune.contracts import (
    CONFIG_ROOT,
    Advantages,
    Answers,
    Continuations,
    CreditForTrees,
    Feature,
    OneLine,
    Part,
    SampledAnswers,
    TextScores,
    UseOfAdvantages,
)
from treetune.credit.base import Credit
from treetune.credit.library.answers import GradedAnswer
from treetune.credit.literature.optimal_token_baseline import OptimalTokenBaseline
from treetune.credit.literature.probability_mask import ProbabilityMask
from treetune.credit.literature.self_distillation import SelfDistillation
from treetune.credit.states.by_tokens import LowProbability
from treetune.credit.states.one_line import StepBoundaries
from treetune.engine.requests import SamplingParams
from treetune.findings import collect_findings, placed_parts
from treetune.rollouts.unavailable import least_answers
from treetune.tasks.base import Task

ACCEPTED_ENGINES = "the address of a vLLM server, a folder with a model, a transformers model, or an Engine"
"""A list of the engines that can sample and score, for messages."""

PARTS_THAT_READ_LOGPROBS = (LowProbability, OptimalTokenBaseline, ProbabilityMask)
"""Parts that read the log-probs with which tokens were sampled."""


@dataclass(frozen=True)
class AnswersElsewhere(Part):
    """The answers of another trainer, in the place of a rollout. They have no threads, but may have turns."""

    sampling: SamplingParams
    least: int
    """The number of answers in the smallest group."""
    has_turns: bool
    """Whether some answers have tokens that the policy didn't sample."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return SampledAnswers(), Answers(self.least), OneLine(turns=self.has_turns)


@dataclass(frozen=True)
class ScoringEngine(Part):
    """The engine of the call. It declares that it scores texts: `check_credit` has refused an engine that
    can't, if the credit needs it."""

    gives = (TextScores(),)


@dataclass(frozen=True)
class OtherTrainer(Part):
    """The user's trainer, which uses the advantages."""

    gives = (UseOfAdvantages(),)


@dataclass(frozen=True)
class CallOfLibrary(Part):
    """A call of the library in the place of an experiment, with the fields that `Part.check` reads."""

    rollout: AnswersElsewhere
    engine: ScoringEngine
    credit: Credit
    trainer: OtherTrainer
    task: Task
    context_length: int
    restart: str = "never"


def check_credit(
    credit: Credit, *, has_engine: bool, engine_scores: bool, has_grader: bool, has_sampling: bool
) -> None:
    """Raises ValueError for a credit that can't be used in the library, or that needs something that the call
    doesn't give.

    Args:
        credit: The credit.
        has_engine: Whether the call gives an engine.
        engine_scores: Whether the engine, if there is one, can score given texts.
        has_grader: Whether the call gives a grader.
        has_sampling: Whether the call gives sampling parameters.
    """
    name = _name_of(credit)
    if credit.needs_critic:
        raise ValueError(
            f"the credit {name!r} learns a critic, which only a run of treetune trains: choose one without,"
            " such as 'group' or 'monte_carlo'"
        )
    scores = credit.trainer_scores
    # `reference_model` is a model that a run's trainer runs for the credit. Example: `distillation` gives the
    # advantages 0, and the trainer adds log-probs of this model to them.
    if Advantages(before_training=True) not in credit.gives or scores.reference_model is not None:
        raise ValueError(
            f"the credit {name!r} leaves advantages to the trainer of a run: choose one that gives them, such"
            " as 'group' or 'monte_carlo'"
        )
    if scores.reference:
        raise ValueError(
            f"the credit {name!r} scores given texts with a reference model, which only a run of treetune"
            " does: set its scorer to 'policy', or choose a credit that reads rewards alone, such as 'group'"
        )
    if scores.distributions:
        raise ValueError(
            f"the credit {name!r} reads the policy's entropies, which only a run of treetune computes: choose"
            " a credit that reads rewards or the probabilities of sampled tokens, such as 'group' or"
            " 'probability_mask'"
        )
    if any(isinstance(placed.part, SelfDistillation) for placed in placed_parts(credit)):
        raise ValueError(
            f"the credit {name!r} makes prompts with the chat template of a run: choose a credit that reads"
            " rewards alone, such as 'group', or one that samples continuations, such as 'monte_carlo'"
        )
    if credit.scores_texts and has_engine and not engine_scores:
        raise ValueError(
            f"the credit {name!r} scores given texts, and the engine can't: give {ACCEPTED_ENGINES}"
        )
    samples_continuations = Continuations() in credit.gives
    missing = []
    if not has_engine and (samples_continuations or credit.scores_texts):
        missing.append(f"engine ({ACCEPTED_ENGINES})")
    if not has_grader and samples_continuations:
        missing.append("grader (a function (prompt, text) -> reward, or {'type': 'math'})")
    if not has_sampling and samples_continuations:
        missing.append("sampling (SamplingParams(max_tokens=…), as the answers were sampled)")
    if missing:
        work = "scores given texts"
        if samples_continuations:
            work = "samples and grades continuations of answers"
        raise ValueError(f"the credit {name!r} {work}: give {', '.join(missing)}")


def count_needed_answers(credit: Credit) -> int:
    """Returns how many answers of each group the credit needs: 2 for RLOO, 1 for REINFORCE."""
    return max(map(least_answers, _parts_of(credit)), default=1)


def reads_logprobs(credit: Credit) -> bool:
    """Returns whether the credit reads the log-probs with which tokens were sampled."""
    return any(isinstance(part, PARTS_THAT_READ_LOGPROBS) for part in _parts_of(credit))


def _parts_of(credit: Credit) -> list[Part]:
    """Returns the credit itself and all parts in its settings, such as a value estimator."""
    return [placed.part for placed in placed_parts(credit) if isinstance(placed.part, Part)]


def check_answers(
    credit: Credit,
    answers: Sequence[GradedAnswer],
    task: Task,
    sampling: SamplingParams,
    context_length: int,
    *,
    has_text: bool,
) -> None:
    """Raises ValueError for answers to which the credit can't be assigned.

    Args:
        credit: The credit, which `check_credit` has checked.
        answers: Answers that `read_answers` has checked.
        task: The substitute of a run's task.
        sampling: The parameters with which the answers were sampled.
        context_length: The largest number of tokens of prompt and answer together.
        has_text: Whether there is a tokenizer that decodes the answers.
    """
    smallest_size = _check_groups(credit, answers)
    _check_each_answer(credit, answers, sampling, context_length, has_text=has_text)
    has_turns = any(answer.sampled is not None and not answer.sampled.all() for answer in answers)
    rollout = AnswersElsewhere(sampling, smallest_size, has_turns)
    _check_call(CallOfLibrary(rollout, ScoringEngine(), credit, OtherTrainer(), task, context_length))


def _name_of(credit: Credit) -> str:
    return credit.registered_name() or type(credit).__name__


def _check_groups(credit: Credit, answers: Sequence[GradedAnswer]) -> int:
    """Returns the number of answers in the smallest group. Raises ValueError if the credit needs more, or if
    answers branch off from each other and the credit can't take that."""
    group_sizes = Counter(answer.group for answer in answers)  # the number of answers of each group
    smallest_group, smallest_size = min(group_sizes.items(), key=lambda group_and_size: group_and_size[1])
    needed_answers = count_needed_answers(credit)
    if smallest_size < needed_answers:
        raise ValueError(
            f"the credit {_name_of(credit)!r} compares each answer with the others of its group, and the"
            f" group {smallest_group!r} has {smallest_size}: give {needed_answers} or more answers of each"
            " group"
        )
    if any(answer.fork is not None for answer in answers) and CreditForTrees() not in credit.gives:
        raise ValueError(
            f"answers branch off from each other (fork), and the credit {_name_of(credit)!r} would train"
            " their shared tokens several times: choose the credit 'tree' or 'monte_carlo', or leave out fork"
        )
    return smallest_size


def _check_each_answer(
    credit: Credit,
    answers: Sequence[GradedAnswer],
    sampling: SamplingParams,
    context_length: int,
    *,
    has_text: bool,
) -> None:
    """Raises ValueError for an answer that lacks what the credit reads, or is too long to be continued."""
    reads_steps = any(isinstance(part, StepBoundaries) for part in _parts_of(credit))
    needs_step_ends = reads_steps and not has_text
    needs_logprobs = reads_logprobs(credit)
    continues_answers = Continuations() in credit.gives
    for number, answer in enumerate(answers):
        if needs_step_ends and answer.step_ends is None:
            raise ValueError(
                f"answer {number} has no step_ends, and without its text it can't be split into steps: give"
                " the tokenizer, or step_ends"
            )
        if needs_logprobs and answer.logprobs is None:
            raise ValueError(
                f"answer {number} has no logprobs, and the credit {_name_of(credit)!r} reads the"
                " probabilities that its tokens were sampled with: give logprobs"
            )
        most_tokens = min(sampling.max_tokens, context_length - len(answer.prompt_ids))
        if continues_answers and len(answer.response_ids) > most_tokens:
            raise ValueError(
                f"answer {number} has {len(answer.response_ids)} tokens, and an answer to its prompt of"
                f" {len(answer.prompt_ids)} may have {most_tokens}: raise sampling.max_tokens (or"
                " context_length) to what the answers were sampled with"
            )


def _check_call(root: CallOfLibrary) -> None:
    """Raises ValueError if a part of the credit finds that it doesn't fit the call.

    `root` takes the place of an experiment: it has substitutes for the rollout, the engine and the trainer.
    """
    for _, finding in collect_findings(root):
        if finding.level == "warning":
            continue
        # The remedy of an unmet need may name another rollout, and a user of the library can't choose one.
        # The key shows that a finding is of this kind: it is a tuple that begins at the configuration's root.
        is_unmet_need = isinstance(finding.key, tuple) and finding.key[:1] == (CONFIG_ROOT,)
        remedy = "choose another credit, or other settings of it" if is_unmet_need else finding.remedy
        raise ValueError(f"{finding.what}: {remedy}" if remedy else finding.what)
