"""Makes tokenizers of characters for tiny models, adds tokens, and makes the codec between token ids and
text.

Responses are never encoded, since their sampled token ids are trained. `step_ends` finds the tokens at which
the steps of a decoded text end.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from treetune.models.chat import (
    TOOL_RESULT,
    Chat,
    chat_conversation,
    chat_frame,
    end_of_turn,
    refuse_no_template,
    turn_frame,
    turn_markers,
    user_message,
)
from treetune.models.control_tokens import ControlTokens, special_tokens
from treetune.vocabulary import TextCodec, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

T = TypeVar("T")

PAD = "<pad>"
EOS = "<eos>"

_BRACKETS = (("<", ">"), ("⟨", "⟩"))
"""Brackets around the names of special tokens. The second pair is for alphabets that have the characters of
the first."""

ROWS_MULTIPLE = 64
"""If a table of embeddings has to grow, the number of its rows becomes a multiple of this number, which makes
matrix products faster."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character that decoders write for bytes that are not a complete character."""


def character_tokenizer(alphabet: str, context_length: int) -> PreTrainedTokenizerFast:
    """Makes a tokenizer in Hugging Face format: id 0 pads, id 1 ends, and the alphabet follows in its order.

    The tokenizer is saved as ``tokenizer.json``, which AutoTokenizer and vLLM load without code of this
    project. Text over the alphabet is encoded without loss. Encoding raises an error for other characters.

    The special tokens are `PAD` and `EOS`. Text that spells a special token would be encoded as this token.
    So if the alphabet has all characters of `PAD` or of `EOS`, both get other brackets.

    Raises:
        ValueError: The alphabet is empty or repeats a character, or can spell special tokens with any of the
            brackets.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise ValueError("the alphabet is empty: the task must list every character that it uses")
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if repeated:
        raise ValueError(f"the alphabet {alphabet!r} has {', '.join(map(repr, repeated))} more than once")
    for opening, closing in _BRACKETS:
        # `PAD` and `EOS` with these brackets in place of their first and last characters.
        pad, eos = (f"{opening}{name[1:-1]}{closing}" for name in (PAD, EOS))
        can_be_spelled = set(pad) <= set(alphabet) or set(eos) <= set(alphabet)
        if not can_be_spelled:
            break
    else:
        raise ValueError(f"the alphabet {alphabet!r} has all characters of {PAD!r} and {pad!r}: remove one")
    vocabulary = {token: index for index, token in enumerate([pad, eos, *alphabet])}
    # There is no unknown token. With one, a character outside of the alphabet would silently become this
    # token, which would then be trained on.
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        eos_token=eos,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


# Tokens that are added to a model's vocabulary, such as the tags around threads. If a tokenizer cut a tag
# into pieces, the tag couldn't end a sample, couldn't be counted, and couldn't be distinguished from its
# word. So each tag becomes one token. These tokens are not special, so decoded text contains them.


def check_tokens(tokens: Sequence[str]) -> None:
    """Raises ValueError for tokens that can't be added: empty ones, ones with white space, and repeated
    ones."""
    for token in tokens:
        if not token or any(character.isspace() for character in token):
            raise ValueError(f"added_tokens has {token!r}: a token needs characters, and no white space")
    repeated = sorted({token for token in tokens if tokens.count(token) > 1})
    if repeated:
        raise ValueError(f"added_tokens has {', '.join(map(repr, repeated))} more than once")


def missing_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> tuple[str, ...]:
    """Returns the tokens that the tokenizer doesn't have yet, in their order."""
    vocabulary = tokenizer.get_vocab()
    return tuple(token for token in tokens if token not in vocabulary)


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Adds tokens to the tokenizer.

    Wherever a text contains the text of an added token, this part is encoded as the one token. Decoding gives
    the same text again. New tokens get the next ids.

    Raises:
        ValueError: One of `tokens` is a special token of the tokenizer. Decoded text doesn't contain special
            tokens.
    """
    from tokenizers import AddedToken

    special_tokens = []
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and str(token) in tokens:
            special_tokens.append(str(token))
    if special_tokens:
        raise ValueError(
            f"model.added_tokens has {', '.join(map(repr, special_tokens))}, which is a special token of the"
            " tokenizer, and the text of an answer doesn't contain those: leave it out, or choose another"
            " name"
        )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])


def word_ids(tokenizer: PreTrainedTokenizerBase, token: str) -> tuple[int, ...]:
    """Returns the ids of the word in a tag: of ``Parallel`` for ``<Parallel>``, and of ``/Parallel`` for
    ``</Parallel>``. The tag must not be a token of the tokenizer yet.

    Raises:
        ValueError: The tokenizer can't encode the word.
    """
    word = token.removeprefix("<").removesuffix(">")
    reason: Exception | str = "it has no tokens for the word"
    try:
        ids = tuple(tokenizer.encode(word, add_special_tokens=False))
    except Exception as error:  # the tokenizers library raises no narrower one
        ids, reason = (), error
    if not ids or tokenizer.unk_token_id in ids:
        raise ValueError(
            f"model.added_tokens has {token!r}, whose embedding would be the mean of the tokens of {word!r},"
            f" and the tokenizer can't encode that word: {reason}"
        )
    return ids


def embed_tokens(model: PreTrainedModel, ids_of_words: Mapping[int, tuple[int, ...]]) -> None:
    """Initialises the rows of new tokens in the embeddings and in the head, in place. Other rows stay the
    same, and tied weights stay tied.

    A new token is a tag such as ``<Parallel>``. Its row becomes the mean of the rows of the old tokens that
    spell its word, ``Parallel``.

    If the tables are too small, they grow to a multiple of 64 rows. The added rows that have no token get the
    mean of all old rows. The logit of such a row is the mean of the old logits. So, by Jensen's inequality,
    its probability is at most the mean of the old tokens' probabilities.

    Args:
        ids_of_words: By the id of each new token, the ids of the old tokens that spell its word (`word_ids`).

    Raises:
        ValueError: The model has fewer rows than the tokenizer has old tokens.
    """
    import torch

    if not ids_of_words:
        return
    rows = model.get_input_embeddings().num_embeddings
    if min(ids_of_words) > rows:  # the new ids begin where the old tokens end
        raise ValueError(
            f"the model embeds {rows} tokens, and its tokenizer has {min(ids_of_words)} without those of"
            " model.added_tokens: they don't belong together"
        )
    grows = max(ids_of_words) >= rows
    if grows:
        with torch.random.fork_rng(devices=[]):  # new rows get random values here, which are replaced below
            model.resize_token_embeddings(
                max(ids_of_words) + 1, pad_to_multiple_of=ROWS_MULTIPLE, mean_resizing=False
            )
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight]
    for table in (getattr(head, "weight", None), getattr(head, "bias", None)):
        if table is not None and table is not tables[0]:  # the head may be tied to the embeddings
            tables.append(table)
    with torch.no_grad():
        for table in tables:
            if grows:
                table[rows:] = table[:rows].mean(0, dtype=torch.float32).to(table.dtype)
            for new_id, old_ids in ids_of_words.items():
                table[new_id] = table[list(old_ids)].mean(0, dtype=torch.float32).to(table.dtype)


def codec_of(
    tokenizer: PreTrainedTokenizerBase,
    *,
    begin_of_text: bool | None = None,
    chat: Chat | None = None,
    end_ids: Sequence[int] = (),
) -> TextCodec:
    """Returns the codec of a Hugging Face tokenizer.

    Encoding adds no special tokens, and decoding leaves special tokens out. The codec's `encode` raises
    ValueError for text that the tokenizer can't encode. In a chat, text of a problem that looks like a
    control token is encoded by its characters.

    Args:
        begin_of_text: Whether each prompt begins with one begin-of-text token. With None, the chat template
            decides, or without `chat` the tokenizer.
        chat: The settings of the chat template; None: prompts are plain text. Answers end with the template's
            end of turn, or without `chat` with the tokenizer's end token. A sample ends at either token.
        end_ids: Further tokens that end a sample.

    Raises:
        ValueError: The tokenizer has no end token, or lacks the begin-of-text token or the chat template that
            the arguments ask for.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no end token")
    if chat is not None and chat.template is not None:
        tokenizer.chat_template = chat.template  # checkpoints keep it with the tokenizer
    end_of_turn_id = None
    control = ControlTokens(tokenizer)
    left_out_markers: frozenset[int] = frozenset()
    if chat is not None:
        refuse_no_template(tokenizer)
        end_of_turn_id = end_of_turn(tokenizer, chat)
        control = ControlTokens(tokenizer, turn_markers(tokenizer, chat))
        # A marker is a token that the template writes around turns. Decoding leaves out special tokens. Other
        # markers are left out by `decode` itself.
        left_out_markers = frozenset(control.ids.values()) - frozenset(special_tokens(tokenizer).values())

    decode = _make_decoder(tokenizer, left_out_markers)
    bos_id = tokenizer.bos_token_id
    if begin_of_text and bos_id is None:
        raise ValueError(
            f"model.begin_of_text is true, but the tokenizer of {tokenizer.name_or_path!r} has no token for"
            " the beginning of text: leave it out"
        )
    has_begin_token = begin_of_text
    if begin_of_text is None and chat is None:  # with a chat, the template writes the token or doesn't
        has_begin_token = bos_id is not None and tokenizer("")["input_ids"][:1] == [bos_id]
    eos_id = tokenizer.eos_token_id if end_of_turn_id is None else end_of_turn_id
    codec = TextCodec(
        encode=_make_encoder(tokenizer, control),
        decode=decode,
        eos_id=int(eos_id),
        end_ids=tuple(dict.fromkeys(map(int, (eos_id, tokenizer.eos_token_id, *end_ids)))),
        frame=str,  # writes nothing around a prompt; `_add_chat` replaces it
        begin=(int(bos_id),) if has_begin_token else (),
        decode_all=lambda token_ids: decode(token_ids, skip=False),
    )
    if chat is None:
        return codec
    return _add_chat(codec, tokenizer, chat, control, begin_of_text, end_ids)


