"""Credit: what each sampled token is worth. One file for each method, under the name that people use.

| file | `type` in a configuration | method |
|---|---|---|
| `vineppo.py` | ``monte_carlo`` | VinePPO: values by Monte-Carlo continuations |
| `gae.py` | ``gae`` | PPO: a critic's values and generalised advantage estimation |
| `grpo.py` | ``group`` | GRPO, and Dr. GRPO without the division by the standard deviation |
| `rloo.py` | ``rloo`` | RLOO: the mean of the other answers as baseline |
| `reinforce.py` | ``outcome`` | REINFORCE without a baseline |
| `trees.py` | ``tree`` | SPO-tree, TreeRL, TreePO, and leave-one-out in sampled trees |
| `distillation.py` | ``distillation`` | on-policy distillation |
| `no_credit.py` | ``none`` | no advantages |
| `literature/` | the file's name | a file for each further paper |

`base.py` says what a credit is, and `episodes.py` makes the training rows. `states/` has the rules for where
the states of an answer lie and how they are continued, `values/` the estimators of their values.
"""
