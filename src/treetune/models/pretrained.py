"""Loads pretrained models in Hugging Face format as start models."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import MinLen
from typing_extensions import override

from treetune.architectures import length_rule, longest_context
from treetune.contracts import Experiment, Finding
from treetune.models.chat import Chat
from treetune.models.digests import model_digest
from treetune.models.policy_files import resolve_policy
from treetune.models.presence import check_presence
from treetune.models.saved_weights import list_some_names
from treetune.models.shapes import Shape, published_shape, shape_of
from treetune.models.sources import Alphabet, ModelSource, character_tokens
from treetune.models.tokenizer import (
    add_tokens,
    check_tokens,
    codec_of,
    embed_tokens,
    missing_tokens,
    word_ids,
)
from treetune.store.checksums import refuse_damaged
from treetune.vocabulary import TextCodec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHECKED_FILE_BYTES = 1_000_000
"""The largest file of a model, in bytes, that `check` reads."""

_DEVICES = Path("/dev")
_GPU_DEVICES = ("nvidia[0-9]*", "dxg")
"""The names of a GPU's device in /dev, on Linux and in the Windows Subsystem for Linux."""

_HOW_TO_INSTALL = {
    "flash_attn": "flash-attn (TREETUNE_FLASH_ATTN=1 scripts/setup.sh builds it)",
    "liger_kernel": "liger-kernel (in requirements.txt)",
}
_ANOTHER_CHECKPOINT = "choose another checkpoint, or train again from the one before it"


