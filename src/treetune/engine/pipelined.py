"""A wrapper that samples side requests together with those of a call of `generate` that is going on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from typing_extensions import override

from treetune.engine.base import Completion, Engine, EngineWrapper, Later, OnResult, Request

Requests = list[Request | Later]


class Call(NamedTuple):
    """The times at which a call's own requests and all requests had been answered, in seconds since the
    engine was made, and the seconds in which side requests were there beside own ones."""

    own_end: float
    end: float
    overlap: float


@dataclass(eq=False)
class _Lane:
    """Requests that are numbered among themselves, and the callback of their answers."""

    on_result: OnResult | None
    results: list[list[Completion]] = field(default_factory=list)


class PipelinedEngine(EngineWrapper):
    """An engine with a second entrance, `also`, for side requests that follow from an answer while others are
    sampled.

    A call of `generate` returns the answers to its own requests, when the side requests are answered as well.
    `calls` has the times of each call. Everything else goes straight through.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.calls: list[Call] = []
        self._made = time.perf_counter()
        self._side: list[tuple[Sequence[Request | Later], _Lane]] = []
        self._first_side: float | None = None

    def also(self, requests: Sequence[Request | Later], on_result: OnResult) -> None:
        """Has these sampled too, numbered from 0 on. May be called while `generate` runs, by its `on_result`
        or a `Later` of that."""
        self._side.append((requests, _Lane(on_result)))

    @override
    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        own = _Lane(on_result)
        origins: list[tuple[_Lane, int] | None] = []  # of each request that the engine below has
        own_end = self.now()
        self._first_side = None

        def numbered(requests: Sequence[Request | Later], lane: _Lane) -> Requests:
            renumbered: Requests = []
            for request in requests:
                if isinstance(request, Later):
                    renumbered.append(Later(request.ready, partial(ready, request, lane)))
                else:
                    origins.append((lane, len(lane.results)))
                    lane.results.append([])
                    renumbered.append(request)
            return renumbered

        def with_side_requests(requests: Requests) -> Requests:
            while self._side:
                waiting, self._side = self._side, []
                for more, lane in waiting:
                    requests += numbered(more, lane)
                self._first_side = self._first_side or self.now()
            return requests

        def ready(later: Later, lane: _Lane) -> Requests:
            return with_side_requests(numbered(later.requests(), lane))

        def answered(index: int, completions: list[Completion]) -> Requests:
            nonlocal own_end
            origin = origins[index]
            assert origin is not None, "every request is reported once"
            origins[index] = None
            lane, number = origin
            if lane is own:
                own_end = self.now()
                lane.results[number] = completions
            more = lane.on_result(number, completions) if lane.on_result is not None else None
            return with_side_requests(numbered(more or (), lane))

        self.engine.generate(numbered(requests, own), answered)
        overlap = 0.0 if self._first_side is None else max(0.0, own_end - self._first_side)
        self.calls.append(Call(own_end, self.now(), overlap))
        return own.results

    def now(self) -> float:
        """Returns the seconds since this was made."""
        return time.perf_counter() - self._made
