"""Answers leave the engine core whole, and are those that vLLM would have handed on token by token."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
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

from tests.support.shipped import ROOT
from treetune.engine.base import EngineLaunch
from treetune.engine.launch import ServerLaunch
from treetune.engine.settings import VllmSettings
from treetune.engine.whole_answers import JOIN_EVERY, AsyncWholeAnswers, WholeAnswersScheduler
from treetune.models.policy_files import write_for_engine
from treetune.models.sources import TinyModel


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
def scheduler(monkeypatch: pytest.MonkeyPatch) -> WholeAnswersScheduler:
    """Without vLLM's own part, which hands on what `step` is given."""
    monkeypatch.setattr(Scheduler, "__init__", lambda self: None)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, outputs, _: outputs)
    found = WholeAnswersScheduler()
    found.requests = {}
    return found


def step(scheduler: WholeAnswersScheduler, *outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
    by_client: Any = {0: EngineCoreOutputs(outputs=list(outputs))}
    found = scheduler.update_from_output(by_client, None)  # type: ignore[arg-type]
    assert all(one.outputs for one in found.values()), "an empty message would only wake the HTTP side"
    return [output for one in found.values() for output in one.outputs]


def asks(scheduler: WholeAnswersScheduler, name: str, **params: Any) -> None:
    settings = SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY} | params)
    scheduler.requests[name] = SimpleNamespace(request_id=name, sampling_params=settings)


@pytest.mark.parametrize("reads_logprobs", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 40, 2 * JOIN_EVERY + 9])
def test_an_answer_comes_once_and_has_all_tokens_and_logprobs(
    scheduler: WholeAnswersScheduler, tokens: int, reads_logprobs: bool
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
    assert not scheduler._unfinished


def test_answers_beside_each_other_are_kept_apart(scheduler: WholeAnswersScheduler) -> None:
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
def test_whoever_reads_along_has_each_token_at_once(
    scheduler: WholeAnswersScheduler, params: dict[str, Any]
) -> None:
    asks(scheduler, "one", **params)
    outputs = outputs_of("one", 5)
    assert [step(scheduler, output) for output in outputs] == [[output] for output in outputs]


def test_nothing_is_kept_of_a_request_that_was_given_up(
    scheduler: WholeAnswersScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks(scheduler, "one")
    first, *_ = outputs_of("one", 40)
    step(scheduler, first)
    ended = [scheduler.requests["one"]]
    monkeypatch.setattr(Scheduler, "finish_requests", lambda *_: ended)
    assert scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED) == ended
    assert not scheduler._unfinished


def test_a_server_plans_ahead_beside_a_gpu_alone() -> None:
    """vLLM takes its asynchronous scheduler there, and says nothing of one that isn't."""
    run = EngineLaunch(Path("/weights"), Path("/logs"), seed=0, context_length=64)

    def chosen(device: str, **settings: Any) -> str:
        launch = ServerLaunch(VllmSettings(**settings), replace(run, device=device))
        command = launch.command(Path("/weights"), 1)
        return command[command.index("--scheduler-cls") + 1].rpartition(".")[2]

    assert [chosen("cpu"), chosen("cuda", async_scheduling=False)] == [WholeAnswersScheduler.__name__] * 2
    assert chosen("cuda") == AsyncWholeAnswers.__name__
    assert issubclass(AsyncWholeAnswers, AsyncScheduler)
    assert AsyncWholeAnswers.__mro__.index(WholeAnswersScheduler) < AsyncWholeAnswers.__mro__.index(
        AsyncScheduler
    )


@pytest.mark.slow
def test_asynchronous_scheduling_hands_on_whole_what_it_hands_on_by_tokens(
    tmp_path: Path,
) -> None:
    """vLLM's own core with two steps in flight, as beside a GPU, and no model; a cache so small that a
    request is thrown out and begun again."""
    source = TinyModel(layers=1, hidden_size=32, heads=1, intermediate_size=32, context_length=320)
    model = source.load_model(0, lambda: "0123456789")
    tokenizer = source.load_tokenizer(lambda: "0123456789")
    write_for_engine(dict(model.named_parameters()), model.config, tokenizer, tmp_path / "weights")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TREETUNE_STUB_TOKENS_PER_SECOND": "1e9",
    }
    answers = []
    for scheduler in (AsyncScheduler, AsyncWholeAnswers):
        name = f"{scheduler.__module__}.{scheduler.__qualname__}"
        command = [sys.executable, "-c", ASYNCHRONOUS, name, str(tmp_path / "weights")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    by_tokens, whole = answers
    assert by_tokens == whole
    assert [len(ids) for ids, _, _ in whole] == [5 + 17 * i for i in range(6) for _ in range(3)]


ASYNCHRONOUS = """
import json, sys
import vllm
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.scheduler import Scheduler

settled, preempt, preempted = CpuPlatform.check_and_update_config, Scheduler._preempt_request, []

def left_on(cls, config):
    settled(config)
    config.scheduler_config.async_scheduling = True

def noted(self, request, *more, **further):
    preempted.append(request)
    return preempt(self, request, *more, **further)

CpuPlatform.check_and_update_config = classmethod(left_on)
Scheduler._preempt_request = noted
llm = vllm.LLM(
    sys.argv[2], scheduler_cls=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=320,
    max_num_seqs=8, block_size=32, num_gpu_blocks_override=14, enable_prefix_caching=False,
    enable_chunked_prefill=False, distributed_executor_backend="benchmarks.stub_core.StubExecutor",
)
assert llm.llm_engine.engine_core.engine_core.batch_queue_size == 2
prompts = [vllm.TokensPrompt(prompt_token_ids=[2 + i, 3, 4]) for i in range(6)]
params = [
    vllm.SamplingParams(n=3, seed=100 * i, max_tokens=5 + 17 * i, logprobs=0, detokenize=False)
    for i in range(6)
]
samples = [one for output in llm.generate(prompts, params, use_tqdm=False) for one in output.outputs]
assert preempted
print(json.dumps([
    [list(one.token_ids), [next(iter(at.values())).logprob for at in one.logprobs], one.finish_reason]
    for one in samples
]))
"""
