"""Exact bias, noise and audit of credits for turns in six small languages; nothing is sampled.

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
from treetune.credit.grpo import Group  # noqa: E402
from treetune.credit.literature.gigpo import GroupInGroup  # noqa: E402
from treetune.credit.rloo import Rloo  # noqa: E402
from treetune.credit.trees import TreeCredit  # noqa: E402
from treetune.credit.values.siblings import Siblings  # noqa: E402
from treetune.credit.vineppo import MonteCarlo  # noqa: E402
from treetune.lab.arena.gain import markdown  # noqa: E402
from treetune.lab.arena.turn_scores import (  # noqa: E402
    TurnScore,
    enumerate_full_trees,
    enumerate_single_branchings,
    expected_influence_estimate,
    influence,
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
"""Answers from the prompt in a tree."""
WAYS = 2
"""Branches at a state."""
ALTERNATIVES = 3
"""Continuations of a state: with the answer's own turn, there are four candidates."""

RLOO = "RLOO"
RLOO_OF_TWO = "RLOO, 2 answers"
TRUE = "true advantages"
Scorer = Callable[[TurnTable], TurnScore]


def make_scorers() -> dict[str, Scorer]:
    """Returns the functions that score a credit in a language, by the credits' names on the page."""
    group_credits = {
        RLOO: Rloo(),
        "Dr. GRPO": Group(std=False),
        "GRPO": Group(),
        "GiGPO": GroupInGroup(),
        "GiGPO, γ = 1": GroupInGroup(gamma=1.0),
        "GiGPO, γ = 1, std": GroupInGroup(gamma=1.0, std=True),
        "turn rewards, by index": TurnRewardCredit(baseline=by_index, turns=3),
        "turn rewards, padded": TurnRewardCredit(baseline=padded, turns=3),
        "turn rewards, by return": TurnRewardCredit(baseline=by_return, turns=3),
        "siblings": MonteCarlo(values=Siblings()),
    }
    functions: dict[str, Scorer] = {}
    for name, credit in group_credits.items():
        functions[name] = lambda table, credit=credit: score_group_credit(table, credit, ANSWERS)
    functions["VinePPO, K = 3"] = lambda table: score_replays(table, ANSWERS, ALTERNATIVES, lam=0.0)
    functions["C3's replay, K = 3"] = lambda table: score_replays(table, ANSWERS, ALTERNATIVES, lam=1.0)
    functions[RLOO_OF_TWO] = lambda table: score_group_credit(table, Rloo(), ROOTS)
    without_parents, with_parents = TreeCredit(prior=0, weight="once"), TreeCredit()

    def branch_everywhere(credit: TreeCredit) -> Scorer:
        return lambda table: score_trees(table, enumerate_full_trees(table, WAYS), ROOTS, credit)

    def branch_once(turn: int, only_contrasts: bool = False) -> Scorer:
        def score(table: TurnTable) -> TurnScore:
            return score_trees(
                table, enumerate_single_branchings(table, turn, WAYS, only_contrasts), ROOTS, with_parents
            )

        return score

    functions["C3's tree"] = branch_everywhere(without_parents)
    functions["C3's tree, reach"] = branch_everywhere(TreeCredit(prior=0))
    functions["tree at all turns"] = branch_everywhere(with_parents)
    functions["tree at turn 2"] = branch_once(1)
    functions["tree at the last turn"] = branch_once(-1)
    functions["the same, only contrasts"] = branch_once(-1, only_contrasts=True)
    functions[TRUE] = lambda table: score_true_advantages(table, ANSWERS)
    return functions


Scores = Mapping[str, Mapping[str, TurnScore]]
"""Scores by credit and language."""


def table_of(scores: Scores, cell: Callable[[TurnScore, TurnScore], str]) -> str:
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
    return "\n".join(markdown(["credit", *languages], rows))


def bias_text(score: TurnScore, _: TurnScore) -> str:
    return "0" if score.error < 1e-9 else f"{score.error:.2f} ({score.cosine:.3f})"


def gain_text(score: TurnScore, rloo: TurnScore) -> str:
    gain, cost = score.gain(rloo), score.turns / rloo.turns
    return "–" if gain == 0 else f"{gain:.2f} ({gain / cost:.2f})"


def audit_text(score: TurnScore, _: TurnScore) -> str:
    # Without spread, the credit is the same for all actions in a context, and so is its noise.
    noise_share = score.noise / score.spread if score.spread > 1e-12 else 0.0
    return f"{score.fidelity:.2f}, {score.spread:.2f}, {noise_share:.0%}"


