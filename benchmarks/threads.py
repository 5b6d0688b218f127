"""Measures a training epoch on answers with threads: as prefix trees, against a row for each sampled part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.pairs import Measurement, Side, compute_rates, take_turns, time_calls
from benchmarks.setting import Setting
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.storage import read_episodes
from treetune.seeds import derived_random
from treetune.trainer.base import Trainer
from treetune.trainer.batches import Layout
from treetune.trainer.core import PolicyTrainer
from treetune.trainer.ranks import Ranks
from treetune.vocabulary import Branch, Episode, SegmentSpan, logprob_array, token_array

LAYOUTS: dict[str, Layout] = {"tree": "tree", "rows": "padded"}
VOCABULARY = 64
"""The size of the vocabulary of made-up answers, if the model has no smaller one."""
# Made-up answers. Their tokens:
PROMPT = 24
TEXT = 48
"""Of the text before the threads, and of the text after them."""
HEADER = 4
"""Of a thread's header, which is injected."""
THREAD = 48
"""Of a thread after its header, which are sampled."""
THREADS = 4
"""The threads of an answer."""


def measure(setting: Setting) -> dict[str, Measurement]:
    """Measures an optimiser step over all episodes. All answers to a problem are in one minibatch, so that
    their tree shares what they have in common."""
    if setting.episodes is None:
        vocabulary = choose_vocabulary_size(setting)
        episodes = make_up_episodes(setting.problems, setting.samples, vocabulary)
    else:
        episodes = read_episodes(setting.episodes)
    have_advantages = all(episode.advantages is not None for episode in episodes)
    objective = ClippedPolicyGradient() if have_advantages else MaximumLikelihood()
    ranks = Ranks.join(deadline_s=60)
    trainers = {}
    for name, layout in LAYOUTS.items():
        trainers[name] = PolicyTrainer(
            Trainer(objective=objective, learning_rate=1e-6, measure_kl=False, layout=layout),
            lambda: load_model(setting, episodes),
            ranks=ranks,
            seed=0,
            temperature=1.0,
            iterations=1,
        )
    computed_tokens: dict[str, float] = {}
    norms: dict[str, list[float]] = {name: [] for name in LAYOUTS}

    def layout_side(name: str) -> Side:
        def train(turn: int) -> None:
            metrics = trainers[name].train(turn, episodes)
            computed_tokens[name] = metrics["train/computed_tokens"]
            norms[name].append(metrics["train/grad_norm"])

        return time_calls(train)

    seconds = take_turns({name: layout_side(name) for name in LAYOUTS}, setting.repeats)
    trained_tokens = sum(int(episode.trained.sum()) for episode in episodes)
    thread_counts = [count_threads(episode) for episode in episodes]
    answers_of_groups = Counter(episode.group for episode in episodes)
    return {
        "threads/tree": Measurement(
            unit="trained tokens/s",
            ours=compute_rates(trained_tokens, seconds["tree"]),
            theirs=compute_rates(trained_tokens, seconds["rows"]),
            what={
                "ours": "PolicyTrainer.train, layout 'tree': what rows begin with alike is computed once",
                "theirs": "the same with layout 'padded': a row for each part that was sampled in one go",
            },
            details={
                "episodes": "made up" if setting.episodes is None else setting.episodes.name,
                "answers": len(episodes),
                "largest_group": max(answers_of_groups.values()),
                "with_threads": sum(count > 0 for count in thread_counts),
                "threads_per_answer": sum(thread_counts) / len(thread_counts),
                "trained_tokens": trained_tokens,
                "computed_tokens": computed_tokens,
                "computed_tokens_rows_to_tree": computed_tokens["rows"] / computed_tokens["tree"],
                # Near 0 if both layouts make the same update.
                "first_grad_norm_gap": abs(norms["tree"][0] / norms["rows"][0] - 1),
                "torch_threads": torch.get_num_threads(),
            },
        )
    }


def make_up_episodes(problems: int, samples: int, vocabulary: int) -> list[Episode]:
    """Returns episodes of random tokens, with `THREADS` threads each.

    Args:
        problems: The number of problems.
        samples: The number of answers to each problem.
        vocabulary: Tokens are drawn from the ids below this number.
    """
    generator = derived_random(0, "benchmark threads")

    def draw_tokens(length: int) -> tuple[int, ...]:
        return tuple(generator.randrange(vocabulary) for _ in range(length))

    episodes = []
    for problem in range(problems):
        prompt = draw_tokens(PROMPT)
        for sample in range(samples):
            # The parts of the answer: token ids, whether they are trained, and the branch of the thread.
            parts: list[tuple[tuple[int, ...], bool, Branch]] = [(draw_tokens(TEXT), True, ())]
            for thread in range(THREADS):
                branch: Branch = ((0, thread),)
                header = (*range(HEADER - 1), thread)
                parts.append((header, False, branch))
                parts.append((draw_tokens(THREAD), True, branch))
            parts.append((draw_tokens(TEXT), True, ()))

            response: list[int] = []
            trained: list[bool] = []
            stretches = []
            for ids, is_trained, branch in parts:
                response += ids
                trained += [is_trained] * len(ids)
                stretches.append(SegmentSpan(len(response), branch))
            episodes.append(
                Episode(
                    prompt_ids=token_array(prompt),
                    response_ids=token_array(response),
                    trained=np.array(trained),
                    reward=0.0,
                    group=f"{problem}",
                    trajectory=f"{problem}#{sample}",
                    policy_version=0,
                    advantages=np.full(len(response), generator.gauss(0, 1)),
                    behaviour_logprobs=logprob_array([-1.0] * len(response)),
                    stretches=tuple(stretches),
                )
            )
    return episodes


def count_threads(episode: Episode) -> int:
    """Returns the number of an episode's threads, nested ones included."""
    threads = set()
    for stretch in episode.stretches:
        # A thread is named by its branch. A nested thread's branch begins with those that contain it.
        for depth in range(1, len(stretch.branch) + 1):
            threads.add(stretch.branch[:depth])
    return len(threads)


def choose_vocabulary_size(setting: Setting) -> int:
    """Returns `VOCABULARY`, or the size of the model's vocabulary if that is smaller."""
    from transformers import AutoConfig

    if setting.checkpoint.name == "none":
        return VOCABULARY
    size_of_model: int = AutoConfig.from_pretrained(setting.checkpoint).get_text_config().vocab_size
    return min(VOCABULARY, size_of_model)


def load_model(setting: Setting, episodes: Sequence[Episode]) -> nn.Module:
    """Returns the model of the setting, or else one of the tiny model's size, with random weights.

    Raises:
        ValueError: if the model doesn't have all tokens of the episodes.
    """
    from treetune.models.pretrained import PretrainedModel
    from treetune.models.sources import TinyModel

    largest_id = max(max(*episode.prompt_ids, *episode.response_ids) for episode in episodes)
    if setting.checkpoint.name != "none":
        model = PretrainedModel(name_or_path=str(setting.checkpoint)).load_model(0, str)
        vocabulary = model.config.get_text_config().vocab_size
        if vocabulary <= largest_id:
            raise ValueError(
                f"the episodes hold token {largest_id}, and the model of {setting.checkpoint} has"
                f" {vocabulary}: give the --checkpoint of their own experiment, or none"
            )
        return model
    # The tiny model's tokens are characters, so it needs as many of them.
    first_character = 0x4E00
    alphabet = "".join(chr(first_character + index) for index in range(largest_id + 1))
    longest = max(len(episode.prompt_ids) + len(episode.response_ids) for episode in episodes)
    return TinyModel(alphabet=alphabet, context_length=longest).load_model(0, str)
