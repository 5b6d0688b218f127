"""What the trainer takes of the device that one rank works on.

What DeepSpeed keeps was read in its pinned version and counted by PyTorch's profiler on CPUs, on one rank:
which of its optimisers takes over (`DeepSpeedEngine._do_optimizer_sanity_check`), the buffers of each, and
what a step makes and drops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from treetune.models.shapes import Shape
from treetune.runtime.machine import Machine
from treetune.trainers.base import Trainer
from treetune_cluster.planning.activations import Passes
from treetune_cluster.planning.work import Work

BUCKET = 500_000_000
"""Elements of the buffer in which ZeRO collects gradients (DeepSpeed's `reduce_bucket_size`)."""
GATHERED = 1_050_000_000
"""Elements of whole weights that ZeRO-3 keeps at most (`max_live_parameters`, `prefetch_bucket_size`)."""
FRAGMENTED = 1.1
"""Assumed, on a GPU: what PyTorch reserves for what passes make, over what they make."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of one trained model on one rank, on the rank's device but for what is `on_host` though there
    is a GPU.

    `weights` are those that passes run on; they, `master` weights, `optimizer` and `buffers` stay from step
    to step. `gradients` are made by backward passes and dropped by the step. A backward pass has `passing`
    beside them, a step `stepping`.
    """

    weights: int
    master: int = 0
    optimizer: int = 0
    buffers: int = 0
    gradients: int = 0
    passing: int = 0
    stepping: int = 0
    on_host: int = 0

    @property
    def kept(self) -> int:
        return self.weights + self.master + self.optimizer + self.buffers


def states_of(trainer: Trainer, all_weights: int, trained: int, machine: Machine) -> States:
    """Of a model of so many weights, of which so many are trained, as this trainer shards it."""
    size, stage, parallel = itemsize(trainer), trainer.zero_stage, trainer.tensor_parallel_size
    on_gpu = machine.device == "cuda"
    all_weights, trained = -(-all_weights // parallel), -(-trained // parallel)
    ranks = max(1, machine.world_size // parallel)
    part = -(-trained // ranks)
    # PyTorch's Adam on a CPU makes a root and a quotient as large as what it steps at once.
    adam = 0 if on_gpu else 2 * 4 * part
    if stage == 0:
        # Gradients are made flat once more to be averaged; Adam goes from weight to weight.
        flat = 4 * min(trained, BUCKET)
        return States(weights=4 * all_weights, optimizer=8 * trained, gradients=4 * trained, stepping=flat)
    if trainer.offload_optimizer and on_gpu:
        weights = -(-size * all_weights // (ranks if stage == 3 else 1))
        away = weights if trainer.offload_parameters else 0
        passing = size * (min(GATHERED, all_weights) if stage == 3 else BUCKET)
        return States(
            weights=weights - away,
            buffers=size * BUCKET if stage == 3 else 0,
            passing=passing,
            on_host=away + (4 + 4 + 8) * part,
        )
    if stage == 1 and size == 2:
        # DeepSpeed's own optimiser for bfloat16 keeps whole gradients in float32 on each rank.
        return States(
            weights=size * all_weights,
            master=4 * part,
            optimizer=8 * part,
            buffers=4 * trained,
            gradients=size * trained,
            stepping=adam,
        )
    if stage <= 2:
        whole = trained if stage == 1 else part
        apart = size * part if size == 2 else 0  # gradients in the precision of passes
        return States(
            weights=size * all_weights,
            master=4 * part,
            optimizer=8 * part,
            gradients=4 * whole,
            passing=size * BUCKET + apart,
            stepping=adam,
        )
    return States(
        weights=-(-size * all_weights // ranks),
        master=4 * part,
        optimizer=8 * part,
        buffers=4 * part + size * BUCKET,
        passing=size * min(GATHERED, all_weights),
        stepping=4 * part + adam,
    )


def itemsize(trainer: Trainer) -> int:
    """Bytes of a number in forward and backward passes."""
    return 2 if trainer.precision == "bfloat16" else 4


@dataclass(frozen=True)
class TrainerMemory:
    """Of the device, in bytes, on one rank of `machine`."""

    experiment: Any
    shape: Shape
    machine: Machine
    work: Work

    @property
    def trainer(self) -> Trainer:
        return self.experiment.trainer

    @cached_property
    def policy(self) -> States:
        trained = self.shape.parameters
        if self.trainer.lora is not None:
            trained = adapter_weights(self.shape, self.trainer.lora.rank)
        whole = self.shape.parameters + (trained if self.trainer.lora is not None else 0)
        return states_of(self.trainer, whole, trained, self.machine)

    @cached_property
    def critic(self) -> States | None:
        """A whole model with an optimiser of its own, even beside adapters."""
        if not self.experiment.credit.needs_critic:
            return None
        weights = self.shape.backbone + self.shape.hidden + 1
        return states_of(self.trainer, weights, weights, self.machine)

    @cached_property
    def reference(self) -> int:
        """Weights of the reference, whole or this rank's part; 0 where the policy holds it or there is
        none."""
        trainer = self.trainer
        if not trainer.keeps_reference or trainer.lora is not None:
            return 0
        whole = itemsize(trainer) * self.shape.parameters
        dealt = trainer.zero_stage == 3 and not trainer.offload_reference
        return whole // self.machine.world_size if dealt else whole

    @property
    def reference_stays(self) -> bool:
        """Whether it lies on the device all the time. On a CPU there is no other place."""
        return self.machine.device == "cpu" or not self.trainer.offload_reference

    @cached_property
    def micro_batch(self) -> int:
        """Tokens of the largest micro-batch of a rank."""
        trainer, work = self.trainer, self.work
        together = 2 if trainer.objective.needs_pairs else 1
        parallel = trainer.sequence_parallel_size
        longest = together * work.longest
        groups = max(1, self.machine.world_size // trainer.model_parallel_size)
        rows = -(-min(trainer.minibatch_size or work.rows, max(work.rows, 1)) // groups) * together
        if trainer.sequences_per_micro_batch is not None:
            rows = min(rows, max(together, trainer.sequences_per_micro_batch))
        tokens = max(longest, min(trainer.tokens_per_micro_batch * parallel, rows * work.longest))
        return -(-tokens // parallel)

    def passes(self, tokens: int) -> Passes:
        trainer = self.trainer
        on_cpu = self.machine.device == "cpu"
        return Passes(
            shape=self.shape,
            itemsize=itemsize(trainer),
            tokens=tokens,
            trained=-(-tokens * self.work.longest_answer // self.work.longest),
            device=self.machine.device,
            checkpointing=trainer.gradient_checkpointing,
            masked=on_cpu and trainer.layout == "packed",
        )

    @cached_property
    def update(self) -> int:
        """Of a micro-batch's passes and its gradients, forward and backward, of policy or critic."""
        passes, objective = self.passes(self.micro_batch), self.trainer.objective
        entropy = getattr(objective, "entropy_coef", 0.0) != 0 or self.trainer.entropy_target is not None
        head = passes.head(
            backward=True,
            is_trained=self.trainer.lora is None,
            entropy_gradient=entropy,
            terms=objective.has_terms,
        )
        return self._reserved(passes.kept + max(head, passes.backward_of_a_layer))

    @cached_property
    def scoring(self) -> int:
        """Of passes without gradient, whose micro-batches are twice as large."""
        trainer, work = self.trainer, self.work
        twice = min(2 * self.micro_batch, max(self.micro_batch, work.rows * work.longest))
        if trainer.sequences_per_micro_batch is not None:
            twice = self.micro_batch
        passes = self.passes(twice)
        head = passes.head(backward=False, nucleus=self._has_nucleus)
        hidden = twice * passes.itemsize * 2 * self.shape.hidden
        gathered = self.policy.passing if trainer.zero_stage == 3 else 0
        visiting = 0 if self.reference_stays else self.reference
        return self._reserved(max(passes.scoring, hidden + head)) + gathered + visiting

    @property
    def _has_nucleus(self) -> bool:
        sampling = self.experiment.rollout.sampling
        return (
            sampling is not None and sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
        )

    def _reserved(self, size: int) -> int:
        return round(size * FRAGMENTED) if self.machine.device == "cuda" else size

    @property
    def models(self) -> int:
        """What stays on the device while the trainer works, between steps."""
        critic = 0 if self.critic is None else self.critic.kept
        return self.policy.kept + critic + (self.reference if self.reference_stays else 0)

    @property
    def peak(self) -> int:
        """The most that training takes: while it scores, in passes with gradients, or in a step."""
        both = [self.policy, *([self.critic] if self.critic else [])]
        gradients = sum(one.gradients for one in both)
        passing, stepping = max(one.passing for one in both), max(one.stepping for one in both)
        return self.models + max(self.scoring, gradients + max(passing + self.update, stepping))

    @property
    def aside(self) -> int:
        """What stays on a GPU while an engine has it that sleeps else: the weights that can be scored."""
        return self.policy.weights + (self.reference if self.reference_stays else 0)

    @property
    def put_aside(self) -> int:
        """What of the GPU lies in the memory of the CPU meanwhile."""
        return self.models - self.aside


def adapter_weights(shape: Shape, rank: int) -> int:
    """Of low-rank adapters on every linear layer but the head."""
    sides = 2 * (shape.hidden + shape.query) + 2 * (shape.hidden + shape.key)
    return rank * shape.layers * (sides + 3 * (shape.hidden + shape.intermediate))
