"""Training on answers with threads.

These tests promise:

* Each sampled part is trained after exactly the text that its call saw.
* The update is the same in every layout and cut, with every objective.
* A tree runs each shared prefix once, and stays within the budget of tokens.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.tiny_trainer import (
    Call,
    assert_close,
    one_rank,
    paired_episodes,
    plain_step,
    threaded_episodes,
    tiny_model,
    trained,
)
from tests.trainer.test_update_layouts import OBJECTIVES
from tests.trainer.update_program import build_objective
from treetune.credit.gae import Gae
from treetune.trainer.base import Trainer
from treetune.trainer.batches import micro_batches
from treetune.trainer.tokens import Sequences

LAYOUTS = ("padded", "packed", "tree")
TEMPERATURE = 0.8
CHANGED = {
    # |log ρ| has a corner at ρ = 1, where all tokens begin: rounding decides the sign of its gradient there.
    "kl_cov": {"penalty": 1e-6},
    "gspo": {"kl_coef": 0.02},
    # Sums over hundreds of tokens are rounded, and a narrow band makes that many times larger.
    "dpo_positive": {"penalty_band": 10.0},
}
DIFFERENT = {"train/computed_tokens", "preference/accuracy"}
"""Metrics that may differ: in the first step the policy is its reference, and rounding decides which of them
is above the other."""


def assert_same(first, second) -> None:
    assert_close(first[0], second[0])
    assert first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        if name not in DIFFERENT:
            assert second[1][name] == pytest.approx(value, abs=2e-5), name


def call_logprobs(model, call: Call) -> torch.Tensor:
    """Returns the log-probs of the call's tokens, from a forward pass of its own."""
    logits = model(torch.tensor([call.context + call.token_ids])).logits[0] / TEMPERATURE
    chosen = logits.log_softmax(-1)[len(call.context) - 1 : -1]
    return chosen.gather(1, torch.tensor(call.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_step_equals_a_plain_loop_over_calls(layout, aggregation):
    """The plain loop has a forward pass for each call, the loss written out again, and AdamW."""
    episodes_and_calls = threaded_episodes()
    trainer, metrics = trained(
        build_objective("ppo", aggregation=aggregation),
        [episode for episode, _ in episodes_and_calls],
        layout=layout,
        tokens_per_micro_batch=700,
    )
    model = tiny_model()
    counts = [sum(episode.trained) for episode, _ in episodes_and_calls]
    loss = torch.zeros(())
    for (episode, calls), count in zip(episodes_and_calls, counts, strict=True):
        weight = 1 / sum(counts) if aggregation == "token" else 1 / (len(counts) * count)
        begin = 0
        for call in calls:
            end = begin + len(call.token_ids)
            if call.trained:
                logprobs = call_logprobs(model, call)
                ratio = (logprobs - logprobs.detach()).exp()
                loss = loss - weight * (torch.tensor(episode.advantages[begin:end]) * ratio).sum()
            begin = end
    norm = plain_step(model, loss)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm, abs=1e-5)
    assert_close(model, trainer)


@pytest.mark.parametrize("objective", ["ppo", "gspo"])
def test_neither_layout_nor_cut_changes_an_update_from_threads(objective):
    """This includes objectives that need whole answers, one of which has 52 rows."""
    rows = [episode for episode, _ in threaded_episodes()]
    results = [
        trained(
            build_objective(objective),
            rows,
            minibatch_size=5,
            epochs=2,
            layout=layout,
            tokens_per_micro_batch=tokens,
        )
        for layout in LAYOUTS
        for tokens in (100_000, 300)
    ]
    assert results[0][1]["train/steps"] == 6, "12 answers in minibatches of 5, twice"
    for result in results[1:]:
        assert_same(results[0], result)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_tree_makes_the_same_update_as_rows_with_every_objective(name):
    """There are a reference, several steps, so that log-probs become old, and answers that share prefixes."""
    objective = build_objective(**OBJECTIVES[name] | CHANGED.get(name, {}))
    rows = [
        dataclasses.replace(episode, score=float(i % 3 == 0))
        for i, (episode, _) in enumerate(threaded_episodes(8))
    ]
    if objective.needs_pairs:
        rows = paired_episodes(pairs=4, of=rows)
    settings = {"minibatch_size": 4, "tokens_per_micro_batch": 500}
    assert_same(*(trained(objective, rows, layout=layout, **settings) for layout in ("padded", "tree")))


def test_a_sequence_has_a_row_for_each_part_that_one_call_sampled():
    episodes_and_calls = threaded_episodes()
    sequences = Sequences.of([episode for episode, _ in episodes_and_calls])
    for number, (_, calls) in enumerate(episodes_and_calls):
        rows = [sequences.rows[i] for i in sequences.rows_of((number,))]
        expected = [call for call in calls if call.trained]
        assert [tuple(row.token_ids.tolist()) for row in rows] == [
            call.context + call.token_ids for call in expected
        ]
        assert [row.predicting.tolist() for row in rows] == [
            list(range(len(call.context) - 1, len(call.context) + len(call.token_ids) - 1))
            for call in expected
        ]
    assert len(sequences.rows_of((1,))) >= 46, "the answer with 50 threads, some of which aren't trained"


def test_stretches_that_leave_out_tokens_are_refused():
    episode, _ = threaded_episodes(1)[0]
    cut = dataclasses.replace(episode, stretches=episode.stretches[:-1])
    with pytest.raises(ValueError, match=f"episode {episode.trajectory} has stretches that end at"):
        Sequences.of([cut])


def test_a_critic_is_refused_for_answers_with_threads():
    rows = [episode for episode, _ in threaded_episodes(4)]
    with pytest.raises(ValueError, match="has threads, and a critic needs"):
        trained(rows=rows, credit=Gae())


def test_a_tree_computes_shared_prefixes_once():
    episodes_and_calls = threaded_episodes()
    rows = [episode for episode, _ in episodes_and_calls]
    computed = {}
    for layout in LAYOUTS:
        settings = {"layout": layout, "minibatch_size": 12, "epochs": 2, "tokens_per_micro_batch": 100_000}
        _, metrics = trained(rows=rows, **settings)
        computed[layout] = metrics["train/computed_tokens"]
    token_rows = [
        call.context + call.token_ids for _, calls in episodes_and_calls for call in calls if call.trained
    ]
    assert computed["padded"] == computed["packed"] == 2 * sum(map(len, token_rows))
    beginnings = {ids[:end] for ids in token_rows for end in range(1, len(ids) + 1)}
    assert computed["tree"] == 2 * len(beginnings)


@pytest.mark.parametrize(("keep_units", "budget"), [(True, 300), (False, 300), (False, 10_000)])
def test_trees_stay_within_the_budget_except_for_units_that_must_not_be_cut(keep_units, budget):
    sequences = Sequences.of([episode for episode, _ in threaded_episodes()])
    settings = Trainer(
        objective=build_objective("ppo"), learning_rate=1e-3, layout="tree", tokens_per_micro_batch=budget
    )
    units = [sequences.rows_of((i,)) for i in range(len(sequences))]
    batches = list(micro_batches(sequences, units, settings, one_rank(), keep_units=keep_units))
    assert sorted(torch.cat([batch.flat_index_N for batch in batches]).tolist()) == list(
        range(sequences.n_tokens)
    )
    beyond = [batch for batch in batches if batch.inputs.input_ids_BT.numel() > budget]
    if keep_units:
        [large_batch] = beyond
        assert large_batch.trained_tokens == (sequences.starts[2] - sequences.starts[1],), (
            "the one with 50 threads"
        )
    else:
        assert not beyond
    if budget == 10_000:
        assert len(batches) == 1, "and trees run together that fit"


def test_ranks_that_share_a_sequence_refuse_the_tree_layout():
    with pytest.raises(
        ValueError, match="sequence_parallel_size is 2, and ranks can't share the tokens of layout 'tree'"
    ):
        Trainer(objective=build_objective("ppo"), learning_rate=1e-3, layout="tree", sequence_parallel_size=2)