def fidelity_and_gain(scores: Scores) -> list[float]:
    """Returns, for each language, the rank correlation of fidelity and gain over the credits for groups of
    `ANSWERS` answers, without true advantages."""
    from scipy.stats import spearmanr

    of_groups = list(itertools.takewhile(lambda name: name != RLOO_OF_TWO, scores))
    correlations = []
    for language, rloo in scores[RLOO].items():
        fidelities = [scores[name][language].fidelity for name in of_groups]
        gains = [scores[name][language].gain(rloo) for name in of_groups]
        # Differences of rounding would decide about ranks.
        ranks = spearmanr(np.round(fidelities, 6), np.round(gains, 6))
        correlations.append(float(ranks.statistic))
    return correlations


def influence_table(tables: Mapping[str, TurnTable]) -> str:
    with_copies = {**tables, "agreement, action 2 ignores action 1": agreement(same=0.5)}
    rows = []
    for name, table in with_copies.items():
        rows.append([name, f"{influence(table):.3f}", f"{expected_influence_estimate(table):.3f}"])
    return "\n".join(markdown(["language", "influence", "estimate, in expectation"], rows))


PAGE = """# Credits for turns

```bash
python benchmarks/turn_credits.py --output docs/results
```

An agent acts in turns, and an environment replies. Which credit for turns is unbiased, and how noisy is it?
This page computes both in six small languages, for GiGPO
([2505.10978](https://arxiv.org/abs/2505.10978)), C3 ([2603.06859](https://arxiv.org/abs/2603.06859)),
branching in the tail (BranPO, [2602.03719](https://arxiv.org/abs/2602.03719)) and the credits that they
compete with. All numbers are exact: every possible group of answers, or tree, is gone through with its
probability (`src/treetune/lab/arena/turn_scores.py`). The tests compare them with formulas that are written
plainly, over groups in all orders. [Another page](turn_baselines.md) has the closed form of one bias.

**Languages.** In each turn the policy chooses one of two actions, and the environment shows an observation.

* *First turn decides*: three turns, and 1 if the first action is right, which has the probability 0.25. The
  environment shows whether it was.
* *Last turn decides*: the same for the third action.
* *Corridor*: two or three turns. Reaching the last of three places earns 1 and ends the answer. The
  environment shows the place, so that states recur.
* *Unreliable tool*: two turns. The first action chooses a good or a bad tool, and both show the same result.
  The second action trusts it or not. Trust earns 1 with probability 0.9 after the good tool and 0.6 after the
  bad one, and distrust in all other cases.
* *Agreement*: two turns, and 1 if the second action repeats the first, which has the probability 0.75. The
  environment always shows the same.
* *Further turns*: one to three turns, each of which earns 1 with probability 0.5. The policy takes another
  turn with probability 0.8.

**Credits.** A group has four answers. In [Credit assignment](../credit_assignment.md) are the formulas.

* *GiGPO*: ω = 1 and γ = 0.95, unless the row says otherwise.
* *Turn rewards*: a turn's reward and the later ones, minus one of [three baselines](turn_baselines.md).
* *Siblings*: `monte_carlo` with the values `siblings` and a state at each turn.
* *VinePPO*: the same with three continuations of each state, A = r + V(s') − V(s).
* *C3's replay*: A = the answer's own return − the mean return of three alternatives. They are sampled in the
  same context as the turn and played to the end (`configs/credit/c3.jsonnet`). The answer's turn is left out
  of the mean.
* *C3's tree*: as the authors' code samples and credits. The turn's alternatives are trained, too, and each of
  them is continued by alternatives in turn. Here there are two in each context. A(n) is the mean reward below
  n minus that below its sibling, and every node counts once. In the row *reach* a node counts as much as the
  policy visits it.
* *Tree at all turns*: treetune's credit `tree` on the same trees (`prior: 2`).
* *Tree at turn 2*, *at the last turn*: two answers, each continued in two ways before that turn. *Only
  contrasts*: a branch that earned the same as its answer is dropped, as in BranPO's code.

## Bias

The error |g − t| / |t| of the expected gradient g, where t is the true gradient, and the cosine of both in
parentheses. 0: unbiased.

{bias}

* **GiGPO** has the right direction in all six languages: the smallest cosine is 0.9999 (with `std` 0.9994).
  Without `std` its gradient is 1.43 to 1.51 times as long as the true one. Each of its two terms includes the
  answer itself in its mean, and both add up. In *unreliable tool* and *agreement*, one observation follows
  different actions; this does not change the direction.
* **A baseline by index** is biased also for an outcome reward, if the reward ends the answer: see *corridor*.
  In *further turns*, 3 % of the gradient is left.
* **C3's replay** and C3's tree with `reach` are unbiased. If every node counts once, as in the authors' code,
  later turns weigh more than the policy visits them. Where one turn decides, this changes only the length.
  Where several do, the cosine is 0.953 and 0.974.
* **Branching in the tail** is unbiased if all answers have the same number of turns. If the policy decides
  when an answer ends, it is biased (*corridor*, *further turns*): only the turns after a state decide whether
  it branches. Branching at turn 2 is unbiased.
* **To keep only contrasts** adds a bias: whether a branch is kept depends on its reward. In three languages
  the gradient is 12 to 17 % too long.

## Noise

The variance of RLOO's gradient with four answers, divided by that of the credit: 1 is RLOO, and higher is
better. A biased gradient is first scaled to the length of the true one. In parentheses is the gain at equal
cost: divided by the number of turns that the policy takes, continuations included.

{gain}

* **GiGPO** costs nothing and gains 1.9 where the first turn decides and the environment shows its result:
  the later turns then have the same return as all others after the same observation, and get hardly any
  noise from the second term. Elsewhere it gains 1.0 to 1.2.
* **VinePPO and C3's replay** reduce the variance per answer, but take 2.5 to 3.4 times as many turns. At
  equal turns they gain 1.04 where the first turn decides. Elsewhere RLOO is two to three times better.
* **C3's replay has no more gain than VinePPO**, except in *corridor*. Its advantage contains the luck of all
  later turns.
* **Trees** begin with two answers, so compare them with *RLOO, 2 answers*. At equal turns, branching at the
  last turn is better than branching at turn 2 where the last turn decides, and worse where the first does.
* **The weights of C3's tree** let later turns count more: 2.29 at equal turns where the last turn decides,
  and 1.10 with `reach`. In *corridor* and *further turns*, where several turns matter, it gains 0.88 and
  0.41.

## C3's audit

C3's authors propose to audit a credit by three numbers. The definitions are those of their code, with exact
values in place of estimates. The cells are:

* *fidelity*: Spearman's rank correlation of a turn's credit with its true advantage, over all turns of all
  answers;
* *spread*: the variance of the credits in the same context, averaged over contexts. It is their within-group
  variance;
* the share of the spread that is *noise*: it does not come from the action. Their code does not have it.

{audit}

* **Fidelity orders credits only roughly as their gains do.** Over the credits with groups of four answers,
  the rank correlation of fidelity and gain is {lowest:.2f} to {highest:.2f}, by language. Where the first
  turn decides, GiGPO has less fidelity than siblings, and more gain.
* **Spread says little by itself.** It depends on the scale: Dr. GRPO has 9/16 of RLOO's spread, the same
  gain, and the same advantages but for a factor. The share of noise does not depend on the scale.

**Influence**, the third number, is the mutual information in nats of an action and the next one in a fixed
context. It belongs to the policy, not to a credit. The authors' code estimates it from candidates of an
action and what followed each. In its default configuration it has eight candidates with one continuation
each, and adds 1 to all counts.

{influence}

From one continuation for each candidate, the estimate depends only on how often each next action occurs. So
its expectation is the same whether the second action follows the first or ignores it (the two rows of
*agreement*), and it is not 0 where there is no influence. More continuations for each candidate are needed.

## In treetune

* `gigpo` works with the rollout `multi_turn`. `treetune check` refuses it where answers have no replies.
* C3's replay is a setting of `monte_carlo`: `states: {{ type: 'turns' }}` and `lam: 1`. With `lam: 0` it is
  VinePPO, and values between mix both.
* The rollout `tree` branches answers that the policy writes by itself, at `at_states` or, in the tail, at
  `last_states`. It does not branch answers with an environment, so C3's tree and BranPO for agents are only
  on this page.

## What it does not say

* The languages are tiny, and their policies have separate parameters for each state. Observations are single
  tokens. Text that never recurs word by word gives GiGPO no anchor states but the prompt.
* Here the environment draws its replies anew for each answer. In treetune all answers to a problem have the
  same seed of the environment.
* Of C3 the abstracts of both versions and the code were read, of BranPO the abstracts and the code; their
  equations were not available. BranPO's code also chooses where to branch by the accuracy of the group, and
  masks steps that are redundant. These are not here. The numbers in C3's paper may come from other settings
  than the code's defaults.
* A less noisy gradient is not faster learning: see [credit in training](credit_training.md).
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
    correlations = fidelity_and_gain(scores)
    text = PAGE.format(
        bias=table_of(scores, bias_text),
        gain=table_of(scores, gain_text),
        audit=table_of(scores, audit_text),
        influence=influence_table(tables),
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
