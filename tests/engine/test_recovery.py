"""The engine on a server that fails, tested with the stub server in vLLM's place.

Promises that these tests hold:

* Samples come in the order of requests; after a failure only what is unfinished is sampled again.
* A server that dies, hangs, lies or refuses weights is replaced, and the number of restarts is bounded.
* No sample comes from half-loaded or old weights; a transfer that fails goes over to files.
* An engine that sleeps has its newest weights when it wakes.
* A server that can't start is an error with its log; `close` leaves no process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest

from tests.support.stub_server import CONTEXT
from tests.support.stubs import Stub, answers, below, none_alive, request, until
from treetune.engine.base import Canary, Chunk, SyncReport, Tolerance
from treetune.engine.client import Address
from treetune.engine.engine import VllmEngine
from treetune.engine.requests import ANSWER_PRIORITY, CONTINUATION_PRIORITY, Completion, Deferred, Request
from treetune.engine.server import OwnServer
from treetune.engine.transfer import FromFolder
from treetune.exceptions import EngineError, ServerFailure
from treetune.vocabulary import TokenIds, token_array

# Sampling


def test_completions_come_in_the_order_of_requests_and_samples_and_are_reported_once(stub: Stub) -> None:
    reported: list[tuple[int, list[Completion]]] = []
    asked = [request(100 * i, n=3) for i in range(20)]
    results = stub.start().generate(asked, lambda i, completions: reported.append((i, completions)))
    assert results == [answers(100 * i, n=3) for i in range(20)]
    assert sorted(reported, key=lambda report: report[0]) == list(enumerate(results))


def test_more_samples_than_the_server_holds_are_sent_in_parts_with_the_same_seeds(stub: Stub) -> None:
    engine = stub.start(max_num_seqs=4)
    assert engine.generate([request(7, n=10)]) == [answers(7, n=10)]
    assert sorted((body["seed"], body["n"]) for body in stub.sample_requests()) == [(7, 4), (11, 4), (15, 2)]


def test_answers_are_sent_before_continuations(stub: Stub) -> None:
    engine = stub.start(max_concurrency=1)
    mixed = [replace(request(i), priority=(CONTINUATION_PRIORITY, ANSWER_PRIORITY)[i % 2]) for i in range(6)]
    assert engine.generate(mixed) == [answers(i) for i in range(6)]
    order = [(body["seed"], body["priority"]) for body in stub.sample_requests()]
    assert order == [(1, 0), (3, 0), (5, 0), (0, 1), (2, 1), (4, 1)]


def test_log_probs_that_are_not_read_are_not_requested_and_change_no_token(stub: Stub) -> None:
    engine = stub.start()
    read, unread = engine.generate([request(1), replace(request(1), reads_logprobs=False)])
    assert [completion.logprobs for completion in unread] == [None, None]
    assert [replace(completion, logprobs=None) for completion in read] == unread


def test_requests_that_follow_a_future_are_awaited_and_delay_no_others(stub: Stub) -> None:
    engine = stub.start()
    futures: list[Future[None]] = [Future() for _ in range(3)]
    reported: list[int] = []

    def on_result(index: int, completions: list[Completion]) -> Sequence[Request | Deferred]:
        reported.append(index)
        if index < 3:
            return [Deferred(futures[index], lambda: [request(100 + index)])]
        if index == 7:  # the others are done by then: let the first of the three go on
            futures[2].set_result(None)
        if len(reported) == 9:
            futures[0].set_result(None)
        if len(reported) == 10:
            futures[1].set_exception(RuntimeError("the sampling ignores the result of a future"))
        return []

    results = engine.generate([request(i) for i in range(8)], on_result)
    assert sorted(reported) == list(range(11))
    assert results == [answers(seed) for seed in [*range(8), 102, 100, 101]]


# Failures


@pytest.mark.parametrize("fault", ["dies-after-two", "forgets-a-logprob"])
def test_unfinished_requests_alone_are_sent_again_after_a_failure(stub: Stub, fault: str) -> None:
    engine = stub.start(max_concurrency=1)
    engine.wait_ready()
    stub.order(fault)
    reported: list[int] = []
    results = engine.generate([request(i) for i in range(6)], lambda i, c: reported.append(i))
    assert results == [answers(i) for i in range(6)]
    assert sorted(reported) == list(range(6))
    assert engine.restarts == 1
    assert len(stub.sample_requests()) == 7


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

    later = Deferred(ready, lambda: [request(50)])
    requests: list[Request | Deferred] = [request(i) for i in range(6)]
    results = engine.generate([later, *requests] if first == "later" else [*requests, later], on_result)
    assert results == [answers(seed) for seed in [*range(6), 50]]
    assert engine.restarts == 1 and sorted(answered) == list(range(7))


def test_a_server_that_falls_silent_is_replaced_after_the_deadline(stub: Stub) -> None:
    engine = stub.start(request_timeout=1.0)
    engine.wait_ready()
    stub.order("hangs")
    assert engine.generate([request(1)]) == [answers(1)]
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


# New weights, by file and in chunks


def load_and_check(stub: Stub, engine: VllmEngine, version: int, canary: Canary | None = None) -> SyncReport:
    """Loads weights and checks that the engine has the trainer's log-probs afterwards."""
    if isinstance(engine._replicas[0].transfer, FromFolder):
        report = engine.load(stub.weights(version), version, canary or stub.canary(version))
    else:
        folder = stub.folder / f"{version:04d}"
        report = engine.load(folder, version, canary or stub.canary(version), stub.chunks(version))
    assert (report.canary_gap, engine.version) == (0.0, version)
    assert engine.generate([request(5)]) == [answers(5, version=version)]
    return report


