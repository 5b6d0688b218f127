"""Loads models and answers of an experiment for analyses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treetune.lab.analyzers.points import require_critic
from treetune.models.attention import attach_tree_attention
from treetune.models.logprobs import CriticModule, ModelInputs, PolicyModule
from treetune.models.policy_files import read_policy
from treetune.models.saved_weights import saved_weights
from treetune.objectives.further_inputs import DistributionObjective, teacher_of
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.model_scores import Critic, Distributions, ModelScores
from treetune.rollouts.single_turn import adapt_to_fixed_problems
from treetune.rollouts.storage import read_trajectories
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import TRAJECTORIES
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.runtime.training import make_critic_for_credit
from treetune.seeds import derive_seed
from treetune.tasks.drawing import draw_problems
from treetune.trainer.base import Layout
from treetune.trainer.scoring import PolicyScores, Scorer
from treetune.trainer.teacher import TeacherModel
from treetune.trainer.tokens import Sequences
from treetune.tree import answers_of
from treetune.vocabulary import Column, Episode, TokenIds, Trajectory, concatenate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def policy_at(session: Session, point: int) -> PreTrainedModel:
    """Returns the policy after `point` iterations, for scoring."""
    model = session.model.load()
    if point:  # after 0 iterations it has the start weights, which it was loaded with
        folder = session.directory.checkpoint_folder(point)
        _copy_weights(model, folder / "policy", _trusts_remote_code(session))
    return model.eval()


def critic_at(session: Session, point: int) -> CriticModule:
    """Returns the critic after `point` iterations. Raises ValueError where the checkpoint has no critic."""
    require_critic(session.config, session.directory, point)
    settings = session.config.credit.critic_settings
    assert settings is not None, "the experiment trains a critic"
    seed = derive_seed(session.config.seed, "critic")
    # The loss decides how many outputs the critic's head has, and how a value is computed from them.
    loss = settings.loss
    critic = CriticModule(session.model.load(), seed, outputs=loss.outputs, values_of=loss.values)
    critic.head.to(session.ranks.device)  # the rest of the model was loaded there
    if point:
        folder = session.directory.checkpoint_folder(point)
        _copy_weights(critic, folder / "critic", _trusts_remote_code(session))
    return critic.eval()


def _trusts_remote_code(session: Session) -> bool:
    """Returns whether code that comes with the model may run."""
    return bool(getattr(session.config.model, "trust_remote_code", False))


def _copy_weights(module: nn.Module, directory: Path, trusted: bool) -> None:
    """Copies stored weights into a module of the same architecture."""
    stored_tensors, _ = read_policy(directory, trust_remote_code=trusted)
    tensors = saved_weights(module)  # those of the module's tensors that are stored with a model
    if tensors.keys() != stored_tensors.keys():
        different = sorted(tensors.keys() ^ stored_tensors.keys())
        raise ValueError(
            f"{directory} has the weights of another model than the configuration describes: only one of both"
            f" has {', '.join(different[:3])}"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(stored_tensors[name])


def rollout_that_samples(config: PolicyIteration) -> Rollout:
    """Returns the rollout with which the policy answers: the run's, or the evaluation's if the run's doesn't
    sample (as in supervised training).

    Raises ValueError where neither samples.
    """
    for rollout in (config.rollout, config.evaluation.rollout):
        if rollout is not None and rollout.needs_engine and rollout.sampling is not None:
            # The problems of an analysis are a fixed list, as in evaluation.
            return adapt_to_fixed_problems(rollout)
    raise ValueError(
        "nothing in the experiment samples from the policy: give evaluation.rollout,"
        " e.g. {type: 'single_turn', max_tokens: 256}"
    )


def context_at(
    resources: RunResources,
    point: int,
    work: Path,
    seed: int,
    purpose: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    rollout: Rollout | None = None,
) -> RolloutContext:
    """Returns a context for sampling with the experiment's own settings, or with those of `rollout`.

    Answered requests are kept in a journal, so that an interrupted analysis resumes. For credit methods, the
    context has the policy's distributions, and the critic if the experiment trains a critic.

    Args:
        point: The number of finished iterations whose weights the engine has.
        work: The folder of the journal.
        seed: The seed from which the seeds of samples derive.
        purpose: Distinguishes the journal from those of other purposes.
        progress: Is called with (done, total) while work goes on.
        rollout: The rollout whose settings are taken in place of the experiment's.
    """
    context = resources.context(
        rollout or rollout_that_samples(resources.session.config),
        seed=seed,
        iteration=point,
        journal=work / f"{point:04d}-{purpose}.jsonl",
        progress=progress,
    )
    scores = ModelScores(
        critic=credit_critic_at(resources, point),
        distributions=distributions_at(resources.session, point),
    )
    return replace(context, model_scores=scores)


def distributions_at(session: Session, point: int) -> Distributions:
    """Returns the distributions of the policy after `point` iterations. The policy is loaded on each use."""

    def squares_and_entropies(rows: Sequence[Episode]) -> list[tuple[Column, Column]]:
        """Returns for each row Σ π² and the entropy of each response token's distribution."""
        device, columns = session.ranks.device, []
        model = policy_at(session, point)
        # `terms` returns a tuple of numbers to compute from the logits of each position: here only Σ π².
        policy = PolicyModule(model, terms=lambda logits_CV, _: (logits_CV.softmax(-1).square().sum(-1),))
        for row in rows:
            ids_T = torch.from_numpy(concatenate([row.prompt_ids, row.response_ids]).astype("int64")).to(
                device
            )
            # A position predicts the token after it. So the position of the last prompt token predicts the
            # first token of the response.
            positions_N = torch.arange(len(row.prompt_ids) - 1, len(ids_T) - 1, device=device)
            inputs = ModelInputs(ids_T[None], positions_N, ids_T[positions_N + 1])
            with torch.no_grad():
                _, entropy_T, squares_T = policy(inputs, session.temperature, with_terms=True)
            columns.append((squares_T.double().cpu().numpy(), entropy_T.double().cpu().numpy()))
        return columns

    return Distributions(squares_and_entropies)


