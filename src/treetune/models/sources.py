"""Defines the sources of start models, and the source that makes a tiny model with random weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, MinLen
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Experiment, Finding
from treetune.exceptions import NotInParts
from treetune.models.chat import Chat
from treetune.models.shapes import Shape
from treetune.models.tokenizer import EOS, PAD, add_tokens, character_tokenizer, check_tokens, codec_of
from treetune.seeds import derive_seed
from treetune.vocabulary import TextCodec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Alphabet = Callable[[], str]
"""The method `Task.alphabet`. The method is passed, and not its result, since only a model that makes its own
tokenizer needs the characters, and some tasks have none."""

MIN_HEAD_DIM = 32
"""The smallest head dimension of vLLM's attention on a CPU. The engine crashes with smaller ones."""


def character_tokens(texts: Sequence[str], single_tokens: Sequence[str]) -> list[int]:
    """Counts the tokens of each text, if every character is a token, and so is each text of `single_tokens`.

    Example: ``character_tokens(["1+<a>"], ["<a>"])`` is ``[3]``.
    """
    # A pattern takes the first alternative that matches: if "<a>" came before "<a>b", it would never take
    # "<a>b". So longer texts come first. A single character is the last alternative.
    longest_first = sorted(single_tokens, key=len, reverse=True)
    pattern = re.compile("|".join([*map(re.escape, longest_first), r"[\s\S]"]))
    return [len(pattern.findall(text)) for text in texts]


class ModelSource(Registrable):
    """The model and the tokenizer that an experiment starts from."""

    chat: Chat | None = None
    """The chat around problems; null: the prompt is the problem's text."""

    @property
    def longest(self) -> int | None:
        """The most tokens of prompt and response together that the model supports; None if that isn't known
        without loading it."""
        return None

    def prompt_tokens(self, prompts: Sequence[str]) -> list[int] | None:
        """Returns the number of tokens of each prompt; None if that isn't known without loading the
        tokenizer."""
        return None

    def single_tokens(self) -> frozenset[str] | None:
        """Returns the texts, such as tags, that are one token each; None if that isn't known without loading
        the tokenizer."""
        return None

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        longest = self.longest
        if longest is not None and longest < experiment.context_length:
            yield Finding(
                f"the model was made for {longest} tokens, and context_length is {experiment.context_length}",
                "$.context_length",
                f"lower it to {longest} or less, or choose a model with a longer context",
            )

    def check_at_start(self) -> None:
        """Raises ValueError if the model certainly can't be loaded. It imports nothing slow.

        The reasons are those that `check` reports at the level "missing". Commands call this method before
        they load anything, for the experiment's model and for the models in the settings of its credit.
        """

    def identity(self) -> Mapping[str, str]:
        """Returns names and digests of the model's files, by which a resumed run sees whether they have
        changed; empty if the configuration determines the model. Raises ValueError if the model doesn't
        exist."""
        return {}

    def shape(self, alphabet: Alphabet) -> Shape | None:
        """Returns the model's sizes; None if they aren't known without loading it. Raises ValueError if the
        model doesn't exist."""
        return None

    def load_tokenizer(self, alphabet: Alphabet) -> PreTrainedTokenizerBase:
        """Returns a tokenizer with an end token and a padding token. Raises ValueError if it can't be
        loaded."""
        raise NotImplementedError

    def unlearned_tokens(self) -> tuple[str, ...]:
        """Returns the added tokens that the model didn't have. Their embeddings are new, and begin as means
        of the embeddings of other tokens. Raises ValueError as `load_tokenizer` does."""
        return ()

    def codec(self, tokenizer: PreTrainedTokenizerBase) -> TextCodec:
        """Returns the codec between text and token ids. Raises ValueError if the tokenizer has no token for
        the end of an answer."""
        return codec_of(tokenizer, chat=self.chat)

    def load_model(self, seed: int, alphabet: Alphabet) -> PreTrainedModel:
        """Returns the model on the CPU, in training mode. Raises ValueError if it can't be loaded.

        Args:
            seed: The run's seed. A source without files draws random weights with it.
        """
        raise NotImplementedError

    def load_in_parts(self, dtype: torch.dtype) -> PreTrainedModel:
        """Returns the model with weights that stay in their files until they are sharded (see
        `models.shards`). A source that reads files overrides this. The weights of any other source are random
        numbers, so there are no files.

        Raises:
            ValueError: The model can't be loaded.
            NotInParts: The files don't have the weights under the names and in the form of the model.
        """
        raise NotInParts("its weights are drawn, and not read from files")


@ModelSource.register("tiny")
@dataclass(frozen=True, kw_only=True)
class TinyModel(ModelSource):
    """A Llama with random weights, whose tokens are the task's characters: small enough to train on a laptop,
    in float32, by default with 0.86 million parameters."""

    layers: Annotated[int, Gt(0)] = 4
    """The number of transformer blocks."""
    hidden_size: Annotated[int, Gt(0)] = 128
    """Width of the residual stream."""
    heads: Annotated[int, Gt(0)] = 4
    """The number of attention heads, which divides `hidden_size`."""
    intermediate_size: Annotated[int, Gt(0)] = 384
    """Width of the MLPs."""
    context_length: Annotated[int, Gt(0)] = 256
    """The most tokens of prompt and response together."""
    alphabet: Annotated[str, MinLen(1)] | None = None
    """The characters that are tokens; null: the task's."""
    tie_word_embeddings: bool = False
    """Whether the head is the embeddings' transpose."""
    rope_theta: Annotated[float, Gt(0)] = 10_000.0
    """The base of the rotary embeddings."""
    added_tokens: tuple[str, ...] = ()
    """Texts that are one token each. Their characters need not be in the alphabet."""
    chat: Chat | None = None
    """The chat around problems. It needs a `template`, since the tokenizer has none."""

    def __post_init__(self) -> None:
        check_tokens(self.added_tokens)
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of heads {self.heads}")
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
        evaluation_sets = experiment.evaluation.sets
        tasks_to_compare = [each_set.task for each_set in evaluation_sets if each_set.task is not None]
        alphabet = self.alphabet
        if alphabet is not None:
            tasks_to_compare.insert(0, experiment.task)
        else:
            try:
                alphabet = experiment.task.alphabet()
            except ValueError as error:
                yield Finding.of(error, "alphabet", "list its characters, or choose the model 'pretrained'")
                return  # there is no alphabet with which to compare the tasks of the evaluation sets
        for task in tasks_to_compare:
            try:
                characters = task.alphabet()
            except ValueError:
                continue  # a task in natural language has no alphabet to compare
            missing = sorted(set(characters) - set(alphabet))
            if missing:
                yield Finding(
                    f"the model's alphabet doesn't have {', '.join(map(repr, missing))}, which the task's"
                    " problems or answers contain",
                    "alphabet",
                    "add them to model.alphabet, or set it to null for the task's characters",
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
