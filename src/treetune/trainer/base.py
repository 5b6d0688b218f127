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

Layout = Literal["padded", "packed", "tree"]

AdamBeta = Annotated[float, Ge(0), Lt(1)]


class Schedule(Registrable):
    """The learning rate of one step of the whole run, as a factor of the configured one."""

    warmup_steps: int = 0
    """The steps that training must have at least, for the warm-up to come to its end."""

    length_matters: str | None = None
    """The reason, in words, why it depends on how long training is; None where it doesn't."""

    def factor(self, step: int, total_steps: int) -> float:
        """The factor for optimiser step `step` (0-based) of `total_steps`."""
        raise NotImplementedError


@Schedule.register("warmup")
@dataclass(frozen=True, kw_only=True)
class Warmup(Schedule):
    """Linear warm-up from one part of the rate to all of it, then constant or decaying to 0.

    No step has rate 0: a step that can't move anything is wasted.
    """

    steps: Annotated[int, Ge(0)] = 0
    """Length of the warm-up. More than the run has are refused, unless `may_outlast_training`."""
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
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))


@Schedule.register("deepspeed_warmup_decay")
@dataclass(frozen=True, kw_only=True)
class DeepSpeedWarmupDecay(Schedule):
    """``WarmupDecayLR`` of DeepSpeed 0.14.1, driven as the VinePPO paper's code drives it: the first step has
    the whole rate, the second none; then the rate rises with the logarithm of the step and falls
    linearly to 0.

    For comparisons with published runs only: the first step is larger than any other, without any
    warm-up before it. `Warmup` is what was meant.
    """

    ratio: Annotated[float, Gt(0), Le(1)] = 0.03
    """The warm-up's share of the run's steps."""

    @override
    def factor(self, step: int, total_steps: int) -> float:
        if step == 0:
            return 1.0  # the optimiser's own rate: the scheduler sets none before the first step
        warmup = max(2, math.ceil(self.ratio * total_steps))
        scheduled = step - 1
        if scheduled < warmup:
            return math.log(scheduled + 1) / math.log(warmup)
        return max(0.0, (total_steps - scheduled) / max(1, total_steps - warmup))


@dataclass(frozen=True, kw_only=True)
class EntropyTarget:
    """Holds the mean entropy at trained tokens near `target` (nats).

    After each step the coefficient goes up by `rate` times what the entropy lacks, within `lowest` and
    `highest`: integral control, as soft actor-critic finds its temperature (Haarnoja et al. 2018,
    arXiv:1812.05905, section 5). It begins at the objective's `entropy_coef`.
    """

    target: Annotated[float, Ge(0)]
    rate: Annotated[float, Gt(0)] = 1e-3
    lowest: float = 0.0
    """The least coefficient. With 0 the entropy is only ever held up."""
    highest: float = 0.1

    def __post_init__(self) -> None:
        if self.lowest >= self.highest:
            raise ValueError(f"entropy_target: lowest {self.lowest} must be below highest {self.highest}")


