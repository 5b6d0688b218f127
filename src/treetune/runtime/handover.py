"""What the engine is given to sample from: whole weights, or adapters on the start model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from treetune.models.lora import Lora
    from treetune.runtime.run import Run

START_MODEL = "start-model"
"""The folder of the model whose adapters the engine is sent, beside theirs."""


def sent_adapters(run: Run) -> Lora | None:
    """The adapters' settings where the engine is sent them as they are; it needs a trainer for that."""
    lora = _lora(run)
    return lora if run.trains and lora is not None and lora.send == "adapters" else None


def write_start(run: Run, place: Path) -> None:
    """What the engine starts on: the start model, or adapters beside it that don't change it yet."""
    from treetune.models.export import write_for_engine

    lora = sent_adapters(run)
    if lora is None:
        write_for_engine(*run.start_weights(), run.tokenizer, place)
        return
    model = run.load_model()
    base = run.weights_folder / START_MODEL
    write_for_engine(dict(model.named_parameters()), model.config, run.tokenizer, base)
    lora.apply(model, run.config.seed)
    write_adapters(run, lora.adapters(dict(model.named_parameters())), place, base=str(base))


def export(run: Run, place: Path) -> None:
    """The trainer's present weights or adapters, for the engine. Collective."""
    from treetune.models.export import write_for_engine

    assert run.trainer is not None
    if sent_adapters(run) is not None:
        adapters = run.trainer.adapters()
        if run.ranks.is_first:
            write_adapters(run, adapters, place, base=str(run.weights_folder / START_MODEL))
    else:
        weights = run.trainer.weights()
        if run.ranks.is_first:
            write_for_engine(weights, run.policy_model.config, run.tokenizer, place)
    run.ranks.barrier("weights written for the engine")


def write_adapters(run: Run, adapters: Mapping[str, Tensor], place: Path, base: str | None = None) -> None:
    """The trainer's adapters as a folder that peft and vLLM read; `base` is the model that they belong
    to, by default the one that the experiment starts from."""
    from treetune.models.lora import write_adapters as write

    lora = _lora(run)
    assert lora is not None
    if base is None:
        base = str(getattr(run.policy_model.config, "_name_or_path", ""))
    write(adapters, lora.describe(adapters, base), place)


def _lora(run: Run) -> Lora | None:
    return getattr(run.config.trainer, "lora", None)