@ModelSource.register("pretrained")
@dataclass(frozen=True, kw_only=True)
class PretrainedModel(ModelSource):
    """A model in Hugging Face format.

    An answer ends with the tokenizer's end token, the template's end of turn, or an end token of the model's
    generation_config.json.
    """

    name_or_path: Annotated[str, MinLen(1)]
    """A directory in Hugging Face format, ``…/checkpoints/last/policy`` of another experiment, or a name on
    the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in training."""
    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = "sdpa"
    """The implementation of attention in training. ``sdpa`` is PyTorch's, which has kernels for packed rows
    on a GPU; ``flash_attention_2`` needs the package flash-attn, a GPU and bfloat16."""
    revision: str | None = None
    """A branch, tag or commit on the hub; null: main."""
    trust_remote_code: bool = False
    """Whether Python code from the model's folder may run."""
    begin_of_text: bool | None = None
    """Whether prompts begin with the tokenizer's token for the beginning of text; null: if the tokenizer adds
    it to a text by default."""
    chat: Chat | None = None
    """Makes prompts with the tokenizer's chat template, which also decides how a prompt begins, unless
    `begin_of_text` is set."""
    liger: bool = False
    """Replaces norms, rotary embeddings and MLPs by Liger's fused Triton kernels, on a GPU only. The loss is
    not replaced."""
    added_tokens: tuple[str, ...] = ()
    """Texts that become one token each, such as ``<Parallel>``. They are not special tokens, so decoded text
    contains them. The embedding of a new token is the mean over the tokens of the word in its angle brackets.
    Tokens that the tokenizer has already keep their weights, so a checkpoint of a run with added tokens loads
    unchanged."""
    unused_weights: tuple[str, ...] = ()
    """The beginnings of the names of weights that the files have and the model doesn't, such as ``visual.``
    for the vision part of a model that is trained on text. The files must not have any other weights that the
    model doesn't have."""

    def __post_init__(self) -> None:
        check_tokens(self.added_tokens)
        if "" in self.unused_weights:
            raise ValueError("unused_weights has an empty text, which matches every name: remove it")
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            raise ValueError("attention 'flash_attention_2' has no float32 kernels: set dtype to 'bfloat16'")

    @property
    @override
    def longest(self) -> int | None:
        return longest_context(self._read_local_json("config.json"))

    @override
    def prompt_tokens(self, prompts: Sequence[str]) -> list[int] | None:
        vocabulary = self._read_characters()
        # Without a tokenizer, tokens can be counted only if they are characters, and if no chat is written
        # around the prompt.
        if vocabulary is None or self.chat is not None:
            return None
        longer_tokens = [token for token in vocabulary if len(token) > 1]  # such as tags
        return character_tokens(prompts, [*longer_tokens, *self.added_tokens])

    @override
    def single_tokens(self) -> frozenset[str] | None:
        vocabulary = self._read_characters()
        return None if vocabulary is None else frozenset([*vocabulary, *self.added_tokens])

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        yield from self._find_missing()
        rule = length_rule(self._read_local_json("config.json"))
        if rule is not None and experiment.context_length > rule.limit:
            yield Finding(
                f"the model has {rule.kind}, which computes all rows of a batch differently if one of them"
                f" has more than {rule.limit} tokens. Trainer and engine batch different rows, so that their"
                f" log-probs would differ; and context_length is {experiment.context_length}",
                "$.context_length",
                f"lower it to {rule.limit} or less, or choose a model without {rule.kind}",
            )
        vocabulary = self._read_characters()
        if vocabulary is None:
            return
        try:
            missing = sorted(set(experiment.task.alphabet()) - set(vocabulary))
        except ValueError:
            return  # a task in natural language has no alphabet to compare
        if missing:
            yield Finding(
                f"the tokens of {self.name_or_path} are single characters, and"
                f" {', '.join(map(repr, missing))} are not among them, which the task's problems or answers"
                " contain",
                "name_or_path",
                "choose a model that was trained on this task, or one with a larger vocabulary",
            )

    def _read_local_json(self, name: str) -> dict[str, Any]:
        """Returns a JSON file of the model; empty if the model is not in a local folder."""
        try:
            path = Path(resolve_policy(self.name_or_path)) / name
            if not path.is_file() or path.stat().st_size > CHECKED_FILE_BYTES:
                return {}
            content = json.loads(path.read_text())
        except (ValueError, OSError):
            return {}  # loading the model reports the error
        return content if isinstance(content, dict) else {}

    def _read_characters(self) -> list[str] | None:
        """Returns the vocabulary of a tokenizer whose tokens are single characters, as those of tiny models
        are. Returns None for any other tokenizer, and if the model is not in a local folder."""
        tokenizer = self._read_local_json("tokenizer.json")
        model = tokenizer.get("model") or {}
        if model.get("type") != "WordLevel":
            return None
        added = [token["content"] for token in tokenizer.get("added_tokens", ())]
        vocabulary = [*model.get("vocab", ()), *added]
        # The tokens of a tokenizer of the type WordLevel may also be whole words of a language. Then a text
        # is split at white space or the like, and tokens that are not special have several characters.
        pre_tokenizer = tokenizer.get("pre_tokenizer") or {}  # the file may have null
        splits_characters = pre_tokenizer.get("type") == "Split"
        special_tokens = {*added, model.get("unk_token")}
        has_words = any(len(token) > 1 and token not in special_tokens for token in vocabulary)
        return vocabulary if splits_characters and not has_words else None

    @override
    def check_at_start(self) -> None:
        resolve_policy(self.name_or_path)
        for finding in self._find_missing():
            if finding.level == "missing":
                raise ValueError(f"{finding.what}: {finding.remedy}")

    def _find_missing(self) -> Iterator[Finding]:
        """Yields a finding for each thing that the model needs and this machine doesn't have: the model's
        folder, a GPU, a package. Yields a warning for a model that the start has to download."""
        yield from check_presence(self.name_or_path, self.revision, "name_or_path")
        yield from self._find_missing_kernels()

    def _find_missing_kernels(self) -> Iterator[Finding]:
        """Yields a finding for each kind of kernels that the settings name and that can't run here."""
        sdpa_remedy = "set model.attention to 'sdpa'"
        # Each entry has the package (None for PyTorch's own kernels), the setting that names the kernels, its
        # key, and a remedy.
        kernels: list[tuple[str | None, str, str, str]] = []
        if self.attention == "flash_attention_2":
            kernels.append(("flash_attn", "model.attention 'flash_attention_2'", "attention", sdpa_remedy))
        if self.attention == "flex_attention":  # it has no gradient on a CPU
            kernels.append((None, "model.attention 'flex_attention'", "attention", sdpa_remedy))
        if self.liger:
            kernels.append(("liger_kernel", "model.liger", "liger", "set model.liger to false"))
        for package, setting, key, remedy in kernels:
            if not has_gpu():
                what = f"{setting} needs an NVIDIA GPU, and this machine has none"
                yield Finding(what, key, remedy, level="missing")
            elif package is not None and importlib.util.find_spec(package) is None:
                what = f"{setting} needs the package {_HOW_TO_INSTALL[package]}, which is not installed"
                yield Finding(what, key, remedy, level="missing")

    @override
    def identity(self) -> Mapping[str, str]:
        return model_digest(self.name_or_path, self.revision)

    @override
    def shape(self, alphabet: Alphabet) -> Shape | None:
        path = resolve_policy(self.name_or_path)
        if not Path(path).is_dir():
            return published_shape(path)
        return shape_of(json.loads(Path(path, "config.json").read_text()), f"{path}/config.json")

    @override
    def load_tokenizer(self, alphabet: Alphabet) -> PreTrainedTokenizerBase:
        tokenizer = self._tokenizer_without_added_tokens()
        add_tokens(tokenizer, self.added_tokens)
        return tokenizer

    @override
    def unlearned_tokens(self) -> tuple[str, ...]:
        if not self.added_tokens:
            return ()  # without loading the tokenizer
        return missing_tokens(self._tokenizer_without_added_tokens(), self.added_tokens)

    def _tokenizer_without_added_tokens(self) -> PreTrainedTokenizerBase:
        """Loads the model's own tokenizer, with a padding token. Raises ValueError if it can't be used."""
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        path = resolve_policy(self.name_or_path)
        refuse_tekken_alone(Path(path))
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **self._options)
        except Exception as error:  # for a damaged file, the libraries raise errors of any kind
            raise ValueError(self._describe_failed_load("tokenizer", path, error)) from error
        lists_added_tokens = hasattr(tokenizer, "added_tokens_decoder")
        if not isinstance(tokenizer, PreTrainedTokenizerBase) or not lists_added_tokens:
            raise ValueError(
                f"the tokenizer of {self.name_or_path!r} is a {type(tokenizer).__name__}, which doesn't list"
                " its added tokens: choose a model whose folder has a tokenizer.json"
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    @override
    def codec(self, tokenizer: PreTrainedTokenizerBase) -> TextCodec:
        from transformers import AutoConfig, GenerationConfig

        path = resolve_policy(self.name_or_path)
        # The engine also ends samples at the end tokens of the model's configuration, which may be others
        # than the tokenizer's.
        try:
            end_ids = GenerationConfig.from_pretrained(path, revision=self._options["revision"]).eos_token_id
        except OSError:  # the model has no generation_config.json
            end_ids = getattr(AutoConfig.from_pretrained(path, **self._options), "eos_token_id", None)
        if end_ids is None:
            end_ids = ()
        elif isinstance(end_ids, int):
            end_ids = [end_ids]
        return codec_of(tokenizer, begin_of_text=self.begin_of_text, chat=self.chat, end_ids=end_ids)

    @override
    def load_model(self, seed: int, alphabet: Alphabet) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM

        path = resolve_policy(self.name_or_path)
        refuse_damaged(Path(path), _ANOTHER_CHECKPOINT)
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, self.dtype),
                attn_implementation=self.attention,
                output_loading_info=True,
                **self._options,
            )
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise ValueError(self._describe_failed_load("model", path, error)) from error
        self._refuse_partial(type(model).__name__, loading, path)
        if self.added_tokens:
            tokenizer = self._tokenizer_without_added_tokens()
            new_tokens = missing_tokens(tokenizer, self.added_tokens)
            # The ids of the word in each added token (a tag), such as `Parallel` in `<Parallel>`. They are
            # read before the tags are added: afterwards the tokenizer would encode each tag as itself.
            word_ids_of_token = {token: word_ids(tokenizer, token) for token in new_tokens}
            add_tokens(tokenizer, self.added_tokens)
            vocabulary = tokenizer.get_vocab()
            embed_tokens(model, {vocabulary[token]: ids for token, ids in word_ids_of_token.items()})
        if self.liger:
            _apply_liger(model)
        return model.train()

    @override
    def load_in_parts(self, dtype: torch.dtype) -> PreTrainedModel:
        """Returns the model, whose weights stay in their files until they are sharded (`models.shards`)."""
        import torch
        from transformers import AutoConfig, GenerationConfig

        from treetune.exceptions import NotInParts
        from treetune.models.shards import make_model_in_parts, weight_files

        path = resolve_policy(self.name_or_path)
        for is_set, key in (
            (self.unlearned_tokens(), "added_tokens"),
            (self.liger, "liger"),
            (self.trust_remote_code, "trust_remote_code"),
        ):
            if is_set:
                raise NotInParts(f"model.{key} needs the model in memory")
        refuse_damaged(Path(path), _ANOTHER_CHECKPOINT)
        try:
            files = weight_files(path, self._options["revision"])
            config = AutoConfig.from_pretrained(path, **self._options)
            if files is None:  # the handler below doesn't catch `NotInParts`, which is no ValueError
                raise NotInParts("it has no safetensors files")
            # Values are cast to the first dtype, and then to the second, as when a loaded model is cast.
            dtypes = (getattr(torch, self.dtype), dtype)
            model = make_model_in_parts(config, files, dtypes, attn_implementation=self.attention)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(self._describe_failed_load("model", path, error)) from error
        with contextlib.suppress(OSError):  # the model may have no generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(
                path, revision=self._options["revision"]
            )
        return model.train()

    def _refuse_partial(self, name: str, loading: Mapping[str, Any], path: str) -> None:
        """Raises ValueError if the files don't have all weights of the model, which would then be random, or
        have weights that the model doesn't have."""
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(
                f"the files in {path} don't have all weights of a {name}: {list_some_names(missing)}"
                " are missing, and would be random. Download the whole model again; a checkpoint of an early"
                " version, which did not write buffers, must be trained again"
            )
        unexpected = sorted(
            weight for weight in loading["unexpected_keys"] if not weight.startswith(self.unused_weights)
        )
        if unexpected:
            raise ValueError(
                f"the files in {path} have weights that a {name} doesn't have: {list_some_names(unexpected)}."
                " If they are not needed, put the beginning of their names into model.unused_weights:"
                f" ['{unexpected[0].partition('.')[0]}.']"
            )

    @property
    def _options(self) -> dict[str, Any]:
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}

    def _describe_failed_load(self, subject: str, path: str, error: Exception) -> str:
        """Returns the message for a failure to load `subject`: "model" or "tokenizer"."""
        message = str(error).strip()
        first_line = message.splitlines()[0] if message else type(error).__name__
        if "scaled_dot_product_attention" in first_line:
            architecture = first_line.partition(" ")[0]  # transformers' message begins with the class
            return f"{architecture} has no attention {self.attention!r}: set model.attention to 'eager'"
        if "trust_remote_code" in message and not self.trust_remote_code:
            return (
                f"the {subject} of {self.name_or_path!r} has Python code in its folder, which would run with"
                " your rights: read it, and set model.trust_remote_code to true if you trust it"
            )
        return (
            f"the {subject} of {self.name_or_path!r} could not be loaded from {path}: {first_line} "
            "If this is meant to be a directory, it doesn't exist in the working directory; if it is a name"
            " on the Hugging Face hub, the hub must be reachable, or the model in the cache."
        )


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
"""The files of tokenizers that transformers reads."""


