"""What the engine promises when its server does not, on a stand-in for the server."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from treetune.inference.base import (
    ANSWERS,
    CONTINUATIONS,
    Canary,
    Completion,
    EngineError,
    Later,
    Request,
    Tolerance,
)
from treetune.inference.server import OwnServer
from treetune.vocabulary import TokenIds, token_array

from . import stub_server
from .stub_server import CONTEXT
from .stubs import Stub, below, none_alive, request, until


def expected(seed: int, index: int, version: int = 0, max_tokens: int = 5) -> Completion:
    ids, logprobs = stub_server.sample(f"weights {version}", [1, 2, 3], seed + index, max_tokens)
    return Completion(tuple(ids), tuple(logprobs), "length", version)


def test_completions_come_in_the_order_of_requests_and_samples(stub: Stub) -> None:
    engine = stub.start()
    results = engine.generate([request(100 * i, n=3) for i in range(20)])
    assert results == [[expected(100 * i, k) for k in range(3)] for i in range(20)]


def test_every_request_is_reported_once_as_it_comes(stub: Stub) -> None:
    reported: dict[int, list[Completion]] = {}
    results = stub.start().generate([request(i) for i in range(10)], lambda i, c: reported.update({i: c}))
    assert [reported[i] for i in range(10)] == results


def test_more_samples_than_the_server_holds_are_sent_in_parts_with_the_same_seeds(stub: Stub) -> None:
    engine = stub.start(max_num_seqs=4)
    assert engine.generate([request(7, n=10)]) == [[expected(7, k) for k in range(10)]]
    assert sorted((a["seed"], a["n"]) for a in stub.asked()) == [(7, 4), (11, 4), (15, 2)]


def test_answers_are_sent_before_continuations(stub: Stub) -> None:
    engine = stub.start(max_concurrency=1)
    mixed = [replace(request(i), priority=(CONTINUATIONS, ANSWERS)[i % 2]) for i in range(6)]
    assert engine.generate(mixed) == [[expected(i, k) for k in range(2)] for i in range(6)]
    order = [(asked["seed"], asked["priority"]) for asked in stub.asked()]
    assert order == [(1, 0), (3, 0), (5, 0), (0, 1), (2, 1), (4, 1)]


@pytest.mark.parametrize("fault", ["dies-after-two", "forgets-a-logprob"])
def test_unfinished_requests_alone_are_sent_again_after_a_failure(stub: Stub, fault: str) -> None:
    engine = stub.start(max_concurrency=1)
    engine.wait_ready()
    stub.order(fault)
    reported: list[int] = []
    results = engine.generate([request(i) for i in range(6)], lambda i, c: reported.append(i))
    assert results == [[expected(i, k) for k in range(2)] for i in range(6)]
    assert sorted(reported) == list(range(6))
    assert engine.restarts == 1
    assert len(stub.asked()) == 7


def test_what_follows_later_is_waited_for_and_holds_nobody_up(stub: Stub) -> None:
    engine = stub.start()
    slow: list[Future[None]] = [Future() for _ in range(3)]
    asked: list[int] = []

    def on_result(index: int, completions: list[Completion]) -> Sequence[Request | Later]:
        asked.append(index)
        if index < 3:
            return [Later(slow[index], lambda: [request(100 + index)])]
        if index == 7:  # the others are done by then: let the first of the three go on
            slow[2].set_result(None)
        if len(asked) == 9:
            slow[0].set_result(None)
        if len(asked) == 10:
            slow[1].set_exception(RuntimeError("whoever asked looks for himself"))
        return []

    results = engine.generate([request(i) for i in range(8)], on_result)
    assert sorted(asked) == list(range(11))
    seeds = [*range(8), 102, 100, 101]
    assert results == [[expected(seed, k) for k in range(2)] for seed in seeds]


@pytest.mark.parametrize("first", ["request", "later"])
def test_a_server_that_dies_while_something_is_awaited_is_replaced_and_nothing_lost(
    first: str, stub: Stub
) -> None:
    engine = stub.start(max_concurrency=1)
    engine.wait_ready()
    stub.order("dies-after-two")
    ready: Future[None] = Future()
    answered: list[int] = []

    def on_result(index: int, completions: list[Completion]) -> None:
        answered.append(index)
        if len(answered) == 6:
            ready.set_result(None)

    later = Later(ready, lambda: [request(50)])
    requests: list[Request | Later] = [request(i) for i in range(6)]
    results = engine.generate([later, *requests] if first == "later" else [*requests, later], on_result)
    assert results == [[expected(seed, k) for k in range(2)] for seed in [*range(6), 50]]
    assert engine.restarts == 1 and sorted(answered) == list(range(7))


def test_a_server_that_falls_silent_is_replaced_after_the_deadline(stub: Stub) -> None:
    engine = stub.start(request_timeout=1.0)
    engine.wait_ready()
    stub.order("hangs")
    assert engine.generate([request(1)]) == [[expected(1, 0), expected(1, 1)]]
    assert engine.restarts == 1


def test_a_request_that_the_server_refuses_is_an_error_and_no_reason_to_restart(stub: Stub) -> None:
    engine = stub.start()
    engine.wait_ready()
    stub.order("refuses")
    with pytest.raises(EngineError, match="HTTP 400"):
        engine.generate([request(1)])
    assert engine.restarts == 0


def test_restarts_are_bounded_and_the_message_holds_the_log(stub: Stub) -> None:
    engine = stub.start(max_restarts=0)
    engine.wait_ready()
    stub.order("forgets-a-logprob")
    with pytest.raises(EngineError, match=r"max_restarts is 0(.|\n)*server-0\.log"):
        engine.generate([request(1)])


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_sent(stub: Stub) -> None:
    engine = stub.start()
    too_long = request(1, prompt=tuple(range(61)), max_tokens=4)
    with pytest.raises(ValueError, match="request 1: a prompt of 61 tokens and max_tokens = 4 need 65"):
        engine.generate([request(0), too_long])
    assert not (stub.faults / "asked.jsonl").exists()


def test_the_canary_asks_for_what_its_prompts_leave_of_the_context(stub: Stub) -> None:
    engine = stub.start()
    lengths = (3, CONTEXT - 2, CONTEXT - 1, CONTEXT, 5 * CONTEXT)
    canary = replace(stub.canary(1), prompts=[(7,) * length for length in lengths])
    scored = []

    def score(pairs: Sequence[tuple[TokenIds, TokenIds]]) -> list[list[float]]:
        scored.extend((len(prompt), len(ids)) for prompt, ids in pairs)
        return stub.canary(1).score(pairs)

    assert engine.load(stub.weights(1), 1, replace(canary, score=score)).canary_gap == 0.0
    longest = CONTEXT - 1
    assert scored == [(3, 4), (CONTEXT - 2, 2), (longest, 1), (longest, 1), (longest, 1)]


def test_new_weights_are_sampled_from_after_a_load(stub: Stub) -> None:
    engine = stub.start()
    report = engine.load(stub.weights(1), 1, stub.canary(1))
    assert (report.canary_gap, report.restarts, engine.version) == (0.0, 0, 1)
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=1)]]


@pytest.mark.parametrize("fault", ["reload-fails", "reload-lies", "cache-is-held"])
def test_a_failed_sync_replaces_the_server_by_one_with_the_new_weights(stub: Stub, fault: str) -> None:
    engine = stub.start()
    engine.wait_ready()
    stub.order(fault)
    report = engine.load(stub.weights(1), 1, stub.canary(1))
    assert (report.canary_gap, report.restarts) == (0.0, 1)
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=1)]]


def test_old_weights_replace_the_server_though_their_gap_is_tolerated(stub: Stub) -> None:
    engine = stub.start()
    prompts = [token_array((prompt,)) for prompt in range(6)]

    def tolerant(version: int) -> Canary:
        return replace(stub.canary(version), prompts=prompts, tolerance=Tolerance(1e9, 1e9))

    engine.load(stub.weights(1), 1, tolerant(1))
    stub.order("reload-lies")
    report = engine.load(stub.weights(2), 2, tolerant(2))
    assert (report.canary_gap, report.restarts) == (0.0, 1)
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=2)]]


def test_log_probs_that_stay_wrong_end_in_an_error_that_names_the_gap(stub: Stub) -> None:
    engine = stub.start()
    with pytest.raises(EngineError, match="differ from the trainer's by up to"):
        engine.load(stub.weights(1), 1, stub.canary(2))


def test_weights_that_no_server_can_load_are_an_error_and_the_next_ones_are_loaded(stub: Stub) -> None:
    engine = stub.start()
    engine.generate([request(5, n=1)])
    with pytest.raises(EngineError, match="could not be brought into the engine"):
        engine.load(stub.folder / "missing", 1, stub.canary(1))
    engine.load(stub.weights(2), 2, stub.canary(2))
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=2)]]


def test_a_server_that_dies_later_comes_back_with_the_newest_weights(stub: Stub) -> None:
    engine = stub.start()
    engine.load(stub.weights(1), 1, stub.canary(1))
    stub.order("dies-after-two")
    assert engine.generate([request(i, n=1) for i in range(5)]) == [[expected(i, 0, 1)] for i in range(5)]


def test_a_sleeping_engine_gets_its_weights_before_its_cache_has_room(stub: Stub) -> None:
    engine = stub.start(sleep=True)
    with engine.asleep():
        assert stub.paths() == ["/sleep?level=1"]
    engine.load(stub.weights(1), 1, stub.canary(1))
    assert stub.paths() == [
        "/wake_up?tags=weights",
        "/collective_rpc",
        "/wake_up?tags=kv_cache",
        "/reset_prefix_cache",
    ]
    engine.generate([request(1)])
    assert stub.paths() == []


def test_a_server_that_dies_asleep_is_not_started_before_its_memory_is_free(stub: Stub) -> None:
    before = set(below(os.getpid()))
    engine = stub.start(sleep=True)
    with engine.asleep():
        started = [pid for pid in below(os.getpid()) if pid not in before]
        (server,) = [pid for pid in started if len(below(pid)) == 1]  # its engine stands below it
        os.kill(server, signal.SIGKILL)
        assert until(lambda: none_alive(started))
        assert not until(lambda: stub.starts() > 1, seconds=1.0)
    assert engine.generate([request(1, n=1)]) == [[expected(1, 0)]]
    assert (stub.starts(), engine.restarts) == (2, 1)
    assert stub.paths() == ["/sleep?level=1"], "a new server never slept"


def test_a_server_that_cannot_fall_asleep_is_replaced_by_one_that_can(stub: Stub) -> None:
    engine = stub.start(sleep=True)
    engine.wait_ready()
    stub.order("sleep-fails")
    with engine.asleep():
        assert stub.paths() == ["/sleep?level=1", "/sleep?level=1"]
    assert engine.restarts == 1


def test_a_sleeping_engine_wakes_for_whoever_samples(stub: Stub) -> None:
    engine = stub.start(sleep=True)
    with engine.asleep():
        pass
    assert engine.generate([request(1, n=1)]) == [[expected(1, 0)]]
    assert stub.paths() == ["/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]


def test_without_sleep_the_engine_stays_awake(stub: Stub) -> None:
    engine = stub.start()
    engine.wait_ready()
    with engine.asleep():
        pass
    assert stub.paths() == []


def test_the_key_of_a_server_stands_in_no_log_and_every_start_has_another(stub: Stub) -> None:
    engine = stub.start()
    first = engine._replicas[0].server.ready()
    stub.order("dies-after-two")
    engine.generate([request(i) for i in range(4)])
    second = engine._replicas[0].server.ready()
    assert first.epoch < second.epoch and first.key != second.key
    log = stub.log.read_text()
    assert not [address for address in (first, second) if address.key in log or address.key in repr(address)]


def test_a_taken_port_is_exchanged_for_another(stub: Stub) -> None:
    stub.order("port-is-taken")
    assert stub.start().generate([request(1, n=1)]) == [[expected(1, 0)]]


def test_a_server_that_never_starts_is_an_error_with_its_log_and_the_likely_cause(stub: Stub) -> None:
    stub.order("never-starts")
    with pytest.raises(
        EngineError, match=r"out of memory: lower(.|\n)*server-0\.log(.|\n)*CUDA out of memory"
    ):
        stub.start().wait_ready()


def test_a_server_that_never_listens_is_given_up_after_start_timeout(stub: Stub) -> None:
    stub.order("never-listens")
    with pytest.raises(EngineError, match="no token sampled within start_timeout = 1 s"):
        stub.start(start_timeout=1.0).wait_ready()


def test_nothing_is_left_after_close_however_often(stub: Stub) -> None:
    before = set(below(os.getpid()))
    engine = stub.start()
    engine.generate([request(1)])
    started = [pid for pid in below(os.getpid()) if pid not in before]
    assert len(started) == 3  # guard, server, and the child that the server leaves behind
    engine.close()
    engine.close()
    assert none_alive(started)
    with pytest.raises(EngineError, match="closed"):
        engine.generate([request(1)])


def test_closing_while_the_server_starts_ends_it(stub: Stub, tmp_path: Path) -> None:
    before = set(below(os.getpid()))
    stub.order("never-listens")
    stub.start().close()
    assert set(below(os.getpid())) <= before


def test_log_probs_that_nobody_reads_are_not_asked_for_and_change_no_token(stub: Stub) -> None:
    engine = stub.start()
    read, unread = engine.generate([request(1), replace(request(1), reads_logprobs=False)])
    assert [one.logprobs for one in unread] == [None, None]
    assert [replace(one, logprobs=None) for one in read] == unread


@pytest.mark.parametrize("where", ["_start", "_watch"])
def test_whatever_goes_wrong_in_the_supervision_ends_the_wait_and_is_told(
    stub: Stub, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise LookupError("nobody thought of this")

    monkeypatch.setattr(OwnServer, where, broken)
    engine = stub.start()

    def use() -> None:
        while True:  # a server that came up may answer before the error is met
            engine.generate([request(0)])

    with pytest.raises(EngineError, match=r"LookupError .*nobody thought of this"):
        use()
    assert until(lambda: none_alive(below(os.getpid())))
