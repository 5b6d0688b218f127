"""Plans an experiment on a machine: the memory that each phase needs, and the smallest change with which it
fits.

::

    Plan.of(experiment, machine)
       ├─ work      answers, rows and steps of an iteration        planning.memory.IterationWork
       ├─ trainer   bytes of models, optimiser, passes             planning.memory.TrainerMemory
       ├─ engine    bytes of weights, cache, passes                planning.memory.EngineMemory
       └─ uses      for each phase and memory: what is needed, and how much there is
    find_remedy(plan)  the cheapest changes of the configuration with which all uses fit
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from treetune.engine.settings import TRANSFER_KEY, VERSIONS_AT_ONCE, VllmSettings
from treetune.models.shapes import Shape
from treetune.runtime.machine import GIB, SCORED_WITH_BYTES, Machine, format_bytes
from treetune.runtime.planning.disk import CheckpointSpace, plan_checkpoint_space
from treetune.runtime.planning.memory import (
    ASLEEP_BYTES,
    PROCESS_BYTES,
    EngineMemory,
    IterationWork,
    ShapeOf,
    TrainerMemory,
    itemsize,
    read_shape,
    servers_on_a_machine,
    work_of,
)
from treetune.store.held_folders import SHARED_MEMORY

USABLE_SHARE = 0.99
"""The share of a GPU's memory that programs can use: an H100 of 80 GiB has 79.2."""
CONTEXT_BYTES = int(0.6 * GIB)
"""Assumed bytes of a GPU for a rank's CUDA context and its communicators."""
RANK_BYTES = int(1.2 * GIB)
"""Bytes of the host for a rank's libraries and heap: 0.9 GiB were measured on a CPU, and twice as much is
assumed for a GPU."""
LARGEST_SHARE = 0.9
"""The largest share of a GPU that a server gets by default, about vLLM's default."""
SPARE_BYTES = 2 * GIB
"""Assumed bytes of a GPU that a server with a default share leaves free: for CUDA graphs, chunks of new
weights, and the canary's passes."""


@dataclass(frozen=True)
class MemoryItem:
    """A part of a memory use, such as ``MemoryItem("policy: weights", 4_400_000_000)``."""

    what: str
    size: int


@dataclass(frozen=True)
class MemoryUse:
    """The use of a memory in a phase of the run.

    Example: ``MemoryUse("training", "a GPU", (MemoryItem("policy: weights", …), …), room=85_000_000_000)``.
    """

    phase: str
    where: str
    items: tuple[MemoryItem, ...]
    room: int | None
    """The bytes of the memory; None: unknown."""

    @property
    def needed(self) -> int:
        return sum(item.size for item in self.items)

    @property
    def fits(self) -> bool:
        return self.room is None or self.needed <= self.room

    @property
    def message(self) -> str:
        """The message for a use that doesn't fit, with its largest items."""
        assert self.room is not None
        largest = sorted(self.items, key=lambda item: -item.size)[:3]
        parts = ", ".join(f"{item.what} {format_bytes(item.size)}" for item in largest)
        return (
            f"{self.phase}: {self.where} has {format_bytes(self.room)}, and {format_bytes(self.needed)}"
            f" are needed ({parts})"
        )