def load(stub: Stub, engine: VllmEngine, version: int, canary: Canary | None = None) -> int:
    """Loads weights as `load_and_check` does, and returns how many restarts it took."""
    return load_and_check(stub, engine, version, canary).restarts


@pytest.mark.parametrize("fault", ["reload-fails", "reload-lies", "cache-is-held"])
def test_a_server_that_does_not_read_a_folder_is_replaced_by_one_with_whole_weights(
    stub: Stub, fault: str
) -> None:
    engine = stub.start(sync_timeout=1.0)
    engine.wait_ready()
    stub.order(fault)
    assert load(stub, engine, 1) == 1
    assert load(stub, engine, 2) == 0


ROUTES_OF_A_LOAD_BY_FILE = ["/collective_rpc", "/reset_prefix_cache"]


@pytest.mark.parametrize(
    ("fault", "message", "restarts"),
    [
        ("meeting-fails", "NCCL has no route", 0),
        ("start-fails", "no update can begin", 0),
        ("update-fails", "a chunk is missing", 0),
        ("finish-fails", "the update is not whole", 0),
        ("update-lies", "differ from the trainer's", 0),
        ("cache-is-held", "the prefix cache was not dropped", 0),
        ("hangs-in-an-update", "/update_weights: no answer in 1 s", 0),
        ("dies-in-an-update", "/update_weights: ", 1),
        ("send raises", "RuntimeError: no peer access", 0),
        ("send hangs", "NCCL was not done in 1 s", 0),
    ],
)
def test_a_transfer_that_fails_goes_over_to_files_and_says_so_once(
    stub: Stub, fault: str, message: str, restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stub.start("shared_memory", sync_timeout=1.0)
    engine.wait_ready()
    if fault.startswith("send"):

        def send(address: Address, chunk: Chunk) -> None:
            if fault == "send raises":
                raise RuntimeError("no peer access")
            time.sleep(1.0)
            raise ServerFailure("NCCL was not done in 1 s")

        monkeypatch.setattr(engine._replicas[0].transfer, "send", send)
    else:
        stub.order(fault)
    report = load_and_check(stub, engine, 1)
    assert report.restarts == restarts
    assert report.gave_up.startswith("the transfer of new weights by shared_memory failed, and")
    assert message in report.gave_up
    stub.paths()
    for version in (2, 3):
        report = load_and_check(stub, engine, version)
        assert (report.restarts, report.gave_up, stub.paths()) == (0, "", ROUTES_OF_A_LOAD_BY_FILE)


def test_a_run_whose_servers_are_replaced_at_three_syncs_in_a_row_ends(stub: Stub) -> None:
    engine = stub.start()
    for version, fails in enumerate([True, True, False, True, True, True], 1):
        if fails:
            stub.order("reload-fails")
        if version < 6:
            assert load(stub, engine, version) == fails
    with pytest.raises(EngineError, match=r"the last 3 syncs of weights each (.|\n)*HTTP 500"):
        load(stub, engine, 6)


def test_an_update_sends_its_chunks_in_order_between_start_and_finish(stub: Stub) -> None:
    engine = stub.start("shared_memory")
    engine.wait_ready()
    for version in (1, 2):
        stub.paths()
        assert load(stub, engine, version) == 0
        update = ["/start_weight_update", *3 * ["/update_weights"], "/finish_weight_update"]
        first = ["/init_weight_transfer_engine"] if version == 1 else []
        assert stub.paths() == [*first, *update, "/reset_prefix_cache"]


def test_all_chunks_are_gathered_though_sending_the_first_fails(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks gather each chunk together: if one stopped, the others would wait for it."""
    engine = stub.start("shared_memory")
    engine.wait_ready()
    (replica,) = engine._replicas
    numbers_of_chunks: list[int] = []

    def send(address: Address, chunk: Chunk) -> None:
        raise RuntimeError("out of memory")

    def chunks() -> Iterator[Chunk]:
        for chunk in stub.chunks(1):
            numbers_of_chunks.append(chunk.number)
            yield chunk

    monkeypatch.setattr(replica.transfer, "send", send)
    report = engine.load(stub.folder / "0001", 1, stub.canary(1), chunks())
    assert numbers_of_chunks == [0, 1, 2]
    assert (report.canary_gap, report.restarts) == (0.0, 0)
    assert report.gave_up.endswith("RuntimeError: out of memory")


def test_a_server_with_part_of_an_update_is_replaced_before_it_samples(stub: Stub) -> None:
    """The trainer fails: the server has one chunk of the new weights and not the others."""
    engine = stub.start("shared_memory")
    engine.wait_ready()

    def chunks() -> Iterator[Chunk]:
        yield next(stub.chunks(1))
        raise OSError("no room for the second chunk")

    with pytest.raises(OSError, match="no room"):
        engine.load(stub.folder / "0001", 1, stub.canary(1), chunks())
    assert engine.generate([request(5)]) == [answers(5)]
    assert (engine.restarts, engine.version) == (1, 0)
    load(stub, engine, 2)


def test_a_second_update_cannot_begin_while_one_is_open(stub: Stub) -> None:
    engine = stub.start("shared_memory")
    load(stub, engine, 1)
    (replica,) = engine._replicas
    engine._client.post(replica.server.wait_until_ready(), "/start_weight_update", timeout=5.0)
    assert load(stub, engine, 2) == 0


def test_of_several_servers_the_one_that_fails_an_update_is_replaced(stub: Stub) -> None:
    engine = stub.start("shared_memory", replicas=2)
    engine.wait_ready()
    stub.order("dies-in-an-update")
    # One restart, where the other server answers within the short deadlines; otherwise it is replaced too.
    assert load(stub, engine, 1) in (1, 2)
    samples = engine.generate([request(seed) for seed in range(8)])
    assert samples == [answers(seed, version=1) for seed in range(8)]


def test_weights_that_no_server_loads_are_an_error_and_the_next_ones_are_loaded(stub: Stub) -> None:
    engine = stub.start()
    engine.wait_ready()
    with pytest.raises(EngineError, match="could not be loaded into the engine"):
        engine.load(stub.folder / "missing", 1, stub.canary(1))
    load(stub, engine, 2)


@pytest.mark.parametrize("transfer", ["file", "shared_memory"])
def test_log_probs_that_stay_wrong_end_in_an_error_that_names_the_gap(stub: Stub, transfer: str) -> None:
    engine = stub.start(transfer)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"could not be loaded(.|\n)*differ from the trainer's by up to"):
        load(stub, engine, 1, stub.canary(2))


def test_a_server_that_keeps_its_old_weights_is_replaced_though_the_gap_is_tolerated(stub: Stub) -> None:
    engine = stub.start()
    prompts = [token_array((prompt,)) for prompt in range(6)]

    def tolerant(version: int) -> Canary:
        return replace(stub.canary(version), prompts=prompts, tolerance=Tolerance(1e9, 1e9))

    assert load(stub, engine, 1, tolerant(1)) == 0
    stub.order("reload-lies")
    assert load(stub, engine, 2, tolerant(2)) == 1


def test_the_canary_samples_as_many_tokens_as_fit_behind_its_prompts(stub: Stub) -> None:
    engine = stub.start()
    lengths = (3, CONTEXT - 2, CONTEXT - 1, CONTEXT, 5 * CONTEXT)
    canary = replace(stub.canary(1), prompts=[(7,) * length for length in lengths])
    scored = []

    def score(pairs: Sequence[tuple[TokenIds, TokenIds]]) -> list[list[float]]:
        scored.extend((len(prompt), len(ids)) for prompt, ids in pairs)
        return stub.canary(1).score(pairs)

    load(stub, engine, 1, replace(canary, score=score))
    longest = CONTEXT - 1
    assert scored == [(3, 4), (CONTEXT - 2, 2), (longest, 1), (longest, 1), (longest, 1)]


def test_a_server_that_dies_later_comes_back_with_the_newest_weights(stub: Stub) -> None:
    engine = stub.start()
    load(stub, engine, 1)
    stub.order("dies-after-two")
    assert engine.generate([request(i) for i in range(5)]) == [answers(i, version=1) for i in range(5)]
    assert engine.restarts == 1


# Sleep


def test_a_sleeping_engine_loads_weights_before_it_allocates_its_cache(stub: Stub) -> None:
    engine = stub.start(sleep=True)
    with engine.asleep():
        assert stub.paths() == ["/sleep?level=1"]
    load(stub, engine, 1)
    paths_of_waking = [
        "/wake_up?tags=weights",
        "/collective_rpc",
        "/wake_up?tags=kv_cache",
        "/reset_prefix_cache",
    ]
    assert stub.paths() == paths_of_waking
    engine.generate([request(1)])
    assert stub.paths() == []


def test_an_engine_that_slept_without_weights_gets_new_ones_before_it_samples(stub: Stub) -> None:
    engine = stub.start(sleep=True)
    with engine.asleep(keep_weights=False):
        assert stub.paths() == ["/sleep?level=2"]
    assert load(stub, engine, 1) == 0
    with engine.asleep(keep_weights=False):
        pass
    assert engine.generate([request(1)]) == [answers(1, version=1)], "by a new server, on the newest weights"
    assert engine.restarts == 1


def test_a_server_that_dies_asleep_is_not_started_before_its_memory_is_free(stub: Stub) -> None:
    before = set(below(os.getpid()))
    engine = stub.start(sleep=True)
    with engine.asleep():
        started = [pid for pid in below(os.getpid()) if pid not in before]
        (server,) = [pid for pid in started if len(below(pid)) == 1]  # its engine stands below it
        os.kill(server, signal.SIGKILL)
        assert until(lambda: none_alive(started))
        assert not until(lambda: stub.starts() > 1, seconds=1.0)
    assert engine.generate([request(1)]) == [answers(1)]
    assert (stub.starts(), engine.restarts) == (2, 1)
    assert stub.paths() == ["/sleep?level=1"], "a new server never slept"


def test_a_server_that_cannot_fall_asleep_is_replaced_by_one_that_can(stub: Stub) -> None:
    engine = stub.start(sleep=True)
    engine.wait_ready()
    stub.order("sleep-fails")
    with engine.asleep():
        assert stub.paths() == ["/sleep?level=1", "/sleep?level=1"]
    assert engine.restarts == 1


def test_a_sleeping_engine_wakes_to_sample_and_without_sleep_it_stays_awake(stub: Stub) -> None:
    for sleep, paths_of_waking in ((True, ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]), (False, [])):
        engine = stub.start(sleep=sleep)
        engine.wait_ready()
        with engine.asleep():
            pass
        assert engine.generate([request(1)]) == [answers(1)]
        assert stub.paths() == ["/sleep?level=1"] * sleep + paths_of_waking
        engine.close()


# Start and end


def test_the_key_of_a_server_stands_in_no_log_and_every_start_has_another(stub: Stub) -> None:
    engine = stub.start()
    first = engine._replicas[0].server.wait_until_ready()
    stub.order("dies-after-two")
    engine.generate([request(i) for i in range(4)])
    second = engine._replicas[0].server.wait_until_ready()
    assert first.epoch < second.epoch and first.key != second.key
    log = stub.log.read_text()
    assert not [address for address in (first, second) if address.key in log or address.key in repr(address)]


def test_a_taken_port_is_exchanged_for_another(stub: Stub) -> None:
    stub.order("port-is-taken")
    assert stub.start().generate([request(1)]) == [answers(1)]


@pytest.mark.parametrize(
    ("fault", "settings", "message"),
    [
        ("never-starts", {}, r"out of memory: lower(.|\n)*server-0\.log(.|\n)*CUDA out of memory"),
        ("never-listens", {"start_timeout": 1.0}, "no token sampled within start_timeout = 1 s"),
    ],
)
def test_a_server_that_does_not_come_up_is_an_error_with_its_log_and_the_likely_cause(
    stub: Stub, fault: str, settings: dict[str, float], message: str
) -> None:
    stub.order(fault)
    with pytest.raises(EngineError, match=message):
        stub.start(**settings).wait_ready()


def test_close_leaves_no_process_also_when_called_twice_or_while_the_server_starts(stub: Stub) -> None:
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
    stub.order("never-listens")
    stub.start().close()
    assert set(below(os.getpid())) <= before


@pytest.mark.parametrize("method", ["_start", "_watch"])
def test_an_error_in_the_thread_that_watches_a_server_ends_the_wait_with_its_message(
    stub: Stub, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(*arguments: object) -> None:
        raise LookupError("nobody thought of this")

    monkeypatch.setattr(OwnServer, method, raise_error)
    before = set(below(os.getpid()))  # processes that earlier tests keep, such as a scorer's sandbox
    engine = stub.start()

    def sample_for_ever() -> None:
        while True:  # a server that came up may answer before the error is met
            engine.generate([request(0)])

    with pytest.raises(EngineError, match=r"LookupError .*nobody thought of this"):
        sample_for_ever()
    assert until(lambda: none_alive([pid for pid in below(os.getpid()) if pid not in before]))
