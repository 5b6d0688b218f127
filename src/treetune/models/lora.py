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
"""peft's word for every linear layer but the output head."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Trains adapters of this `rank` on the start model and nothing else.

    They are added with weight `alpha` / `rank` (`rank_stabilised`: `alpha` / √`rank`; Kalajdzievski
    2023) to the layers whose names end in one of `target_modules`, or to every linear layer but the
    output head. There is no dropout: log-probs are those that the engine samples from.

    `send` says how the engine gets them: ``merged`` into the start model's weights, or as
    ``adapters`` that the server adds itself, which moves less and costs it two small products a layer.
    """

    rank: Annotated[int, Gt(0)] = 16
    alpha: Annotated[float, Gt(0)] = 32.0
    rank_stabilised: bool = False
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], MinLen(1)] = "all-linear"
    send: Literal["merged", "adapters"] = "merged"

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
        for wanted in self.target_modules:
            found = [name for name in layers if name == wanted or name.endswith(f".{wanted}")]
            if not found:
                linear = {n.rpartition(".")[2] for n, m in layers.items() if isinstance(m, torch.nn.Linear)}
                raise ValueError(
                    f"trainer.lora.target_modules names {wanted!r}, and {type(model).__name__} has no such"
                    f" layer; its linear ones are {', '.join(sorted(linear - {'lm_head'}))}"
                )
            wrong = [name for name in found if not isinstance(layers[name], torch.nn.Linear)]
            if wrong or model.get_output_embeddings() in [layers[name] for name in found]:
                raise ValueError(
                    f"trainer.lora.target_modules names {wanted!r}: adapters go into linear layers other than"
                    " the output head"
                )

    def _config(self) -> LoraConfig:
        from peft import LoraConfig

        whole = self.target_modules == WHOLE_MODEL
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            use_rslora=self.rank_stabilised,
            target_modules=WHOLE_MODEL if whole else list(self.target_modules),
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
        """What the names of a model that `apply` has changed are without adapters."""
        return [name.replace(_BASE, ".") for name in names if not name.endswith((_A, _B))]

    def adapters(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapters alone, by the names that they have in a folder of peft's format."""
        return {
            "base_model.model." + name.replace(f".{_NAME}.weight", ".weight"): weight
            for name, weight in weights.items()
            if name.endswith((_A, _B))
        }

    def describe(self, adapters: Mapping[str, Tensor], base: str) -> dict[str, Any]:
        """The folder's configuration; `base` is the model that the adapters belong to.

        The layers are named one by one, as their last names: vLLM knows no ``all-linear``.
        """
        described = self._config().to_dict()
        layers = {name.split(".lora_")[0].rpartition(".")[2] for name in adapters}
        described |= {
            "base_model_name_or_path": base,
            "target_modules": sorted(layers),
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
        }
        return json.loads(json.dumps(described, default=_plain))


def write_adapters(adapters: Mapping[str, Tensor], described: Mapping[str, Any], directory: Path) -> None:
    """Writes a folder that peft's ``PeftModel.from_pretrained`` and vLLM read."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in adapters.items()}
    save_file(kept, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model is what it was before `Lora.apply`: the reference, without a second copy."""
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


def _plain(value: Any) -> Any:
    """What JSON has no form for, in peft's configuration: sets and enumerations."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
