"""What the answers cost: counted by step, bounded by a budget."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from treetune_domains.endpoints.settings import Prices


class OutOfBudget(Exception):
    """The next request could cost more than is left."""


@dataclass
class Usage:
    """Sums over answers. `estimated` are those whose endpoint said nothing of their tokens: they are taken
    for as many as their bytes, which no tokenizer exceeds."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    estimated: int = 0

    def add(self, input_tokens: int, output_tokens: int, estimated: bool) -> None:
        self.requests += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self.estimated += estimated

    def as_row(self, prices: Prices | None) -> dict[str, Any]:
        """For the summary; dollars only where prices are known."""
        row: dict[str, Any] = dict(vars(self))
        if prices is not None:
            row["dollars"] = round(prices.dollars(self.input_tokens, self.output_tokens), 6)
        return row


class Ledger:
    """Counts answers, those of earlier runs too, and lets requests through as long as what they could
    cost at most, with those in flight, stays within `budget` (dollars)."""

    def __init__(self, prices: Prices | None, budget: float | None) -> None:
        assert budget is None or prices is not None
        self.prices = prices
        self.steps: dict[str, Usage] = defaultdict(Usage)
        self.exhausted = False
        self._budget = budget
        self._reserved: list[float] = []
        self._changed = asyncio.Condition()

    @property
    def total(self) -> Usage:
        total = Usage()
        for usage in self.steps.values():
            for name, value in vars(usage).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    @property
    def dollars(self) -> float:
        """Spent so far; 0 where no prices are known."""
        total = self.total
        return self.prices.dollars(total.input_tokens, total.output_tokens) if self.prices else 0.0

    @asynccontextmanager
    async def reserved(self, input_tokens: int, output_tokens: int) -> AsyncIterator[None]:
        """Around a request that takes so many tokens at most. Raises OutOfBudget."""
        if self._budget is None or self.prices is None:
            yield
            return
        most = self.prices.dollars(input_tokens, output_tokens)
        async with self._changed:
            while not self.exhausted and self.dollars + sum(self._reserved) + most > self._budget:
                # Those in flight mostly cost less than they might: what is left over may do.
                if not self._reserved:
                    self.exhausted = True
                else:
                    await self._changed.wait()
            self._changed.notify_all()
            if self.exhausted:
                raise OutOfBudget
            self._reserved.append(most)
        try:
            yield
        finally:
            async with self._changed:
                self._reserved.remove(most)
                self._changed.notify_all()
