"""A training epoch on answers with threads: as prefix trees, and as one row for each sampled part."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.pairs import Measurement, in_turns, rates, timed
from benchmarks.setting import Setting
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.storage import read_episodes
from treetune.seeds import derived_random
from treetune.trainer.base import Trainer
from treetune.trainer.batches import Layout
from treetune.trainer.core import PolicyTrainer
from treetune.trainer.ranks import Ranks
from treetune.vocabulary import Branch, Episode, Stretch

LAYOUTS: dict[str, Layout] = {"tree": "tree", "rows": "padded"}
THREADS = 4
VOCABULARY = 64
PROMPT, TEXT, HEADER, THREAD = 24, 48, 4, 48
"""Tokens of a made-up answer's prompt, of its text before and behind the threads, of a thread's header
(injected), and of what is sampled behind it."""


def measure(setting: Setting) -> dict[str, Measurement]:
    """One optimiser step over all episodes, so that a problem's answers are in one minibatch."""
    episodes = (
        made_up_episodes(setting.problems, setting.samples, _vocabulary(setting))
        if setting.episodes is None
        else read_episodes(setting.episodes)
    )
    sampled = all(episode.advantages is not None for episode in episodes)
    objective = ClippedPolicyGradient() if sampled else MaximumLikelihood()
    ranks = Ranks.join(deadline_s=60)
    computed: dict[str, float] = {}

    def trainer(layout: Layout) -> PolicyTrainer:
        return PolicyTrainer(
            Trainer(objective=objective, learning_rate=1e-6, measure_kl=False, layout=layout),
            lambda: _model(setting, episodes),
            ranks=ranks,
            seed=0,
            temperature=1.0,
            iterations=1,
        )

    trainers = {name: trainer(layout) for name, layout in LAYOUTS.items()}
    norms: dict[str, list[float]] = {name: [] for name in LAYOUTS}

    def train(name: str, turn: int) -> None:
        metrics = trainers[name].train(turn, episodes)
        computed[name] = metrics["train/computed_tokens"]
        norms[name].append(metrics["train/grad_norm"])

    seconds = in_turns(
        {name: timed(lambda turn, name=name: train(name, turn)) for name in LAYOUTS}, setting.repeats
    )
    tokens = sum(int(episode.trained.sum()) for episode in episodes)
    threads = [_threads(episode) for episode in episodes]
    return {
        "threads/tree": Measurement(
            unit="trained tokens/s",
            ours=rates(tokens, seconds["tree"]),
            theirs=rates(tokens, seconds["rows"]),
            what={
                "ours": "PolicyTrainer.train, layout 'tree': what rows begin with alike is computed once",
                "theirs": "the same with layout 'padded': a row for each part that was sampled in one go",
            },
            details={
                "episodes": "made up" if setting.episodes is None else setting.episodes.name,
                "answers": len(episodes),
                "largest_group": max(Counter(episode.group for episode in episodes).values()),
                "with_threads": sum(map(bool, threads)),
                "threads_per_answer": sum(threads) / len(threads),
                "trained_tokens": tokens,
                "computed_tokens": computed,
                "computed_tokens_rows_to_tree": computed["rows"] / computed["tree"],
                "first_grad_norm_gap": abs(norms["tree"][0] / norms["rows"][0] - 1),
                "torch_threads": torch.get_num_threads(),
            },
        )
    }


def made_up_episodes(problems: int, samples: int, vocabulary: int = VOCABULARY) -> list[Episode]:
    """Answers with `THREADS` threads each, of random ones of so many tokens."""
    draw = derived_random(0, "benchmark threads")

    def text(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(length))

    episodes = []
    for problem in range(problems):
        prompt = text(PROMPT)
        for sample in range(samples):
            parts: list[tuple[tuple[int, ...], bool, Branch]] = [(text(TEXT), True, ())]
            for thread in range(THREADS):
                parts.append(((*range(HEADER - 1), thread), False, ((0, thread),)))
                parts.append((text(THREAD), True, ((0, thread),)))
            parts.append((text(TEXT), True, ()))
            ends = itertools.accumulate(len(ids) for ids, _, _ in parts)
            response = tuple(itertools.chain.from_iterable(ids for ids, _, _ in parts))
            episodes.append(
                Episode(
                    prompt_ids=prompt,
                    response_ids=response,
                    trained=tuple(trained for ids, trained, _ in parts for _ in ids),
                    reward=0.0,
                    group=f"{problem}",
                    trajectory=f"{problem}#{sample}",
                    policy_version=0,
                    advantages=(draw.gauss(0, 1),) * len(response),
                    behaviour_logprobs=(-1.0,) * len(response),
                    stretches=tuple(
                        Stretch(end, branch) for end, (_, _, branch) in zip(ends, parts, strict=True)
                    ),
                )
            )
    return episodes


def _threads(episode: Episode) -> int:
    branches = {stretch.branch for stretch in episode.stretches}
    return len({branch[:end] for branch in branches for end in range(1, len(branch) + 1)})


def _vocabulary(setting: Setting) -> int:
    """How many tokens made-up answers may be of: no more than the model that was asked for has."""
    from transformers import AutoConfig

    if setting.checkpoint.name == "none":
        return VOCABULARY
    has: int = AutoConfig.from_pretrained(setting.checkpoint).get_text_config().vocab_size
    return min(VOCABULARY, has)


def _model(setting: Setting, episodes: Sequence[Episode]) -> nn.Module:
    """The model that was asked for; else one of the tiny model's size, with random weights."""
    from treetune.models.pretrained import PretrainedModel
    from treetune.models.sources import TinyModel

    needed = 1 + max(max(*episode.prompt_ids, *episode.response_ids) for episode in episodes)
    if setting.checkpoint.name != "none":
        model = PretrainedModel(name_or_path=str(setting.checkpoint)).load_model(0, str)
        has = model.config.get_text_config().vocab_size
        if has < needed:
            raise ValueError(
                f"the episodes hold token {needed - 1}, and the model of {setting.checkpoint} has {has}: give"
                " the --checkpoint of their own experiment, or none"
            )
        return model
    alphabet = "".join(chr(0x4E00 + place) for place in range(needed))
    longest = max(len(episode.prompt_ids) + len(episode.response_ids) for episode in episodes)
    return TinyModel(alphabet=alphabet, context_length=longest).load_model(0, str)
