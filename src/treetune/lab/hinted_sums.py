r"""Sums whose prompts may show the answer: a toy task for self-distillation with a privileged prompt.

A model without training does not know what to do with an answer in its prompt. So half of the training
problems of a start model may have such a hint, and the teacher of the demonstrations uses it: it makes fewer
errors, and it may write the reference answer at the end even after an error.

    prompt              demonstration
    3+8+5=\n            3+8=11\n 11+5=17\n #17         an error, and its result
    #16\n3+8+5=\n       3+8=11\n 11+5=17\n #16         an error, and the reference answer from the hint

The metrics ``leak/…`` count answers that give away a reference answer, as the second demonstration does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Le
from typing_extensions import override

from treetune.rollouts.numbers import Number, NumberGroup
from treetune.seeds import derived_random
from treetune.tasks.arithmetic import ANSWER_AFTER_MARKER, MARKER, AdditionChain
from treetune.tasks.base import Task
from treetune.vocabulary import Problem, TextCodec, Trajectory

HINT_TEMPLATE = MARKER + "{context}\n{prompt}"
"""The prompt of a problem with a hint, as the credit `self_distillation` takes it as its template."""


@Task.register("hinted_sums")
@dataclass(frozen=True, kw_only=True)
class HintedSums(AdditionChain):
    r"""The problems of ``addition_chain``, some of whose prompts begin with the answer.

    In the training split, a share `hinted` of the problems has the prompt ``#180\n12+34+56+78=\n``. Their
    demonstrations have errors in a share `hinted_noise` of the lines. With `copies_hint` they end with the
    reference answer whatever their last line says. Problems of the other splits have no hint.
    """

    hinted: Annotated[float, Ge(0), Le(1)] = 0.0
    """The share of training problems with a hint. It doesn't change which problems there are."""
    hinted_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    """The probability of an error in each line of a demonstration for a problem with a hint."""
    copies_hint: bool = True
    """Whether demonstrations for problems with a hint end with the reference answer even after an error,
    instead of the result of their last line."""

    @override
    def problem(self, id: str, generated: tuple[int, ...]) -> Problem:
        problem = super().problem(id, generated)
        # This random number derives from the problem's id, so `hinted` doesn't change the numbers to add. A
        # problem that has a hint at some share also has one at every larger share.
        is_drawn = derived_random(self.seed, id, "hint").random() < self.hinted
        is_hinted = is_drawn and id.startswith("train/")  # only training problems have hints
        prompt = problem.prompt
        if is_hinted:
            prompt = HINT_TEMPLATE.replace("{context}", problem.gold).replace("{prompt}", prompt)
        return replace(problem, prompt=prompt, data={**problem.data, "hinted": is_hinted})

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        if not problem.data["hinted"]:
            return super().demonstration(problem, seed)
        # As without a hint, but with another rate of errors. A demonstration depends on the numbers to add,
        # and not on the prompt. `careful.demonstration` would be this method again, without end.
        careful = replace(self, demonstration_noise=self.hinted_noise)
        demonstration = AdditionChain.demonstration(careful, problem, seed)
        if not self.copies_hint:
            return demonstration
        lines, _, _ = demonstration.rpartition(MARKER)  # without the result of the last line
        return f"{lines}{MARKER}{problem.gold}"

    @override
    def teacher_value(self, problem: Problem, prefix: str) -> float:
        """Returns `WrittenArithmetic.teacher_value` for a problem without a hint.

        Raises ValueError for a problem with a hint."""
        if problem.data["hinted"]:
            raise ValueError(
                f"problem {problem.id!r} has a hint, and the value of the teacher is only known without one:"
                " set the task's hinted to 0"
            )
        return super().teacher_value(problem, prefix)


DECLARED_NUMBERS = {
    "underived": Number(
        "answers that state the reference answer without deriving it",
        better="lower",
        share=True,
        while_training=True,
    ),
    "contradicted": Number("answers whose result is not that of their last line", better="lower", share=True),
    "repeated_hint": Number("answers that begin with a result", better="lower", share=True),
}


@NumberGroup.register("leak", DECLARED_NUMBERS)
def measure_hinted_sums(trajectories: Sequence[Trajectory], codec: TextCodec) -> list[dict[str, float]]:
    """Returns for each answer a dictionary of its numbers, which is empty for an answer to another task.

    * ``underived`` is 1 if the answer contains the reference answer as a number, and doesn't begin with all
      right lines of the solution.
    * ``contradicted`` is 1 if the number after the last marker ``#`` differs from the result of the last
      line. Answers that lack the marker, the number after it or a line have no ``contradicted``.
    * ``repeated_hint`` is 1 if a marker comes before the first sum, as in a prompt with a hint.
    """
    numbers = []
    for answer in trajectories:
        numbers.append(measure_leaks(answer.text, answer.problem) if "hinted" in answer.problem.data else {})
    return numbers


def measure_leaks(text: str, problem: Problem) -> dict[str, float]:
    r"""Returns the numbers that `measure_hinted_sums` explains, for a single answer.

    Example: for ``3+8+5=\n``, the answer ``3+8=11\n11+5=17\n#16`` has
    ``{"underived": 1.0, "contradicted": 1.0, "repeated_hint": 0.0}``.
    """
    # Numbers are compared as the grader compares them: 016 is 16. 16 isn't stated by 116.
    states_gold = any(ANSWER_AFTER_MARKER.verdict(number, problem) for number in re.findall(r"\d+", text))
    is_derived = text.startswith(write_derivation(problem.data["numbers"]))
    numbers = {"underived": float(states_gold and not is_derived)}
    lines, _, _ = text.rpartition(MARKER)
    result = ANSWER_AFTER_MARKER.extract(text, problem)
    results_of_lines = re.findall(r"=(\d+)\n", lines)
    if result is not None and results_of_lines:  # an answer that was cut off may lack either
        # The grader compares the result with that of the last line, as if this were the reference answer.
        agrees = ANSWER_AFTER_MARKER.verdict(result, replace(problem, gold=results_of_lines[-1]))
        numbers["contradicted"] = 1.0 - agrees
    before_first_sum, _, _ = text.partition("=")
    numbers["repeated_hint"] = float(MARKER in before_first_sum)
    return numbers


def write_derivation(summands: Sequence[int]) -> str:
    r"""Returns the right lines of a solution: ``3+8=11\n11+5=16\n`` for 3, 8 and 5."""
    lines, total = "", summands[0]
    for number in summands[1:]:
        lines += f"{total}+{number}={total + number}\n"
        total += number
    return lines
