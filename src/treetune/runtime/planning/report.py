"""Estimates the seconds of an iteration, and writes a plan as text and as data.

The constants of a GPU are fitted to published times on an H100 (CASPO: github.com/jasont314/CASPO, README of
April 2026), those of a CPU to this project's measurements (docs/results/benchmark.md, two cores of an EPYC).
docs/results/plan.md compares the estimates with measured times."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from treetune.credit.reward_models import reward_model_of
from treetune.engine.settings import METHODS_ON_THE_DEVICE, InProcessSettings
from treetune.objectives.further_inputs import ReferenceKlObjective, TeacherObjective
from treetune.runtime.directory import SAMPLED_TOKENS, VALUE_TOKENS
from treetune.runtime.machine import format_bytes
from treetune.runtime.planning.memory import IterationWork, itemsize, servers_on_a_machine
from treetune.runtime.planning.plan import MemoryUse, Plan, Remedy, find_remedy
from treetune.store.held_folders import SHARED_MEMORY
from treetune.trainer.base import Layout

GPU_FLOPS, GPU_BANDWIDTH = 989e12, 3.35e12
"""Dense bfloat16 operations a second of an H100 SXM, and bytes a second from its memory (NVIDIA's data
sheet)."""
GPU_SHARE, LAYER_PASS_S = 0.3, 0.6e-3
"""The share of these operations that training and scoring reach; and the seconds in which eager PyTorch
launches the kernels of one layer, for each micro-batch of a forward pass. A backward pass takes twice as
many. Fitted to CASPO's Rho-1B with 512 answers and two epochs: 17 s with 8 rows in a micro-batch, 69 to 74 s
with one row and checkpointing. Launches included, these runs reach 20 % and 6 to 7 % of the operations."""
BANDWIDTH_SHARE = 0.6
"""The assumed share of the bandwidth that decoding reaches."""
CORE_FLOPS = 66e9
"""Float32 operations a second on one core. Fitted to an epoch of the quickstart and the scores of its
reference: 1.3 s on two cores (docs/results/plan.md)."""
SERVER_FLOPS, IN_PROCESS_FLOPS = 38e9, 24e9
"""Float32 operations a second on one core while it samples: in a vLLM server, and in the process of a rank.
They are fewer than `CORE_FLOPS`, since each step reads all weights for one token of each sequence. Fitted to
135 million weights: a server with one thread took 28 s for 3,750 tokens, and a rank with two threads 9.2 s
for 1,540 (docs/results/real_model.md)."""
ENGINE_TOKEN_S = {"cpu": 26e-6, "cuda": 30e-6}
"""Seconds of the engine's Python code for each sampled token. On a CPU: one server took 1.1 s for a rollout
and 3.4 s for a credit, from which the seconds of the model's operations are subtracted (benchmark.md). With a
GPU: a number between the one that fits CASPO's answers (4 s) and the one that fits its continuations
(152 s)."""
SAMPLE_OVERHEAD_S = 0.6e-3
"""Seconds of a core for each sample outside of its server: for the client, the journal and the grade, and
lost because processes share cores (fitted to 0.75 and 2.5 s with two servers)."""
HTTP_TOKEN_S, HTTP_SAMPLE_S = 2.5e-6, 0.1e-3
"""Seconds of a server's one HTTP process for each token with a log-prob and each sample
(benchmarks/http_side.py: 2.8 s for a million tokens with log-probs in 3,900 samples, 0.7 s for one without
in 5,200)."""
FILE_BYTES_PER_S = 0.9e9
"""Bytes that one thread writes into /dev/shm in a second (0.7 to 1.1 GB/s were measured), also assumed for a
disk. The four threads that write weights for the engine are assumed to be twice as fast."""
DEVICE_BYTES_PER_S = 40e9
"""Bytes a second from GPU to GPU: 14 GB by NCCL took CASPO 0.3 s, 2.2 GB by CUDA IPC less than 0.5."""
RELOAD_S = 4.0
"""Seconds in which a server reads 7 billion weights again (published: 3.3). Other numbers of weights take
proportionally long."""
CANARY_S, CANARY_PROMPTS, CANARY_TOKENS = 0.09, 4, 16
"""A canary is a few answers that the engine samples to verify the new weights. `CANARY_S` is the seconds of a
sync for requests and for the canary of a tiny model (docs/results/plan.md). The others are the number of the
canary's prompts and of the tokens of each answer (`runtime.policy_server`, `engine.base.Canary`). With a
large model on a CPU, the canary takes most of a sync."""
START_S = {"cpu": 25.0, "cuda": 90.0}
"""Seconds until a server samples: 19 to 30 were measured on a CPU; assumed for a GPU, with compilation and
CUDA graphs."""

TINY_MODEL = 10_000_000
"""Weights below which an iteration may take several times the planned seconds: there, fixed costs of
optimiser steps and of small batches, which the plan leaves out, are most of it."""

PHASE_OF_ESTIMATE = {
    "answers": "generation",
    "continuations": "credit",
    "answers for credit": "credit",
    "scoring for credit": "credit",
    "scoring": "training",
    "training": "training",
    "sync": "sync",
    "evaluation": "evaluation",
    "checkpoints": "commit",
}
"""The phase of the run's clock to which each estimate belongs."""

