"""Answers of the task's teacher, to learn from without sampling (supervised fine-tuning)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Annotated, Literal, TypeVar

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Feature, Finding, OneLine
from treetune.rollouts.answers import EXAMPLES, encoded_prompt, measured_trees, rank_share, steps_of
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.seeds import derive_seed
from treetune.tree import Tree, trees_of
from treetune.vocabulary import (
    Grade,
    Metrics,
    Problem,
    Segment,
    TextCodec,
    Trajectory,
    joined,
    token_array,
)

TAKEN_FOR_RIGHT = Grade(reward=1.0, outcome="ok")


@Rollout.register("demonstrations")
@dataclass(frozen=True, kw_only=True)
class Demonstrations(Rollout):
    """Demonstrations of the task, drawn anew in every iteration, ended with the end token. Their segment is
    trained, but has no log-probs and no policy version: no policy wrote it.

    One with threads becomes the segments that a rollout would have made of it: what that injects is not
    trained, and each of its steps is a segment.
    """

    samples: Annotated[int, Gt(0)] = 1
    """Demonstrations of each problem."""
    graded: bool = True
    """Whether they are graded as answers are, so that ``episodes/reward`` says how good the teacher is. Where
    grading is dear and the teacher known, false takes all of them for right."""
    too_long: Literal["stop", "leave_out"] = "stop"
    """Whether one that doesn't fit into the context stops the run, or is left out (and counted in
    ``episodes/left_out``)."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return Answers(self.samples), OneLine()

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        try:
            experiment.task.check_demonstrations()
        except ValueError as error:
            yield Finding.of(error, "type", "choose a rollout that samples, such as 'single_turn'")
            return
        problems = [one for task in experiment.task.parts() for one in task.examples(EXAMPLES)]
        try:
            texts = [experiment.task.of(problem).demonstration(problem, 0) for problem in problems]
        except ValueError as error:
            yield Finding.of(error, "$.task")
            return
        for form in _FORMATS.values():
            yield from form.check(texts, experiment.model.single_tokens())
        written = zip(problems, texts, strict=True)
        lengths = experiment.model.prompt_tokens([problem.prompt + text for problem, text in written])
        if lengths and max(lengths) >= experiment.context_length and self.too_long == "stop":
            yield Finding(
                f"prompt and demonstration have {max(lengths)} tokens and their end in this task, and"
                f" context_length is {experiment.context_length}",
                "$.context_length",
                f"raise it to {max(lengths) + 1} or more, or set the rollout's too_long to 'leave_out'",
            )

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        """Raises ValueError for a demonstration that does not fit into the context, or whose threads
        a rollout couldn't make."""
        share = rank_share(context, problems)
        written = []
        left_out = 0
        for problem in share:
            for sample in range(self.samples):
                seed = derive_seed(context.seed, context.iteration, problem.id, sample, "demonstration")
                segments = _segments(
                    context.codec, problem, context.task.of(problem).demonstration(problem, seed)
                )
                response_ids = joined([segment.token_ids for segment in segments])
                length = len(context.codec.encode_prompt(problem)) + len(response_ids)
                if self.too_long == "leave_out" and length > context.settings.context_length:
                    left_out += 1
                    continue
                text = context.codec.decode(response_ids)
                prompt_ids = encoded_prompt(context, problem, len(response_ids))
                grade = context.grader.submit(text, problem) if self.graded else None
                written.append((problem, sample, text, prompt_ids, segments, grade))
                context.log.progress(len(written), len(share) * self.samples)
        trees = trees_of(
            Trajectory(
                problem=problem,
                sample=sample,
                prompt_ids=prompt_ids,
                segments=segments,
                finish_reason="stop",
                text=text,
                grade=grade.result() if grade else TAKEN_FOR_RIGHT,
                step_ends=_step_ends(context, problem, segments, text),
            )
            for problem, sample, text, prompt_ids, segments, grade in written
        )
        trees, metrics = measured_trees(context, trees)
        if self.too_long == "leave_out":
            everyones = context.ranks.exchange("left-out", [left_out])
            metrics["episodes/left_out"] = float(sum(chain.from_iterable(everyones)))
        return trees, metrics


class DemonstrationFormat:
    """A form of text whose demonstrations become the segments that a rollout would have made of them."""

    @classmethod
    def register(cls, name: str) -> Callable[[type[Format]], type[Format]]:
        """Class decorator: ``@DemonstrationFormat.register("threads")``."""

        def add(form: type[Format]) -> type[Format]:
            _FORMATS[name] = form()
            return form

        return add

    def check(self, texts: Sequence[str], single_tokens: frozenset[str] | None) -> Iterable[Finding]:
        """Returns the findings on a task's first demonstrations. `single_tokens` are the tokenizer's; None:
        nobody knows them yet."""
        return ()

    def segments(self, codec: TextCodec, problem: Problem, text: str) -> tuple[Segment, ...] | None:
        """Returns the segments of a demonstration, the last one with the end token; None for a text of
        another form. Raises ValueError for a text that a rollout couldn't make."""
        raise NotImplementedError


Format = TypeVar("Format", bound=DemonstrationFormat)

_FORMATS: dict[str, DemonstrationFormat] = {}


def _segments(codec: TextCodec, problem: Problem, text: str) -> tuple[Segment, ...]:
    for form in _FORMATS.values():
        if (segments := form.segments(codec, problem, text)) is not None:
            return segments
    return (Segment(joined([codec.encode_answer(problem, text), token_array([codec.eos_id])])),)


def _step_ends(
    context: RolloutContext, problem: Problem, segments: Sequence[Segment], text: str
) -> tuple[int, ...]:
    if len(segments) == 1:
        return steps_of(context, problem, segments[0].token_ids, text)
    return tuple(accumulate(len(segment.token_ids) for segment in segments))