@dataclass(frozen=True)
class Plan:
    """The plan of an experiment on a machine."""

    experiment: Any
    shape: Shape
    """The sizes of the policy."""
    machine: Machine
    work: IterationWork
    shape_of: ShapeOf = read_shape
    """Gives the sizes of the other models: of the reference and of a reward model."""

    @staticmethod
    def of(
        experiment: Any,
        machine: Machine,
        answer_tokens: float | None = None,
        shape_of: ShapeOf = read_shape,
    ) -> Plan:
        """Makes a plan.

        Args:
            answer_tokens: The mean length of an answer. None: the experiment's `plan.answer_tokens` or, if
                that isn't set, an assumption.
            shape_of: Gives the sizes of a model; None if they are unknown.

        Raises:
            ValueError: The model's sizes are unknown.
        """
        shape = shape_of(experiment.model, experiment.task.alphabet)
        if shape is None:
            raise ValueError(
                "the model's sizes are unknown: it is not a folder with a config.json, its name is neither in"
                " the Hugging Face cache nor in models/shapes.py, or its architecture is not supported by"
                " plans (llama, mistral, qwen2, qwen3)"
            )
        return Plan(experiment, shape, machine, work_of(experiment, answer_tokens), shape_of)

    @cached_property
    def trainer(self) -> TrainerMemory:
        return TrainerMemory(self.experiment, self.shape, self.machine, self.work, shape_of=self.shape_of)

    @cached_property
    def checkpoints(self) -> CheckpointSpace:
        return plan_checkpoint_space(self.trainer)

    @cached_property
    def engine(self) -> EngineMemory | None:
        """The policy's server; None if the run starts no vLLM server."""
        settings = self.experiment.engines.policy
        if not self.experiment.needs_engine or not isinstance(settings, VllmSettings):
            return None
        if settings.addresses is not None:
            return None
        context = settings.context_length or self.experiment.context_length
        if settings.gpu_memory_utilization is None and self.machine.device == "cuda":
            room = USABLE_SHARE * self.machine.device_memory - SPARE_BYTES
            largest = (room - self._trainer_bytes_while_sampling(settings)) / self.machine.device_memory
            # The share is rounded down to a hundredth. Without room it is 0.01, and `problems` says that the
            # engine doesn't fit.
            share = min(LARGEST_SHARE, max(0.01, math.floor(100 * largest) / 100))
            settings = replace(settings, gpu_memory_utilization=share)
        return EngineMemory(settings, self.shape, self.machine, context)

    def _trainer_bytes_while_sampling(self, settings: VllmSettings) -> int:
        """Returns the bytes of the server's GPU that the trainer uses while the server is awake."""
        if settings.devices is not None:
            return 0  # the server has GPUs of its own
        if not settings.sleep:
            return CONTEXT_BYTES + self.trainer.peak  # it is awake during training, too
        # The server sleeps during training. While it is awake, the trainer keeps only the weights that score
        # answers (`scorable`). Then the trainer scores a few answers of new weights, to verify them (the
        # canary), for which ZeRO-3 gathers weights.
        gathered = self.trainer.policy.passing if self.experiment.trainer.zero_stage == 3 else 0
        return CONTEXT_BYTES + self.trainer.scorable + gathered

    @property
    def sequences_at_once(self) -> int:
        """The number of sequences that a server samples at the same time.

        Each sequence counts with the mean length of a prompt and a whole answer. As many sequences of this
        length as fit into the KV cache are sampled at once, so that none is evicted and computed again.
        """
        assert self.engine is not None
        length = self.work.prompt_tokens + self.work.answer_tokens
        return max(1, min(self.engine.settings.max_num_seqs, int(self.engine.cached_tokens / length)))

    @property
    def shares_device(self) -> bool:
        """Whether engine and trainer share a GPU."""
        return self.engine is not None and self.engine.settings.devices is None

    @property
    def sends_through_memory(self) -> bool:
        """Whether new weights are written into /dev/shm, and not into the experiment's folder."""
        if self.engine is None or not self.engine.settings.weights_in_memory:
            return False
        return self.machine.shared_memory != 0  # 0 if this user can't write there

    @cached_property
    def uses(self) -> list[MemoryUse]:
        """The uses of all memories in all phases."""
        uses_of_gpus = [*self._uses_of_gpus()] if self.machine.device == "cuda" else []
        return [*uses_of_gpus, *self._uses_of_host()]

    @property
    def misfits(self) -> list[MemoryUse]:
        return [use for use in self.uses if not use.fits]

    @property
    def problems(self) -> list[str]:
        """The messages on everything that doesn't fit."""
        return [*self._find_wrong_counts(), *(use.message for use in self.misfits)]

    @property
    def fits(self) -> bool:
        """Whether the memory is enough; `checkpoints` tells about the disk."""
        return not self.problems

    def _find_wrong_counts(self) -> Iterator[str]:
        """Yields messages on numbers of ranks, GPUs and servers, and on shares of a GPU, that don't fit
        together."""
        trainer, ranks = self.experiment.trainer, self.machine.world_size
        if ranks % trainer.sequence_parallel_size:
            yield (
                f"trainer.sequence_parallel_size is {trainer.sequence_parallel_size}, which doesn't divide"
                f" {ranks} ranks"
            )
        if self.engine is None or self.machine.device == "cpu":
            return
        settings = self.engine.settings
        gpus_of_servers = settings.tensor_parallel_size * servers_on_a_machine(settings, self.machine)
        bytes_of_engine, least_bytes = self.engine.reserved_bytes, self.engine.least_bytes
        if least_bytes > bytes_of_engine:
            yield (
                f"start: engines.policy.gpu_memory_utilization {settings.gpu_memory_utilization} gives the"
                f" server {bytes_of_engine / GIB:.1f} GiB of a GPU, and with one sequence of"
                f" {self.engine.context_length:,} tokens it needs {least_bytes / GIB:.1f}"
            )
        gpus = self.machine.gpus or self.machine.ranks  # without a number of GPUs, each rank has one
        if settings.devices is None and gpus_of_servers > gpus:
            yield (
                f"the servers need {gpus_of_servers} GPUs of a machine (tensor_parallel_size"
                f" {settings.tensor_parallel_size}), and it has {gpus}"
            )
        if self.machine.nodes > 1 and settings.servers == "one":
            yield "engines.policy.servers is 'one', but ranks on several machines can't share a server"

    # GPUs

    def _uses_of_gpus(self) -> Iterator[MemoryUse]:
        """Yields the uses of a GPU. Trainer and engine use different GPUs, or the same ones: at once or, if
        the engine sleeps during training, in turn."""
        room = int(USABLE_SHARE * self.machine.device_memory)
        context = MemoryItem("CUDA context of the rank", CONTEXT_BYTES)
        trainer, engine = self.trainer, self.engine
        training = [context, *self._training_items()]
        if engine is None:
            yield MemoryUse("training", "a GPU", tuple(training), room)
            return
        # The fewest bytes with which vLLM starts are those of weights, passes and context, and a cache for
        # one sequence as long as the context.
        passes_and_context = engine.least_bytes - engine.weights - self._bytes_of_one_sequence
        cache = max(engine.cache, self._bytes_of_one_sequence)  # `engine.cache` may even be negative
        engine_awake = [
            MemoryItem("engine: weights", engine.weights),
            MemoryItem("engine: passes and context", passes_and_context),
            MemoryItem("engine: KV cache", cache),
        ]
        if not self.shares_device:
            yield MemoryUse("start", "an engine's GPU", tuple(engine_awake), room)
            yield MemoryUse("training", "a trainer's GPU", tuple(training), room)
            return
        if not engine.settings.sleep:
            yield MemoryUse("start", "a GPU", (context, *engine_awake), room)
            yield MemoryUse("training", "a GPU", (*training, *engine_awake), room)
            return
        # From here on, engine and trainer use the GPU in turn. While the engine is awake, the trainer keeps
        # only the weights that score answers.
        scorable = MemoryItem("weights of the trainer, kept to be scored", trainer.scorable)
        yield MemoryUse("start", "a GPU", (context, *engine_awake), room)
        yield MemoryUse("generation", "a GPU", (context, scorable, *engine_awake), room)
        # The canary is a few answers that the engine samples with new weights. The trainer scores them, and
        # ZeRO-3 gathers weights for that.
        gathered = trainer.policy.passing if self.experiment.trainer.zero_stage == 3 else 0
        canary = MemoryItem("scoring the canary", gathered)
        yield MemoryUse("sync", "a GPU", (context, scorable, *engine_awake, canary), room)
        engine_asleep = MemoryItem("engine, asleep", ASLEEP_BYTES)
        yield MemoryUse("training", "a GPU", (*training, engine_asleep), room)

    @property
    def _bytes_of_one_sequence(self) -> int:
        assert self.engine is not None
        return int(self.engine.context_length * self.engine.bytes_per_token)

    def _training_items(self) -> list[MemoryItem]:
        """Returns what the trainer needs on a device while it trains, in parts that add up to its peak."""
        trainer = self.trainer
        policy = trainer.policy
        items = [
            MemoryItem("policy: weights", policy.weights),
            MemoryItem("policy: master weights", policy.master),
            MemoryItem("policy: optimizer", policy.optimizer),
            MemoryItem("policy: gradients and buffers", policy.buffers + policy.gradients),
        ]
        for name, model in (("critic", trainer.critic), ("reward model", trainer.reward_model)):
            if model is not None:
                # `kept` is weights, master weights, optimiser and buffers.
                all_but_weights = model.kept - model.weights + model.gradients
                items += [
                    MemoryItem(f"{name}: weights", model.weights),
                    MemoryItem(f"{name}: optimizer and the rest", all_but_weights),
                ]
        if trainer.reference and trainer.reference_stays:
            items.append(MemoryItem("reference", trainer.reference))
        if trainer.moving_average:
            items.append(MemoryItem("moving average of the weights (teacher)", trainer.moving_average))
        other_bytes = trainer.peak - sum(item.size for item in items)
        items.append(MemoryItem("activations, chunks of the head, steps", other_bytes))
        return [item for item in items if item.size]

    # The host

    def _uses_of_host(self) -> Iterator[MemoryUse]:
        """Yields the uses of a machine's own memory, and of /dev/shm, whose content is in this memory, too.
        On a CPU, the models are in this memory as well."""
        machine, trainer, engine = self.machine, self.trainer, self.engine
        shared_memory = self._shared_memory_item
        if self.sends_through_memory:
            yield MemoryUse("sync", str(SHARED_MEMORY), (shared_memory,), machine.shared_memory)
        servers = servers_on_a_machine(engine.settings, machine) if engine is not None else 0
        ranks = machine.ranks
        if machine.device == "cpu":
            items = [
                MemoryItem("libraries of the ranks", ranks * RANK_BYTES),
                *[MemoryItem(item.what, ranks * item.size) for item in self._training_items()],
            ]
            if engine is not None:
                items += [MemoryItem("engine", servers * engine.on_cpu), shared_memory]
            yield MemoryUse("training", "the machine", tuple(items), machine.host_memory)
            return
        # `RANK_BYTES` and `PROCESS_BYTES` were measured on a CPU. On a GPU, twice as much is assumed.
        libraries = MemoryItem(
            "libraries of ranks and servers", ranks * 2 * RANK_BYTES + servers * 2 * PROCESS_BYTES
        )
        yield MemoryUse(
            "start", "the machine", (libraries, *self._reading_items(), shared_memory), machine.host_memory
        )
        copied_reference = 0 if trainer.reference_stays else trainer.reference
        put_aside_by_trainer, put_aside_by_engines = 0, 0
        if engine is not None and engine.settings.sleep:
            put_aside_by_trainer = ranks * trainer.put_aside
            # A sleeping server puts the weights of all of its devices aside.
            put_aside_by_engines = servers * engine.weights * engine.settings.tensor_parallel_size
        yield MemoryUse(
            "generation",
            "the machine",
            (
                libraries,
                MemoryItem("offloaded by ZeRO", ranks * self._offloaded_bytes),
                MemoryItem("the reference", ranks * copied_reference),
                MemoryItem("put aside by the trainer", put_aside_by_trainer),
                MemoryItem("put aside by sleeping engines", put_aside_by_engines),
                shared_memory,
            ),
            machine.host_memory,
        )
        if engine is not None:
            # An evaluation may score answers with a checkpoint's weights. One rank reads the weights for all:
            # 4 bytes a weight, and at most `SCORED_WITH_BYTES` in memory at once.
            scored = MemoryItem(
                "a checkpoint's weights, scored once for all ranks",
                min(4 * self.shape.parameters, SCORED_WITH_BYTES),
            )
            yield MemoryUse(
                "evaluation", "the machine", (libraries, scored, shared_memory), machine.host_memory
            )

    @property
    def _shared_memory_item(self) -> MemoryItem:
        """The content of /dev/shm: the versions of the weights that exist at once while new ones are loaded.
        If adapters are sent, only the start model is there."""
        lora = self.experiment.trainer.lora
        if lora is not None and lora.send == "adapters":
            versions, what = 1, "the start model's weights"
        else:
            versions, what = VERSIONS_AT_ONCE, f"{VERSIONS_AT_ONCE} versions of the weights"
        if not self.sends_through_memory:
            versions = 0
        # `shape.served` is the number of weights in the engine, with an untied head.
        bytes_of_version = itemsize(self.experiment.trainer) * self.shape.served
        return MemoryItem(f"{SHARED_MEMORY}: {what}", versions * bytes_of_version)

    def _reading_items(self) -> Iterator[MemoryItem]:
        """Yields the memory for reading the start model.

        If the ranks read the model in parts, only the first rank holds the whole model, to write the engine's
        files.
        """
        trainer, ranks = self.experiment.trainer, self.machine.ranks
        model_bytes = itemsize(trainer) * self.shape.parameters
        if not trainer.reads_in_parts:
            yield MemoryItem("the whole model, read by each rank", ranks * model_bytes)
            return
        yield MemoryItem("the whole model, read by the first rank", model_bytes)
        part_bytes = -(-model_bytes // self.machine.world_size)  # rounded up
        yield MemoryItem("each rank's part of the model", ranks * part_bytes)

    @property
    def _offloaded_bytes(self) -> int:
        return sum(model.on_host for model in (self.trainer.policy, *self.trainer.learned_models))


SHARE_KEY = "engines.policy.gpu_memory_utilization"
TRIED_SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""The values of `SHARE_KEY` that are tried as a remedy."""
MORE_GPUS = ((2, 1), (4, 1), (8, 1), (8, 2), (8, 4))
"""The larger machines that are tried as a remedy: GPUs of each machine, and machines."""


@dataclass(frozen=True)
class Change:
    """A change of one setting that affects memory and speed, and leaves the update of the weights the same.

    Example: ``Change("trainer.gradient_checkpointing", True, cost=6)``.
    """

    key: str
    value: Any
    cost: int
    """A rank: a change of a lower cost slows the run down less."""

    @property
    def text(self) -> str:
        return f"{self.key}: {self.as_jsonnet}"

    @property
    def as_jsonnet(self) -> str:
        return json.dumps(self.value)

    def apply(self, plan: Plan) -> Plan | None:
        """Returns the plan with this change; None if the configuration refuses it."""
        try:
            changed_experiment = _replace_at(plan.experiment, self.key.split("."), self.value)
        except ValueError:
            return None
        return replace(plan, experiment=changed_experiment)


@dataclass(frozen=True)
class Remedy:
    """Changes of the configuration, or more GPUs, with which everything fits."""

    changes: tuple[Change, ...]
    gpus: int | None = None
    nodes: int = 1

    @property
    def text(self) -> str:
        """The remedy for people: its changes, and the GPUs if it needs more than the machine has."""
        changes = ", ".join(change.text for change in self.changes)
        if self.gpus is None:
            return changes
        machines = (
            f"{self.nodes} machines with {self.gpus} GPUs each" if self.nodes > 1 else f"{self.gpus} GPUs"
        )
        return f"{machines} and {changes}" if changes else machines

    @property
    def override(self) -> str:
        """The changes as Jsonnet, for ``--override``."""
        return _as_jsonnet([(change.key.split("."), change.as_jsonnet) for change in self.changes])


def _as_jsonnet(settings: list[tuple[list[str], str]]) -> str:
    """Returns settings as a Jsonnet object.

    Example: ``[(["trainer", "zero_stage"], "3"), (["trainer", "epochs"], "2")]`` becomes ``{trainer+:
    {zero_stage: 3, epochs: 2}}``.
    """
    settings_by_name: dict[str, list[tuple[list[str], str]]] = {}
    for (name, *further_path), value in settings:
        settings_by_name.setdefault(name, []).append((further_path, value))
    texts = []
    for name, settings_of_name in settings_by_name.items():
        further_path, value = settings_of_name[0]
        if further_path:  # `name` is an object that has these settings
            texts.append(f"{name}+: {_as_jsonnet(settings_of_name)}")
        else:  # `name` is the setting itself
            texts.append(f"{name}: {value}")
    return "{" + ", ".join(texts) + "}"


def find_remedy(plan: Plan) -> Remedy | None:
    """Returns the smallest and cheapest set of changes with which the plan fits this machine, or else the
    fewest GPUs of the same kind, with changes if needed. Returns None if nothing helps."""
    if plan.fits:
        return Remedy(())
    if (changes := _find_changes(plan)) is not None:
        return Remedy(changes)
    if plan.machine.device == "cpu":
        return None
    machine = plan.machine
    for gpus, nodes in MORE_GPUS:
        if gpus * nodes <= machine.world_size:
            continue
        # The larger machine has a GPU for each rank (`gpus=None`), and its host's memory is unknown.
        larger = replace(machine, ranks=gpus, nodes=nodes, host_memory=None, gpus=None)
        plan_on_more_gpus = replace(plan, machine=larger)
        if plan_on_more_gpus.fits:
            return Remedy((), gpus, nodes)
        if (changes := _find_changes(plan_on_more_gpus)) is not None:
            return Remedy(changes, gpus, nodes)
    return None


def _find_changes(plan: Plan) -> tuple[Change, ...] | None:
    """Returns the cheapest change with which the plan fits, or else the cheapest two, or else a larger set
    from which none can be left out. Returns None if nothing helps.

    All sets of one and two changes are tried. There are too many larger sets, so `_find_smallest_set` begins
    with the strongest change of every key, and then removes or weakens one after the other.

    If more servers fit on the GPUs, a change to as many as possible is added. Otherwise the other GPUs would
    be idle while one server samples.
    """
    candidates = sorted(_candidate_changes(plan), key=lambda change: change.cost)
    for count in (1, 2):
        sets = [
            changes for changes in itertools.combinations(candidates, count) if _have_different_keys(changes)
        ]
        for changes in sorted(sets, key=_cost):
            if _plan_if_it_fits(plan, changes):
                return _with_more_servers(plan, changes)
    shares = [change for change in candidates if change.key == SHARE_KEY]
    others = [change for change in candidates if change.key != SHARE_KEY]
    # A larger share of the GPU for the engine leaves less for the trainer, so neither the largest nor the
    # smallest share is always the best one, and all are tried.
    smallest_sets = [_find_smallest_set(plan, share, others) for share in [None, *shares]]
    fitting_sets = [changes for changes in smallest_sets if changes is not None]
    best = min(fitting_sets, key=lambda changes: (len(changes), _cost(changes)), default=None)
    return None if best is None else _with_more_servers(plan, best)


def _with_more_servers(plan: Plan, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Returns `changes`, with which the plan fits, and one more change: to as many servers as fit on the
    trainer's GPUs.

    While a single server samples, the other GPUs are idle. If no more servers fit, or if the configuration
    sets the servers itself, returns `changes` as they are.
    """
    changed_plan = _plan_if_it_fits(plan, changes)
    assert changed_plan is not None, "the plan fits with `changes`"
    if changed_plan.engine is None:
        return changes
    settings = changed_plan.engine.settings
    if plan.machine.device == "cpu" or settings.devices or settings.servers != "one":
        return changes
    most_servers = plan.machine.ranks // settings.tensor_parallel_size
    for replicas in range(most_servers, settings.replicas_on("cuda"), -1):
        changes_with_replicas = (*changes, Change("engines.policy.replicas", replicas, 0))
        if _plan_if_it_fits(plan, changes_with_replicas):
            return changes_with_replicas
    return changes


def _find_smallest_set(
    plan: Plan, share: Change | None, candidates: list[Change]
) -> tuple[Change, ...] | None:
    """Returns a small set of changes with which the plan fits; None if there is none.

    Begins with the strongest (most expensive) change of every key. If the plan doesn't fit even then, returns
    None. Otherwise goes through these changes, the most expensive first. Leaves a change out if the plan
    still fits, or else replaces it by the cheapest change of its key with which the plan fits.

    Args:
        share: The change of the engine's share of a GPU; None for the configured one.
        candidates: The other possible changes, in the order of their cost.
    """
    # The last change of a key is the most expensive one.
    strongest = {change.key: change for change in candidates}
    chosen = list(strongest.values())
    if share is not None:
        chosen.append(share)
    if not _plan_if_it_fits(plan, tuple(chosen)):
        return None
    for change in sorted(strongest.values(), key=lambda change: -change.cost):
        remaining_changes = [other for other in chosen if other is not change]
        alternatives = [remaining_changes]
        for candidate in candidates:
            if candidate.key == change.key and candidate.cost < change.cost:
                alternatives.append([*remaining_changes, candidate])
        for alternative in alternatives:
            if _plan_if_it_fits(plan, tuple(alternative)):
                chosen = alternative
                break
    return tuple(chosen)


def _have_different_keys(changes: Iterable[Change]) -> bool:
    keys = [change.key for change in changes]
    return len(set(keys)) == len(keys)


def _cost(changes: Iterable[Change]) -> int:
    return sum(change.cost for change in changes)


def _plan_if_it_fits(plan: Plan, changes: tuple[Change, ...]) -> Plan | None:
    """Returns the plan with these changes. Returns None if the changed plan doesn't fit the machine, or if
    the configuration refuses a change."""
    # ZeRO's stage is changed first, since some other changes are refused without it.
    changes_of_stage = [change for change in changes if change.key == "trainer.zero_stage"]
    other_changes = [change for change in changes if change.key != "trainer.zero_stage"]
    for change in (*changes_of_stage, *other_changes):
        changed_plan = change.apply(plan)
        if changed_plan is None:
            return None
        plan = changed_plan
    return plan if plan.fits else None


def _candidate_changes(plan: Plan) -> Iterator[Change]:
    """Yields the changes that could help, each with its cost.

    The cost is a rank: a change of a lower cost slows the run down less.
    """
    trainer, on_gpu = plan.experiment.trainer, plan.machine.device == "cuda"
    tokens, cost = trainer.tokens_per_micro_batch, 1
    # Much less than the longest row wouldn't help, since a row that exceeds the limit runs alone.
    fewest_tokens = max(256, plan.work.longest // 2)
    while tokens // 2 >= fewest_tokens and cost < 5:  # at most four times
        tokens, cost = tokens // 2, cost + 1
        yield Change("trainer.tokens_per_micro_batch", tokens, cost)
    if not trainer.gradient_checkpointing:
        yield Change("trainer.gradient_checkpointing", True, 6)
    if plan.sends_through_memory:
        # New weights then go into the experiment's folder, and not into /dev/shm.
        yield Change(TRANSFER_KEY, "file", 8)
    if on_gpu and plan.engine is not None:
        yield from _candidate_changes_of_engine(plan)
    if not on_gpu and plan.engine is not None and plan.engine.settings.replicas_on("cpu") > 1:
        yield Change("engines.policy.replicas", 1, 3)
    if on_gpu and trainer.keeps_reference and trainer.lora is None and not trainer.offload_reference:
        yield Change("trainer.offload_reference", True, 4)
    if plan.machine.world_size > 1:  # a single rank keeps all states
        for stage in range(trainer.zero_stage + 1, 4):
            yield Change("trainer.zero_stage", stage, 5 * stage)
    if on_gpu and not trainer.offload_optimizer:
        yield Change("trainer.offload_optimizer", True, 20)
    if on_gpu and not trainer.offload_parameters:
        # It needs ZeRO-3, which is no candidate for a single rank above.
        if trainer.zero_stage < 3 and plan.machine.world_size == 1:
            yield Change("trainer.zero_stage", 3, 15)
        yield Change("trainer.offload_parameters", True, 25)


def _candidate_changes_of_engine(plan: Plan) -> Iterator[Change]:
    """Yields the changes of the engine that could help.

    The last number of a change is its cost, a rank: a change of a lower cost slows the run down less.
    """
    assert plan.engine is not None
    settings = plan.engine.settings
    if plan.shares_device and not settings.sleep:
        yield Change("engines.policy.sleep", True, 2)
    configured_share = plan.experiment.engines.policy.gpu_memory_utilization
    if configured_share is not None:
        # A larger share helps if the engine doesn't fit into its own.
        yield from (Change(SHARE_KEY, share, 3) for share in TRIED_SHARES if share > configured_share)
        # A smaller share leaves more for the trainer, but its smaller cache makes sampling slower. The shares
        # in `TRIED_SHARES` descend, so a smaller one has a higher number, and a higher cost.
        for number, share in enumerate(TRIED_SHARES):
            if share < configured_share:
                yield Change(SHARE_KEY, share, 3 + number)
    if settings.max_num_seqs > 128:
        yield Change("engines.policy.max_num_seqs", 128, 4)
    # Ranks on several machines can't share a server.
    if settings.servers == "per_rank" and plan.machine.nodes == 1:
        yield Change("engines.policy.servers", "one", 10)
    for size in (2, 4, 8):
        if settings.tensor_parallel_size < size <= plan.machine.ranks:
            yield Change("engines.policy.tensor_parallel_size", size, 10 + size)


def _replace_at(part: Any, path: list[str], value: Any) -> Any:
    """Returns a copy of a part of the configuration, with another value of the setting at `path` below it.
    The constructors check the value."""
    name, *further_path = path
    if further_path:
        value = _replace_at(getattr(part, name), further_path, value)
    return replace(part, **{name: value})