def credit_critic_at(resources: RunResources, point: int) -> Critic | None:
    """Returns the critic after `point` iterations in the form that credit uses. It is loaded on each use.

    Returns None where the experiment trains no critic."""
    session = resources.session
    if not session.config.credit.needs_critic:
        return None

    def values(sequences: Sequences) -> Tensor:
        return StoredModels(session, point, session.temperature).values(sequences)

    return make_critic_for_credit(session, resources.server, values)


def answers_at(
    resources: RunResources, point: int, work: Path, seed: int, problems: int, *, enough: int = 1
) -> tuple[list[Trajectory], str]:
    """Returns graded answers to training problems by the weights after `point` iterations, and their origin.

    If the run stored answers of iteration `point` and its iterations have at least `enough` problems, these
    answers are returned, with the origin "stored". If not, as after the run's last iteration, `problems`
    problems are answered now, and the origin is "sampled". The engine must have the weights after `point`
    iterations.
    """
    session = resources.session
    stored = session.directory.iteration_folder(point) / TRAJECTORIES
    stored_problems = session.config.problems_per_iteration  # None: all training problems
    if stored.is_file() and (stored_problems is None or stored_problems >= enough):
        trajectories = read_trajectories(stored)
        versions: set[int | None] = set()
        for trajectory in trajectories:
            versions |= {segment.policy_version for segment in trajectory.segments}
        versions.discard(None)  # injected text
        if versions != {point}:
            raise ValueError(
                f"{stored} was sampled by the policy versions {sorted(map(str, versions))}, not by the"
                f" weights after {point} iterations alone"
            )
        return [answer for answer in trajectories if answer.grade.is_known], "stored"
    rollout = rollout_that_samples(session.config)
    with resources.phase(f"answers after iteration {point}", "answers") as show:
        context = context_at(resources, point, work, seed, "answers", show)
        count = min(problems, len(session.train_problems))
        trees, _ = rollout.run(context, draw_problems(session.train_problems, count, seed, point))
    return [answer for answer in answers_of(trees) if answer.grade.is_known], "sampled"


