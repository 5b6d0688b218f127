"""Policy, critic and reference as DeepSpeed runs them: the one place that knows it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from treetune.models.attention import attach_packed_attention, attach_tree_attention
from treetune.models.logprobs import CriticModule, ModelInputs, PolicyModule
from treetune.models.lora import adapters_off
from treetune.models.saved_weights import own_persistent_buffers
from treetune.models.sequence_parallel import SequenceParallel
from treetune.models.shards import InTurn, read_whole
from treetune.seeds import derive_seed
from treetune.trainer.base import Trainer
from treetune.trainer.ranks import Ranks

CHECKPOINT_TAG = "state"
BELOW_ALL = 1e-300
"""A norm to clip by that leaves 0 of any gradient in float32. (0 itself would be no clipping.)"""


class DeepSpeedModel:
    """A module on a DeepSpeed engine, trained with losses that are sums over the global minibatch.

    DeepSpeed averages gradients over ranks while our losses are shares of a global sum, so each
    share is multiplied by the number of ranks before it goes backward. DeepSpeed's own gradient
    accumulation is off: minibatches differ in their number of micro-batches, and only the caller
    knows where one ends.
    """

    def __init__(self, module: nn.Module, settings: Trainer, ranks: Ranks) -> None:
        import deepspeed

        self.ranks = ranks
        self.zero_stage, self.tensor_parallel = settings.zero_stage, settings.tensor_parallel_size > 1
        self._norm: Tensor | None = None
        self._storages: list[torch.UntypedStorage] = []
        self._copies: list[Tensor] = []
        """What is offloaded, and where: the copies are kept, since pinning memory takes long."""
        config = _config(settings, ranks)
        trained = [p for p in module.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": trained}]
        if settings.weight_decay and vectors:  # biases and norms are not decayed
            groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        if settings.reads_in_parts and not self.tensor_parallel:
            deal_out(module, config, settings, ranks)
        with cut_in_turn() if self.tensor_parallel else nullcontext():
            self.engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config)
        if settings.zero_stage == 0 and settings.precision == "float32":
            # DeepSpeed clips here and forgets the norm that it clipped by.
            self.engine.clip_fp32_gradients = self._clip
        self._max_norm = settings.max_grad_norm or math.inf
        self.engine.train()

    @property
    def module(self) -> nn.Module:
        return self.engine.module

    def __call__(self, inputs: ModelInputs, *options: Any, **named_options: Any) -> Any:
        return self.engine(inputs, *options, **named_options)

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradient of this rank's share of the minibatch's loss."""
        self.engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float, without_gradient: bool = False) -> float:
        """Makes one update from the accumulated gradient. Returns its norm before clipping.
        `without_gradient` it is 0, and the optimiser's momentum alone moves the weights."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer, max_norm = self.engine.optimizer, self._max_norm
        clip = getattr(optimizer, "clip_grad", None)  # where DeepSpeed's optimiser clips, and not `_clip`
        if without_gradient:
            # The accumulated gradient is clipped to exactly 0: the one way to drop it that is the same for
            # every kind of sharding and offloading.
            self._max_norm = 0.0
            if clip is not None:
                optimizer.clip_grad = BELOW_ALL
        self.engine.step()
        self._max_norm = max_norm
        if clip is not None:
            optimizer.clip_grad = clip
        norm = self._norm if self._norm is not None else self.engine.get_global_grad_norm()
        assert norm is not None, "every DeepSpeed optimiser that we configure reports its norm"
        norm = float(norm)
        if not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient's norm is {norm}: training has diverged (try a longer warm-up, a smaller"
                " learning rate, or float32); the last checkpoint is untouched"
            )
        return 0.0 if without_gradient else norm

    def _clip(self) -> None:
        if not self.tensor_parallel:
            self._norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._max_norm)
            return
        from deepspeed.runtime.utils import clip_grad_norm_

        # This one adds up over the ranks the parts that each has, and counts once what they all have.
        self._norm = clip_grad_norm_(self.module.parameters(), self._max_norm, mpu=self.engine.mpu)

    def state_dict(self) -> dict[str, Tensor]:
        """Full weights by name, on the first rank; shards are gathered. Collective."""
        full = {}
        dealt_out = self.tensor_parallel or self.zero_stage == 3
        for part in self.parts():
            for name, weight in part.items():
                if not dealt_out:
                    full[name] = weight
                elif self.ranks.is_first:
                    full[name] = weight.to("cpu", copy=True)
        return full

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """All weights and persistent buffers by name, one layer's after the other's, each once. Those that
        ranks have parts of are whole until the next ones are asked for, on every rank. Collective, to the
        end."""
        import deepspeed
        from deepspeed.module_inject.layers import GatherReplacedLayerParams

        once = {name for name, _ in self.module.named_parameters()}  # without a parameter's second names
        layers: dict[str, tuple[nn.Module, dict[str, nn.Parameter]]] = {}
        buffers: dict[str, dict[str, Tensor]] = {}  # of each layer: every rank has them whole
        for path, module in self.module.named_modules():
            # A layer's adapters come with it, since whoever merges them needs both at once.
            layer, _, _ = path.partition(".base_layer" if ".base_layer" in path else ".lora_")
            _, of_layer = layers.setdefault(layer, (module, {}))
            for name, parameter in module.named_parameters(recurse=False):
                full_name = f"{path}.{name}" if path else name
                if full_name in once:
                    of_layer[full_name] = parameter
            for name, buffer in own_persistent_buffers(module).items():
                buffers.setdefault(layer, {})[f"{path}.{name}" if path else name] = buffer
        for layer, (module, parameters) in layers.items():
            whole_buffers = {name: buffer.detach() for name, buffer in buffers.get(layer, {}).items()}
            if not parameters:
                if whole_buffers:
                    yield whole_buffers
                continue
            whole: AbstractContextManager[Any] = nullcontext()
            if self.tensor_parallel:
                whole = GatherReplacedLayerParams(list(parameters.values()), module, enabled=True)
            elif self.zero_stage == 3:
                whole = deepspeed.zero.GatheredParameters(list(parameters.values()))
            with whole:
                yield {name: parameter.detach() for name, parameter in parameters.items()} | whole_buffers

    def save(self, directory: Path) -> None:
        """Writes weights, optimiser state and shards. Collective."""
        self.engine.save_checkpoint(str(directory), tag=CHECKPOINT_TAG)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Raises RuntimeError where `directory` holds no such state. Collective."""
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        # PyTorch loads tensors, plain values and what DeepSpeed keeps with them alone: a pickle could run
        # code. DeepSpeed would load whatever a pickle holds; PyTorch's own switch is the only one above that.
        only_data = patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"})
        kept = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with only_data, torch.serialization.safe_globals(kept):
            path, _ = self.engine.load_checkpoint(str(directory), tag=CHECKPOINT_TAG)
        if path is None:
            raise RuntimeError(f"{directory} holds no trainer state to continue from")

    @property
    def offloaded_bytes(self) -> int:
        """The size of all that is offloaded at present."""
        return sum(copy.nbytes for copy, _ in zip(self._copies, self._storages, strict=False))

    def offload(self, *, weights: bool = False) -> None:
        """Moves optimiser state, master weights and gradients to the memory of the CPU, between two steps,
        and with `weights` those that the module runs on. Does nothing where they are there already.

        A storage is emptied in place and filled again in place, so that whatever looks into it (a flat
        buffer's many views, a parameter's gradient) goes on doing so. DeepSpeed's own `offload_states` knows
        neither the optimiser that it takes for ZeRO-1 in bfloat16, nor under ZeRO-3 any Adam but its own.
        """
        if self._storages:
            return
        device = self.ranks.device
        tensors = training_state(self.engine) + (weights_of(self.module) if weights else [])
        storages = {
            storage._cdata: storage
            for storage in (tensor.untyped_storage() for tensor in tensors if tensor.device == device)
            if storage.nbytes() and storage.resizable()
        }
        self._storages = list(storages.values())
        if [copy.nbytes for copy in self._copies] != [storage.nbytes() for storage in self._storages]:
            pinned = device.type == "cuda"
            self._copies = [
                torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                for storage in self._storages
            ]
        for copy, storage in zip(self._copies, self._storages, strict=True):
            copy.copy_(_bytes_of(storage), non_blocking=True)
        self._wait_for_copies()
        for storage in self._storages:
            storage.resize_(0)

    def reload(self) -> None:
        """Undoes `offload`."""
        for copy, storage in zip(self._copies, self._storages, strict=False):
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self._wait_for_copies()
        self._storages = []

    def _wait_for_copies(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def close(self) -> None:
        """Lets go of weights and optimiser; it can't be used afterwards."""
        self.engine.destroy()
        del self.engine


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def training_state(engine: Any) -> list[Tensor]:
    """The tensors of a DeepSpeed engine that neither a forward pass nor an export reads: the optimiser's
    states, master weights, gradients and buffers for them."""

    def tensors_in(holder: Any) -> Iterator[Tensor]:
        """Tensors in containers and records, however deep."""
        if isinstance(holder, Tensor):
            yield holder
        elif isinstance(holder, dict):
            for value in holder.values():
                yield from tensors_in(value)
        elif isinstance(holder, list | tuple | set):
            for value in holder:
                yield from tensors_in(value)
        elif dataclasses.is_dataclass(holder) and not isinstance(holder, type):
            for field in dataclasses.fields(holder):
                yield from tensors_in(getattr(holder, field.name))

    kept = {tensor.untyped_storage()._cdata for tensor in weights_of(engine.module)}
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    masters = [parameter for group in inner.param_groups for parameter in group["params"]]
    tensors = [*tensors_in(vars(optimizer)), *tensors_in(inner.state), *masters]
    leaves = [tensor for tensor in [*tensors, *engine.module.parameters()] if tensor.is_leaf]
    tensors += [tensor.grad for tensor in leaves if tensor.grad is not None]
    return [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in kept]


def weights_of(module: nn.Module) -> list[Tensor]:
    """The module's weights; under ZeRO-3 this rank's parts of them."""
    parameters = list(module.parameters())
    return [*parameters, *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor"))]


def deal_out(module: nn.Module, config: Mapping[str, Any], settings: Trainer, ranks: Ranks) -> None:
    """Gives each rank its part of the weights (ZeRO-3), one weight after the other: what is on the CPU, or
    still in files, never lies on the device whole. The first rank's weights count. Collective."""
    import deepspeed

    dtype = getattr(torch, settings.precision)
    cast_parameters(module, dtype)  # adapters may have come in float32
    # Its own linear layers would take the place of PyTorch's for every model of the process.
    in_turn = InTurn(module, reads=ranks.is_first)
    deepspeed.zero.Init(module=in_turn, config_dict_or_path=config, dtype=dtype, mem_efficient_linear=False)


@contextmanager
def cut_in_turn() -> Iterator[None]:
    """Has the weights of a module read just before AutoTP cuts them, while inside: a rank has its parts, the
    weights that aren't cut, and one whole weight. It has no entrance for parts, but one method that it calls
    for each module first, to gather what ZeRO-3 had dealt out (``AutoTP._gather_zero3_params``)."""
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.runtime.engine import DeepSpeedEngine

    gather, cut = AutoTP._gather_zero3_params, DeepSpeedEngine._apply_autotp_partitioning

    def read_and_gather(self: Any, module: nn.Module) -> Any:
        read_whole(module, recurse=False)
        return gather(self, module)

    def cut_and_read(self: Any, model: nn.Module, *arguments: Any) -> Any:
        sources = cut(self, model, *arguments)
        read_whole(model)  # norms, and whatever else every rank has
        return sources

    with (
        patch.object(AutoTP, gather.__name__, read_and_gather),
        patch.object(DeepSpeedEngine, cut.__name__, cut_and_read),
    ):
        yield


def frozen(module: nn.Module, settings: Trainer, ranks: Ranks) -> Any:
    """A module that isn't trained, its weights dealt out over the ranks as a policy's are under ZeRO-3.
    Called like the module. Collective."""
    import deepspeed

    config = _config(replace(settings, offload_optimizer=False, offload_parameters=False), ranks)
    del config["optimizer"]
    deal_out(module, config, settings, ranks)
    engine, *_ = deepspeed.initialize(model=module, config=config)
    engine.eval()
    return engine


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters in place. Buffers stay as they are: in bfloat16, the frequencies of rotary embeddings
    would turn the 1000th position by half a radian."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _config(settings: Trainer, ranks: Ranks) -> dict[str, Any]:
    on_gpu = ranks.device.type == "cuda"
    offload = {"device": "cpu", "pin_memory": on_gpu}
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": False, "contiguous_gradients": True}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = offload
    if settings.offload_parameters:
        zero["offload_param"] = offload
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # unused: the trainer cuts its own micro-batches
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm or 1e30,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.learning_rate,
                "betas": list(settings.adam_betas),
                "eps": settings.adam_eps,
                "weight_decay": settings.weight_decay,
                # DeepSpeed's own Adams are compiled on first use; only offloading needs them.
                "torch_adam": not (settings.offload_optimizer and on_gpu),
                **({"fused": True} if on_gpu and not settings.offload_optimizer else {}),
            },
        },
        # ZeRO-1 adds each gradient to float32 as soon as it is there, and drops it: to the same bits, and a
        # policy's size less in memory.
        "bf16": {"enabled": settings.precision == "bfloat16", "immediate_grad_update": True},
        # Micro-batches are many and alike: added up in bfloat16, the later ones would hardly count.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if settings.tensor_parallel_size > 1:
        config["tensor_parallel"] = {"autotp_size": settings.tensor_parallel_size}
    return config


