"""The journal of an engine: answers in it are not sampled again.

Promises that these tests hold:

* A second run returns the same answers and samples only what the journal lacks, also after a failure.
* The key of a request has everything that changes its answer, and stays the same between versions.
* Token ids and log-probs come back in the precision that they had; damaged rows are sampled again.
* Requests that follow from answers are numbered alike, whether sampled or read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_engine import FakeEngine
from treetune.engine.journal import JournaledEngine, completions_of_row, journal_row, request_key
from treetune.engine.requests import CONTINUATION_PRIORITY, Completion, Deferred, Request, SamplingParams
from treetune.exceptions import EngineError
from treetune.store.journal import Journal
from treetune.vocabulary import FinishReason

EOS = 3


def engine(**settings: object) -> FakeEngine:
    return FakeEngine(lambda ids, version: (0.3, 0.3, 0.3, 0.1), EOS, **settings)  # type: ignore[arg-type]


def requests(count: int, first: int = 0) -> list[Request]:
    return [Request((0, 1), 10 * i, 2, SamplingParams(6)) for i in range(first, first + count)]


def ids_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [tuple(completion.token_ids) for completion in completions]


def test_a_second_run_samples_nothing_and_returns_the_same(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "rollout.jsonl"
    first = JournaledEngine(engine(), path).generate(requests(8))
    again = engine()
    reported: dict[int, list[Completion]] = {}
    assert JournaledEngine(again, path).generate(requests(8), lambda i, c: reported.update({i: c})) == first
    assert again.asked == []
    assert [reported[i] for i in range(8)] == first


def test_after_a_failure_only_what_is_missing_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    backwards = {"order": lambda count: range(count - 1, -1, -1)}
    with pytest.raises(EngineError):
        JournaledEngine(engine(fail_after=5, **backwards), path).generate(requests(8))
    inner = engine()
    assert JournaledEngine(inner, path).generate(requests(8)) == engine().generate(requests(8))
    assert inner.asked == requests(3)


def test_equal_requests_are_sampled_once_and_reported_each(tmp_path: Path) -> None:
    inner = engine()
    reported: list[int] = []
    twice = requests(2) + requests(2)
    results = JournaledEngine(inner, tmp_path / "j").generate(twice, lambda i, c: reported.append(i))
    assert results[:2] == results[2:]
    assert sorted(reported) == [0, 1, 2, 3]
    assert inner.asked == requests(2)


def test_a_task_samples_itself_what_a_cancelled_task_has_asked_for(tmp_path: Path) -> None:
    """Two tasks make the same request. The one that has asked the engine is cancelled, or the one that waits
    for it; the other one has its answer all the same."""
    (request,) = requests(1)
    for cancelled in (0, 1):
        inner = engine()
        journaled = JournaledEngine(inner, tmp_path / f"journal {cancelled}")

        async def cancel_one(journaled: JournaledEngine, cancelled: int) -> list[Completion]:
            tasks = [asyncio.ensure_future(journaled.sample(request)) for _ in range(2)]
            await asyncio.sleep(0)  # until both have asked
            tasks[cancelled].cancel()
            return await tasks[1 - cancelled]

        assert journaled.run(cancel_one(journaled, cancelled)) == engine().generate([request])[0]


def test_a_request_for_fewer_samples_gets_the_first_of_those_in_the_journal(tmp_path: Path) -> None:
    more = [replace(few, n=5) for few in requests(3)]
    for path in (tmp_path / "new", tmp_path / "again"):
        inner = engine()
        journaled = JournaledEngine(inner, path)
        whole = journaled.generate(more)
        assert journaled.generate(requests(4)) == engine().generate(requests(4))
        assert inner.asked == [*more, *requests(1, first=3)]
        assert [few[:2] for few in whole] == engine().generate(requests(3))


def test_another_policy_version_samples_anew(tmp_path: Path) -> None:
    path = tmp_path / "j"
    JournaledEngine(engine(), path).generate(requests(2))
    later = engine()
    later.load(tmp_path, 1)
    JournaledEngine(later, path).generate(requests(2))
    assert later.asked == requests(2)


def test_requests_whose_answers_may_differ_have_different_keys() -> None:
    base = Request((1, 2), 3, 4, SamplingParams(5))
    others = [
        Request((1, 3), 3, 4, SamplingParams(5)),
        Request((1, 2), 4, 4, SamplingParams(5)),
        Request((1, 2), 3, 5, SamplingParams(5)),
        Request((1, 2), 3, 4, SamplingParams(6)),
        Request((1, 2), 3, 4, SamplingParams(5, temperature=0.9)),
        Request((1, 2), 3, 4, SamplingParams(5, top_p=0.9)),
        Request((1, 2), 3, 4, SamplingParams(5, top_k=2)),
        Request((1, 2), 3, 4, SamplingParams(5, stop=("#",))),
    ]
    keys = [request_key(request, version=0) for request in [base, *others]]
    keys.append(request_key(base, version=1))
    assert len(set(keys)) == len(keys)


def test_the_observer_gets_the_samples_of_every_request_also_of_those_in_the_journal(tmp_path: Path) -> None:
    first, second, third, fourth = requests(4)
    done: Future[None] = Future()
    done.set_result(None)
    following = {0: [Deferred(done, lambda: [third])], 1: [fourth]}
    observed: list[tuple[int, list[tuple[int, ...]]]] = []

    def observe(request: Request, completions: Sequence[Completion]) -> None:
        observed.append((request.seed, ids_of(completions)))

    for _ in range(2):  # the second time, all answers come from the journal
        journaled = JournaledEngine(engine(), tmp_path / "journal.jsonl", observe=observe)
        journaled.generate([first, second], lambda index, completions: following.get(index, []))
    plain = engine().generate([first, second, third, fourth])
    ids_by_seed = {10 * i: ids_of(completions) for i, completions in enumerate(plain)}
    assert sorted(seed for seed, _ in observed) == [0, 0, 10, 10, 20, 20, 30, 30]
    assert all(ids_by_seed[seed] == ids for seed, ids in observed)


def test_a_request_has_the_same_key_as_in_earlier_journals() -> None:
    request = Request((5, 6, 7), 11, 2, SamplingParams(16, 0.7, 0.9, 5, ("\n",), (3,)))
    assert request_key(request, 4) == "b57e74853d2860e20f74a6c02282ac6d"
    unread = replace(request, reads_logprobs=False)
    assert request_key(unread, 4) == "a1d7523f5b1e089f7d5c2c457695a951"
    assert request_key(request, 4, n=1) == request_key(replace(request, n=1), 4)


def completion(tokens: list[tuple[int, float]], reason: FinishReason, version: int) -> Completion:
    return Completion([i for i, _ in tokens], [logprob for _, logprob in tokens], reason, version)  # type: ignore[arg-type]


single = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)
double = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
completions = st.lists(
    st.builds(
        completion,
        st.lists(st.tuples(st.integers(0, 1 << 17), single), max_size=4)
        | st.lists(st.tuples(st.integers(0, 1 << 17), double), max_size=4),
        st.sampled_from(["stop", "length"]),
        st.integers(0, 1000),
    ),
    max_size=3,
)


def test_a_journal_with_numbers_in_text_is_read() -> None:
    answer = Completion([5, 3], [-0.25, -1e-3], "stop", 2, 0.5)  # type: ignore[arg-type]
    assert completions_of_row(["old", [[[5, 3], [-0.25, -0.001], "stop", 2, 0.5]]]) == [answer]


@given(completions)
def test_numbers_come_back_in_the_precision_that_they_had(written: list[Completion]) -> None:
    read = completions_of_row(json.loads(json.dumps(journal_row("key", written))))
    assert read == written
    assert [c.logprobs.tobytes() for c in read] == [c.logprobs.tobytes() for c in written]
    assert [c.logprobs.dtype for c in read] == [c.logprobs.dtype for c in written]


def test_a_row_that_holds_no_samples_is_sampled_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    without_samples, not_a_list = requests(2)
    with Journal(path) as journal:
        journal.add([request_key(not_a_list, 0), 7], [request_key(without_samples, 0), "no list"])
    inner = engine()
    assert JournaledEngine(inner, path).generate([without_samples, not_a_list]) == engine().generate(
        [without_samples, not_a_list]
    )
    assert inner.asked == [without_samples, not_a_list]


def test_the_warning_of_a_damaged_row_names_the_journal_that_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    continuations = tmp_path / "credit.jsonl"
    continuation = replace(requests(1)[0], priority=CONTINUATION_PRIORITY)
    with Journal(continuations) as journal:
        journal.add([request_key(continuation, 0), 7])
    JournaledEngine(engine(), tmp_path / "rollout.jsonl", continuations=continuations).generate(
        [continuation]
    )
    assert str(continuations) in caplog.text
    assert "rollout.jsonl" not in caplog.text


def test_requests_that_follow_from_answers_are_numbered_alike_whether_sampled_or_read(
    tmp_path: Path,
) -> None:
    def sample_tree(
        engine: JournaledEngine, depth: int = 2
    ) -> tuple[list[list[Completion]], dict[tuple[int, ...], int]]:
        """Samples two requests, two that follow from each of them, and two that follow from each of those."""
        path_and_level = [((i,), 0) for i in range(2)]
        first_token_by_path: dict[tuple[int, ...], int] = {}

        def on_result(index: int, completions: list[Completion]) -> list[Request]:
            path, level = path_and_level[index]
            first_token_by_path[path] = int(completions[0].token_ids[0])
            following = [((*path, i), level + 1) for i in range(2)] if level < depth else []
            path_and_level.extend(following)
            return [request(path) for path, _ in following]

        def request(path: tuple[int, ...]) -> Request:
            return Request((0, *path), sum(path), 1, SamplingParams(6))

        results = engine.generate([request((i,)) for i in range(2)], on_result)
        assert len(results) == len(path_and_level) == len(first_token_by_path) == 14
        numbers_by_path = {path: number for number, (path, _) in enumerate(path_and_level)}
        results_by_path = [results[numbers_by_path[path]] for path in sorted(numbers_by_path)]
        return results_by_path, first_token_by_path

    path = tmp_path / "journal.jsonl"
    undisturbed = sample_tree(JournaledEngine(engine(), tmp_path / "other.jsonl"))
    failing = engine(fail_after=9)
    with pytest.raises(EngineError):
        sample_tree(JournaledEngine(failing, path))
    again = engine()
    assert sample_tree(JournaledEngine(again, path)) == undisturbed
    assert len(again.asked) == 14 - 9, "what was answered is not sampled again"
    untouched = engine()
    assert sample_tree(JournaledEngine(untouched, path)) == undisturbed
    assert not untouched.asked
