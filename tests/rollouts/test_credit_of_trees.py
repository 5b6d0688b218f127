"""The expected gradient of credit for trees, over all trees that could be grown, against the exact one: equal
where it says unbiased, as far off as stated where it doesn't."""

from __future__ import annotations

import math
from functools import cache

import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.columns import plain
from tests.rollouts import enumerated_trees
from tests.rollouts import tabular_mdp as mdp
from treetune.inference.base import SamplingParams
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import Rloo
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.states import StepBoundaries
from treetune.rollouts.valuation import FreshContinuations
from treetune.rollouts.values import StateRule
from treetune.tree import Tree, trees_of
from treetune_lab.trees.branching import AtStates, Branching, LeastSure, UpToWidth
from treetune_lab.trees.credit import TreeCredit
from treetune_lab.trees.rollout import TreeRollout
from treetune_lab.values.sampled import Siblings
from treetune_lab.values.states import EveryNTokens

SAMPLES, MAX_TOKENS = 2, 3
"""Few enough to enumerate all trees; cut answers are graded."""

EVERY_TOKEN = EveryNTokens(tokens=1)
TWO_WAYS = AtStates(states=StepBoundaries(), ways=(2,))
THREE_WAYS = AtStates(states=StepBoundaries(), ways=(3,))
WIDE = UpToWidth(states=EVERY_TOKEN, width=3)
TWICE = UpToWidth(states=EVERY_TOKEN, width=5)
UNSURE = LeastSure(positions=1, ways=1)


@cache
def trees(branching: Branching) -> list[tuple[Tree, float]]:
    rollout = TreeRollout(samples=SAMPLES, max_tokens=MAX_TOKENS, branching=branching, unfinished_reward=None)
    return list(enumerated_trees.trees(rollout))


def context() -> RolloutContext:
    """Its continuations are all that could be sampled."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    return mdp.context(engine=mdp.ExactEngine(), sampling=sampling, unfinished_reward=None)


def bias_and_cosine(branching: Branching, credit: Credit) -> tuple[float, float]:
    """The length of the difference from the exact gradient as a share of the exact one's, and the cosine."""
    found: mdp.Gradient = {}
    for tree, probability in trees(branching):
        episodes, _ = credit.assign(context(), [tree])
        for episode in episodes:
            assert episode.advantages is not None
            advantages = (episode.advantages * episode.trained).tolist()
            mdp.add(found, mdp.score_gradient(plain(episode.response_ids), advantages), probability / SAMPLES)
    exact = enumerated_trees.exact_gradient(MAX_TOKENS)
    length = math.hypot(*exact.values())
    off = math.hypot(*(found.get(key, 0.0) - slope for key, slope in exact.items()))
    along = sum(found.get(key, 0.0) * slope for key, slope in exact.items())
    return off / length, along / (length * math.hypot(*found.values()))


def _name(part: object) -> str | None:
    if isinstance(part, TreeCredit):
        return f"{part.advantage}-{part.weight}"
    return repr(part) if isinstance(part, Branching) else None


@pytest.mark.parametrize("branching", [TWO_WAYS, TWICE, WIDE], ids=repr)
def test_what_a_branch_is_worth_less_its_siblings_is_unbiased(branching: Branching) -> None:
    assert branching.unbiased
    for prior in (0.0, 2.0):
        assert bias_and_cosine(branching, TreeCredit(prior=prior))[0] < 1e-9


def test_every_branching_that_is_registered_is_held_against_the_exact_gradient() -> None:
    known = {type(one) for one in (TWO_WAYS, TWICE, WIDE)}
    says_so = {part for part in Branching.registered().values() if part.unbiased}
    assert says_so == known
    assert set(Branching.registered().values()) == known | {type(UNSURE)}


def test_without_branches_it_is_the_mean_of_the_others() -> None:
    answers = [mdp.trajectory(mdp.encode(text), sample=i) for i, text in enumerate(["a;a?", "b?", "a;a;a?"])]
    tree = trees_of(answers)
    ours, theirs = (credit.assign(mdp.context(), tree)[0] for credit in (TreeCredit(), Rloo()))
    for one, other in zip(ours, theirs, strict=True):
        assert one.advantages is not None
        assert one.trained.all()
        assert one.advantages.tolist() == other.advantages.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("branching", [TWO_WAYS, THREE_WAYS, WIDE], ids=repr)
@pytest.mark.parametrize("states", [StepBoundaries(), EVERY_TOKEN], ids=repr)
def test_siblings_value_what_follows_in_a_tree_without_bias(branching: Branching, states: StateRule) -> None:
    assert bias_and_cosine(branching, MonteCarlo(values=Siblings(), states=states))[0] < 1e-9


@pytest.mark.parametrize("aware", [False, True])
def test_continuations_value_what_follows_in_a_tree_without_bias(aware: bool) -> None:
    credit = MonteCarlo(
        samples=mdp.EXACT_SAMPLES,
        values=FreshContinuations(count_siblings=aware),
        siblings_count_into_prompt_value=not aware,
    )
    assert bias_and_cosine(TWO_WAYS, credit)[0] < 1e-9


@pytest.mark.parametrize(
    ("branching", "credit", "bias", "cosine"),
    [
        (TWO_WAYS, TreeCredit(advantage="local"), 0.5, 1.0),
        (THREE_WAYS, TreeCredit(advantage="local"), 0.4843, 0.9949),
        (TWO_WAYS, TreeCredit(weight="once", prior=0), 0.3333, 0.9623),
        (TWO_WAYS, TreeCredit(advantage="local", weight="once"), 0.4714, 0.9623),
        (TWO_WAYS, TreeCredit(advantage="global_and_local", weight="each"), 1.0661, 0.9518),
        (TWO_WAYS, TreeCredit(advantage="subgroups", weight="each"), 0.5359, 0.9059),
        (UNSURE, TreeCredit(prior=0), 0.1103, 0.9977),
        (UNSURE, TreeCredit(advantage="global_and_local", weight="each"), 2.1182, 0.9605),
    ],
    ids=_name,
)
def test_what_is_biased_is_as_far_off_as_stated(
    branching: Branching, credit: TreeCredit, bias: float, cosine: float
) -> None:
    assert bias_and_cosine(branching, credit) == pytest.approx((bias, cosine), abs=1e-4)
