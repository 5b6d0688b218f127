"""The configuration of the trainer. The work is done in `trainer.core`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Advantages, Experiment, Feature, Finding, Need, Part, Turns, UseOfAdvantages
from treetune.models.lora import Lora
from treetune.objectives.base import Objective
from treetune.objectives.further_inputs import ReferenceKlObjective, TeacherObjective, teacher_of
from treetune.objectives.teacher import Teacher

Layout = Literal["padded", "packed", "tree"]

AdamBeta = Annotated[float, Ge(0), Lt(1)]


class Schedule(Registrable):
    """A learning-rate schedule: the rate of each optimiser step as a factor of the configured rate."""

    warmup_steps: int = 0
    """The fewest steps that training must have, since a warm-up of this length has to end in it; 0 allows any
    number."""

    length_matters: str | None = None
    """The reason why the factors depend on the length of training, such as ``its linear decay spans the whole
    of it``; None if they don't depend on it."""

    def factor(self, step: int, total_steps: int) -> float:
        """Returns the factor for optimiser step `step` (0-based) of `total_steps`."""
        raise NotImplementedError


@Schedule.register("warmup")
@dataclass(frozen=True, kw_only=True)
class Warmup(Schedule):
    """Linear warm-up to the whole rate, then constant or decaying to 0.

    In a warm-up of 4 steps, the first step has a quarter of the rate, and the fourth all of it. No step has
    rate 0: a step that can't move anything is wasted.
    """

    steps: Annotated[int, Ge(0)] = 0
    """Length of the warm-up in optimiser steps. A run with fewer steps is refused, unless
    `may_outlast_training` is true."""
    ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Length of the warm-up as a share of the run's steps, rounded up, where `steps` is 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """The course from the end of the warm-up to the run's last step."""
    may_outlast_training: bool = False
    """Allows more `steps` than the run has: for a short try of a long experiment."""

    def __post_init__(self) -> None:
        if self.steps and self.ratio:
            raise ValueError("give the warm-up as steps or as ratio, not as both")

    @property
    @override
    def warmup_steps(self) -> int:  # type: ignore[override]
        return 0 if self.may_outlast_training else self.steps

    @property
    @override
    def length_matters(self) -> str | None:  # type: ignore[override]
        if self.decay != "constant":
            return f"its {self.decay} decay spans the whole of it"
        return "its warm-up is a part of the whole of it (ratio)" if self.ratio and not self.steps else None

    @override
    def factor(self, step: int, total_steps: int) -> float:
        warmup = self.steps or math.ceil(self.ratio * total_steps)
        if step < warmup:
            return (step + 1) / warmup
        if self.decay == "constant":
            return 1.0
        decayed_share = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if self.decay == "linear":
            return 1.0 - decayed_share
        return 0.5 * (1 + math.cos(math.pi * decayed_share))


@Schedule.register("deepspeed_warmup_decay")
@dataclass(frozen=True, kw_only=True)
class DeepSpeedWarmupDecay(Schedule):
    """``WarmupDecayLR`` of DeepSpeed 0.14.1, driven as the VinePPO paper's code drives it: the first step has
    the whole rate, the second none; then the rate rises with the logarithm of the step and falls
    linearly to 0.

    For comparisons with published runs only: the first step has a larger rate than any other, before any
    warm-up. Other runs should use `Warmup`.
    """

    ratio: Annotated[float, Gt(0), Le(1)] = 0.03
    """The warm-up's share of the run's steps."""

    @override
    def factor(self, step: int, total_steps: int) -> float:
        if step == 0:
            return 1.0  # DeepSpeed's scheduler sets no rate before the first step
        # As in DeepSpeed, the warm-up has at least 2 steps: the rate is divided by the logarithm of their
        # number, which is 0 for a single step.
        warmup = max(2, math.ceil(self.ratio * total_steps))
        scheduled = step - 1  # DeepSpeed's scheduler counts from 0 at the second step
        if scheduled < warmup:
            return math.log(scheduled + 1) / math.log(warmup)
        return max(0.0, (total_steps - scheduled) / max(1, total_steps - warmup))


@dataclass(frozen=True, kw_only=True)
class EntropyTarget:
    """Holds the mean entropy at trained tokens near `target` (nats).

    The coefficient of the entropy begins at the objective's `entropy_coef`. After each step,
    ``rate * (target - entropy)`` is added to it, and it is kept between `lowest` and `highest`. This is
    integral control, as soft actor-critic adjusts its temperature (Haarnoja et al. 2018, arXiv:1812.05905,
    section 5).
    """

    target: Annotated[float, Ge(0)]
    rate: Annotated[float, Gt(0)] = 1e-3
    """The change of the coefficient in a step for each nat between target and entropy."""
    lowest: float = 0.0
    """The smallest coefficient. With 0, the entropy is only increased and never decreased."""
    highest: float = 0.1
    """The largest coefficient."""

    def __post_init__(self) -> None:
        if self.lowest >= self.highest:
            raise ValueError(f"entropy_target: lowest {self.lowest} must be below highest {self.highest}")


@dataclass(frozen=True, kw_only=True)
class Trainer(Part):
    """The trainer of every method: AdamW on a DeepSpeed engine.

    Each rank computes micro-batches of its own, unless `sequence_parallel_size` lets neighbouring ranks
    compute theirs together. `sequence_parallel_size` changes only the speed, and so do `layout` and the
    limits of micro-batches. These limits are per rank.
    """

    objective: Objective
    learning_rate: Annotated[float, Gt(0)]
    """AdamW's learning rate, which the `schedule` multiplies by a factor in each step."""
    schedule: Schedule = field(default_factory=Warmup)
    adam_betas: tuple[AdamBeta, AdamBeta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    adam_eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the running mean of the squared gradient, by which AdamW divides a step."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """AdamW's weight decay of matrices. Vectors (biases and the weights of norms) have no decay."""
    max_grad_norm: Annotated[float, Gt(0)] | None = 1.0
    """Longer gradients are scaled down to this norm; null: gradients are not clipped."""
    epochs: Annotated[int, Gt(0)] = 1
    """Number of passes over an iteration's episodes."""
    minibatch_size: Annotated[int, Gt(0)] | None = None
    """Number of sequences (or pairs) of one optimiser step over all ranks; null: the whole iteration's."""
    tokens_per_micro_batch: Annotated[int, Gt(0)] = 16384
    """Most tokens of a micro-batch, padding included; a longer row runs alone."""
    sequences_per_micro_batch: Annotated[int, Gt(0)] | None = None
    """Most rows of a micro-batch; null: no limit. An answer with threads is one sequence, with a row for each
    part that was sampled by one request."""
    layout: Layout = "padded"
    """Rows of a micro-batch are ``padded`` to one length, ``packed`` into one row, or merged into a prefix
    ``tree``, in which a common beginning is computed once. All of a problem's rows in a minibatch become one
    tree, or several if it would have more than `tokens_per_micro_batch` tokens. A tree counts as one row."""
    advantage_normalisation: Literal["none", "whiten", "scale"] = "none"
    """Over all trained tokens of the iteration: ``whiten`` to mean 0 and standard deviation 1, ``scale`` to
    standard deviation 1 only."""
    normalise_by_domain: bool = False
    """Normalises over the tokens of each domain separately, so that a domain doesn't move the weights more
    because its rewards differ more."""
    measure_kl: bool = True
    """Keeps the start model as the reference even where the objective needs none, so that ``train/kl`` is
    known."""
    token_signals: Literal["none", "known", "all"] = "known"
    """The values of each trained token that are stored with the episodes: the policy's log-prob and entropy
    before the updates, the gap between this log-prob and the engine's, the log-ratio at the last step that
    trained the token, and the reference's log-prob. ``known`` stores those that training computes anyway;
    ``all`` stores all of them, for one more forward pass over the iteration if training has none before its
    first step; ``none`` stores none. At most 20 bytes a token. It changes no update."""
    logprob_gap_limit: Annotated[float, Gt(0)] | None = None
    """Largest mean difference, in nats, between the trainer's and the engine's log-probs of an iteration's
    trained tokens (``engine/logprob_gap_mean``). null: 1e-3 where both compute in float32 on a CPU, 5e-3 on a
    GPU, 0.15 where one computes in half precision, 0.5 where the engine or its cache is quantised; and three
    times `engines.policy.canary_tolerance` where that is more. There is no limit where trainer and engine
    differ by design: at temperature 0, and for answers that older weights sampled (`overlap`, `restart`)."""
    on_logprob_gap: Literal["stop", "warn"] = "stop"
    """A larger gap ends the run (``stop``), or is logged at each iteration (``warn``). With an importance
    correction in the objective it is only logged."""
    entropy_target: EntropyTarget | None = None
    """Adjusts the coefficient of the entropy while training."""
    skip_without_advantage: bool = False
    """Takes no step on a minibatch whose advantages are all 0 (groups of equal rewards). Such a step would
    move the weights only by old momentum, KL and weight decay."""
    offload_reference: bool = False
    """Keeps the reference on the CPU while it isn't needed."""
    reference_scores: Literal["before_training", "while_sampling"] = "before_training"
    """Time at which the reference scores answers: all together (``before_training``), or each by itself as
    soon as it is sampled (``while_sampling``), for trainers whose device is idle meanwhile
    (`engines.policy.devices`). The two differ in the last bits. With either, results don't depend on how the
    work was cut or resumed."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations in the forward and backward passes."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """Sharded over the ranks: nothing (0), optimiser states (1), also gradients (2), also weights (3)."""
    offload_optimizer: bool = False
    """Keeps optimiser states on the CPU (ZeRO)."""
    offload_parameters: bool = False
    """Keeps weights on the CPU (ZeRO-3)."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass: less memory, more time."""
    lora: Lora | None = None
    """Trains adapters on the start model instead of its weights. The reference is then the model without its
    adapters, which costs no memory. A critic is still trained as a whole model."""
    sequence_parallel_size: Annotated[int, Gt(0)] = 1
    """Number of neighbouring ranks that share every sequence (DeepSpeed-Ulysses; for long ones)."""

    @classmethod
    @override
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        """Returns the keys that change only speed, memory, files and messages.

        `zero_stage`, `offload_optimizer` and `offload_parameters` are not among them, since they decide how a
        checkpoint's optimiser state is sharded.
        """
        return frozenset(
            {
                "tokens_per_micro_batch",
                "sequences_per_micro_batch",
                "layout",
                "offload_reference",
                "gradient_checkpointing",
                "sequence_parallel_size",
                "token_signals",
                "logprob_gap_limit",
                "on_logprob_gap",
            }
        )

    @property
    def length_matters(self) -> str | None:
        """The reason why training depends on its length, for messages; None if it doesn't."""
        reason = self.schedule.length_matters
        return None if reason is None else f"trainer.schedule depends on the length of training: {reason}"

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return self.objective.gives

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        if not self.skip_without_advantage:
            return ()
        because = "skip_without_advantage looks at the advantages that credit gives"
        remedy = "set skip_without_advantage to false: a critic's advantages come later, and are never all 0"
        # Credit has to give advantages before training, and the objective has to learn from them.
        return (
            Need(Advantages(before_training=True), because, remedy),
            Need(UseOfAdvantages(), because, "set skip_without_advantage to false"),
        )

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference's log-probs are computed in addition to the policy's."""
        return self.objective.needs_reference or (self.measure_kl and self.objective.measures_kl)

    def scores_old_logprobs(self, *, several_steps: bool) -> bool:
        """Returns whether a forward pass before an iteration's first step computes the old log-probs.

        Two uses need the old log-probs before the first step: a KL penalty in rewards or advantages, and an
        objective that computes numbers in advance (`ReferenceKlObjective`). Without these uses, an iteration
        of one step saves the pass: the step's own forward pass gives the old log-probs.
        """
        objective = self.objective
        # A loss with advantages needs the old log-probs, and so does the metric ``train/kl``.
        needs_old_logprobs = objective.needs_advantages or (self.keeps_reference and self.measure_kl)
        if isinstance(objective, TeacherObjective) and objective.importance_cap is not None:
            # The loss corrects p / p_engine by the mass that top-p and top-k leave. The pass that computes
            # the old log-probs also computes this mass.
            needs_old_logprobs = True
        needs_them_before_first_step = objective.kl_penalty is not None or isinstance(
            objective, ReferenceKlObjective
        )
        return needs_them_before_first_step or (several_steps and needs_old_logprobs)

    @property
    def shards_weights(self) -> bool:
        """Whether each rank keeps only its part of the weights (ZeRO-3)."""
        return self.zero_stage == 3

    @property
    def reads_in_parts(self) -> bool:
        """Whether weights are sharded while they are read, so that no rank ever holds all of them."""
        return self.shards_weights and not self.offload_parameters

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.reference_scores == "while_sampling":
            yield from self._check_scoring_while_sampling(experiment)
        rows = _most_rows(experiment)
        if rows is None:
            return
        if self.minibatch_size is not None and self.minibatch_size > rows:
            yield Finding(
                f"minibatch_size is {self.minibatch_size}, which exceeds the {rows} sequences (or pairs) that"
                " an iteration has at most",
                "minibatch_size",
                "lower it, or set it to null for one step an iteration",
            )
        # With `restart: 'every_iteration'`, training begins anew in every iteration, and the schedule spans
        # the steps of a single iteration.
        iterations = 1 if experiment.restart == "every_iteration" else experiment.iterations
        rows_of_step = self.minibatch_size or max(rows, 1)  # at least 1, as a divisor
        steps = iterations * self.epochs * math.ceil(rows / rows_of_step)
        # For `Warmup`, `warmup_steps` are its `steps`, or 0 if its `may_outlast_training` is true.
        if self.schedule.warmup_steps > steps:
            yield Finding(
                f"the warm-up takes {self.schedule.warmup_steps} steps, and training has {steps}",
                "schedule.steps",
                "lower it, train for more iterations, or set schedule.may_outlast_training to true for"
                " a short try",
            )

    def uneven_steps(self, experiment: Any) -> str | None:
        """Returns a note if the last step of each epoch is smaller, since `minibatch_size` doesn't divide the
        number of an iteration's sequences. Returns None if it does, or if that number isn't known."""
        rows = _most_rows(experiment)
        size = self.minibatch_size
        if rows is None or size is None or rows % size == 0:
            return None
        return (
            f"trainer.minibatch_size {size} doesn't divide the {rows} sequences of a full iteration: each"
            f" epoch has {rows // size} steps of {size} and a last one of {rows % size}; no sequence is"
            " dropped"
        )

    def _check_scoring_while_sampling(self, experiment: Experiment) -> Iterator[Finding]:
        """Yields a finding for each reason against `reference_scores` ``while_sampling``, which needs a
        reference that each rank runs by itself, on a device with time and memory for it during sampling."""
        for applies, reason in (
            (not self.keeps_reference, "nothing here needs a reference"),
            (not experiment.rollout.needs_engine, "this rollout samples nothing"),
            (
                Turns() in experiment.rollout.gives,
                "the turns of an answer are sampled one by one and trained together, so none could be scored"
                " ahead",
            ),
            (self.shards_weights, "the reference is sharded over the ranks, which run it together"),
            (self.sequence_parallel_size > 1, "ranks run each sequence together"),
            (self.lora is not None, "the reference is the policy without its adapters"),
            (self.offload_reference, "the reference is on the CPU while the engine samples"),
            (
                getattr(experiment.engines.policy, "sleep", False),
                "the engine has the trainer's memory meanwhile",
            ),
            (
                getattr(experiment, "overlap", "none") != "none",
                "with overlap 'one_step' the trainer trains on the iteration before meanwhile",
            ),
        ):
            if applies:
                yield Finding(
                    f"reference_scores is 'while_sampling', but {reason}",
                    "reference_scores",
                    "leave it at 'before_training'",
                )

    def __post_init__(self) -> None:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage 3")
        if self.entropy_target is not None:
            self._check_entropy(self.entropy_target)
        if self.normalise_by_domain and self.advantage_normalisation == "none":
            raise ValueError(
                "normalise_by_domain is true, and advantage_normalisation is 'none': set that to 'whiten' or"
                " 'scale'"
            )
        if self.precision == "bfloat16" and self.zero_stage == 0:
            raise ValueError(
                "zero_stage 0 sums the gradients of micro-batches in bfloat16, so that the update would"
                " depend on the size of micro-batches: set zero_stage to 1 or more, which sums them in"
                " float32"
            )
        if self.layout == "tree" and self.sequence_parallel_size > 1:
            raise ValueError(
                f"sequence_parallel_size is {self.sequence_parallel_size}, and ranks can't share the tokens"
                " of layout 'tree': set sequence_parallel_size to 1, or layout to 'padded' or 'packed'"
            )
        teacher = teacher_of(self.objective)
        if teacher is not None:
            self._check_teacher(teacher)
        if self.lora is not None and self.offload_reference:
            raise ValueError(
                "offload_reference is true, and with lora the reference is the policy without its adapters:"
                " there is nothing to offload, set it to false"
            )

    def _check_teacher(self, teacher: Teacher) -> None:
        """Raises ValueError if the teacher can't run next to the policy: its head computes logits while the
        policy's does."""
        if self.zero_stage == 3:
            raise ValueError(
                "zero_stage 3 shards the weights, and the objective needs the heads of policy and teacher at"
                " the same time: set zero_stage to 2 or less"
            )
        if self.sequence_parallel_size > 1:
            raise ValueError(
                f"sequence_parallel_size is {self.sequence_parallel_size}, and ranks that share a sequence"
                " can't compare its distributions with a teacher's, whose prompt is longer: set"
                " sequence_parallel_size to 1"
            )
        if self.offload_reference and teacher.weights == "reference":
            raise ValueError(
                "offload_reference is true, and the objective's teacher is the reference, which is needed in"
                " every step: set offload_reference to false"
            )

    def _check_entropy(self, target: EntropyTarget) -> None:
        """Raises ValueError if the objective has no coefficient to adjust, or if the coefficient begins
        outside of the target's bounds."""
        names = {field.name for field in fields(self.objective)}  # type: ignore[arg-type]
        if "entropy_coef" not in names:
            raise ValueError(
                "entropy_target adjusts the objective's entropy_coef, and this objective has none: leave"
                " entropy_target out, or choose a policy gradient or 'spo'"
            )
        if not target.lowest <= self.objective.entropy_coef <= target.highest:
            raise ValueError(
                f"entropy_target begins at the objective's entropy_coef, {self.objective.entropy_coef:g},"
                f" which is not between its lowest, {target.lowest:g}, and its highest, {target.highest:g}:"
                " change one of the three"
            )


def _most_rows(experiment: Any) -> int | None:
    """Returns the most sequences (or pairs) that an iteration trains on; None if the number of problems isn't
    known."""
    problems = experiment.problems_per_iteration or experiment.task.size("train")
    if problems is None:
        return None
    rollout = experiment.rollout
    most: int = experiment.selection.most_kept(
        rollout.most_answers(problems), rollout.most_problems(problems)
    )
    return most
