"""Grade and read hostile answers in this process, and print as JSON what Python did with their text.

``python -m tests.domains.sandbox.audited_answers FOLDER attacks|long|read``: the answers try to leave a
file in FOLDER. An audit hook can't be removed again, so the watch runs in a process of its own.
"""

from __future__ import annotations

import base64
import json
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from tests.support.grader_cases import LABELLED
from treetune.data.parallel_solutions import count_sentences, split_solution
from treetune.data.thread_blocks import read_json_list, read_thread_groups
from treetune.domains.endpoints.replies import read_reply
from treetune.domains.environments.calls import NATIVE_FORMATS, calls_of_turn
from treetune.domains.environments.tools import Function, Tools
from treetune.domains.graders.instruction_following import InstructionFollowing
from treetune.domains.graders.judge import JudgeGrader
from treetune.domains.graders.math import MathGrader
from treetune.domains.graders.weighted import Weighted
from treetune.domains.math_tasks import Sentences
from treetune.findings import missing_requirements
from treetune.tasks.graders.base import Grader
from treetune.tasks.row_values import messages_in_text
from treetune.threads.format import find_format_faults, outline_numbers, text_segments
from treetune.view.terminal import line_of
from treetune.view.text import one_line, render_markdown
from treetune.vocabulary import Problem

MARKER = "LeftByAnAnswer"
"""The name of the file, and the text for which the hook looks in the arguments of every audit event."""

GRADING_SECONDS = 10.0
"""Processor seconds for an answer of `LONG` characters; a linear reading takes some hundredths."""

GRADED_CHARACTERS = 50_000
READ_CHARACTERS = 60_000
READING_SECONDS = 4.0
"""Characters and processor seconds for readers in the run's process and for those that show answers."""

HARMLESS = ("compile", "marshal.dumps")
"""Events that may hold an answer's text: reading it as a tree, and handing a program to the sandbox."""

SHAPES = (
    "{}", "\\boxed{{{}}}", "<answer>{}</answer>", "<solution>{}</solution>", "#### {}", "```python\n{}\n```",
    "```json\n{}\n```", "assert f({}) == {}", '{{"answer": "{}"}}',
)  # fmt: skip

UNITS = (
    "a",
    "1",
    " ",
    "\n",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "\\",
    "$",
    "*",
    "_",
    "-",
    ",",
    ".",
    "=",
    "#",
    '"',
    "'",
    "`",
    "<",
    ">",
    "|",
    "&",
    "^",
    "+",
    ":",
    "A",
    "ab",
    "a ",
    "1,",
    "1.",
    "1 ",
    "{}",
    "\\(",
    "\\boxed{",
    "\\boxed ",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "\\text{",
    "\\frac",
    "$$",
    "**",
    "```",
    "1/",
    "\t",
    '\\"',
    "\\\\",
    "a\n",
    " \n",
    "answer ",
    "the answer is ",
    "Answer: ",
    "```python\n",
    "1,000",
    "10 ",
    "é",
    "答",
    "- ",
    "x=",
    "#### ",
    '{"a":',
    "| ",
    "|-",
    "**a",
    "**a**",
    "%",
    "> ",
    ">- ",
    "A) ",
    "(A) ",
    "**\n",
)


class LateAnswer(BaseException):
    """Raised when an answer takes too long; a BaseException, which no grader catches."""


@dataclass(frozen=True)
class Evaluates(Grader):
    """A grader that evaluates answers, by which the watch itself is tested."""

    def extract(self, response: str, problem: Problem) -> str | None:
        return response

    def verdict(self, extracted: str, problem: Problem) -> float:
        return float(bool(eval(extracted)))


