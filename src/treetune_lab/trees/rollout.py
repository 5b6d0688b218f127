"""Answers that grow out of each other: the rollout is a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import (
    Answers,
    CreditForTrees,
    Experiment,
    Feature,
    Finding,
    Need,
    OneLine,
    SampledAnswers,
)
from treetune.inference.base import Completion, Request, SamplingParams
from treetune.rollouts.answers import (
    SampledRollout,
    encoded_prompt,
    rank_share,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import trajectory_metrics
from treetune.rollouts.numbers import measured
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Metrics, Problem
from treetune_lab.trees.branching import Branching
from treetune_lab.trees.growth import Growth
from treetune_lab.trees.numbers import tree_metrics


@Rollout.register("tree")
@dataclass(frozen=True, kw_only=True)
class TreeRollout(SampledRollout):
    """`samples` answers to each problem from its prompt, and round by round further ones that begin as an
    answer does up to where the tree branches, as `branching` says. Every answer is trained on, and what
    answers share was sampled once and is trained once. A problem's tree grows as soon as its own answers are
    there, whatever the others do.

    `most_tokens` bounds what is sampled for a problem: there are no branches that could exceed it if they
    were as long as they may be. What is affordable depends on how long answers came out, which makes even
    fair branches a little unfair where the bound bites.

    ``tree/…`` are means over trees: answers, nodes, depth, sampled tokens, tokens of as many answers from the
    prompt, and the share of these that didn't have to be sampled.
    """

    samples: Annotated[int, Gt(0)] = 4
    """Answers from the prompt."""
    branching: Branching
    most_tokens: Annotated[int, Gt(0)] | None = None
    temperature: Annotated[float, Gt(0)] = 1.0
    """Of sampling, and of the log-probs in training."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, and stay in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.samples * self.max_tokens
        if self.most_tokens is not None and self.most_tokens <= least:
            raise ValueError(
                f"most_tokens is {self.most_tokens}, and {self.samples} answers of max_tokens ="
                f" {self.max_tokens} may take {least}, so that no tree would branch: raise it, or leave it"
                " out"
            )

    @property
    def gives(self) -> tuple[Feature, ...]:
        return SampledAnswers(), Answers(self.samples), OneLine()

    needs = (
        Need(CreditForTrees(), "its answers share tokens, which are trained once"),
        Need(Answers(2), "branches are compared", "set the rollout's samples to 2 or more"),
    )

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        if not experiment.selection.keeps_groups:
            yield Finding(
                "the selection leaves out some of a problem's answers, and with them tokens that the others"
                " share",
                "$.selection.type",
                "choose 'all' or 'mixed_groups'",
            )
        objective = experiment.trainer.objective
        if objective.needs_whole_sequences:
            yield Finding(
                "the objective looks at whole answers, and what they share is trained in one of them alone",
                "$.trainer.objective.type",
                "choose one that looks at tokens, such as 'ppo'",
            )
        elif objective.aggregation == "sequence":
            yield Finding(
                "aggregation 'sequence' would weigh tokens by how many are trained in their answer, which is"
                " only what it doesn't share with an earlier one",
                "$.trainer.objective.aggregation",
                "choose 'token' or 'constant'",
            )

    def most_answers(self, problems: int) -> int:
        return problems * self.branching.most_answers(self.samples)

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        # All prompts, not this rank's only: if one does not fit, no rank is left waiting for another.
        for problem in problems:
            sampling = context.task.of(problem).sampling(self.sampling)
            encoded_prompt(context, problem, sampling.max_tokens, self.max_prompt_tokens)
        growths = [self._growth(context, problem) for problem in rank_share(context, problems)]
        _grow(context, growths)
        trees = measured([growth.tree() for growth in growths], context.codec)
        return trees, trajectory_metrics(context, answers_of(trees)) | tree_metrics(context, trees)

    def _growth(self, context: RolloutContext, problem: Problem) -> Growth:
        sampling = context.task.of(problem).sampling(self.sampling)
        prompt_ids = encoded_prompt(context, problem, sampling.max_tokens, self.max_prompt_tokens)
        budget = context.settings.token_budget(prompt_ids, sampling.max_tokens)
        return Growth(
            context=context,
            problem=problem,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(**vars(sampling) | {"max_tokens": budget}),
            branching=self.branching,
            samples=self.samples,
            most_tokens=self.most_tokens,
            unfinished_reward=self.unfinished_reward,
        )


def _grow(context: RolloutContext, growths: Sequence[Growth]) -> None:
    """Samples all trees to their ends, each as fast as its own answers come in."""
    assert context.engine is not None, "a rollout that samples needs an engine"
    owners: list[tuple[Growth, int]] = []  # of each request: whose it is, and its number in that one's round
    done = total = 0

    def asked(growth: Growth, requests: list[Request]) -> list[Request]:
        nonlocal total
        owners.extend((growth, number) for number in range(len(requests)))
        total += sum(request.n for request in requests)
        return requests

    def on_result(index: int, completions: list[Completion]) -> list[Request]:
        nonlocal done
        growth, number = owners[index]
        done += len(completions)
        further = asked(growth, growth.receive(number, completions))
        context.log.progress(done, total)
        return further

    requests = [request for growth in growths for request in asked(growth, growth.begin())]
    if requests:
        context.engine.generate(requests, on_result)
