"""Signals that credit steps without a reward model or continuations, as credits of the arena.

"Credit Without Ground Truth" (2608.19760) audits three such signals in an agent's trajectories: the policy's
confidence, hindsight ratios of probabilities, and the scores of a judge. A toy language has no judge. The
other two are not meant for training: the arena shows which steps they find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from treetune.credit.base import TokenCredit
from treetune.lab.arena.languages import Language
from treetune.vocabulary import Trajectory

LOG_PROBABILITY = "log-probability"
HINDSIGHT_RATIO = "hindsight ratio, exact"


@dataclass(frozen=True, kw_only=True)
class LogProbability(TokenCredit):
    """Gives each token its log-probability under the policy, which is also called fluency or confidence. It
    ignores the reward. The step whose credit is largest in size is the least likely step."""

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        language: Language = answers[0].problem.data["language"]
        status_NT = np.stack([language.statuses(answer.response_ids) for answer in answers])
        # The end token is certain, so its log-probability is 0.
        return [[*row, 0.0] for row in language.log_probabilities(status_NT).tolist()]


@dataclass(frozen=True, kw_only=True)
class HindsightRatio(TokenCredit):
    """Gives each token π(token | state, correct) / π(token | state) − 1, computed from exact values.

    It compares the policy with the hindsight distribution of hindsight credit assignment (Harutyunyan et al.,
    1912.02503), for the outcome "the answer is correct". By Bayes' rule the ratio is V(after) / V(before), so
    the credit is the true advantage divided by V(before). Published methods ask a language model for the
    probability in hindsight, so their errors are not in this credit.
    """

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        language: Language = answers[0].problem.data["language"]
        # The arena's toy language has an exact value for each status (S) at each position (T) of an answer.
        positions = np.arange(language.length + 1)
        rows = []
        for answer in answers:
            values_T = language.values_TS[positions, language.statuses(answer.response_ids)]
            before_T = values_T[:-1]
            # After a state from which no answer is correct, all values are 0, and so is the credit.
            divisor_T = np.where(before_T > 0, before_T, 1.0)
            # (V(after) − V(before)) / V(before)
            credit_T = np.diff(values_T) / divisor_T
            rows.append([*credit_T.tolist(), 0.0])  # 0 for the end token
        return rows
