"""Tools that a policy may call between the parts of its answer: Python in the sandbox, a search over
texts."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, MinLen

from treetune.config.registrable import Registrable
from treetune.tasks.graders.base import Unavailable
from treetune.tasks.sources import json_lines
from treetune.vocabulary import Problem
from treetune_domains.environments.base import Again, Environment, Reward, Turn
from treetune_domains.extras import missing_extras
from treetune_domains.sandbox.base import SandboxUnavailable
from treetune_domains.sandbox.python_tool import PythonTool

RESULT = "{result}"

_OLD = "treetune.tasks.environments.tools.environment"  # snapshots of version 0.1 hold its class `Calls`
vars(sys.modules.setdefault(_OLD, ModuleType(_OLD))).update(Calls=SimpleNamespace)


class Tool(Registrable):
    """Answers calls of a policy, text for text. Sub-classes are frozen dataclasses, picklable, and forget
    each call."""

    name: str
    """The name by which the policy calls it."""

    def prepare(self) -> None:
        """Called once in each worker process, before the deadlines begin: slow imports and indices belong
        here."""

    def missing(self) -> Sequence[str]:
        """Returns messages about missing requirements, each with its remedy."""
        return ()

    def call(self, argument: str) -> str:
        """Returns the result as the policy reads it.

        Raises `Unavailable` where a requirement is missing; a fault of the argument is a result.
        """
        raise NotImplementedError


@Tool.register("python")
@dataclass(frozen=True, kw_only=True)
class Python(Tool):
    """Runs code, in a sandbox of its own for each call, and returns its output and the value of its last
    line, or the traceback."""

    name: str = "python"
    console: PythonTool = field(default_factory=PythonTool)
    """The sandbox, its limits, and how much of the output is kept."""

    def missing(self) -> Sequence[str]:
        return self.console.sandbox.missing()

    def call(self, argument: str) -> str:
        try:
            return self.console.run(argument)
        except SandboxUnavailable as error:
            raise Unavailable(str(error)) from error


@Tool.register("search")
@dataclass(frozen=True, kw_only=True)
class Search(Tool):
    """Finds the passages that fit the words best: BM25 (Robertson and Zaragoza 2009), by the
    library bm25s. The index is made when a worker process starts."""

    corpus: Annotated[tuple[str, ...], MinLen(1)]
    """Files of JSON lines, each with a passage, and perhaps a `title`."""
    name: str = "search"
    results: Annotated[int, Gt(0)] = 3
    """Passages of a result."""
    characters: Annotated[int, Gt(0)] = 500
    """Characters of each passage."""
    text: str = "text"
    """The key of a passage in its row."""

    def missing(self) -> Sequence[str]:
        absent = missing_extras("the tool search", "bm25s")
        files = [name for name in self.corpus if not Path(name).is_file()]
        return [*absent, *(f"{name} isn't there, which is searched" for name in files)]

    def prepare(self) -> None:
        _index(self.corpus, self.text)

    def call(self, argument: str) -> str:
        import bm25s

        index, passages = _index(self.corpus, self.text)
        words = bm25s.tokenize([argument], stopwords=None, show_progress=False, return_ids=False)
        if not words[0]:
            return "Nothing was asked for."
        count = min(self.results, len(passages))
        indices, scores = index.retrieve(words, k=count, show_progress=False)
        fitting = [passages[i] for i, score in zip(indices[0], scores[0], strict=True) if score > 0]
        if not fitting:
            return "Nothing was found."
        return "\n".join(f"({number}) {one[: self.characters]}" for number, one in enumerate(fitting, 1))


@lru_cache(maxsize=4)
def _index(files: tuple[str, ...], key: str) -> tuple[Any, Sequence[str]]:
    """Reads and indexes passages. Raises ValueError for a row without one, and for no row at all."""
    import bm25s

    passages = []
    for name in files:
        for place, row in json_lines(Path(name)):
            text = row.get(key)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{place}: it has no text under {key!r}")
            title = row.get("title")
            passages.append(f"{title}: {text}" if title else text)
    if not passages:
        raise ValueError(f"there is nothing to search in {', '.join(files)}")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, stopwords=None, show_progress=False), show_progress=False)
    return index, passages


@Environment.register("tools")
@dataclass(frozen=True, kw_only=True)
class Tools(Environment):
    """Answers a turn that calls a tool with its result; a turn without a call is the answer, which the task's
    grader judges.

    By itself a call is the tool's name as a tag with the argument in it, ``<python>print(6 * 7)</python>``;
    the first one counts. With the end tag among the rollout's `stop`, a turn ends with its call. The prompt
    has to tell the policy of its tools.

    Results are not certain to be the same again (programs may draw numbers, and have time limits), so that
    answers go on from copies.
    """

    tools: Annotated[tuple[Tool, ...], MinLen(1)]
    """The tools that the policy may call in each of its turns."""
    call: str | None = None
    """Another pattern of calls: a regular expression with a group `argument` and, unless there is but one
    tool, a group `tool`."""
    answer: str = f"<result>\n{RESULT}\n</result>"
    """The text that the policy reads, with ``{result}`` in it."""
    most_calls: Annotated[int, Gt(0)] | None = None
    """Calls of an answer; the next one is answered that there are none left."""
    deadline: Annotated[float, Gt(0)] = 30.0
    """Seconds for one call; tools have shorter limits of their own."""

    again: ClassVar[Again] = "copy"
    earns: ClassVar[Reward] = "grader"

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two tools are called {', '.join(twice)}: give each a name of its own")
        if RESULT not in self.answer:
            raise ValueError(f"answer is {self.answer!r}, which leaves the result out: put {RESULT} into it")
        if self.call is not None:
            try:
                groups = re.compile(self.call).groupindex
            except re.error as error:
                raise ValueError(f"call is {self.call!r}, which is no regular expression: {error}") from error
            lacking = [name for name in ("argument", "tool")[: len(names)] if name not in groups]
            if lacking:
                raise ValueError(
                    f"call is {self.call!r}, which lacks a group (?P<{lacking[0]}>…): give it one"
                )

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        if self.call is not None:
            return re.compile(self.call)
        names = "|".join(re.escape(tool.name) for tool in self.tools)
        # The end tag may be the stop string, which isn't shown.
        return re.compile(rf"<(?P<tool>{names})>(?P<argument>.*?)(?:</(?P=tool)>|\Z)", re.DOTALL)

    def prepare(self) -> None:
        for tool in self.tools:
            tool.prepare()

    def missing(self) -> Sequence[str]:
        return [words for tool in self.tools for words in tool.missing()]

    def reset(self, problem: Problem, seed: int) -> SimpleNamespace:
        return SimpleNamespace(made=0)

    def step(self, state: SimpleNamespace, action: str) -> Turn:
        call = self._pattern.search(action)
        if call is None:
            return Turn(done=True)
        state.made += 1
        if self.most_calls is not None and state.made > self.most_calls:
            return Turn(self.answer.replace(RESULT, "There are no calls left: give your answer."))
        groups = call.groupdict()
        tools = {tool.name: tool for tool in self.tools}
        name = groups.get("tool") or self.tools[0].name
        if name in tools:
            result = tools[name].call(groups["argument"] or "")
        else:
            result = f"There is no tool {name}; there is {', '.join(tools)}."
        return Turn(self.answer.replace(RESULT, result.rstrip("\n")))
