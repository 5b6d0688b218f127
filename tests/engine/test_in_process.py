"""The engine without a server, held against the model that it samples from."""

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
from treetune.engine.in_process import BLOCK, FEWEST_ROWS, InProcessEngine, _RowBatch, _Sample
from treetune.engine.requests import ANSWERS, CONTINUATIONS, Completion, Later, Request, SamplingParams
from treetune.engine.settings import InProcessSettings
from treetune.exceptions import EngineError
from treetune.models.tokenizer import character_tokenizer
from treetune.vocabulary import TokenIds

ALPHABET = "abcdefghij"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers that is sure of some tokens and unsure of others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    place = tmp_path_factory.mktemp("model")
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
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine(folder: Path, rows: int = 512, end_ids: tuple[int, ...] = (0,)) -> Engine:
    launch = EngineLaunch(folder, folder, seed=0, context_length=128, end_ids=end_ids)
    return start_engine(InProcessSettings(rows=rows), launch)


def request(prompt: list[int], seed: int = 0, n: int = 1, most: int = 20, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=most, **sampling)  # type: ignore[arg-type]
    return Request(np.array(prompt), seed, n, params)


def logprobs_of(folder: Path, prompt: TokenIds, answer: TokenIds) -> np.ndarray:
    """What the whole model says of each next token, [tokens, V]."""
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


def various(count: int) -> list[Request]:
    draw = np.random.default_rng(1)
    kinds = [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}, {"top_k": 3}]
    return [
        request(
            draw.integers(1, 12, draw.integers(1, 70)).tolist(),
            seed=100 * i,
            n=int(draw.integers(1, 5)),
            most=int(draw.integers(1, 40)),
            **kinds[i % len(kinds)],
        )
        for i in range(count)
    ]