@dataclass(frozen=True, kw_only=True)
class Trainer(Part):
    """The trainer of every method: AdamW on a DeepSpeed engine.

    Each rank computes micro-batches of its own, unless `sequence_parallel_size` lets neighbouring ranks
    compute theirs together. That setting changes only the speed, as do `layout` and the limits of
    micro-batches, which are per rank.
    """

    objective: Objective
    learning_rate: Annotated[float, Gt(0)]
    """AdamW's, before the `schedule`."""
    schedule: Schedule = field(default_factory=Warmup)
    adam_betas: tuple[AdamBeta, AdamBeta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    adam_eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the mean square that a step is divided by."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """AdamW's, of all weights."""
    max_grad_norm: Annotated[float, Gt(0)] | None = 1.0
    """Longer gradients are scaled down to this norm; None: none is."""
    epochs: Annotated[int, Gt(0)] = 1
    """Number of passes over an iteration's episodes."""
    minibatch_size: Annotated[int, Gt(0)] | None = None
    """Number of sequences (or pairs) of one optimiser step over all ranks; None: the whole iteration's."""
    tokens_per_micro_batch: Annotated[int, Gt(0)] = 16384
    """Most tokens of a micro-batch, padding included; a longer row runs alone."""
    sequences_per_micro_batch: Annotated[int, Gt(0)] | None = None
    """Most rows of a micro-batch. An answer with threads is one sequence, and as many rows as parts of it
    were sampled in one go. None: there is no bound."""
    layout: Layout = "padded"
    """Rows of a micro-batch are ``padded`` to one length, ``packed`` into one row, or put as a prefix
    ``tree``: all of a problem's rows in a minibatch are one, or several where it is larger than
    `tokens_per_micro_batch`, so that what they begin with alike is computed once; a tree counts as one
    row."""
    advantage_normalisation: Literal["none", "whiten", "scale"] = "none"
    """Over all trained tokens of the iteration: ``whiten`` to mean 0 and standard deviation 1, ``scale`` to
    standard deviation 1 only."""
    normalise_by_domain: bool = False
    """Normalises over the tokens of each domain, so that none moves the weights more because its rewards lie
    further apart."""
    measure_kl: bool = True
    """Keeps the start model as the reference even where the objective needs none, so that ``train/kl`` is
    known."""
    token_signals: Literal["none", "known", "all"] = "known"
    """Written of each trained token beside the episodes (log-prob and entropy of the policy before the
    updates, gap to the engine, ratio at its last step): ``known``, what training computes anyway; ``all``,
    for one more forward pass over the iteration where training makes none before its first step; ``none``, no
    file. At most 16 bytes a token. It changes no update."""
    logprob_gap_limit: Annotated[float, Gt(0)] | None = None
    """Largest mean difference, in nats, between the trainer's and the engine's log-probs of an iteration's
    trained tokens (``engine/logprob_gap_mean``). None: 1e-3 where both compute in float32 on a CPU, 5e-3 on a
    GPU, 0.15 where one computes in half precision, 0.5 where the engine or its cache is quantised; and three
    times `engines.policy.canary_tolerance` where that is more. Not asked where the two differ by design: at
    temperature 0, and of answers that older weights sampled (`overlap`, `restart`)."""
    on_logprob_gap: Literal["stop", "warn"] = "stop"
    """A larger gap ends the run, or is said in the log at each iteration. With an importance correction in
    the objective it is only said."""
    entropy_target: EntropyTarget | None = None
    """Finds the coefficient of the entropy while training."""
    skip_without_advantage: bool = False
    """Takes no step on a minibatch whose advantages are all 0 (groups without spread): momentum, KL and
    weight decay would move the weights, and nothing that was learnt."""
    offload_reference: bool = False
    """Keeps the reference on the CPU while it isn't needed."""
    reference_scores: Literal["before_training", "while_sampling"] = "before_training"
    """Time at which answers get their log-probs under the reference: all together, ``before_training``, or
    each by itself as soon as it is there, ``while_sampling`` the others, for trainers whose device is idle
    meanwhile (`engines.policy.devices`). The latter rounds otherwise, in the last bits, and the same however
    a run is cut or resumed."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations in the forward and backward passes."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """Shared out over the ranks: nothing (0), optimiser states (1), gradients (2), weights (3)."""
    offload_optimizer: bool = False
    """Keeps optimiser states on the CPU (ZeRO)."""
    offload_parameters: bool = False
    """Keeps weights on the CPU (ZeRO-3)."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass: less memory, more time."""
    lora: Lora | None = None
    """Trains adapters on the start model instead of its weights; the reference is then the model without
    them, which costs no memory, and a critic is a whole model as ever."""
    sequence_parallel_size: Annotated[int, Gt(0)] = 1
    """Number of neighbouring ranks that share every sequence (DeepSpeed-Ulysses; for long ones)."""

    @classmethod
    @override
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        """Speed and memory. ZeRO's stage and its offloading are not among them: the optimiser's state lies
        in a checkpoint as the stage cuts it."""
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
        """The reason, in words, why training depends on how long it is; None where it doesn't."""
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
        return (
            Need(Advantages(before_training=True), because, remedy),
            Need(UseOfAdvantages(), because, "set skip_without_advantage to false"),
        )

    @property
    def keeps_reference(self) -> bool:
        """Returns whether the start model's log-probs are computed beside the policy's."""
        return self.objective.needs_reference or (self.measure_kl and self.objective.measures_kl)

    @property
    def shards_weights(self) -> bool:
        """Returns whether each rank keeps only its part of the weights (ZeRO-3)."""
        return self.zero_stage == 3

    @property
    def reads_in_parts(self) -> bool:
        """Returns whether weights are sharded while they are read, so that no rank ever holds all of them."""
        return self.shards_weights and not self.offload_parameters

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.reference_scores == "while_sampling":
            yield from self._check_scoring_while_sampling(experiment)
        problems = experiment.problems_per_iteration or experiment.task.size("train")
        if problems is None:
            return
        answers = experiment.rollout.most_answers(problems)
        rows = experiment.selection.most_kept(answers, problems)
        if self.minibatch_size is not None and self.minibatch_size > rows:
            yield Finding(
                f"minibatch_size is {self.minibatch_size}, and an iteration has {rows} sequences (or pairs)"
                " at most",
                "minibatch_size",
                "lower it, or set it to null for one step an iteration",
            )
        iterations = 1 if experiment.restart == "every_iteration" else experiment.iterations
        steps = iterations * self.epochs * math.ceil(rows / (self.minibatch_size or max(rows, 1)))
        if self.schedule.warmup_steps > steps:
            yield Finding(
                f"the warm-up takes {self.schedule.warmup_steps} steps, and training has {steps}",
                "schedule.steps",
                "lower it, train for more iterations, or set schedule.may_outlast_training to true for"
                " a short try",
            )

    def _check_scoring_while_sampling(self, experiment: Experiment) -> Iterator[Finding]:
        """It needs a reference that each rank runs by itself, on a device that has the time and the memory
        for it while the engine samples."""
        for holds, why in (
            (not self.keeps_reference, "nothing here needs a reference"),
            (not experiment.rollout.needs_engine, "this rollout samples nothing"),
            (
                Turns() in experiment.rollout.gives,
                "an answer's turns are asked for one by one and trained together: none would be scored ahead",
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
                "with overlap 'one_step' the trainer is at work on the iteration before meanwhile",
            ),
        ):
            if holds:
                yield Finding(
                    f"reference_scores is 'while_sampling', and {why}",
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
                "zero_stage 0 adds the gradients of micro-batches up in bfloat16, so that the update would"
                " depend on how it was cut: set zero_stage to 1 or more, which adds them up in float32"
            )
        if self.layout == "tree" and self.sequence_parallel_size > 1:
            raise ValueError(
                f"sequence_parallel_size is {self.sequence_parallel_size} and layout is 'tree', whose tokens"
                " ranks can't share: set one to 1, or the other to 'padded' or 'packed'"
            )
        if self.lora is not None and self.offload_reference:
            raise ValueError(
                "offload_reference is true, and with lora the reference is the policy without its adapters:"
                " there is nothing to offload, set it to false"
            )

    def _check_entropy(self, target: EntropyTarget) -> None:
        if "entropy_coef" not in {field.name for field in fields(self.objective)}:  # type: ignore[arg-type]
            raise ValueError(
                "entropy_target finds the objective's entropy_coef, and this objective has none: leave it"
                " out, or choose a policy gradient or 'spo'"
            )
        if not target.lowest <= self.objective.entropy_coef <= target.highest:
            raise ValueError(
                f"entropy_target begins at the objective's entropy_coef, {self.objective.entropy_coef:g}, and"
                f" that is not between its lowest, {target.lowest:g}, and its highest, {target.highest:g}:"
                " change one of the three"
            )
