"""A module, its AdamW and its sharding: the one place that knows DeepSpeed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from treetune.models.in_parts import InTurn, read_whole
from treetune.models.inputs import ModelInputs
from treetune.trainers.aside import Aside, of_the_weights, of_training_alone
from treetune.trainers.base import Trainer
from treetune.trainers.ranks import Ranks

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
        self.aside = Aside()
        without_dropout(module)
        config, groups = _config(settings, ranks), _groups(module, settings)
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
        """One update from what was accumulated; the gradient's norm before clipping. `without_gradient` it is
        0, and what moves the weights is the optimiser's momentum."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        with self._clipped_away() if without_gradient else nullcontext():
            self.engine.step()
        norm = self._norm if self._norm is not None else self.engine.get_global_grad_norm()
        assert norm is not None, "every DeepSpeed optimiser that we configure reports its norm"
        norm = float(norm)
        if not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient's norm is {norm}: training has diverged (try a longer warm-up, a smaller"
                " learning rate, or float32); the last checkpoint is untouched"
            )
        return 0.0 if without_gradient else norm

    @contextmanager
    def _clipped_away(self) -> Iterator[None]:
        """Within it, whatever was accumulated is clipped to exactly 0: the one way to drop a gradient that
        is the same for every kind of sharding and offloading."""
        optimizer, max_norm = self.engine.optimizer, self._max_norm
        clip = getattr(optimizer, "clip_grad", None)  # where DeepSpeed's optimiser clips, and not `_clip`
        self._max_norm = 0.0
        if clip is not None:
            optimizer.clip_grad = BELOW_ALL
        yield
        self._max_norm = max_norm
        if clip is not None:
            optimizer.clip_grad = clip

    def _clip(self) -> None:
        if not self.tensor_parallel:
            self._norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._max_norm)
            return
        from deepspeed.runtime.utils import clip_grad_norm_

        # Adds up over the ranks what they have parts of, and counts once what they all have.
        self._norm = clip_grad_norm_(self.module.parameters(), self._max_norm, mpu=self.engine.mpu)

    def state_dict(self) -> dict[str, Tensor]:
        """Full weights by name, on the first rank; shards are gathered. Collective."""
        full = {}
        for part in self.parts():
            for name, weight in part.items():
                if not self.deals_weights_out:
                    full[name] = weight
                elif self.ranks.is_first:
                    full[name] = weight.to("cpu", copy=True)
        return full

    @property
    def deals_weights_out(self) -> bool:
        """Whether a rank has its part of the weights alone."""
        return self.tensor_parallel or self.zero_stage == 3

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """All weights by name, one layer's after the other's. Those that ranks have parts of are whole until
        the next ones are asked for, on every rank. Collective, to the end."""
        for module, own in self._by_module():
            with self._whole(module, list(own.values())):
                yield {name: parameter.detach() for name, parameter in own.items()}

    def _by_module(self) -> Iterator[tuple[nn.Module, dict[str, nn.Parameter]]]:
        """Each module with the parameters that are its own, or those of its adapters; a parameter that
        several have comes once."""
        named = {name for name, _ in self.module.named_parameters()}
        layers: dict[str, tuple[nn.Module, dict[str, nn.Parameter]]] = {}
        for place, module in self.module.named_modules():
            own = {
                f"{place}.{name}" if place else name: p for name, p in module.named_parameters(recurse=False)
            }
            layer, _, _ = (
                place.partition(".base_layer") if ".base_layer" in place else place.partition(".lora_")
            )
            _, known = layers.setdefault(layer, (module, {}))
            known.update({name: parameter for name, parameter in own.items() if name in named})
        yield from (layer for layer in layers.values() if layer[1])

    def _whole(self, module: nn.Module, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        if self.tensor_parallel:
            from deepspeed.module_inject.layers import GatherReplacedLayerParams

            return GatherReplacedLayerParams(parameters, module, enabled=True)
        if self.zero_stage == 3:
            import deepspeed

            return deepspeed.zero.GatheredParameters(parameters)
        return nullcontext()

    def save(self, directory: Path) -> None:
        """Weights, optimiser state and shards. Collective."""
        self.engine.save_checkpoint(str(directory), tag=CHECKPOINT_TAG)

    def load(self, directory: Path) -> None:
        """Raises RuntimeError where `directory` holds no such state. Collective."""
        with _only_data():
            path, _ = self.engine.load_checkpoint(str(directory), tag=CHECKPOINT_TAG)
        if path is None:
            raise RuntimeError(f"{directory} holds no trainer state to continue from")

    def step_aside(self, *, weights: bool = False) -> None:
        """Optimiser state, master weights and gradients go to the memory of the CPU, and so do the `weights`
        that the module runs on where that is said; between two steps. Nothing where they are aside already.
        """
        if not self.aside.bytes:
            chosen = of_training_alone(self.engine) + (of_the_weights(self.module) if weights else [])
            self.aside.put(chosen, self.ranks.device)

    def come_back(self) -> None:
        """Undoes `step_aside`."""
        self.aside.take_back(self.ranks.device)

    def close(self) -> None:
        """Lets go of weights and optimiser; nothing else may be asked of it afterwards."""
        self.engine.destroy()
        del self.engine


@contextmanager
def _only_data() -> Iterator[None]:
    """Inside, PyTorch loads tensors, plain values and what DeepSpeed keeps with them: a pickle could run
    code."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    kept = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    # DeepSpeed asks for whatever a pickle does; PyTorch's own switch is the only one above that.
    only = patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"})
    with only, torch.serialization.safe_globals(kept):
        yield


def deal_out(module: nn.Module, config: Mapping[str, Any], settings: Trainer, ranks: Ranks) -> None:
    """Gives each rank its part of the weights (ZeRO-3), one weight after the other: what is on the CPU, or
    still in files, never lies on the device whole. The first rank's weights count. Collective."""
    import deepspeed

    dtype = torch_dtype(settings.precision)
    cast_parameters(module, dtype)  # adapters may have come in float32
    # Its own linear layers would take the place of PyTorch's for every model of the process.
    in_turn = InTurn(module, reads=ranks.is_first)
    deepspeed.zero.Init(module=in_turn, config_dict_or_path=config, dtype=dtype, mem_efficient_linear=False)


@contextmanager
def cut_in_turn() -> Iterator[None]:
    """Inside, AutoTP finds the weights of a module read just before it cuts them: a rank has its parts, the
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
    """In place. Buffers stay as they are: in bfloat16, the frequencies of rotary embeddings would turn the
    1000th position by half a radian."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def without_dropout(module: nn.Module) -> None:
    """Log-probs must be those that the engine samples from, and dropout has no place there."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0


def _groups(module: nn.Module, settings: Trainer) -> list[dict[str, Any]]:
    """Biases and norms (vectors) are not decayed."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim <= 1]
    if not settings.weight_decay or not vectors:
        return [{"params": [p for p in module.parameters() if p.requires_grad]}]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


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
        "bf16": {"enabled": settings.precision == "bfloat16"},
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


def torch_dtype(precision: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
