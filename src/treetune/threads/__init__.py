"""Answers that fork into threads and join again (ThreadWeaver): all that is particular to them.

* `parallel_threads`: the rollout, and the states whose values credit estimates. `fork_join` writes its
  answers.
* `format`: the text of threads (tags, grammar, faults), and demonstrations in the form that the rollout would
  have made. It does not import the rollout, since tasks and data tools write texts in this format, too.
* `numbers`: the named numbers of an answer, such as the length of its critical path.
* `shaping`: bonuses for short critical paths.
* `shapley`: a credit that gives each thread its Shapley value.
* `think_template` and `commands`: the command ``treetune chat_template``, which prepares a model that thinks.
"""
