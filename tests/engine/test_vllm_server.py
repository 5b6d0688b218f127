"""The engine on the real vLLM: what it samples is what the trainer would have said, always.

(tests/runs/test_killed_runs.py kills its engine, its parent and its launcher in whole runs.)
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import numpy as np
import pytest

from tests.support.processes import engine_core_of, processes_named
from tests.support.stubs import below, none_alive, until
from treetune.engine.base import Canary, Chunk, EngineLaunch, Tolerance, TransferMethod
from treetune.engine.client import MODEL_NAME, SAMPLES_ROUTE, Address
from treetune.engine.engine import VllmEngine, start_engine
from treetune.engine.journal import JournaledEngine
from treetune.engine.key import key_header
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.engine.settings import VllmSettings
from treetune.exceptions import EngineError
from treetune.models.sources import TinyModel
from treetune.vocabulary import Column, TokenIds, token_array

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = [pytest.mark.server, pytest.mark.slow]

ALPHABET = "0123456789+=#\n abcdefghijklmnopqrstuvwxyz"
CONTEXT = 320
SOURCE = TinyModel(layers=2, hidden_size=64, heads=2, context_length=CONTEXT)
TOLERANCE = 1e-4
ACCEPTED = Tolerance(TOLERANCE, TOLERANCE)


@dataclass
class Policy:
    """A tiny model, the folder that the engine loads it from, and its own log-probs."""

    model: PreTrainedModel
    folder: Path

    def score(self, pairs: list[tuple[TokenIds, TokenIds]], temperature: float = 1.0) -> list[list[float]]:
        import torch

        scores = []
        for prompt, response in pairs:
            ids_1T = torch.tensor([[*map(int, prompt), *map(int, response)]])
            with torch.no_grad():
                logits_TV = self.model(ids_1T).logits[0, len(prompt) - 1 : -1].float() / temperature
            logprobs_TV = logits_TV.log_softmax(-1)
            scores.append([logprobs_TV[t, token].item() for t, token in enumerate(response)])
        return scores

    def chunks(self, folder: Path) -> Iterator[Chunk]:
        """The weights as they leave a trainer, into a folder that is whole at the end."""
        from treetune.models.shards import shard_path, split_into_chunks, write_index, write_shard
        from treetune.store.checksums import digest_of_weights

        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        weights = ((name, weight.detach()) for name, weight in self.model.named_parameters())
        files: dict[str, str] = {}
        for number, (chunk, last) in enumerate(
            split_into_chunks(weights, 20_000, lambda weight: weight.clone())
        ):
            path = shard_path(folder, number)
            write_shard(chunk, path)
            files |= dict.fromkeys(chunk, path.name)
            if last:
                write_index(files, folder)
            yield Chunk(path, number, last, digest_of_weights(path))

    def canary(self) -> Canary:
        return Canary(prompts=[(5, 6, 7), (9, 8)], score=self.score, tolerance=ACCEPTED)  # type: ignore[arg-type]


def policy(folder: Path, seed: int) -> Policy:
    import torch

    from treetune.models.policy_files import write_for_engine

    model = SOURCE.load_model(seed, lambda: ALPHABET)
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)  # far from uniform, so that other weights sample other tokens
    tokenizer = SOURCE.load_tokenizer(lambda: ALPHABET)
    write_for_engine(dict(model.named_parameters()), model.config, tokenizer, folder)
    return Policy(model.eval(), folder)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    folder = tmp_path_factory.mktemp("weights")
    return [policy(folder / str(seed), seed) for seed in range(3)]


SETTINGS: dict[str, Any] = {"prefix_caching": True, "omp_threads": 1, "start_timeout": 300.0}


def started(weights: Path, logs: Path, transfer: TransferMethod = "file") -> VllmEngine:
    launch = EngineLaunch(weights, logs, seed=0, context_length=CONTEXT, transfer=transfer)
    found = start_engine(VllmSettings(**SETTINGS), launch)
    assert isinstance(found, VllmEngine)
    return found


@pytest.fixture(scope="module")
def engine(policies: list[Policy], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    found = started(policies[0].folder, tmp_path_factory.mktemp("logs"), "shared_memory")
    found.wait_ready()
    yield found
    found.close()


@pytest.mark.parametrize("path", ["/collective_rpc", "/v1/completions", SAMPLES_ROUTE, "/health"])
def test_nobody_is_answered_without_the_key(engine: VllmEngine, path: str) -> None:
    with pytest.raises(HTTPError, match="401"):
        urlopen(engine._replicas[0].server.wait_until_ready().url + path, data=b"{}", timeout=10)


def requests(count: int, *, n: int = 3, length: int = 12, max_tokens: int = 40) -> list[Request]:
    random_ids = random.Random(count)
    return [
        Request(
            tuple(random_ids.randrange(4, 40) for _ in range(length)),
            random_ids.randrange(1 << 48),
            n,
            SamplingParams(max_tokens),
        )
        for _ in range(count)
    ]


def test_a_whole_answer_is_what_vllms_own_route_streams(engine: VllmEngine) -> None:
    """Tokens, log-probs to the bit, and ends, of sequences that are handed on token by token."""
    asked = requests(1, n=8, max_tokens=200)[0]
    address = engine._replicas[0].server.wait_until_ready()
    body = {"model": MODEL_NAME, "prompt": asked.prompt_ids.tolist(), "n": asked.n, "seed": asked.seed}
    body |= {"max_tokens": 200, "logprobs": 0, "return_token_ids": True, "stream": True}
    streamed: list[list[Any]] = [[[], [], None] for _ in range(asked.n)]
    question = UrlRequest(address.url + "/v1/completions", json.dumps(body).encode(), key_header(address.key))
    question.add_header("Content-Type", "application/json")
    events = 0
    with urlopen(question, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                events += 1
                one = streamed[choice["index"]]
                one[0] += choice["token_ids"]
                one[1] += choice["logprobs"]["token_logprobs"]
                one[2] = choice["finish_reason"]
    # On a busy machine several tokens come in one event; an answer that is kept comes in one altogether.
    assert events > asked.n, "it isn't kept for whoever reads along"
    whole = engine.generate([asked])[0]
    assert [[list(one.token_ids), list(one.logprobs), one.finish_reason] for one in whole] == streamed
    unread = engine.generate([replace(asked, reads_logprobs=False)])[0]
    assert [(one.token_ids.tolist(), one.logprobs) for one in unread] == [
        (ids, None) for ids, _, _ in streamed
    ]


def gap(policy: Policy, asked: list[Request], results: list[list[Completion]]) -> float:
    return max(
        abs(ours - theirs)
        for request, completions in zip(asked, results)
        for completion in completions
        for ours, theirs in zip(
            completion.logprobs,
            policy.score([(request.prompt_ids, completion.token_ids)], request.sampling.temperature)[0],
        )
    )


def test_a_sample_is_that_of_its_seed_whatever_else_is_sampled(engine: VllmEngine) -> None:
    asked = requests(24)
    together = engine.generate(asked)
    assert engine.generate(asked[::-1])[::-1] == together
    assert [engine.generate([request])[0] for request in asked[:4]] == together[:4]
    singles = [replace(asked[0], seed=asked[0].seed + i, n=1) for i in range(asked[0].n)]
    assert [one[0] for one in engine.generate(singles)] == together[0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_models_at_the_temperature_of_sampling(
    engine: VllmEngine, policies: list[Policy], temperature: float
) -> None:
    engine.load(policies[0].folder, 0, policies[0].canary())
    asked = [replace(r, sampling=SamplingParams(40, temperature=temperature)) for r in requests(8)]
    assert gap(policies[0], asked, engine.generate(asked)) <= TOLERANCE


def test_truncated_sampling_reports_the_distribution_that_was_sampled(engine: VllmEngine) -> None:
    asked = [replace(r, sampling=SamplingParams(20, top_k=1)) for r in requests(2)]
    for completions in engine.generate(asked):
        for completion in completions:
            assert list(completion.logprobs) == [0.0] * len(completion.logprobs)


def test_the_end_token_and_its_logprob_belong_to_the_answer(
    engine: VllmEngine, policies: list[Policy]
) -> None:
    end = policies[0].model.config.eos_token_id
    answers = [answer for answers in engine.generate(requests(8, n=8, max_tokens=200)) for answer in answers]
    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    assert ended
    assert all(answer.token_ids[-1] == end and end not in answer.token_ids[:-1] for answer in ended)
    assert all(len(answer.token_ids) == len(answer.logprobs) for answer in answers)


def test_scores_are_the_log_probs_of_the_policy_whether_their_prefix_is_cached_or_not(
    engine: VllmEngine, policies: list[Policy]
) -> None:
    """Among them texts that were sampled, which are wholly in the cache, and texts after prompts of one block
    and more."""
    sampled = requests(3, n=1, length=70)
    completions = [of_request[0] for of_request in engine.generate(sampled)]
    texts = [(r.prompt_ids, c.token_ids) for r, c in zip(sampled, completions, strict=True)]
    draw = random.Random(7)
    for _ in range(12):
        text = token_array([draw.randrange(40) for _ in range(draw.randrange(1, 50))])
        texts.append((draw.choice(sampled).prompt_ids[: draw.randrange(1, 71)], text))
    expected = policies[0].score(texts)
    before = engine.tokens

    async def score_all() -> list[Column]:
        return await asyncio.gather(*(engine.score(prompt, text) for prompt, text in texts))

    for _ in range(2):  # the second time, whole texts are in the cache
        for ours, theirs in zip(engine.run(score_all()), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert engine.tokens == before


def test_a_text_that_the_server_cannot_score_is_refused_in_one_message(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="1 tokens to score and one after them need 321 tokens"):
        engine.run(engine.score(token_array([1] * 319), token_array([1])))
    with pytest.raises(EngineError, match=r"refused /treetune/scores with HTTP 400.*5000"):
        engine.run(engine.score(token_array([1, 2]), token_array([5000])))
    assert len(engine.run(engine.score(token_array([1] * 318), token_array([1])))) == 1


def test_a_stop_string_ends_an_answer_and_stays_in_it(engine: VllmEngine) -> None:
    tokenizer = SOURCE.load_tokenizer(lambda: ALPHABET)
    asked = [replace(r, sampling=SamplingParams(100, stop=("7",))) for r in requests(8)]
    answers = [answer for answers in engine.generate(asked) for answer in answers]
    stopped = [(one, text) for one in answers if "7" in (text := tokenizer.decode(one.token_ids))]
    assert stopped
    for one, text in stopped:
        assert (one.finish_reason, text.index("7")) == ("stop", len(text) - 1)


def test_after_a_load_no_prefix_of_the_old_weights_is_used(
    engine: VllmEngine, policies: list[Policy]
) -> None:
    # Two blocks of 128 tokens: long enough for a CPU's prefix cache.
    asked = requests(2, length=270, max_tokens=20)
    engine.load(policies[0].folder, 0, policies[0].canary())
    old = engine.generate(asked)
    assert gap(policies[0], asked, old) <= TOLERANCE
    for version in (1, 2, 1):
        report = engine.load(policies[version].folder, version, policies[version].canary())
        assert report.canary_gap <= TOLERANCE
        assert report.restarts == 0
        new = engine.generate(asked)
        assert new != old
        assert gap(policies[version], asked, new) <= TOLERANCE


def test_weights_that_come_in_chunks_give_what_they_give_from_a_folder(
    engine: VllmEngine, policies: list[Policy], tmp_path: Path
) -> None:
    asked = requests(4)
    for version in (1, 2):
        engine.load(policies[version].folder, version, policies[version].canary())
        from_folder = engine.generate(asked)
        engine.load(policies[0].folder, 0, policies[0].canary())
        folder = tmp_path / str(version)
        chunks = policies[version].chunks(folder)
        report = engine.load(folder, version, policies[version].canary(), chunks)
        assert len(list(folder.glob("*.safetensors"))) > 2
        assert report.restarts == 0
        assert engine.generate(asked) == from_folder


def test_an_engine_core_killed_between_two_chunks_is_replaced_by_one_with_whole_weights(
    engine: VllmEngine, policies: list[Policy], tmp_path: Path
) -> None:
    def chunks() -> Iterator[Chunk]:
        for chunk in policies[1].chunks(tmp_path / "1"):
            if chunk.number == 2:
                os.kill(engine_core_of(engine._replicas[0].server.wait_until_ready().url), signal.SIGKILL)
            yield chunk

    report = engine.load(tmp_path / "1", 1, policies[1].canary(), chunks())
    assert report.restarts == 1
    asked = requests(4)
    assert gap(policies[1], asked, engine.generate(asked)) <= TOLERANCE


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_after_a_transfer_that_failed_the_live_server_has_the_weights_of_the_folder(
    sent: int, engine: VllmEngine, policies: list[Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of the chunks it had: a layer's weights are cut into several here."""
    monkeypatch.setattr(engine, "_transfer", "shared_memory")
    transfer = engine._replicas[0].transfer
    send = transfer.send

    def fails(address: Address, chunk: Chunk) -> None:
        if chunk.number == sent:
            raise RuntimeError("no peer access")
        send(address, chunk)

    asked = requests(4)
    engine.load(policies[1].folder, 1, policies[1].canary())
    from_folder = engine.generate(asked)
    engine.load(policies[0].folder, 0, policies[0].canary())
    monkeypatch.setattr(transfer, "send", fails)
    report = engine.load(tmp_path / "1", 1, policies[1].canary(), policies[1].chunks(tmp_path / "1"))
    assert report.restarts == 0
    assert report.gave_up.endswith("RuntimeError: no peer access")
    assert engine.generate(asked) == from_folder


