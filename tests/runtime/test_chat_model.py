"""A model as it comes from the hub, through a whole iteration with a real server, and out again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.models.chat_models import (
    CHATML,
    END,
    TURN_END,
    bpe_tokenizer,
    random_model,
    save_as_on_the_hub,
)
from tests.runtime.faults import Experiment, _free_port
from treetune.episode_generators.storage import read_episodes, read_trajectories
from treetune.inference.launch import Launch
from treetune.inference.settings import VllmSettings
from treetune.models.chat import Chat
from treetune.models.sources import PretrainedModel

pytestmark = [pytest.mark.server, pytest.mark.slow]

STOP = "7"
SERVER_DEADLINE_S = 800.0

OVERRIDE = """{
  model: {
    type: 'pretrained', name_or_path: '%s', chat: { template_arguments: { enable_thinking: false } },
  },
  context_length: 128,
  engine+: { max_concurrency: 64, start_timeout: 800 },
  rollout+: { samples: 8, max_tokens: 48, stop: ['7'] },
  credit: { type: 'group' },
  trainer+: { epochs: 1 },
  iterations: 1,
  problems_per_iteration: 6,
  evaluation: { sets: [{ split: 'test', problems: 2 }] },
}"""


def test_a_chat_model_with_a_tied_head_is_sampled_trained_and_served_again(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    end, turn_end = tokenizer.convert_tokens_to_ids([END, TURN_END])
    model = random_model("qwen3", len(tokenizer), eos_token_id=end)
    folder = save_as_on_the_hub(tmp_path / "model", model, tokenizer, end_ids=[turn_end, end])
    experiment = Experiment(tmp_path, "chat")
    experiment.run("run_iteration_loop", OVERRIDE % folder)

    source = PretrainedModel(
        name_or_path=str(folder), chat=Chat(template_arguments={"enable_thinking": False})
    )
    codec = source.codec(source.load_tokenizer(str))
    trajectories = read_trajectories(experiment.directory.iteration(0) / "trajectories.arrow")
    assert len(trajectories) == 48
    ended = {"end": 0, "turn": 0, "stop string": 0, "cut": 0}
    for t in trajectories:
        assert t.prompt_ids == codec.encode_prompt(t.problem.prompt)
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
    assert trajectories[0].prompt_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")

    episodes = read_episodes(experiment.directory.iteration(0) / "episodes.arrow")
    assert [e.response_ids for e in episodes] == [t.response_ids for t in trajectories]
    assert all(all(e.trained) for e in episodes), "the token that ended an answer is trained as well"
    (row,) = experiment.directory.read_metrics()
    assert row["engine/canary_gap"] < 1e-4

    policy = experiment.directory.checkpoint(1) / "policy"
    assert PretrainedModel(name_or_path=str(policy)).load_tokenizer(str).chat_template == CHATML
    described = json.loads((policy / "generation_config.json").read_text())
    assert described["eos_token_id"] == [turn_end, end]
    assert described["temperature"] == 0.7, "the model's own way to be sampled"
    assert json.loads((policy / "config.json").read_text())["tie_word_embeddings"]

    prompt = trajectories[0].problem.prompt
    answer = ask_a_server(policy, prompt)
    assert answer["usage"]["prompt_tokens"] == len(codec.encode_prompt(prompt))
    reasons = {choice["stop_reason"] for choice in answer["choices"] if choice["finish_reason"] == "stop"}
    assert reasons == {None, turn_end}, "the tokenizer's end token, and the one of a turn"


def ask_a_server(policy: Path, prompt: str) -> dict[str, Any]:
    """What a plain vLLM server on these files answers to a chat of one message."""
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", str(policy), "--served-model-name", "policy"]
    command += ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "64", "--enforce-eager"]
    launch = Launch(VllmSettings(omp_threads=1), 128, 0, rank=0, world_size=1, device="cpu")
    scratch = Path(tempfile.mkdtemp(prefix="served-"))  # a socket's path must be short
    log = (policy.parent / "server.log").open("wb")
    server = subprocess.Popen(
        command, env=launch.environment(scratch), stdout=log, stderr=log, start_new_session=True
    )
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": prompt}],
        "chat_template_kwargs": {"enable_thinking": False},
        "n": 64,
        "max_tokens": 60,
        "temperature": 1.0,
        "top_k": -1,
        "seed": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        deadline = time.monotonic() + SERVER_DEADLINE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=SERVER_DEADLINE_S) as response:
                    return json.load(response)
            except ConnectionError as error:
                refused: Exception = error
            except urllib.error.HTTPError:
                raise
            except urllib.error.URLError as error:
                refused = error
            assert server.poll() is None, log_of(policy)
            assert time.monotonic() < deadline, f"{refused}: {log_of(policy)}"
            time.sleep(0.5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()
        shutil.rmtree(scratch, ignore_errors=True)


def log_of(policy: Path) -> str:
    return (policy.parent / "server.log").read_text(errors="replace")[-4000:]
