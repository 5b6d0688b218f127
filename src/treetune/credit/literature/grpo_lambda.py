"""GRPO-λ: GRPO with eligibility traces over an answer's tokens (arXiv:2510.00194).

Example: with γ λ = 0.5, the three tokens of an answer with GRPO's advantage 1 have the sums of traces
1 + 0.5 + 0.25, 1 + 0.5 and 1. So their advantages are ``[1.75, 1.5, 1.0]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine
from treetune.credit.base import THREADS_REMEDY, Credit, TokenCredit
from treetune.credit.grpo import group_advantages
from treetune.vocabulary import Column, Trajectory

TraceForm = Literal["recent", "both"]


@Credit.register("grpo_lambda")
@dataclass(frozen=True, kw_only=True)
class GrpoLambda(TokenCredit):
    """GRPO-λ: A_i,t = A_i · Σ_{s≥t} tr(s, t), where A_i is GRPO's advantage of answer i, and tr(s, t) is the
    trace of token t at a later token s (Parthasarathi et al., arXiv:2510.00194, eq. 2, with the formulas of
    public reimplementations).

    ================  ====================================  ==============================================
    `trace`           tr(s, t), tokens counted from 0       tokens with larger weights
    ================  ====================================  ==============================================
    ``recent``        (γλ)^{s−t}                            all but about the last 1/(1 − γλ)
    ``both``          max((γλ)^{s−t}, (γλ)^t)               the same, and the first tokens most
    ================  ====================================  ==============================================

    With ``recent``, A_i,t is GAE's sum of discounted errors from token t on, if every token s has the error
    δ_s = A_i. The paper puts the traces into the ratio that PPO clips, exp Σ_t tr(s, t) (log p_t − log
    p_old,t). In the first step of an iteration, where the policy is still the old one, the paper's loss and
    these advantages give the same gradient. In later steps the two differ, since here the objective clips
    each token's own ratio.

    **Biased**: tokens near the end count less. On the tests' language, without `std` and `lowest`, the
    expected gradient is off by 25 % of its length with three answers and λ = 0.5 (cosine 0.986).
    """

    lam: Annotated[float, Ge(0), Le(1)] = 0.99
    """λ of the trace. With γ λ = 0, the credit is GRPO's."""
    gamma: Annotated[float, Gt(0), Le(1)] = 1.0
    """γ of the trace."""
    trace: TraceForm = "recent"
    """The formula of the trace, see above."""
    floor: Annotated[float, Ge(0), Le(1)] = 0.0
    """The smallest trace of a token: the paper's ε-trace."""
    lowest: float | None = -0.1
    """The lower bound of A_i; null: no bound. Without it, sums of traces would make large negative advantages
    of negative A_i."""
    std: bool = True
    """Whether A_i is divided by the standard deviation of the group's rewards."""
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the standard deviation."""

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(), "it goes back along an answer token by token", THREADS_REMEDY),
    )

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        """Returns the group's advantage of each answer, multiplied by the summed traces of each token."""
        advantages = group_advantages([answer.reward for answer in answers], self.std, self.eps)
        rows = []
        for answer, advantage in zip(answers, advantages, strict=True):
            if self.lowest is not None:
                advantage = max(advantage, self.lowest)
            traces_T = sum_traces(len(answer.response_ids), self.gamma * self.lam, self.trace, self.floor)
            rows.append((advantage * traces_T).tolist())
        return rows


def sum_traces(tokens: int, decay: float, trace: TraceForm = "recent", floor: float = 0.0) -> Column:
    """Returns Σ_{s≥t} max(tr(s, t), floor) for each token t of an answer, shape [T].

    tr(s, t), the trace of token t at a later token s, is decay^(s − t). With the trace ``both``, it is the
    larger one of decay^(s − t) and decay^t.

    Example: ``sum_traces(3, 0.5)`` is ``[1.75, 1.5, 1.0]``.

    Args:
        tokens: T, the number of tokens of the answer.
        decay: γλ.
        trace: The formula of the trace.
        floor: The smallest trace of a token.
    """
    import numpy as np

    # The trace of a token falls with the lag s − t: at the first lags it is the decayed trace, and at the
    # others the token's smallest trace. So the sum has two parts.
    decayed_T = decay ** np.arange(tokens)  # by lag: 1, γλ, (γλ)², …
    least_T = np.full(tokens, floor)  # by token
    if trace == "both":
        # decay^t is `decayed_T[t]`. So here the array is indexed by the token, and not by the lag.
        least_T = np.maximum(least_T, decayed_T)
    # The number of lags of each token: from 0 at the token itself to that of the last token.
    lag_counts_T: Column = tokens - np.arange(tokens)
    # The number of these lags at which the decayed trace is above the least one. Example: of the decayed
    # traces [1, 0.5, 0.25], two are above the least trace 0.4. Both arrays are negated, because
    # `searchsorted` needs ascending values.
    decayed_counts_T = np.minimum(np.searchsorted(-decayed_T, -least_T), lag_counts_T)
    least_counts_T = lag_counts_T - decayed_counts_T
    # For each number n of lags, the sum of the first n decayed traces.
    sums_of_decayed = np.concatenate([[0.0], np.cumsum(decayed_T)])
    return sums_of_decayed[decayed_counts_T] + least_counts_T * least_T
