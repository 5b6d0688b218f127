"""A tiny model, random episodes, and the launch of several ranks, for tests of the trainer."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from treetune.vocabulary import Branch, Episode, SegmentSpan

VOCABULARY = 24
DEADLINE_S = 900


def tiny_model(seed: int = 0, tied: bool = False, kv_heads: int = 1, vocabulary: int = VOCABULARY):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def episodes(count: int = 16, seed: int = 0, with_injected: bool = True) -> list[Episode]:
    """Returns episodes of all lengths with random advantages; some have injected, untrained tokens."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 6)))
        response = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20)))
        trained = [not with_injected or draw.random() < 0.8 for _ in response]
        trained[-1] = True
        rows.append(
            Episode(
                prompt_ids=prompt,
                response_ids=response,
                trained=tuple(trained),
                reward=float(draw.random() < 0.5),
                group=f"p{i // 4}",
                trajectory=f"p{i // 4}#{i % 4}",
                policy_version=0,
                advantages=tuple(draw.gauss(0, 1) for _ in response),
                behaviour_logprobs=tuple(-3 + 0.1 * draw.random() for _ in response),
            )
        )
    return rows


def paired_episodes(pairs: int = 12, seed: int = 0, of: Sequence[Episode] | None = None) -> list[Episode]:
    """Returns pairs of the episodes above, or of others; some answers are in more than one pair."""
    draw = random.Random(seed)
    rows = episodes(16, seed) if of is None else list(of)
    pairs_of_rows = [draw.sample(rows, 2) for _ in range(pairs)]
    rows_of_pairs = []
    for number, (better, worse) in enumerate(pairs_of_rows):
        rows_of_pairs.append(dataclasses.replace(better, pair=number, chosen=True))
        rows_of_pairs.append(dataclasses.replace(worse, pair=number, chosen=False))
    return rows_of_pairs


def with_teacher_prompts(rows: Sequence[Episode]) -> list[Episode]:
    """Returns the rows with longer prompts for a teacher; every third row has none."""
    result = []
    for number, row in enumerate(rows):
        prompt = (7, number % 5, *row.prompt_ids.tolist(), 3)
        result.append(row if number % 3 == 2 else dataclasses.replace(row, teacher_prompt_ids=prompt))
    return result


@dataclasses.dataclass(frozen=True)
class Call:
    """Tokens that were written in one go, and all tokens before them."""

    context: tuple[int, ...]
    token_ids: tuple[int, ...]
    trained: bool
    branch: Branch