def test_two_servers_give_the_answers_of_one_though_one_is_killed_in_the_middle(
    engine: VllmEngine, policies: list[Policy], tmp_path: Path
) -> None:
    engine.load(policies[1].folder, 1, policies[1].canary())
    asked = requests(64, n=4, max_tokens=200)
    of_one = engine.generate(asked)
    other = started(policies[1].folder, tmp_path)
    try:
        servers = [one.server for both in (engine, other) for one in both._replicas]
        launch = EngineLaunch(policies[1].folder, tmp_path, seed=0, context_length=CONTEXT)
        pair = VllmEngine(engine._settings, launch, servers)
        pair.wait_ready()
        pair.load(policies[1].folder, 1, policies[1].canary())
        reported: list[int] = []

        def on_result(index: int, completions: list[Completion]) -> None:
            reported.append(index)
            if len(reported) == 5:
                os.kill(max(processes_named("VLLM::EngineCore")), signal.SIGKILL)

        journaled = JournaledEngine(pair, tmp_path / "journal.jsonl")
        assert journaled.generate(asked, on_result) == of_one, "to the bit, log-probs too"
        assert sorted(reported) == list(range(64))
        assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 64
    finally:
        other.close()


def test_close_leaves_no_process(engine: VllmEngine) -> None:
    engine.wait_ready()
    tree = below(os.getpid())
    assert len(tree) >= 3
    engine.close()
    assert until(lambda: none_alive(tree))
