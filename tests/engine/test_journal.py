"""Answers that were written down are not sampled again, whatever happened to the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_engine import FakeEngine
from treetune.engine.journal import JournaledEngine, completions_of_row, journal_row, request_key
from treetune.engine.requests import Completion, Later, Request, SamplingParams
from treetune.exceptions import EngineError
from treetune.store.journal import Journal
from treetune.vocabulary import FinishReason

EOS = 3


def engine(**settings: object) -> FakeEngine:
    return FakeEngine(lambda ids, version: (0.3, 0.3, 0.3, 0.1), EOS, **settings)  # type: ignore[arg-type]


def requests(count: int, first: int = 0) -> list[Request]:
    return [Request((0, 1), 10 * i, 2, SamplingParams(6)) for i in range(first, first + count)]


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
    rest = engine()
    assert JournaledEngine(rest, path).generate(requests(8)) == engine().generate(requests(8))
    assert rest.asked == requests(3)


def test_equal_requests_are_sampled_once_and_reported_each(tmp_path: Path) -> None:
    inner = engine()
    reported: list[int] = []
    twice = requests(2) + requests(2)
    results = JournaledEngine(inner, tmp_path / "j").generate(twice, lambda i, c: reported.append(i))
    assert results[:2] == results[2:]
    assert sorted(reported) == [0, 1, 2, 3]
    assert inner.asked == requests(2)


def test_who_asks_for_fewer_samples_of_the_same_is_given_the_first_of_them(tmp_path: Path) -> None:
    more = [replace(one, n=5) for one in requests(3)]
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


def test_whatever_makes_an_answer_differ_makes_the_key_differ() -> None:
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
    keys = [request_key(r, 0) for r in [base, *others]] + [request_key(base, 1)]
    assert len(set(keys)) == len(keys)


def test_somebody_observes_of_every_request_also_of_those_that_were_written_down(tmp_path: Path) -> None:
    first, second, third, fourth = requests(4)
    done: Future[None] = Future()
    done.set_result(None)
    following = {0: [Later(done, lambda: [third])], 1: [fourth]}
    told: list[tuple[int, list[tuple[int, ...]]]] = []

    def observe(request: Request, completions: Sequence[Completion]) -> None:
        told.append((request.seed, [tuple(one.token_ids) for one in completions]))

    for _ in range(2):  # the second time, all are written down
        journaled = JournaledEngine(engine(), tmp_path / "journal.jsonl", observe=observe)
        journaled.generate([first, second], lambda index, completions: following.get(index, []))
    plain = engine().generate([first, second, third, fourth])
    answers = {10 * i: [tuple(one.token_ids) for one in completions] for i, completions in enumerate(plain)}
    assert sorted(seed for seed, _ in told) == [0, 0, 10, 10, 20, 20, 30, 30]
    assert all(answers[seed] == completions for seed, completions in told)


def test_a_request_has_the_key_that_earlier_journals_know_it_by() -> None:
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


def test_a_journal_from_before_numbers_were_written_as_bytes_is_read() -> None:
    answer = Completion([5, 3], [-0.25, -1e-3], "stop", 2, 0.5)  # type: ignore[arg-type]
    assert completions_of_row(["old", [[[5, 3], [-0.25, -0.001], "stop", 2, 0.5]]]) == [answer]


@given(completions)
def test_numbers_come_back_in_the_width_that_they_had(written: list[Completion]) -> None:
    read = completions_of_row(json.loads(json.dumps(journal_row("key", written))))
    assert read == written
    assert [c.logprobs.tobytes() for c in read] == [c.logprobs.tobytes() for c in written]
    assert [c.logprobs.dtype for c in read] == [c.logprobs.dtype for c in written]


def test_a_row_that_holds_no_samples_is_sampled_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    known, bad = requests(2)
    with Journal(path) as journal:
        journal.add([request_key(bad, 0), 7], [request_key(known, 0), "no list"])
    inner = engine()
    assert JournaledEngine(inner, path).generate([known, bad]) == engine().generate([known, bad])
    assert inner.asked == [known, bad]


def test_what_follows_from_answers_is_kept_and_numbered_alike_whether_sampled_or_found(
    tmp_path: Path,
) -> None:
    def grown(
        engine: JournaledEngine, depth: int = 2
    ) -> tuple[list[list[Completion]], dict[tuple[int, ...], int]]:
        """Two requests, from each of which two follow, from each of which two follow."""
        owners = [((i,), 0) for i in range(2)]
        seen: dict[tuple[int, ...], int] = {}

        def on_result(index: int, completions: list[Completion]) -> list[Request]:
            path, level = owners[index]
            seen[path] = int(completions[0].token_ids[0])
            following = [((*path, i), level + 1) for i in range(2)] if level < depth else []
            owners.extend(following)
            return [request(path) for path, _ in following]

        def request(path: tuple[int, ...]) -> Request:
            return Request((0, *path), sum(path), 1, SamplingParams(6))

        results = engine.generate([request((i,)) for i in range(2)], on_result)
        assert len(results) == len(owners) == len(seen) == 14
        return [results[place] for _, place in sorted((path, i) for i, (path, _) in enumerate(owners))], seen

    path = tmp_path / "journal.jsonl"
    undisturbed = grown(JournaledEngine(engine(), tmp_path / "other.jsonl"))
    failing = engine(fail_after=9)
    with pytest.raises(EngineError):
        grown(JournaledEngine(failing, path))
    again = engine()
    assert grown(JournaledEngine(again, path)) == undisturbed
    assert len(again.asked) == 14 - 9, "what was answered is not sampled again"
    untouched = engine()
    assert grown(JournaledEngine(untouched, path)) == undisturbed
    assert not untouched.asked
