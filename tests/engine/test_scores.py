"""Scores: the log-probs of the tokens of a text, which `await engine.score(...)` returns.

Promises that these tests hold:

* Scores are the trainer's log-probs, whatever shares the batch (for a server see test_vllm_server.py).
* A text that can't be scored ends in one message.
* Scores are stored in the journal and read from it; a server that dies meanwhile is replaced.
* Scored tokens aren't counted as sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.test_in_process import engine as in_process_engine
from tests.engine.test_in_process import folder  # noqa: F401  (a fixture)
from tests.support.fake_engine import FakeEngine
from tests.support.stubs import Stub
from treetune.engine import in_process
from treetune.engine.base import Engine
from treetune.engine.journal import JournaledEngine
from treetune.engine.requests import Completion, Request, SamplingParams, ScoreRequest
from treetune.exceptions import EngineError
from treetune.models.logprobs import PolicyModule
from treetune.objectives.policy_gradient import PolicyGradient
from treetune.trainer.base import Trainer
from treetune.trainer.ranks import Ranks
from treetune.trainer.scoring import Scorer
from treetune.vocabulary import Column

Texts = Sequence[tuple[Sequence[int], Sequence[int]]]


def scores_of(engine: Engine, texts: Texts) -> list[Column]:
    async def score_all() -> list[Column]:
        scores = [engine.score(np.array(prompt), np.array(text)) for prompt, text in texts]
        return await asyncio.gather(*scores)

    return engine.run(score_all())


def various_texts(count: int) -> Texts:
    draw = np.random.default_rng(3)
    texts = []
    for _ in range(count):
        prompt, text = draw.integers(1, 12, draw.integers(1, 60)), draw.integers(0, 12, draw.integers(1, 50))
        texts.append((prompt.tolist(), text.tolist()))
    return texts


def test_scores_are_the_log_probs_of_the_trainer(folder: Path) -> None:  # noqa: F811
    from transformers import AutoModelForCausalLM

    policy = PolicyModule(AutoModelForCausalLM.from_pretrained(folder).eval())
    trainer = Trainer(objective=PolicyGradient(), learning_rate=1e-5)
    scorer = Scorer(trainer, Ranks(0, 1, torch.device("cpu"), 60.0), temperature=1.0)
    texts = various_texts(40)
    of_trainer = scorer.answer_logprobs(policy, [(np.array(p), np.array(t)) for p, t in texts], 1.0)
    of_engine = scores_of(in_process_engine(folder), texts)
    for ours, theirs in zip(of_engine, of_trainer, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_a_score_has_the_same_bits_whatever_shares_its_batch_and_while_others_sample(
    folder: Path,  # noqa: F811
) -> None:
    texts = various_texts(12)
    together = scores_of(in_process_engine(folder), texts)
    for text, scores in zip(texts, together, strict=True):
        [alone] = scores_of(in_process_engine(folder), [text])
        assert alone.tolist() == scores.tolist()
    engine = in_process_engine(folder)
    sampled = Request(np.array([1, 2]), 5, 3, SamplingParams(max_tokens=9))

    async def sample_and_score() -> tuple[list[Completion], Column]:
        prompt, text = (np.array(ids) for ids in texts[0])
        samples, scores = await asyncio.gather(engine.sample(sampled), engine.score(prompt, text))
        return samples, scores

    samples, scores = engine.run(sample_and_score())
    assert samples == in_process_engine(folder).generate([sampled])[0]
    assert scores.tolist() == together[0].tolist()
    assert engine.tokens == sum(len(sample.token_ids) for sample in samples)


def test_scoring_never_has_more_logits_than_its_bound(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = various_texts(12)
    expected = scores_of(in_process_engine(folder), texts)
    monkeypatch.setattr(in_process, "MOST_LOGITS", 12 * 20)  # of 20 positions: the vocabulary has 12 tokens
    engine = in_process_engine(folder)
    sizes: list[int] = []
    head = engine._model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: sizes.append(logits.numel()))
    for chunked, whole in zip(scores_of(engine, texts), expected, strict=True):
        np.testing.assert_allclose(chunked, whole, rtol=0, atol=1e-6)
    assert max(sizes) == 12 * 20


@pytest.mark.parametrize(
    ("prompt", "text", "message"),
    [
        ([1] * 100, [2] * 28, "100 tokens, 28 tokens to score and one after them need 129 tokens.*is 128"),
        ([1], [2, 500], "scores the token 500, and the model has the tokens 0 to 1"),
        ([1], [-3], "scores the token -3: token ids are 0 or larger"),
        ([1], [], "no tokens to score"),
        ([], [1], "an empty prompt"),
    ],
)
def test_a_text_that_cannot_be_scored_is_refused_in_one_message(
    folder: Path,  # noqa: F811
    prompt: list[int],
    text: list[int],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        scores_of(in_process_engine(folder), [(prompt, text)])


def test_an_engine_that_cannot_score_says_so() -> None:
    class Old(FakeEngine):
        scores = False

    engine = Old(lambda ids, version: [0.5, 0.5], 0)
    with pytest.raises(ValueError, match="the engine Old can't score given tokens: choose the engine 'vllm'"):
        scores_of(engine, [([1], [1])])


def fake() -> FakeEngine:
    return FakeEngine(lambda ids, version: [0.1 * version, 0.9 - 0.1 * version, 0.1], 0)


def test_scores_are_found_in_a_journal_and_not_taken_for_samples_or_for_other_texts(tmp_path: Path) -> None:
    first = JournaledEngine(fake(), tmp_path / "journal.jsonl")
    texts = [([1], [1, 2]), ([1], [1]), ([1, 1], [2])]
    scores = scores_of(first, texts)
    np.testing.assert_allclose(scores[0], np.log([0.9, 0.1]), rtol=1e-6)
    assert first.sampled.total() == 0
    inner = fake()
    second = JournaledEngine(inner, tmp_path / "journal.jsonl")
    sampled = Request([1], 0, 1, SamplingParams(max_tokens=1))
    assert len(second.generate([sampled])[0]) == 1
    assert [of_text.tolist() for of_text in scores_of(second, texts)] == [s.tolist() for s in scores]
    assert inner.asked == [sampled]


def test_a_server_that_dies_while_it_scores_is_replaced(stub: Stub) -> None:
    engine = stub.start()
    stub.order("dies-while-scoring")
    texts = [([1, 2], [3, 4]), ([1], [8])]
    assert [of_text.tolist() for of_text in scores_of(engine, texts)] == [[-0.375, -0.5], [-1.0]]
    assert (engine.restarts, engine.tokens) == (1, 0)


def test_a_server_that_refuses_a_text_ends_the_work_and_an_incomplete_answer_is_a_failure(stub: Stub) -> None:
    engine = stub.start()
    stub.order("forgets-a-score")
    assert scores_of(engine, [([1], [8, 16])])[0].tolist() == [-1.0, -2.0]
    assert engine.restarts == 1
    stub.order("refuses-to-score")
    with pytest.raises(EngineError, match=r"refused /treetune/scores with HTTP 400.*no such token"):
        scores_of(engine, [([1], [8])])


def test_two_requests_are_equal_only_with_the_same_text() -> None:
    assert ScoreRequest([1], text_ids=[2]) == ScoreRequest([1], text_ids=[2])
    assert ScoreRequest([1], text_ids=[2]) != ScoreRequest([1], text_ids=[3])
    assert ScoreRequest([1], text_ids=[2]).all_ids.tolist() == [1, 2]