def _make_encoder(
    tokenizer: PreTrainedTokenizerBase, control: ControlTokens
) -> Callable[[str], tuple[int, ...]]:
    """Returns the function for `TextCodec.encode`.

    In a text for this function, marks have replaced text of a problem that looks like a control token. The
    function encodes such text by its characters, so that it doesn't become the control token.
    """

    def encode(text: str) -> tuple[int, ...]:
        try:
            # A mark is a character that stands for text of a problem that looks like a control token.
            if control.is_marked(text):
                return tuple(control.encode(text))
            return tuple(tokenizer.encode(text, add_special_tokens=False))
        except ValueError:
            raise  # of `ControlTokens.encode`, whose message says enough
        except Exception as error:
            # The tokenizers library raises bare Exception, e.g. for a character outside a small alphabet.
            raise ValueError(f"the tokenizer cannot encode {control.unmark(text)!r}: {error}") from error

    return encode


def _make_decoder(tokenizer: PreTrainedTokenizerBase, left_out_markers: frozenset[int]) -> Callable[..., str]:
    """Returns the function for `TextCodec.decode`.

    Unless it is called with ``skip=False``, it leaves out special tokens and `left_out_markers`: other tokens
    that a chat template writes around turns.
    """
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None

    def decode(token_ids: Sequence[int] | TokenIds, skip: bool = True) -> str:
        ids = to_list(token_ids)
        if skip and left_out_markers:
            ids = [token_id for token_id in ids if token_id not in left_out_markers]
        if backend is not None:
            # Ten times faster than `tokenizer.decode`. The text is the same: neither call cleans up spaces.
            return str(backend.decode(ids, skip_special_tokens=skip))
        return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    return decode


