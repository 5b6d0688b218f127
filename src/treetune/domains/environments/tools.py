"""Tools that a policy may call between the parts of its answer: Python in the sandbox, a search over texts,
functions of one's own; how it calls them, and how it is answered."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, MinLen
from pydantic import ValidationError, validate_call
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Finding, lacking
from treetune.domains.environments.base import LONGEST_OBSERVATION, Again, Environment, Reward, Turn
from treetune.domains.environments.calls import NATIVE_FORMATS, ToolCall, calls_in, calls_of_turn
from treetune.domains.extras import missing_extras
from treetune.domains.sandbox.python_tool import PythonTool
from treetune.exceptions import Unavailable
from treetune.tasks.graders.base import Isolation
from treetune.tasks.sources import json_lines
from treetune.tasks.thoughts import read_thoughts
from treetune.vocabulary import Problem

RESULT = "{result}"

_OLD = "treetune.tasks.environments.tools.environment"  # snapshots of version 0.1 hold its class `Calls`
vars(sys.modules.setdefault(_OLD, ModuleType(_OLD))).update(Calls=SimpleNamespace)


Functions = Mapping[str, Callable[..., Any]]


class Tool(Registrable):
    """Answers calls of a policy. Sub-classes are frozen dataclasses, picklable.

    The short way to a tool of one's own is `call`: its signature and docstring are the schema that a model is
    shown where it calls natively.
    """

    name: str
    """The name by which the policy calls it."""
    isolation: ClassVar[Isolation] = "process"
    """Where it runs: ``service`` for what all answers of a rank share, as with environments."""
    state: bool = False
    """Whether its `functions` keep something from call to call. They are pickled between turns."""

    def prepare(self) -> None:
        """Called once in each worker process, before the deadlines begin: slow imports and indices belong
        here."""

    def call(self, argument: str) -> str:
        """Returns the result as the policy reads it.

        Raises `Unavailable` where a requirement is missing; anything else that it raises is the result.
        """
        raise NotImplementedError

    def functions(self) -> Functions:
        """Returns what answers the calls of one answer, by name."""
        return {self.name: self.call}

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Returns the JSON schemas of its functions. Raises ValueError for one that doesn't describe itself
        (see transformers' `get_json_schema`)."""
        from transformers.utils.chat_template_utils import get_json_schema

        described = []
        for name, function in self.functions().items():
            try:
                schema = get_json_schema(function)["function"]
            except Exception as error:  # of several classes, which have nothing else in common
                raise ValueError(f"the tool {name} has no schema: {error}") from error
            parts = {key: schema[key] for key in ("description", "parameters")}
            described.append({"type": "function", "function": {"name": name, **parts}})
        return described


@Tool.register("function")
@dataclass(frozen=True, kw_only=True)
class Function(Tool):
    """A Python function with type hints and a docstring of Google's form (``Args:``)."""

    path: str
    """Its module and name, ``my_package.tools.weather``."""

    @property
    @override
    def name(self) -> str:  # type: ignore[override]
        return self.path.rpartition(".")[2]

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        try:
            self.functions()
        except (ImportError, AttributeError, ValueError) as error:
            yield Finding(f"the function {self.path} can't be imported: {error}", level="missing")

    @override
    def functions(self) -> Functions:
        module, _, name = self.path.rpartition(".")
        return {name: getattr(importlib.import_module(module), name)}


@Tool.register("python")
@dataclass(frozen=True, kw_only=True)
class Python(Tool):
    """Runs code in the sandbox, and returns its output and the value of its last line, or the traceback."""

    name: str = "python"
    console: PythonTool = field(default_factory=PythonTool)
    """The sandbox, its limits, and how much of the output is kept."""
    state: bool = False
    """Whether names stay defined from call to call of an answer. Where an answer is gone on with from its
    middle, its earlier calls are run again."""

    def __post_init__(self) -> None:
        if self.state:
            self.console.session()  # refuses sandboxes that keep nothing

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        yield from lacking(self.console.sandbox.missing())

    @override
    def functions(self) -> Functions:
        return {self.name: self.console.session().run if self.state else self.call}

    @override
    def call(self, code: str) -> str:
        """Runs Python code and returns what it printed, and the value of its last line.

        Args:
            code: The code to run.
        """
        return self.console.run(code)


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

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        yield from lacking(missing_extras("the tool search", "bm25s"))
        for name in self.corpus:
            if not Path(name).is_file():
                yield Finding(f"{name} isn't there, which is searched", level="missing")

    @override
    def prepare(self) -> None:
        _read_index(self.corpus, self.text)

    @override
    def call(self, query: str) -> str:
        """Searches passages of text for words.

        Args:
            query: The words to search for.
        """
        import bm25s

        index, passages = _read_index(self.corpus, self.text)
        queries = bm25s.tokenize([query], stopwords=None, show_progress=False, return_ids=False)
        if not queries[0]:
            return "Nothing was asked for."
        count = min(self.results, len(passages))
        indices, scores = index.retrieve(queries, k=count, show_progress=False)
        # The library fills up with passages that share no word with the query: their score is 0.
        hits = [passages[i] for i, score in zip(indices[0], scores[0], strict=True) if score > 0]
        if not hits:
            return "Nothing was found."
        return "\n".join(f"({number}) {hit[: self.characters]}" for number, hit in enumerate(hits, 1))


