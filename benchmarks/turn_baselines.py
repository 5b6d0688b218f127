"""Computes how baselines for turn rewards bias what a policy learns about taking another turn, exactly.

python benchmarks/turn_baselines.py --output docs/results
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.pairs import publish  # noqa: E402
from treetune.lab.arena.gain import markdown_table  # noqa: E402
from treetune.lab.arena.turns import TurnLanguage  # noqa: E402

TURNS = 8
GOES_ON = (0.3, 0.5, 0.8, 0.95)
"""Probabilities of another turn."""
EARNS = 0.5
"""The probability that a turn earns 1."""
ANSWERS = (2, 4, 8, 16)
"""Sizes of groups."""

PAGE = """# Baselines for turn rewards

```bash
python benchmarks/turn_baselines.py --output docs/results
```

If an environment rewards each turn, and the policy decides how many turns it takes, which baseline may be
subtracted? MT-GRPO ([2505.11821](https://arxiv.org/abs/2505.11821)) normalises the reward of a turn over
the group. Its published code rewards one turn, before the tool's result. If this is generalised to
answers with different numbers of turns, by a baseline for each number, the gradient is biased, as [verl's
issue 7244](https://github.com/verl-project/verl/issues/7244) says. This page computes the bias.

**The language.** After each turn the policy takes another with some probability, up to {turns} turns.
Each turn earns 1 with probability 0.5, else 0. Credit for a turn is the sum of its reward and those of
the later turns, minus a baseline from the other answers to the problem (so the answer's own rewards are
not in it).

Three baselines of turn t:

* *By index*, **biased**: for each turn that this answer has from t on, the mean reward of the others'
  turns with the same number.
* *Padded*, unbiased: for each turn from t to the last possible one, the mean reward of the others' turns
  with the same number, where turns after the end of an answer earn 0.
* *By return*, unbiased: the mean return from t on, of the others that have a turn t.

An answer that ends early has fewer turns, so with *by index* it subtracts less. The baseline depends on
the choice whose advantage it belongs to. In groups of n answers, the expected gradient by the logit of
"take another turn after turn t", with c the probability of doing so, ρ_k the probability that an answer
has a turn k, and m_k its mean reward, is

* true, padded and by return: (1 − c) Σ_(k>t) ρ_k m_k
* by index: (1 − c) Σ_(k>t) ρ_k m_k (1 − ρ_k)^(n−1)

The tests compare both with all groups of two and three answers, for random languages.

**What is left of the gradient.** By index, divided by the true gradient, for the choice after the first
turn:

{table}

With eight answers, a policy that usually takes another turn hardly learns from the rewards of later turns
whether to take them. An outcome reward with a separate baseline is not affected. So if the outcome reward
falls with the number of turns, the policy sees this cost, does not see the rewards of further turns, and
learns to stop.

**In treetune** no credit uses the baseline by index.
[`gigpo`](../credit_assignment.md#credits-of-the-literature) compares returns, though its mean includes
the answer itself ([credits for turns](turn_credits.md) has its bias). `monte_carlo` with states `turns`
values the later rewards by continuations.

**What it does not say.** In this language what a turn earns does not depend on the turns before it.
Dividing by the standard deviation adds another bias. Here it is left out.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for turn_baselines.md and its numbers")
    output = parser.parse_args().output
    rows: list[list[object]] = []
    numbers: dict[str, Any] = {}
    for goes_on in GOES_ON:
        language = TurnLanguage(goes_on=(goes_on,) * (TURNS - 1), earns=(EARNS,) * TURNS)
        # The gradients by the logit of another turn after the first turn.
        true_gradient = language.true_gradient()[0]
        shares = {}
        for answers in ANSWERS:
            shares[answers] = language.gradient_by_index(answers)[0] / true_gradient
        numbers[f"{goes_on:g}"] = {"true": true_gradient, "shares": shares}
        share_cells = [f"{share:.3f}" for share in shares.values()]
        rows.append([f"{goes_on:g}", f"{true_gradient:.3f}", *share_cells])
    heads = ["another turn with probability", "true gradient", *(f"{n} answers" for n in ANSWERS)]
    table = "\n".join(markdown_table(heads, rows))
    publish(PAGE.format(turns=TURNS, table=table), numbers, output, "turn_baselines")


if __name__ == "__main__":
    main()
