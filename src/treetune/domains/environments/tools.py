"""Tools that a policy may call within its answer (Python, search, functions of the user), and the environment
that reads the calls and returns their results."""

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
from treetune.contracts import Finding, report_missing
from treetune.domains.environments.base import LONGEST_OBSERVATION, Again, Environment, Reward, Turn
from treetune.domains.environments.calls import NATIVE_FORMATS, ToolCall, calls_of_turn, read_calls
from treetune.domains.extras import missing_extras
from treetune.domains.sandbox.python_tool import PythonTool
from treetune.exceptions import Unavailable
from treetune.tasks.graders.base import Isolation
from treetune.tasks.sources import read_json_lines
from treetune.tasks.thoughts import read_thoughts
from treetune.vocabulary import Problem

RESULT_PLACEHOLDER = "{result}"
"""The place of the result in the setting `answer`."""

# Pickled snapshots of version 0.1 hold a class `Calls` of this module. Neither exists any more. So a module
# with this name is made, in which `SimpleNamespace` takes the place of the class when they are unpickled.
_MODULE_OF_VERSION_0_1 = "treetune.tasks.environments.tools.environment"
vars(sys.modules.setdefault(_MODULE_OF_VERSION_0_1, ModuleType(_MODULE_OF_VERSION_0_1))).update(
    Calls=SimpleNamespace
)


Functions = Mapping[str, Callable[..., Any]]
"""The functions that answer calls, by the name under which the policy calls them."""


class Tool(Registrable):
    """Answers calls of a policy. Sub-classes are frozen dataclasses that can be pickled.

    A sub-class usually overrides only `call`. The signature and docstring of `call` become the schema that
    models with a native format of calls are shown.
    """

    name: str
    """The name by which the policy calls it."""
    isolation: ClassVar[Isolation] = "process"
    """The place where it runs, as for environments (`Environment.isolation`). With ``service`` all answers of
    a rank share the tool."""
    state: bool = False
    """Whether its `functions` keep a state from call to call. Such functions are pickled between turns."""

    def prepare(self) -> None:
        """Called once in each worker process, before the deadlines begin. Do slow imports and build indices
        here."""

    def call(self, argument: str) -> str:
        """Returns the result as the policy reads it.

        Raises `Unavailable` if a requirement is missing. The policy reads any other exception as the result.
        """
        raise NotImplementedError

    def functions(self) -> Functions:
        """Returns the functions that answer the calls of one answer, by name."""
        return {self.name: self.call}

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Returns the JSON schemas of its functions.

        Raises ValueError for a function without the type hints and docstring that a schema is made of (see
        `get_json_schema` of transformers).
        """
        from transformers.utils.chat_template_utils import get_json_schema

        schemas = []
        for name, function in self.functions().items():
            try:
                schema = get_json_schema(function)["function"]
            except Exception as error:  # transformers raises several classes without a common base
                raise ValueError(f"the tool {name} has no schema: {error}") from error
            described_function = {
                "name": name,
                "description": schema["description"],
                "parameters": schema["parameters"],
            }
            schemas.append({"type": "function", "function": described_function})
        return schemas


@Tool.register("function")
@dataclass(frozen=True, kw_only=True)
class Function(Tool):
    """A Python function with type hints and a docstring in Google's style (``Args:``)."""

    path: str
    """Its module and name, such as ``my_package.tools.weather``."""

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
    """The sandbox, its limits, and the most bytes of a result."""
    state: bool = False
    """Whether names stay defined from call to call of an answer. If an answer is continued from its middle,
    its earlier calls are run again."""

    def __post_init__(self) -> None:
        if self.state:
            self.console.session()  # raises ValueError for a sandbox without sessions

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        yield from report_missing(self.console.sandbox.missing())

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
    """Finds the passages that match a query best by BM25 (Robertson and Zaragoza 2009), with the library
    bm25s. The index is built when a worker process starts."""

    corpus: Annotated[tuple[str, ...], MinLen(1)]
    """Files of JSON lines, each with a passage and optionally a `title`."""
    name: str = "search"
    results: Annotated[int, Gt(0)] = 3
    """The most passages of a result."""
    characters: Annotated[int, Gt(0)] = 500
    """Characters of each passage."""
    text: str = "text"
    """The key of a passage in its row."""

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        yield from report_missing(missing_extras("the tool search", "bm25s"))
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
        # The library adds passages that share no word with the query, with the score 0.
        hits = [passages[i] for i, score in zip(indices[0], scores[0], strict=True) if score > 0]
        if not hits:
            return "Nothing was found."
        return "\n".join(f"({number}) {hit[: self.characters]}" for number, hit in enumerate(hits, 1))