def payloads(folder: Path) -> Iterator[str]:
    """Yield texts that would leave the file if any code ran, unpickled, filled in or resolved them."""
    file = folder / MARKER
    shell = f"touch {file}"
    call = f"__import__('os').system('{shell}')"
    yield call
    yield f'__import__("os").system("{shell}")'
    yield f"open('{file}', 'w').close()"
    yield f"exec(\"open('{file}', 'w')\")"
    yield f"eval(\"open('{file}', 'w')\")"
    yield f"(lambda: {call})()"
    yield f"[{call} for x in [1]]"
    yield f"1 if {call} else 2"
    yield f"1 + {call}"
    yield f"{{'a': {call}}}"
    yield f"().__class__.__base__.__subclasses__()[-1].__init__.__globals__['{MARKER}']"
    # sympy's parsers
    yield f"Symbol('x').__class__.__mro__[-1].__subclasses__() or {call}"
    yield f'lambdify(x, "{call}")(1)'
    yield f'sympify("{call}")'
    yield f'S("{call}")'
    yield f"{MARKER}.__class__"
    yield f"{MARKER}(1)!"
    # LaTeX, with the text where names, functions, matrices and bounds stand
    yield f"x_{{{call}}}"
    yield f"\\text{{{call}}}"
    yield f"\\operatorname{{{MARKER}}}({call})"
    yield f"\\operatorname{{gcd}}({call}, 2)"
    yield f"\\begin{{pmatrix}} {call} & \\text{{{call}}} \\\\ 1 & 2 \\end{{pmatrix}}"
    yield f"\\sum_{{n_{{{MARKER}}}=1}}^{{\\infty}} \\frac{{1}}{{n_{{{MARKER}}}^2}}"
    yield f"\\int_0^1 x_{{{MARKER}}} dx_{{{MARKER}}}"
    yield f"\\{{x \\mid {call}\\}}"
    yield f"\\input{{{file}}}\\write18{{{shell}}}"
    # templates and formats
    yield f"{{{{ cycler.__init__.__globals__.os.popen('{shell}').read() }}}}"
    yield f"{{{{ self.__init__.__globals__.__builtins__.{call} }}}}"
    yield f"{{% set {MARKER} = 1 %}}{{{{ {MARKER} }}}}"
    yield f"{{0.__class__.__init__.__globals__[{MARKER}]}} %({MARKER})s"
    yield f"${{{shell}}} $({shell}) `{shell}`; {shell} | {shell}"
    # YAML, pickles, XML
    yield f"!!python/object/apply:os.system ['{shell}']"
    yield f"!!python/object/new:os.system [{shell}]"
    yield f"cos\nsystem\n(S'{shell}'\ntR."
    yield base64.b64encode(pickle.dumps(_RunsCommandWhenUnpickled(shell))).decode()
    yield pickle.dumps(_RunsCommandWhenUnpickled(shell), 0).decode("latin-1")
    yield f'<!DOCTYPE a [<!ENTITY b SYSTEM "file://{file}">]><a>&b;</a>'
    # calls of tools, as models write them
    yield f'<tool_call>{{"name": "python", "arguments": {{"code": "{call}"}}}}</tool_call>'


@dataclass(frozen=True)
class _RunsCommandWhenUnpickled:
    command: str

    def __reduce__(self) -> Any:
        import os

        return os.system, (self.command,)


