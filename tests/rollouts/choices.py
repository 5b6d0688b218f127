"""All that could be drawn, for exact expectations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Choices:
    """Goes through everything that could be drawn, one way after the other, with its probability."""

    def __init__(self) -> None:
        self._way: list[tuple[int, int]] = []

    def draw(self, probabilities: Sequence[float]) -> int:
        if self._drawn == len(self._way):
            self._way.append((0, len(probabilities)))
        choice, _ = self._way[self._drawn]
        self._drawn += 1
        self.probability *= probabilities[choice]
        return choice

    def ways(self) -> Iterator[None]:
        while True:
            self._drawn, self.probability = 0, 1.0
            yield
            assert self._drawn == len(self._way), "the same draws lead to the same questions"
            while self._way and self._way[-1][0] == self._way[-1][1] - 1:
                self._way.pop()
            if not self._way:
                return
            choice, of = self._way.pop()
            self._way.append((choice + 1, of))
