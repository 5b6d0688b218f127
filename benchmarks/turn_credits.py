"""Computes bias, noise and audit of credits for turns in six small languages, exactly: nothing is sampled.

python benchmarks/turn_credits.py --output docs/results
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.pairs import publish  # noqa: E402
from treetune.credit.base import Credit  # noqa: E402
from treetune.credit.grpo import Group  # noqa: E402
from treetune.credit.literature.gigpo import GroupInGroup  # noqa: E402
from treetune.credit.rloo import Rloo  # noqa: E402
from treetune.credit.trees import TreeCredit  # noqa: E402
from treetune.credit.values.siblings import Siblings  # noqa: E402
from treetune.credit.vineppo import MonteCarlo  # noqa: E402
from treetune.lab.arena.gain import markdown_table  # noqa: E402
from treetune.lab.arena.turn_scores import (  # noqa: E402
    TurnScore,
    enumerate_full_trees,
    enumerate_single_branchings,
    expected_influence_estimate,
    measure_influence,
    score_group_credit,
    score_replays,
    score_trees,
    score_true_advantages,
)
from treetune.lab.arena.turn_tables import TurnTable, agreement, turn_tables  # noqa: E402
from treetune.lab.arena.turns import TurnRewardCredit, by_index, by_return, padded  # noqa: E402

ANSWERS = 4
"""Answers in a group."""
ROOTS = 2
"""Answers of a tree that begin at the prompt."""
WAYS = 2
"""Branches at a state."""
ALTERNATIVES = 3
"""Continuations of a state: with the answer's own turn, there are four candidates."""

RLOO = "RLOO"
RLOO_OF_TWO = "RLOO, 2 answers"
TRUE = "true advantages"

Scorer = Callable[[TurnTable], TurnScore]
"""Scores a credit in a language."""


def make_scorers() -> dict[str, Scorer]:
    """Returns the scorers by the credits' names on the page."""
    group_credits = {
        RLOO: Rloo(),
        "Dr. GRPO": Group(std=False),
        "GRPO": Group(),
        "GiGPO": GroupInGroup(),
        "GiGPO, γ = 1": GroupInGroup(gamma=1.0),
        "GiGPO, γ = 1, std": GroupInGroup(gamma=1.0, std=True),
        "turn rewards, by index": TurnRewardCredit(baseline=by_index),
        "turn rewards, padded": TurnRewardCredit(baseline=padded),
        "turn rewards, by return": TurnRewardCredit(baseline=by_return),
        "siblings": MonteCarlo(values=Siblings()),
    }
    scorers = {name: group_scorer(credit, ANSWERS) for name, credit in group_credits.items()}
    scorers["VinePPO, K = 3"] = lambda table: score_replays(table, ANSWERS, ALTERNATIVES, lam=0.0)
    scorers["C3's replay, K = 3"] = lambda table: score_replays(table, ANSWERS, ALTERNATIVES, lam=1.0)
    scorers[RLOO_OF_TWO] = group_scorer(Rloo(), ROOTS)
    scorers["C3's tree"] = full_tree_scorer(TreeCredit(prior=0, weight="once"))
    scorers["C3's tree, reach"] = full_tree_scorer(TreeCredit(prior=0))
    scorers["tree at all turns"] = full_tree_scorer(TreeCredit())
    scorers["tree at turn 2"] = single_branching_scorer(1)
    scorers["tree at the last turn"] = single_branching_scorer(-1)
    scorers["the same, only contrasts"] = single_branching_scorer(-1, only_contrasts=True)
    scorers[TRUE] = lambda table: score_true_advantages(table, ANSWERS)
    return scorers


def group_scorer(credit: Credit, answers: int) -> Scorer:
    """Returns the scorer of a credit for groups of answers."""
    return lambda table: score_group_credit(table, credit, answers)


def full_tree_scorer(credit: TreeCredit) -> Scorer:
    """Returns the scorer of a credit for trees that branch at every turn."""
    return lambda table: score_trees(table, enumerate_full_trees(table, WAYS), ROOTS, credit)


def single_branching_scorer(turn: int, only_contrasts: bool = False) -> Scorer:
    """Returns the scorer of the credit `tree` for answers that branch before one turn, counted from 0."""

    def score(table: TurnTable) -> TurnScore:
        trees = enumerate_single_branchings(table, turn, WAYS, only_contrasts)
        return score_trees(table, trees, ROOTS, TreeCredit())

    return score