def refuse_tekken_alone(folder: Path) -> None:
    """Raises ValueError for a folder whose only tokenizer has Mistral's format.

    The program that reads this format doesn't have the interface of a tokenizer that a run needs.
    """
    if (folder / "tekken.json").is_file() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"the only tokenizer in {folder} is tekken.json, in Mistral's format, which is not supported: add"
            " tokenizer.json and tokenizer_config.json of the same model, which the hub has for most of these"
            " models"
        )


def has_gpu() -> bool:
    """Returns whether the machine has an NVIDIA GPU, even if its driver doesn't work."""
    return any(any(_DEVICES.glob(pattern)) for pattern in _GPU_DEVICES)


def _apply_liger(model: PreTrainedModel) -> None:
    """Replaces the model's rotary embeddings, RMS norms and MLPs by Liger's (Hsu et al. 2024), in place.

    Liger's losses are not used, since `PolicyModule` computes log-probs in chunks for all objectives.

    Raises:
        ValueError: Liger has no kernels for the architecture. Liger itself would raise no error then, and
            change nothing.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if patch is None:
        raise ValueError(
            f"model.liger is true, but Liger has no kernels for {model.config.model_type!r}: set it to false"
        )
    kernels = {
        "rope": True,
        "rms_norm": True,
        "swiglu": True,
        "geglu": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    parameters = inspect.signature(patch).parameters
    # Each architecture's function has arguments only for the layers that the architecture has.
    patch(model=model, **{name: is_on for name, is_on in kernels.items() if name in parameters})
