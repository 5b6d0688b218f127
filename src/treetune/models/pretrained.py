"""A policy that begins as a pretrained model in Hugging Face format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import MinLen

from treetune.contracts import Experiment, Finding
from treetune.models.chat import Chat
from treetune.models.kernels import require_kernels
from treetune.models.policy_files import resolve_policy
from treetune.models.shapes import Shape, published_shape, shape_of
from treetune.models.sources import Alphabet, ModelSource, character_tokens
from treetune.models.tokenizer import add_tokens, check_tokens, embed_tokens, missing_tokens, word_ids
from treetune.store.checksums import refuse_damaged
from treetune.vocabulary import TextCodec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

QUICKLY_READ = 1_000_000
"""Bytes of a model's file that is read while a configuration is checked."""


@ModelSource.register("pretrained")
@dataclass(frozen=True, kw_only=True)
class PretrainedModel(ModelSource):
    """A model in Hugging Face format: a directory, ``…/checkpoints/last/policy`` of another
    experiment, or a name on the hub, with `revision` a branch, tag or commit there.

    `dtype` is that of the weights in training.

    `begin_of_text` says whether prompts begin with the tokenizer's token for that; None leaves it to
    the tokenizer, as it encodes a text by itself. `chat` puts the tokenizer's chat template around
    every problem; the template then decides about the beginning, unless `begin_of_text` says it.
    `liger` replaces norms, rotary embeddings and MLPs by Liger's fused Triton kernels, on a GPU only; the
    loss stays ours. An answer ends with the tokenizer's end token, the template's end of turn, or what
    the model's generation_config.json has for it.

    Each of `added_tokens` becomes one token, which text shows. What the tokenizer has already keeps its
    weights, so a checkpoint of a run with added tokens loads as it is; what is new begins as the mean of
    the tokens of the word in its angle brackets.
    """

    name_or_path: Annotated[str, MinLen(1)]
    """A directory in Hugging Face format, or a name on the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "flash_attention_2", "flex_attention", "eager"] = "sdpa"
    """The implementation in training. ``sdpa`` is PyTorch's own, on a GPU with its kernels for packed rows;
    ``flash_attention_2`` needs flash-attn, a GPU and bfloat16."""
    revision: str | None = None
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    begin_of_text: bool | None = None
    chat: Chat | None = None
    liger: bool = False
    added_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_tokens(self.added_tokens)
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            raise ValueError("attention 'flash_attention_2' has no float32 kernels: set dtype to 'bfloat16'")

    @property
    def longest(self) -> int | None:
        described = self._local("config.json")
        longest = described.get("max_position_embeddings") if described else None
        return longest if isinstance(longest, int) else None

    def prompt_tokens(self, prompts: Sequence[str]) -> list[int] | None:
        vocabulary = self._characters()
        if vocabulary is None or self.chat is not None:
            return None
        added = [token for token in vocabulary if len(token) > 1]
        return character_tokens(prompts, [*added, *self.added_tokens])

    def single_tokens(self) -> frozenset[str] | None:
        vocabulary = self._characters()
        return None if vocabulary is None else frozenset([*vocabulary, *self.added_tokens])

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
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

    def _local(self, name: str) -> dict[str, Any] | None:
        """A file of the model as JSON, where the model is a folder that is there."""
        try:
            path = Path(resolve_policy(self.name_or_path)) / name
            if not path.is_file() or path.stat().st_size > QUICKLY_READ:
                return None
            read = json.loads(path.read_text())
        except (ValueError, OSError):
            return None  # told when the model is asked for
        return read if isinstance(read, dict) else None

    def _characters(self) -> list[str] | None:
        """The vocabulary of a tokenizer that makes one token of each character, as the tiny models' does;
        None for any other, and where the model isn't there."""
        described = self._local("tokenizer.json")
        model = (described or {}).get("model", {})
        if model.get("type") != "WordLevel":
            return None
        added = [token["content"] for token in (described or {}).get("added_tokens", ())]
        return [*model.get("vocab", ()), *added]

    def require(self) -> None:
        resolve_policy(self.name_or_path)
        if self.attention == "flash_attention_2":
            require_kernels(
                "flash_attn", "model.attention 'flash_attention_2'", "set model.attention to 'sdpa'"
            )
        if self.attention == "flex_attention":  # on CPUs it has no gradient
            require_kernels("torch", "model.attention 'flex_attention'", "set model.attention to 'sdpa'")
        if self.liger:
            require_kernels("liger_kernel", "model.liger", "set model.liger to false")

    def shape(self, alphabet: Alphabet) -> Shape | None:
        path = resolve_policy(self.name_or_path)
        if not Path(path).is_dir():
            return published_shape(path)
        return shape_of(json.loads(Path(path, "config.json").read_text()), f"{path}/config.json")

    def load_tokenizer(self, alphabet: Alphabet) -> PreTrainedTokenizerBase:
        tokenizer = self._own_tokenizer()
        add_tokens(tokenizer, self.added_tokens)
        return tokenizer

    def unlearned_tokens(self) -> tuple[str, ...]:
        return missing_tokens(self._own_tokenizer(), self.added_tokens) if self.added_tokens else ()

    def _own_tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        path = resolve_policy(self.name_or_path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path, revision=self._revision(), trust_remote_code=self.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ValueError(self._not_loaded("tokenizer", path, error)) from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def codec(self, tokenizer: PreTrainedTokenizerBase) -> TextCodec:
        from treetune.models.tokenizer import codec_of

        return codec_of(tokenizer, begin_of_text=self.begin_of_text, chat=self.chat, end_ids=self._end_ids())

    def load_model(self, seed: int, alphabet: Alphabet) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM

        path = resolve_policy(self.name_or_path)
        refuse_damaged(Path(path), "choose another checkpoint, or train again from the one before it")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path,
                revision=self._revision(),
                dtype=getattr(torch, self.dtype),
                attn_implementation=self.attention,
                trust_remote_code=self.trust_remote_code,
            )
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(self._not_loaded("model", path, error)) from error
        if self.added_tokens:
            embed_tokens(model, self._words())
        if self.liger:
            from treetune.models.kernels import apply_liger

            apply_liger(model)
        return model.train()

    def load_in_parts(self, dtype: torch.dtype) -> PreTrainedModel:
        import torch
        from transformers import AutoConfig, GenerationConfig

        from treetune.models.shards import NotInParts, in_parts, weight_files

        path = resolve_policy(self.name_or_path)
        for changes, key in (
            (self.unlearned_tokens(), "added_tokens"),
            (self.liger, "liger"),
            (self.trust_remote_code, "trust_remote_code"),
        ):
            if changes:
                raise NotInParts(f"model.{key} changes a model that is there")
        refuse_damaged(Path(path), "choose another checkpoint, or train again from the one before it")
        try:
            files = weight_files(path, self._revision())
            config = AutoConfig.from_pretrained(path, revision=self._revision())
            if files is None:
                raise NotInParts("it has no safetensors files")
            dtypes = (getattr(torch, self.dtype), dtype)
            model = in_parts(config, files, dtypes, attn_implementation=self.attention)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(self._not_loaded("model", path, error)) from error
        with contextlib.suppress(OSError):  # it has no such file
            model.generation_config = GenerationConfig.from_pretrained(path, revision=self._revision())
        return model.train()

    def _words(self) -> dict[int, tuple[int, ...]]:
        """The added tokens that the model has no weights for, by id, with the tokens of their words."""
        tokenizer = self._own_tokenizer()
        words = {token: word_ids(tokenizer, token) for token in missing_tokens(tokenizer, self.added_tokens)}
        add_tokens(tokenizer, self.added_tokens)
        vocabulary = tokenizer.get_vocab()
        return {vocabulary[token]: word for token, word in words.items()}

    def _end_ids(self) -> tuple[int, ...]:
        """The end tokens that the model's files name beside its tokenizer; an engine ends with them."""
        from transformers import AutoConfig, GenerationConfig

        path = resolve_policy(self.name_or_path)
        try:
            named = GenerationConfig.from_pretrained(path, revision=self._revision()).eos_token_id
        except OSError:  # it has no such file
            config = AutoConfig.from_pretrained(
                path, revision=self._revision(), trust_remote_code=self.trust_remote_code
            )
            named = getattr(config, "eos_token_id", None)
        return () if named is None else (named,) if isinstance(named, int) else tuple(named)

    def _revision(self) -> str:
        return self.revision or "main"

    def _not_loaded(self, what: str, path: str, error: Exception) -> str:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return (
            f"the {what} of {self.name_or_path!r} could not be loaded from {path}: {first} "
            "If this is meant to be a directory, it is not there from here; if a name on the "
            "Hugging Face hub, the hub has to be reachable, or the model downloaded before."
        )
