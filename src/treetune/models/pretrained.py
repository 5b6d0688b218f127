"""A policy that begins as a pretrained model in Hugging Face format."""

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
from treetune.models.saved_weights import some_names
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

QUICKLY_READ = 1_000_000
"""Largest file of a model, in bytes, that is read while a configuration is checked."""

_DEVICES = Path("/dev")
_GPUS = ("nvidia[0-9]*", "dxg")
"""Names of a GPU below /dev, on Linux and in its Windows subsystem."""

_PACKAGES = {
    "flash_attn": "flash-attn (TREETUNE_FLASH_ATTN=1 scripts/setup.sh builds it)",
    "liger_kernel": "liger-kernel (in requirements.txt)",
}
_ANOTHER_CHECKPOINT = "choose another checkpoint, or train again from the one before it"


@ModelSource.register("pretrained")
@dataclass(frozen=True, kw_only=True)
class PretrainedModel(ModelSource):
    """A model in Hugging Face format.

    An answer ends with the tokenizer's end token, the template's end of turn, or what the model's
    generation_config.json has for it.
    """

    name_or_path: Annotated[str, MinLen(1)]
    """A directory in Hugging Face format, ``…/checkpoints/last/policy`` of another experiment, or a name on
    the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in training."""
    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = "sdpa"
    """The implementation in training. ``sdpa`` is PyTorch's own, on a GPU with its kernels for packed rows;
    ``flash_attention_2`` needs flash-attn, a GPU and bfloat16."""
    revision: str | None = None
    """A branch, tag or commit on the hub; None: main."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    begin_of_text: bool | None = None
    """Whether prompts begin with the tokenizer's token for that; None leaves it to the tokenizer, as it
    encodes a text by itself."""
    chat: Chat | None = None
    """Puts the tokenizer's chat template around every problem; the template then decides about the beginning,
    unless `begin_of_text` says it."""
    liger: bool = False
    """Replaces norms, rotary embeddings and MLPs by Liger's fused Triton kernels, on a GPU only; the loss
    stays ours."""
    added_tokens: tuple[str, ...] = ()
    """Texts that become one token each, which text shows. Tokens that the tokenizer has already keep their
    weights, so a checkpoint of a run with added tokens loads as it is; new ones begin as the mean of the
    tokens of the word in their angle brackets."""

    unused_weights: tuple[str, ...] = ()
    """How the names of weights in its files begin that the model has no place for, such as ``visual.`` for
    the eyes of one that is trained on text alone. Without it, such weights are an error."""

    def __post_init__(self) -> None:
        check_tokens(self.added_tokens)
        if "" in self.unused_weights:
            raise ValueError("unused_weights has an empty text, with which every name begins")
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            raise ValueError("attention 'flash_attention_2' has no float32 kernels: set dtype to 'bfloat16'")

    @property
    @override
    def longest(self) -> int | None:
        return longest_context(self._local("config.json"))

    @override
    def prompt_tokens(self, prompts: Sequence[str]) -> list[int] | None:
        vocabulary = self._characters()
        if vocabulary is None or self.chat is not None:
            return None
        added = [token for token in vocabulary if len(token) > 1]
        return character_tokens(prompts, [*added, *self.added_tokens])

    @override
    def single_tokens(self) -> frozenset[str] | None:
        vocabulary = self._characters()
        return None if vocabulary is None else frozenset([*vocabulary, *self.added_tokens])

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        yield from self._missing_here()
        rule = length_rule(self._local("config.json"))
        if rule is not None and experiment.context_length > rule.limit:
            yield Finding(
                f"the model has {rule.kind}: where any row of a batch has more than {rule.limit} tokens, all"
                " of them are computed otherwise, by trainer and engine at other lengths; and context_length"
                f" is {experiment.context_length}",
                "$.context_length",
                f"lower it to {rule.limit} or less, or take a model without {rule.kind}",
            )
        vocabulary = self._characters()
        if vocabulary is None:
            return
        try:
            lacking = sorted(set(experiment.task.alphabet()) - set(vocabulary))
        except ValueError:
            return
        if lacking:
            yield Finding(
                f"the tokenizer of {self.name_or_path} knows characters alone, and not"
                f" {', '.join(map(repr, lacking))}, which the task's problems or answers have",
                "name_or_path",
                "take a model that was trained on this task, or one with a larger vocabulary",
            )

    def _local(self, name: str) -> dict[str, Any]:
        """A file of the model as JSON; empty where the model is no folder that is there."""
        try:
            path = Path(resolve_policy(self.name_or_path)) / name
            if not path.is_file() or path.stat().st_size > QUICKLY_READ:
                return {}
            read = json.loads(path.read_text())
        except (ValueError, OSError):
            return {}  # reported when the model is loaded
        return read if isinstance(read, dict) else {}

    def _characters(self) -> list[str] | None:
        """The vocabulary of a tokenizer that makes one token of each character, as the tiny models' does;
        None for any other, and where the model isn't there."""
        described = self._local("tokenizer.json")
        model = described.get("model", {})
        if model.get("type") != "WordLevel":
            return None
        added = [token["content"] for token in described.get("added_tokens", ())]
        return [*model.get("vocab", ()), *added]

    @override
    def require(self) -> None:
        resolve_policy(self.name_or_path)
        for finding in self._missing_kernels():
            raise ValueError(f"{finding.what}: {finding.remedy}")

    def _missing_here(self) -> Iterator[Finding]:
        """Yields what the model needs and this machine doesn't have: its folder, a GPU, a package."""
        try:
            resolve_policy(self.name_or_path)
        except ValueError as error:
            # The last sentence says how to make the model.
            what, _, remedy = str(error).rpartition(". ")
            yield Finding(what, "name_or_path", remedy, level="missing")
        yield from self._missing_kernels()

    def _missing_kernels(self) -> Iterator[Finding]:
        """Yields the kernels that the settings name and that can't run here."""
        to_sdpa = "set model.attention to 'sdpa'"
        for is_used, module, setting, key, remedy in (
            (
                self.attention == "flash_attention_2",
                "flash_attn",
                "model.attention 'flash_attention_2'",
                "attention",
                to_sdpa,
            ),
            # It has no gradient on CPUs.
            (
                self.attention == "flex_attention",
                "torch",
                "model.attention 'flex_attention'",
                "attention",
                to_sdpa,
            ),
            (self.liger, "liger_kernel", "model.liger", "liger", "set model.liger to false"),
        ):
            if not is_used:
                continue
            if not has_gpu():
                what = f"{setting} needs an NVIDIA GPU, and this machine has none"
                yield Finding(what, key, remedy, level="missing")
            elif importlib.util.find_spec(module) is None:
                what = f"{setting} needs the package {_PACKAGES[module]}, which is not installed"
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
        tokenizer = self._own_tokenizer()
        add_tokens(tokenizer, self.added_tokens)
        return tokenizer

    @override
    def unlearned_tokens(self) -> tuple[str, ...]:
        return missing_tokens(self._own_tokenizer(), self.added_tokens) if self.added_tokens else ()

    def _own_tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        path = resolve_policy(self.name_or_path)
        refuse_tekken_alone(Path(path))
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **self._options)
        except Exception as error:  # a damaged or foreign file: libraries raise whatever they meet there
            raise ValueError(self._not_loaded("tokenizer", path, error)) from error
        if not isinstance(tokenizer, PreTrainedTokenizerBase) or not hasattr(
            tokenizer, "added_tokens_decoder"
        ):
            raise ValueError(
                f"the tokenizer of {self.name_or_path!r} is a {type(tokenizer).__name__}, which has no"
                " vocabulary of added tokens to ask: take a model whose folder has tokenizer.json"
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    @override
    def codec(self, tokenizer: PreTrainedTokenizerBase) -> TextCodec:
        from transformers import AutoConfig, GenerationConfig

        path = resolve_policy(self.name_or_path)
        try:  # end tokens that the model's files name beside its tokenizer: an engine ends with them
            end_ids = GenerationConfig.from_pretrained(path, revision=self._options["revision"]).eos_token_id
        except OSError:  # it has no such file
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
            raise ValueError(self._not_loaded("model", path, error)) from error
        self._refuse_partial(type(model).__name__, loading, path)
        if self.added_tokens:
            tokenizer = self._own_tokenizer()
            new_tokens = missing_tokens(tokenizer, self.added_tokens)
            # Before the tags are tokens of their own: afterwards their words can't be told from them.
            word_of_token = {token: word_ids(tokenizer, token) for token in new_tokens}
            add_tokens(tokenizer, self.added_tokens)
            vocabulary = tokenizer.get_vocab()
            embed_tokens(model, {vocabulary[token]: word for token, word in word_of_token.items()})
        if self.liger:
            _apply_liger(model)
        return model.train()

    @override
    def load_in_parts(self, dtype: torch.dtype) -> PreTrainedModel:
        import torch
        from transformers import AutoConfig, GenerationConfig

        from treetune.exceptions import NotInParts
        from treetune.models.shards import in_parts, weight_files

        path = resolve_policy(self.name_or_path)
        for changes_model, key in (
            (self.unlearned_tokens(), "added_tokens"),
            (self.liger, "liger"),
            (self.trust_remote_code, "trust_remote_code"),
        ):
            if changes_model:
                raise NotInParts(f"model.{key} changes a model that is there")
        refuse_damaged(Path(path), _ANOTHER_CHECKPOINT)
        try:
            files = weight_files(path, self._options["revision"])
            config = AutoConfig.from_pretrained(path, **self._options)
            if files is None:
                raise NotInParts("it has no safetensors files")
            dtypes = (getattr(torch, self.dtype), dtype)
            model = in_parts(config, files, dtypes, attn_implementation=self.attention)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(self._not_loaded("model", path, error)) from error
        with contextlib.suppress(OSError):  # it has no such file
            model.generation_config = GenerationConfig.from_pretrained(
                path, revision=self._options["revision"]
            )
        return model.train()

    def _refuse_partial(self, name: str, loading: Mapping[str, Any], path: str) -> None:
        """Raises ValueError if the files lack weights of the model, which would then be random, or contain
        weights that the model doesn't have."""
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(
                f"the files in {path} lack weights of a {name}: {some_names(missing)}. They would be drawn,"
                " or whatever lay in memory. Get the whole model again; a checkpoint that was written before"
                " buffers were kept has to be trained again"
            )
        unexpected = sorted(
            weight for weight in loading["unexpected_keys"] if not weight.startswith(self.unused_weights)
        )
        if unexpected:
            raise ValueError(
                f"the files in {path} have weights that a {name} has no place for: {some_names(unexpected)}."
                " The model would be another one without them. Where that is meant, name how they begin in"
                f" model.unused_weights: ['{unexpected[0].partition('.')[0]}.']"
            )

    @property
    def _options(self) -> dict[str, Any]:
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}

    def _not_loaded(self, what: str, path: str, error: Exception) -> str:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "scaled_dot_product_attention" in first:
            architecture = first.partition(" ")[0]
            return f"{architecture} has no attention {self.attention!r}: set model.attention to 'eager'"
        if "trust_remote_code" in str(error) and not self.trust_remote_code:
            return (
                f"the {what} of {self.name_or_path!r} comes with code of its own, which would run with your"
                " rights: look at it, and set model.trust_remote_code to true where you trust it"
            )
        return (
            f"the {what} of {self.name_or_path!r} could not be loaded from {path}: {first} "
            "If this is meant to be a directory, it is not there from here; if a name on the "
            "Hugging Face hub, the hub has to be reachable, or the model downloaded before."
        )


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
"""Files of tokenizers that transformers reads by itself."""


