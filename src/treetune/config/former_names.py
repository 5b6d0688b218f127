"""Names that parts of users defined in earlier versions, and what to write instead.

Nothing reads these names now, so that a part which still has one would silently do something else.
`Registrable` refuses such a class when it is defined.
"""

from __future__ import annotations

from collections.abc import Mapping

_MIXED = "derive the task from treetune.MixedTask"
_DRAWING = "override `drawing_rule`, and return a treetune.DrawingRule"
_SCORES = "return treetune.TrainerScores from the property `trainer_scores`"

FORMER_METHODS: Mapping[str, Mapping[str, str]] = {
    "Task": {
        "made": "its name is `make_problems`",
        "sampling": "its name is `adjust_sampling`",
        "of": _MIXED,
        "parts": _MIXED,
        "is_trained": f"{_MIXED}, and override `trained_parts`",
        "domain_names": "derive the task from treetune.TaskWithDomains",
        "draw": f"{_DRAWING} with the method `draw`",
        "draw_further": f"{_DRAWING} with the method `draw_further`",
        "drawing_metrics": f"{_DRAWING} with the method `metrics`",
        "remembers_pass_rates": f"{_DRAWING} with `reads_pass_rates = True`",
        "check_demonstrations": "override `gives`, and return treetune.TaskDemonstrations(why_none='…')",
        "answer_boundaries": "it follows from `step_boundaries`; where the end token of an answer belongs to"
        " its last step, set `boundaries_look_back = False`",
    },
    "Objective": {
        "terms": "derive the objective from treetune.DistributionObjective",
        "compare": "derive the objective from treetune.TeacherObjective",
        "precompute": "derive the objective from treetune.ReferenceKlObjective",
        "marked_tokens": "derive the objective from treetune.MarkingObjective",
    },
    "Credit": {
        "asks_reference": _SCORES,
        "asks_distributions": _SCORES,
        "compares_distributions_with": _SCORES,
        "trainer_passes": _SCORES,
        "reference": _SCORES,
        "scores_texts": "it follows from `needs`: declare Need(treetune.TextScores(), '…')",
        "continuations": "derive the credit from treetune.ContinuingCredit",
        "early_continuations": "derive the credit from treetune.ContinuingCredit",
        "from_values": "derive the credit from treetune.Gae",
        "trained_reward_model": "derive the credit from treetune.RewardModelCredit",
        "from_implicit_rewards": "derive the credit from treetune.RewardModelCredit",
    },
    "Rollout": {
        "prepare": "its name is `check_at_start`",
        "sampler": "its name is `rollout_for_fixed_problems`",
    },
    "Shaping": {"prepare": "its name is `check_at_start`"},
    "ValueEstimator": {
        "scores_texts": "it follows from `needs`: declare Need(treetune.TextScores(), '…')",
    },
}
"""Methods and properties of parts, by the family's name. A setting may have such a name."""

FORMER_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "Objective": {
        "has_terms": "derive the objective from treetune.DistributionObjective",
        "teacher": "derive the objective from treetune.TeacherObjective",
        "compare_bytes": "derive the objective from treetune.TeacherObjective",
        "needs_reference_kl": "derive the objective from treetune.ReferenceKlObjective",
        "marks_tokens": "derive the objective from treetune.MarkingObjective",
        "kl_placement": "return a treetune.KlPenalty from the property `kl_penalty`",
        "ratio_threshold": "derive the objective from treetune.PolicyGradient",
    },
}
"""Class attributes and settings of parts, by the family's name."""


def refuse_former_names(family: type, part: type) -> None:
    """Raises TypeError if a part's class defines a former name of its family, such as Task.

    A class between the family and the part may have the name now, as `MixedTask` has `of`. Then the part may
    have it, too.
    """
    between = part.__mro__[1 : part.__mro__.index(family)]
    present_names: set[str] = set()
    for base in between:
        present_names |= vars(base).keys()
    for name, instead in FORMER_METHODS.get(family.__name__, {}).items():
        value = vars(part).get(name)
        # `cached_property` is neither a function nor a property, but has `__get__`, as both of them have.
        if hasattr(value, "__get__") and name not in present_names:
            _refuse(part, name, instead)
    for name, instead in FORMER_ATTRIBUTES.get(family.__name__, {}).items():
        is_defined = name in vars(part) or name in vars(part).get("__annotations__", {})
        if is_defined and name not in present_names:
            _refuse(part, name, instead)


def _refuse(part: type, name: str, instead: str) -> None:
    raise TypeError(f"{part.__name__}.{name} is of an earlier version, and nothing reads it now: {instead}")
