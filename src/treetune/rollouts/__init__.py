"""Rollouts, which sample the answers to problems: one file for each, and what they share.

| file | `type` in a configuration | answers |
|---|---|---|
| `single_turn.py` | ``single_turn`` | independent answers to each problem |
| `until_mixed.py` | ``until_mixed`` | `single_turn` until enough problems have different scores (DAPO) |
| `partial.py` | ``partial`` | long answers that take several iterations (Kimi k1.5) |
| `demonstrations.py` | ``demonstrations`` | the task's demonstrations, for SFT |
| `treetune/domains/multi_turn.py` | ``multi_turn`` | turns between the model and an environment |
| `treetune/threads/parallel_threads.py` | ``parallel_threads`` | threads that fork and join (ThreadWeaver) |
| `treetune/lab/trees/rollout.py` | ``tree`` | answers that branch (SPO, TreeRL, TreePO) |
| `treetune/lab/trees/turns.py` | ``turn_tree`` | conversations that branch between turns |

The last four are in the packages that they need: environments, threads, and the rules that decide where trees
branch (which use `treetune.credit.states`). The package `rollouts` must not import these packages.

`base.py` has the base classes, `context.py` what a run gives a rollout, and `answers.py` what the rollouts
share. `shaping.py` adds bonuses before credit, and `selection.py` chooses rows after it. `storage.py` and
`rows.py` keep answers and training rows on disk. `metrics.py`, `numbers.py`, `model_scores.py` and
`unavailable.py` have what is counted and reported.
"""
