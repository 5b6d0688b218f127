"""Computes the work of an iteration, and the memory that trainer and engine need for it.

The terms come from reading the code, and were compared with PyTorch's profiler on CPUs
(docs/results/plan.md). They count the tensors that autograd keeps for the layers of transformers (RMS norm in
float32, rotary embeddings, PyTorch's attention, gated MLP) and for the head in chunks (`models.logprobs`).
DeepSpeed's states are those of its pinned version: the optimiser that it chooses
(`DeepSpeedEngine._do_optimizer_sanity_check`), the buffers of each, and the tensors that a step allocates and
frees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from treetune.credit.base import ContinuingCredit
from treetune.credit.reward_models import reward_model_of
from treetune.engine.settings import VllmSettings
from treetune.models.shapes import Shape
from treetune.models.sources import Alphabet, ModelSource
from treetune.objectives.further_inputs import (
    DistributionObjective,
    ReferenceKlObjective,
    TeacherObjective,
    teacher_of,
)
from treetune.runtime.machine import GIB, Machine
from treetune.trainer.base import Trainer

ANSWER_SHARE_OF_LIMIT = 0.5
"""The assumed mean length of an answer as a share of `max_tokens`, if none is configured."""
PROMPT_TOKENS = 256
"""The assumed mean length of a prompt, if the limits allow it."""


@dataclass(frozen=True, kw_only=True)
class IterationWork:
    """The work of one iteration, over all ranks. Lengths are means, except for `longest` and
    `longest_answer`.

    Example: 64 problems with 8 answers each, trained in two epochs of 8 steps, have ``problems=64,
    answers=512, rows=512, steps=16, epochs=2``.
    """

    problems: int
    """The problems that are answered, with those of further rounds."""
    is_known: bool
    """Whether the number of problems is known; if not, all counts are for one problem."""
    answers: int
    answer_tokens: float
    prompt_tokens: float
    shared_prompt_tokens: float = 0.0
    """The tokens with which all prompts begin, such as those of solved examples."""
    longest: int
    """The most tokens of a row."""
    longest_answer: int
    """The most trained tokens of a row."""
    continuations: int
    """The expected number of continuations that credit samples."""
    most_continuations: int
    """The most continuations that credit may sample."""
    further_answers: int
    """The number of whole answers that credit samples, such as ReMax's greedy ones."""
    rows: int
    """The most sequences (or pairs) that are trained in an epoch."""
    steps: int
    """The optimiser's steps in all epochs."""
    epochs: int
    is_sampled: bool
    """Whether the answers are sampled, and not demonstrations."""

    @property
    def sampled_tokens(self) -> float:
        return self.answers * self.answer_tokens if self.is_sampled else 0.0

    @property
    def continued_tokens(self) -> float:
        """The tokens of continuations, which on average begin in the middle of an answer."""
        return self.continuations * self.answer_tokens / 2

    @property
    def further_tokens(self) -> float:
        """The tokens of the whole answers that credit samples."""
        return self.further_answers * self.answer_tokens

    @property
    def context(self) -> float:
        """The tokens before a sampled token, in the mean over an answer."""
        return self.prompt_tokens + self.answer_tokens / 2

    @property
    def continued_context(self) -> float:
        """The tokens before a sampled token of a continuation, in the mean over all continuations.

        If continuations begin evenly along an answer and end where it ends, more of them have a token near
        the end. So the mean position of their tokens is at two thirds of the answer.
        """
        return self.prompt_tokens + self.answer_tokens * 2 / 3

    @property
    def row_tokens(self) -> float:
        return min(self.prompt_tokens + self.answer_tokens, float(self.longest))


