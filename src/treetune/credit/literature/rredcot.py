"""RREDCoT: the value of a state is the probability that the model gives to the reference answer there
(arXiv:2606.06475).

Example: the reference answer ``4`` has the probability 0.2 after the prompt and 0.9 after the first of two
steps. With the reward 1, the steps get 0.7 and 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import override

from treetune.contracts import Experiment, Finding, Need
from treetune.credit.literature.scored_texts import GoldScores, ProblemState
from treetune.credit.values.base import StepValues, Valuation, Value, ValueEstimator
from treetune.credit.values.critic import UNKNOWN_VARIANCE
from treetune.vocabulary import concatenate


@ValueEstimator.register("rredcot")
@dataclass(frozen=True, kw_only=True)
class GoldLikelihood(GoldScores, ValueEstimator):
    """RREDCoT: V(s) = p(y* | s), the probability of the problem's reference answer y* if it were written at
    once after the state s and the lead-in. Nothing is sampled (Ielanskyi et al., arXiv:2606.06475).

    A step's advantage is the change of V by the step; for the last step, it is the reward minus V before the
    step. So an answer's advantages sum to r − V(prompt): the reward is redistributed over the steps. The
    source is the paper's abstract. The paper's segments (by keywords and entropy, as summaries say) and its
    importance weights are not implemented, since the equations were not available. The credit `trace` with
    the value ``log_probability`` has the changes of log p in place of those of p.

    A state after which the reference answer doesn't fit into the context has no value.

    **Biased** by the difference of p(y* | s) from the probability that the policy gets to y* by reasoning. On
    the tests' language, with the reference answer ``a``, the expected gradient is off by 38 % of its length
    (cosine 0.93)."""

    unbiased = False

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return self.gold_needs()

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return self.check_gold(experiment)

    @property
    @override
    def continues(self) -> bool:
        return False

    @property
    @override
    def asks_reference(self) -> bool:
        return self.scorer == "reference"

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns as a state's value the probability of the reference answer directly after the state."""
        states = []
        for answer in valuation.answers:
            answer_ids = answer.trajectory.response_ids
            for answer_state in answer.states:
                token_ids = concatenate([answer.trajectory.prompt_ids, answer_ids[: answer_state.length]])
                states.append(ProblemState(answer.trajectory.problem, token_ids))
        logprobs, metrics = self.gold_logprobs(valuation.context, states)
        valuation.metrics.update(metrics)
        upcoming = iter(logprobs)
        values: list[StepValues] = []
        for answer in valuation.answers:
            step_values: StepValues = []
            for _ in answer.states:
                logprobs_T = next(upcoming)
                if logprobs_T is None:  # after this state, the reference answer doesn't fit into the context
                    step_values.append(None)
                else:
                    step_values.append(Value(math.exp(logprobs_T.sum()), UNKNOWN_VARIANCE))
            values.append(step_values)
        return values
