"""A data set of anybody's becomes rows of the schema that this project trains on."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen

from treetune.config.imports import function_at
from treetune.seeds import derive_seed
from treetune.tasks.base import Split
from treetune.tasks.sources import Source
from treetune_data.base import DataPipeline
from treetune_data.rules.base import Rule
from treetune_data.templates import NoValue, check_text, check_value, text_of, value_of
from treetune_domains.domain_rows import Row, domain_of, domain_row, normalised

_SOURCE = re.compile(r"[a-z][a-z0-9_]*?__\S+")

VERSION = 2
"""Of how rows are made and judged: another one makes all of them anew."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A message of a prompt; `content` is a template."""

    content: Annotated[str, MinLen(1)]
    role: Literal["system", "user", "assistant"] = "user"
    """Who says it."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Rows of the source stay where the expression `where` about their fields is true. `name` is what the
    summary calls it."""

    name: Annotated[str, MinLen(1)]
    where: Annotated[str, MinLen(1)]


@DataPipeline.register("prepare_data")
@dataclass(frozen=True, kw_only=True)
class PrepareData(DataPipeline):
    """Reads a data set, makes rows of the schema of it, and drops those that a rule speaks against.

    Texts (`prompt`, `ground_truth`, `raw_prompt`) are Jinja templates over the fields of a source's row, as
    in ``'{{ question }}'``; values (`extra_info`, `filters`) are Jinja expressions, as in ``metadata.level``,
    and keep their type. `expand` names a function of Python ``module:function`` that is called with a row and
    a seed first, and gives the fields: an object, a list of them for a row that becomes several, or None for
    one that is left out. `instruction` follows the last message. Where `copy` is true, the source has the
    schema already, and texts are not needed.

    The `splits` of the source are read in this order, so that of two equal rows the one to measure on stays;
    `hold_out` moves rows from train to another split, and `sample` bounds a split: both are drawn by `seed`
    and the rows' content. Rules go one after the other.
    """

    data_source: str
    """``<domain>__<name>``, which says how answers are graded."""
    source: Source
    splits: tuple[Split, ...] = ("train",)
    copy: bool = False
    expand: str | None = None
    filters: tuple[Filter, ...] = ()
    prompt: str | tuple[Turn, ...] = ""
    instruction: str = ""
    raw_prompt: str | None = None
    """The whole text that a model continues, where `apply_chat_template` is false; ``{{ prompt }}`` in it is
    what was asked."""
    apply_chat_template: bool = True
    """Whether a model's chat template goes around the prompt."""
    ground_truth: str = ""
    ability: str | None = None
    """What the row asks for; null: its domain."""
    extra_info: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    hold_out: Mapping[Split, Annotated[int, Ge(1)]] = field(default_factory=dict)
    sample: Mapping[Split, Annotated[int, Ge(1)]] = field(default_factory=dict)
    seed: int = 42
    bad_rows: Literal["stop", "drop"] = "stop"
    """What to do with a row that lacks what a template asks for."""

    def __post_init__(self) -> None:
        if not _SOURCE.fullmatch(self.data_source):
            raise ValueError(
                f"data_source is {self.data_source!r}: it should be <domain>__<name>, such as 'math__dapo'"
            )
        if not self.splits or len(set(self.splits)) < len(self.splits):
            raise ValueError("splits names no split, or one twice: name each of the source's once")
        for key, text in self._texts():
            check_text(text, key)
        for name, expression in self.extra_info.items():
            check_value(expression, f"extra_info.{name}")
        for one in self.filters:
            check_value(one.where, f"the filter {one.name!r}")
        if not self.copy and not (self.prompt and self.ground_truth):
            raise ValueError(
                "a row needs a prompt and a ground_truth: give templates for both, such as '{{ question }}',"
                " or set copy to true for a source of this schema"
            )
        if self.copy and (self.prompt or self.ground_truth or self.extra_info or self.raw_prompt):
            raise ValueError(
                "copy takes the source's rows as they are: leave prompt, ground_truth, raw_prompt and"
                " extra_info out, or set copy to false"
            )
        if not self.apply_chat_template and not self.raw_prompt and not self.copy:
            raise ValueError(
                "apply_chat_template is false: say with raw_prompt what the model is given, such as"
                " '{{ prompt }}'"
            )
        if "train" in self.hold_out:
            raise ValueError("hold_out names train, which rows are held out of: name validation or test")

    def _texts(self) -> Iterator[tuple[str, str]]:
        yield "ground_truth", self.ground_truth
        yield "raw_prompt", self.raw_prompt or ""
        turns = [self.prompt] if isinstance(self.prompt, str) else [turn.content for turn in self.prompt]
        yield from (("prompt", text) for text in turns)

    def rows_of(self, fields: Mapping[str, Any]) -> list[Row | str]:
        """The rows that a source's row becomes; in place of one that a filter drops, the filter's name.

        Raises NoValue or ValueError for a row that lacks something.
        """
        expanded: Any = fields
        if self.expand is not None:
            content = repr(sorted(fields.items()))
            expanded = _function(self.expand)(dict(fields), derive_seed(self.seed, content, "expand"))
        if not expanded:
            return ["expand"]
        several = expanded if isinstance(expanded, list) else [expanded]
        return [self._row(one) for one in several]

    def _row(self, fields: Mapping[str, Any]) -> Row | str:
        for one in self.filters:
            if not value_of(one.where, fields):
                return one.name
        if self.copy:
            row = normalised(fields)
            return {**row, "data_source": self.data_source, "ability": self.ability or row["ability"]}
        turns = (Turn(content=self.prompt),) if isinstance(self.prompt, str) else self.prompt
        messages = [{"role": turn.role, "content": text_of(turn.content, fields)} for turn in turns]
        messages[-1]["content"] += self.instruction
        for message in messages:
            if not message["content"].strip():
                raise NoValue(f"the {message['role']}'s message is empty")
        prompt = messages[-1]["content"]
        raw = text_of(self.raw_prompt, {**fields, "prompt": prompt}) if self.raw_prompt else ""
        return domain_row(
            self.data_source,
            messages,
            text_of(self.ground_truth, fields),
            ability=self.ability or domain_of(self.data_source),
            extra_info={name: value_of(text, fields) for name, text in self.extra_info.items()},
            raw_prompt=raw,
            apply_chat_template=self.apply_chat_template,
        )

    def code(self) -> str:
        """The source of the module that `expand` names: rows are made anew when it changes."""
        return (
            "" if self.expand is None else inspect.getsource(sys.modules[_function(self.expand).__module__])
        )

    def run(self, source: Path | None, output: Path, config: dict[str, Any]) -> int:
        from treetune_data.preparing import prepare

        return prepare(self, source, output, config)


_function = functools.cache(function_at)
