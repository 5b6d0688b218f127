"""Multiply numbers, with the partial products written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from treetune.tasks.arithmetic import Line, Solution, WrittenArithmetic
from treetune.tasks.base import Task


@Task.register("multiplication")
@dataclass(frozen=True, kw_only=True)
class Multiplication(WrittenArithmetic):
    r"""Multiply `factors` numbers of `digits` digits, e.g. ``23*47=\n`` with the solution
    ``23*40=920\n23*7=161\n920+161=1081\n#1081``.

    The product so far is multiplied by each place of the next factor that is not zero, and the
    partial products are added as they come: one operation, one line, one step. A teacher with
    `demonstration_noise` p is right in (1 - p)^n of its n-line solutions. Single-digit factors
    are 2 to 9. There are 4095 different pairs of two-digit numbers, which the default sizes fit.
    """

    factors: Annotated[int, Ge(2), Le(8)] = 2
    train_size: Annotated[int, Gt(0)] = 3000
    validation_size: Annotated[int, Gt(0)] = 250
    test_size: Annotated[int, Gt(0)] = 500

    operator: ClassVar[str] = "*"

    def _operand_count(self) -> int:
        return self.factors

    def _operand_range(self) -> range:
        return range(2 if self.digits == 1 else 10 ** (self.digits - 1), 10**self.digits)

    def _solution(self, numbers: Sequence[int]) -> Solution:
        product = numbers[0]
        for position, factor in enumerate(numbers[1:], start=1):
            weight = math.prod(numbers[position + 1 :])
            total = None
            for part in _places(factor):
                partial = yield Line(lead=f"{product}*{part}=", value=product * part, weight=weight)
                if total is None:
                    total = partial
                else:
                    lead = f"{total}+{partial}="
                    total = yield Line(lead=lead, value=total + partial, weight=weight)
            assert total is not None, "a factor has a place that is not zero"
            product = total

    def _answer(self, numbers: Sequence[int]) -> int:
        return math.prod(numbers)

    def alphabet(self) -> str:
        return "0123456789*+=#\n"


def _places(factor: int) -> list[int]:
    """``407`` as ``[400, 7]``."""
    digits = str(factor)
    return [
        int(digit) * 10 ** (len(digits) - 1 - place) for place, digit in enumerate(digits) if digit != "0"
    ]
