"""Requests on the side: sampled together with those of a call of `generate` that is going on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from treetune.inference.base import Completion, Engine, EngineWrapper, Later, OnResult, Request

Asked = list[Request | Later]


class Call(NamedTuple):
    """When a call's own requests had all been answered, when everything had, and for how many seconds
    requests on the side were there beside own ones. In seconds since the engine was made."""

    own_end: float
    end: float
    overlap: float


@dataclass(eq=False)
class _Lane:
    """Requests that are numbered among themselves, and who is told of their answers."""

    on_result: OnResult | None
    results: list[list[Completion]] = field(default_factory=list)


class PipelinedEngine(EngineWrapper):
    """An engine with a second entrance, `also`, for whoever learns of an answer while others are sampled.

    A call of `generate` gives what its caller asked for, as ever, and comes back when what was asked for on
    the side is answered as well. `calls` says how long which took. Everything else goes straight through.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.calls: list[Call] = []
        self._made = time.perf_counter()
        self._further: list[tuple[Sequence[Request | Later], _Lane]] = []
        self._first_aside: float | None = None

    def also(self, requests: Sequence[Request | Later], on_result: OnResult) -> None:
        """Has these sampled too, numbered from 0 on. To be called while `generate` runs, by its `on_result`
        or what that called `Later`."""
        self._further.append((requests, _Lane(on_result)))

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        own = _Lane(on_result)
        places: list[tuple[_Lane, int] | None] = []  # of each request that the engine below has
        own_end = self.now()
        self._first_aside = None

        def numbered(further: Sequence[Request | Later], lane: _Lane) -> Asked:
            asked: Asked = []
            for one in further:
                if isinstance(one, Later):
                    asked.append(Later(one.ready, partial(heard, one, lane)))
                else:
                    places.append((lane, len(lane.results)))
                    lane.results.append([])
                    asked.append(one)
            return asked

        def with_asides(asked: Asked) -> Asked:
            while self._further:
                waiting, self._further = self._further, []
                for further, lane in waiting:
                    asked += numbered(further, lane)
                self._first_aside = self._first_aside or self.now()
            return asked

        def heard(later: Later, lane: _Lane) -> Asked:
            return with_asides(numbered(later.requests(), lane))

        def answered(index: int, completions: list[Completion]) -> Asked:
            nonlocal own_end
            place = places[index]
            assert place is not None, "every request is reported once"
            places[index] = None
            lane, number = place
            if lane is own:
                own_end = self.now()
                lane.results[number] = completions
            further = lane.on_result(number, completions) if lane.on_result is not None else None
            return with_asides(numbered(further or (), lane))

        self.engine.generate(numbered(requests, own), answered)
        overlap = 0.0 if self._first_aside is None else max(0.0, own_end - self._first_aside)
        self.calls.append(Call(own_end, self.now(), overlap))
        return own.results

    def now(self) -> float:
        """Seconds since this was made."""
        return time.perf_counter() - self._made