def work_of(experiment: Any, answer_tokens: float | None = None) -> IterationWork:
    """Returns the work of an experiment's iteration.

    Args:
        answer_tokens: The mean length of an answer. None: the experiment's `plan.answer_tokens` or, if that
            isn't set, an assumed share of the longest answer.
    """
    problems_or_none = experiment.problems_per_iteration or experiment.task.size("train")
    drawn_problems = problems_or_none or 1  # with an unknown number of problems, the work of one problem
    rollout, context = experiment.rollout, experiment.context_length
    sampling, plan_settings = rollout.sampling, experiment.plan
    longest_answer = min(sampling.max_tokens, context) if sampling is not None else context
    longest_prompt = rollout.max_prompt_tokens or context
    longest = min(context, longest_prompt + longest_answer)
    expected_answer = answer_tokens or plan_settings.answer_tokens or ANSWER_SHARE_OF_LIMIT * longest_answer
    mean_answer = min(expected_answer, longest_answer)
    mean_prompt = max(1.0, min(plan_settings.prompt_tokens or PROMPT_TOKENS, longest - mean_answer))
    # A rollout may ask for further problems than those that are drawn. Both numbers include them.
    problems = rollout.most_problems(drawn_problems)
    answers = rollout.most_answers(drawn_problems)
    rows = experiment.selection.most_kept(answers, problems)  # the most sequences or pairs to train on
    rows_of_step = experiment.trainer.minibatch_size or max(rows, 1)
    steps_of_epoch = max(1, -(-rows // rows_of_step))  # rounded up
    continuations, most_continuations, further_answers = 0, 0, 0
    credit = experiment.credit
    if isinstance(credit, ContinuingCredit):
        continuations, most_continuations = credit.continuations(answers, mean_answer, longest_answer)
        further_answers = problems * credit.further_answers
    return IterationWork(
        problems=problems,
        is_known=problems_or_none is not None,
        answers=answers,
        answer_tokens=mean_answer,
        prompt_tokens=mean_prompt,
        shared_prompt_tokens=min(plan_settings.shared_prompt_tokens, mean_prompt),
        longest=longest,
        longest_answer=longest_answer,
        continuations=continuations,
        most_continuations=most_continuations,
        further_answers=further_answers,
        rows=rows,
        steps=experiment.trainer.epochs * steps_of_epoch,
        epochs=experiment.trainer.epochs,
        is_sampled=rollout.needs_engine,
    )


LOGITS_PER_CHUNK = {"cpu": 2**24, "cuda": 2**27}
"""The most logits of a chunk of the head, by device. They are the values in `models.logprobs`, which can't be
imported here, since it imports PyTorch. A test compares both."""

BYTES_PER_LOGIT, NUCLEUS_BYTES_PER_LOGIT, SORT_BYTES_PER_LOGIT = 16, 34, {"cpu": 0, "cuda": 20}
"""Bytes of a chunk in the forward pass, for each logit. `BYTES_PER_LOGIT`: float32 logits, log-probs,
probabilities and their product. `NUCLEUS_BYTES_PER_LOGIT`: float32 logits and log-probs, the sorted
probabilities with their int64 order, the mass before each of them, two masks, one of these as numbers, and
its product with the probabilities. `SORT_BYTES_PER_LOGIT`: further bytes of this sort. On CUDA, a sort has
second buffers of keys and order, and one more int64 order (PyTorch's ATen/native/cuda/Sort.cu, cub's
SortPairs)."""
COMPARISON_BYTES_PER_LOGIT = {"reference": 24, "group": 32}
"""Bytes of a chunk, for each logit, in a forward pass that compares its distributions with the reference's,
or with the mean of the group's (`trainer.scoring`). Each float32 tensor has four. ``reference``: logits,
log-probs, the same log-probs for the comparison, probabilities, differences of log-probs, and their product.
``group``, if each group has one answer: logits, log-probs, probabilities, sums and means of the groups, the
mean at each position, and two tensors for the entropy of the mixture."""
BACKWARD_BYTES_PER_LOGIT, BACKWARD_BYTES_WITH_ENTROPY, BACKWARD_BYTES_WITH_TERMS = 12, 20, 24
"""Bytes of a chunk in the backward pass, for each logit. `BACKWARD_BYTES_PER_LOGIT`: the log-probs, which are
computed again, and two gradients of their size. `BACKWARD_BYTES_WITH_ENTROPY`: the same if the entropy has a
gradient. `BACKWARD_BYTES_WITH_TERMS`: the same if the objective has terms of its own."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward and backward passes of a model."""

    shape: Shape
    itemsize: int
    """The bytes of a number."""
    tokens: int
    """The number of tokens of the micro-batch."""
    trained: int
    """The number of trained tokens among `tokens`."""
    device: str
    checkpointing: bool
    masked: bool = False
    """Whether attention has a mask with an entry for each pair of tokens."""

    @property
    def kept_by_a_block(self) -> int:
        """The bytes that a block keeps for its backward pass."""
        shape, size = self.shape, self.itemsize
        norms = 2 * (self._bytes_of_norm + size) * shape.hidden
        attention = size * (2 * shape.query + 2 * shape.key)  # queries and results, keys and values
        if shape.head_norms:
            attention += self._bytes_of_norm * (shape.query + shape.key)
        mlp = 4 * size * shape.intermediate  # the gate, its activation, the other factor, the product
        small = 4 * (2 + shape.heads)  # scales of norms, sums of attention
        mask = size * self.tokens if self.masked else 0  # as numbers that are added
        return self.tokens * (norms + attention + mlp + small + mask)

    @property
    def _bytes_of_norm(self) -> int:
        """The bytes that a norm keeps for each element: its input in float32, and its output."""
        return 4 + self.itemsize

    @property
    def _kept_after_blocks(self) -> int:
        """The bytes that are kept of what comes after the blocks: the last norm, and the hidden states of the
        trained tokens, which go into the head."""
        norm = self.tokens * self._bytes_of_norm * self.shape.hidden
        return norm + self.trained * self.itemsize * self.shape.hidden

    @property
    def kept(self) -> int:
        """The bytes that a forward pass keeps for the backward pass."""
        shape, size = self.shape, self.itemsize
        input_of_block = size * shape.hidden * self.tokens
        # With checkpointing, only the inputs of the blocks are kept.
        blocks = shape.layers * (input_of_block if self.checkpointing else self.kept_by_a_block)
        rotary = self.tokens * 2 * size * shape.head_dim  # cosines and sines
        mask = self.tokens**2 if self.masked else 0  # a bool for each pair of tokens
        return blocks + self._kept_after_blocks + rotary + mask

    @property
    def backward_of_a_block(self) -> int:
        """The bytes that the backward pass of a block needs in addition to `kept`.

        The last block counts: the backward pass begins there, while the tensors of all other blocks are still
        kept. The block needs memory for its gradients. With checkpointing, it also computes its activations
        again.
        """
        shape, size = self.shape, self.itemsize
        gradients_of_mlp = self.tokens * (size * shape.hidden + 2 * size * shape.intermediate)
        computed_again = 0
        if self.checkpointing:
            # In float32, the first norm's input is the block's own input, which `kept` counts already.
            input_of_block = self.tokens * 4 * shape.hidden if size == 4 else 0
            computed_again = self.kept_by_a_block - input_of_block
        # The backward pass of a norm computes in float32. It needs three tensors in float32, and one in
        # `itemsize`.
        of_norm = self.tokens * (4 * 3 + size) * shape.hidden if size < 4 else 0
        # `kept` has the last norm and the hidden states that go into the head (`_kept_after_blocks`). They
        # are freed before the backward pass reaches the MLP of the last block. The backward passes of MLP and
        # norm run one after the other, so the larger one counts.
        return max(computed_again + gradients_of_mlp - self._kept_after_blocks, of_norm)

    def head(
        self,
        *,
        backward: bool,
        head_is_trained: bool = True,
        entropy_gradient: bool = False,
        terms: bool = False,
        nucleus: bool = False,
        compared_with: Literal["reference", "group"] | None = None,
        teacher_bytes: int = 0,
    ) -> int:
        """Returns the most bytes of a chunk of the head.

        The head computes logits for a chunk of positions at a time, which needs less memory than all logits.

        Args:
            backward: Whether there is a backward pass.
            head_is_trained: Whether the head's weight has a gradient. With adapters it has none.
            entropy_gradient: Whether the entropy is part of the loss.
            terms: Whether the objective computes terms of the loss from whole distributions
                (`DistributionObjective`).
            nucleus: Whether probabilities are those of nucleus sampling, for which they are sorted.
            compared_with: The distributions that those of the chunk are compared with; None for none.
            teacher_bytes: The further bytes of each logit if the objective compares the policy with a teacher
                (`TeacherObjective.compare_bytes`); else 0.
        """
        logits_per_chunk = LOGITS_PER_CHUNK[self.device]
        if teacher_bytes:
            logits_per_chunk //= 2  # the chunk has the logits of two models
        most_positions = max(1, logits_per_chunk // self.shape.vocabulary)
        trained_positions = self.trained  # the head computes logits only of the tokens that are trained
        positions = 0
        if trained_positions:
            n_chunks = math.ceil(trained_positions / most_positions)
            positions = math.ceil(trained_positions / n_chunks)  # all chunks have the same size
        logits = positions * self.shape.vocabulary
        forward_bytes_per_logit = BYTES_PER_LOGIT
        if compared_with is not None:
            forward_bytes_per_logit = COMPARISON_BYTES_PER_LOGIT[compared_with]
        elif nucleus:
            forward_bytes_per_logit = NUCLEUS_BYTES_PER_LOGIT + SORT_BYTES_PER_LOGIT[self.device]
        forward_bytes = logits * (forward_bytes_per_logit + teacher_bytes)
        if not backward:
            return forward_bytes
        backward_bytes_per_logit = BACKWARD_BYTES_PER_LOGIT
        if terms:
            backward_bytes_per_logit = BACKWARD_BYTES_WITH_TERMS
        elif entropy_gradient:
            backward_bytes_per_logit = BACKWARD_BYTES_WITH_ENTROPY
        backward_bytes = logits * (backward_bytes_per_logit + teacher_bytes)
        # The gradients of the head's weight, and of the hidden states that go into it.
        gradient_of_weight = self.shape.head * self.itemsize if head_is_trained else 0
        gradients_of_hidden_states = trained_positions * self.itemsize * self.shape.hidden
        return max(forward_bytes, backward_bytes + gradient_of_weight + gradients_of_hidden_states)

    @property
    def scoring(self) -> int:
        """The most bytes of a forward pass without gradient, without its head: those of the widest part of a
        block."""
        shape, size = self.shape, self.itemsize
        mlp = size * (2 * shape.hidden + 3 * shape.intermediate)
        norm = 3 * 4 * shape.hidden + size * shape.hidden  # three tensors in float32, and one in `itemsize`
        attention = size * (2 * shape.hidden + 2 * shape.query + 2 * shape.key)
        # The last term is for the cosines and sines of rotary embeddings.
        return self.tokens * (max(mlp, norm, attention) + 2 * size * shape.head_dim)


OUTSIDE_BYTES = int(1.5 * GIB)
"""Assumed bytes of a GPU, within the server's share, for CUDA's context, graphs and other memory outside of
PyTorch."""
ASLEEP_BYTES = int(2.5 * GIB)
"""Assumed bytes of a GPU that a sleeping server keeps."""
PROCESS_BYTES = int(2.0 * GIB)
"""Bytes of the host for libraries and heap of a server's processes (1.6 GiB were measured with tiny models on
a CPU)."""


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one server, in bytes, on each of its devices."""

    settings: VllmSettings
    shape: Shape
    machine: Machine
    context_length: int

    @property
    def itemsize(self) -> int:
        return 4 if self.settings.resolved_dtype(self.machine.device) == "float32" else 2

    @property
    def weights(self) -> int:
        return self.itemsize * self.shape.served // self.settings.tensor_parallel_size

    @cached_property
    def largest_step(self) -> int:
        """The bytes of the server's largest step: its MLPs, and the logits of all sequences with the tensors
        of sampling."""
        settings, shape = self.settings, self.shape
        tokens = settings.tokens_of_a_step(self.machine.device, self.context_length)
        mlp = self.itemsize * tokens * (4 * shape.hidden + 3 * shape.intermediate)
        # For each logit: itself in the model's precision, and 4 * 4 bytes for the tensors of sampling.
        logits = settings.max_num_seqs * shape.vocabulary * (self.itemsize + 4 * 4)
        return (mlp + logits) // settings.tensor_parallel_size

    @property
    def reserved_bytes(self) -> int:
        """The bytes of a GPU that the server uses while it is awake, keys and values included."""
        assert self.settings.gpu_memory_utilization is not None, "`Plan.engine` has set it"
        return int(self.settings.gpu_memory_utilization * self.machine.device_memory)

    @property
    def bytes_per_token(self) -> float:
        """The bytes of keys and values of a token on one device."""
        # At least one: with more devices than heads, several devices have the same head.
        heads = max(self.shape.kv_heads / self.settings.tensor_parallel_size, 1)
        return 2 * self.shape.layers * heads * self.shape.head_dim * self.itemsize

    @property
    def cache(self) -> int:
        """The bytes for keys and values; negative if not even the weights fit."""
        if self.machine.device == "cpu":
            return self.settings.kv_cache_gib * GIB
        return self.reserved_bytes - self.weights - self.largest_step - OUTSIDE_BYTES

    @property
    def cached_tokens(self) -> int:
        return int(max(0, self.cache) // self.bytes_per_token)

    @property
    def least_bytes(self) -> int:
        """The fewest bytes with which vLLM starts: with space for one sequence as long as the context."""
        return int(
            self.weights + self.largest_step + OUTSIDE_BYTES + self.context_length * self.bytes_per_token
        )

    @property
    def on_cpu(self) -> int:
        """The bytes of the host's memory, for a server on a CPU."""
        return self.weights + self.largest_step + self.cache + PROCESS_BYTES


def servers_on_a_machine(settings: Any, machine: Machine) -> int:
    """Returns the number of servers on a machine: the replicas of each rank's server or, if all ranks share
    one, its replicas on the first machine."""
    return settings.replicas_on(machine.device) * (machine.ranks if settings.servers == "per_rank" else 1)


BUCKET_ELEMENTS = 500_000_000
"""The elements of the buffer in which ZeRO collects gradients: DeepSpeed's default of `reduce_bucket_size`,
which the trainer keeps."""
GATHERED_ELEMENTS = 1_050_000_000
"""The most elements of gathered weights that ZeRO-3 keeps: the sum of DeepSpeed's defaults of
`max_live_parameters`, 1e9, and `prefetch_bucket_size`, 5e7, which the trainer keeps."""
FRAGMENTATION = 1.1
"""The assumed ratio of the memory that PyTorch reserves on a GPU for passes to the memory that they
allocate."""


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """The bytes of one trained model on one rank's device."""

    weights: int
    """The weights that passes use."""
    master: int = 0
    """The weights in float32 that the optimiser updates."""
    optimizer: int = 0
    buffers: int = 0
    gradients: int = 0
    """Gradients, from a backward pass to the step."""
    passing: int = 0
    """Further memory during forward and backward passes, for what sharding adds: gathered weights and buckets
    of gradients. It is free again in a step of the optimiser."""
    stepping: int = 0
    """Further memory during a step of the optimiser, for its intermediate values. It is free again in
    passes."""
    on_host: int = 0
    """The bytes of the host that ZeRO's offloading uses."""

    @property
    def kept(self) -> int:
        """The bytes that stay from step to step."""
        return self.weights + self.master + self.optimizer + self.buffers


def memory_of_model(trainer: Trainer, all_weights: int, trained: int, machine: Machine) -> ModelMemory:
    """Returns the bytes of a model as this trainer shards it.

    A weight in float32 takes 4 bytes, its gradient 4, and the optimiser 8: Adam's two running means. The
    fields `passing` and `stepping` of the result are the further bytes during a forward or backward pass, and
    during a step of the optimiser.

    Args:
        trainer: Its ZeRO stage says what is sharded, and its offloading says what lies on the host.
        all_weights: The number of weights.
        trained: The number of trained weights.
        machine: Its ranks share what is sharded.
    """
    size = itemsize(trainer)  # the bytes of a number in forward and backward passes
    stage = trainer.zero_stage
    on_gpu = machine.device == "cuda"
    ranks = machine.world_size
    part = -(-trained // ranks)  # the weights that one rank updates, rounded up
    # On a CPU, a step of PyTorch's Adam allocates two tensors in float32, a root and a quotient. Each is as
    # large as the weights that the step updates at once.
    adam = 0 if on_gpu else 2 * 4 * part
    if stage == 0:
        # Gradients are copied into a flat buffer to be averaged. `adam` isn't added: without ZeRO, Adam
        # updates one tensor of weights after the other.
        flat_buffer = 4 * min(trained, BUCKET_ELEMENTS)
        return ModelMemory(
            weights=4 * all_weights, optimizer=8 * trained, gradients=4 * trained, stepping=flat_buffer
        )
    if trainer.offload_optimizer and on_gpu:
        ranks_that_share_weights = ranks if stage == 3 else 1
        weights = -(-size * all_weights // ranks_that_share_weights)  # rounded up
        weights_on_host = weights if trainer.offload_parameters else 0
        # Stage 3 gathers weights for a pass. Stages 1 and 2 collect gradients in a bucket.
        passing = size * (min(GATHERED_ELEMENTS, all_weights) if stage == 3 else BUCKET_ELEMENTS)
        return ModelMemory(
            weights=weights - weights_on_host,
            buffers=size * BUCKET_ELEMENTS if stage == 3 else 0,
            passing=passing,
            on_host=weights_on_host + (4 + 4 + 8) * part,  # weights, gradients, optimiser, all in float32
        )
    if stage == 1 and size == 2:
        # DeepSpeed's own optimiser for bfloat16 has a buffer on each rank for all gradients in float32, which
        # it keeps from step to step. Gradients in bfloat16 are dropped one by one (`immediate_grad_update`).
        return ModelMemory(
            weights=size * all_weights,
            master=4 * part,
            optimizer=8 * part,
            buffers=4 * trained,
            stepping=adam,
        )
    if stage <= 2:
        n_gradients = trained if stage == 1 else part  # stage 2 shards them
        bfloat16_gradients = size * part if size == 2 else 0  # those that passes make
        return ModelMemory(
            weights=size * all_weights,
            master=4 * part,
            optimizer=8 * part,
            gradients=4 * n_gradients,
            passing=size * BUCKET_ELEMENTS + bfloat16_gradients,
            stepping=adam,
        )
    # Stage 3 keeps two buffers: this rank's part of the gradients in float32, and a bucket that collects
    # gradients. A step copies this rank's part.
    return ModelMemory(
        weights=-(-size * all_weights // ranks),
        master=4 * part,
        optimizer=8 * part,
        buffers=4 * part + size * BUCKET_ELEMENTS,
        passing=size * min(GATHERED_ELEMENTS, all_weights),
        stepping=4 * part + adam,
    )


def itemsize(trainer: Trainer) -> int:
    """Returns the bytes of a number in forward and backward passes."""
    return 2 if trainer.precision == "bfloat16" else 4


ShapeOf = Callable[[ModelSource, Alphabet], Shape | None]
"""Returns the sizes of a model, which has an alphabet if it is made for a task; None if they are unknown."""


def read_shape(source: ModelSource, alphabet: Alphabet) -> Shape | None:
    """Returns the sizes of a model; None if they are unknown. Raises ValueError if it doesn't exist."""
    return source.shape(alphabet)


@dataclass(frozen=True)
class TrainerMemory:
    """The bytes that the trainer uses on a rank's device."""

    experiment: Any
    shape: Shape
    """The sizes of the policy."""
    machine: Machine
    work: IterationWork
    bound_of_micro_batch: int | None = None
    """A further bound on the tokens of a rank's micro-batch; None: only those of the settings."""
    shape_of: ShapeOf = read_shape
    """Gives the sizes of the reference and of the reward model, if they aren't the policy's."""

    @property
    def trainer(self) -> Trainer:
        return self.experiment.trainer

    @cached_property
    def policy(self) -> ModelMemory:
        """The bytes of the policy's weights, gradients and optimiser."""
        all_weights = trained = self.shape.parameters
        if self.trainer.lora is not None:
            trained = adapter_weights(self.shape, self.trainer.lora.rank)
            all_weights += trained  # the adapters are added to the model
        return memory_of_model(self.trainer, all_weights, trained, self.machine)

    @cached_property
    def critic(self) -> ModelMemory | None:
        """The bytes of the critic's weights, gradients and optimiser; None if there is no critic.

        The critic is a whole model with its own optimiser, even if the policy has adapters.
        """
        if not self.experiment.credit.needs_critic:
            return None
        settings = self.experiment.credit.critic_settings
        outputs = 1 if settings is None else settings.loss.outputs
        weights = self.shape.backbone + outputs * (self.shape.hidden + 1)  # with the head's biases
        return memory_of_model(self.trainer, all_weights=weights, trained=weights, machine=self.machine)

    @cached_property
    def reward_model_weights(self) -> int:
        """The number of weights of the reward model that is trained; 0 if there is none."""
        settings = reward_model_of(self.experiment.credit)
        if settings is None:
            return 0
        if settings.start is None:
            return self.shape.parameters
        shape = self.shape_of(settings.start, self.experiment.task.alphabet)
        # A model of unknown sizes counts as large as the policy.
        return (shape or self.shape).parameters

    @cached_property
    def reward_model(self) -> ModelMemory | None:
        """The bytes of the trained reward model's weights, gradients and optimiser; None if there is none.

        The reward model is a whole model with its own optimiser.
        """
        weights = self.reward_model_weights
        if not weights:
            return None
        return memory_of_model(self.trainer, all_weights=weights, trained=weights, machine=self.machine)

    @cached_property
    def moving_average_weights(self) -> int:
        """The number of weights of the moving average that is the objective's teacher; 0 without one.

        The average is a copy of the whole policy, with its adapters.
        """
        teacher = teacher_of(self.trainer.objective)
        if teacher is None or teacher.weights != "average":
            return 0
        adapters = 0
        if self.trainer.lora is not None:
            adapters = adapter_weights(self.shape, self.trainer.lora.rank)
        return self.shape.parameters + adapters

    @property
    def moving_average(self) -> int:
        """The bytes of the moving average: a copy in float32 and, if passes run in bfloat16, one more copy in
        bfloat16 for them."""
        bytes_of_weight = 4 if self.trainer.precision == "float32" else 4 + itemsize(self.trainer)
        return bytes_of_weight * self.moving_average_weights

    @property
    def learned_models(self) -> list[ModelMemory]:
        """The states of the models that are trained in addition to the policy."""
        return [model for model in (self.critic, self.reward_model) if model is not None]

    @cached_property
    def reference(self) -> int:
        """The bytes of the reference's weights, whole or this rank's part; 0 if there is none, or if it is
        the policy without adapters."""
        trainer = self.trainer
        if not trainer.keeps_reference or trainer.lora is not None:
            return 0
        # None: the start model is the reference.
        other_model = self.experiment.credit.trainer_scores.reference_model
        if other_model is None:
            shape: Shape | None = self.shape
        else:
            shape = self.shape_of(other_model, self.experiment.task.alphabet)
        # A model of unknown sizes counts as large as the policy.
        whole = itemsize(trainer) * (shape or self.shape).parameters
        is_sharded = trainer.shards_weights and not trainer.offload_reference
        return whole // self.machine.world_size if is_sharded else whole

    @property
    def reference_stays(self) -> bool:
        """Whether the reference is on the device all the time, as always on a CPU."""
        return self.machine.device == "cpu" or not self.trainer.offload_reference

    @cached_property
    def micro_batch(self) -> int:
        """The tokens of a rank's largest micro-batch."""
        trainer, work = self.trainer, self.work
        rows_together = 2 if trainer.objective.needs_pairs else 1  # a pair is in one micro-batch
        ranks_of_group = trainer.sequence_parallel_size  # the ranks of a group share each row
        # The policy's rows have at most `work.longest` tokens. A critic with a template, and a teacher, read
        # longer prompts.
        longest_of_any_model = work.longest
        critic = self.experiment.credit.critic_settings
        has_critic_prompts = critic is not None and critic.template is not None
        if has_critic_prompts or isinstance(trainer.objective, TeacherObjective):
            longest_of_any_model = self.experiment.context_length
        groups = max(1, self.machine.world_size // ranks_of_group)
        # A unit is a row, or a pair of rows.
        units_of_step = min(trainer.minibatch_size or work.rows, max(work.rows, 1))
        most_rows = -(-units_of_step // groups) * rows_together  # the rows of a group in a step, rounded up
        if trainer.sequences_per_micro_batch is not None:
            most_rows = min(most_rows, max(rows_together, trainer.sequences_per_micro_batch))
        most_tokens = min(trainer.tokens_per_micro_batch * ranks_of_group, most_rows * work.longest)
        # A row, or pair, that exceeds the limit has a micro-batch to itself.
        tokens = max(rows_together * longest_of_any_model, most_tokens)
        tokens_of_rank = -(-tokens // ranks_of_group)  # rounded up
        if self.bound_of_micro_batch is not None:
            tokens_of_rank = min(tokens_of_rank, self.bound_of_micro_batch)
        return tokens_of_rank

    def passes_over(self, tokens: int) -> Passes:
        """Returns the passes over a micro-batch of this many tokens. The share of trained tokens is assumed
        to be that of the longest row."""
        trainer = self.trainer
        on_cpu = self.machine.device == "cpu"
        return Passes(
            shape=self.shape,
            itemsize=itemsize(trainer),
            tokens=tokens,
            trained=-(-tokens * self.work.longest_answer // self.work.longest),  # rounded up
            device=self.machine.device,
            checkpointing=trainer.gradient_checkpointing,
            masked=on_cpu and trainer.layout == "packed",  # on a GPU, packed attention needs no mask
        )

    @cached_property
    def micro_batch_pass(self) -> int:
        """The most bytes of the activations and gradients of a micro-batch's forward and backward pass.

        The passes of critic and reward model are counted with the policy's shape, so that one number stands
        for the passes of all three models.
        """
        passes, objective = self.passes_over(self.micro_batch), self.trainer.objective
        loss_has_entropy = objective.entropy_coef != 0 or self.trainer.entropy_target is not None
        head = passes.head(
            backward=True,
            # The reward model has no adapters, so its head is trained even if the policy's isn't.
            head_is_trained=self.trainer.lora is None or self.reward_model is not None,
            entropy_gradient=loss_has_entropy,
            terms=isinstance(objective, DistributionObjective),
            teacher_bytes=objective.compare_bytes if isinstance(objective, TeacherObjective) else 0,
        )
        size = passes.kept + max(head, passes.backward_of_a_block)
        if isinstance(objective, TeacherObjective):
            # The teacher's pass comes first. Of its last hidden states, those of the trained tokens are
            # copied, and the copy stays during the policy's pass. So the most bytes are needed either in the
            # teacher's blocks, or while its states are copied, or in the policy's pass.
            copied_states = passes.trained * passes.itemsize * passes.shape.hidden
            while_copying = _hidden_states(passes) + copied_states
            size = max(passes.scoring, while_copying, size + copied_states)
        # PyTorch reserves more bytes on a GPU than its tensors have.
        return self._reserved(size)

    @cached_property
    def scoring(self) -> int:
        """The most bytes of passes without gradient."""
        trainer, work = self.trainer, self.work
        tokens = self.micro_batch
        if trainer.sequences_per_micro_batch is None:
            # Without gradient, a micro-batch has twice as many tokens, but not more than all rows have.
            # If its rows are limited, it is as large as with gradient.
            tokens = min(2 * tokens, max(tokens, work.rows * work.longest))
        passes = self.passes_over(tokens)
        head = passes.head(backward=False, nucleus=self._has_nucleus)
        peaks = [passes.scoring, _hidden_states(passes) + head]
        # Credit may compare the policy's distributions with the reference's ("reference"), or with their mean
        # over all answers to the problem ("group").
        compared_with = self.experiment.credit.trainer_scores.compared_with
        if "reference" in compared_with or isinstance(trainer.objective, ReferenceKlObjective):
            peaks.append(_comparison_with_reference(passes))
        if "group" in compared_with:
            # All answers to a problem are in one micro-batch.
            answers_of_problem = -(-work.answers // work.problems)  # rounded up
            passes_of_group = self.passes_over(max(tokens, answers_of_problem * work.longest))
            head_of_group = passes_of_group.head(backward=False, compared_with="group")
            peaks += [passes_of_group.scoring, _hidden_states(passes_of_group) + head_of_group]
        gathered = self.policy.passing if trainer.zero_stage == 3 else 0  # ZeRO-3 gathers weights for a pass
        # An offloaded reference is copied to the GPU to score.
        copied_reference = 0 if self.reference_stays else self.reference
        return self._reserved(max(peaks)) + gathered + copied_reference

    @property
    def _has_nucleus(self) -> bool:
        sampling = self.experiment.rollout.sampling
        return (
            sampling is not None and sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
        )

    def _reserved(self, size: int) -> int:
        """Returns the bytes that PyTorch reserves for tensors of this size."""
        return round(size * FRAGMENTATION) if self.machine.device == "cuda" else size

    @property
    def bytes_of_models(self) -> int:
        """The bytes that stay on the device from step to step."""
        learned = sum(model.kept for model in self.learned_models)
        reference = self.reference if self.reference_stays else 0
        return self.policy.kept + learned + reference + self.moving_average

    @property
    def peak(self) -> int:
        """The most bytes of training: of scoring, of passes with gradients, or of a step."""
        models = [self.policy, *self.learned_models]
        # Policy and critic have gradients at the same time, from the backward pass to the end of the step.
        # The reward model's steps are over before the policy's first step, but its gradients are counted as
        # well.
        gradients = sum(model.gradients for model in models)
        # The models run their passes one after the other, so only the largest counts. They also make their
        # steps one after the other, when the activations of all passes have been freed.
        during_pass = max(model.passing for model in models) + self.micro_batch_pass
        during_step = max(model.stepping for model in models)
        return self.bytes_of_models + max(self.scoring, gradients + max(during_pass, during_step))

    @property
    def scorable(self) -> int:
        """The bytes that stay on a GPU while the engine is awake there: the weights that score answers."""
        return self.policy.weights + (self.reference if self.reference_stays else 0)

    @property
    def put_aside(self) -> int:
        """The bytes that are moved to the host while the engine is awake on the trainer's GPU."""
        return self.bytes_of_models - self.scorable


def _hidden_states(passes: Passes) -> int:
    """Returns the bytes of a micro-batch's last hidden states, before and after the last norm."""
    return passes.tokens * passes.itemsize * 2 * passes.shape.hidden


def _comparison_with_reference(passes: Passes) -> int:
    """Returns the most bytes of a comparison of the policy's whole distributions with the reference's.

    The policy's log-probs of the whole vocabulary are there twice while chunks are put together, and once
    while the reference runs over the same micro-batch.
    """
    logprobs = 4 * passes.trained * passes.shape.vocabulary
    head = passes.head(backward=False, compared_with="reference")
    return logprobs + max(logprobs, passes.scoring, _hidden_states(passes) + head)


def adapter_weights(shape: Shape, rank: int) -> int:
    """Returns the number of weights of adapters on all linear layers except the head."""
    # An adapter of a layer from `n` to `m` features has `rank * (n + m)` weights.
    attention = 2 * (shape.hidden + shape.query)  # from hidden states to queries, and from results back
    attention += 2 * (shape.hidden + shape.key)  # to keys, and to values
    mlp = 3 * (shape.hidden + shape.intermediate)
    return rank * shape.layers * (attention + mlp)