@lru_cache(maxsize=4)
def _read_index(files: tuple[str, ...], key: str) -> tuple[Any, Sequence[str]]:
    """Reads and indexes passages. Raises ValueError for a row without a passage, and if there are no rows."""
    import bm25s

    passages = []
    for name in files:
        for file_and_line, row in read_json_lines(Path(name)):
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
    """Answers a turn that calls a tool with the tool's result. A turn without a call is the answer, which the
    task's grader grades.

    With the format ``tags``, a call is the tool's name as a tag around the argument, such as
    ``<python>print(6 * 7)</python>``. Only the first call of a turn counts. Put the end tag into the
    rollout's `stop`, so that a turn ends with its call. The prompt has to describe the tools.

    A model that was trained to call tools has its own `format` of calls, which is named here. Its chat
    template describes the tools, and all calls of a turn are answered.

    The same call may have different results (programs may draw random numbers, and have time limits), so
    answers are continued from copies of the state.
    """

    tools: Annotated[tuple[Tool, ...], MinLen(1)]
    """The tools that the policy may call in each of its turns."""
    call: str | None = None
    """A regular expression for calls in the format ``tags``, with a group `argument` and, if there are
    several tools, a group `tool`. null: the tool's name as a tag around the argument."""
    answer: str = f"<result>\n{RESULT_PLACEHOLDER}\n</result>"
    """The text that the policy reads after a call in the format ``tags``, with ``{result}`` in it."""
    most_calls: Annotated[int, Gt(0)] | None = None
    """The most calls of an answer. In place of the result of any further call, the policy reads that no calls
    are left. null: unlimited."""
    format: str = "tags"
    """The format of calls: ``tags``, ``hermes`` (also for Qwen), ``llama``, ``mistral``, or ``vllm:NAME`` for
    one of vLLM's tool parsers, such as ``vllm:qwen3_coder``."""
    tokenizer: str | None = None
    """The model's tokenizer, a folder or a name, which vLLM's parsers need."""
    deadline: Annotated[float, Gt(0)] = 30.0
    """Seconds for all calls of one turn together. Tools have shorter limits for each call."""

    again: ClassVar[Again] = "copy"
    earns: ClassVar[Reward] = "grader"

    def __post_init__(self) -> None:
        parser = self.format.partition(":")[0]
        is_known = parser in ("tags", "vllm", *NATIVE_FORMATS)
        needs_tokenizer, has_tokenizer = parser == "vllm", self.tokenizer is not None
        if not is_known or needs_tokenizer != has_tokenizer:
            raise ValueError(
                f"format is {self.format!r}: give tags, {', '.join(NATIVE_FORMATS)}, or vllm:NAME with a"
                " tokenizer"
            )
        if self.is_native and self.call is not None:
            raise ValueError(f"call is a pattern of tags, and format is {self.format!r}: leave one out")
        has_service = any(tool.isolation == "service" for tool in self.tools)
        if not self.is_native and has_service:
            raise ValueError("tools of an MCP server take several arguments: set format to that of the model")
        # `reads_specials` and `isolation` depend on other settings. They are set as attributes, because
        # properties with these names would clash with the base class's attributes.
        object.__setattr__(self, "reads_specials", self.is_native)
        if has_service:
            object.__setattr__(self, "isolation", "service")
        if repeated := _find_repeated([tool.name for tool in self.tools]):
            raise ValueError(f"two tools are called {', '.join(repeated)}: give each a name of its own")
        if RESULT_PLACEHOLDER not in self.answer:
            raise ValueError(
                f"answer is {self.answer!r}, which leaves the result out: put {RESULT_PLACEHOLDER} into it"
            )
        if self.call is not None:
            self._check_pattern(self.call)

    def _check_pattern(self, pattern: str) -> None:
        """Raises ValueError unless `pattern` is a regular expression with the groups that a call needs."""
        try:
            groups = re.compile(pattern).groupindex
        except re.error as error:
            raise ValueError(f"call is {pattern!r}, which is not a regular expression: {error}") from error
        needed_groups = ("argument",) if len(self.tools) == 1 else ("argument", "tool")
        for group in needed_groups:
            if group not in groups:
                raise ValueError(f"call is {pattern!r}, which has no group (?P<{group}>…): add it")

    @property
    def is_native(self) -> bool:
        return self.format != "tags"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """The pattern of a call in the format ``tags``."""
        if self.call is not None:
            return re.compile(self.call)
        names = "|".join(re.escape(tool.name) for tool in self.tools)
        # If the end tag is the stop string, the turn's text ends before it.
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
        if self.is_native:  # in the format ``tags``, the chat template offers no tools
            for tool in self.tools:
                schemas += tool.schemas()
        if repeated := _find_repeated([schema["function"]["name"] for schema in schemas]):
            raise ValueError(f"two tools are called {', '.join(repeated)}: leave one out")
        return schemas

    def calls(self, action: str) -> list[ToolCall]:
        """Returns the calls of a turn in their order; no calls if the turn is the answer. A call that is only
        mentioned in a thought isn't one."""
        calls, _ = self._split_turn(action)
        return calls

    def _split_turn(self, action: str) -> tuple[list[ToolCall], str]:
        """Returns the calls of a turn, and the rest of its text, the thought included.

        The rest is the whole text if the calls aren't removed from it: with tags, and with vLLM's parsers,
        which don't tell where a call is.
        """
        reading = read_thoughts(action)
        if self.tokenizer is not None:
            name = self.format.partition(":")[2]
            return _calls_by_vllm(name, self.tokenizer, self.offered(), reading.answer), action
        if self.is_native:
            return calls_of_turn(self.format, action)
        if reading.is_cut_off:
            # The turn ends within a thought. With tags, models are also trained to call a tool in the middle
            # of a thought: the call ends the turn, and the thought continues after the result.
            matches = list(self._pattern.finditer(action))
            ends_in_call = bool(matches) and not action[matches[-1].end() :].strip()
            call = matches[-1] if ends_in_call else None
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
                # `Conversation.transcript` gives the call the id of its result.
                tool_calls.append({"id": "", "type": "function", "function": function})
        if not self.is_native or not tool_calls:
            return super().message(action)
        return {"role": "assistant", "content": prose, "tool_calls": tool_calls}

    @override
    def reset(self, problem: Problem, seed: int) -> SimpleNamespace:
        # `made` counts the answer's calls. `kept` has the functions of tools with a state, which belong to
        # this answer. The functions of other tools are looked up for each call.
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
            # Mistral's templates require ids of nine letters and digits.
            identity = call.id or f"call{state.made:05d}"
            results.append((call.tool, identity, self._answer_call(state, call)[:LONGEST_OBSERVATION]))
        if not results:
            return Turn(done=True)
        if self.is_native:
            return Turn("\n".join(text for _, _, text in results), results=tuple(results))
        [(_, _, result)] = results  # with tags a turn has one call
        return Turn(self.answer.replace(RESULT_PLACEHOLDER, result))

    def _answer_call(self, state: SimpleNamespace, call: ToolCall) -> str:
        """Returns the text that the policy reads: the result of a call, or the reason why it has none."""
        if self.most_calls is not None and state.made > self.most_calls:
            return "There are no calls left: give your answer."
        if call.fault is not None:
            return call.fault
        functions: dict[str, Callable[..., Any]] = {}
        for tool in self.tools:
            functions |= tool.functions()
        # A tool with a state has just made new functions above. The answer's functions, which have its state,
        # replace them. (States of version 0.1 don't have the attribute `kept`.)
        functions |= getattr(state, "kept", {})
        if call.tool not in functions:
            return f"There is no tool {call.tool}; there is {', '.join(functions)}."
        function = functions[call.tool]
        try:
            if isinstance(call.arguments, Mapping):
                result = _call_with_json(function, call.arguments)
            else:  # the text within a tag
                result = function(call.arguments)
        except Unavailable:  # the answer is left out, since the policy can't do anything about it
            raise
        except ValidationError as error:  # the call's arguments don't match the signature
            faults = []
            for details in error.errors():
                argument = ".".join(map(str, details["loc"]))
                faults.append(f"{argument}: {details['msg']}")
            return f"{call.tool} can't be called so: {'; '.join(faults)}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return str(result).rstrip("\n")


