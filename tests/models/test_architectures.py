"""Promises about model architectures:

* log-probs and gradients are those of the model's forward pass, and nothing is random in training;
* a row doesn't depend on its neighbours, or the model is refused by name with the remedy;
* the engine in the run's process samples from the same model, or refuses it by name;
* adapters are merged as they were trained, or refused;
* each check of the sweep can fail.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.support.architectures import (
    CHECKS,
    Case,
    check_in_process,
    check_lora,
    check_neighbours,
    check_packed,
    make,
    own_logprobs,
    policy_of,
    sweep,
    trained_logprobs,
)
from treetune.architectures import length_rule, longest_context, probe_rows
from treetune.engine.in_process import attach_attention, refuse_wrong_engine_logprobs
from treetune.models.dropout import turn_dropout_off
from treetune.models.lora import Lora

QUICK = ("log-probs", "dropout", "neighbours", "packed")


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "granite",
        "cohere",
        "gemma2",
        "falcon_h1",
        "gpt2",
        "gptj",
        "opt",
        "seed_oss",
        "starcoder2",
        "phimoe",
    ],
)
def test_an_architecture_is_computed_as_transformers_computes_it_or_refused_by_name(name: str) -> None:
    cells = sweep(name, QUICK)
    assert cells.keys() == set(QUICK), cells
    for column, cell in cells.items():
        assert cell.kind in ("right", "refused"), (column, cell)
        assert cell.kind == "right" or "ForCausalLM" in cell.note, (column, cell)
    assert cells["log-probs"].kind == cells["dropout"].kind == "right"


@pytest.mark.parametrize("name", ["lfm2", "opt", "bloom", "qwen3_5_text"])
def test_sequences_that_leak_into_each_other_are_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ValueError, match=r"trainer\.layout to 'padded'"):
        check_packed(make(name))


@pytest.mark.parametrize("name", ["phi3", "llama, dynamic NTK"])
def test_rows_whose_positions_depend_on_a_longer_neighbour_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="context_length to 32 or less"):
        check_neighbours(make(name))


@pytest.mark.parametrize("name", ["phi3", "llama, dynamic NTK"])
def test_long_rows_alone_and_short_rows_together_are_computed_where_positions_depend_on_the_length(
    name: str,
) -> None:
    case = make(name)
    policy = policy_of(case.fresh())
    alone = trained_logprobs(policy, [case.rows[0]], "padded")[0]
    assert torch.allclose(alone, own_logprobs(case.model, case.rows[0]), atol=1e-4)
    short = [case.rows[1], case.rows[1][:9]]
    for trained, row_T in zip(trained_logprobs(policy, short, "packed"), short, strict=True):
        assert torch.allclose(trained, own_logprobs(case.model, row_T), atol=1e-4)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "mixtral", "gpt2"])
def test_the_engine_in_the_process_samples_from_the_model(name: str) -> None:
    assert check_in_process(make(name)).kind == "right"


@pytest.mark.parametrize("name", ["lfm2", "opt", "mamba"])
def test_the_engine_in_the_process_refuses_what_its_cache_cannot_hold(name: str) -> None:
    with pytest.raises(ValueError, match=r"ForCausalLM.*engines\.policy to the type 'vllm'"):
        refuse_wrong_engine_logprobs(make(name).model, "cpu", 64)


def test_the_engine_in_the_process_notices_a_sliding_window_that_its_attention_ignores() -> None:
    model = make("mistral").model
    with pytest.raises(ValueError, match="differ from those of MistralForCausalLM"):
        refuse_wrong_engine_logprobs(model, "cpu", 64)
    attach_attention(model)
    refuse_wrong_engine_logprobs(model, "cpu", 64)


def test_dropout_is_off_in_training_and_stays_in_the_configuration() -> None:
    case = make("gptj")
    model = case.fresh()
    turn_dropout_off(model)
    assert model.config.attn_pdrop == case.model.config.attn_pdrop == 0.1
    assert model.transformer.h[0].attn.config.attn_pdrop == 0.0
    assert not any(part.p for part in model.modules() if isinstance(part, torch.nn.Dropout))


def test_models_without_dropout_keep_their_configuration() -> None:
    from tests.support.tiny_trainer import tiny_model

    model = tiny_model()
    turn_dropout_off(model)
    assert model.model.config is model.config


def test_gradients_are_those_of_the_models_own_logits() -> None:
    case = make("granite")
    row_T = case.rows[1]
    policy = policy_of(case.fresh())
    from treetune.models.logprobs import ModelInputs

    inputs = ModelInputs(row_T[None], torch.arange(len(row_T) - 1), row_T[1:])
    policy(inputs, 1.0)[0].sum().backward()
    plain = case.fresh()
    logprobs_TV = plain(input_ids=row_T[None]).logits[0, :-1].log_softmax(-1)
    logprobs_TV.gather(-1, row_T[1:, None]).sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name].grad, atol=1e-3), name


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            256,
        ),
        (
            {
                "max_position_embeddings": 256,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            256,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 128),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": None}}, 64),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                },
            },
            256,
        ),
        ({"vocab_size": 3}, None),
        ({"max_position_embeddings": -1}, None),
    ],
)
def test_the_context_is_what_the_model_was_made_for(config: dict[str, Any], longest: int | None) -> None:
    assert longest_context(config) == longest


def test_only_ropes_of_two_lengths_have_a_rule() -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    assert length_rule({"max_position_embeddings": 128, "rope_parameters": longrope}).limit == 32
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert length_rule({"max_position_embeddings": 128, "rope_scaling": dynamic}).limit == 128
    assert length_rule({"max_position_embeddings": 128, "rope_scaling": {"rope_type": "yarn"}}) is None
    assert length_rule({"max_position_embeddings": 128, "rope_scaling": None}) is None


def test_probes_leave_out_tokens_with_a_meaning() -> None:
    config = deepcopy(make("llama").model.config)
    config.image_token_id = 5
    config.eos_token_id = [1, 20]
    rows = probe_rows(config, (300, 20))
    assert not {0, 1, 5, 20} & {token for row in rows for token in row}
    assert rows[1] != rows[0][:20]


def test_every_column_of_the_sweep_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected log-probs are those of another model, and no column may call that right."""
    case = make("llama")
    other_case = make("granite")
    wrong = Case(case.name, case.model, case.tokenizer, case.rows)
    expected = own_logprobs
    monkeypatch.setattr(
        "tests.support.architectures.own_logprobs",
        lambda model, row_T: expected(other_case.model if model is case.model else model, row_T),
    )
    for column in ("log-probs", "neighbours", "packed", "checkpoint", "reload", "in-process"):
        assert CHECKS[column](wrong).kind == "WRONG", column


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("jamba", "dt_proj, which JambaForCausalLM never calls"),
        ("gpt2", "a Conv1D of GPT2LMHeadModel"),
        ("phimoe", "a PhimoeTopKRouter of PhimoeForCausalLM"),
    ],
)
def test_adapters_that_would_be_lost_or_merged_wrongly_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_lora(make(name))


def test_adapters_of_plain_linear_layers_are_merged_as_they_were_trained() -> None:
    assert check_lora(make("llama")).kind == "right"


def test_a_gap_beyond_rounding_is_wrong_also_where_the_model_is_sensitive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = check_lora(make("gemma4_text"))
    assert cell.kind == "right", cell
    merged = Lora.merged_weights

    def without_a_layer(lora: Lora, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(name for name in weights if ".lora_B." in name)
        return merged(lora, {**weights, name: 0 * weights[name]})

    monkeypatch.setattr(Lora, "merged_weights", without_a_layer)
    assert check_lora(make("gemma4_text")).kind == "WRONG"
