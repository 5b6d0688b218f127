"""What is measured on: the quickstart's configuration or another, and models to start from."""

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
"""Of 100 steps each: enough to write answers of the right form, and as long as a trained model's."""

TAIL_CONTEXT = 512
TAIL_PROMPT = 16
"""Tokens that the prompts of the long-tailed setting never exceed."""
TAIL_MEAN = 64


@dataclass(frozen=True)
class Setting:
    """Where to work, what to start from (``none`` for nothing), and how often to repeat."""

    workspace: Path
    checkpoint: Path
    repeats: int
    problems: int
    samples: int
    episodes: Path | None = None
    """Stored ones to train on, for parts that take any."""
    configs: Path = QUICKSTART
    """The folder with the configurations."""

    @property
    def is_quickstart(self) -> bool:
        return self.configs == QUICKSTART

    def has(self, name: str) -> bool:
        """Returns whether there is a configuration of this name."""
        return self.configuration_file(name).is_file()

    def configuration_file(self, name: str) -> Path:
        return self.configs / f"{name}.jsonnet"

    def vllm_servers(self, replicas: int, gpu_memory_utilization: float) -> str:
        """Returns a Jsonnet object that has the policy sampled by vLLM, with so many servers."""
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
        """Returns a configuration in the workspace, with the Jsonnet object `more` appended."""
        import treetune.parts  # noqa: F401  (registers them)
        from treetune.config.build import build
        from treetune.config.explain import Explanation
        from treetune.config.jsonnet import load
        from treetune.runtime.base import Runtime

        changes: dict[str, Any] = {"directory": str(self.workspace), "evaluation": {"sets": []}}
        texts = [more]
        if name != "sft":
            changes["problems_per_iteration"] = self.problems
            model = {"type": "pretrained", "name_or_path": str(self.checkpoint)}
            # A chat model keeps its chat template.
            operator = ":" if self.is_quickstart else "+:"
            texts.insert(
                0, f'{{"model"{operator} {json.dumps(model)}, "rollout"+: {{"samples": {self.samples}}}}}'
            )
            # All answers of an iteration are one minibatch, as for the peers.
            texts.insert(1, '{"trainer"+: {"minibatch_size": null}}')
        config = load(
            [str(self.configuration_file(name))],
            [json.dumps(changes), *texts],
            environment_keys=(),
        )
        root = build(Runtime, config.data, Explanation(config))
        assert isinstance(root, PolicyIteration)
        return root


def quick_start_model(workspace: Path) -> Path:
    """A start model after a few hundred steps of the quickstart's supervised training: its policy folder."""
    overrides = {
        "directory": str(workspace),
        "iterations": SFT_ITERATIONS,
        "evaluation": {"sets": []},
        "checkpoints": {"every": SFT_ITERATIONS},
    }
    command = [sys.executable, str(ROOT / "src/treetune/main.py"), "run_iteration_loop"]
    command += [
        "--configs",
        str(ROOT / "configs/quickstart/sft.jsonnet"),
        "--override",
        json.dumps(overrides),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("APP_")}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment, timeout=3600)
    return workspace / f"quickstart/sft/checkpoints/{SFT_ITERATIONS:04d}/policy"


def long_tailed_model(config: PolicyIteration, folder: Path) -> Path:
    """A tiny model whose answers have geometric lengths, of `TAIL_MEAN` tokens on average.

    Its weights are random but for one direction of the embeddings, which all tokens share and from
    which the head reads a constant: the end token's, so that it has the same probability
    everywhere. Padding is never sampled. Nothing that it says is right, so no update moves it.
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
        probe = torch.arange(len(tokenizer))[None]
        constant = model.base_model(input_ids=probe).last_hidden_state[0, :, 0].mean()
        head[:, 0] = 0.0
        others = len(tokenizer) - 2
        head[tokenizer.eos_token_id, 0] = torch.log(torch.tensor(others / (TAIL_MEAN - 1))) / constant
        head[tokenizer.pad_token_id, 0] = -30.0 / constant
    write_policy(model.state_dict(), model.config, tokenizer, folder)
    return folder