def threaded_episodes(count: int = 12, seed: int = 0) -> list[tuple[Episode, list[Call]]]:
    """Returns episodes whose answers fork and join, some in threads of threads, and the calls of each.

    The four answers to a problem begin alike. The second answer has 50 threads, and the third none.
    """
    draw = random.Random(seed)
    episodes_and_calls = []
    prompts = [tuple(draw.randrange(VOCABULARY) for _ in range(3)) for _ in range(-(-count // 4))]
    for i in range(count):
        prompt = prompts[i // 4]
        calls: list[Call] = []
        threads = 50 if i == 1 else None
        _write(draw, calls, prompt, (), depth=0 if i == 2 else 1 if threads else 2, threads=threads)
        response = tuple(token for call in calls for token in call.token_ids)
        ends = list(itertools.accumulate(len(call.token_ids) for call in calls))
        episode = Episode(
            prompt_ids=prompt,
            response_ids=response,
            trained=tuple(call.trained for call in calls for _ in call.token_ids),
            reward=float(draw.random() < 0.5),
            group=f"p{i // 4}",
            trajectory=f"p{i // 4}#{i % 4}",
            policy_version=0,
            advantages=tuple(draw.gauss(0, 1) for _ in response),
            behaviour_logprobs=tuple(-3 + 0.1 * draw.random() for _ in response),
            stretches=tuple(SegmentSpan(end, call.branch) for end, call in zip(ends, calls, strict=True))
            if i != 2
            else (),
        )
        episodes_and_calls.append((episode, calls))
    return episodes_and_calls


def _write(
    draw: random.Random,
    calls: list[Call],
    context: tuple[int, ...],
    branch: Branch,
    depth: int,
    threads: int | None = None,
) -> tuple[int, ...]:
    """Writes text with blocks of threads in between as calls, and returns all of it in one line."""
    joined: tuple[int, ...] = ()

    def say(token_ids: tuple[int, ...], trained: bool) -> None:
        nonlocal joined
        calls.append(Call(context + joined, token_ids, trained, branch))
        joined += token_ids

    def text() -> tuple[int, ...]:
        return tuple(draw.randrange(2) for _ in range(draw.randint(1, 4)))

    for block in range(0 if not depth else 1 if threads else draw.randint(0, 2) if branch else 1):
        say(text(), True)
        say((20,), False)
        before = context + joined
        for thread in range(threads or draw.randint(2, 3)):
            thread_branch = (*branch, (block, thread))
            header = (21, 2 + thread % 16)
            calls.append(Call(before, header, False, thread_branch))
            joined += header + _write(draw, calls, before + header, thread_branch, depth - 1)
        say((22,), False)
    say(text(), draw.random() < 0.9 or not branch)
    return joined


def dense_mask(subtree_last_T):
    """Returns which node of a prefix tree (row) sees which other one (column), pair by pair."""
    import torch

    places_T = torch.arange(len(subtree_last_T))
    return (places_T[:, None] <= subtree_last_T) & (places_T <= places_T[:, None])


def critic_of(credit) -> dict:
    """Returns a trainer's arguments for a credit that leaves its advantages to the trainer."""
    from treetune.credit.reward_models import RewardModelCredit

    if credit is None:
        return {}
    if isinstance(credit, RewardModelCredit):
        return {
            "reward_model": credit.reward_model,
            "from_implicit_rewards": credit.from_implicit_rewards,
        }
    return {"critic": credit.critic, "from_values": credit.from_values}


def one_rank():
    import torch

    from treetune.trainer.ranks import Ranks

    torch.use_deterministic_algorithms(False)
    return Ranks.join(deadline_s=60)


def policy_trainer(
    objective=None, credit=None, load=tiny_model, iterations=1, temperature=0.8, nucleus=None, restarts=False,
    load_reference=None, load_reward_model=None, **settings,
):  # fmt: skip
    """Returns a trainer of the tiny model on one rank, with the policy gradient or another objective."""
    import torch

    from treetune.objectives.policy_gradient import ClippedPolicyGradient
    from treetune.trainer.base import Trainer
    from treetune.trainer.core import PolicyTrainer

    dtype = getattr(torch, settings.get("precision", "float32"))
    # Adam divides by eps where a gradient is 0 up to rounding.
    base = {"learning_rate": 1e-3, "adam_eps": 1e-4}
    return PolicyTrainer(
        Trainer(objective=objective or ClippedPolicyGradient(), **base | settings),
        lambda: load().to(dtype),
        ranks=one_rank(),
        seed=0,
        temperature=temperature,
        iterations=iterations,
        nucleus=nucleus,
        restarts=restarts,
        load_reference=load_reference,
        load_reward_model=load_reward_model,
        **critic_of(credit),
    )


def trained(objective=None, rows=None, **settings):
    """Returns a trainer after its first iteration, and the metrics of that iteration."""
    trainer = policy_trainer(objective, **settings)
    return trainer, trainer.train(0, rows or episodes(16))


def weights_of(trainer_or_model) -> dict:
    """Returns a copy of the weights of a trainer or a model, which further training does not change."""
    parameters = (
        dict(trainer_or_model.named_parameters()) if hasattr(trainer_or_model, "named_parameters") else None
    )
    weights = trainer_or_model.weights() if parameters is None else parameters
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def assert_close(first, second, atol: float = 1e-6) -> None:
    """Asserts that the weights of two trainers, models or dictionaries differ by no more than rounding."""
    first, second = (side if isinstance(side, dict) else weights_of(side) for side in (first, second))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.float() - second[name].float()).abs().max() <= atol, name


def are_same(first, second) -> bool:
    """Tells whether the weights of two trainers, models or dictionaries are the same bits."""
    first, second = (side if isinstance(side, dict) else weights_of(side) for side in (first, second))
    return first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)


def row_logprobs(model, row: Episode, temperature: float = 0.8):
    """Returns the log-probs of the whole vocabulary at each token of the answer, and those of its own tokens.

    They are from one plain forward pass.
    """
    import torch

    logits = model(torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])).logits
    all_TV = (logits[0, len(row.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    return all_TV, all_TV.gather(1, torch.tensor(row.response_ids.tolist())[:, None])[:, 0]


def assert_is(plain_loss, loss, logprobs_N) -> None:
    """Asserts that a loss is a plain function of floats in value and gradient, by finite differences."""
    import pytest

    plain, step = logprobs_N.tolist(), 1e-6
    assert float(loss.detach()) == pytest.approx(plain_loss(plain), abs=1e-9)
    loss.backward()
    for i, value in enumerate(plain):
        up, down = plain.copy(), plain.copy()
        up[i], down[i] = value + step, value - step
        slope = (plain_loss(up) - plain_loss(down)) / (2 * step)
        assert float(logprobs_N.grad[i]) == pytest.approx(slope, abs=1e-5)


def plain_step(model, loss, optimiser=None):
    """Takes one step of AdamW with a bounded norm, as every trainer here does, and returns the norm."""
    import torch

    optimiser = optimiser or torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    optimiser.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(
        [weight for group in optimiser.param_groups for weight in group["params"]], 1.0
    )
    optimiser.step()
    return float(norm)


def launch(program: Path, arguments: Sequence[str], ranks: int) -> None:
    """Runs a Python program on several ranks with DeepSpeed's node launcher."""
    of_others = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in of_others}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
    }
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [*range(ranks)]}).encode()).decode()
    command = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--no_local_rank"]
    command += ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    process = subprocess.run(
        [*command, str(program), *arguments],
        env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
