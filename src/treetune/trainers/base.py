"""What a trainer is: configuration here, the work in `trainers.core`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from treetune.contracts import Advantages, Experiment, Feature, Finding, Need, Part, UseOfAdvantages
from treetune.models.lora import Lora
from treetune.trainers.batching import Layout
from treetune.trainers.entropy import EntropyTarget
from treetune.trainers.objectives.base import Objective
from treetune.trainers.reference_contract import unfit_reference_scores
from treetune.trainers.schedule import Schedule, Warmup

Precision = Literal["float32", "bfloat16"]
RecordedSignals = Literal["none", "known", "all"]
ReferenceScores = Literal["before_training", "while_sampling"]


@dataclass(frozen=True, kw_only=True)
class Trainer(Part):
    """One trainer for every method: AdamW on a DeepSpeed engine.

    `minibatch_size` is the number of sequences of one optimiser step over all ranks (None: the
    whole iteration's). The micro-batch limits are per rank and change speed, never the update.
    An answer with threads is one sequence, and as many rows as parts of it were sampled in one go: they
    are what `sequences_per_micro_batch` counts. With the `layout` ``tree`` all of a problem's rows in a
    minibatch are one prefix tree, or several where it is larger than `tokens_per_micro_batch`, so that
    what they begin with alike is computed once; a tree counts as one row.
    `advantage_normalisation` is taken over all trained tokens of the iteration: ``whiten`` to mean
    0 and standard deviation 1, ``scale`` to standard deviation 1 only; with `normalise_by_domain` over the
    tokens of each domain, so that none moves the weights more because its rewards lie further apart.
    `measure_kl` keeps the
    start model as the reference even where the objective needs none, so that ``train/kl`` is known.
    `entropy_target` finds the coefficient of the entropy while training. `skip_without_advantage` takes
    no step on a minibatch whose advantages are all 0 (groups without spread): momentum, KL and weight
    decay would move the weights, and nothing that was learnt.

    `lora` trains adapters on the start model instead of its weights; the reference is then the model
    without them, which costs no memory, and a critic is a whole model as ever. Two ways to let several
    neighbouring ranks run one model together, each on micro-batches of its own otherwise:
    `sequence_parallel_size` of them share every sequence (DeepSpeed-Ulysses; for long ones), or
    `tensor_parallel_size` of them every weight matrix (DeepSpeed's AutoTP; for large ones; the
    reference stays whole on each). Neither changes the update.
    """

    objective: Objective
    learning_rate: Annotated[float, Gt(0)]
    """AdamW's, before the `schedule`."""
    schedule: Schedule = field(default_factory=Warmup)
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    adam_eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the mean square that a step is divided by."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """AdamW's, of all weights."""
    max_grad_norm: Annotated[float, Gt(0)] | None = 1.0
    """Longer gradients are scaled down to this norm; None: none is."""
    epochs: Annotated[int, Gt(0)] = 1
    """How often an iteration's episodes are gone through."""
    minibatch_size: Annotated[int, Gt(0)] | None = None
    tokens_per_micro_batch: Annotated[int, Gt(0)] = 16384
    sequences_per_micro_batch: Annotated[int, Gt(0)] | None = None
    layout: Layout = "padded"
    advantage_normalisation: Literal["none", "whiten", "scale"] = "none"
    normalise_by_domain: bool = False
    measure_kl: bool = True
    token_signals: RecordedSignals = "known"
    """What is written of each trained token beside the episodes (log-prob and entropy of the policy before
    the updates, gap to the engine): ``known``, what training computes anyway; ``all``, for one more forward
    pass over the iteration where training makes none before its first step; ``none``, no file. At most 12
    bytes a token. It changes no update."""
    entropy_target: EntropyTarget | None = None
    skip_without_advantage: bool = False
    offload_reference: bool = False
    """Keeps the reference on the CPU while it isn't needed."""
    reference_scores: ReferenceScores = "before_training"
    """When answers get their log-probs under the reference: all together, ``before_training``, or each by
    itself as soon as it is there, ``while_sampling`` the others, for trainers whose device is idle meanwhile
    (`engines.policy.devices`). The latter rounds otherwise, in the last bits, and the same however a run is
    cut or resumed."""
    precision: Precision = "float32"
    """Of the forward and backward passes."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What ranks share: nothing (0), optimiser states (1), gradients (2), weights (3)."""
    offload_optimizer: bool = False
    """Keeps optimiser states on the CPU (ZeRO)."""
    offload_parameters: bool = False
    """Keeps weights on the CPU (ZeRO-3)."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass: less memory, more time."""
    lora: Lora | None = None
    sequence_parallel_size: Annotated[int, Gt(0)] = 1
    tensor_parallel_size: Annotated[int, Gt(0)] = 1

    @classmethod
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
            }
        )

    @property
    def length_matters(self) -> str | None:
        """What in training depends on how long it is, in words; None where nothing does."""
        matters = self.schedule.length_matters
        return None if matters is None else f"trainer.schedule depends on the length of training: {matters}"

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from unfit_reference_scores(self, experiment)
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

    @property
    def gives(self) -> tuple[Feature, ...]:
        return self.objective.gives

    @property
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
        """Whether the start model's log-probs are computed beside the policy's."""
        return self.objective.needs_reference or (self.measure_kl and self.objective.measures_kl)

    @property
    def deals_weights_out(self) -> bool:
        """Whether each rank is given a part of the weights (ZeRO-3, AutoTP): no device need hold them all."""
        return self.zero_stage == 3 or self.tensor_parallel_size > 1

    @property
    def reads_in_parts(self) -> bool:
        """Whether weights are dealt out while they are read: no rank need ever hold them all."""
        return self.deals_weights_out and not self.offload_parameters

    @property
    def model_parallel_size(self) -> int:
        """How many neighbouring ranks are given the same micro-batches and run the model together."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def model_parallel_setting(self) -> str:
        """The setting that says so, for messages."""
        return "sequence_parallel_size" if self.sequence_parallel_size > 1 else "tensor_parallel_size"

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas {self.adam_betas} must lie in [0, 1)")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage 3")
        self._check_entropy()
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
        if self.tensor_parallel_size > 1:
            self._check_tensor_parallel()
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

    def _check_entropy(self) -> None:
        target = self.entropy_target
        if target is None:
            return
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

    def _check_tensor_parallel(self) -> None:
        for name, there in (
            ("sequence_parallel_size", self.sequence_parallel_size > 1),
            ("lora", self.lora is not None),
            ("offload_optimizer", self.offload_optimizer),
            ("zero_stage 3", self.zero_stage == 3),
        ):
            if there:
                raise ValueError(
                    f"tensor_parallel_size is not made to work with {name}: leave one of them out"
                )
