"""Adapters, and a model as it comes from the hub, through whole iterations with a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

import treetune.parts  # noqa: F401  (registers them)
from tests.runs.shared_server import shared_server
from tests.support.chat_models import (
    CHATML,
    END,
    TURN_END,
    bpe_tokenizer,
    random_model,
    save_as_on_the_hub,
)
from tests.support.columns import plain
from tests.support.experiment_runs import CONFIG
from tests.support.small_run import answers_of, episodes_of, weights_of
from treetune.config.jsonnet import load as load_config
from treetune.models.chat import Chat
from treetune.models.lora import ADAPTER_WEIGHTS
from treetune.models.pretrained import PretrainedModel
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import ExperimentDirectory

pytestmark = [pytest.mark.server, pytest.mark.slow]


def trained(override: str, base: Path) -> tuple[PolicyIteration, ExperimentDirectory]:
    """The small experiment with these changes, by a server of its own."""
    with shared_server() as server:
        return server.train(load_config([str(CONFIG)], [override], environ={}), base)


LORA = """{
  iterations: 2,
  checkpoints: { every: 1, keep_every: 1 },
  engines+: { policy+: { max_concurrency: 64 } },
  credit: { type: 'group', std: false },
  trainer+: { lora: { rank: 4, alpha: 16, send: 'adapters' }, learning_rate: 1e-2, epochs: 1 },
}"""


def test_a_server_samples_from_adapters_as_the_trainer_trained_them(tmp_path: Path) -> None:
    experiment, directory = trained(LORA, tmp_path)
    rows = directory.read_metrics()
    assert [row["iteration"] for row in rows] == [0, 1]
    assert rows[0]["engine/canary_gap"] <= 1e-4 and rows[0]["engine/restarts"] == 0
    # The second iteration was sampled from the first one's adapters: stale ones would show here.
    assert rows[1]["engine/logprob_gap_max"] <= 1e-4
    assert rows[1]["train/kl"] > 1e-4, "the adapters changed nothing"

    before, whole = (load(weights_of(experiment, number)) for number in (1, 2))
    name = "model.layers.0.self_attn.q_proj"
    products = []
    for number in (1, 2):
        adapters = load_file(directory.checkpoint_folder(number) / "adapter" / ADAPTER_WEIGHTS)
        a, b = (adapters[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
        products.append(b @ a)
    moved = whole[f"{name}.weight"] - before[f"{name}.weight"]
    torch.testing.assert_close(moved, 4 * (products[1] - products[0]), atol=1e-6, rtol=0)
    assert torch.equal(whole["lm_head.weight"], before["lm_head.weight"])


STOP = "7"
FROM_THE_HUB = """{
  model: {
    type: 'pretrained', name_or_path: '%s', chat: { template_arguments: { enable_thinking: false } },
    added_tokens: ['<Thread>', '</Thread>'],
  },
  context_length: 128,
  engines+: { policy+: { max_concurrency: 64, start_timeout: 800 } },
  rollout+: { samples: 8, max_tokens: 48, stop: ['7'] },
  credit: { type: 'group' },
  trainer+: { epochs: 1 },
  iterations: 1,
  problems_per_iteration: 6,
  evaluation: { sets: [{ split: 'test', problems: 2 }] },
}"""


def test_a_chat_model_with_a_tied_head_and_tokens_of_ours_is_sampled_trained_and_written_out_again(
    tmp_path: Path,
) -> None:
    tokenizer = bpe_tokenizer()
    end, turn_end = tokenizer.convert_tokens_to_ids([END, TURN_END])
    model = random_model("qwen3", len(tokenizer), eos_token_id=end)
    folder = save_as_on_the_hub(tmp_path / "model", model, tokenizer, end_ids=[turn_end, end])
    experiment, directory = trained(FROM_THE_HUB % folder, tmp_path)

    source = PretrainedModel(
        name_or_path=str(folder),
        chat=Chat(template_arguments={"enable_thinking": False}),
        added_tokens=("<Thread>", "</Thread>"),
    )
    codec = source.codec(source.load_tokenizer(str))
    trajectories = answers_of(experiment, 0)
    assert len(trajectories) == 48
    ended = {"end": 0, "turn": 0, "stop string": 0, "cut": 0}
    for t in trajectories:
        assert plain(t.prompt_ids) == plain(codec.encode_prompt(t.problem.prompt))
        *before, last = t.response_ids
        assert not {end, turn_end} & set(before), "an answer went on behind its end"
        ended["end"] += last == end
        ended["turn"] += last == turn_end
        ended["stop string"] += STOP in t.text
        ended["cut"] += t.unfinished
        assert (t.finish_reason == "stop") == (last in (end, turn_end) or STOP in t.text)
        assert STOP not in codec.decode(before), "a stop string ends an answer where it appears"
    assert sum(ended.values()) == 48
    assert min(ended.values()) > 0, ended
    added = codec.encode("<Thread>")[0]
    assert added == len(tokenizer) and any(added in t.response_ids for t in trajectories)
    assert all(t.text.count("<Thread>") == plain(t.response_ids).count(added) for t in trajectories), "shown"
    assert trajectories[0].prompt_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")

    episodes = episodes_of(experiment, 0)
    assert [plain(e.response_ids) for e in episodes] == [plain(t.response_ids) for t in trajectories]
    assert all(all(e.trained) for e in episodes), "the token that ended an answer is trained as well"
    (row,) = directory.read_metrics()
    assert row["engine/canary_gap"] < 1e-4

    policy = directory.checkpoint_folder(1) / "policy"
    saved = PretrainedModel(name_or_path=str(policy), added_tokens=source.added_tokens)
    assert saved.load_tokenizer(str).chat_template == CHATML
    assert source.unlearned_tokens() == source.added_tokens and saved.unlearned_tokens() == ()
    assert saved.load_model(0, str).config.vocab_size == 320
    described = json.loads((policy / "generation_config.json").read_text())
    assert described["eos_token_id"] == [turn_end, end]
    assert described["temperature"] == 0.7, "the model's own way to be sampled"
    assert json.loads((policy / "config.json").read_text())["tie_word_embeddings"]
