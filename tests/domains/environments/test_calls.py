"""Promises of reading the calls that models write:

* a call with a mistake that leaves one reading is carried out, and any other is answered with one message;
* all calls of a turn are made in their order;
* a tag that a thought or prose only mentions calls nothing;
* reading takes time linear in the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from treetune.domains.environments.calls import native_calls
from treetune.domains.environments.tools import Functions, Python, Tool, Tools
from treetune.vocabulary import Problem


@dataclass(frozen=True)
class Shelf(Tool):
    """A tool of two functions, which return their arguments."""

    name: str = "shelf"

    def functions(self) -> Functions:
        return {"lend": lend, "count": count}


def lend(titles: list[str], days: int = 7) -> str:
    """Lends books.

    Args:
        titles: The books.
        days: For how long.
    """
    return f"{titles} for {days}"


def count() -> str:
    """Counts the books."""
    return "12"


def step(format: str, action: str) -> Any:
    tools = Tools(tools=(Shelf(),), format=format)
    return tools.step(tools.reset(Problem(id="a", prompt="?", gold="?"), 0), action)


LEND_CALL = '{"name": "lend", "arguments": {"titles": ["Emma"], "days": 3}}'


@pytest.mark.parametrize(
    "call",
    [
        LEND_CALL,
        LEND_CALL + "}",
        LEND_CALL[:-1],
        LEND_CALL[:-2],
        LEND_CALL.replace("}}", ",},}"),
        LEND_CALL.replace('"', "'"),
        f"```json\n{LEND_CALL}\n```",
        LEND_CALL.replace('"arguments"', '"parameters"'),
        '{"name": "lend", "arguments": "{\\"titles\\": [\\"Emma\\"], \\"days\\": 3}"}',
        '{"name": "lend", "arguments": {"titles": "[\\"Emma\\"]", "days": "3"}}',
        '{"type": "function", "function": {"name": "lend", "arguments": {"titles": ["Emma"], "days": 3}}}',
        '{"name": "lend", "titles": ["Emma"], "days": 3}',
        '<function=lend>\n<parameter=titles>\n["Emma"]\n</parameter>\n<parameter=days>3</parameter></function>',
    ],
)
@pytest.mark.parametrize("ending", ["\n</tool_call>", ""])
def test_a_call_with_a_mistake_that_leaves_one_reading_is_made(call: str, ending: str) -> None:
    turn = step("hermes", f"I look.\n<tool_call>\n{call}{ending}")
    assert [result[::2] for result in turn.results] == [("lend", "['Emma'] for 3")]
    assert not turn.done


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""', ', "arguments": {}'])
def test_a_call_without_arguments_has_none(arguments: str) -> None:
    turn = step("hermes", f'<tool_call>{{"name": "count"{arguments}}}</tool_call>')
    assert turn.observation == "12"


def test_a_string_may_run_over_lines_and_hold_the_end_tag() -> None:
    for code in ("print(1)\nprint(2)", "print('</tool_call>')"):
        calls, prose = native_calls(
            "hermes", f'So: <tool_call>{{"name": "run", "arguments": {{"code": "{code}"}}}}</tool_call> ok'
        )
        assert ([call.arguments for call in calls], prose) == ([{"code": code}], "So:  ok")


@pytest.mark.parametrize(
    ("format", "action"),
    [
        ("hermes", f'<tool_call>{LEND_CALL}\n{{"name": "count"}}</tool_call>'),
        ("hermes", f'<tool_call>[{LEND_CALL}, {{"name": "count"}}]</tool_call>'),
        ("hermes", f'<tool_call>{LEND_CALL}</tool_call> and <tool_call>{{"name": "count"}}</tool_call>'),
        ("hermes", f'<tool_call>{LEND_CALL}\n<tool_call>{{"name": "count"}}'),
        ("llama", f'{LEND_CALL}; {{"name": "count", "parameters": {{}}'),
        ("llama", f'Let me look.<|python_tag|>{LEND_CALL}; {{"name": "count"}}<|python_tag|>'),
        ("mistral", f'[TOOL_CALLS][{LEND_CALL}, {{"name": "count"}}'),
        ("mistral", '[TOOL_CALLS]lend[ARGS]{"titles": ["Emma"], "days": 3}[TOOL_CALLS]count{}'),
        ("mistral", '[TOOL_CALLS]lend{"titles": ["Emma"], "days": 3} count{}'),
        ("mistral", '[TOOL_CALLS]lend{"titles": ["Emma"], "days": 3}, count{}'),
        ("mistral", '[TOOL_CALLS]lend[ARGS]{"titles": ["Emma"], "days": 3};\ncount[ARGS]{}'),
    ],
)
def test_all_calls_of_a_turn_are_made_in_their_order(format: str, action: str) -> None:
    assert [result[2] for result in step(format, action).results] == ["['Emma'] for 3", "12"]


@pytest.mark.parametrize(
    "call",
    ['{"name": "lend", "arguments": {"titles": ["Em', "count()", '{"arguments": {}}', '"count" {', "[1]"],
)
def test_a_call_without_a_safe_reading_is_answered_with_one_message(call: str) -> None:
    turn = step("hermes", f"<tool_call>{call}</tool_call>")
    (result,) = turn.results
    assert "A call is JSON with a name and an object of arguments" in result[2]


@pytest.mark.parametrize(
    ("format", "action"),
    [
        ("hermes", f"<think>I could <tool_call>{LEND_CALL}</tool_call>.</think>\nIt is 42."),
        ("hermes", f"I could <tool_call>{LEND_CALL}</tool_call>.\n</think>\nIt is 42."),
        ("hermes", f"<think>\nI could <tool_call>{LEND_CALL}</tool_call>"),
        ("llama", f"<think>\n<|python_tag|>{LEND_CALL}\n</think>\n\nIt is 42."),
        ("mistral", f"[THINK][TOOL_CALLS][{LEND_CALL}][/THINK]It is 42."),
        ("hermes", "I would need <tool_call> for that. It is 42."),
        ("hermes", "Calls stand between `<tool_call>` and `</tool_call>`. It is 42."),
        ("hermes", "Calls stand between <tool_call> and </tool_call>. It is 42."),
        ("hermes", "Calls stand between '<tool_call>' ({…}) and '</tool_call>'. It is 42."),
        ("hermes", "Calls stand between “<tool_call>” ({…}) and “</tool_call>”. It is 42."),
        ("hermes", "Calls stand between ‘<tool_call>’ ({…}) and ‘</tool_call>’. It is 42."),
        ("hermes", "Calls stand between „<tool_call>“ ({…}) and „</tool_call>“. It is 42."),
        ("hermes", "Calls stand between «<tool_call>» ({…}) and «</tool_call>». It is 42."),
        ("llama", '{"answer": 42}'),
        ("mistral", "I know of [TOOL_CALLS]. It is 42."),
    ],
)
def test_a_call_that_is_only_mentioned_is_not_made(format: str, action: str) -> None:
    turn = step(format, action)
    assert (turn.done, turn.results) == (True, ())


def test_the_call_behind_a_thought_is_made_and_the_one_in_it_is_not() -> None:
    tools = Tools(tools=(Shelf(),), format="hermes")
    action = (
        f'<think>No <tool_call>{LEND_CALL}</tool_call></think>Yes <tool_call>{{"name": "count"}}</tool_call>'
    )
    assert [call.tool for call in tools.calls(action)] == ["count"]
    message = tools.message(action)
    assert message["content"] == f"<think>No <tool_call>{LEND_CALL}</tool_call></think>\nYes"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["count"]


def test_tags_call_nothing_within_a_thought_that_ended_but_may_interrupt_one() -> None:
    tools = Tools(tools=(Python(),))
    assert tools.calls("<think><python>1</python></think>It is 42.") == []
    assert [call.arguments for call in tools.calls("<think>\nLet me see: <python>6 * 7")] == ["6 * 7"]
    assert tools.calls("<think>\nI could <python>6 * 7</python>, but I know") == []


def test_a_fence_within_a_string_is_part_of_it_and_the_one_at_the_end_is_not() -> None:
    message = (
        '<tool_call>```json\n{"name": "lend", "arguments": {"titles": ["```py\\n1\\n```"]}\n```</tool_call>'
    )
    calls, _ = native_calls("hermes", message)
    assert [call.arguments for call in calls] == [{"titles": ["```py\n1\n```"]}]


def test_an_end_tag_in_a_closed_string_ends_no_call_whose_last_string_is_open() -> None:
    message = '<tool_call>{"a": "</tool_call>", "b": "x</tool_call>and so on'
    calls, prose = native_calls("hermes", message)
    assert calls[0].fault is not None
    assert prose == "and so on"


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "run", "arguments": {"code": "print(\'</tool_call>\')"}}',
        LEND_CALL + '\n{"name": "run", "arguments": {"code": "print(\'</tool_call>\')"}}',
        '<function=run><parameter=code>print("</tool_call>")</parameter></function>',
    ],
)
def test_a_call_without_its_end_tag_may_have_the_tag_in_a_string(call: str) -> None:
    calls, prose = native_calls("hermes", f"So: <tool_call>\n{call}")
    assert [call.fault for call in calls] == [None] * len(calls)
    assert (calls[-1].tool, "</tool_call>" in calls[-1].arguments["code"], prose) == ("run", True, "So:")


def test_a_quote_that_opens_no_json_string_does_not_hide_the_end_tag() -> None:
    call = '<function=run><parameter=code>print(1) # 6" long</parameter></function>'
    calls, prose = native_calls("hermes", f'<tool_call>{call}</tool_call>It is 7" long.')
    assert [call.arguments for call in calls] == [{"code": 'print(1) # 6" long'}]
    assert prose == 'It is 7" long.'


def test_reading_calls_takes_time_linear_in_what_a_model_wrote() -> None:
    for text in (
        '"</tool_call>' * 50_000,
        "[" * 200_000,
        '{"a":' * 50_000,
        "," * 200_000,
        "{'a': " * 50_000,
        " " * 100_000 + "x",
        '{"' + '\\"' * 100_000,
        "<parameter=" * 20_000,
        "{" + " " * 100_000 + "x```",
    ):
        for format in ("hermes", "llama", "mistral"):
            opening = {"hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}[format]
            calls, _ = native_calls(format, opening + text)
            assert all(call.fault for call in calls)
