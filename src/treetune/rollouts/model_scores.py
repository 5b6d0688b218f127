"""Numbers that models compute from answers and from given texts, for credits that read them.

In a run the trainer computes them, since it has the models (`runtime.training.open_trainer`). Analyses
compute them with stored weights, and the arena computes them exactly. A credit finds them in its context:

    context.model_scores.critic.values(answers)                 the critic's value before each token
    context.model_scores.reference.logprobs(texts)              log-probs under the reference model
    context.model_scores.distributions.along(episodes)          Σ π² and the entropy at each token
    context.model_scores.reference_distances.along(episodes)    how far the policy is from the reference
    context.model_scores.group_divergences.along(episodes)      how far a problem's answers differ

Each call is collective: all ranks make it together, each with its own answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treetune.vocabulary import Column, Episode, TokenIds, Trajectory


@dataclass(frozen=True)
class Critic:
    """The critic of the run, as it is before the iteration's training.

    Example: for an answer of three tokens, the second of which a tool wrote, `values` returns
    ``[array([0.41, nan, 0.78])]``.
    """

    values: Callable[[Sequence[Trajectory]], list[Column]]
    """Returns for each answer of this rank the value of the state before each response token; NaN before
    injected tokens. Collective."""


class ScoredText(NamedTuple):
    """The tokens of a text to be scored, and the tokens before it.

    Example: the reference answer ``4`` after a prompt and two tokens of an answer::

        ScoredText(prompt_ids=array([17, 10, 17, 28, 8, 9]), text_ids=array([20]))
    """

    prompt_ids: TokenIds
    text_ids: TokenIds


@dataclass(frozen=True)
class ReferenceScores:
    """The scores of the trainer's reference model."""

    logprobs: Callable[[Sequence[ScoredText]], list[Column]]
    """Returns the log-probs of this rank's texts, at the rollout's temperature. Collective."""


@dataclass(frozen=True)
class Distributions:
    """Facts about the distributions that answers were sampled from.

    The engine reports only the probability of each sampled token, so the trainer runs the policy over the
    answers once more. The distributions are those at the rollout's temperature, before top-p and top-k cut
    them.
    """

    along: Callable[[Sequence[Episode]], list[tuple[Column, Column]]]
    """Returns two columns of shape [T] for each row of this rank: Σ_v π(v)² and the entropy in nats of the
    distribution from which each response token was sampled. In runs, both are 0 at tokens that aren't
    trained. Collective."""


class Deviation(NamedTuple):
    """Two columns of shape [T] along a row: the distances of the policy's distributions from the reference's,
    and the policy's uncertainty.

    Example: of two tokens, the policy is sure of the first one as the reference is, and has moved at the
    second one: ``Deviation(distances_T=[0.0, 0.12], relative_entropies_T=[0.0, 0.4])``.
    """

    distances_T: Column
    """1 − Σ_v √(π(v)·π_ref(v)), the square of the Hellinger distance, between 0 and 1."""
    relative_entropies_T: Column
    """The policy's entropy / log V, where V is the size of the vocabulary; between 0 and 1."""


@dataclass(frozen=True)
class ReferenceDistances:
    """The distances of the policy from the trainer's reference model."""

    along: Callable[[Sequence[Episode]], list[Deviation]]
    """Returns the deviations along each row of this rank; 0 at tokens that aren't trained. Collective."""


@dataclass(frozen=True)
class GroupDivergences:
    """The divergences of the policy's distributions from their means over the answers to a problem.

    Example: at position 2, two answers to a problem have the distributions ``[0.9, 0.1]`` and ``[0.1, 0.9]``.
    Their mean is ``[0.5, 0.5]``, from which both have the divergence 0.10.
    """

    along: Callable[[Sequence[Episode]], list[Column]]
    """Returns a column for each row of this rank, with a divergence for each response token. Collective.

    It is the Jensen-Shannon divergence, in nats, of the token's distribution from the mean distribution at
    the token's position over the answers to the problem. It is 0 at tokens that aren't trained."""


@dataclass(frozen=True)
class ModelScores:
    """Everything that models compute for the credit of an iteration. A field is None in contexts that don't
    provide it."""

    critic: Critic | None = None
    """In contexts of runs whose credit `asks_critic`, of analyses of runs with a critic, and of the arena."""
    reference: ReferenceScores | None = None
    """In contexts of runs whose credit asks for the `reference` (`Credit.trainer_scores`)."""
    distributions: Distributions | None = None
    """In contexts of runs whose credit asks for `distributions`, of analyses, and of the arena."""
    reference_distances: ReferenceDistances | None = None
    """In contexts of runs whose credit asks for `distributions` and the `reference`."""
    group_divergences: GroupDivergences | None = None
    """In contexts of runs whose credit asks for `distributions`, and of the arena."""
