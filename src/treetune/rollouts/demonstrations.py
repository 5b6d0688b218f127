"""Demonstrations of the task in place of sampled answers, for supervised fine-tuning.

Example: a demonstration of the problem ``2+2=?`` becomes an answer of one segment, ``4`` and the end token,
without log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Literal, NamedTuple, TypeVar

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Feature, Finding, Need, OneLine, TaskDemonstrations
from treetune.rollouts.answers import (
    MOST_EXAMPLE_PROBLEMS,
    encode_prompt,
    measure_trees,
    rank_share,
    split_steps,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.seeds import derive_seed
from treetune.tasks.mixed import parts_of, task_of
from treetune.tree import Tree, trees_of
from treetune.vocabulary import (
    Grade,
    Metrics,
    Problem,
    Segment,
    TextCodec,
    Trajectory,
    concatenate,
    token_array,
)

ASSUMED_RIGHT = Grade(reward=1.0, outcome="ok")
"""The grade of demonstrations that are not graded."""


@Rollout.register("demonstrations")
@dataclass(frozen=True, kw_only=True)
class Demonstrations(Rollout):
    """Takes the task's demonstrations, drawn anew in every iteration, as answers, and adds the end token to
    each.

    A demonstration becomes one segment, which is trained. It has no log-probs and no policy version, since no
    policy sampled it. A demonstration with threads becomes the segments that a rollout would have made of it:
    the injected segments are not trained, and each segment is a step.
    """

    samples: Annotated[int, Gt(0)] = 1
    """The number of demonstrations of each problem."""
    graded: bool = True
    """Whether demonstrations are graded like answers, so that ``episodes/reward`` shows how good they are. If
    it is false, all of them count as right: this saves time if grading is expensive and their quality is
    known."""
    too_long: Literal["stop", "leave_out"] = "stop"
    """The treatment of a demonstration that doesn't fit into the context. ``stop``: it stops the run.
    ``leave_out``: it is left out and counted in ``episodes/left_out``."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return Answers(self.samples), OneLine()

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (Need(TaskDemonstrations(), "its answers are demonstrations"),)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if TaskDemonstrations() not in experiment.task.gives:
            return  # `needs` reports it
        problems: list[Problem] = []
        for task in parts_of(experiment.task):
            problems += task.examples(MOST_EXAMPLE_PROBLEMS)
        try:
            # The seed 0 is arbitrary, since these demonstrations are only examples.
            texts = [task_of(experiment.task, problem).demonstration(problem, 0) for problem in problems]
        except ValueError as error:
            yield Finding.of(error, "$.task")
            return
        for demonstration_format in _FORMATS.values():
            yield from demonstration_format.check(texts, experiment.model.single_tokens())
        whole_texts = [problem.prompt + text for problem, text in zip(problems, texts, strict=True)]
        lengths = experiment.model.prompt_tokens(whole_texts)
        # `>=` and not `>`: the context must also have room for the end token.
        if lengths and max(lengths) >= experiment.context_length and self.too_long == "stop":
            yield Finding(
                f"prompt and demonstration have {max(lengths)} tokens and the end token in this task, and"
                f" context_length is {experiment.context_length}",
                "$.context_length",
                f"raise it to {max(lengths) + 1} or more, or set the rollout's too_long to 'leave_out'",
            )

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        """Makes the answers of the iteration. Collective.

        Raises:
            ValueError: A demonstration does not fit into the context, or has threads that a rollout couldn't
                have made.
        """
        share = rank_share(context, problems)
        pending: list[_Pending] = []
        left_out = 0
        for problem in share:
            for sample in range(self.samples):
                seed = derive_seed(context.seed, context.iteration, problem.id, sample, "demonstration")
                demonstration = task_of(context.task, problem).demonstration(problem, seed)
                segments = _make_segments(context.codec, problem, demonstration)
                response_ids = concatenate([segment.token_ids for segment in segments])
                length = len(context.codec.encode_prompt(problem)) + len(response_ids)
                if self.too_long == "leave_out" and length > context.settings.context_length:
                    left_out += 1
                    continue
                # Raises an error that names the problem if prompt and response don't fit into the context.
                prompt_ids = encode_prompt(context, problem, len(response_ids))
                text = context.codec.decode(response_ids)
                answer = Trajectory(
                    problem=problem,
                    sample=sample,
                    prompt_ids=prompt_ids,
                    segments=segments,
                    finish_reason="stop",
                    text=text,
                    grade=ASSUMED_RIGHT,
                    step_ends=_find_step_ends(context, problem, segments, text),
                )
                future_grade = context.grader.submit(text, problem) if self.graded else None
                pending.append(_Pending(answer, future_grade))
                context.log.progress(len(pending), len(share) * self.samples)

        # All demonstrations have been submitted before this waits for the first grade, so that the grader's
        # processes work in parallel.
        answers = []
        for answer, future_grade in pending:
            if future_grade is not None:
                answer = replace(answer, grade=future_grade.result())
            answers.append(answer)
        trees, metrics = measure_trees(context, trees_of(answers))
        if self.too_long == "leave_out":
            left_out_by_rank = context.ranks.exchange("left-out", left_out)
            metrics["episodes/left_out"] = float(sum(left_out_by_rank))
        return trees, metrics


class _Pending(NamedTuple):
    """A demonstration, and its future grade; None if demonstrations aren't graded."""

    answer: Trajectory
    future_grade: Future[Grade] | None


class DemonstrationFormat:
    """A format of demonstrations that consist of several segments, such as those with ThreadWeaver's threads.
    It cuts a text into the segments that a rollout would have made of it."""

    @classmethod
    def register(cls, name: str) -> Callable[[type[Format]], type[Format]]:
        """Returns a class decorator that registers a format: ``@DemonstrationFormat.register("threads")``."""

        def add(format_class: type[Format]) -> type[Format]:
            _FORMATS[name] = format_class()
            return format_class

        return add

    def check(self, texts: Sequence[str], single_tokens: frozenset[str] | None) -> Iterable[Finding]:
        """Returns findings about a task's first demonstrations.

        Args:
            texts: The demonstrations.
            single_tokens: The texts that are single tokens of the tokenizer; None if they are not known yet.
        """
        return ()

    def segments(self, codec: TextCodec, problem: Problem, text: str) -> tuple[Segment, ...] | None:
        """Returns the segments of a demonstration. The last one ends with the end token. Returns None if the
        text is not in this format.

        Raises:
            ValueError: The text is in this format, but a rollout couldn't have made it.
        """
        raise NotImplementedError


Format = TypeVar("Format", bound=DemonstrationFormat)

_FORMATS: dict[str, DemonstrationFormat] = {}


def _make_segments(codec: TextCodec, problem: Problem, text: str) -> tuple[Segment, ...]:
    """Returns the segments of a demonstration: those of its format, or a single one if it has none."""
    for demonstration_format in _FORMATS.values():
        segments = demonstration_format.segments(codec, problem, text)
        if segments is not None:
            return segments
    end_token = token_array([codec.eos_id])
    return (Segment(concatenate([codec.encode_answer(problem, text), end_token])),)


def _find_step_ends(
    context: RolloutContext, problem: Problem, segments: Sequence[Segment], text: str
) -> tuple[int, ...]:
    """Returns the token offsets at which a demonstration's steps end.

    If there are several segments, each is a step. If there is one segment, the task splits its text into
    steps.
    """
    if len(segments) == 1:
        return split_steps(context, problem, segments[0].token_ids, text)
    return tuple(accumulate(len(segment.token_ids) for segment in segments))
