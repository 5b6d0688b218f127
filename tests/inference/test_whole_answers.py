"""Answers leave the engine core whole, and are those that vLLM would have handed on token by token."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from treetune.inference.base import EngineLaunch
from treetune.inference.launch import ServerLaunch
from treetune.inference.settings import VllmSettings
from treetune.inference.whole_answers import JOINED, AsyncWholeAnswers, WholeAnswers


def outputs_of(name: str, tokens: int, reads_logprobs: bool = True) -> list[EngineCoreOutput]:
    """An answer token by token, as the scheduler hands it on; some steps have two tokens, and the last step
    ends it."""
    draws = random.Random(tokens)
    ids = [draws.randrange(1000) for _ in range(tokens)]
    found = []
    while ids:
        width = draws.choice((1, 1, 2))
        now, ids = ids[:width], ids[width:]
        column = np.array(now, np.int32)[:, None]
        logprobs = LogprobsLists(column, -column.astype(np.float32) / 7, column[:, 0])
        found.append(EngineCoreOutput(name, now, logprobs if reads_logprobs else None))
    found[-1].finish_reason, found[-1].stop_reason = FinishReason.STOP, 7
    return found


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> WholeAnswers:
    """Without vLLM's own part, which hands on what `step` is given."""
    monkeypatch.setattr(Scheduler, "__init__", lambda self: None)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, outputs, _: outputs)
    found = WholeAnswers()
    found.requests = {}
    return found


def step(scheduler: WholeAnswers, *outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
    by_client: Any = {0: EngineCoreOutputs(outputs=list(outputs))}
    found = scheduler.update_from_output(by_client, None)  # type: ignore[arg-type]
    assert all(one.outputs for one in found.values()), "an empty message would only wake the HTTP side"
    return [output for one in found.values() for output in one.outputs]


def asks(scheduler: WholeAnswers, name: str, **params: Any) -> None:
    settings = SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY} | params)
    scheduler.requests[name] = SimpleNamespace(request_id=name, sampling_params=settings)


@pytest.mark.parametrize("reads_logprobs", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 40, 2 * JOINED + 9])
def test_an_answer_comes_once_and_has_all_tokens_and_logprobs(
    scheduler: WholeAnswers, tokens: int, reads_logprobs: bool
) -> None:
    asks(scheduler, "one")
    outputs = outputs_of("one", tokens, reads_logprobs)
    ids = [token for output in outputs for token in output.new_token_ids]
    found = [whole for output in outputs for whole in step(scheduler, output)]
    (whole,) = found
    assert whole.new_token_ids == ids
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, 7)
    if reads_logprobs:
        assert whole.new_logprobs is not None
        assert whole.new_logprobs.logprobs.tobytes() == (-np.array(ids, np.float32) / 7).tobytes()
        assert whole.new_logprobs.logprob_token_ids[:, 0].tolist() == ids
        assert whole.new_logprobs.sampled_token_ranks.tolist() == ids
    else:
        assert whole.new_logprobs is None
    assert not scheduler._begun


def test_answers_beside_each_other_are_kept_apart(scheduler: WholeAnswers) -> None:
    both = {name: outputs_of(name, tokens) for name, tokens in (("long", 30), ("short", 4))}
    ids = {name: [token for one in outputs for token in one.new_token_ids] for name, outputs in both.items()}
    for name in both:
        asks(scheduler, name)
    found = []
    while any(both.values()):
        found += step(scheduler, *(outputs.pop(0) for outputs in both.values() if outputs))
    assert [(one.request_id, one.new_token_ids) for one in found] == [
        ("short", ids["short"]),
        ("long", ids["long"]),
    ]


@pytest.mark.parametrize("params", [{"stop": ["x"]}, {"output_kind": RequestOutputKind.DELTA}])
def test_whoever_reads_along_has_each_token_at_once(scheduler: WholeAnswers, params: dict[str, Any]) -> None:
    asks(scheduler, "one", **params)
    outputs = outputs_of("one", 5)
    assert [step(scheduler, output) for output in outputs] == [[output] for output in outputs]


def test_nothing_is_kept_of_a_request_that_was_given_up(
    scheduler: WholeAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks(scheduler, "one")
    first, *_ = outputs_of("one", 40)
    step(scheduler, first)
    ended = [scheduler.requests["one"]]
    monkeypatch.setattr(Scheduler, "finish_requests", lambda *_: ended)
    assert scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED) == ended
    assert not scheduler._begun


def test_a_server_plans_ahead_beside_a_gpu_alone() -> None:
    """vLLM takes its asynchronous scheduler there, and says nothing of one that isn't."""
    run = EngineLaunch(Path("/weights"), Path("/logs"), seed=0, context_length=64)

    def chosen(device: str, **settings: Any) -> str:
        launch = ServerLaunch(VllmSettings(**settings), replace(run, device=device))
        command = launch.command(Path("/weights"), 1)
        return command[command.index("--scheduler-cls") + 1].rpartition(".")[2]

    assert [chosen("cpu"), chosen("cuda", async_scheduling=False)] == [WholeAnswers.__name__] * 2
    assert chosen("cuda") == AsyncWholeAnswers.__name__
    assert issubclass(AsyncWholeAnswers, AsyncScheduler)
    assert AsyncWholeAnswers.__mro__.index(WholeAnswers) < AsyncWholeAnswers.__mro__.index(AsyncScheduler)
