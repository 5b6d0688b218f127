"""The continuations that a state of an answer was valued by, as a part of the answer's page, or a page of its
own.

They are found again in the iteration's journals. A journal knows a finished request by a hash of it. What
credit asked for follows from the configuration, the seed and the state's tokens, so that the same request
gives the same hash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from treetune.view.page import Page, PageRequest
from treetune.view.pages.answer import shortened
from treetune.view.store import Run
from treetune.view.store.answers import StoredAnswer
from treetune.view.store.tokens import texts_of

if TYPE_CHECKING:
    from treetune.engine.base import Completion

LONGEST = 3000
"""Characters of one that are shown."""
KEY_WITHIN = 100
"""Bytes at the beginning of a journal's line in which its key stands."""


def show(view: PageRequest) -> Response:
    """`?run=`, `?source=`, `?answer=`, `?start=` (tokens of the answer that the state has)."""
    answer = view.store.answers(view.run).answer(view.text("source"), view.text("answer"))
    config = view.store.experiment(view.run).config
    start, problem, completions = view.integer("start", 0), "", list[Any]()
    earned = answer.episode.continuations.get(start, ()) if answer.episode is not None else ()
    try:
        completions = continuations_of(view.run, config, answer, start)
    except ValueError as error:
        problem = str(error)
    counts: dict[tuple[bytes, float | None], tuple[Completion, int]] = {}
    for one, reward in zip_longest(completions, earned[: len(completions)]):
        key = one.token_ids.tobytes(), reward
        counts[key] = one, counts.get(key, (one, 0))[1] + 1
    distinct = []
    for (_, reward), (one, times) in sorted(counts.items(), key=lambda pair: -pair[1][1]):
        texts = texts_of(view.run.path, one.token_ids)
        text = "".join(texts) if texts is not None else " ".join(map(str, one.token_ids.tolist()))
        distinct.append(
            {
                "text": shortened(text, LONGEST),
                "times": times,
                "earned": reward,
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
        earned=earned,
        count=len(completions),
    )


def continuations_of(
    run: Run, config: Mapping[str, Any], answer: StoredAnswer, start: int
) -> list[Completion]:
    """Returns the continuations of the answer's first `start` tokens. Raises ValueError with the reason where
    there are none."""
    from treetune.config.build import build
    from treetune.engine.journal import completions_of_row, request_key
    from treetune.exceptions import ConfigError
    from treetune.rollouts.base import Credit, Rollout
    from treetune.rollouts.context import AnswerSettings
    from treetune.rollouts.monte_carlo import MonteCarlo
    from treetune.rollouts.single_turn import SingleTurn
    from treetune.rollouts.states import continuation_request
    from treetune.rollouts.values import AnswerPrefix
    from treetune.store.journal import row_of

    try:  # with a key of their own, so that nothing of a user's package is imported
        credit = build(Credit, config.get("credit"), key=("credit",))
        rollout = build(Rollout, config.get("rollout"), key=("rollout",))
    except ConfigError as error:
        raise ValueError(f"the configuration's parts are not known here ({error})") from error
    one, iteration = answer.trajectory, answer.source.number - 1
    if one is None or not isinstance(credit, MonteCarlo) or not isinstance(rollout, SingleTurn):
        raise ValueError(
            "only values of the credit 'monte_carlo' on answers of 'single_turn' have continuations that can"
            " be found again"
        )
    own = {name: getattr(credit, name) for name in ("temperature", "top_p", "top_k")}
    request = continuation_request(
        AnswerSettings(int(config["context_length"])),
        int(config.get("seed", 0)),
        iteration,
        AnswerPrefix.of(one.problem, one.prompt_ids, one.segments, start),
        replace(rollout.sampling, **{name: value for name, value in own.items() if value is not None}),
        "value",
        turn=0,
        count=credit.samples,
    )
    versions = [part.policy_version for part in one.segments if part.policy_version is not None]
    # Runs of earlier versions asked for log-probs that nobody read.
    asked = (request, replace(request, reads_logprobs=True))
    keys = [f'"{request_key(each, [*versions, iteration][0])}"'.encode() for each in asked]
    folder = run.path / "iterations" / f"{iteration:04d}" / "journal"
    journals = [path for path in sorted(folder.glob("*.jsonl")) if run.follows(folder) and run.follows(path)]
    if not journals:
        raise ValueError("the journals of this iteration are gone: they hold what was sampled")
    for path in journals:
        with path.open("rb") as file:
            for line in file:
                if any(key in line[:KEY_WITHIN] for key in keys) and line.endswith(b"\n"):
                    return completions_of_row(json.loads(row_of(line)))
    raise ValueError(
        "no continuations of just this state are in the iteration's journals: it may be valued by other"
        " answers, by a critic, or with a budget or stop strings of its own"
    )


PAGES = (Page("/continuations", "Continuations", show),)
