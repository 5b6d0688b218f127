"""Which server of an engine has the keys and values of a text's beginning in its cache, most likely."""

from __future__ import annotations

from collections.abc import Iterator

from treetune.vocabulary import TokenIds

BLOCK_TOKENS = 16
"""A beginning is known in whole blocks of so many tokens, as vLLM's own cache on a GPU knows it."""


MOST_BLOCKS = 1_000_000
"""Some 100 MB. Servers forget sooner."""


class Prefixes:
    """Remembers who was given what, block by block: a block is known by its tokens and all before it. What is
    more than `most` blocks is forgotten, all at once."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._holders: dict[int, int] = {}

    def given(self, holder: int, ids: TokenIds) -> None:
        """The server `holder` has computed all of `ids`."""
        if len(self._holders) >= self._most:
            self._holders.clear()
        for block in _blocks(ids):
            self._holders[block] = holder

    def holder(self, ids: TokenIds) -> int | None:
        """Who computed the longest known beginning of `ids` last; None where nobody did."""
        found = None
        for block in _blocks(ids):
            if (holder := self._holders.get(block)) is None:
                break
            found = holder
        return found

    def forget(self, holder: int) -> None:
        """That server's cache is gone."""
        self._holders = {block: other for block, other in self._holders.items() if other != holder}


def _blocks(ids: TokenIds) -> Iterator[int]:
    before = 0
    data = ids.tobytes()
    size = BLOCK_TOKENS * ids.itemsize
    for end in range(size, len(data) + 1, size):
        before = hash((before, data[end - size : end]))
        yield before
