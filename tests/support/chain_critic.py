"""A critic for the languages whose truth is known: fitted to earlier answers, as wrong as critics are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.support.chains import (
    WORDINGS,
    WORDS_OF_STEP,
    Chain,
    ChainTask,
    answers_of_chains,
    statuses_of,
    token,
    true_values,
)
from treetune.vocabulary import Column, Trajectory

BEHIND_IN_SKILL = 0.1
"""By how much the policies that a critic has learnt from were worse, on average."""


@dataclass(frozen=True)
class ChainCritic:
    """A linear guess from an answer's last status and how far it has come. It knows nothing of the problem's
    difficulty, and understands half of the ways in which a status can be told."""

    weights: Column
    chain: Chain

    @staticmethod
    def of_earlier(task: ChainTask, samples: int, seed: int) -> ChainCritic:
        """Least squares to the rewards of answers of a slightly worse policy, `samples` to each problem."""
        earlier = replace(task, skill=max(task.skill - BEHIND_IN_SKILL, 0.0))
        chain: Chain = task.problems("train")[0].data["chain"]
        rows: list[list[float]] = []
        rewards: list[float] = []
        for answer in answers_of_chains(earlier, samples, seed):
            of_answer = _features(chain, answer)
            rows += of_answer
            rewards += [answer.reward] * len(of_answer)
        weights, *_ = np.linalg.lstsq(np.array(rows), np.array(rewards), rcond=None)
        return ChainCritic(weights, chain)

    def __call__(self, answers: Sequence[Trajectory]) -> list[Column]:
        """A value before each token; within a step its status is already known."""
        found = []
        for answer in answers:
            of_steps = self._values(answer)
            places = range(len(answer.response_ids))
            behind = [-(-place // WORDS_OF_STEP) for place in places]
            found.append(np.array([of_steps[min(step, self.chain.steps)] for step in behind]))
        return found

    def error(self, answers: Sequence[Trajectory]) -> float:
        """The root of the mean squared error before the steps of these answers."""
        squares = [
            (value - true) ** 2
            for answer in answers
            for value, true in zip(self._values(answer), true_values(answer))
        ]
        return math.sqrt(math.fsum(squares) / len(squares))

    def _values(self, answer: Trajectory) -> list[float]:
        """Before each step, and behind the last."""
        features = np.array(_features(self.chain, answer))
        return np.clip(features @ self.weights, 0.0, 1.0).tolist()


def _features(chain: Chain, answer: Trajectory) -> list[list[float]]:
    """Of the state before each step, and of the one behind the last."""
    ids = answer.response_ids.tolist()
    rows = []
    for step, status in enumerate(statuses_of(ids, chain.first)):
        # What tells it is the first word of the step before; at the beginning everybody knows it.
        told = ids[(step - 1) * WORDS_OF_STEP] if step else token(status, 0, 0)
        understood = (told - 1) % WORDINGS < WORDINGS // 2
        of_status = [float(understood and status == one) for one in range(chain.statuses)]
        rows.append([*of_status, step / chain.steps, 1.0])
    return rows