Scores = Mapping[str, Mapping[str, TurnScore]]
"""Scores by credit and language."""


def make_table(scores: Scores, cell: Callable[[TurnScore, TurnScore], str]) -> str:
    """Returns a table in Markdown with a row for each credit and a column for each language.

    Args:
        scores: The scores.
        cell: Returns the text of a cell from the score and RLOO's score in the same language.
    """
    languages = list(scores[RLOO])
    rows = []
    for name, by_language in scores.items():
        cells = [cell(by_language[language], scores[RLOO][language]) for language in languages]
        rows.append([name, *cells])
    return "\n".join(markdown_table(["credit", *languages], rows))


def describe_bias(score: TurnScore, _: TurnScore) -> str:
    """Returns the relative error of the expected gradient, and its cosine with the true one."""
    return "0" if score.error < 1e-9 else f"{score.error:.2f} ({score.cosine:.3f})"


def describe_gain(score: TurnScore, rloo: TurnScore) -> str:
    """Returns the gain, and the gain at equal turns."""
    gain, cost = score.gain(rloo), score.turns / rloo.turns
    return "–" if gain == 0 else f"{gain:.2f} ({gain / cost:.2f})"


def describe_audit(score: TurnScore, _: TurnScore) -> str:
    """Returns fidelity, spread and the share of noise."""
    # Without spread, the credit is the same for all actions in a context, and so is its noise.
    noise_share = score.noise / score.spread if score.spread > 1e-12 else 0.0
    return f"{score.fidelity:.2f}, {score.spread:.2f}, {noise_share:.0%}"


def correlate_fidelity_and_gain(scores: Scores) -> list[float]:
    """Returns, for each language, the rank correlation of fidelity and gain over the credits for groups of
    `ANSWERS` answers, without true advantages."""
    from scipy.stats import spearmanr

    # The credits for groups of `ANSWERS` answers come first in `make_scorers`.
    names = list(itertools.takewhile(lambda name: name != RLOO_OF_TWO, scores))
    correlations = []
    for language, rloo in scores[RLOO].items():
        fidelities = [scores[name][language].fidelity for name in names]
        gains = [scores[name][language].gain(rloo) for name in names]
        # Equal values may differ by rounding errors, and must have the same rank.
        ranks = spearmanr(np.round(fidelities, 6), np.round(gains, 6))
        correlations.append(float(ranks.statistic))
    return correlations


def make_influence_table(tables: Mapping[str, TurnTable]) -> str:
    """Returns a table in Markdown with the influence in each language and the expected estimate of it."""
    with_copies = {**tables, "agreement, action 2 ignores action 1": agreement(same=0.5)}
    rows = []
    for name, table in with_copies.items():
        rows.append([name, f"{measure_influence(table):.3f}", f"{expected_influence_estimate(table):.3f}"])
    return "\n".join(markdown_table(["language", "influence", "estimate, in expectation"], rows))