def answers_and_critic_at(
    resources: RunResources, point: int, work: Path, seed: int, problems: int
) -> tuple[list[Trajectory], str, Callable[[Sequence[TokenIds]], list[float]] | None]:
    """Loads the weights after `point` iterations into the engine. Returns answers, their origin and a critic.

    The answers are those of `answers_at`. Their origin is "stored" if the run stored them, and "sampled" if
    they are sampled now. The critic is a function from states to values, or None where the experiment trains
    no critic.
    """
    session = resources.session
    resources.server.load_checkpoint(point)
    trajectories, origin = answers_at(resources, point, work, seed, problems)
    if not session.config.credit.needs_critic:
        return trajectories, origin, None
    return trajectories, origin, partial(state_values, critic_at(session, point), session.ranks.device)


SEQUENCES_AT_ONCE = 64
"""The largest number of states in a batch of the critic."""


class StoredModels:
    """Computes the log-probs and values of an experiment's models after `point` iterations.

    It has the methods that `trainer.preparation.prepare` needs. Models run as in training on a single rank.
    By default batches are padded, which every model supports.
    """

    def __init__(self, session: Session, point: int, temperature: float, layout: Layout = "padded") -> None:
        settings = session.config.trainer
        self.session, self.point = session, point
        self.objective = settings.objective
        # Each rank runs whole sequences, also where neighbouring ranks shared a sequence in training.
        single_rank = replace(settings, layout=layout, sequence_parallel_size=1)
        self.scorer = Scorer(single_rank, session.ranks, temperature)

    @cached_property
    def policy(self) -> PolicyModule:
        # Terms are numbers that some losses need of whole next-token distributions.
        terms = self.objective.terms if isinstance(self.objective, DistributionObjective) else None
        model = policy_at(self.session, self.point)
        if self.scorer.settings.layout == "tree":  # answers with a common prefix are one sequence of tokens
            attach_tree_attention(model)
        return PolicyModule(model, terms=terms)

    @cached_property
    def teacher(self) -> TeacherModel:
        """The objective's teacher: the start model, or the policy. A moving average isn't stored.

        `TeacherModel` takes a function that lends it the model in a ``with`` block. Here the block changes
        nothing, hence `nullcontext`.
        """
        settings = teacher_of(self.objective)
        assert settings is not None, "callers ask only for an objective with a teacher"
        if settings.weights == "policy":
            return TeacherModel(lambda: nullcontext(self.policy))
        start_model = policy_at(self.session, 0)
        if self.scorer.settings.layout == "tree":
            attach_tree_attention(start_model)
        module = PolicyModule(start_model)
        return TeacherModel(lambda: nullcontext(module))

    def policy_logprobs(self, sequences: Sequences) -> Tensor:
        return self.scorer.logprobs(self.policy, sequences)

    def old_logprobs(self, sequences: Sequences) -> PolicyScores:
        """Returns only log-probs: analyses need no comparison with the engine's."""
        return self.scorer.all_scores(self.policy, sequences, nucleus=None)

    def ref_logprobs(self, sequences: Sequences) -> Tensor:
        return self.scorer.logprobs(PolicyModule(policy_at(self.session, 0)), sequences)

    def reference_kl(self, sequences: Sequences) -> Tensor:
        reference = PolicyModule(policy_at(self.session, 0))
        return self.scorer.reference_kl(self.policy, lambda: nullcontext(reference), sequences)

    def values(self, sequences: Sequences) -> Tensor:
        critic = critic_at(self.session, self.point)
        return self.scorer.values(critic, sequences.of_critic or sequences)


def state_values(critic: CriticModule, device: torch.device, states: Sequence[TokenIds]) -> list[float]:
    """Returns the critic's value of each state, given as all tokens up to it, prompt included."""
    order = sorted(range(len(states)), key=lambda i: len(states[i]))  # so that batches need little padding
    values = [0.0] * len(states)
    with torch.no_grad():
        for start in range(0, len(order), SEQUENCES_AT_ONCE):
            batch = order[start : start + SEQUENCES_AT_ONCE]
            rows = [torch.from_numpy(states[i].astype("int64")) for i in batch]
            # Padding is at the right end, where causal attention hides it from the states' own tokens.
            input_ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths_B = torch.tensor([len(row) for row in rows])
            # The index of each state's last token in the flattened batch.
            last_B = torch.arange(len(rows)) * input_ids_BT.shape[1] + lengths_B - 1
            values_B = critic(ModelInputs(input_ids_BT.to(device), last_B.to(device))).cpu()
            for i, value in zip(batch, values_B.tolist(), strict=True):
                values[i] = value
    return values