MACHINE_FIELDS = ("device", "ranks", "nodes", "device_memory", "host_memory", "shared_memory")
"""The attributes of the machine that `as_data` writes."""


@dataclass(frozen=True)
class PhaseSeconds:
    """The seconds of one phase of an iteration, such as ``PhaseSeconds("sync", 3.2, "by nccl, …")``."""

    phase: str
    seconds: float
    source: str
    """The basis of the estimate."""


def estimate_phases(plan: Plan) -> Iterator[PhaseSeconds]:
    """Yields the seconds of each phase of an iteration. Evaluations and checkpoints, which not every
    iteration has, count by their mean."""
    work, experiment, machine = plan.work, plan.experiment, plan.machine
    if _can_estimate_sampling(plan) and work.is_sampled:
        prompt_tokens = _count_prompt_tokens(work, work.problems)
        yield _estimate_sampling(
            plan, "answers", work.answers, work.answer_tokens, work.context, prompt_tokens
        )
        if work.continuations:
            tokens = work.answer_tokens / 2  # on average they begin in the middle of an answer
            yield _estimate_sampling(
                plan, "continuations", work.continuations, tokens, work.continued_context
            )
        if work.further_answers:
            yield _estimate_sampling(
                plan, "answers for credit", work.further_answers, work.answer_tokens, work.context
            )
    yield from _estimate_trainer_passes(plan)
    if _can_estimate_sampling(plan):
        if work.is_sampled:  # without sampling, the engine gets new weights only for evaluations
            yield _estimate_sync(plan)
        if experiment.evaluation.sets:
            yield _estimate_evaluation(plan)
    state_bytes = machine.world_size * (plan.trainer.policy.kept + plan.trainer.policy.on_host)
    yield PhaseSeconds(
        "checkpoints",
        state_bytes / FILE_BYTES_PER_S / experiment.checkpoints.every,
        "weights and optimiser, 0.9 GB/s to a disk",
    )


def _estimate_trainer_passes(plan: Plan) -> Iterator[PhaseSeconds]:
    """Yields the seconds of the trainer's passes: those that score, for training and for credit, and those of
    the optimiser's steps."""
    work, credit = plan.work, plan.experiment.credit
    forward = _ForwardPasses.of(plan)
    seconds_of_scoring = forward.seconds_of_scoring(work)
    basis = f"2 operations a weight and token; {forward.source}"
    yield PhaseSeconds("scoring", _count_scoring_passes(plan) * seconds_of_scoring, basis)
    if credit.trainer_passes:
        # The credit scores all answers, and selection leaves out some of them afterwards.
        # `seconds_of_scoring` is for a pass over the rows that remain, and is scaled to all answers.
        passes_over_rows = credit.trainer_passes * work.answers / max(work.rows, 1)
        basis = f"passes over all answers: {credit.trainer_passes}; {basis}"
        yield PhaseSeconds("scoring for credit", passes_over_rows * seconds_of_scoring, basis)
    yield _estimate_training(plan, forward)


