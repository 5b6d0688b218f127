"""Measures a training epoch of the trainer against the plainest PyTorch loop that makes the same update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pairs import Measurement, Side, compute_rates, take_turns, time_calls
from benchmarks.setting import Setting
from treetune.credit.episodes import make_episode
from treetune.runtime.base import PolicyIteration
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.seeds import derived_random
from treetune.tasks.drawing import draw_problems
from treetune.trainer.base import Trainer, Warmup
from treetune.trainer.core import PolicyTrainer
from treetune.tree import answers_of
from treetune.vocabulary import Episode, logprob_array

SFT_MINIBATCHES = 20
SFT_MINIBATCH_SIZE = 64
IGNORED_LABEL = -100
"""The label of positions that cross entropy leaves out."""


def measure(setting: Setting) -> dict[str, Measurement]:
    # The plain loop pads rows, and so does our side.
    config = setting.configuration("grpo", '{"trainer"+: {"layout": "padded"}}')
    with (
        Session.open(config, {}) as session,
        PolicyServer.start(session, needs_engine=False) as server,
        RunResources.open(session, server) as resources,
    ):
        answers = setting.problems * setting.samples
        measurements = {"training/grpo": measure_epoch(resources, setting, config, answers)}
        if setting.has_configuration("sft"):
            sft = setting.configuration("sft")
            answers = SFT_MINIBATCHES * SFT_MINIBATCH_SIZE
            measurements["training/sft"] = measure_epoch(resources, setting, sft, answers)
        return measurements


def measure_epoch(
    resources: RunResources, setting: Setting, config: PolicyIteration, answers: int
) -> Measurement:
    """Measures an epoch over `answers` episodes with the trainer of a configuration."""
    # With a constant learning rate, the plain loop needs no schedule.
    settings = replace(config.trainer, schedule=Warmup(), measure_kl=False)
    episodes = make_episodes(resources, answers)
    trainers = {"ours": make_trainer(resources.session, settings)}
    if config.trainer.objective.needs_advantages:
        trainers["with_kl_metric"] = make_trainer(resources.session, replace(settings, measure_kl=True))
    model = resources.session.model.load().to(resources.session.ranks.device)
    plain_loop = PlainLoop(model, settings, [Row.of(episode) for episode in episodes])
    norms: dict[str, list[float]] = {"ours": [], "theirs": []}

    def trainer_side(name: str) -> Side:
        def train(turn: int) -> None:
            metrics = trainers[name].train(turn, episodes)
            if name == "ours":
                norms["ours"].append(metrics["train/grad_norm"])

        return time_calls(train)

    def train_plainly(turn: int) -> None:
        # The same minibatches as the trainer's. Its units are tuples of sequences, here of a single one.
        units = [(index,) for index in range(answers)]
        minibatches = trainers["ours"].plan_steps(turn, units)
        indices_of_minibatches = [[index for (index,) in minibatch] for minibatch in minibatches]
        norms["theirs"].append(plain_loop.train_epoch(indices_of_minibatches))

    sides = {name: trainer_side(name) for name in trainers}
    sides["theirs"] = time_calls(train_plainly)
    seconds = take_turns(sides, setting.repeats)
    tokens = sum(len(episode.prompt_ids) + len(episode.response_ids) for episode in episodes)
    minibatch_size = settings.minibatch_size or answers
    details: dict[str, Any] = {
        "sequences": len(episodes),
        "tokens": tokens,
        "steps": -(-answers // minibatch_size),  # rounded up
        "threads": torch.get_num_threads(),
        # Near 0 if both sides make the same update.
        "first_grad_norm_gap": abs(norms["ours"][0] / norms["theirs"][0] - 1),
    }
    if "with_kl_metric" in seconds:
        details["ours_with_kl_metric"] = compute_rates(tokens, seconds["with_kl_metric"])
    return Measurement(
        unit="tokens/s",
        ours=compute_rates(tokens, seconds["ours"]),
        theirs=compute_rates(tokens, seconds["theirs"]),
        what={
            "ours": "PolicyTrainer.train on DeepSpeed, metrics included, without the reference's sweep",
            "theirs": "model(ids).logits, cross entropy, backward, clip_grad_norm_, AdamW; same minibatches",
        },
        details=details,
    )


def make_trainer(session: Session, settings: Trainer) -> PolicyTrainer:
    return PolicyTrainer(
        settings,
        session.model.load,
        ranks=session.ranks,
        seed=session.config.seed,
        temperature=1.0,
        iterations=1,
    )


def make_episodes(resources: RunResources, count: int) -> list[Episode]:
    """Returns demonstrations, which are as long as answers, with made-up advantages and log-probs."""
    from treetune.rollouts.demonstrations import Demonstrations

    session, rollout = resources.session, Demonstrations()
    problems = draw_problems(session.train_problems, count, session.config.seed, 0)
    context = resources.context(rollout, seed=session.config.seed, iteration=0, journal=None)
    trees, _ = rollout.run(context, problems)
    generator = derived_random(session.config.seed, "benchmark advantages")
    episodes = []
    for trajectory in answers_of(trees):
        advantage = generator.gauss(0, 1)
        episode = make_episode(context, trajectory, [advantage] * len(trajectory.step_ends))
        logprobs = logprob_array([-1.0] * len(episode.response_ids))
        episodes.append(replace(episode, behaviour_logprobs=logprobs))
    return episodes


@dataclass(frozen=True)
class Row:
    """A sequence of the plain loop."""

    ids: list[int]
    """The tokens of prompt and response."""
    first: int
    """The index of the first trained token."""
    advantages: list[float]
    """The advantages of the tokens from `first` on."""

    @staticmethod
    def of(episode: Episode) -> Row:
        assert episode.advantages is not None
        ids = [*episode.prompt_ids.tolist(), *episode.response_ids.tolist()]
        return Row(ids, len(episode.prompt_ids), episode.advantages.tolist())


class PlainLoop:
    """Trains as one writes it without a library: sort by length, pad, forward, backward, clip, step."""

    def __init__(self, model: nn.Module, settings: Trainer, rows: Sequence[Row]) -> None:
        self.model, self.settings, self.rows = model.train(), settings, rows
        self.by_policy_gradient = settings.objective.needs_advantages
        self.optimiser = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
        )
        # Advantages are trained as (advantage - centre) / scale.
        self.centre, self.scale = 0.0, 1.0

    def train_epoch(self, minibatches: Sequence[Sequence[int]]) -> float:
        """Takes an optimiser step for each minibatch of row indices.

        Returns:
            The mean norm of the gradients before clipping.
        """
        if self.by_policy_gradient and self.settings.advantage_normalisation == "whiten":
            self.centre, self.scale = mean_and_std_of_advantages(self.rows)
        norms = [self._step([self.rows[index] for index in indices]) for indices in minibatches]
        return sum(norms) / len(norms)

    def _step(self, rows: Sequence[Row]) -> float:
        trained_tokens = sum(len(row.ids) - row.first for row in rows)
        for batch in self._micro_batches(rows):
            loss = self._summed_loss(batch) / trained_tokens
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm or float("inf"))
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(norm)

    def _micro_batches(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Splits a minibatch, the longest rows first, so that no batch has too many tokens with padding."""
        batches: list[list[Row]] = [[]]
        for row in sorted(rows, key=lambda row: -len(row.ids)):
            longest = len(batches[-1][0].ids) if batches[-1] else 0
            if longest * (len(batches[-1]) + 1) > self.settings.tokens_per_micro_batch:
                batches.append([])
            batches[-1].append(row)
        return batches

    def _summed_loss(self, batch: Sequence[Row]) -> Tensor:
        """Returns the sum of the loss over trained tokens."""
        ids_BT = nn.utils.rnn.pad_sequence([torch.tensor(row.ids) for row in batch], batch_first=True)
        labels_BT = ids_BT.clone()
        for index, row in enumerate(batch):
            labels_BT[index, : row.first] = IGNORED_LABEL
            labels_BT[index, len(row.ids) :] = IGNORED_LABEL
        ids_BT, labels_BT = ids_BT.to(self.model.device), labels_BT.to(self.model.device)
        # Padding is to the right, where causal attention doesn't look.
        logits_BTV = self.model(input_ids=ids_BT, use_cache=False).logits
        # The logits at a position predict the next token, so this has one position less than the row.
        nll_BT = nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1),
            labels_BT[:, 1:].flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="none",
        ).view(len(batch), -1)
        if not self.by_policy_gradient:
            return nll_BT.sum()
        # A token's advantage stands at the position that predicts the token.
        advantages_BT = torch.zeros_like(nll_BT)
        for index, row in enumerate(batch):
            normalised_T = (torch.tensor(row.advantages) - self.centre) / self.scale
            advantages_BT[index, row.first - 1 : len(row.ids) - 1] = normalised_T
        # The old log-probs are the present ones: the ratio is 1, and has the gradient of the log-prob.
        ratio_BT = (nll_BT.detach() - nll_BT).exp()
        clipped_BT = ratio_BT.clamp(0.8, 1.2)
        terms_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)
        return terms_BT[labels_BT[:, 1:] != IGNORED_LABEL].sum()


def mean_and_std_of_advantages(rows: Sequence[Row]) -> tuple[float, float]:
    """Returns the mean and the standard deviation of the advantages over all trained tokens."""
    advantages: list[float] = []
    for row in rows:
        advantages += row.advantages
    advantages_N = torch.tensor(advantages, dtype=torch.float64)
    return float(advantages_N.mean()), float((advantages_N.var() + 1e-8).sqrt())
