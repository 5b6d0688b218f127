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

`library/` assigns credit to answers of other trainers; its names are imported from here.

`base.py` says what a credit is, `critic_losses.py` what a critic learns, `critic_prompts.py` what it sees,
`teacher_prompts.py` what the teacher of self-distillation sees, `reward_models.py` what an implicit reward
model learns, and `episodes.py` makes the training rows. `states/` has the rules for where the states of an
answer lie and how they are continued, `values/` the estimators of their values.
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
    """Imports the module of a name of the library when the name is first asked for (PEP 562).

    The parts of this package import its modules directly, so that a configuration is read without them.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'treetune.credit' has no attribute {name!r}", name=name)
    return getattr(import_module(_MODULE_OF[name]), name)
