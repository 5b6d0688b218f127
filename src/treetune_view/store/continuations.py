"""The continuations that a state of an answer was valued by, found again in the iteration's journals.

A journal knows a finished request by a hash of it. What credit asked for follows from the configuration, the
seed and the state's tokens, so that the same request gives the same hash.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune_view.store.catalogue import Run
from treetune_view.store.whole_answers import Answer

if TYPE_CHECKING:
    from treetune.inference.base import Completion, Request


def continuations_of(run: Run, config: Mapping[str, Any], answer: Answer, start: int) -> list[Completion]:
    """Those of the answer's first `start` tokens. Raises ValueError with the reason where there are none."""
    from treetune.inference.journal import request_key

    request = _request(config, answer, start)
    assert answer.trajectory is not None
    versions = [one.policy_version for one in answer.trajectory.segments if one.policy_version is not None]
    version = versions[0] if versions else answer.source.number - 1
    # Runs of earlier versions asked for log-probs that nobody read.
    keys = [request_key(one, version) for one in (request, replace(request, reads_logprobs=True))]
    folder = run.path / "iterations" / f"{answer.source.number - 1:04d}" / "journal"
    journals = [path for path in sorted(folder.glob("*.jsonl")) if run.follows(folder) and run.follows(path)]
    if not journals:
        raise ValueError("the journals of this iteration are gone: they hold what was sampled")
    for path in journals:
        for key in keys:
            found = _line_of(path, key)
            if found is not None:
                return found
    raise ValueError(
        "no continuations of just this state are in the iteration's journals: it may be valued by other"
        " answers, by a critic, or with a budget or stop strings of its own"
    )


def _request(config: Mapping[str, Any], answer: Answer, start: int) -> Request:
    """What credit asked for first."""
    from treetune.config.build import build
    from treetune.config.errors import ConfigError
    from treetune.rollouts.base import Credit, Rollout
    from treetune.rollouts.context import AnswerSettings
    from treetune.rollouts.monte_carlo import MonteCarlo
    from treetune.rollouts.single_turn import SingleTurn
    from treetune.rollouts.states import continuations_asked_for
    from treetune.rollouts.values import Beginning

    try:  # with a key of their own, so that nothing of a user's package is imported
        credit = build(Credit, config.get("credit"), key=("credit",))
        rollout = build(Rollout, config.get("rollout"), key=("rollout",))
    except ConfigError as error:
        raise ValueError(f"the configuration's parts are not known here ({error})") from error
    if answer.trajectory is None or not isinstance(credit, MonteCarlo) or not isinstance(rollout, SingleTurn):
        raise ValueError(
            "only values of the credit 'monte_carlo' on answers of 'single_turn' have continuations that can"
            " be found again"
        )
    one = answer.trajectory
    beginning = Beginning.of(one.problem, one.prompt_ids, one.segments, start)
    own = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(credit, name)) is not None
    }
    sampling = replace(rollout.sampling, **own)
    return continuations_asked_for(
        AnswerSettings(int(config["context_length"])),
        int(config.get("seed", 0)),
        answer.source.number - 1,
        beginning,
        sampling,
        "value",
        turn=0,
        count=credit.samples,
    )


def _line_of(path: Path, key: str) -> list[Completion] | None:
    from treetune.inference.journal import completions_of_row
    from treetune.store.journal import row_of

    if not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for line in _lines_with(data, f'"{key}"'.encode()):
            row = json.loads(row_of(line))
            if row[0] == key:
                return completions_of_row(row)
    return None


def _lines_with(data: mmap.mmap, wanted: bytes) -> Iterator[bytes]:
    at = data.find(wanted)
    while at >= 0:
        begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        if end < 0:
            return  # it is being written
        yield data[begin : end + 1]
        at = data.find(wanted, end)


def alike(completions: Sequence[Completion]) -> list[tuple[Completion, int]]:
    """Each distinct one, with how often it was sampled, the most frequent first."""
    counts: dict[bytes, tuple[Completion, int]] = {}
    for one in completions:
        key = one.token_ids.tobytes()
        counts[key] = one, counts.get(key, (one, 0))[1] + 1
    return sorted(counts.values(), key=lambda pair: -pair[1])