def refuse_tekken_alone(folder: Path) -> None:
    """Raises ValueError for a folder whose only tokenizer is Mistral's own format: its ids and templates are
    computed by a program that a run can't ask what it asks of a tokenizer."""
    if (folder / "tekken.json").is_file() and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ValueError(
            f"{folder} has tekken.json alone for a tokenizer, Mistral's own format, which can't be read here:"
            " put tokenizer.json and tokenizer_config.json of the same model beside it, which the hub has for"
            " most of these models in Hugging Face's format"
        )


def has_gpu() -> bool:
    """Returns whether the system has an NVIDIA GPU, be its driver what it may."""
    return any(any(_DEVICES.glob(pattern)) for pattern in _GPUS)


def _apply_liger(model: PreTrainedModel) -> None:
    """Puts Liger's rotary embeddings, RMS norms and MLPs (Hsu et al. 2024) into the model, in place.

    Its losses stay out: log-probs are computed in chunks here, for every objective alike. Raises
    ValueError for an architecture that it has no kernels for, where it would do nothing, silently.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if patch is None:
        raise ValueError(
            f"model.liger is true, and Liger has no kernels for {model.config.model_type!r}: set it to false"
        )
    chosen = {
        "rope": True,
        "rms_norm": True,
        "swiglu": True,
        "geglu": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    parameters = inspect.signature(patch).parameters
    patch(model=model, **{name: is_on for name, is_on in chosen.items() if name in parameters})
