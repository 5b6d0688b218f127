"""Credit as a library: advantages for answers that another trainer has sampled and graded.

| file | contents |
|---|---|
| `answers.py` | `GradedAnswer`, an answer from elsewhere, and the trees that credit works on |
| `assigner.py` | `advantages`, `advantages_async`, and `CreditAssigner`, which keeps engine and grader open |
| `engines.py` | opens the engine that continues answers in this process |
| `servers.py` | connects to vLLM servers of the caller that continue answers |
| `checks.py` | refuses calls in which answers, engine or grader don't have something that the credit needs |
| `grading.py` | the grader of continuations: a function, or one of this package's graders |
| `limits.py` | the budget and the deadline of a call, and its cost |

Users import the public names from `treetune.credit`. A run uses the same credits, so the same answers get the
same advantages here and in a run.
"""