def _find_repeated(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _call_with_json(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a function with the arguments that a model wrote.

    If an argument is a text but has another type in the signature, the text is read as JSON:
    ``{"days": "[1, 2]"}`` becomes ``{"days": [1, 2]}`` for a list. Raises ValidationError if the arguments
    still don't match the signature.
    """
    checked_function = validate_call(function)
    try:
        return checked_function(**arguments)
    except ValidationError as error:
        wrong_names = {str(details["loc"][0]) for details in error.errors() if details["loc"]}
        repaired = dict(arguments)
        for name in wrong_names & arguments.keys():
            if isinstance(arguments[name], str):
                try:
                    # strict=False: the text may have line breaks within strings.
                    repaired[name] = json.loads(arguments[name], strict=False)
                except ValueError:
                    continue
        if repaired == arguments:
            raise
    return checked_function(**repaired)


def _calls_by_vllm(
    name: str, tokenizer: str, tools: Sequence[Mapping[str, Any]], action: str
) -> list[ToolCall]:
    """Returns the calls that one of vLLM's tool parsers finds. No server is needed for this.

    There are no calls if the text has none, and also if the parser can't read a call of the text.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], tools=list(tools))
    parser = ToolParserManager.get_tool_parser(name)(_load_tokenizer(tokenizer), request.tools)
    calls: list[ToolCall] = []
    for tool_call in parser.extract_tool_calls(action, request).tool_calls:
        function = tool_call.function
        # The arguments are JSON text as the model wrote it, which may have mistakes. `read_calls` reads such
        # text in Mistral's form, ``name[ARGS]arguments``. A call with a mistake gets a `fault`, which the
        # model reads.
        calls += read_calls(f"{function.name}[ARGS]{function.arguments or '{}'}")
    return calls


@lru_cache(maxsize=1)
def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
