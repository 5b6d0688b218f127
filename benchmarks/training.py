"""A training epoch through the trainer against the plainest PyTorch loop that does the same update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pairs import Measurement, Side, in_turns, rates, timed
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
from treetune.vocabulary import Episode

SFT_MINIBATCHES = 20


def measure(setting: Setting) -> dict[str, Measurement]:
    # The plain loop pads rows, and so does our side.
    config = setting.configuration("grpo", '{"trainer"+: {"layout": "padded"}}')
    with (
        Session.open(config, {}) as session,
        PolicyServer.start(session, needed=False) as server,
        RunResources.open(session, server) as resources,
    ):
        count = setting.problems * setting.samples
        measured = {"training/grpo": _against_bare(resources, setting, config, count)}
        if setting.has("sft"):
            sft = setting.configuration("sft")
            measured["training/sft"] = _against_bare(resources, setting, sft, SFT_MINIBATCHES * 64)
        return measured


def _against_bare(
    resources: RunResources, setting: Setting, config: PolicyIteration, count: int
) -> Measurement:
    # A constant rate, which both sides know without a schedule.
    settings = replace(config.trainer, schedule=Warmup(), measure_kl=False)
    episodes = _episodes(resources, count)
    trainers = {"ours": _trainer(resources.session, settings)}
    if config.trainer.objective.needs_advantages:
        trainers["with_kl_metric"] = _trainer(resources.session, replace(settings, measure_kl=True))
    model = resources.session.model.load().to(resources.session.ranks.device)
    bare = BareLoop(model, settings, [Row.of(episode) for episode in episodes])
    norms: dict[str, list[float]] = {"ours": [], "theirs": []}

    def train(name: str, turn: int) -> None:
        metrics = trainers[name].train(turn, episodes)
        if name == "ours":
            norms["ours"].append(metrics["train/grad_norm"])

    def train_bare(turn: int) -> None:
        minibatches = trainers["ours"].plan_steps(turn, [(i,) for i in range(count)])  # the same ones
        norms["theirs"].append(bare.epoch([[i for (i,) in minibatch] for minibatch in minibatches]))

    sides: dict[str, Side] = {name: timed(lambda turn, name=name: train(name, turn)) for name in trainers}
    seconds = in_turns({**sides, "theirs": timed(train_bare)}, setting.repeats)
    tokens = sum(len(episode.prompt_ids) + len(episode.response_ids) for episode in episodes)
    gap = abs(norms["ours"][0] / norms["theirs"][0] - 1)
    details: dict[str, Any] = {
        "sequences": len(episodes),
        "tokens": tokens,
        "steps": -(-count // (settings.minibatch_size or count)),
        "threads": torch.get_num_threads(),
        "first_grad_norm_gap": gap,
    }
    if "with_kl_metric" in seconds:
        details["ours_with_kl_metric"] = rates(tokens, seconds["with_kl_metric"])
    return Measurement(
        unit="tokens/s",
        ours=rates(tokens, seconds["ours"]),
        theirs=rates(tokens, seconds["theirs"]),
        what={
            "ours": "PolicyTrainer.train on DeepSpeed, metrics included, without the reference's sweep",
            "theirs": "model(ids).logits, cross entropy, backward, clip_grad_norm_, AdamW; same minibatches",
        },
        details=details,
    )


def _trainer(session: Session, settings: Trainer) -> PolicyTrainer:
    return PolicyTrainer(
        settings,
        session.model.load,
        ranks=session.ranks,
        seed=session.config.seed,
        temperature=1.0,
        iterations=1,
    )


def _episodes(resources: RunResources, count: int) -> list[Episode]:
    """Demonstrations, which are as long as answers, with advantages and log-probs made up."""
    from treetune.rollouts.demonstrations import Demonstrations

    session, rollout = resources.session, Demonstrations()
    problems = draw_problems(session.train_problems, count, session.config.seed, 0)
    context = resources.context(rollout, seed=session.config.seed, iteration=0, journal=None)
    trees, _ = rollout.run(context, problems)
    generator = derived_random(session.config.seed, "benchmark advantages")
    episodes = []
    for trajectory in answers_of(trees):
        episode = make_episode(context, trajectory, [generator.gauss(0, 1)] * len(trajectory.step_ends))
        made_up = (-1.0,) * len(episode.response_ids)
        episodes.append(replace(episode, behaviour_logprobs=made_up))
    return episodes


@dataclass(frozen=True)
class Row:
    """A sequence, the place of its first trained token, and the advantages of the tokens from there on."""

    ids: list[int]
    first: int
    advantages: list[float]

    @staticmethod
    def of(episode: Episode) -> Row:
        assert episode.advantages is not None
        ids = [int(token) for part in (episode.prompt_ids, episode.response_ids) for token in part]
        return Row(ids, len(episode.prompt_ids), episode.advantages.tolist())


class BareLoop:
    """What one writes without a library: sort by length, pad, forward, backward, clip, step."""

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

    def epoch(self, minibatches: Sequence[Sequence[int]]) -> float:
        """All optimiser steps; the mean of their gradients' norms before clipping."""
        if self.by_policy_gradient:
            self.centre, self.scale = 0.0, 1.0
            if self.settings.advantage_normalisation == "whiten":
                self.centre, self.scale = _whitening(self.rows)
        norms = [self._step([self.rows[i] for i in indices]) for indices in minibatches]
        return sum(norms) / len(norms)

    def _step(self, rows: Sequence[Row]) -> float:
        trained = sum(len(row.ids) - row.first for row in rows)
        for batch in self._micro_batches(rows):
            loss = self._loss(batch) / trained
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm or float("inf"))
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(norm)

    def _micro_batches(self, rows: Sequence[Row]) -> list[list[Row]]:
        batches: list[list[Row]] = [[]]
        for row in sorted(rows, key=lambda row: -len(row.ids)):
            widest = len(batches[-1][0].ids) if batches[-1] else 0
            if widest * (len(batches[-1]) + 1) > self.settings.tokens_per_micro_batch:
                batches.append([])
            batches[-1].append(row)
        return batches

    def _loss(self, batch: Sequence[Row]) -> Tensor:
        """The sum over trained tokens."""
        ids_BT = nn.utils.rnn.pad_sequence([torch.tensor(row.ids) for row in batch], batch_first=True)
        labels_BT = ids_BT.clone()
        for place, row in enumerate(batch):
            labels_BT[place, : row.first] = -100
            labels_BT[place, len(row.ids) :] = -100
        ids_BT, labels_BT = ids_BT.to(self.model.device), labels_BT.to(self.model.device)
        # Padding is to the right, where causal attention doesn't look.
        logits_BTV = self.model(input_ids=ids_BT, use_cache=False).logits
        nll_N = nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="none"
        ).view(len(batch), -1)
        if not self.by_policy_gradient:
            return nll_N.sum()
        # The position before a token predicts it, and has its advantage.
        advantages_BT = torch.zeros_like(nll_N)
        for place, row in enumerate(batch):
            whitened_T = (torch.tensor(row.advantages) - self.centre) / self.scale
            advantages_BT[place, row.first - 1 : len(row.ids) - 1] = whitened_T
        ratio_BT = (nll_N.detach() - nll_N).exp()
        clipped_BT = ratio_BT.clamp(0.8, 1.2)
        terms_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)
        return terms_BT[labels_BT[:, 1:] != -100].sum()


def _whitening(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean and standard deviation of the advantages over trained tokens."""
    advantages = torch.tensor(
        [advantage for row in rows for advantage in row.advantages], dtype=torch.float64
    )
    return float(advantages.mean()), float((advantages.var() + 1e-8).sqrt())