@dataclass(frozen=True)
class _ForwardPasses:
    """The cost of forward passes of a trained model over the rows of an iteration."""

    weights: int
    tokens: float
    """The tokens of the iteration's rows."""
    operations_per_second: float
    """The operations of all ranks together."""
    launch_seconds: float
    """The further seconds of each micro-batch, in which PyTorch launches kernels."""
    groups: int
    """The groups of ranks that compute rows at the same time. With sequence parallelism, the ranks of a group
    compute each row together. Without it, each rank is a group of its own."""
    rows_of_micro_batch: float
    configured_rows: int | None
    """The rows of a micro-batch that the configuration sets; None if the number of tokens limits them."""
    source: str
    """The basis of the estimate."""

    @staticmethod
    def of(plan: Plan) -> _ForwardPasses:
        machine, trainer = plan.machine, plan.experiment.trainer
        if machine.device == "cuda":
            operations_per_second = GPU_FLOPS * GPU_SHARE * machine.world_size
            launch_seconds = plan.shape.layers * LAYER_PASS_S
            source = f"{GPU_SHARE:.0%} of an H100 on each rank"
        else:
            operations_per_second = CORE_FLOPS * machine.cores
            launch_seconds = 0.0
            source = "66 billion operations a second a core"
        configured_rows = trainer.sequences_per_micro_batch
        tokens_of_micro_batch = plan.trainer.micro_batch * trainer.sequence_parallel_size
        return _ForwardPasses(
            weights=plan.shape.parameters,
            tokens=count_trained_tokens(plan.work, trainer.layout),
            operations_per_second=operations_per_second,
            launch_seconds=launch_seconds,
            groups=max(1, machine.world_size // trainer.sequence_parallel_size),
            rows_of_micro_batch=configured_rows or max(1.0, tokens_of_micro_batch / plan.work.row_tokens),
            configured_rows=configured_rows,
            source=source,
        )

    def seconds_of_scoring(self, work: IterationWork) -> float:
        """Returns the seconds in which a model scores all rows."""
        rows_of_group = -(-work.rows // self.groups)  # rounded up; the ranks of a group share each row
        # Without a backward pass, a micro-batch has twice as many rows, unless the configuration sets them.
        rows_of_micro_batch = self.configured_rows or 2 * self.rows_of_micro_batch
        micro_batches = math.ceil(rows_of_group / rows_of_micro_batch)
        compute_seconds = 2 * self.weights * self.tokens / self.operations_per_second
        return compute_seconds + micro_batches * self.launch_seconds

    def seconds_in_training(self, work: IterationWork) -> float:
        """Returns the seconds of a model's forward passes in training: one over all rows in each epoch."""
        rows_of_step = work.rows * work.epochs / work.steps
        rows_of_group = rows_of_step / self.groups  # the ranks of a group share each row
        micro_batches_of_step = -(-rows_of_group // self.rows_of_micro_batch)  # rounded up
        micro_batches = work.steps * micro_batches_of_step
        compute_seconds = 2 * self.weights * self.tokens * work.epochs / self.operations_per_second
        return compute_seconds + micro_batches * self.launch_seconds


def _count_scoring_passes(plan: Plan) -> int:
    """Returns the number of passes of models over all rows before the first step. The policy has one if there
    are several steps, or a KL penalty in rewards or advantages."""
    experiment, trainer = plan.experiment, plan.experiment.trainer
    passes = 0
    if trainer.keeps_reference:
        passes += 1
    if trainer.scores_old_logprobs(several_steps=plan.work.steps > 1):
        passes += 1
    if plan.trainer.critic is not None:
        passes += 1
    if reward_model_of(experiment.credit) is not None:
        passes += 1
    if isinstance(trainer.objective, ReferenceKlObjective):
        passes += 2  # of the policy and of the reference, whose whole distributions are compared
    return passes


def _estimate_training(plan: Plan, forward: _ForwardPasses) -> PhaseSeconds:
    """Returns the seconds of the optimiser's steps. They are counted in forward passes of the policy."""
    experiment, trainer = plan.experiment, plan.experiment.trainer
    has_teacher = isinstance(trainer.objective, TeacherObjective)
    trained_models: float = 1 if plan.trainer.critic is None else 2  # with the policy, in all epochs
    reward_model = reward_model_of(experiment.credit)
    if reward_model is not None:
        # The reward model has epochs of its own. With half of the policy's epochs, it counts as half a model.
        trained_models += reward_model.epochs / plan.work.epochs
    # A forward pass takes 2 operations a weight and token. A backward pass takes as long as two forward
    # passes. Checkpointing adds another forward pass.
    if trainer.gradient_checkpointing:
        passes = trained_models * 4
        operations = "8 (activations are made again)"
    else:
        passes = trained_models * 3
        operations = "6"
    if has_teacher:
        passes += 1  # the teacher's, without gradient
        operations += " and the teacher's 2"
    return PhaseSeconds(
        "training",
        passes * forward.seconds_in_training(plan.work),
        f"{operations} operations a weight and token; {forward.source}",
    )


def _can_estimate_sampling(plan: Plan) -> bool:
    """Returns whether the seconds of sampling can be estimated.

    They can if the policy's own servers sample, or if the ranks sample in their own processes on a CPU. The
    second needs a model that isn't tiny: a tiny one spends the seconds on fixed costs of each step, which are
    unknown.
    """
    if plan.engine is not None:
        return True
    samples_in_process = isinstance(plan.experiment.engines.policy, InProcessSettings)
    return samples_in_process and plan.machine.device == "cpu" and plan.shape.parameters >= TINY_MODEL


def _count_prompt_tokens(work: IterationWork, problems: int) -> float:
    """Returns the tokens of the prompts of `problems` problems. The tokens with which all prompts begin are
    computed once, and count once."""
    own_tokens = work.prompt_tokens - work.shared_prompt_tokens
    return work.shared_prompt_tokens + problems * own_tokens


def _estimate_sync(plan: Plan) -> PhaseSeconds:
    """Returns the seconds in which the engine gets the new weights."""
    trainer, engine, machine = plan.experiment.trainer, plan.engine, plan.machine
    canary_seconds = CANARY_S
    if machine.device == "cpu":
        # The canary verifies the new weights: the engine samples a few tokens after each of its prompts, and
        # the trainer scores these tokens. Both compute the prompts.
        rate = CORE_FLOPS * machine.cores
        sampling_rate = IN_PROCESS_FLOPS * machine.cores if engine is None else SERVER_FLOPS
        operations = 2 * plan.shape.parameters * CANARY_PROMPTS  # for one token in each of the answers
        canary_seconds += operations * (2 * plan.work.prompt_tokens + CANARY_TOKENS) / rate
        canary_seconds += operations * CANARY_TOKENS / sampling_rate
    if engine is None:
        write_seconds = itemsize(trainer) * plan.shape.served / FILE_BYTES_PER_S
        return PhaseSeconds("sync", canary_seconds + 2 * write_seconds, "written at 0.9 GB/s, then read")
    # The name of each rank's machine: the method depends on whether all ranks have the same machine.
    machine_names = [str(rank // machine.ranks) for rank in range(machine.world_size)]
    adapters = trainer.lora is not None and trainer.lora.send == "adapters"
    method, _ = engine.settings.transfer_method(
        device=machine.device, machines=machine_names, adapters=adapters
    )
    # Adapters are small, so their bytes are left out.
    weight_bytes = 0 if adapters else itemsize(trainer) * plan.shape.served
    write_seconds = weight_bytes / (2 * FILE_BYTES_PER_S)  # four threads write, assumed twice as fast as one
    # A disk is assumed to be as fast as /dev/shm.
    folder = str(SHARED_MEMORY) if plan.sends_through_memory else "files, as if they were in memory"
    if method in METHODS_ON_THE_DEVICE:
        # Chunks are written while later ones are transferred, and the update waits for both.
        seconds = max(weight_bytes / DEVICE_BYTES_PER_S, write_seconds)
        source = f"by {method}, while a copy goes into {folder} at 1.8 GB/s"
    else:
        # RELOAD_S is the time in which a server reads 7 billion weights.
        seconds = write_seconds + RELOAD_S * plan.shape.served / 7e9
        source = f"1.8 GB/s into {folder}, then read by the server"
    return PhaseSeconds("sync", canary_seconds + seconds, source)


def count_trained_tokens(work: IterationWork, layout: Layout) -> float:
    """Returns the tokens of an epoch that the trainer computes, without padding.

    The layout ``tree`` computes the prompt of a problem once for all of its answers in a step. It also shares
    tokens with which answers begin alike. Their number is unknown, so each answer counts in full.

    Example: 64 answers of 24 tokens to 8 prompts of 172 tokens, in one step, are 2,912 tokens, and without
    ``tree`` 12,544. If all prompts begin with the same 150 tokens, they are 1,862.
    """
    if layout != "tree":
        return work.rows * work.row_tokens
    answer_tokens = min(work.answer_tokens, work.row_tokens)
    # Rows are shuffled, so the answers to a problem lie in several steps. Each of these steps computes
    # the prompt. `steps_with_problem` is the expected number of these steps if each row is in a random one.
    steps_of_epoch = max(1.0, work.steps / work.epochs)
    problems = min(work.problems, work.rows)
    rows_of_problem = work.rows / problems
    steps_with_problem = steps_of_epoch * (1 - (1 - 1 / steps_of_epoch) ** rows_of_problem)
    # All prompts begin with `shared_tokens`, which each step computes once. `further_tokens` differ.
    shared_tokens = min(work.shared_prompt_tokens, work.row_tokens - answer_tokens)
    further_tokens = work.row_tokens - answer_tokens - shared_tokens
    prompt_tokens = steps_of_epoch * shared_tokens + problems * further_tokens * steps_with_problem
    return prompt_tokens + work.rows * answer_tokens


@dataclass(frozen=True)
class TrainingAtAssumedLengths:
    """The memory of training if prompts and answers have the assumed lengths.

    The plan's own memory is that of the longest prompts and answers, and of micro-batches that are as large
    as the settings allow. A run can need less: with the layout ``tree``, 32 answers of 24 tokens to prompts
    that begin alike may be one micro-batch of 1,000 tokens, where 2,048 are allowed.
    """

    micro_batch_tokens: int
    """The tokens of a rank's largest micro-batch."""
    needed: int
    """The bytes of the memory that `Plan.uses` names for the phase ``training``."""


def training_at_assumed_lengths(plan: Plan) -> TrainingAtAssumedLengths:
    """Returns the memory of training if all prompts and answers have their assumed mean lengths.

    A micro-batch then has at most the tokens of a rank in one step, even if the settings allow more.
    """
    work = plan.work
    tokens_of_step = count_trained_tokens(work, plan.experiment.trainer.layout) / (work.steps / work.epochs)
    tokens_of_rank = math.ceil(max(tokens_of_step / plan.machine.world_size, work.row_tokens))
    trainer = replace(plan.trainer, bound_of_micro_batch=tokens_of_rank)
    saved = plan.trainer.peak - trainer.peak
    if plan.machine.device == "cpu":
        saved *= plan.machine.ranks  # all ranks of a machine use its memory
    return TrainingAtAssumedLengths(trainer.micro_batch, _memory_of_training(plan).needed - saved)


def _memory_of_training(plan: Plan) -> MemoryUse:
    return next(use for use in plan.uses if use.phase == "training")


def _estimate_evaluation(plan: Plan) -> PhaseSeconds:
    """Returns an iteration's share of the seconds of all evaluations, those during training and at the
    end."""
    experiment = plan.experiment
    every = experiment.evaluation.every
    seconds = 0.0
    for test_set in experiment.evaluation.sets:
        # A split of unknown size counts as empty.
        problems = test_set.problems or (test_set.task or experiment.task).size(test_set.split) or 0
        answers = problems * (test_set.samples or 1)
        during_training = experiment.iterations // every if every and test_set.while_training else 0
        is_measured_last = during_training > 0 and experiment.iterations % every == 0
        evaluations = during_training + (0 if is_measured_last else 1)  # each set is measured at the end
        work = plan.work
        prompt_tokens = _count_prompt_tokens(work, problems)
        evaluation = _estimate_sampling(
            plan, "evaluation", answers, work.answer_tokens, work.context, prompt_tokens
        )
        seconds += evaluation.seconds * evaluations / experiment.iterations
    return PhaseSeconds("evaluation", seconds, "answers as long as in training, at the same rate")


def _estimate_sampling(
    plan: Plan, phase: str, samples: int, tokens: float, context: float, prompt_tokens: float = 0.0
) -> PhaseSeconds:
    """Returns the seconds of sampling with all servers. Device, engine process and HTTP process work at the
    same time, so the slowest of them decides. On a CPU, they share the cores.

    Args:
        samples: The number of samples.
        tokens: The mean tokens of a sample.
        context: The mean number of tokens before a sampled token.
        prompt_tokens: The tokens of all prompts that the engine has to compute, if it caches prefixes. They
            count only on a CPU. For samples of credit they are 0, since their prompts are in the cache.
    """
    machine, device = plan.machine, plan.machine.device
    operations_of_token = 2 * plan.shape.parameters
    if plan.engine is None:  # each rank samples in its own process, on a CPU
        seconds_of_core = operations_of_token * samples * tokens / IN_PROCESS_FLOPS
        seconds_of_core += operations_of_token * prompt_tokens / CORE_FLOPS
        source = "in the ranks' own processes, 24 billion operations a second a core"
        return PhaseSeconds(phase, seconds_of_core / machine.cores, source)
    settings = plan.engine.settings
    servers = servers_on_a_machine(settings, machine)
    if settings.servers == "per_rank":
        servers *= machine.nodes  # otherwise only the first machine has servers
    samples_per_server = samples / servers
    http_seconds = samples_per_server * (HTTP_SAMPLE_S + tokens * HTTP_TOKEN_S)
    engine_seconds = samples_per_server * tokens * ENGINE_TOKEN_S[device]
    operations = operations_of_token * samples_per_server * tokens
    if device == "cpu":
        # Without a prefix cache, the tokens before the first sampled one are computed again for each sample.
        # On average, half of the sample's own tokens are in `context`. The rest of `context` is the prefix.
        tokens_before_sampling = prompt_tokens / servers
        if not settings.caches_prefixes(device):
            tokens_before_sampling = samples_per_server * (context - tokens / 2)
        threads = settings.threads(machine.ranks)
        engine_seconds += operations / (SERVER_FLOPS * threads)
        engine_seconds += operations_of_token * tokens_before_sampling / (CORE_FLOPS * threads)
        core_seconds = engine_seconds * threads + http_seconds + samples_per_server * SAMPLE_OVERHEAD_S
        shared_seconds = servers * core_seconds / machine.cores
        slowest = max(engine_seconds, http_seconds, shared_seconds)
        return PhaseSeconds(phase, slowest, "the engine's and HTTP's share of the cores")
    sequences = min(plan.sequences_at_once, max(samples_per_server, 1))
    # A step makes one token of each sequence. It reads all weights, and the keys and values of all sequences.
    bytes_of_step = plan.engine.weights + sequences * context * plan.engine.bytes_per_token
    steps = samples_per_server * tokens / sequences
    read_seconds = steps * bytes_of_step / (GPU_BANDWIDTH * BANDWIDTH_SHARE)
    compute_seconds = operations / (GPU_FLOPS * GPU_SHARE * settings.tensor_parallel_size)
    decode_seconds = max(read_seconds, compute_seconds)
    decode_source = f"{sequences:.0f} sequences at once, an H100's bandwidth"
    if not settings.async_scheduling:
        decode_seconds += engine_seconds
        decode_source += " and the engine's own process, one after the other"
    # Device, engine process and HTTP process work at the same time, so the slowest of them decides.
    candidates = [
        (decode_seconds, decode_source),
        (engine_seconds, f"the engine's own process: {1e6 * ENGINE_TOKEN_S[device]:.0f} µs a token"),
        (http_seconds, "one HTTP process a server: 2.5 µs a token, 0.1 ms a sample"),
    ]
    slowest_seconds, source = max(candidates)
    return PhaseSeconds(phase, slowest_seconds, source)


def predict_metrics(plan: Plan) -> dict[str, float]:
    """Returns the plan's estimates of an iteration, by the names of the metrics that a run records."""
    metrics: dict[str, float] = defaultdict(float)
    for estimate in estimate_phases(plan):
        metrics[f"seconds/{PHASE_OF_ESTIMATE[estimate.phase]}"] += estimate.seconds
    # If the run samples and the seconds of sampling are not estimated, the sum would be too small.
    if not plan.work.is_sampled or _can_estimate_sampling(plan):
        metrics["seconds/total"] = sum(metrics.values())
    if plan.work.is_sampled:
        metrics |= {
            SAMPLED_TOKENS: plan.work.sampled_tokens,
            VALUE_TOKENS: plan.work.continued_tokens + plan.work.further_tokens,
        }
    for use in plan.uses:
        if use.phase in ("generation", "training"):
            # A GPU's uses come before the host's. The first one stays, so the metric is the GPU's if there
            # is one.
            metrics.setdefault(f"memory/{use.phase}", use.needed)
    return {name: value for name, value in metrics.items() if value}


def as_text(plan: Plan) -> str:
    """Returns the plan as text: memory by phase, work, seconds, and whether it fits."""
    shape, work, trainer = plan.shape, plan.work, plan.trainer
    lines = [
        f"{plan.experiment.experiment_name} on {plan.machine.description}",
        f"model: {shape.parameters / 1e9:.3f} billion parameters ({shape.source})",
        "",
    ]
    for use in plan.uses:
        room = "(size unknown)" if use.room is None else f"of {format_bytes(use.room)}"
        verdict = "" if use.fits else "  DOES NOT FIT"
        lines.append(f"{use.phase}, {use.where}: {format_bytes(use.needed)} {room}{verdict}")
        lines += [f"    {format_bytes(item.size):>11}  {item.what}" for item in use.items if item.size]
    if plan.engine is not None:
        engine = plan.engine
        lines += [
            "",
            f"KV cache of a server: {engine.cached_tokens:,} tokens,"
            f" {engine.cached_tokens / engine.context_length:.1f} sequences of {engine.context_length:,}"
            f" ({plan.sequences_at_once:,} are sampled at the same time)",
        ]
    space = plan.checkpoints
    free = "(free space unknown)" if space.room is None else f"of {format_bytes(space.room)}"
    verdict = "  DOES NOT FIT" if space.problem else ""
    lines += [
        "",
        f"checkpoints, disk of {space.folder}: {format_bytes(space.bytes_at_once)} {free} at once,"
        f" {format_bytes(space.bytes_by_the_end)} by the end{verdict}",
        f"    {format_bytes(space.weights):>11}  weights of a checkpoint",
        f"    {format_bytes(space.state):>11}  state of the trainer, of those that a run can resume from",
    ]
    lines += ["", f"micro-batches: up to {trainer.micro_batch:,} tokens on a rank", *_describe_work(plan)]
    usual_training = training_at_assumed_lengths(plan)
    if usual_training.needed < _memory_of_training(plan).needed:
        lines.append(
            f"with these lengths, a micro-batch has at most {usual_training.micro_batch_tokens:,} tokens, and"
            f" training needs {format_bytes(usual_training.needed)}"
        )
    lines.append("")
    estimates = list(estimate_phases(plan))
    scope = "an iteration" if work.is_known else "one problem"
    lines.append(f"seconds of {scope}, by estimate (may be wrong by a factor of two):")
    lines += [f"    {estimate.seconds:8.1f}  {estimate.phase}: {estimate.source}" for estimate in estimates]
    lines.append(f"    {sum(estimate.seconds for estimate in estimates):8.1f}  in all")
    if work.is_sampled and not _can_estimate_sampling(plan):
        lines.append("not estimated: sampling, continuations, sync and evaluation without a vLLM server")
    if shape.parameters < TINY_MODEL:
        lines.append(
            f"    {shape.parameters / 1e6:.1f} million parameters are few: fixed costs of each step, which"
            " the estimate leaves out, may make it several times as long"
        )
    if plan.engine is not None:
        lines.append(f"    {START_S[plan.machine.device]:8.1f}  once, until a server samples")
    return "\n".join([*lines, "", verdict_of(plan)])


def _describe_work(plan: Plan) -> list[str]:
    """Returns the lines on the work of an iteration."""
    work = plan.work
    if work.is_known:
        scope = f"{work.problems:,} problems"
    else:
        scope = "one problem (their number is unknown)"
    lines = [
        f"work of an iteration, for {scope}: {work.answers:,} answers of {work.answer_tokens:,.0f} tokens on"
        f" average (as assumed), {work.rows:,} rows, {work.steps:,} steps"
    ]
    uneven = plan.experiment.trainer.uneven_steps(plan.experiment)
    if uneven is not None:
        lines.append(uneven)
    if work.is_sampled:
        lines.append(f"sampled: {work.sampled_tokens:,.0f} tokens of answers")
    if work.continuations:
        lines.append(
            f"    and {work.continued_tokens:,.0f} tokens of {work.continuations:,} continuations"
            f" (at most {work.most_continuations:,} continuations)"
        )
    if work.further_answers:
        lines.append(
            f"    and {work.further_tokens:,.0f} tokens of {work.further_answers:,} answers for credit"
        )
    return lines


def verdict_of(plan: Plan, known_remedy: Remedy | None = None) -> str:
    """Returns the problems and the smallest change that solves them, or ``it fits``.

    Args:
        known_remedy: The plan's remedy, if it was computed already.
    """
    space = plan.checkpoints
    if plan.fits:
        if space.problem:
            return f"it doesn't fit:\n  {space.problem}"
        return f"it fits, but {space.warning}" if space.warning else "it fits"
    remedy = known_remedy or find_remedy(plan)
    lines = ["it doesn't fit:", *(f"  {problem}" for problem in plan.problems)]
    if space.problem:
        lines.append(f"  {space.problem}")
    if remedy is None:
        lines.append("  no setting of speed or memory makes it fit: take a smaller model, or other hardware")
    else:
        lines.append(f"  the smallest change that makes it fit: {remedy.text}")
        if remedy.changes:  # more GPUs alone need no change of the configuration
            lines.append(f"    --override {shlex.quote(remedy.override)}")
    return "\n".join(lines)


def as_data(plan: Plan) -> dict[str, Any]:
    """Returns the plan as data for programs; sizes are in bytes."""
    shape, work, machine = plan.shape, plan.work, plan.machine
    remedy = None if plan.fits else find_remedy(plan)
    problems = list(plan.problems)
    if plan.checkpoints.problem is not None:
        problems.append(plan.checkpoints.problem)
    return {
        "experiment": plan.experiment.experiment_name,
        "machine": {name: getattr(machine, name) for name in MACHINE_FIELDS},
        "parameters": shape.parameters,
        "shape": asdict(shape),
        "places": [_use_as_data(use) for use in plan.uses],
        "kv_cache_tokens": None if plan.engine is None else plan.engine.cached_tokens,
        "micro_batch_tokens": plan.trainer.micro_batch,
        "at_assumed_lengths": asdict(training_at_assumed_lengths(plan)),
        "work": asdict(work),
        "sampled_tokens": work.sampled_tokens,
        "continued_tokens": work.continued_tokens,
        "further_tokens": work.further_tokens,
        "seconds": [asdict(estimate) for estimate in estimate_phases(plan)],
        "checkpoints": {
            "weights": plan.checkpoints.weights,
            "state": plan.checkpoints.state,
            "at_once": plan.checkpoints.bytes_at_once,
            "by_the_end": plan.checkpoints.bytes_by_the_end,
            "room": plan.checkpoints.room,
        },
        "fits": plan.fits and plan.checkpoints.problem is None,
        "problems": problems,
        "remedy": None if remedy is None else {"words": remedy.text, "override": remedy.override},
    }


def _use_as_data(use: MemoryUse) -> dict[str, Any]:
    """Returns a phase's use of one memory as data for programs; sizes are in bytes."""
    return {
        "phase": use.phase,
        "where": use.where,
        "needed": use.needed,
        "room": use.room,
        "fits": use.fits,
        "items": {item.what: item.size for item in use.items if item.size},
    }
