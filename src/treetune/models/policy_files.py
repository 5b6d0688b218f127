"""Writes and reads policies on disk: checkpoints in Hugging Face format, and the folders that the engine
loads."""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.config.layers import CONFIGS_FOLDER
from treetune.models.saved_weights import architecture_of, is_remote, model_class, saved_weights
from treetune.store.checksums import refuse_damaged
from treetune.store.files import make_folder_atomically, sync_to_disk, why_not_written

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CHECKPOINT_NAME = re.compile(r"\d{4,}")

CHECKPOINTS = "checkpoints"
"""The folder of an experiment that holds its checkpoints."""
LAST_CHECKPOINT = "last"
"""The name in a path that stands for the newest complete checkpoint (`resolve_policy`)."""
STATE_FILE = "state.json"
"""The file that is written last into a checkpoint. A checkpoint is complete if it has this file."""


def experiment_of_checkpoint(path: Path) -> Path | None:
    """Returns the folder of the experiment whose checkpoint, or a part of it, is at `path`. Returns None if
    the path leads to no checkpoint.

    Example: ``experiments/sft`` for ``experiments/sft/checkpoints/last/policy``.
    """
    if CHECKPOINTS not in path.parts:
        return None
    return Path(*path.parts[: path.parts.index(CHECKPOINTS)])


def complete_checkpoints(directory: Path) -> list[Path]:
    """Returns the complete checkpoints in `directory` (``…/checkpoints``), oldest first."""
    if not directory.is_dir():
        return []
    complete = [
        path
        for path in directory.iterdir()
        if _CHECKPOINT_NAME.fullmatch(path.name) and (path / STATE_FILE).is_file()
    ]
    return sorted(complete, key=lambda path: int(path.name))


def resolve_policy(name_or_path: str) -> str:
    """Returns the absolute path of a model in Hugging Face format, or the name of a model on the hub
    unchanged.

    In ``…/checkpoints/last/policy``, ``last`` stands for the newest complete checkpoint. A directory is never
    looked for on the hub.

    Raises:
        ValueError: There is no such model or no complete checkpoint; the message says where it looked, and
            how to make it.
    """
    path = Path(name_or_path).expanduser()
    parts = path.parts
    # Looks for `checkpoints/last` or `checkpoints/NUMBER` in the path.
    for index, name in enumerate(parts[1:], start=1):
        is_checkpoint = name == LAST_CHECKPOINT or _CHECKPOINT_NAME.fullmatch(name)
        if parts[index - 1] != CHECKPOINTS or not is_checkpoint:
            continue
        directory = Path(*parts[:index])  # …/checkpoints
        if name == LAST_CHECKPOINT:
            complete = complete_checkpoints(directory)
            if not complete:
                raise ValueError(
                    f"there is no complete checkpoint in {directory.absolute()}, where {name_or_path!r} "
                    f"points to. {_how_to_make(directory)}"
                )
            path = complete[-1].joinpath(*parts[index + 1 :])
        elif not (directory / name / STATE_FILE).is_file():
            raise ValueError(
                f"there is no complete checkpoint {(directory / name).absolute()} ({STATE_FILE} is missing), "
                f"where {name_or_path!r} points to. {_how_to_make(directory)}"
            )
        break
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path.absolute()} holds no model: it has no config.json. "
                "Give a directory in Hugging Face format, such as a checkpoint's policy/"
            )
        return str(path.absolute())
    if _HUB_NAME.fullmatch(name_or_path):
        return name_or_path
    raise ValueError(
        f"there is no model at {path.absolute()}: no such directory, and {name_or_path!r} isn't a name on "
        f"the Hugging Face hub (owner/name). {_how_to_make(path)}"
    )


def _how_to_make(path: Path) -> str:
    """Returns a sentence on how to make the model that is missing at `path`.

    If the path leads to an experiment's checkpoints, the sentence has the command that runs the experiment.
    """
    experiment = experiment_of_checkpoint(path)
    if experiment is None:
        return "Give the path of a directory in Hugging Face format, relative to the working directory."
    name = f"{experiment.name}.jsonnet"
    # The experiment of quickstart/sft.jsonnet, for example, is in experiments/quickstart/sft.
    nested_name = f"{experiment.parent.name}/{name}"
    if Path("configs", nested_name).is_file():
        config = f"configs/{nested_name}"
    elif (CONFIGS_FOLDER / nested_name).is_file():  # `treetune run` finds a shipped file from any folder
        config = nested_name
    elif Path(name).is_file():
        config = name
    else:
        config = "CONFIG.jsonnet"  # a placeholder: the user has to know the file
    command = f"treetune run --configs {shlex.quote(config)}"
    return f"Run the experiment {experiment.name!r} to its end first: {command}"


