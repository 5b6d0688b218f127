"""Low-rank adapters: a policy that differs from its start model by a few small matrices.

Hu et al. 2021, "LoRA", section 4.1: W·x + (alpha / rank)·B·A·x with W frozen. peft makes the layers;
what happens to their weights on the way out (merged, or as a folder that peft and vLLM read) is here.
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

_NAME = "default"
_BASE, _A, _B = ".base_layer.", f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

WHOLE_MODEL = "all-linear"
"""peft's name for every linear layer but the output head."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Trains adapters on the start model and nothing else. There is no dropout: log-probs are those that the
    engine samples from.
    """

    rank: Annotated[int, Gt(0)] = 16
    """Number of columns of B and rows of A."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """Adapters are added with weight `alpha` / `rank`."""
    rank_stabilised: bool = False
    """Adds them with weight `alpha` / √`rank` (Kalajdzievski 2023)."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], MinLen(1)] = "all-linear"
    """Ends of the names of the layers with adapters, or every linear layer but the output head."""
    send: Literal["merged", "adapters"] = "merged"
    """The engine gets them ``merged`` into the start model's weights, or as ``adapters`` that the server adds
    itself, which moves less and costs it two small products a layer."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def apply(self, model: nn.Module, seed: int) -> nn.Module:
        """Puts adapters into the model, in place; only they are trainable from here on.

        A is drawn from `seed`, B is 0: the model says what it said. Raises ValueError where
        `target_modules` finds nothing, or what can't be merged.
        """
        import torch
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self._refuse(model)
        dtype = next(model.parameters()).dtype
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, "lora") % 2**63)
            try:
                inject_adapter_in_model(self._config(), model, _NAME)
            except ValueError as error:
                raise ValueError(f"trainer.lora.target_modules: {error}") from error
        self._refuse_tensors(model)
        self._refuse_unlike_linear(model)
        for layer in model.modules():
            if isinstance(layer, LoraLayer):  # its adapters in the precision that the trainer was given
                layer.lora_A.to(dtype)
                layer.lora_B.to(dtype)
        return model

    def _refuse(self, model: nn.Module) -> None:
        import torch

        if self.target_modules == WHOLE_MODEL:
            return
        layers = dict(model.named_modules())
        for target in self.target_modules:
            matching = [layer for name, layer in layers.items() if f".{name}".endswith(f".{target}")]
            if not matching:
                linear = {n.rpartition(".")[2] for n, m in layers.items() if isinstance(m, torch.nn.Linear)}
                raise ValueError(
                    f"trainer.lora.target_modules names {target!r}, and {type(model).__name__} has no such"
                    f" layer; its linear ones are {', '.join(sorted(linear - {'lm_head'}))}"
                )
            wrong = [layer for layer in matching if not isinstance(layer, torch.nn.Linear)]
            if wrong or model.get_output_embeddings() in matching:
                raise ValueError(
                    f"trainer.lora.target_modules names {target!r}: adapters go into linear layers other than"
                    " the output head"
                )

    def _refuse_tensors(self, model: nn.Module) -> None:
        """Raises ValueError where peft has put adapters on tensors that are no linear layers, as on all
        experts of a mixture at once: they have scales and names of their own, and what is merged here would
        lack them."""
        from peft.tuners.lora.layer import ParamWrapper

        wrapped = sorted({path for path, part in model.named_modules() if isinstance(part, ParamWrapper)})
        if wrapped:
            linear = {path.rpartition(".")[2] for path, part in model.named_modules() if _is_adapted(part)}
            raise ValueError(
                f"trainer.lora.target_modules is {self.target_modules!r}, which puts adapters on"
                f" {wrapped[0].replace('.base_layer', '')}, a tensor of experts or of their router in"
                f" {type(model).__name__}, and adapters are merged into linear layers alone: name the layers,"
                f" such as {sorted(linear) or ['q_proj', 'v_proj']}"
            )

    def _refuse_unlike_linear(self, model: nn.Module) -> None:
        """Raises ValueError where peft has put adapters on layers that do something else than a linear layer:
        GPT-2's hold their weight transposed, and a router of PhiMoE returns more than a product."""
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

    def _config(self) -> LoraConfig:
        from peft import LoraConfig

        # peft reads a text as "all linear layers", and a list as the names of layers.
        is_whole_model = self.target_modules == WHOLE_MODEL
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            use_rslora=self.rank_stabilised,
            target_modules=WHOLE_MODEL if is_whole_model else list(self.target_modules),
            lora_dropout=0.0,
            bias="none",
        )

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights by their names without adapters, W + scale·B·A among them, computed in float32.

        `weights` (those of a model that `apply` has changed, by name) are left as they are: nothing
        is merged into the model that goes on training, so nothing drifts.
        """
        result = {}
        for name, weight in weights.items():
            if name.endswith((_A, _B)):
                continue
            layer, is_base, kind = name.rpartition(_BASE)
            if not is_base:
                result[name] = weight
                continue
            if kind == "weight" and layer + _A in weights:
                change = weights[layer + _B].float() @ weights[layer + _A].float()
                weight = (weight.float() + self.scale * change).to(weight.dtype)
            result[f"{layer}.{kind}"] = weight
        return result

    def merged_names(self, names: Iterable[str]) -> list[str]:
        """The names of the weights of a model that `apply` has changed, as they are without adapters."""
        return [name.replace(_BASE, ".") for name in names if not name.endswith((_A, _B))]

    def adapters(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapters alone, by the names that they have in a folder of peft's format."""
        return {
            "base_model.model." + name.replace(f".{_NAME}.weight", ".weight"): weight
            for name, weight in weights.items()
            if name.endswith((_A, _B))
        }

    def write(self, adapters: Mapping[str, Tensor], base: str, directory: Path) -> None:
        """Writes a folder that peft's ``PeftModel.from_pretrained`` and vLLM read; `base` is the model that
        the adapters belong to.

        The layers are named one by one, as their last names: vLLM knows no ``all-linear``.
        """
        from safetensors.torch import save_file

        def plain(value: Any) -> Any:
            """A form for sets and enumerations of peft's configuration, which JSON has none for."""
            return sorted(value) if isinstance(value, set | frozenset) else str(value)

        described = self._config().to_dict() | {
            "base_model_name_or_path": base,
            "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapters}),
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
        }
        directory.mkdir(parents=True, exist_ok=True)
        kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in adapters.items()}
        save_file(kept, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(described, default=plain, indent=2, sort_keys=True)
        (directory / ADAPTER_CONFIG).write_text(text + "\n")


def _is_adapted(layer: nn.Module) -> bool:
    from peft.tuners.lora import Linear

    return isinstance(layer, Linear)


@contextmanager
def refusing_idle_adapters(model: nn.Module) -> Iterator[None]:
    """Raises ValueError at its end, where the model has run forward inside and never called an adapted layer.

    Some models read a layer's weight and compute with it themselves, as Jamba does with its `dt_proj`: an
    adapter there is never applied in training, and would be merged into what the engine gets. A layer is told
    by the last part of its name, since not every expert of a mixture is called for every text.
    """
    from peft.tuners.lora import LoraLayer

    adapted = {path: layer for path, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    called: set[str] = set()
    hooks = [
        layer.register_forward_hook(lambda *_, path=path: called.add(path.rpartition(".")[2]))
        for path, layer in adapted.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    idle = sorted({path.rpartition(".")[2] for path in adapted} - called)
    if idle:
        used = sorted(called)
        raise ValueError(
            f"trainer.lora puts adapters on {', '.join(idle)}, which {type(model).__name__} never calls as"
            f" layers: they would not be trained. Set trainer.lora.target_modules to others, such as {used}"
        )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Makes the model what it was before `Lora.apply`, while inside: the reference, without a second copy."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    assert layers, "a model without adapters was asked for what it is without them"
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
