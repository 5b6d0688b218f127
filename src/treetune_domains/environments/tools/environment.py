"""Tools as an environment: a turn that calls one is answered with its result, any other is the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from annotated_types import Gt, MinLen

from treetune.vocabulary import Problem
from treetune_domains.environments.base import Again, Environment, Reward, Turn
from treetune_domains.environments.tools.base import Tool

RESULT = "{result}"


@dataclass
class Calls:
    """How many there were."""

    made: int = 0


@Environment.register("tools")
@dataclass(frozen=True, kw_only=True)
class Tools(Environment):
    """`tools` that the policy may call in each of its turns; a turn without a call is the answer, which the
    task's grader judges.

    By itself a call is the tool's name as a tag with the argument in it, ``<python>print(6 * 7)</python>``;
    the first one counts. With the end tag among the rollout's `stop`, a turn ends with its call. The prompt
    has to tell the policy of its tools.

    Results can't be had the same again for certain (programs may draw numbers, and have time limits), so that
    answers go on from copies.
    """

    tools: Annotated[tuple[Tool, ...], MinLen(1)]
    call: str | None = None
    """Another pattern of calls: a regular expression with a group `argument` and, unless there is but one
    tool, a group `tool`."""
    answer: str = f"<result>\n{RESULT}\n</result>"
    """What the policy reads, with ``{result}`` in it."""
    most_calls: Annotated[int, Gt(0)] | None = None
    """After so many, the next one is told that there are none left."""
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
            _check_pattern(self.call, several=len(names) > 1)

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

    def reset(self, problem: Problem, seed: int) -> Calls:
        return Calls()

    def step(self, state: Calls, action: str) -> Turn:
        found = self._pattern.search(action)
        if found is None:
            return Turn(done=True)
        state.made += 1
        if self.most_calls is not None and state.made > self.most_calls:
            return Turn(self.answer.replace(RESULT, "There are no calls left: give your answer."))
        groups = found.groupdict()
        name = groups.get("tool") or self.tools[0].name
        tool = next((one for one in self.tools if one.name == name), None)
        if tool is None:
            there = ", ".join(one.name for one in self.tools)
            result = f"There is no tool {name}; there is {there}."
        else:
            result = tool.call(groups["argument"] or "")
        return Turn(self.answer.replace(RESULT, result.rstrip("\n")))


def _check_pattern(pattern: str, several: bool) -> None:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"call is {pattern!r}, which is no regular expression: {error}") from error
    lacking = [name for name in ("argument", *(["tool"] if several else [])) if name not in groups]
    if lacking:
        raise ValueError(f"call is {pattern!r}, which lacks a group (?P<{lacking[0]}>…): give it one")
