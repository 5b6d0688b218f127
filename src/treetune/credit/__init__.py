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

The other files and folders:

| file | contents |
|---|---|
| `base.py` | the base classes of credits, and the settings of a critic |
| `critic_losses.py`, `critic_prompts.py` | the losses of a critic, and the prompts that it sees |
| `teacher_prompts.py` | the prompts that the teacher of self-distillation sees |
| `reward_models.py` | the settings and the loss of an implicit reward model |
| `episodes.py` | makes training rows |
| `states/` | rules for where the states (prefixes) of an answer lie and how they are continued |
| `values/` | estimators of the values of states |
| `library/` | assigns credit to answers of other trainers |

The public names of `library/` are imported from `treetune.credit`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.credit.library.answers import GradedAnswer
    from treetune.credit.library.assigner import (
        CreditAssigner,
        CreditedAnswers,
        advantages,
        advantages_async,
    )
    from treetune.credit.library.limits import CreditCost
    from treetune.exceptions import CreditLimitReached

__all__ = [
    "CreditAssigner",
    "CreditCost",
    "CreditLimitReached",
    "CreditedAnswers",
    "GradedAnswer",
    "advantages",
    "advantages_async",
]

# The module of each public name, for `__getattr__`.
_MODULE_OF = {
    "CreditAssigner": "treetune.credit.library.assigner",
    "CreditCost": "treetune.credit.library.limits",
    "CreditLimitReached": "treetune.exceptions",
    "CreditedAnswers": "treetune.credit.library.assigner",
    "GradedAnswer": "treetune.credit.library.answers",
    "advantages": "treetune.credit.library.assigner",
    "advantages_async": "treetune.credit.library.assigner",
}


def __getattr__(name: str) -> Any:
    """Returns a public name of `library/`, and imports its module only then (PEP 562).

    Importing `treetune.credit`, as reading a configuration does, doesn't import the library.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'treetune.credit' has no attribute {name!r}", name=name)
    return getattr(import_module(_MODULE_OF[name]), name)
