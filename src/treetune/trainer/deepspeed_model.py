"""Runs policy, critic and reference on DeepSpeed; no other module knows its engine."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from treetune.credit.critic_losses import CriticLoss
from treetune.models.attention import attach_packed_attention, attach_tree_attention
from treetune.models.logprobs import CriticModule, ModelInputs, PolicyModule
from treetune.models.lora import adapters_off
from treetune.models.saved_weights import own_persistent_buffers
from treetune.models.sequence_parallel import SequenceParallel
from treetune.models.shards import InTurn, read_whole
from treetune.objectives.further_inputs import DistributionObjective
from treetune.seeds import derive_seed
from treetune.trainer.base import Trainer
from treetune.trainer.ranks import Ranks

CHECKPOINT_TAG = "state"
VANISHING_NORM = 1e-300
"""A norm so small that a gradient which is clipped to it becomes 0 in float32. A norm of 0 can't be used,
since DeepSpeed takes it for "no clipping"."""


def _member_of_enumeration(enumeration: Any, name: str) -> Enum:
    """Returns a member of an enumeration by its name. Raises UnpicklingError if `enumeration` isn't one."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum)):
        raise pickle.UnpicklingError(f"a trainer's state asks for {name!r} of {enumeration!r}")
    return enumeration[name]