class Watch:
    """Record each audit event with an answer's text in its arguments, or in names and constants of code."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._is_on = False
        sys.addaudithook(self._look)

    def __enter__(self) -> None:
        self.seen.clear()
        self._is_on = True

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._is_on or event in HARMLESS:
            return
        is_from_pickle = event == "pickle.find_class" and "system" in arguments
        if is_from_pickle or any(_mentions(argument) for argument in arguments):
            self._is_on = False  # recording the event must cause no further one
            self.seen.append(event)
            self._is_on = True


def _mentions(value: object) -> bool:
    if isinstance(value, str):
        return MARKER in value
    if isinstance(value, bytes):
        return MARKER.encode() in value
    if isinstance(value, CodeType):
        return any(map(_mentions, (*value.co_names, *value.co_varnames, *value.co_consts)))
    if isinstance(value, (tuple, list)):
        return any(map(_mentions, value))
    return False


def attack(grader: Grader, problem: Problem, wrong: str, folder: Path, watch: Watch) -> list[str]:
    """Grade hostile answers, and describe everything that was done with them and must not be."""
    find_format_faults = []
    before = _reward(grader, wrong, problem)
    for payload in payloads(folder):
        for shape in SHAPES:
            response = shape.replace("{{", "\0").replace("}}", "\1").replace("{}", payload)
            response = response.replace("\0", "{").replace("\1", "}")
            with watch:
                _reward(grader, response, problem)
            if watch.seen or (folder / MARKER).exists():
                (folder / MARKER).unlink(missing_ok=True)
                find_format_faults.append(f"{response!r}: {sorted(set(watch.seen)) or 'left a file'}")
    after = _reward(grader, wrong, problem)
    if after != before:
        find_format_faults.append(
            f"the wrong answer {wrong!r} earned {before} before, and {after} behind hostile ones"
        )
    return find_format_faults


def find_late_answers(grader: Grader, problem: Problem, right: str) -> list[str]:
    """List the long answers on which a grader spent more than `GRADING_SECONDS`."""
    late = []
    for unit in UNITS:
        run = unit * (GRADED_CHARACTERS // len(unit))
        for response in (
            run,
            f"\\boxed{{{run}}}",
            f"<answer>{run}</answer>",
            run + right,
            right + run,
            run + "\0",
            f"the answer{run}x",
            f"x{run}where",
        ):
            signal.setitimer(signal.ITIMER_VIRTUAL, GRADING_SECONDS)
            try:
                _reward(grader, response, problem)
            except LateAnswer:
                late.append(f"{response[:40]!r} of {len(response)} characters")
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return late


# Other readers of texts that a model wrote

READ_UNITS = (
    *UNITS, '\\"', '"\\', "<parameter=", "<function=a>", "<tool_call>", '<tool_call>{"', '{"name":"a"} ',
    "[TOOL_CALLS]", "a[ARGS]", "```\n", "<Parallel>", "<Outline>", "<Thread>", "</Thread><Thread>",
    "</Outline><Outline>", "<Outline>1:", "T ", "\\[", "$ ", "$a", "\\begin{", "|a|b|\n|-|-|\n", "verdict ",
    "\x1b[31m", "\u0301", "<b>", "1: ", "data: ", "1-2,", "lines 1",
)  # fmt: skip

HARMLESS_TOOL = "tests.domains.sandbox.audited_answers.repeat"


def repeat(text: str = "", count: int = 1) -> str:
    """Repeat a text: a harmless tool."""
    return text[:100] * min(count, 2)


WITH_DEADLINE = ("weighted", "instruction_following")
"""Readers whose work is done in processes that are ended at a deadline."""


def readers() -> dict[str, Callable[[str], Any]]:
    """Return all functions outside of graders that read what a model wrote."""
    problem = LABELLED["math"].cases[0].problem
    judge = JudgeGrader()
    weighted = Weighted(graders={"math": MathGrader(), "numeric": LABELLED["numeric"].grader})
    tagged = Tools(tools=(Function(path=HARMLESS_TOOL),))
    native = Tools(tools=(Function(path=HARMLESS_TOOL),), format="hermes")
    assert missing_requirements([tagged, native]) == [], "the tool is imported, before anything is watched"
    instructions = {
        "instruction_id_list": [
            "detectable_format:json_format", "detectable_content:number_placeholders", "startend:quotation",
            "keywords:existence", "language:response_language", "combination:two_responses",
        ],
        "kwargs": [
            {}, {"num_placeholders": 1}, {}, {"keywords": ["sun"]}, {"language": "en"}, {},
        ],
    }  # fmt: skip
    followed = Problem(id="test/0", prompt="?", gold=json.dumps(instructions))

    def act(tools: Tools, text: str) -> None:
        tools.step(tools.reset(problem, 0), text)
        tools.message(text)

    return {
        "judge's question": lambda text: judge.question(judge.extract(text, problem) or "", problem),
        "judge's verdict": judge.reward,
        "weighted": lambda text: weighted.grade(text, problem),
        "instruction_following": lambda text: InstructionFollowing().grade(text, followed),
        "tools by tags": lambda text: act(tagged, text),
        "tools by JSON": lambda text: act(native, text),
        **{f"calls of {name}": lambda text, name=name: calls_of_turn(name, text) for name in NATIVE_FORMATS},
        "threads' faults": find_format_faults,
        "threads' segments": text_segments,
        "threads' outlines": outline_numbers,
        "ranges of lines": read_thread_groups,
        "lists in replies": read_json_list,
        "parts of a solution": split_solution,
        "sentences of a solution": count_sentences,
        "an endpoint's reply": lambda text: read_reply(200, text, is_chat=True),
        "steps": Sentences().boundaries,
        "a prompt in a row": messages_in_text,
        "a page": lambda text: render_markdown(text[: 2 * GRADED_CHARACTERS]),
        "a table of answers": one_line,
        "a terminal": lambda text: line_of(text).plain,
    }


def find_reading_faults(read: Callable[[str], Any], folder: Path, watch: Watch) -> list[str]:
    """Read hostile texts, and describe what a reader did that it must not and which errors it raised."""
    described_faults = []
    for payload in payloads(folder):
        calls = (f"<tool_call>{payload}</tool_call>", f"<repeat>{payload}</repeat>")
        for text in (payload, *calls, f"\\boxed{{{payload}}}", f"<Outline>{payload}", f"data: {payload}"):
            with watch:
                error = _error_of(read, text)
            if watch.seen or (folder / MARKER).exists():
                (folder / MARKER).unlink(missing_ok=True)
                described_faults.append(f"{text!r}: {sorted(set(watch.seen)) or 'left a file'}")
            if error:
                described_faults.append(f"{text!r}: {error}")
    return described_faults


def find_late_readings(read: Callable[[str], Any]) -> list[str]:
    """List the long texts on which a reader spent more than `READING_SECONDS`, or on which it failed."""
    late = []
    for unit in READ_UNITS:
        run = unit * (READ_CHARACTERS // len(unit))
        for text in (f"{run}x", f"<tool_call>{{{run}", f"<Parallel><Outlines>{run}</Parallel>"):
            signal.setitimer(signal.ITIMER_VIRTUAL, READING_SECONDS)
            try:
                if error := _error_of(read, text):
                    late.append(f"{text[:40]!r} of {len(text)} characters: {error}")
            except LateAnswer:
                late.append(f"{text[:40]!r} of {len(text)} characters")
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return late


def _error_of(read: Callable[[str], Any], text: str) -> str:
    """Read a text, and return the error unless it is one that callers expect (ValueError)."""
    try:
        read(text)
    except ValueError:
        return ""
    except Exception as error:
        return repr(error)[:200]
    return ""


def _reward(grader: Grader, response: str, problem: Problem) -> float | str:
    try:
        return grader.grade(response, problem).reward
    except Exception as error:  # the outcome `error`, as the pool has it
        return type(error).__name__


def _is_late(*_: object) -> None:
    raise LateAnswer


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    report: dict[str, list[str]] = {}
    graders = {name: (labelled.grader, labelled.cases[0]) for name, labelled in LABELLED.items()}
    some_case = graders["numeric"][1]
    if mode == "attacks":
        watch = Watch()
        graders["evaluates"] = Evaluates(), some_case
        for name, (grader, case) in graders.items():
            if missing_requirements([grader]):
                continue
            grader.prepare()
            report[name] = attack(grader, case.problem, case.wrong[0], folder, watch)
        for name, read in readers().items():
            _error_of(read, "1")  # what it imports when it is first called
            report[name] = find_reading_faults(read, folder, watch)
    elif mode == "read":
        signal.signal(signal.SIGVTALRM, _is_late)
        for name, read in readers().items():
            if name not in WITH_DEADLINE:
                report[name] = find_late_readings(read)
    else:
        signal.signal(signal.SIGVTALRM, _is_late)
        for name, (grader, case) in graders.items():
            if grader.isolation == "inline" or name == "livebench":
                grader.prepare()
                report[name] = find_late_answers(grader, case.problem, case.right[0])
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
