"""How many rows stay of each domain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from treetune.seeds import derive_seed
from treetune_data.rules.base import Rows, Rule, RuleContext, Verdict
from treetune_domains.domain_rows import DATA_SOURCE, domain_of, row_key


@Rule.register("quotas")
@dataclass(frozen=True, kw_only=True)
class Quotas(Rule):
    """Keeps at most so many rows of a domain (``math``) or of a source (``math__dapo``), as `most` says; a
    source that is named counts apart from its domain. With `total`, so many of all together, each in
    proportion to what it has left.

    Which rows stay is drawn by the pipeline's seed and each row's content: another domain, or another order,
    changes nothing.
    """

    most: Mapping[str, Annotated[int, Ge(0)]] | None = None
    """Rows of a domain or a source."""
    total: Annotated[int, Gt(0)] | None = None
    """Rows of all domains together."""
    name: str | None = None

    def __post_init__(self) -> None:
        if not self.most and self.total is None:
            raise ValueError("quotas bound nothing: set most, e.g. {math: 5000}, or total, or leave them out")

    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for one in rows:
            source = one.row[DATA_SOURCE]
            group = source if source in (self.most or {}) else domain_of(source)
            groups[group].append((derive_seed(context.seed, row_key(one.row), "quota"), one.number))
        unknown = sorted(set(self.most or {}) - set(groups))
        if unknown:
            there = ", ".join(sorted(groups)) or "no rows"
            raise ValueError(f"quotas name {', '.join(unknown)}, and there are only {there}: leave them out")
        kept = {group: sorted(chosen)[: self._most(group)] for group, chosen in groups.items()}
        left = sum(map(len, kept.values()))
        if self.total is not None and left > self.total:
            shares = proportional({group: len(chosen) for group, chosen in kept.items()}, self.total)
            kept = {group: chosen[: shares[group]] for group, chosen in kept.items()}
        stay = {number for chosen in kept.values() for _, number in chosen}
        found = {
            number: f"more than the {len(kept[group])} that {group} may have"
            for group, chosen in groups.items()
            for _, number in chosen
            if number not in stay
        }
        return Verdict(
            dict(sorted(found.items())), {"kept": {group: len(kept[group]) for group in sorted(kept)}}
        )

    def _most(self, group: str) -> int | None:
        return (self.most or {}).get(group)


def proportional(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` cut in proportion to `sizes`, by largest remainders, which add up to it exactly."""
    whole = sum(sizes.values())
    exact = {group: total * size / whole for group, size in sizes.items()}
    shares = {group: int(share) for group, share in exact.items()}
    rest = sorted(sizes, key=lambda group: (shares[group] - exact[group], group))
    for group in rest[: total - sum(shares.values())]:
        shares[group] += 1
    return shares
