"""Names that users' parts could define in earlier versions, and what to write instead.

A part that still defines one would not do what its author meant: most of these names are no longer read, and
the others are now computed by the base class. So `Registrable` refuses such a class when it is defined.
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
    "Grader": {"behind_thought": "its name is `after_thought`"},
    "Rollout": {
        "prepare": "its name is `check_at_start`",
        "sampler": "its name is `rollout_for_fixed_problems`",
    },
    "Shaping": {"prepare": "its name is `check_at_start`"},
    "ValueEstimator": {
        "scores_texts": "it follows from `needs`: declare Need(treetune.TextScores(), '…')",
    },
}
"""Former methods and properties, by family. A setting of such a name isn't refused, such as the field
`reference` of a credit."""

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
"""Former class attributes and settings, by family. Any definition of such a name is refused."""


def refuse_former_names(family: type, part: type) -> None:
    """Raises TypeError if a part's class defines a method or attribute that its family had in an earlier
    version, such as the method `made` of the family Task. Nothing would call this method, so the part would
    silently do something else.

    It is allowed if a base class below the family defines it. Example: `MixedTask`, which is below Task,
    still has `of`, so its sub-classes may override `of`.
    """
    between = part.__mro__[1 : part.__mro__.index(family)]  # the base classes below the family
    present_names: set[str] = set()
    for base in between:
        # A setting without a default is only among the annotations.
        present_names |= vars(base).keys() | vars(base).get("__annotations__", {}).keys()
    settings = vars(part).get("__annotations__", {}).keys()
    methods_and_attributes = vars(part).keys() - settings
    # A setting may have the name of a former method: it is read as a setting, and never called.
    for name, instead in FORMER_METHODS.get(family.__name__, {}).items():
        if name in methods_and_attributes - present_names:
            _refuse_former_name(part, name, instead)
    # A setting must not have the name of a former attribute.
    for name, instead in FORMER_ATTRIBUTES.get(family.__name__, {}).items():
        if name in (methods_and_attributes | settings) - present_names:
            _refuse_former_name(part, name, instead)


def _refuse_former_name(part: type, name: str, instead: str) -> None:
    raise TypeError(
        f"{part.__name__}.{name} is of an earlier version, and parts don't define it now: {instead}"
    )