Reference = Callable[[], AbstractContextManager[Callable[..., Any]]]
"""The reference for as long as it is needed, called like a `PolicyModule`."""


class ModelFactory:
    """Makes policy, reference and critic. `load_model` gives a fresh copy of the start model,
    `load_reference` a reference that is another one.

    Raises ValueError where the run's ranks can't be grouped as the settings say.
    """

    def __init__(
        self,
        settings: Trainer,
        load_model: Callable[[], nn.Module],
        ranks: Ranks,
        seed: int,
        load_reference: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.settings, self.load_model, self.ranks, self.seed = settings, load_model, ranks, seed
        self.load_reference = load_reference or load_model
        if ranks.world_size % settings.model_parallel_size:
            raise ValueError(
                f"trainer.{settings.model_parallel_setting} is {settings.model_parallel_size}, which doesn't"
                f" divide the run's {ranks.world_size} ranks: start it with a multiple (--num_gpus), or set"
                " it to 1"
            )
        self.parallel: SequenceParallel | None = None
        size = settings.sequence_parallel_size
        if size > 1:
            self.parallel = SequenceParallel(ranks.group(size), ranks.rank % size, size)

    def policy(self) -> DeepSpeedModel:
        """The start model with an optimiser, of its adapters alone where there are any."""
        model = self._trained()
        if self.settings.lora is not None:
            self.settings.lora.apply(model, self.seed)
        objective = self.settings.objective
        terms = objective.terms if objective.has_terms else None
        return DeepSpeedModel(PolicyModule(model, self.parallel, terms), self.settings, self.ranks)

    def critic(self) -> DeepSpeedModel:
        critic = CriticModule(self._trained(), derive_seed(self.seed, "critic"), self.parallel)
        return DeepSpeedModel(critic, self.settings, self.ranks)

    def reference(self, policy: Callable[[], DeepSpeedModel]) -> Reference:
        """The start model as it stays. Where adapters are trained, it is in `policy` (the present one)
        already; else it is a model of its own, on the CPU while it isn't needed if so set, or else dealt out
        over the ranks where the policy's weights are (ZeRO-3).
        """
        if self.settings.lora is not None:

            @contextmanager
            def without_adapters() -> Iterator[Callable[..., Any]]:
                with adapters_off(policy().module):
                    yield policy()

            return without_adapters
        attached = self.attached(self.load_reference())
        model = PolicyModule(attached, self.parallel).requires_grad_(False).eval()
        if self.settings.zero_stage == 3 and not self.settings.offload_reference:
            shared = frozen(model, self.settings, self.ranks)
            return lambda: nullcontext(shared)
        read_whole(model)
        if self.settings.offload_reference:
            return visiting(model, self.ranks.device)
        model.to(self.ranks.device)
        return lambda: nullcontext(model)

    def _trained(self) -> nn.Module:
        model = self.attached(self.load_model())
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def attached(self, model: nn.Module) -> nn.Module:
        """The model with the attention that the layout and shared sequences need."""
        if self.settings.layout == "tree":
            attach_tree_attention(model)
        attention, on_gpu = model.config._attn_implementation, self.ranks.device.type == "cuda"
        # On a CPU rows are short, and the mask for their packing is small.
        if self.settings.layout == "packed" and attention == "sdpa" and on_gpu:
            attach_packed_attention(model)
        if self.parallel is not None:
            self.parallel.attach(model)
        return model


def visiting(module: nn.Module, device: torch.device) -> Reference:
    """Keeps a module's weights on the CPU, pinned where that speeds their way to the device up. They are
    copied there for as long as they are needed, and never back: nobody changes them."""
    module.to("cpu")
    on_cpu: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():
        weight = parameter.data.pin_memory() if device.type == "cuda" else parameter.data
        on_cpu[parameter] = nn.Parameter(weight, requires_grad=False)
    # A weight that two modules share stays one.
    owners = [
        (part, name, on_cpu[parameter])
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    for part, name, weight in owners:
        part._parameters[name] = weight

    @contextmanager
    def on_device() -> Iterator[Callable[..., Any]]:
        copies = {weight: weight.data.to(device, non_blocking=True) for weight in on_cpu.values()}
        copied = {weight: nn.Parameter(copy, requires_grad=False) for weight, copy in copies.items()}
        for part, name, weight in owners:
            part._parameters[name] = copied[weight]
        try:
            yield module
        finally:
            for part, name, weight in owners:
                part._parameters[name] = weight

    return on_device
