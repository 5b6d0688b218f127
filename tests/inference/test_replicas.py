"""An engine of several servers gives what one gives, and goes on when one of them is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from treetune.inference.base import CONTINUATIONS, Completion, EngineError, Request, SamplingParams
from treetune.inference.journal import JournaledEngine
from treetune.inference.sampling import BLOCK_TOKENS, Prefixes

from .stubs import Stub, answers, below, request, until


def servers() -> list[int]:
    """The stub servers below this process: each has a child of its own."""
    return [pid for pid in below(os.getpid()) if len(below(pid)) == 1]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_any_number_of_servers_gives_the_same_answers(stub: Stub, replicas: int) -> None:
    engine = stub.start(replicas=replicas)
    engine.wait_ready()
    assert engine.generate([request(i) for i in range(24)]) == [answers(i) for i in range(24)]
    assert sorted(one["seed"] for one in stub.asked()) == list(range(24)), "nothing is asked twice"
    assert set(stub.asked_of()) == set(range(replicas)), "everybody has something to do"


def test_a_server_killed_in_mid_wave_is_replaced_while_the_others_go_on(stub: Stub, tmp_path: Path) -> None:
    before = set(servers())
    stub.faults.mkdir()
    engine = stub.start(replicas=2, max_concurrency=2)
    engine.wait_ready()
    victim, _ = sorted(set(servers()) - before)
    stub.slow_down(0.05)
    reported: list[int] = []

    def on_result(index: int, completions: list[Completion]) -> None:
        reported.append(index)
        if len(reported) == 10:
            os.kill(victim, signal.SIGKILL)

    journaled = JournaledEngine(engine, tmp_path / "journal.jsonl")
    asked = [request(i) for i in range(60)]
    assert journaled.generate(asked, on_result) == [answers(i) for i in range(60)]
    assert sorted(reported) == list(range(60)), "each answer is reported once"
    seeds = [one["seed"] for one in stub.asked()]
    twice = {seed for seed in seeds if seeds.count(seed) > 1}
    assert len(twice) <= 2 and not twice & set(reported[:10]), "only what was not answered is asked again"
    assert JournaledEngine(engine, tmp_path / "journal.jsonl").generate(asked) == journaled.generate(asked)
    assert len(stub.asked()) == len(seeds), "what the journal has is not asked for"
    assert until(lambda: engine.restarts == 1)


def test_a_server_that_was_lost_takes_requests_again_when_it_is_back(stub: Stub) -> None:
    engine = stub.start(replicas=2)
    engine.wait_ready()
    stub.order("forgets-a-logprob")
    assert engine.generate([request(1), request(2)]) == [answers(1), answers(2)]
    engine.wait_ready()
    assert engine.restarts == 1
    stub.forget_what_was_asked()
    assert engine.generate([request(i) for i in range(8)]) == [answers(i) for i in range(8)]
    assert set(stub.asked_of()) == {0, 1}


def test_all_servers_have_new_weights_and_one_that_fails_is_replaced_alone(stub: Stub) -> None:
    engine = stub.start(replicas=2)
    engine.wait_ready()
    stub.order("reload-lies")
    report = engine.load(stub.weights(1), 1, stub.canary(1))
    assert (report.canary_gap, report.restarts) == (0.0, 1)
    stub.forget_what_was_asked()
    assert engine.generate([request(i) for i in range(8)]) == [answers(i, version=1) for i in range(8)]
    assert set(stub.asked_of()) == {0, 1}
    report = engine.load(stub.weights(2), 2, stub.canary(2))
    assert (report.canary_gap, report.restarts) == (0.0, 0)


def test_all_servers_sleep_and_wake(stub: Stub) -> None:
    engine = stub.start(replicas=2, sleep=True)
    with engine.asleep():
        assert stub.paths() == ["/sleep?level=1"] * 2
    assert engine.generate([request(1)]) == [answers(1)]
    assert sorted(stub.paths()) == ["/wake_up?tags=kv_cache"] * 2 + ["/wake_up?tags=weights"] * 2


def test_a_server_that_cannot_be_replaced_ends_the_sampling(stub: Stub) -> None:
    engine = stub.start(replicas=2, max_restarts=0)
    engine.wait_ready()
    stub.slow_down(0.1)
    stub.order("forgets-a-logprob")
    with pytest.raises(EngineError, match="max_restarts is 0"):
        engine.generate([request(i) for i in range(400)])


def test_continuations_go_to_the_server_that_has_the_answer(stub: Stub) -> None:
    engine = stub.start(replicas=2, prefix_caching=True)
    engine.wait_ready()
    sampling = SamplingParams(3)

    def answer(i: int) -> Request:
        return Request(tuple(range(i, i + BLOCK_TOKENS)), i, 1, sampling)

    def on_result(index: int, completions: list[Completion]) -> list[Request]:
        if index >= 8:
            return []
        prompt = np.concatenate([answer(index).prompt_ids, completions[0].token_ids[:1]])
        return [Request(prompt, 100 * (k + 1) + index, 1, sampling, CONTINUATIONS) for k in range(3)]

    engine.generate([answer(i) for i in range(8)], on_result)
    served = dict(zip([one["seed"] for one in stub.asked()], stub.asked_of(), strict=True))
    assert len(served) == 32
    assert all(served[100 * (k + 1) + i] == served[i] for i in range(8) for k in range(3))
    assert {served[i] for i in range(8)} == {0, 1}


def test_the_holder_of_a_prefix_is_who_computed_the_longest_part_of_it() -> None:
    ids = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    known = Prefixes()
    assert known.holder(ids) is None
    known.computed(0, ids[: 2 * BLOCK_TOKENS])
    other = ids.copy()
    other[BLOCK_TOKENS:] += 1
    known.computed(1, other[: 2 * BLOCK_TOKENS])
    assert known.holder(ids) == 0 and known.holder(other) == 1
    assert known.holder(ids[: BLOCK_TOKENS - 1]) is None, "less than a block is known to nobody"
    known.forget(0)
    assert known.holder(ids) == 1, "the first block is the same"


def test_what_is_remembered_of_prefixes_has_a_bound() -> None:
    known = Prefixes(most=4)
    texts = [np.full(3 * BLOCK_TOKENS, number, np.int32) for number in range(20)]
    for text in texts:
        known.computed(0, text)
    assert [known.holder(text) for text in texts[-2:]] == [0, 0]
    assert sum(known.holder(text) is not None for text in texts) <= 2