PAGE = """# Credits for turns

```bash
python benchmarks/turn_credits.py --output docs/results
```

An agent acts in turns, and an environment replies. Which credit for turns is unbiased, and how noisy is it?
This page computes both in six small languages, for GiGPO
([2505.10978](https://arxiv.org/abs/2505.10978)), C3 ([2603.06859](https://arxiv.org/abs/2603.06859)),
branching in the tail, i.e. before the last turns of an answer (BranPO,
[2602.03719](https://arxiv.org/abs/2602.03719)), and the credits that they compete with. All numbers are
exact: they are sums over all possible groups of answers, or trees, each with its probability
(`src/treetune/lab/arena/turn_scores.py`). The tests compare them with plain versions of the formulas.
[Another page](turn_baselines.md) has a formula for the bias of baselines by index.

**Languages.** In each turn the policy chooses one of two actions, and the environment shows an observation.

* *First turn decides*: three turns. The reward is 1 if the first action is right, which has the probability
  0.25. The environment shows whether it was right.
* *Last turn decides*: the same for the third action.
* *Corridor*: two or three turns. Each action goes one place forward or back in a corridor of three places.
  The last place earns 1 and ends the answer. The environment shows the place, so states recur.
* *Unreliable tool*: two turns. The first action chooses a good or a bad tool, and both show the same result.
  The result is right with probability 0.9 after the good tool and 0.6 after the bad one. The second action
  trusts the result or not. The reward is 1 for trust in a right result and for distrust of a wrong one.
* *Agreement*: two turns. The reward is 1 if the second action repeats the first, which has the probability
  0.75. The environment always shows the same observation.
* *Further turns*: one to three turns, each of which earns 1 with probability 0.5. The policy takes another
  turn with probability 0.8.

**Credits.** A group has four answers. [Credit assignment](../credit_assignment.md) has the formulas.

* *GiGPO*: the answer's advantage in its group, plus the turn's advantage among all turns after the same
  observation (its *anchor state*). Rewards are discounted by γ = 0.95 per turn, unless the row says γ = 1.
  With *std*, both terms are divided by their standard deviations.
* *Turn rewards*: the rewards from this turn on, minus one of [three baselines](turn_baselines.md).
* *Siblings*: A = r + V(s') − V(s) for a turn with reward r that leads from state s to state s'. V is the mean
  of the later rewards of the other answers that pass through the state.
* *VinePPO*: the same, where V is the mean return of K = 3 continuations of the state.
* *C3's replay*: A = the answer's own return from this turn on − the mean return of K = 3 alternatives. These
  are sampled in the same context as the turn and played to the end (`configs/credit/c3.jsonnet`).
* *C3's tree*: what the authors' code samples and trains. Each context has two alternative turns, both are
  trained, and each leads to a context with two further alternatives. For a turn n, A(n) is the mean reward of
  the answers through n minus that of the answers through its sibling. Every turn of the tree has the same
  weight. In the row *reach*, a turn has treetune's unbiased [weight](../credit_assignment.md#trees) `reach`,
  which is smaller for later turns.
* *Tree at all turns*: treetune's credit `tree` on the same trees (`weight: 'reach'`, `prior: 2`).
* *Tree at turn 2*, *at the last turn*: two answers, and one further branch of each from before that turn.
  *The same, only contrasts*: at the last turn, without branches that earned the same as their answer, as in
  BranPO's code.

## Bias

The error is |g − t| / |t|, where g is the expected gradient and t the true one. 0 means unbiased. The cosine
of g and t is in parentheses.

{bias}

* **GiGPO** has the right direction in all six languages: the smallest cosine is 0.9999 (with `std` 0.9994).
  Without `std` its gradient is 1.43 to 1.51 times as long as the true one: it is the sum of two terms, each
  of which subtracts a mean that includes the answer itself. In *unreliable tool* and *agreement*, the same
  observation follows different actions. This does not change the direction.
* **A baseline by index** is biased even if there is only an outcome reward, if this reward ends the answer
  (*corridor*). In *further turns*, 3 % of the gradient is left.
* **C3's replay** and C3's tree with `reach` are unbiased. If every turn of the tree has the same weight, as
  in the authors' code, later turns count too much, since the tree contains more of them. In *corridor* and
  *further turns*, where several turns matter, the cosine is then 0.974 and 0.953. Elsewhere only the length
  changes.
* **Branching in the tail** is unbiased if all answers have the same number of turns. If the policy decides
  when an answer ends (*corridor*, *further turns*), it is biased: whether a turn is the last one, and so
  whether a branch begins before it, depends on that turn's own action. Branching at turn 2 is unbiased.
* **Keeping only contrasts** adds a bias, since whether a branch is kept depends on its reward. In the three
  languages in which all answers have the same number of turns and the last turn matters, the gradient is 12
  to 17 % too long.

## Noise

The *gain* is the variance of RLOO's gradient with four answers, divided by the variance of the credit's
gradient. RLOO has 1, and higher is better. A biased gradient is first scaled until its component along the
true gradient has the true length. In parentheses is the gain at equal turns: the gain, divided by how many
times RLOO's number of turns the policy takes. Turns of continuations count.

{gain}

* **GiGPO** costs nothing, and its gain is 1.9 where the first turn decides and the environment shows its
  result. There all turns after the same observation have the same return, so the second term adds hardly any
  noise to the later turns. Elsewhere the gain is 1.0 to 1.2.
* **VinePPO and C3's replay** reduce the variance per answer, but take 2.5 to 3.4 times as many turns. At
  equal turns their gain is 1.04 where the first turn decides. Elsewhere RLOO is two to three times better.
* **C3's replay has no more gain than VinePPO**, except in *corridor*. Its advantage contains the random
  outcome of all later turns.
* **Trees** begin with two answers, so compare them with *RLOO, 2 answers*. At equal turns, branching at the
  last turn is better than branching at turn 2 where the last turn decides, and worse where the first does.
* **C3's tree** gives more weight to later turns. Where the last turn decides, its gain at equal turns is
  2.29, and 1.10 with `reach`. In *corridor* and *further turns*, where several turns matter, it is 0.88 and
  0.41 (*RLOO, 2 answers*: 0.52 and 0.61).

## C3's audit

C3's authors propose to audit a credit by three numbers: fidelity, within-group variance (here *spread*) and
influence. The definitions are those of their code, with exact values in place of estimates. Influence is in
the second table. A cell of the first table has three numbers:

* *fidelity*: Spearman's rank correlation of a turn's credit with its true advantage, over all turns of all
  answers;
* *spread*: the variance of the credits in the same context, averaged over contexts;
* *noise*: the share of the spread that does not come from the action. The authors' code does not compute it.

{audit}

* **Fidelity predicts the order of the gains only roughly.** Over the credits with groups of four answers, the
  rank correlation of fidelity and gain is between {lowest:.2f} and {highest:.2f}, depending on the language.
  Where the first turn decides, GiGPO has less fidelity than siblings, and more gain.
* **Spread says little by itself**, since it depends on the scale. Dr. GRPO's advantages are RLOO's times a
  factor, so it has the same gain but 9/16 of the spread. The share of noise does not depend on the scale.

**Influence** is the mutual information, in nats, of an action and the next action in a fixed context. It is a
property of the policy, not of a credit. The authors' code estimates it: it samples candidates for an action,
continues each, and counts the next actions. By default it has eight candidates with one continuation each,
and adds 1 to all counts.

{influence}

With one continuation for each candidate, the estimate depends only on how often each next action occurs. So
its expectation is the same whether the second action depends on the first or not (the two rows of
*agreement*), and it is not 0 where there is no influence. More continuations for each candidate are needed.

## In treetune

* `gigpo` works with the rollout `multi_turn`. `treetune check` refuses it where answers have no replies.
* C3's replay is a setting of `monte_carlo`: `states: {{ type: 'turns' }}` and `lam: 1`. With `lam: 0` it is
  VinePPO, and values of `lam` between 0 and 1 mix both.
* The rollout [`turn_tree`](../turns_and_tools.md#trees-of-turns) branches answers after turns, and the credit
  `tree` trains them. With `samples: 2` and the branching `at_states` with `ways: [2, 2]` it grows the trees
  of this page after all turns; `prior: 0` and `weight: 'once'` make the credit C3's. The branching
  `last_states` branches at the last turn.

## What it does not say

* The languages are tiny, and their policies have separate parameters for each state. Observations are single
  tokens. If no observation recurs word by word, GiGPO's only common anchor state is the prompt.
* Here the environment draws its replies anew for each answer. In treetune all answers to a problem have the
  same seed of the environment.
* We read the abstracts (of C3, those of both versions) and the code of C3 and BranPO. Their equations were
  not available. BranPO's code also chooses where to branch by the accuracy of the group, and masks redundant
  steps. This page does neither. The numbers in C3's paper may come from other settings than the code's
  defaults.
* Less noise does not always mean faster learning: see [credit in training](credit_training.md).
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for turn_credits.md and its numbers")
    output = parser.parse_args().output
    tables = turn_tables()
    scores = {
        name: {language: score(table) for language, table in tables.items()}
        for name, score in make_scorers().items()
    }
    correlations = correlate_fidelity_and_gain(scores)
    text = PAGE.format(
        bias=make_table(scores, describe_bias),
        gain=make_table(scores, describe_gain),
        audit=make_table(scores, describe_audit),
        influence=make_influence_table(tables),
        lowest=min(correlations),
        highest=max(correlations),
    )
    numbers: dict[str, Any] = {
        name: {language: score._asdict() for language, score in by_language.items()}
        for name, by_language in scores.items()
    }
    publish(text, numbers, output, "turn_credits")


if __name__ == "__main__":
    main()
