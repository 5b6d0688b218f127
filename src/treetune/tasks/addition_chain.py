"""The embedded default: add numbers one after the other, writing each running total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from treetune.tasks.arithmetic import Line, Solution, WrittenArithmetic
from treetune.tasks.base import Task


@Task.register("addition_chain")
@dataclass(frozen=True, kw_only=True)
class AdditionChain(WrittenArithmetic):
    r"""Add `count` numbers of `digits` digits, e.g. ``12+34+56+78=\n`` with the solution
    ``12+34=46\n46+56=102\n102+78=180\n#180``: count - 1 running totals, one step each, and the
    answer. Each line repeats what it adds, so that a small model can learn lines one at a time.

    A teacher with `demonstration_noise` p is right in (1 - p)^(count - 1) of its solutions.
    """

    count: Annotated[int, Ge(2), Le(64)] = 4

    operator: ClassVar[str] = "+"

    def _operand_count(self) -> int:
        return self.count

    def _operand_range(self) -> range:
        return range(10 ** (self.digits - 1), 10**self.digits)

    def _solution(self, numbers: Sequence[int]) -> Solution:
        total = numbers[0]
        for number in numbers[1:]:
            total = yield Line(lead=f"{total}+{number}=", value=total + number, weight=1)

    def _answer(self, numbers: Sequence[int]) -> int:
        return sum(numbers)
