"""Answers that fork into threads and join again (ThreadWeaver): all that is particular to them.

The rollout (`parallel_threads`, whose answers `fork_join` writes), demonstrations as it would
have made them, where the states lie that credit values, numbers of an answer, and what is paid for a short
critical path.

The text of threads (tags, grammar, faults) is in `format`, which imports no rollout: tasks write
demonstrations in it, and the data tools write rows in it.
"""