WEIGHTS_FILE = "model.safetensors"
HEAD_WEIGHT = "lm_head.weight"
_EMBEDDING_ENDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
"""The ends of the names of input embeddings, in the families of models that tie them to the head."""


def write_policy(
    weights: Mapping[str, torch.Tensor],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    generation_config: GenerationConfig | None = None,
) -> None:
    """Writes a policy in Hugging Face format, whole or not at all.

    Files have the names of `save_pretrained`; code that came with the model is copied. An existing directory
    is replaced.

    Args:
        weights: All parameters and persistent buffers (`saved_weights`), on any device, by their names in the
            model (``model.layers.0…``). A head that is tied to the embeddings may be among them.
        generation_config: Contains the tokens that end an answer, for programs that sample from the policy.

    Raises:
        ValueError: The weights are not exactly those of the model.
    """
    from huggingface_hub import save_torch_state_dict

    architecture = architecture_of(config)
    architecture.refuse_other_weights(weights, directory)
    with make_folder_atomically(directory) as unfinished:
        # Files have a tied weight once, under its first name.
        untied_weights = {
            name: weight for name, weight in weights.items() if name not in architecture.unsaved_names
        }
        tensors = _copy_to_cpu(dict(architecture.convert_to_saved(untied_weights.items())))
        save_torch_state_dict(tensors, unfinished)
        config_to_write = copy.deepcopy(config)
        config_to_write.dtype = _find_dtype(tensors)
        config_to_write.architectures = [type(architecture.skeleton).__name__]
        _save_config(config_to_write, tokenizer, unfinished)
        tokenizer.save_pretrained(unfinished)
        if generation_config is not None:
            # `generation_config.save_pretrained` would refuse the generation configs of some hub models.
            generation_config.to_json_file(unfinished / "generation_config.json")


_CRITIC_PREFIXES = ("backbone.", "head.")
"""The beginnings of the names of a critic's weights (`CriticModule`)."""