def _add_chat(
    codec: TextCodec,
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    control: ControlTokens,
    begin_of_text: bool | None,
    end_ids: Sequence[int],
) -> TextCodec:
    """Returns the codec with the chat template around prompts, replies and tools; see `codec_of`."""
    # A template may write the begin-of-text token as text. If `begin_of_text` is True or False, the codec
    # decides about this token, and the template's text of it is removed. With None, the text stays.
    begin_text = "" if begin_of_text is None or tokenizer.bos_token is None else str(tokenizer.bos_token)

    def without_begin(text_of: Callable[[T], str]) -> Callable[[T], str]:
        return lambda prompt: text_of(prompt).removeprefix(begin_text)

    # A frame is the text that the template writes around messages. `turn_frame` refuses a template that can't
    # render several turns. So it is called only when a frame between two turns is needed.
    @cache
    def frame_between_turns(role: str) -> Callable[[Sequence[Mapping[str, str]]], str]:
        example = user_message("2 + 2?") if role == "user" else TOOL_RESULT
        return turn_frame(tokenizer, chat, [example], control)

    def frame_of(reply: str | Sequence[Mapping[str, str]]) -> str:
        messages = [user_message(reply)] if isinstance(reply, str) else reply
        frame_messages = frame_between_turns(messages[0]["role"])
        return frame_messages(messages)

    def with_tools(tools: Sequence[Mapping[str, Any]]) -> TextCodec:
        if not re.search(r"\btools\b", str(tokenizer.chat_template)):
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} has no place for tools, and the"
                " environment's format calls tools natively: leave the format at 'tags', or set another"
                " template in chat.template"
            )
        arguments = {**chat.template_arguments, "tools": [dict(tool) for tool in tools]}
        chat_with_tools = replace(chat, template_arguments=arguments)
        return codec_of(tokenizer, begin_of_text=begin_of_text, chat=chat_with_tools, end_ids=end_ids)

    return replace(
        codec,
        frame=without_begin(chat_frame(tokenizer, chat, control)),
        conversation=without_begin(chat_conversation(tokenizer, chat, control)),
        unmark=control.unmark,  # turns the marks of `ControlTokens` back into the problem's text
        turn_frame=frame_of,
        with_tools=with_tools,
    )


