"""Trains low-rank adapters (LoRA): a policy that differs from its start model by a few small matrices.

Hu et al. 2021, "LoRA", section 4.1: W·x + (alpha / rank)·B·A·x with W frozen. peft makes the layers. This
file merges the adapters into the weights, or writes them as a folder that peft and vLLM read.

Example of a layer's weights by their names::

    q_proj.base_layer.weight         W, frozen           merged: q_proj.weight = W + scale·B·A
    q_proj.lora_A.default.weight     A, [rank, in]
    q_proj.lora_B.default.weight     B, [out, rank]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt, MinLen

from treetune.seeds import derive_seed

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor, nn

_ADAPTER_NAME = "default"
"""The name of the adapters. peft writes it into the names of their weights."""
_BASE_LAYER_PART = ".base_layer."
_A_SUFFIX = f".lora_A.{_ADAPTER_NAME}.weight"
_B_SUFFIX = f".lora_B.{_ADAPTER_NAME}.weight"

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

WHOLE_MODEL = "all-linear"
"""peft's name for all linear layers except the output head."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Trains only adapters of the start model's layers. They have no dropout, since log-probs must be those
    of the distribution that the engine samples from."""

    rank: Annotated[int, Gt(0)] = 16
    """The number of columns of B and of rows of A."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """The factor of B·A is `alpha` / `rank`."""
    rank_stabilised: bool = False
    """Makes the factor `alpha` / √`rank` (Kalajdzievski 2023)."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], MinLen(1)] = "all-linear"
    """The layers with adapters, by the ends of their names, such as ``['q_proj', 'v_proj']``; or
    ``'all-linear'`` for all linear layers except the output head."""
    send: Literal["merged", "adapters"] = "merged"
    """The form in which the engine gets the adapters: ``merged`` into the start model's weights, or as
    ``adapters``, which is less data, but costs the server two small products in each layer."""

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def apply(self, model: nn.Module, seed: int) -> nn.Module:
        """Adds adapters to the model, in place. From then on only they are trainable.

        A is drawn by `seed`, and B begins as 0, so the adapters don't change the model's outputs yet.

        Raises:
            ValueError: `target_modules` has a name that no layer of the model has, or names a layer whose
                adapters can't be merged.
        """
        import torch
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self._refuse_targets(model)
        dtype = next(model.parameters()).dtype
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, "lora"))
            try:
                inject_adapter_in_model(self._make_peft_config(), model, _ADAPTER_NAME)
            except ValueError as error:
                raise ValueError(f"trainer.lora.target_modules: {error}") from error
        self._refuse_tensor_adapters(model)
        self._refuse_layers_other_than_linear(model)
        for layer in model.modules():
            if isinstance(layer, LoraLayer):  # peft makes adapters in float32
                layer.lora_A.to(dtype)
                layer.lora_B.to(dtype)
        return model

    def _refuse_targets(self, model: nn.Module) -> None:
        """Raises ValueError if `target_modules` names a layer that the model doesn't have, or one that is not
        linear."""
        import torch

        if self.target_modules == WHOLE_MODEL:
            return
        layers = dict(model.named_modules())
        for target in self.target_modules:
            # A target is a layer's whole name, or the last parts of it, such as "q_proj" or "mlp.down_proj".
            matching = [layer for name, layer in layers.items() if f".{name}".endswith(f".{target}")]
            if not matching:
                linear_names = set()
                for name, layer in layers.items():
                    if isinstance(layer, torch.nn.Linear):
                        linear_names.add(name.rpartition(".")[2])
                raise ValueError(
                    f"trainer.lora.target_modules names {target!r}, and {type(model).__name__} has no such"
                    f" layer; its linear layers are {', '.join(sorted(linear_names - {'lm_head'}))}"
                )
            not_linear = [layer for layer in matching if not isinstance(layer, torch.nn.Linear)]
            if not_linear or model.get_output_embeddings() in matching:
                raise ValueError(
                    f"trainer.lora.target_modules names {target!r}: adapters go into linear layers other than"
                    " the output head"
                )

    def _refuse_tensor_adapters(self, model: nn.Module) -> None:
        """Raises ValueError if peft has added adapters to tensors that are not linear layers.

        Such a tensor is, for example, the one that holds all experts of a mixture. `merged_weights` doesn't
        know the scales and names of these adapters, and would leave them out.
        """
        from peft.tuners.lora.layer import ParamWrapper

        wrapped = sorted(path for path, part in model.named_modules() if isinstance(part, ParamWrapper))
        if wrapped:
            # The path in the model, without the names that peft's wrappers add.
            tensor_path = wrapped[0].replace(".base_layer", "")
            linear = {path.rpartition(".")[2] for path, part in model.named_modules() if _is_adapted(part)}
            raise ValueError(
                f"trainer.lora.target_modules is {self.target_modules!r}, which puts adapters on"
                f" {tensor_path}, a tensor of experts or of their router in"
                f" {type(model).__name__}, and adapters are merged into linear layers alone: name the layers,"
                f" such as {sorted(linear) or ['q_proj', 'v_proj']}"
            )

    def _refuse_layers_other_than_linear(self, model: nn.Module) -> None:
        """Raises ValueError if peft has added adapters to layers that don't compute what a linear layer
        computes: GPT-2's layers have their weight transposed, and PhiMoE's router returns more than a
        product."""
        import torch
        from peft.tuners.lora import LoraLayer

        for path, layer in model.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            base = layer.get_base_layer()
            if type(base).forward is not torch.nn.Linear.forward:
                raise ValueError(
                    f"trainer.lora.target_modules is {self.target_modules!r}, which puts adapters on {path},"
                    f" a {type(base).__name__} of {type(model).__name__}, and adapters are merged into plain"
                    " linear layers alone: name such layers, or train all weights"
                )

    def _make_peft_config(self) -> LoraConfig:
        """Returns these settings as peft takes them."""
        from peft import LoraConfig

        # peft takes the text `WHOLE_MODEL` for all linear layers, and a list for the names of layers.
        is_whole_model = self.target_modules == WHOLE_MODEL
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            use_rslora=self.rank_stabilised,
            target_modules=WHOLE_MODEL if is_whole_model else list(self.target_modules),
            lora_dropout=0.0,
            bias="none",
        )

    def merged_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights by their names without adapters, with W + scale·B·A in place of W, computed in
        float32.

        The trained model's own weights don't change, so that rounding doesn't accumulate.

        Args:
            weights: The weights of a model that `apply` has changed, by name.
        """
        merged_weights = {}
        for name, weight in weights.items():
            if name.endswith((_A_SUFFIX, _B_SUFFIX)):
                continue
            layer, base_layer_part, parameter_name = name.rpartition(_BASE_LAYER_PART)
            if not base_layer_part:  # a layer without adapters
                merged_weights[name] = weight
                continue
            if parameter_name == "weight":  # and not "bias", which has no adapter
                product = weights[layer + _B_SUFFIX].float() @ weights[layer + _A_SUFFIX].float()
                weight = (weight.float() + self.scale * product).to(weight.dtype)
            merged_weights[f"{layer}.{parameter_name}"] = weight
        return merged_weights

    def merged_names(self, names: Iterable[str]) -> list[str]:
        """Returns the names of the weights that `merged_weights` would return for weights with these
        names."""
        return [
            name.replace(_BASE_LAYER_PART, ".") for name in names if not name.endswith((_A_SUFFIX, _B_SUFFIX))
        ]

    def adapters(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns only the adapters, by their names in a folder of peft's format."""
        adapters = {}
        for name, weight in weights.items():
            if name.endswith((_A_SUFFIX, _B_SUFFIX)):
                # In peft's format, names don't contain the name of the adapter (`_ADAPTER_NAME`).
                adapters["base_model.model." + name.replace(f".{_ADAPTER_NAME}.weight", ".weight")] = weight
        return adapters

    def write(self, adapters: Mapping[str, Tensor], base_model: str, directory: Path) -> None:
        """Writes a folder that peft's ``PeftModel.from_pretrained`` and vLLM read.

        Args:
            base_model: The path or name of the model that the adapters belong to.
        """
        from safetensors.torch import save_file

        def to_json(value: Any) -> Any:
            """Converts sets and enumerations of peft's configuration to types of JSON."""
            return sorted(value) if isinstance(value, set | frozenset) else str(value)

        # vLLM doesn't support ``all-linear``, so the layers are listed by the last parts of their names.
        layer_names = {name.split(".lora_")[0].rpartition(".")[2] for name in adapters}
        config = self._make_peft_config().to_dict() | {
            "base_model_name_or_path": base_model,
            "target_modules": sorted(layer_names),
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
        }
        directory.mkdir(parents=True, exist_ok=True)
        adapters_on_cpu = {}
        for name, tensor in adapters.items():
            # A copy, since tensors may share memory, and safetensors refuses those.
            adapters_on_cpu[name] = tensor.detach().to("cpu", copy=True).contiguous()
        save_file(adapters_on_cpu, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(config, default=to_json, indent=2, sort_keys=True)
        (directory / ADAPTER_CONFIG).write_text(text + "\n")


def _is_adapted(layer: nn.Module) -> bool:
    from peft.tuners.lora import Linear

    return isinstance(layer, Linear)


@contextmanager
def refusing_idle_adapters(model: nn.Module) -> Iterator[None]:
    """Raises ValueError at the end of the block if the model has not called a layer that has adapters. The
    block has to run the model forward.

    Some models read a layer's weight and compute with it themselves, as Jamba does with its `dt_proj`. An
    adapter there would have no effect in training, but would be merged for the engine. Layers whose names end
    in the same part count as one, since not every expert of a mixture is called for every text.
    """
    from peft.tuners.lora import LoraLayer

    adapted: set[str] = set()  # the last parts of the names of layers that have adapters, such as "q_proj"
    called_layers: set[str] = set()
    hooks = []
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            last_part = path.rpartition(".")[2]
            adapted.add(last_part)
            hooks.append(layer.register_forward_hook(lambda *_, name=last_part: called_layers.add(name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    idle = sorted(adapted - called_layers)
    if idle:
        used = sorted(called_layers)
        raise ValueError(
            f"trainer.lora puts adapters on {', '.join(idle)}, which {type(model).__name__} never calls as"
            " layers, so that they would not be trained: set trainer.lora.target_modules to other layers,"
            f" such as {used}"
        )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Turns the adapters off for a block. In the block, the model computes what the start model computes, and
    so serves as a reference without a second copy."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    assert layers, "the model has no adapters"
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
