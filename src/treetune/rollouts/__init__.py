"""Rollouts: how answers grow from a problem, and what happens to answers around credit.

* A file for each rollout: `single_turn.py`, `until_mixed.py`, `partial.py`, `demonstrations.py`. Rollouts
  that need more are in the packages of what they need: `multi_turn` in `treetune.domains`, `parallel_threads`
  in `treetune.threads`, `tree` and `turn_tree` in `treetune.lab.trees`.
* What they share: `base.py` (the base classes), `context.py` (what a run gives them), `answers.py`.
* `shaping.py` and `selection.py`: bonuses before credit, and the choice of rows after it.
* `storage.py`, `rows.py`: answers and training rows on disk. `metrics.py`, `numbers.py`, `unavailable.py`:
  what is counted and reported.
"""
