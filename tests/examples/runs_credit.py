"""The advantages that a run of treetune gives answers, for programs that train with other packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.support.contexts import context_of
from treetune.config.build import build
from treetune.credit.base import Credit
from treetune.credit.library.answers import GradedAnswer, read_answers
from treetune.engine.base import EngineLaunch
from treetune.engine.held_model import HeldModelEngine
from treetune.engine.requests import SamplingParams
from treetune.models.tokenizer import codec_of
from treetune.rollouts.answers import split_steps
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.pool import GraderPool
from treetune.tasks.splitter_task import SplitterTask
from treetune.tasks.steps import Lines, StepSplitter
from treetune.tree import trees_of
from treetune.vocabulary import Grade, Problem, Segment, Trajectory, token_array

STEPS = Lines(newline="ends")


@dataclass(frozen=True, kw_only=True)
class RewardOfRow(Grader):
    """Grades by a function of the text and the problem's row."""

    reward: Callable[[str, Any], float]
    isolation = "inline"

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(reward=self.reward(response, problem.data), outcome="ok")


@dataclass(frozen=True, kw_only=True)
class TaskOfLines(SplitterTask):
    """A task whose steps are lines."""

    grader: Grader
    steps: StepSplitter = STEPS


def advantages_in_run(
    credit: dict[str, Any],
    answers: Sequence[tuple[Any, Sequence[int], Sequence[int], float, str | None]],
    *,
    model: Any,
    tokenizer: Any,
    reward: Callable[[str, Any], float],
    max_tokens: int,
    seed: int,
    iteration: int,
) -> list[Any]:
    """Returns the advantages of each answer, from the credit of a run.

    Args:
        answers: Of each answer its row, prompt_ids, response_ids, reward and group.
    """
    codec = codec_of(tokenizer)
    graded = [GradedAnswer(prompt, ids, value, group) for _, prompt, ids, value, group in answers]
    names = [answer.group for answer in read_answers(graded)]
    grader = RewardOfRow(reward=reward)
    launch = EngineLaunch(Path(), Path(), seed=0, context_length=128, end_ids=codec.end_ids)
    context = context_of(
        task=TaskOfLines(grader=grader),
        engine=HeldModelEngine(model, codec, launch),
        grader=GraderPool(grader),
        codec=codec,
        sampling=SamplingParams(max_tokens=max_tokens),
        context_length=max(len(answer[1]) for answer in answers) + max_tokens,
        unfinished_reward=None,
        seed=seed,
        iteration=iteration,
    )
    trajectories = []
    for number, ((row, prompt_ids, ids, value, _), name) in enumerate(zip(answers, names, strict=True)):
        problem = Problem(id=str(name), prompt="", gold="", data=row)
        text = codec.decode(ids)
        trajectories.append(
            Trajectory(
                problem=problem,
                sample=names[:number].count(name),
                prompt_ids=prompt_ids,
                segments=(Segment(ids),),
                finish_reason="stop",
                text=text,
                grade=Grade(reward=value, outcome="ok"),
                step_ends=split_steps(context, problem, token_array(ids), text),
            )
        )
    episodes, _ = build(Credit, credit).assign(context, trees_of(trajectories))
    by_id = {episode.trajectory: episode.advantages for episode in episodes}
    return [by_id[trajectory.id] for trajectory in trajectories]
