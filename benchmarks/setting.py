"""The setting of a benchmark: the quickstart's configuration or another, and models to start from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.runtime.base import PolicyIteration

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs/quickstart"
SFT_ITERATIONS = 3
"""The iterations of the start model's supervised training, of 100 steps each. They are enough for answers of
the right form, which are as long as those of a trained model."""

TAIL_CONTEXT = 512
"""The context length of the long-tailed setting, in tokens."""
TAIL_PROMPT = 16
"""Most tokens of a prompt in this setting."""
TAIL_MEAN = 64
"""Mean number of tokens of an answer in this setting, if it were not cut off."""


@dataclass(frozen=True)
class Setting:
    """The options with which a part of the benchmark is run."""

    workspace: Path
    """A folder for files of the measurement."""
    checkpoint: Path
    """The folder of the start model; ``none`` for parts that need none."""
    repeats: int
    """The number of turns of each pair."""
    problems: int
    """The problems of an iteration."""
    samples: int
    """The answers to each problem."""
    episodes: Path | None = None
    """A file of episodes to train on, for the part that can read one; None: made-up ones."""
    configs: Path = QUICKSTART
    """The folder with the configurations."""

    @property
    def is_quickstart(self) -> bool:
        return self.configs == QUICKSTART

    def has_configuration(self, name: str) -> bool:
        return self.configuration_file(name).is_file()

    def configuration_file(self, name: str) -> Path:
        return self.configs / f"{name}.jsonnet"

    def vllm_servers(self, replicas: int, gpu_memory_utilization: float) -> str:
        """Returns a Jsonnet object with which `replicas` vLLM servers sample from the policy."""
        settings: dict[str, Any] = {
            "replicas": replicas,
            "gpu_memory_utilization": gpu_memory_utilization,
        }
        if self.is_quickstart:
            return f'{{"engines"+: {{"policy"+: {json.dumps(settings)}}}}}'
        # The configuration may have another engine. Chat prompts are long enough to share their cache.
        settings |= {"type": "vllm", "prefix_caching": True}
        return f'{{"engines"+: {{"policy": {json.dumps(settings)}}}}}'

    def configuration(self, name: str, more: str = "{}") -> PolicyIteration:
        """Returns the configuration `name`, changed to this setting, with `more` (Jsonnet) appended."""
        import treetune.parts  # noqa: F401  (registers all parts)
        from treetune.config.build import build
        from treetune.config.explain import Explanation
        from treetune.config.jsonnet import load
        from treetune.runtime.base import Runtime

        changes: dict[str, Any] = {"directory": str(self.workspace), "evaluation": {"sets": []}}
        texts = []
        if name != "sft":  # supervised training begins with a model of its own
            changes["problems_per_iteration"] = self.problems
            model = json.dumps({"type": "pretrained", "name_or_path": str(self.checkpoint)})
            # Another configuration's model may be a chat model: `+:` keeps its chat template.
            operator = ":" if self.is_quickstart else "+:"
            texts.append(f'{{"model"{operator} {model}, "rollout"+: {{"samples": {self.samples}}}}}')
            # All answers of an iteration are one minibatch, as for the peers.
            texts.append('{"trainer"+: {"minibatch_size": null}}')
        config = load(
            [str(self.configuration_file(name))],
            [json.dumps(changes), *texts, more],
            environment_keys=(),
        )
        root = build(Runtime, config.data, Explanation(config))
        assert isinstance(root, PolicyIteration)
        return root


def train_start_model(workspace: Path) -> Path:
    """Runs a few hundred steps of the quickstart's supervised training. Returns the folder of the model."""
    overrides = {
        "directory": str(workspace),
        "iterations": SFT_ITERATIONS,
        "evaluation": {"sets": []},
        "checkpoints": {"every": SFT_ITERATIONS},
    }
    command = [
        sys.executable,
        str(ROOT / "src/treetune/main.py"),
        "run_iteration_loop",
        "--configs",
        str(QUICKSTART / "sft.jsonnet"),
        "--override",
        json.dumps(overrides),
    ]
    # APP_* variables of the caller would change the configuration.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("APP_")}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment, timeout=3600)
    return workspace / f"quickstart/sft/checkpoints/{SFT_ITERATIONS:04d}/policy"


def write_long_tailed_model(config: PolicyIteration, folder: Path) -> Path:
    """Writes a tiny model whose answers have geometric lengths, of `TAIL_MEAN` tokens on average.

    Its weights are random, except for one coordinate of the embeddings, which is 1 for all tokens. From it,
    the head reads the logits of two tokens: the end token has the same probability everywhere, and padding is
    never sampled. No answer is correct, so no update changes the model.
    """
    import torch

    from treetune.models.policy_files import write_policy
    from treetune.models.sources import TinyModel

    source = TinyModel(context_length=TAIL_CONTEXT)
    tokenizer = source.load_tokenizer(config.task.alphabet)
    model = source.load_model(config.seed, config.task.alphabet)
    with torch.no_grad():
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embeddings[:, 0] = 1.0
        all_tokens = torch.arange(len(tokenizer))[None]
        hidden_states_BTH = model.base_model(input_ids=all_tokens).last_hidden_state
        # The value that the coordinate has before the head.
        constant = hidden_states_BTH[0, :, 0].mean()
        head[:, 0] = 0.0
        # The other tokens have logits near 0. So the end token has the probability 1 / TAIL_MEAN if
        # exp(logit) / (exp(logit) + other_tokens) = 1 / TAIL_MEAN.
        other_tokens = len(tokenizer) - 2
        end_logit = torch.log(torch.tensor(other_tokens / (TAIL_MEAN - 1)))
        head[tokenizer.eos_token_id, 0] = end_logit / constant
        head[tokenizer.pad_token_id, 0] = -30.0 / constant
    write_policy(model.state_dict(), model.config, tokenizer, folder)
    return folder