def to_list(token_ids: Sequence[int] | TokenIds) -> list[int]:
    """Returns the ids as Python integers, which tokenizers need."""
    return token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)


def step_ends(
    token_ids: Sequence[int] | TokenIds, boundaries: Sequence[int], codec: TextCodec, text: str
) -> tuple[int, ...]:
    """Returns the token offsets at which steps end, from their character offsets in the decoded `text`.

    * A token belongs to the step in which it begins, also if the token continues beyond the step's end.
    * A step in which no token begins is dropped.
    * The end token belongs to the last step. If the boundaries end with the text's length twice, the last
      step is empty but for the end token.

    Args:
        boundaries: The character offsets at which steps begin and end. They rise from 0 to the length of the
            text (`Task.step_boundaries`).

    Returns:
        Offsets that rise strictly and end with the number of tokens; empty only if there are no tokens.

    Raises:
        ValueError: The boundaries don't cover the text.
    """
    if not boundaries or boundaries[0] != 0 or boundaries[-1] != len(text):
        raise ValueError(f"step boundaries {list(boundaries)} don't cover a text of {len(text)} characters")
    offsets = token_offsets(token_ids, codec, text)
    # A step ends before the first token that begins at the boundary or after it. The end token begins at the
    # end of the text.
    inner_ends = {bisect_left(offsets, boundary) for boundary in boundaries[1:-1]}
    ends = inner_ends | {len(token_ids)}
    return tuple(sorted(ends - {0}))  # a step that ends before the first token has no tokens