def write_critic(weights: Mapping[str, torch.Tensor], config: PretrainedConfig, directory: Path) -> None:
    """Writes a critic, whole or not at all; `read_policy` reads it.

    Writes its weights (``backbone.…``, ``head.…``) and the configuration of the model that it was made from.
    """
    from safetensors.torch import save_file

    with make_folder_atomically(directory) as unfinished:
        tensors = _copy_to_cpu(weights)
        save_file(tensors, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
        config_to_write = copy.deepcopy(config)
        config_to_write.dtype = _find_dtype(tensors)
        config_to_write.save_pretrained(unfinished)


def _save_config(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Writes a configuration and, for a model with code of its own (trust_remote_code), this code."""
    classes: list[type] = [type(tokenizer)]
    if is_remote(config):
        classes += [type(config), model_class(config)]
        # "owner/name--module.Class" refers to code on the hub. The written model has the code in its folder.
        config.auto_map = {name: reference.split("--")[-1] for name, reference in config.auto_map.items()}
    config.save_pretrained(directory)
    for code in classes:
        # transformers imports code that came with a model as modules of this name.
        if code.__module__.startswith("transformers_modules."):
            _copy_code(code, directory)


def _copy_code(remote: type, directory: Path) -> None:
    """Copies the file of a class that came with a model, and the files that it imports."""
    from transformers.dynamic_module_utils import get_relative_import_files

    module = Path(str(sys.modules[remote.__module__].__file__))
    for source in (module, *map(Path, get_relative_import_files(module))):
        shutil.copyfile(source, directory / source.name)


def read_policy(
    directory: Path, *, trust_remote_code: bool = False
) -> tuple[dict[str, torch.Tensor], PretrainedConfig]:
    """Reads what `write_policy` or `write_critic` wrote.

    Returns:
        The weights by their names in a model, on the CPU, and the configuration.

    Raises:
        ValueError: The folder holds no weights, a file is damaged, or the weights are another model's.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig

    files = sorted(directory.glob("*.safetensors"))
    if not files or not (directory / "config.json").is_file():
        raise ValueError(f"{directory} holds no weights: config.json and *.safetensors have to be there")
    refuse_damaged(directory, "choose another checkpoint, or train again from the one before it")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= load_file(file)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    if any(name.startswith(_CRITIC_PREFIXES) for name in weights):
        return weights, config
    architecture = architecture_of(config)
    if architecture.is_converted:
        # The files have other names or tensors than a model in memory, so transformers converts them.
        model = model_class(config).from_pretrained(directory, config=config, dtype="auto")
        weights = {name: weight.detach() for name, weight in saved_weights(model).items()}
    architecture.refuse_other_weights(weights, directory)
    return weights, config


def write_for_engine(
    weights: Mapping[str, torch.Tensor],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
) -> None:
    """Writes weights for the engine, which happens in every iteration, usually into shared memory.

    The output head is written, too, and the configuration says that it is not tied to the embeddings. An
    engine may copy embeddings into a tied head when it starts. After new embeddings have come, it would go on
    to sample with the old head, without an error. (Models of `has_no_head_in_engine` are written without a
    head.)

    Configuration and tokenizer are written only the first time. The weights appear whole or not at all.
    """
    from safetensors.torch import save_file

    architecture = architecture_of(config)
    architecture.refuse_other_weights(weights, directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(weights)
    if has_no_head_in_engine(config):
        tensors.pop(HEAD_WEIGHT, None)
    elif config.tie_word_embeddings or HEAD_WEIGHT not in tensors:
        # A copy, since the format refuses two names for the same memory.
        tensors[HEAD_WEIGHT] = tensors[embeddings_among(tensors)].clone()
    tensors = _copy_to_cpu(dict(architecture.convert_to_saved(tensors.items())))
    if not (directory / "config.json").is_file():
        describe_for_engine(config, tokenizer, directory, _find_dtype(tensors))
    unfinished = directory / f".{WEIGHTS_FILE}.{os.getpid()}"
    try:
        with explain_failed_write(directory):
            save_file(tensors, unfinished, metadata={"format": "pt"})
            sync_to_disk(unfinished)
            unfinished.replace(directory / WEIGHTS_FILE)
    finally:
        unfinished.unlink(missing_ok=True)


def has_no_head_in_engine(config: PretrainedConfig) -> bool:
    """Returns whether an engine computes the model's logits with its embeddings, and refuses a weight of the
    head. vLLM does so for Gemma 2, which was published with a tied head."""
    return config.model_type == "gemma2" and config.tie_word_embeddings


def describe_for_engine(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, directory: Path, dtype: torch.dtype
) -> None:
    """Writes the configuration and the tokenizer for an engine that loads weights of `dtype`.

    `write_for_engine` also writes the head. So the configuration says that the head is not tied to the
    embeddings. Models of `has_no_head_in_engine` are the exception: the engine computes their logits with the
    embeddings, and refuses the weight of a head.
    """
    tokenizer.save_pretrained(directory)
    config_to_write = copy.deepcopy(config)
    config_to_write.tie_word_embeddings = has_no_head_in_engine(config)
    config_to_write.dtype = dtype
    _save_config(config_to_write, tokenizer, directory)


@contextmanager
def explain_failed_write(directory: Path) -> Iterator[None]:
    """Turns a failure to write weights in the block into an OSError with its cause, such as a full disk."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        why = why_not_written(error, directory)
        raise OSError(f"the weights could not be written to {directory} for the engine: {why}") from error


def _copy_to_cpu(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights on the CPU, each in memory of its own.

    ZeRO keeps weights as views of a flat buffer, which safetensors refuses to write.
    """
    result = {}
    for name, weight in weights.items():
        weight = weight.detach().to("cpu").contiguous()
        is_view = weight.untyped_storage().nbytes() != weight.nbytes
        result[name] = weight.clone() if is_view else weight
    return result


def _find_dtype(weights: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Returns the number format of the weights, which may differ from the one in the configuration."""
    return next(weight.dtype for weight in weights.values() if weight.is_floating_point())


def embeddings_among(names: Iterable[str]) -> str:
    """Returns the name of the input embeddings. Raises ValueError if there are none, or several."""
    embeddings = [name for name in names if name.endswith(_EMBEDDING_ENDINGS)]
    if len(embeddings) != 1:
        raise ValueError(
            f"the model has no {HEAD_WEIGHT} and {len(embeddings)} input embeddings"
            f" ({', '.join(embeddings) or 'none'}), so its output head cannot be written for the engine"
        )
    return embeddings[0]
