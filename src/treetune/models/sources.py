"""The source of a policy, and the one that makes it on the spot: a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, MinLen
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Experiment, Finding
from treetune.models.chat import Chat
from treetune.models.shapes import Shape
from treetune.models.tokenizer import EOS, PAD, add_tokens, character_tokenizer, check_tokens, codec_of
from treetune.seeds import derive_seed
from treetune.vocabulary import TextCodec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Alphabet = Callable[[], str]
"""`Task.alphabet`, not called yet: only a model with a tokenizer of its own making asks for it."""

MIN_HEAD_DIM = 32
"""vLLM's attention on CPU starts with this head dimension; smaller ones kill the engine."""


def character_tokens(texts: Sequence[str], single: Sequence[str]) -> list[int]:
    """Counts the tokens of texts where each character is one, and so is each text of `single`."""
    pattern = re.compile("|".join([*map(re.escape, sorted(single, key=len, reverse=True)), r"[\s\S]"]))
    return [len(pattern.findall(text)) for text in texts]


class ModelSource(Registrable):
    """The model and the tokenizer that an experiment starts from."""

    chat: Chat | None = None
    """The chat that problems are asked in; None: they are asked as they are."""

    @property
    def longest(self) -> int | None:
        """The longest prompt and response together, in tokens, that the model was made for, where that is
        known at once."""
        return None

    def prompt_tokens(self, prompts: Sequence[str]) -> list[int] | None:
        """The number of tokens of each, where that is known without loading a tokenizer."""
        return None

    def single_tokens(self) -> frozenset[str] | None:
        """The texts, such as tags, that are one token beside the vocabulary. None: nobody knows yet."""
        return None

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        longest = self.longest
        if longest is not None and longest < experiment.context_length:
            yield Finding(
                f"the model was made for {longest} tokens, and context_length is {experiment.context_length}",
                "$.context_length",
                f"lower it to {longest} or less, or take a model with a longer context",
            )

    def require(self) -> None:
        """Raises ValueError, without importing anything heavy, if the model can't be there."""

    def identity(self) -> Mapping[str, str]:
        """What the model is, so that a run that goes on can tell whether it is still the same: names and
        digests. Empty where the configuration says it all. Raises ValueError if the model can't be there."""
        return {}

    def shape(self, alphabet: Alphabet) -> Shape | None:
        """Its sizes, without loading it; None where they can't be known so. Raises ValueError if the model
        can't be there."""
        return None

    def load_tokenizer(self, alphabet: Alphabet) -> PreTrainedTokenizerBase:
        """A tokenizer with an end token and a padding token. Raises ValueError if it can't be had."""
        raise NotImplementedError

    def unlearned_tokens(self) -> tuple[str, ...]:
        """The added tokens that begin as the mean of other tokens. Raises ValueError as `load_tokenizer`
        does."""
        return ()

    def codec(self, tokenizer: PreTrainedTokenizerBase) -> TextCodec:
        """The way from prompts to token ids, and the ids that end an answer.

        Raises ValueError for a tokenizer that has no tokens for them.
        """
        return codec_of(tokenizer, chat=self.chat)

    def load_model(self, seed: int, alphabet: Alphabet) -> PreTrainedModel:
        """The model on the CPU, in training mode. `seed` (the run's) decides on weights that are drawn.

        Raises ValueError if the model can't be had.
        """
        raise NotImplementedError

    def load_in_parts(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model with weights of `dtype` that stay in their files until they are dealt out (see
        `models.shards`).

        Raises ValueError if the model can't be had, and NotInParts where its weights don't lie in files as
        the model has them.
        """
        from treetune.exceptions import NotInParts

        raise NotInParts("its weights are drawn, and not read from files")


@ModelSource.register("tiny")
@dataclass(frozen=True, kw_only=True)
class TinyModel(ModelSource):
    """A Llama with random weights over the task's characters, small enough to train on a laptop: in float32,
    with 0.86 million parameters by default.
    """

    layers: Annotated[int, Gt(0)] = 4
    """Transformer blocks."""
    hidden_size: Annotated[int, Gt(0)] = 128
    """Width of the residual stream."""
    heads: Annotated[int, Gt(0)] = 4
    """Attention heads, which divide `hidden_size`."""
    intermediate_size: Annotated[int, Gt(0)] = 384
    """Width of the MLPs."""
    context_length: Annotated[int, Gt(0)] = 256
    """Bound of prompt and response together, in tokens."""
    alphabet: Annotated[str, MinLen(1)] | None = None
    """The characters of its tokenizer; None: the task's own."""
    tie_word_embeddings: bool = False
    """Whether the head is the embeddings' transpose."""
    rope_theta: Annotated[float, Gt(0)] = 10_000.0
    """Base of the rotary embeddings."""
    added_tokens: tuple[str, ...] = ()
    """Texts that are one token each beside them, whose characters need not be in the alphabet."""
    chat: Chat | None = None
    """A chat around every problem, with a `template` of its own."""

    def __post_init__(self) -> None:
        check_tokens(self.added_tokens)
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is no multiple of heads {self.heads}")
        head_dim = self.hidden_size // self.heads
        if head_dim < MIN_HEAD_DIM or head_dim % 2:
            raise ValueError(
                f"hidden_size / heads is {head_dim}; the engine needs an even head dimension of at least "
                f"{MIN_HEAD_DIM}: with {self.heads} heads, "
                f"a hidden_size of {MIN_HEAD_DIM * self.heads} or more"
            )

    @property
    @override
    def longest(self) -> int:
        return self.context_length

    @override
    def prompt_tokens(self, prompts: Sequence[str]) -> list[int]:
        return character_tokens(prompts, self.added_tokens)

    @override
    def single_tokens(self) -> frozenset[str]:
        return frozenset(self.added_tokens)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        more_tasks = [held_out.task for held_out in experiment.evaluation.sets if held_out.task is not None]
        known = self.alphabet
        for task in [experiment.task, *more_tasks]:
            try:
                needed = task.alphabet()
            except ValueError as error:
                if known is None and task is experiment.task:
                    yield Finding.of(
                        error, "alphabet", "name its characters, or choose the model 'pretrained'"
                    )
                continue
            known = needed if known is None else known
            if lacking := sorted(set(needed) - set(known)):
                yield Finding(
                    f"the model's alphabet lacks {', '.join(map(repr, lacking))}, which the task's problems"
                    " or answers have",
                    "alphabet",
                    "add them to model.alphabet, or set it to null for the task's own",
                )

    @override
    def shape(self, alphabet: Alphabet) -> Shape:
        characters = len(set(self.alphabet or alphabet()))
        return Shape(
            hidden=self.hidden_size,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.hidden_size // self.heads,
            intermediate=self.intermediate_size,
            vocabulary=characters + len((PAD, EOS)) + len(self.added_tokens),
            tied=self.tie_word_embeddings,
            source="the configuration",
        )

    @override
    def load_tokenizer(self, alphabet: Alphabet) -> PreTrainedTokenizerBase:
        tokenizer = character_tokenizer(self.alphabet or alphabet(), self.context_length)
        add_tokens(tokenizer, self.added_tokens)
        return tokenizer

    @override
    def load_model(self, seed: int, alphabet: Alphabet) -> PreTrainedModel:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = self.load_tokenizer(alphabet)
        config = LlamaConfig(
            architectures=[LlamaForCausalLM.__name__],
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=self.context_length,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=self.tie_word_embeddings,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "model"))
            return LlamaForCausalLM(config).float().train()
