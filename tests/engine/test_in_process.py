"""The in-process engine, compared with the model that it samples from.

Promises that these tests hold:

* A sample has the same bits whatever shares its batch, and whether its prompt's blocks were stored.
* Log-probs are those of the sampling distribution, and tokens come as often as it says.
* A sample ends at an end token, a stop token, a stop string or its budget.
* New weights replace the old ones and all that was stored of them; the canary finds wrong ones.
* Short contexts and learned positions are no obstacle; a prompt that doesn't fit is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treetune.engine import in_process
from treetune.engine.base import Canary, Engine, EngineLaunch
from treetune.engine.engine import start_engine
from treetune.engine.in_process import BLOCK_TOKENS, FEWEST_ROWS, InProcessEngine, _RowBatch, _Sample
from treetune.engine.requests import (
    ANSWER_PRIORITY,
    CONTINUATION_PRIORITY,
    Completion,
    Deferred,
    Request,
    SamplingParams,
)
from treetune.engine.settings import InProcessSettings
from treetune.exceptions import EngineError
from treetune.models.tokenizer import character_tokenizer
from treetune.vocabulary import TokenIds

ALPHABET = "abcdefghij"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers that is sure of some tokens and unsure of others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer(ALPHABET, 64)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.15,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine(folder: Path, rows: int = 512, end_ids: tuple[int, ...] = (0,)) -> Engine:
    launch = EngineLaunch(folder, folder, seed=0, context_length=128, end_ids=end_ids)
    return start_engine(InProcessSettings(rows=rows), launch)


def request(
    prompt: list[int], seed: int = 0, n: int = 1, max_tokens: int = 20, **sampling: object
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(np.array(prompt), seed, n, params)


def logits_of(folder: Path, prompt: TokenIds, answer: TokenIds) -> np.ndarray:
    """Computes the logits of each answer token by one pass of the whole model, [tokens, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().numpy()


def test_few_samples_stay_in_the_smallest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPrompts:
        """Keys and values of two tokens for every prompt, all 0."""

        def layers_of(self, prompts: Mapping[bytes, TokenIds]) -> dict[bytes, dict[int, Any]]:
            return {name: {0: (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))} for name in prompts}

    heights: list[int] = []
    resize = _RowBatch._resize

    def count_resizes(batch: _RowBatch, height: int, width: int, layers: Any) -> None:
        heights.append(height)
        resize(batch, height, width, layers)

    monkeypatch.setattr(_RowBatch, "_resize", count_resizes)
    batch = _RowBatch(None, "cpu", NoPrompts())
    samples = [_Sample(0, number, request([1, 2, number]), np.zeros(20)) for number in range(20)]
    for sample in samples[:4]:
        batch.admit([sample])
    assert heights == [FEWEST_ROWS]
    batch.admit(samples[4:])
    batch.rows = dict(list(batch.rows.items())[:3])
    batch.admit([])
    batch.admit([])
    assert heights == [FEWEST_ROWS, 20, FEWEST_ROWS]
    assert list(batch.rows.values()) == [[sample] for sample in samples[:3]]


def various_requests(count: int) -> list[Request]:
    """Draws requests with different prompts, numbers of samples, budgets and sampling parameters."""
    draw = np.random.default_rng(1)
    kinds = [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}, {"top_k": 3}]
    requests = []
    for i in range(count):
        prompt = draw.integers(1, 12, draw.integers(1, 70)).tolist()
        n, max_tokens = int(draw.integers(1, 5)), int(draw.integers(1, 40))
        requests.append(request(prompt, seed=100 * i, n=n, max_tokens=max_tokens, **kinds[i % len(kinds)]))
    return requests


def have_same_bits(completions: list[Completion], others: list[Completion]) -> bool:
    if completions != others:
        return False
    for completion, other in zip(completions, others, strict=True):
        assert completion.logprobs is not None and other.logprobs is not None
        if completion.logprobs.tobytes() != other.logprobs.tobytes():
            return False
    return True


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_sample_has_the_same_bits_whatever_shares_its_batch(folder: Path, rows: int) -> None:
    requests = various_requests(24)
    expected = engine(folder).generate(requests)
    order = np.random.default_rng(rows).permutation(len(requests)).tolist()
    shuffled = engine(folder, rows).generate([requests[i] for i in order])
    for position, i in enumerate(order):
        assert have_same_bits(shuffled[position], expected[i])