@lru_cache(maxsize=4)
def _read_index(files: tuple[str, ...], key: str) -> tuple[Any, Sequence[str]]:
    """Reads and indexes passages. Raises ValueError for a row without one, and for no row at all."""
    import bm25s

    passages = []
    for name in files:
        for file_and_line, row in json_lines(Path(name)):
            text = row.get(key)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{file_and_line}: it has no text under {key!r}")
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
    has to tell the policy of its tools. A model that was trained to call tools does so in its own `format`:
    its chat template tells it of them, and has a turn's calls answered, all of them.

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
    format: str = "tags"
    """The format of calls: ``tags``, ``hermes`` (Qwen's too), ``llama``, ``mistral``, or ``vllm:NAME`` for
    one of vLLM's tool parsers, such as ``vllm:qwen3_coder``."""
    tokenizer: str | None = None
    """The model's tokenizer, a folder or a name, which vLLM's parsers read."""
    deadline: Annotated[float, Gt(0)] = 30.0
    """Seconds for the calls of one turn; tools have shorter limits of their own."""

    again: ClassVar[Again] = "copy"
    earns: ClassVar[Reward] = "grader"

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        parser = self.format.partition(":")[0]
        if parser not in ("tags", "vllm", *NATIVE_FORMATS) or (parser == "vllm") != (
            self.tokenizer is not None
        ):
            raise ValueError(
                f"format is {self.format!r}: give tags, {', '.join(NATIVE_FORMATS)}, or vllm:NAME with a"
                " tokenizer"
            )
        if self.is_native and self.call is not None:
            raise ValueError(f"call is a pattern of tags, and format is {self.format!r}: leave one out")
        if not self.is_native and any(tool.isolation == "service" for tool in self.tools):
            raise ValueError("tools of an MCP server take several arguments: set format to that of the model")
        # A dataclass's own fields would be keys of the configuration.
        object.__setattr__(self, "reads_specials", self.is_native)
        if any(tool.isolation == "service" for tool in self.tools):
            object.__setattr__(self, "isolation", "service")
        if twice:
            raise ValueError(f"two tools are called {', '.join(twice)}: give each a name of its own")
        if RESULT not in self.answer:
            raise ValueError(f"answer is {self.answer!r}, which leaves the result out: put {RESULT} into it")
        if self.call is not None:
            try:
                groups = re.compile(self.call).groupindex
            except re.error as error:
                raise ValueError(f"call is {self.call!r}, which is no regular expression: {error}") from error
            needed_groups = ("argument",) if len(names) == 1 else ("argument", "tool")
            for group in needed_groups:
                if group not in groups:
                    raise ValueError(
                        f"call is {self.call!r}, which lacks a group (?P<{group}>…): give it one"
                    )

    @property
    def is_native(self) -> bool:
        return self.format != "tags"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        if self.call is not None:
            return re.compile(self.call)
        names = "|".join(re.escape(tool.name) for tool in self.tools)
        # The end tag may be the stop string, which isn't shown.
        return re.compile(rf"<(?P<tool>{names})>(?P<argument>.*?)(?:</(?P=tool)>|\Z)", re.DOTALL)

    @override
    def prepare(self) -> None:
        for tool in self.tools:
            tool.prepare()
        if self.tokenizer is not None:
            self.calls("")  # imports the parser

    @override
    def offered(self) -> Sequence[Mapping[str, Any]]:
        schemas: list[Mapping[str, Any]] = []
        if self.is_native:
            for tool in self.tools:
                schemas += tool.schemas()
        names = [schema["function"]["name"] for schema in schemas]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are called {', '.join(twice)}: leave one out")
        return schemas

    def calls(self, action: str) -> list[ToolCall]:
        """Returns the calls of a turn in their order; none where it is the answer. A call that a thought
        speaks of isn't made."""
        return self._split_turn(action)[0]

    def _split_turn(self, action: str) -> tuple[list[ToolCall], str]:
        """Returns the calls of a turn and what the turn says beside them, its thought included."""
        reading = read_thoughts(action)
        if self.tokenizer is not None:
            name = self.format.partition(":")[2]
            return _calls_by_vllm(name, self.tokenizer, self.offered(), reading.answer), action
        if self.is_native:
            return calls_of_turn(self.format, action)
        # Where calls are tags, models are also trained to call in the midst of a thought, which goes on
        # behind the result: then the call is the last thing of the turn.
        if reading.is_cut_off:
            last = next(reversed(list(self._pattern.finditer(action))), None)
            call = last if last is not None and not action[last.end() :].strip() else None
        else:
            call = self._pattern.search(reading.answer)
        if call is None:
            return [], action
        groups = call.groupdict()
        return [ToolCall(groups.get("tool") or self.tools[0].name, groups["argument"] or "")], action

    @override
    def message(self, action: str) -> dict[str, Any]:
        calls, prose = self._split_turn(action)
        tool_calls = []
        for call in calls:
            if call.fault is None:
                function = {"name": call.tool, "arguments": call.arguments}
                tool_calls.append({"id": "", "type": "function", "function": function})
        if not self.is_native or not tool_calls:
            return super().message(action)
        return {"role": "assistant", "content": prose, "tool_calls": tool_calls}

    @override
    def reset(self, problem: Problem, seed: int) -> SimpleNamespace:
        # Functions of tools with a state belong to one answer; the others are made for each call.
        functions_with_state: dict[str, Callable[..., Any]] = {}
        for tool in self.tools:
            if tool.state:
                functions_with_state |= tool.functions()
        return SimpleNamespace(made=0, kept=functions_with_state)

    @override
    def step(self, state: SimpleNamespace, action: str) -> Turn:
        results = []
        for call in self.calls(action):
            state.made += 1
            # Mistral's templates want nine letters and digits.
            identity = call.id or f"call{state.made:05d}"
            results.append((call.tool, identity, self._result(state, call)[:LONGEST_OBSERVATION]))
        if not results:
            return Turn(done=True)
        if self.is_native:
            return Turn("\n".join(text for _, _, text in results), results=tuple(results))
        return Turn(self.answer.replace(RESULT, results[0][2]))

    def _result(self, state: SimpleNamespace, call: ToolCall) -> str:
        """Returns the result of a call as the policy reads it, or why there is none."""
        if self.most_calls is not None and state.made > self.most_calls:
            return "There are no calls left: give your answer."
        if call.fault is not None:
            return call.fault
        functions: dict[str, Callable[..., Any]] = {}
        for tool in self.tools:
            functions |= tool.functions()
        functions |= getattr(state, "kept", {})  # states of version 0.1 keep nothing
        if call.tool not in functions:
            return f"There is no tool {call.tool}; there is {', '.join(functions)}."
        function = functions[call.tool]
        try:
            if isinstance(call.arguments, Mapping):
                result = _call_with_json(function, call.arguments)
            else:
                result = function(call.arguments)
        except Unavailable:
            raise
        except ValidationError as error:
            faults = []
            for details in error.errors():
                argument = ".".join(map(str, details["loc"]))
                faults.append(f"{argument}: {details['msg']}")
            return f"{call.tool} can't be called so: {'; '.join(faults)}"
        except Exception as error:  # the policy reads it, whatever it is
            return f"{type(error).__name__}: {error}"
        return str(result).rstrip("\n")


