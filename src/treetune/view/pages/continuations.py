"""Shows the continuations that estimate a state's value, on the answer's page or a separate page.

Continuations are read from the iteration's journals, which store each finished request under a hash of the
request. The request that credit made follows from the configuration, the seed and the state's tokens. This
module builds the same request again to find its hash.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from treetune.view.page import Page, PageRequest
from treetune.view.pages.answer import shorten_text
from treetune.view.store import Run
from treetune.view.store.answers import StoredAnswer
from treetune.view.store.tokens import texts_of

if TYPE_CHECKING:
    from treetune.engine.requests import Completion, SamplingParams
    from treetune.vocabulary import Problem

MOST_CHARACTERS_OF_CONTINUATION = 3000
"""The most characters of a continuation that are shown."""
KEY_PREFIX_BYTES = 100
"""The number of bytes at the beginning of a journal's line within which its key is."""


def show(view: PageRequest) -> Response:
    """Shows the continuations of a state of an answer.

    The address has `?run=`, `?source=`, `?answer=` and `?start=` (the number of the answer's tokens that are
    before the state).
    """
    answer = view.store.answers(view.run).answer(view.text("source"), view.text("answer"))
    config = view.store.experiment(view.run).config
    start, problem, completions = view.integer("start", 0), "", list[Any]()
    earned = answer.episode.continuations.get(start, ()) if answer.episode is not None else ()
    try:
        completions = continuations_of(view.run, config, answer, start)
    except ValueError as error:
        problem = str(error)
    # Equal continuations that earned the same are shown once, with their number.
    counts: Counter[tuple[bytes, float | None]] = Counter()
    examples: dict[tuple[bytes, float | None], Completion] = {}
    # A continuation without a stored reward gets None. Rewards beyond the last continuation are left out.
    for completion, reward in zip_longest(completions, earned[: len(completions)]):
        key = completion.token_ids.tobytes(), reward
        counts[key] += 1
        examples[key] = completion
    distinct_continuations = []
    for key, times in sorted(counts.items(), key=lambda pair: -pair[1]):
        completion = examples[key]
        texts = texts_of(view.run.path, completion.token_ids)
        text = "".join(texts) if texts is not None else " ".join(map(str, completion.token_ids.tolist()))
        distinct_continuations.append(
            {
                "text": shorten_text(text, MOST_CHARACTERS_OF_CONTINUATION),
                "times": times,
                "earned": key[1],
                "tokens": len(completion.token_ids),
                "logprob": None if completion.logprobs is None else float(completion.logprobs.sum()),
                "unfinished": completion.finish_reason == "length",
            }
        )
    return view.render(
        "continuations.html",
        answer=answer,
        start=start,
        problem=problem,
        distinct=distinct_continuations,
        earned=earned,
        count=len(completions),
    )


def continuations_of(
    run: Run, config: Mapping[str, Any], answer: StoredAnswer, start: int
) -> list[Completion]:
    """Returns the continuations of the answer's first `start` tokens.

    Raises ValueError, with the reason, if none can be found.
    """
    from treetune.engine.journal import completions_of_row
    from treetune.store.journal import unseal_line

    keys = [f'"{key}"'.encode() for key in _keys_in_journal(config, answer, start)]
    # `number` counts iterations from 1, and the folders of journals count from 0.
    folder = run.directory.journal_folder(answer.source.number - 1)
    # `may_follow` refuses symbolic links that lead out of the experiment's or the viewer's folders.
    paths = sorted(folder.glob("*.jsonl")) if run.may_follow(folder) else []
    journals = [path for path in paths if run.may_follow(path)]
    if not journals:
        raise ValueError("the journals of this iteration, which have its continuations, were deleted")
    for path in journals:
        with path.open("rb") as file:
            for line in file:
                is_complete = line.endswith(b"\n")  # the last line of a journal may be incomplete
                beginning = line[:KEY_PREFIX_BYTES]  # has the line's key
                if is_complete and any(key in beginning for key in keys):
                    return completions_of_row(json.loads(unseal_line(line)))
    raise ValueError(
        "the iteration's journals have no continuations of this state: its value may come from other answers,"
        " from a critic, or from continuations with another budget or other stop strings"
    )


