"""Opens the engine that continues answers: from a folder, or around a transformers model of this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from treetune.engine.base import Engine, EngineLaunch
from treetune.engine.held_model import HeldModelEngine
from treetune.engine.in_process import InProcessEngine
from treetune.engine.settings import InProcessSettings
from treetune.vocabulary import TextCodec

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

UNBOUNDED = 1 << 20
"""The context length of models that don't say how long their context is."""


def open_engine(source: PreTrainedModel | str | Path, codec: TextCodec, seed: int) -> Engine:
    """Returns an engine that samples in this process. The caller closes it.

    Args:
        source: A folder with weights and a ``config.json``, or a transformers model.
        codec: The codec of the model's tokenizer.
        seed: The seed of the call.

    Raises:
        ValueError: There is no such folder, or the engine can't sample with the model.
    """
    import torch
    from transformers import AutoConfig, GenerationConfig

    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise ValueError(
            f"engine is {source!r}, an address: make an Engine for it, and give that (see"
            " docs/credit_for_other_trainers.md)"
        )
    if isinstance(source, str | Path):
        folder = Path(source).expanduser()
        if not (folder / "config.json").is_file():
            raise ValueError(f"engine is {str(source)!r}, and there is no model (config.json) in that folder")
        config = AutoConfig.from_pretrained(folder)
        generation_config = None
        if (folder / "generation_config.json").is_file():
            generation_config = GenerationConfig.from_pretrained(folder)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        launch = _launch(folder, config, generation_config, codec, seed, device)
        return InProcessEngine(InProcessSettings(), launch)
    if not hasattr(source, "config") or not hasattr(source, "generate"):
        raise ValueError(
            f"engine is of the type {type(source).__name__}: give a folder with a model, a transformers"
            " model, or an Engine"
        )
    launch = _launch(Path(), source.config, source.generation_config, codec, seed, source.device.type)
    return HeldModelEngine(source, codec, launch)


def _launch(
    weights: Path,
    config: PretrainedConfig,
    generation_config: GenerationConfig | None,
    codec: TextCodec,
    seed: int,
    device: str,
) -> EngineLaunch:
    """Returns the facts with which the engine starts.

    Args:
        weights: The model's folder; not read for a model in memory.
        config: Has the number of the model's positions.
        generation_config: Has the tokens that end an answer; None: those of the codec alone.
        codec: The codec of the model's tokenizer.
        seed: The seed of the call.
        device: ``cpu`` or ``cuda``.
    """
    ends = None if generation_config is None else generation_config.eos_token_id
    end_ids = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return EngineLaunch(
        weights=weights,
        logs=Path(),
        seed=seed,
        context_length=getattr(config, "max_position_embeddings", None) or UNBOUNDED,
        device=device,
        end_ids=(*codec.end_ids, *end_ids),
    )