def _call_with_json(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a function with the arguments that a model wrote.

    A text where something else has to stand is read as JSON: ``{"days": "[1, 2]"}`` is ``{"days": [1, 2]}``
    for a function that wants a list. Raises ValidationError where the arguments don't fit all the same.
    """
    checked_function = validate_call(function)
    try:
        return checked_function(**arguments)
    except ValidationError as error:
        unfitting = {str(details["loc"][0]) for details in error.errors() if details["loc"]}
        repaired = dict(arguments)
        for name in unfitting & arguments.keys():
            if isinstance(arguments[name], str):
                try:
                    repaired[name] = json.loads(arguments[name], strict=False)
                except ValueError:
                    continue
        if repaired == arguments:
            raise
    return checked_function(**repaired)


def _calls_by_vllm(
    name: str, tokenizer: str, tools: Sequence[Mapping[str, Any]], action: str
) -> list[ToolCall]:
    """Returns the calls that a tool parser of vLLM's finds, outside of a server. A parser says that there is
    none also where it can't read one."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], tools=list(tools))
    parser = ToolParserManager.get_tool_parser(name)(_tokenizer(tokenizer), request.tools)
    calls: list[ToolCall] = []
    for tool_call in parser.extract_tool_calls(action, request).tool_calls:
        function = tool_call.function
        calls += calls_in(f"{function.name}[ARGS]{function.arguments or '{}'}")
    return calls


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
