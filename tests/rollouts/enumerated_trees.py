"""All trees that a rollout could grow in the enumerable language, with their probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tests.rollouts import tabular_mdp as mdp
from tests.rollouts.choices import Choices
from treetune.inference.base import Completion, Request
from treetune.tree import Tree
from treetune_lab.trees.rollout import TreeRollout


class DrawingEngine(mdp.TabularEngine):
    """Draws whole continuations, in the order in which they are asked for, with their log-probs."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices

    def _completion(self, request: Request, rng: object, sample: int) -> Completion:
        prefix = mdp.response_part(request.prompt_ids)
        possible = mdp.answers(prefix, mdp.budget(request))
        answer = list(possible)[self._choices.draw(list(possible.values()))]
        logprobs = [math.log(mdp.policy(answer[:at])[answer[at]]) for at in range(len(prefix), len(answer))]
        return Completion(answer[len(prefix) :], logprobs, mdp.finish_reason(answer), policy_version=3)


def trees(rollout: TreeRollout) -> Iterator[tuple[Tree, float]]:
    choices = Choices()
    for _ in choices.ways():
        ((tree,), _) = rollout.run(mdp.context(engine=DrawingEngine(choices)), mdp.problems(1))
        yield tree, choices.probability


def exact_gradient(max_tokens: int) -> mdp.Gradient:
    """Of the expected reward of an answer of at most so many tokens."""
    gradient: mdp.Gradient = {}
    for answer, probability in mdp.answers((), max_tokens).items():
        earned = float(answer.count(mdp.A) >= 2)  # cut off or not
        mdp.add(gradient, mdp.score_gradient(answer, [earned] * len(answer)), probability)
    return gradient