def test_samples_share_a_row_until_they_draw_different_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bit of a sample depends on it, and equal beginnings are computed once."""
    forty_samples = request([3, 4, 5], n=40, max_tokens=12)
    together = engine(folder)
    assert isinstance(together, InProcessEngine)
    computed_rows: list[int] = []
    next_logits = _RowBatch.next_logits

    def count_rows(batch: _RowBatch) -> torch.Tensor:
        computed_rows.append(len(batch.rows))
        return next_logits(batch)  # type: ignore[no-any-return]

    monkeypatch.setattr(_RowBatch, "next_logits", count_rows)
    [samples] = together.generate([forty_samples])
    expected_rows = []
    for length in range(max(len(sample.token_ids) for sample in samples)):
        longer = [sample for sample in samples if len(sample.token_ids) > length]
        expected_rows.append(len({tuple(sample.token_ids[:length].tolist()) for sample in longer}))
    assert computed_rows == expected_rows
    assert computed_rows[0] == 1 < FEWEST_ROWS < max(computed_rows)
    for seed, sample in enumerate(samples):
        [alone] = engine(folder).generate([request([3, 4, 5], seed=seed, max_tokens=12)])
        assert have_same_bits([sample], alone)


@pytest.mark.parametrize("stored_bytes", [1 << 29, 0])
def test_prompts_with_a_common_prefix_share_passes_and_keep_their_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stored_bytes: int
) -> None:
    """Continuations begin with a prompt of 70 tokens, which are two whole blocks and a part of a third."""
    monkeypatch.setattr(in_process, "MOST_STORED_BYTES", stored_bytes)
    prompt = np.random.default_rng(2).integers(1, 12, 70).tolist()
    continued = [request([*prompt, length + 1, 3], seed=length, max_tokens=5) for length in range(4)]
    alone = [engine(folder).generate([later])[0] for later in continued]
    shared = engine(folder)
    assert isinstance(shared, InProcessEngine)
    tokens_of_passes: list[int] = []
    shared._model.base_model.register_forward_pre_hook(
        lambda _, inputs, settings: tokens_of_passes.append(settings["input_ids"].numel()), with_kwargs=True
    )
    shared.generate([request(prompt, max_tokens=1)])
    passes_of_prompt = [tokens for tokens in tokens_of_passes if tokens >= BLOCK_TOKENS]
    tokens_of_passes.clear()
    together = shared.generate(continued)
    passes_of_continuations = [tokens for tokens in tokens_of_passes if tokens >= BLOCK_TOKENS]
    for expected, completions in zip(alone, together, strict=True):
        assert have_same_bits(completions, expected)
    assert passes_of_prompt == [BLOCK_TOKENS] * 3
    # The four continuations share two blocks, and differ in the third.
    assert passes_of_continuations == (
        [4 * BLOCK_TOKENS] if stored_bytes else [BLOCK_TOKENS, BLOCK_TOKENS, 4 * BLOCK_TOKENS]
    )


def test_new_weights_forget_the_blocks_of_the_earlier_ones(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = request(list(range(1, 12)) * 5, max_tokens=8)
    sampler = engine(folder)
    before = sampler.generate([prompt])[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    sampler.load(tmp_path, 1)
    [after], [fresh] = sampler.generate([prompt])[0], engine(tmp_path).generate([prompt])[0]
    assert after.logprobs is not None and fresh.logprobs is not None and before[0].logprobs is not None
    assert after.logprobs.tobytes() == fresh.logprobs.tobytes() != before[0].logprobs.tobytes()


def test_log_probs_are_those_of_the_distribution_that_was_sampled(folder: Path) -> None:
    requests = various_requests(12)
    for sampled, samples in zip(requests, engine(folder).generate(requests), strict=True):
        sampling = sampled.sampling
        for sample in samples:
            logits_TV = logits_of(folder, sampled.prompt_ids, sample.token_ids)
            scaled_TV = torch.tensor(logits_TV) / (sampling.temperature or 1.0)
            probs_TV = scaled_TV.softmax(-1)
            if sampling.top_k > 0 or sampling.top_p < 1:
                for probs_V in probs_TV:
                    likeliest = probs_V.argsort(descending=True)
                    kept = likeliest[: sampling.top_k] if sampling.top_k > 0 else likeliest
                    inside = probs_V[kept].cumsum(0) - probs_V[kept] < sampling.top_p * probs_V[kept].sum()
                    out = torch.ones_like(probs_V, dtype=torch.bool)
                    out[kept[inside]] = False
                    probs_V[out] = 0
                probs_TV = probs_TV / probs_TV.sum(-1, keepdim=True)
            sampled_probs_T = probs_TV[range(len(sample.token_ids)), sample.token_ids.tolist()]
            assert sample.logprobs == pytest.approx(sampled_probs_T.log().numpy(), abs=2e-5)
            if sampling.temperature == 0:
                assert sample.token_ids.tolist() == logits_TV.argmax(-1).tolist()


def test_tokens_come_as_often_as_the_model_says(folder: Path) -> None:
    first_token = request([3, 4, 5], n=4000, max_tokens=1)
    [samples] = engine(folder, end_ids=()).generate([first_token])
    logits_TV = logits_of(folder, first_token.prompt_ids, samples[0].token_ids)
    probs_V = torch.tensor(logits_TV)[0].softmax(-1)
    counts_V = np.bincount([int(sample.token_ids[0]) for sample in samples], minlength=len(probs_V))
    assert counts_V / 4000 == pytest.approx(probs_V.numpy(), abs=0.03)


def test_a_sample_ends_at_an_end_token_a_stop_or_its_budget(folder: Path) -> None:
    likely = (
        engine(folder, end_ids=()).generate([request([2, 3], n=1, max_tokens=30)])[0][0].token_ids.tolist()
    )
    ended = engine(folder, end_ids=(likely[4],)).generate([request([2, 3], max_tokens=30)])[0][0]
    assert ended.token_ids.tolist() == likely[: likely.index(likely[4]) + 1]
    assert ended.finish_reason == "stop"
    stopped = engine(folder, end_ids=()).generate([request([2, 3], max_tokens=30, stop_ids=(likely[3],))])[0][
        0
    ]
    assert stopped.token_ids.tolist() == likely[: likely.index(likely[3]) + 1]
    cut = engine(folder, end_ids=()).generate([request([2, 3], max_tokens=3)])[0][0]
    assert (cut.token_ids.tolist(), cut.finish_reason) == (likely[:3], "length")


def test_a_stop_string_ends_a_sample_and_stays_in_it(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    [samples] = engine(folder, end_ids=()).generate([request([2, 3], n=40, max_tokens=40, stop=("ab", "ba"))])
    texts = [tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples]
    ended = [text for text, sample in zip(texts, samples, strict=True) if sample.finish_reason == "stop"]
    assert ended
    assert all(text.endswith(("ab", "ba")) for text in ended)
    assert not any("ab" in text[:-1] or "ba" in text[:-1] for text in texts)


def test_requests_that_follow_from_an_answer_get_the_next_numbers_and_go_first(folder: Path) -> None:
    seen: list[int] = []
    promise: Future[None] = Future()
    promise.set_result(None)

    def on_result(index: int, completions: list[Completion]) -> list[Request | Deferred]:
        seen.append(index)
        if index == 0:
            return [request([7], max_tokens=1), Deferred(promise, lambda: [request([8], max_tokens=1)])]
        return []

    late = Request(np.array([9]), 0, 1, SamplingParams(max_tokens=1), priority=CONTINUATION_PRIORITY)
    early = Request(np.array([1]), 0, 1, SamplingParams(max_tokens=1), priority=ANSWER_PRIORITY)
    results = engine(folder, rows=1).generate([late, early, request([2], max_tokens=1)][::-1], on_result)
    assert len(results) == 5
    assert seen[0] == 0
    assert seen.index(3) < seen.index(1) < seen.index(2), "the continuation waits for all answers"
    assert all(len(completions) == 1 for completions in results)


def test_a_future_without_further_requests_ends_after_many_answers_at_once(folder: Path) -> None:
    promise: Future[None] = Future()
    later = [Deferred(promise, list)]
    threading.Timer(0.1, promise.set_result, [None]).start()
    requests = [request([i % 9 + 1], seed=i, max_tokens=1) for i in range(3 * FEWEST_ROWS)]
    results = engine(folder).generate(requests, lambda index, completions: later if index == 0 else [])
    assert len(results) == len(requests)


def test_the_canary_finds_weights_that_are_not_the_trainers(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    changed_model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in changed_model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    changed_model.save_pretrained(tmp_path)

    def canary(trainer_folder: Path) -> Canary:
        def score(pairs: object) -> list[list[float]]:
            rows = []
            for prompt, answer in pairs:  # type: ignore[attr-defined]
                logits = torch.tensor(logits_of(trainer_folder, prompt, answer))
                rows.append(logits.log_softmax(-1)[range(len(answer)), answer.tolist()].tolist())
            return rows

        return Canary([np.array([1, 2, 3]), np.array([4])], score)

    ours = engine(folder)
    assert ours.load(tmp_path, 1, canary(tmp_path)).canary_gap < 1e-4
    assert (ours.version, ours.tokens) == (1, 0)
    with pytest.raises(EngineError, match="differ from the trainer's"):
        ours.load(tmp_path, 2, canary(folder))


@pytest.mark.parametrize("context_length", [2, 8, 9, 10])
def test_an_engine_with_a_short_context_starts_and_samples(folder: Path, context_length: int) -> None:
    launch = EngineLaunch(folder, folder, seed=0, context_length=context_length)
    completions = start_engine(InProcessSettings(), launch).generate([request([1], max_tokens=1)])
    assert [len(completion.token_ids) for completion in completions[0]] == [1]


def test_padding_never_exceeds_the_positions_of_the_model(tmp_path: Path) -> None:
    """GPT-2 learns a vector for each of its 100 positions, and 98 tokens are padded to 128."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = character_tokenizer(ALPHABET, 100)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=100, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    launch = EngineLaunch(tmp_path, tmp_path, seed=0, context_length=100, end_ids=())
    sampler = start_engine(InProcessSettings(), launch)
    [[answer]] = sampler.generate([request([1 + token % 9 for token in range(98)], max_tokens=2)])
    assert len(answer.token_ids) == 2


def test_a_prompt_that_does_not_fit_is_refused_and_a_closed_engine_samples_no_further(folder: Path) -> None:
    ours = engine(folder)
    with pytest.raises(ValueError, match="context_length is 128"):
        ours.generate([request([1] * 100, max_tokens=29)])
    ours.close()
    with pytest.raises(EngineError, match="closed"):
        ours.generate([request([1])])