def _keys_in_journal(config: Mapping[str, Any], answer: StoredAnswer, start: int) -> list[str]:
    """Returns the keys that the credit's request for these continuations may have in a journal. The key of a
    request is its hash.

    Raises ValueError if the configuration doesn't tell what the request was.
    """
    from treetune.config.build import build
    from treetune.credit.base import Credit
    from treetune.credit.library.engines import UNBOUNDED_CONTEXT_LENGTH
    from treetune.credit.literature.token_level import innermost_credit
    from treetune.credit.states.base import AnswerPrefix
    from treetune.credit.states.one_line import continuation_request
    from treetune.credit.vineppo import MonteCarlo
    from treetune.engine.journal import request_key
    from treetune.exceptions import ConfigError
    from treetune.rollouts.base import Rollout
    from treetune.rollouts.context import AnswerSettings
    from treetune.rollouts.single_turn import SingleTurn

    # The whole experiment isn't built, so that users' packages are not imported.
    try:
        # A credit over another one, such as `weighted_by`, only changes advantages. The other one samples.
        credit = innermost_credit(build(Credit, config.get("credit"), key=("credit",)))
        rollout = build(Rollout, config.get("rollout"), key=("rollout",))
    except ConfigError as error:
        raise ValueError(f"the configuration's components can't be built here ({error})") from error
    trajectory = answer.trajectory
    iteration = answer.source.number - 1  # counted from 0, as the credit counts iterations
    if trajectory is None or not isinstance(credit, MonteCarlo) or not isinstance(rollout, SingleTurn):
        raise ValueError(
            "continuations are only available for the credit 'monte_carlo', also within another credit, with"
            " the rollout 'single_turn'"
        )
    # The credit samples continuations like the rollout, except for the parameters that it sets itself.
    settings = {name: getattr(credit, name) for name in ("temperature", "top_p", "top_k")}
    changes = {name: value for name, value in settings.items() if value is not None}
    # It must be the same request as the credit made.
    request = continuation_request(
        AnswerSettings(int(config["context_length"] or UNBOUNDED_CONTEXT_LENGTH)),
        int(config.get("seed", 0)),
        iteration,
        AnswerPrefix.of(trajectory.problem, trajectory.prompt_ids, trajectory.segments, start),
        _adjust_to_task(replace(rollout.sampling, **changes), config, trajectory.problem),
        purpose="value",
        round_number=0,
        count=credit.samples,
    )
    # Runs of earlier versions of treetune also asked for log-probs, so their requests have another hash.
    possible_requests = (request, replace(request, reads_logprobs=True))
    versions = [
        segment.policy_version for segment in trajectory.segments if segment.policy_version is not None
    ]
    version = versions[0] if versions else iteration  # answers of another program's log have none
    return [request_key(possible_request, version) for possible_request in possible_requests]


def _adjust_to_task(sampling: SamplingParams, config: Mapping[str, Any], problem: Problem) -> SamplingParams:
    """Returns the sampling parameters for a problem's answers: a domain of a mixture may have its own stop
    strings and its own limit on tokens."""
    from treetune.config.build import build
    from treetune.exceptions import ConfigError
    from treetune.tasks.base import Task
    from treetune.tasks.mixed import task_of

    try:
        task = build(Task, config.get("task"), key=("task",))
    except ConfigError:
        # A user's own task, whose package isn't imported here, or the log of another program. Most tasks
        # change nothing.
        return sampling
    return task_of(task, problem).adjust_sampling(sampling)


PAGES = (Page("/continuations", "Continuations", show),)