def same_bits(one: list[Completion], other: list[Completion]) -> bool:
    return one == other and all(
        a.logprobs.tobytes() == b.logprobs.tobytes()  # type: ignore[union-attr]
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_sample_has_the_same_bits_whatever_shares_its_batch(folder: Path, rows: int) -> None:
    requests = various(24)
    known = engine(folder).generate(requests)
    order = np.random.default_rng(rows).permutation(len(requests)).tolist()
    again = engine(folder, rows).generate([requests[i] for i in order])
    assert all(same_bits(known[i], again[place]) for place, i in enumerate(order))


def test_samples_share_a_row_until_they_draw_different_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bit of a sample depends on it, and equal beginnings are computed once."""
    asked = request([3, 4, 5], n=40, most=12)
    together = engine(folder)
    assert isinstance(together, InProcessEngine)
    computed_rows: list[int] = []
    next_logits = _RowBatch.next_logits

    def count_rows(batch: _RowBatch) -> torch.Tensor:
        computed_rows.append(len(batch.rows))
        return next_logits(batch)  # type: ignore[no-any-return]

    monkeypatch.setattr(_RowBatch, "next_logits", count_rows)
    [samples] = together.generate([asked])
    expected_rows = []
    for length in range(max(len(sample.token_ids) for sample in samples)):
        longer = [sample for sample in samples if len(sample.token_ids) > length]
        expected_rows.append(len({tuple(sample.token_ids[:length].tolist()) for sample in longer}))
    assert computed_rows == expected_rows
    assert computed_rows[0] == 1 < FEWEST_ROWS < max(computed_rows)
    alone = [engine(folder).generate([request([3, 4, 5], seed=i, most=12)])[0] for i in range(40)]
    assert same_bits(samples, [completion for [completion] in alone])


@pytest.mark.parametrize("stored_bytes", [1 << 29, 0])
def test_prompts_that_begin_alike_share_passes_and_no_bit_depends_on_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stored_bytes: int
) -> None:
    """Continuations of an answer begin with its prompt of 70 tokens, two whole blocks and the rest."""
    monkeypatch.setattr(in_process, "STORED_BYTES", stored_bytes)
    prompt = np.random.default_rng(2).integers(1, 12, 70).tolist()
    continued = [request([*prompt, length + 1, 3], seed=length, most=5) for length in range(4)]
    alone = [engine(folder).generate([later])[0] for later in continued]
    shared = engine(folder)
    assert isinstance(shared, InProcessEngine)
    rows_of_passes: list[int] = []
    shared._model.base_model.register_forward_pre_hook(
        lambda _, inputs, settings: rows_of_passes.append(settings["input_ids"].numel()), with_kwargs=True
    )
    shared.generate([request(prompt, most=1)])
    before = [tokens for tokens in rows_of_passes if tokens >= BLOCK]
    rows_of_passes.clear()
    together = shared.generate(continued)
    after = [tokens for tokens in rows_of_passes if tokens >= BLOCK]
    assert all(same_bits(one, other) for one, other in zip(alone, together, strict=True))
    assert before == [BLOCK] * 3
    # The four continuations share two blocks, and differ in the third.
    assert after == ([4 * BLOCK] if stored_bytes else [BLOCK, BLOCK, 4 * BLOCK])


def test_new_weights_forget_the_blocks_of_the_earlier_ones(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = request(list(range(1, 12)) * 5, most=8)
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
    for asked, samples in zip(requests := various(12), engine(folder).generate(requests), strict=True):
        for one in samples:
            logits_TV = logprobs_of(folder, asked.prompt_ids, one.token_ids)
            sampling = asked.sampling
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
            chosen = probs_TV[range(len(one.token_ids)), one.token_ids.tolist()]
            assert one.logprobs == pytest.approx(chosen.log().numpy(), abs=2e-5)
            if sampling.temperature == 0:
                assert one.token_ids.tolist() == logits_TV.argmax(-1).tolist()


def test_tokens_come_as_often_as_the_model_says(folder: Path) -> None:
    asked = request([3, 4, 5], n=4000, most=1)
    [samples] = engine(folder, end_ids=()).generate([asked])
    chances = torch.tensor(logprobs_of(folder, asked.prompt_ids, samples[0].token_ids))[0].softmax(-1)
    counts = np.bincount([int(one.token_ids[0]) for one in samples], minlength=len(chances)) / 4000
    assert counts == pytest.approx(chances.numpy(), abs=0.03)


def test_a_sample_ends_at_an_end_token_a_stop_or_its_budget(folder: Path) -> None:
    likely = engine(folder, end_ids=()).generate([request([2, 3], n=1, most=30)])[0][0].token_ids.tolist()
    ended = engine(folder, end_ids=(likely[4],)).generate([request([2, 3], most=30)])[0][0]
    assert ended.token_ids.tolist() == likely[: likely.index(likely[4]) + 1]
    assert ended.finish_reason == "stop"
    stopped = engine(folder, end_ids=()).generate([request([2, 3], most=30, stop_ids=(likely[3],))])[0][0]
    assert stopped.token_ids.tolist() == likely[: likely.index(likely[3]) + 1]
    cut = engine(folder, end_ids=()).generate([request([2, 3], most=3)])[0][0]
    assert (cut.token_ids.tolist(), cut.finish_reason) == (likely[:3], "length")


def test_a_stop_string_ends_a_sample_and_stays_in_it(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    [samples] = engine(folder, end_ids=()).generate([request([2, 3], n=40, most=40, stop=("ab", "ba"))])
    texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in samples]
    ended = [text for text, one in zip(texts, samples, strict=True) if one.finish_reason == "stop"]
    assert ended
    assert all(text.endswith(("ab", "ba")) for text in ended)
    assert not any("ab" in text[:-1] or "ba" in text[:-1] for text in texts)


def test_what_follows_from_answers_is_numbered_on_and_goes_first(folder: Path) -> None:
    seen: list[int] = []
    promise: Future[None] = Future()
    promise.set_result(None)

    def on_result(index: int, completions: list[Completion]) -> list[Request | Later]:
        seen.append(index)
        if index == 0:
            return [request([7], most=1), Later(promise, lambda: [request([8], most=1)])]
        return []

    late = Request(np.array([9]), 0, 1, SamplingParams(max_tokens=1), priority=CONTINUATIONS)
    early = Request(np.array([1]), 0, 1, SamplingParams(max_tokens=1), priority=ANSWERS)
    results = engine(folder, rows=1).generate([late, early, request([2], most=1)][::-1], on_result)
    assert len(results) == 5
    assert seen[0] == 0
    assert seen.index(3) < seen.index(1) < seen.index(2), "the continuation waits for all answers"
    assert all(len(one) == 1 for one in results)


def test_a_promise_that_nothing_follows_from_ends_sampling_after_many_answers_at_once(folder: Path) -> None:
    promise: Future[None] = Future()
    later = [Later(promise, list)]
    threading.Timer(0.1, promise.set_result, [None]).start()
    many = [request([i % 9 + 1], seed=i, most=1) for i in range(3 * FEWEST_ROWS)]
    results = engine(folder).generate(many, lambda index, completions: later if index == 0 else [])
    assert len(results) == len(many)


def test_weights_that_were_not_taken_are_found_by_the_canary(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    other.save_pretrained(tmp_path)

    def canary(of: Path) -> Canary:
        def score(pairs: object) -> list[list[float]]:
            rows = []
            for prompt, answer in pairs:  # type: ignore[attr-defined]
                logits = torch.tensor(logprobs_of(of, prompt, answer))
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
    completions = start_engine(InProcessSettings(), launch).generate([request([1], most=1)])
    assert [len(completion.token_ids) for completion in completions[0]] == [1]


def test_padding_needs_no_positions_that_a_model_does_not_have(tmp_path: Path) -> None:
    """GPT-2 learns a vector for each of its 100 positions, and 98 tokens are padded to 128."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = character_tokenizer(ALPHABET, 100)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=100, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    launch = EngineLaunch(tmp_path, tmp_path, seed=0, context_length=100, end_ids=())
    sampler = start_engine(InProcessSettings(), launch)
    [[answer]] = sampler.generate([request([1 + token % 9 for token in range(98)], most=2)])
    assert len(answer.token_ids) == 2


def test_a_prompt_that_does_not_fit_is_refused_and_a_closed_engine_samples_no_further(folder: Path) -> None:
    ours = engine(folder)
    with pytest.raises(ValueError, match="context_length is 128"):
        ours.generate([request([1] * 100, most=29)])
    ours.close()
    with pytest.raises(EngineError, match="closed"):
        ours.generate([request([1])])