class DeepSpeedModel:
    """A module on a DeepSpeed engine, trained with losses that are sums over the global minibatch.

    DeepSpeed averages gradients over the ranks, while each rank's loss is its share of a global sum. So each
    share is multiplied by the number of ranks before the backward pass. DeepSpeed's own gradient accumulation
    is off, because minibatches have different numbers of micro-batches.
    """

    def __init__(self, module: nn.Module, settings: Trainer, ranks: Ranks) -> None:
        import deepspeed

        self.ranks = ranks
        self.zero_stage = settings.zero_stage
        self._norm: Tensor | None = None
        """The norm of the last gradient, if `_clip` has measured it; None if DeepSpeed clips by itself."""
        self._storages: list[torch.UntypedStorage] = []
        """The storages that are offloaded at present; empty if none are."""
        self._copies: list[Tensor] = []
        """The memory on the CPU to which `offload` copies the storages. It stays after `reload`, since
        pinning memory takes long."""
        config = _make_deepspeed_config(settings, ranks)
        trained = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim > 1]
        vectors = [p for p in trained if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": trained}]
        if settings.weight_decay and vectors:
            # The vectors, which are biases and the weights of norms, have no weight decay.
            groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        if settings.reads_in_parts:
            # The weights are sharded while they are read, so that no rank ever holds all of them.
            shard_weights(module, config, settings, ranks)
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config)
        if settings.zero_stage == 0 and settings.precision == "float32":
            # The clipping that DeepSpeed has for this case doesn't keep the norm, which is a metric.
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
        """Makes one update from the accumulated gradient, and returns the gradient's norm before clipping.

        With `without_gradient`, the gradient counts as 0, and only the optimiser's momentum and weight decay
        move the weights. The returned norm is then 0.
        """
        optimizer = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        max_norm = self._max_norm
        # Some of DeepSpeed's optimisers clip to their attribute `clip_grad`. The others call `_clip`, which
        # clips to `self._max_norm`.
        clip_norm = getattr(optimizer, "clip_grad", None)
        if without_gradient:
            # Clipping to 0 drops the gradient in the same way for every kind of sharding and offloading. The
            # attribute gets a tiny norm, since DeepSpeed takes 0 for no clipping.
            self._max_norm = 0.0
            if clip_norm is not None:
                optimizer.clip_grad = VANISHING_NORM
        self.engine.step()
        # Both limits are put back, in case they were changed above.
        self._max_norm = max_norm
        if clip_norm is not None:
            optimizer.clip_grad = clip_norm
        # `_clip` has set `self._norm`, or DeepSpeed's optimiser has clipped by itself and knows the norm.
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
        self._norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._max_norm)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the whole weights by name. Sharded weights are gathered, and only the first rank returns
        them; the others then return an empty dictionary. Collective."""
        weights = {}
        are_sharded = self.zero_stage == 3
        for weights_of_layer in self.layers():
            for name, weight in weights_of_layer.items():
                if not are_sharded:
                    weights[name] = weight
                elif self.ranks.is_first:
                    # A gathered weight is released when the next layer is requested.
                    weights[name] = weight.to("cpu", copy=True)
        return weights

    def layers(self) -> Iterator[dict[str, Tensor]]:
        """Yields the weights and persistent buffers of one layer after the other, by name, on every rank.

        Sharded weights are gathered, and are whole only until the next layer is requested. Collective: every
        rank must take all layers.
        """
        import deepspeed

        # A parameter that several modules share is listed here only by its first name.
        first_names = {name for name, _ in self.module.named_parameters()}
        layers: dict[str, _Layer] = {}
        for path, module in self.module.named_modules():
            # A layer with adapters has them in `.lora_…`, and its own weights in `.base_layer`. Both count as
            # one layer, since merging the adapters needs both at the same time.
            suffix = ".base_layer" if ".base_layer" in path else ".lora_"
            layer_path, _, _ = path.partition(suffix)
            layer = layers.setdefault(layer_path, _Layer(parameters={}, buffers={}))
            prefix = f"{path}." if path else ""
            for name, parameter in module.named_parameters(recurse=False):
                full_name = prefix + name
                if full_name in first_names:
                    layer.parameters[full_name] = parameter
            for name, buffer in own_persistent_buffers(module).items():
                layer.buffers[prefix + name] = buffer
        for layer in layers.values():
            weights: dict[str, Tensor] = {**layer.parameters, **layer.buffers}
            if not weights:
                continue
            gathered: AbstractContextManager[Any] = nullcontext()
            if self.zero_stage == 3 and layer.parameters:
                gathered = deepspeed.zero.GatheredParameters(list(layer.parameters.values()))
            with gathered:
                yield {name: weight.detach() for name, weight in weights.items()}

    def save(self, directory: Path) -> None:
        """Writes weights, optimiser state and shards. Collective."""
        self.engine.save_checkpoint(str(directory), tag=CHECKPOINT_TAG)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Collective.

        Raises:
            RuntimeError: The directory holds no such state.
        """
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        # A pickle can run any code. DeepSpeed asks PyTorch to load whatever the pickle holds, and only this
        # environment variable overrides DeepSpeed. With it, PyTorch loads only tensors, plain values, and the
        # classes in `allowed`, which DeepSpeed stores with the tensors.
        weights_only = patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"})
        allowed: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        # Some Pythons, such as Debian 12's 3.11.2, pickle ``ZeroStageEnum.gradients`` as
        # ``getattr(ZeroStageEnum, "gradients")``. Only such calls are allowed in place of any `getattr`.
        allowed.append((_member_of_enumeration, "builtins.getattr"))
        with weights_only, torch.serialization.safe_globals(allowed):
            path, _ = self.engine.load_checkpoint(str(directory), tag=CHECKPOINT_TAG)
        if path is None:
            raise RuntimeError(f"{directory} holds no trainer state to continue from")

    def offload(self, *, weights: bool = False) -> None:
        """Moves optimiser state, master weights and gradients to the CPU, between two steps. With `weights`,
        also moves the weights that the module computes with. Does nothing if they are there already.

        Each storage is emptied in place, and `reload` fills it in place, so that tensors which view it (parts
        of a flat buffer, gradients) stay valid. DeepSpeed's own `offload_states` supports neither its
        optimiser for ZeRO-1 in bfloat16 nor, under ZeRO-3, any Adam but its own.
        """
        if self._storages:
            return
        device = self.ranks.device
        tensors = training_state(self.engine) + (weights_of(self.module) if weights else [])
        storages: dict[int, torch.UntypedStorage] = {}  # each once, by its address
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # A storage that can't be resized can't be emptied, so it stays.
            if tensor.device == device and storage.nbytes() and storage.resizable():
                storages[storage._cdata] = storage
        self._storages = list(storages.values())
        # The memory on the CPU is used again if the storages have the same sizes as at the last time.
        sizes_of_copies = [copy.nbytes for copy in self._copies]
        sizes_of_storages = [storage.nbytes() for storage in self._storages]
        if sizes_of_copies != sizes_of_storages:
            pinned = device.type == "cuda"
            self._copies = [
                torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                for storage in self._storages
            ]
        for copy, storage in zip(self._copies, self._storages, strict=True):
            copy.copy_(_view_bytes(storage), non_blocking=True)
        self._wait_for_copies()
        for storage in self._storages:
            storage.resize_(0)

    def reload(self) -> None:
        """Undoes `offload`."""
        if not self._storages:
            return
        for copy, storage in zip(self._copies, self._storages, strict=True):
            storage.resize_(copy.nbytes)
            _view_bytes(storage).copy_(copy, non_blocking=True)
        self._wait_for_copies()
        self._storages = []

    def _wait_for_copies(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def close(self) -> None:
        """Frees weights and optimiser. The object can't be used afterwards."""
        self.engine.destroy()
        del self.engine


class _Layer(NamedTuple):
    """The weights that one layer of a model has itself, without those of layers inside it."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    """The persistent buffers, which are never sharded."""


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Returns a storage as a tensor of bytes, without copying it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def training_state(engine: Any) -> list[Tensor]:
    """Returns the tensors of a DeepSpeed engine that are needed for updates only, and neither for a forward
    pass nor for an export: the optimiser's state, master weights, gradients and buffers for them."""

    def tensors_in(container: Any) -> Iterator[Tensor]:
        """Yields the tensors in nested containers and dataclasses."""
        if isinstance(container, Tensor):
            yield container
        elif isinstance(container, dict):
            for value in container.values():
                yield from tensors_in(value)
        elif isinstance(container, list | tuple | set):
            for value in container:
                yield from tensors_in(value)
        elif dataclasses.is_dataclass(container) and not isinstance(container, type):
            for field in dataclasses.fields(container):
                yield from tensors_in(getattr(container, field.name))

    # `_cdata` is the address of a storage, by which views of the same memory are recognised.
    storages_of_weights = {tensor.untyped_storage()._cdata for tensor in weights_of(engine.module)}
    optimizer = engine.optimizer
    inner_optimizer = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed's may wrap PyTorch's
    # DeepSpeed keeps master weights and buffers in attributes of its optimiser.
    tensors = [*tensors_in(vars(optimizer)), *tensors_in(inner_optimizer.state)]
    for group in inner_optimizer.param_groups:
        tensors += group["params"]
    # Only leaves have a gradient; PyTorch warns where that of another tensor is read.
    leaves = [tensor for tensor in [*tensors, *engine.module.parameters()] if tensor.is_leaf]
    tensors += [tensor.grad for tensor in leaves if tensor.grad is not None]
    return [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in storages_of_weights]


def weights_of(module: nn.Module) -> list[Tensor]:
    """Returns the module's parameters and, under ZeRO-3, also this rank's shards of them, which DeepSpeed
    keeps in the parameters' attribute `ds_tensor`."""
    parameters = list(module.parameters())
    return [*parameters, *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor"))]


def shard_weights(module: nn.Module, config: Mapping[str, Any], settings: Trainer, ranks: Ranks) -> None:
    """Shards the weights over the ranks (ZeRO-3), one after the other. Collective.

    The whole weights may be on the CPU or still in files. They are never on the device all at a time. Every
    rank gets its shards from the first rank.
    """
    import deepspeed

    dtype = getattr(torch, settings.precision)
    cast_parameters(module, dtype)  # adapters may be in float32
    # `zero.Init` takes the parameters one after the other, and the first rank sends each to the others.
    # `InTurn` allocates a parameter only when it is taken, and reads its values on the first rank alone.
    reading_module = InTurn(module, reads=ranks.is_first)
    # Making this object shards the module. `mem_efficient_linear` would replace PyTorch's linear layers for
    # every model of the process.
    deepspeed.zero.Init(
        module=reading_module, config_dict_or_path=config, dtype=dtype, mem_efficient_linear=False
    )


def shard_reference(module: nn.Module, settings: Trainer, ranks: Ranks) -> Any:
    """Shards a module that isn't trained over the ranks (ZeRO-3), and returns an engine that is called like
    the module. Collective."""
    import deepspeed

    # The reference has no optimiser, and its shards stay on the device.
    config = _make_deepspeed_config(
        replace(settings, offload_optimizer=False, offload_parameters=False), ranks
    )
    del config["optimizer"]
    shard_weights(module, config, settings, ranks)
    engine, *_ = deepspeed.initialize(model=module, config=config)
    engine.eval()
    return engine


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters in place, and leaves buffers alone: rounded to bfloat16, the frequencies of rotary
    embeddings would rotate the 1000th position by half a radian too much or too little."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _make_deepspeed_config(settings: Trainer, ranks: Ranks) -> dict[str, Any]:
    """Returns DeepSpeed's configuration, as `deepspeed.initialize` takes it."""
    on_gpu = ranks.device.type == "cuda"
    offload = {"device": "cpu", "pin_memory": on_gpu}
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": False, "contiguous_gradients": True}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = offload
    if settings.offload_parameters:
        zero["offload_param"] = offload
    adam: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": list(settings.adam_betas),
        "eps": settings.adam_eps,
        "weight_decay": settings.weight_decay,
        # DeepSpeed's own Adams are compiled on first use; only offloading needs them.
        "torch_adam": not (settings.offload_optimizer and on_gpu),
    }
    if on_gpu and not settings.offload_optimizer:
        adam["fused"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # unused: the trainer cuts its own micro-batches
        "managed_gradient_accumulation": False,  # the trainer decides after which micro-batch a step comes
        # With 0, DeepSpeed would not call `_clip`, which measures the norm. No gradient is as long as 1e30.
        "gradient_clipping": settings.max_grad_norm or 1e30,
        "optimizer": {"type": "AdamW", "params": adam},
        # With `immediate_grad_update`, ZeRO-1 adds each gradient to the float32 sum at once, and frees it.
        # That gives the same bits, and saves the memory of all gradients.
        "bf16": {"enabled": settings.precision == "bfloat16", "immediate_grad_update": True},
        # In bfloat16, the sum over many micro-batches would round off the later ones.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    return config


Reference = Callable[[], AbstractContextManager[Callable[..., Any]]]
"""A function that returns a context manager. In its block, the reference can be called like a `PolicyModule`.

Example: ``with reference() as model: logprobs_N, *_ = model(inputs, temperature)``.
"""


class ModelFactory:
    """Makes policy, reference, critic and reward model.

    Args:
        load_model: Loads a fresh copy of the start model.
        load_reference: Loads the reference, if it is not the start model.

    Raises:
        ValueError: The number of ranks doesn't fit the settings.
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
        group_size = settings.sequence_parallel_size
        if ranks.world_size % group_size:
            raise ValueError(
                f"trainer.sequence_parallel_size is {group_size}, which doesn't divide the run's"
                f" {ranks.world_size} ranks: start it with a multiple (--num_gpus), or set it to 1"
            )
        self.parallel: SequenceParallel | None = None
        if group_size > 1:
            rank_in_group = ranks.rank % group_size
            self.parallel = SequenceParallel(ranks.group(group_size), rank_in_group, group_size)

    def policy(self) -> DeepSpeedModel:
        """Loads the start model, with an optimiser for its weights or, with LoRA, only for its adapters."""
        model = self._load_for_training()
        if self.settings.lora is not None:
            self.settings.lora.apply(model, self.seed)
        objective = self.settings.objective
        terms = None
        if isinstance(objective, DistributionObjective):
            # The module computes these terms of the loss while it has the logits of a chunk of positions.
            terms = objective.terms
        return DeepSpeedModel(PolicyModule(model, self.parallel, terms), self.settings, self.ranks)

    def critic(self, loss: CriticLoss) -> DeepSpeedModel:
        """Loads the start model as a critic with the head that its loss needs, and with an optimiser."""
        critic = CriticModule(
            self._load_for_training(),
            derive_seed(self.seed, "critic"),
            self.parallel,
            outputs=loss.outputs,
            values_of=loss.values,
        )
        return DeepSpeedModel(critic, self.settings, self.ranks)

    def reward_model(self, load: Callable[[], nn.Module] | None) -> DeepSpeedModel:
        """Loads an implicit reward model with an optimiser for all of its weights.

        Args:
            load: Loads the model; None for the start model.
        """
        return DeepSpeedModel(
            PolicyModule(self._load_for_training(load), self.parallel), self.settings, self.ranks
        )

    def reference(self, policy: Callable[[], DeepSpeedModel]) -> Reference:
        """Returns a context manager that lends the reference model, which never changes, for a block.

        With LoRA, the reference is the policy without its adapters. Without LoRA, it is a second model: on
        the CPU while it isn't used (`offload_reference`), sharded over the ranks (ZeRO-3), or whole on the
        device.

        Args:
            policy: Returns the present policy.
        """
        if self.settings.lora is not None:

            @contextmanager
            def without_adapters() -> Iterator[Callable[..., Any]]:
                with adapters_off(policy().module):
                    yield policy()

            return without_adapters
        language_model = self.attach_attention(self.load_reference())
        model = PolicyModule(language_model, self.parallel).requires_grad_(False).eval()
        if self.settings.zero_stage == 3 and not self.settings.offload_reference:
            sharded = shard_reference(model, self.settings, self.ranks)
            return lambda: nullcontext(sharded)
        read_whole(model)  # its weights may still be in their files
        if self.settings.offload_reference:
            return keep_on_cpu(model, self.ranks.device)
        model.to(self.ranks.device)
        return lambda: nullcontext(model)

    def frozen_policy(self) -> PolicyModule:
        """Loads the policy as it begins, without an optimiser, whole on the device."""
        model = self.attach_attention(self.load_model())
        if self.settings.lora is not None:
            self.settings.lora.apply(model, self.seed)  # the same adapters as the policy's
        module = PolicyModule(model, self.parallel).requires_grad_(False).eval()
        read_whole(module)  # its weights may still be in their files
        return module.to(self.ranks.device)

    def _load_for_training(self, load: Callable[[], nn.Module] | None = None) -> nn.Module:
        """Loads a model to train.

        Args:
            load: Loads the model; None for the start model.
        """
        load = load or self.load_model
        model = self.attach_attention(load())
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def attach_attention(self, model: nn.Module) -> nn.Module:
        """Replaces the model's attention, if the layout or sequence parallelism needs another one. Returns
        the model."""
        if self.settings.layout == "tree":
            attach_tree_attention(model)
        # For packed rows, PyTorch's attention (sdpa) needs a mask with an entry for each pair of tokens. On a
        # CPU, rows are short and the mask is small, so PyTorch's attention stays.
        is_sdpa = model.config._attn_implementation == "sdpa"
        if self.settings.layout == "packed" and is_sdpa and self.ranks.device.type == "cuda":
            attach_packed_attention(model)
        if self.parallel is not None:
            self.parallel.attach(model)
        return model


def keep_on_cpu(module: nn.Module, device: torch.device) -> Reference:
    """Moves a module's weights to the CPU, and returns a context manager that copies them to the device for a
    block. They are never copied back, since they never change."""
    module.to("cpu")
    on_cpu: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():
        # Pinned memory is copied to a GPU faster.
        weight = parameter.data.pin_memory() if device.type == "cuda" else parameter.data
        on_cpu[parameter] = nn.Parameter(weight, requires_grad=False)
    # For each parameter of each module: the module, the parameter's name in it, and the weight on the CPU.
    # Two modules that share a parameter share the weight on the CPU, too.
    owners: list[tuple[nn.Module, str, nn.Parameter]] = []
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                owners.append((submodule, name, on_cpu[parameter]))
    # Buffers are small, and stay on the device.
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            submodule._buffers[name] = None if buffer is None else buffer.to(device)
    for submodule, name, weight in owners:
        submodule._parameters[name] = weight

    @contextmanager
    def on_device() -> Iterator[Callable[..., Any]]:
        copy_of_weight: dict[nn.Parameter, nn.Parameter] = {}  # on the device, by the weight on the CPU
        for weight in on_cpu.values():
            copy = weight.data.to(device, non_blocking=True)
            copy_of_weight[weight] = nn.Parameter(copy, requires_grad=False)
        for submodule, name, weight in owners:
            submodule._parameters[name] = copy_of_weight[weight]
        try:
            yield module
        finally:
            for submodule, name, weight in owners:
                submodule._parameters[name] = weight

    return on_device
