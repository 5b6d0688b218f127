"""Answers as their files have them: whole texts of many, and all that is stored of one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.runtime.directory import verify_answers
from treetune_view.store.batches import Batches, Layout
from treetune_view.store.index import Indexed
from treetune_view.store.sources import Source

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.rollouts.storage import TokenSignals
    from treetune.vocabulary import Episode, Trajectory


@dataclass(frozen=True)
class Answer:
    """One answer, whole: `row` of the index; the trajectory and its episodes where these are stored, and of
    each episode what the trainer said of its tokens, where that is; of an evaluation `line`, what the file
    says of it."""

    row: Mapping[str, Any]
    source: Source
    trajectory: Trajectory | None = None
    episodes: Sequence[Episode] = ()
    line: Mapping[str, Any] = field(default_factory=dict)
    signals: Sequence[TokenSignals] = ()


def texts_at(places: Sequence[tuple[str, int]], by_source: Mapping[str, Indexed]) -> list[str]:
    """The whole texts of answers, by source and place."""
    wanted: dict[tuple[str, int], list[int]] = {}
    texts = [""] * len(places)
    for i, (name, place) in enumerate(places):
        one = by_source[name]
        layout = one.about.answers or one.about.episodes if one.about else None
        wanted.setdefault((name, layout.batch_of(place) if layout else -1), []).append(i)

    def read(key: tuple[str, int], own: list[int]) -> None:
        name, number = key
        one = by_source[name]
        if number < 0:
            for i in own:
                texts[i] = _line(one.source.path, places[i][1]).get("text") or ""
            return
        assert one.about is not None
        layout = one.about.answers or one.about.episodes
        assert layout is not None
        column = Batches(one.source.path, layout).read(number, ["text"])["text"]
        for i in own:
            texts[i] = column[places[i][1] - layout.rows[number]].as_py() or ""

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(read, *item) for item in wanted.items()]:
            done.result()
    return texts


def answer_at(one: Indexed, row: Mapping[str, Any]) -> Answer:
    """The answer of a row of the index of `one`. Raises ValueError where its file is another by now."""
    assert one.about is not None
    if one.source.kind == "evaluation":
        return Answer(row, one.source, line=_line(one.source.path, row["place"]))
    trajectory, episodes, signals = None, list[Any](), list[Any]()
    if one.about.answers is not None:
        from treetune.rollouts.rows import trajectories_of

        [trajectory] = trajectories_of(_one_row(one.source.path, one.about.answers, row["place"]))
        if trajectory.id != row["answer"]:
            raise ValueError(f"{one.source.path} was written anew just now: ask again")
    if one.about.episodes is not None and one.source.episodes is not None:
        from treetune.rollouts.rows import episodes_of

        first = row["place"] if one.about.answers is None else row.get("episode_place")
        last = first if one.about.answers is None else row.get("episode_last")
        for place in range(first, last + 1) if first is not None and last is not None else ():
            [episode] = episodes_of(_one_row(one.source.episodes, one.about.episodes, place))
            if episode.trajectory == row["answer"]:
                episodes.append(episode)
                signals += _signals_at(one, place)
    return Answer(row, one.source, trajectory, episodes, signals=signals)


def _signals_at(one: Indexed, place: int) -> list[TokenSignals]:
    """Those of an episode, where its source has any."""
    from treetune.rollouts.storage import signals_of

    if one.about is None or one.about.signals is None or one.source.signals is None:
        return []
    return list(signals_of(_one_row(one.source.signals, one.about.signals, place)))


def _one_row(path: Path, layout: Layout, place: int) -> pa.RecordBatch:
    """A batch of the one row, in buffers of its own: whoever reads columns may ignore a slice."""
    number = layout.batch_of(place)
    return Batches(path, layout).read(number).take([place - layout.rows[number]])


def _line(path: Path, place: int) -> dict[str, Any]:
    verify_answers(path)
    with path.open("rb") as file:
        file.seek(place)
        return json.loads(file.readline())