def token_offsets(token_ids: Sequence[int] | TokenIds, codec: TextCodec, text: str) -> Sequence[int]:
    """Returns for each token the offset in `text` (``codec.decode(token_ids)``) of the character that it
    begins or continues. Offsets never decrease.

    If a character consists of several tokens (the bytes of an emoji), all of them have its offset. A special
    token, which has no text, has the offset of the next character. The offsets are exact for any tokenizer.

    Example: for ``12 + 3``, cut into ``12``, `` +`` and `` 3``, they are ``[0, 2, 4]``.
    """
    ids = to_list(token_ids)
    text_by_id = _texts_of_tokens(codec.decode)  # filled by all calls with this codec
    for token_id in ids:
        if token_id not in text_by_id:
            text_by_id[token_id] = codec.decode([token_id])
    parts = [text_by_id[token_id] for token_id in ids]
    # If the text has incomplete characters, the lengths could add up by chance.
    if _REPLACEMENT not in text and "".join(parts) == text:
        ends = itertools.accumulate(map(len, parts))
        return [0, *ends][: len(parts)]  # each token begins where the one before it ends
    # The texts of single tokens don't add up: a character consists of several tokens, or the decoder joins
    # words or strips the space of the first one. So every prefix is decoded from a token shortly before its
    # end.
    offsets = _offsets_by_window(ids, codec, text)
    if offsets is not None:
        return offsets
    # This takes quadratic time, and is right for every tokenizer: a token's offset is the length of the
    # common beginning of two texts, the whole text and that of the tokens before this one.
    common_lengths = (_count_common_characters(codec.decode(ids[:end]), text) for end in range(len(ids)))
    return list(itertools.accumulate(common_lengths, max))


@lru_cache(maxsize=4)
def _texts_of_tokens(decode: Callable[[Sequence[int]], str]) -> dict[int, str]:
    """Returns a dictionary for the text of each token by itself, which the caller fills. The next call with
    the same function returns the same dictionary."""
    return {}


def _offsets_by_window(token_ids: Sequence[int], codec: TextCodec, text: str) -> list[int] | None:
    """Finds the offsets by decoding each token with only the last few before it, so that the work is linear.

    The tokens are cut into runs. A run ends at the first token after which its text ends on a whole
    character. A window is the last finished run, followed by the tokens of the present run so far. The
    present run is decoded together with the finished one, since some decoders treat the first token in a
    special way.

    Returns:
        None if the decoded windows don't add up to `text`.
    """
    offsets: list[int] = []
    window_start = 0  # the first token of the window
    run_start = 0  # the first token of the present run
    finished_chars = 0  # the number of characters of all finished runs
    whole_chars = 0  # the number of whole characters of all tokens so far
    finished_text = ""  # the text of the window's finished run
    window = ""  # the text of the whole window
    for end in range(1, len(token_ids) + 1):
        offsets.append(whole_chars)
        window = codec.decode(token_ids[window_start:end])
        if not window.startswith(finished_text):
            return None
        run_text = window[len(finished_text) :]  # of the present run
        # The characters of the present run that agree with `text`. If the run's last tokens are a part of a
        # character, they are decoded as a replacement character, which is not the one in `text`.
        expected_text = text[finished_chars : finished_chars + len(run_text)]
        n_equal = _count_common_characters(run_text, expected_text)
        whole_chars = max(whole_chars, finished_chars + n_equal)
        is_run_finished = not window.endswith(_REPLACEMENT)
        if is_run_finished:
            finished_chars += len(run_text)
            if whole_chars != finished_chars:  # the run's text differs from `text`
                return None
            # The next window begins with this run, and the next run after it.
            window_start, run_start = run_start, end
            finished_text = codec.decode(token_ids[window_start:run_start])
    # If the last tokens end within a character, their run was never finished.
    unfinished_text = window[len(finished_text) :] if run_start < len(token_ids) else ""
    return offsets if text[finished_chars:] == unfinished_text else None


def _count_common_characters(text: str, other_text: str) -> int:
    """Returns the length of the beginning that two texts share."""
    if other_text.startswith(text):  # the most frequent case, without a loop over characters
        return len(text)
    for index, (character, other_character) in enumerate(zip(text, other_text)):
        if character != other_character:
            return index
    return min(len(text), len(other_text))
