"""The continuations that a state of an answer was valued by, as a part of the answer's page, or a page of its
own.

They are found again in the iteration's journals. A journal knows a finished request by a hash of it. What
credit asked for follows from the configuration, the seed and the state's tokens, so that the same request
gives the same hash.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from treetune_view.page import Page, View
from treetune_view.pages.answer import shortened
from treetune_view.store import Run
from treetune_view.store.answers import Answer
from treetune_view.store.tokens import texts_of

if TYPE_CHECKING:
    from treetune.inference.base import Completion, Request

LONGEST = 3000
"""Characters of one that are shown."""


def show(view: View) -> Response:
    """`?run=`, `?source=`, `?answer=`, `?start=` (tokens of the answer that the state has)."""
    answer = view.store.answers(view.run).answer(view.text("source"), view.text("answer"))
    config = view.store.experiment(view.run).config
    start, problem, completions = view.integer("start", 0), "", list[Any]()
    try:
        completions = continuations_of(view.run, config, answer, start)
    except ValueError as error:
        problem = str(error)
    counts: dict[bytes, tuple[Completion, int]] = {}
    for one in completions:
        key = one.token_ids.tobytes()
        counts[key] = one, counts.get(key, (one, 0))[1] + 1
    distinct = []
    for one, times in sorted(counts.values(), key=lambda pair: -pair[1]):
        texts = texts_of(view.run.path, one.token_ids)
        text = "".join(texts) if texts is not None else " ".join(map(str, one.token_ids.tolist()))
        distinct.append(
            {
                "text": shortened(text, LONGEST),
                "times": times,
                "tokens": len(one.token_ids),
                "logprob": None if one.logprobs is None else float(one.logprobs.sum()),
                "unfinished": one.finish_reason == "length",
            }
        )
    return view.render(
        "continuations.html",
        answer=answer,
        start=start,
        problem=problem,
        distinct=distinct,
        count=len(completions),
    )


def continuations_of(run: Run, config: Mapping[str, Any], answer: Answer, start: int) -> list[Completion]:
    """Returns the continuations of the answer's first `start` tokens. Raises ValueError with the reason where
    there are none."""
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
            completions = _completions_of(path, key)
            if completions is not None:
                return completions
    raise ValueError(
        "no continuations of just this state are in the iteration's journals: it may be valued by other"
        " answers, by a critic, or with a budget or stop strings of its own"
    )


def _request(config: Mapping[str, Any], answer: Answer, start: int) -> Request:
    """Returns the first request of the run's credit."""
    from treetune.config.build import build
    from treetune.config.errors import ConfigError
    from treetune.rollouts.base import Credit, Rollout
    from treetune.rollouts.context import AnswerSettings
    from treetune.rollouts.monte_carlo import MonteCarlo
    from treetune.rollouts.single_turn import SingleTurn
    from treetune.rollouts.states import continuation_request
    from treetune.rollouts.values import AnswerPrefix

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
    beginning = AnswerPrefix.of(one.problem, one.prompt_ids, one.segments, start)
    own = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(credit, name)) is not None
    }
    sampling = replace(rollout.sampling, **own)
    return continuation_request(
        AnswerSettings(int(config["context_length"])),
        int(config.get("seed", 0)),
        answer.source.number - 1,
        beginning,
        sampling,
        "value",
        turn=0,
        count=credit.samples,
    )


def _completions_of(path: Path, key: str) -> list[Completion] | None:
    """Reads the line of a journal with this key."""
    from treetune.inference.journal import completions_of_row
    from treetune.store.journal import row_of

    if not path.stat().st_size:
        return None
    quoted = f'"{key}"'.encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(quoted)
        while at >= 0:
            begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
            if end < 0:
                return None  # it is being written
            row = json.loads(row_of(data[begin : end + 1]))
            if row[0] == key:
                return completions_of_row(row)
            at = data.find(quoted, end)
    return None


PAGES = (Page("/continuations", "Continuations", show),)
