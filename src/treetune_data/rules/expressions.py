"""Rows stay where an expression about their fields is true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import MinLen

from treetune_data.rules.base import Rows, Rule, RuleContext, Verdict
from treetune_data.templates import NoValue, check_value, value_of


@Rule.register("keep_where")
@dataclass(frozen=True, kw_only=True)
class KeepWhere(Rule):
    """Keeps rows for which the Jinja expression `where` is true, such as ``extra_info.level >= 3`` or
    ``reward_model.ground_truth | length <= 100``. Its names are the row's columns."""

    where: Annotated[str, MinLen(1)]
    name: str | None = None

    def __post_init__(self) -> None:
        check_value(self.where, "where")

    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        found = {}
        for one in rows:
            try:
                stays = value_of(self.where, one.row)
            except NoValue as error:
                raise ValueError(f"{one.place}: {error}") from error
            if not stays:
                found[one.number] = f"not {self.where}"
        return Verdict(found)
