"""Correct answers earn more the shorter their critical path is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext, ShapingMemory
from treetune.vocabulary import Problem, Trajectory
from treetune_threads.numbers import counts_of
from treetune_threads.reference_lengths import ReferenceLength
from treetune_threads.tags import TagIds

Form = Literal["saved", "ratio"]


def acceleration(critical_path: float, reference: float, form: Form) -> float:
    """How much shorter than the reference: 1 − critical path / reference (``saved``), or
    reference / critical path − 1 (``ratio``). Both are 0 where they are equal; lengths in tokens."""
    critical_path, reference = max(1.0, critical_path), max(1.0, reference)
    return 1.0 - critical_path / reference if form == "saved" else reference / critical_path - 1.0


@Shaping.register("acceleration")
@dataclass(frozen=True, kw_only=True)
class Acceleration(Shaping):
    """`weight` times the `acceleration` of a correct answer against the `reference`, at most `clip` and at
    least `floor`; wrong answers get nothing.

    Critical paths are counted as `tasks.threads.counting` says, on responses only. `threads` that were
    ``written`` count by their tags, as published, though a policy can write those one after the other and
    save no time; ``forked`` ones were really sampled beside each other. The references are
    `total` (as ThreadWeaver has it: against the answer's own tokens, which rewards threads that add
    nothing), `group`, and three of a sequential answer's length: `sequential_demonstration`,
    `sequential_running`, `sequential_measured`.

    With a `floor` of 0, a correct answer never earns less for being slow: threads that don't pay yet cost
    nothing, and a policy isn't taught to give them up before it can write them well. Below 0, up to
    ``-floor`` can be lost too, so that there is something to learn between slow and slower. Against `total`
    nothing is ever below 0.

    A correct answer that there is nothing to compare with gets nothing. `opening` is for opening any block
    at all in a correct answer.

    ``acceleration/without_reference`` is the share of correct answers without one; of the others
    ``acceleration/reference_tokens`` and ``acceleration/unclipped`` are the mean reference and the mean
    acceleration before `clip` and `floor`, ``acceleration/at_clip`` the share that reached `clip`.
    """

    weight: Annotated[float, Gt(0)]
    clip: Annotated[float, Gt(0)]
    form: Form
    """``saved``: 1 - critical path / reference; ``ratio``: reference / critical path - 1."""
    reference: ReferenceLength
    floor: Annotated[float, Le(0)] = 0.0
    threads: Literal["forked", "written"] = "forked"
    opening: Annotated[float, Ge(0)] = 0.0

    measures = ("without_reference", "reference_tokens", "unclipped", "at_clip")

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.reference.remembers

    def prepare(self, problems: Sequence[Problem]) -> None:
        self.reference.prepare(problems)

    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        return self.assess(context, trajectories)[0]

    def assess(
        self, context: RolloutContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[float], Mapping[str, Sequence[float]]]:
        tags = TagIds.of(context.codec.encode)
        only_forked = self.threads == "forked"
        counts = [counts_of(trajectory, tags, only_forked=only_forked) for trajectory in trajectories]
        memory = context.get(ShapingMemory).setdefault(self.label, {}) if self.remembers else {}
        references = self.reference.lengths(context, trajectories, counts, memory)
        bonuses = [0.0] * len(trajectories)
        measured: dict[str, list[float]] = {name: [] for name in self.measures}
        for position, (of_answer, reference) in enumerate(zip(counts, references, strict=True)):
            if not trajectories[position].grade.correct:
                continue
            bonuses[position] = self.opening * of_answer.with_parallel
            measured["without_reference"].append(float(reference is None))
            if reference is None:
                continue
            value = acceleration(of_answer.num_tokens_in_the_longest_thread, reference, self.form)
            bonuses[position] += self.weight * max(self.floor, min(value, self.clip))
            measured["reference_tokens"].append(reference)
            measured["unclipped"].append(value)
            measured["at_clip"].append(float(value >= self.clip))
        return bonuses, measured
