"""Promises of the code grader about the ways in which models write programs:

* a program is read from any fence, with or without the beginning that the problem gives;
* a right program earns its reward behind a stub, a helper or a missing import, and a wrong one doesn't;
* printed numbers are compared with as many digits as they need, and infinity equals itself alone.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.domains.graders.code_grading import needs_sandbox
from treetune.domains.graders.code import Code, are_close, same_output
from treetune.domains.sandbox.inside.joining import import_customary_names, join_program
from treetune.tasks.graders.extraction import fenced_blocks
from treetune.vocabulary import Problem

DOUBLE = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}
PROGRAM = "print(int(input()) * 2)"


def reward(response: str, gold: dict[str, Any], **data: Any) -> tuple[float, str | None]:
    grade = Code().grade(response, Problem(id="p", prompt="?", gold=json.dumps(gold), data=data))
    return grade.reward, grade.message


def fenced(code: str) -> str:
    return f"So:\n```python\n{code}\n```\n"


# Fences


@pytest.mark.parametrize(
    "response",
    [
        "1. The program:\n   ```python\n   n = int(input())\n   print(n * 2)\n   ```",
        "- ```python\n  n = int(input())\n  if n:\n      print(n * 2)\n  ```",
        "> ```python\n> n = int(input())\n> if n:\n>     print(n * 2)\n> ```",
        "\t```python\n\tn = int(input())\n\tprint(n * 2)\n\t```",
        "````python\nprint(int(input()) * 2)\n````",
        "````python\ns = '''\n```\n'''\nprint(int(input()) * 2)\n````",
        "~~~python\nprint(int(input()) * 2)\n~~~",
        "~~~\nprint(int(input()) * 2)\n~~~",
        "```python\nprint(int(input()) * 2)",
        "```\nprint(int(input()) * 2)\n",
        "``` Python\nprint(int(input()) * 2)\n```   ",
        '```python title="main.py"\nprint(int(input()) * 2)\n```',
        "```{.python}\nprint(int(input()) * 2)\n```",
        "```python\r\nprint(int(input()) * 2)\r\n```\r\n",
        "Input:\n```\n2\n```\nCode:\n```py\nprint(int(input()) * 2)\n```\nOutput:\n```\n4\n```",
        "```python\nn = int(input())\n```\nand then\n```python\nprint(n * 2)\n```",
        "```python\nthis is cut\n```python\nprint(int(input()) * 2)\n```",
    ],
)
@needs_sandbox
def test_a_program_is_read_from_any_fence(response: str) -> None:
    assert reward(response, DOUBLE) == (1.0, None)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("````\n```\na\n```\n````", ["```\na\n```"]),
        ("~~~\n```\na\n~~~", ["```\na"]),
        ("```\na\n~~~\nb\n```", ["a\n~~~\nb"]),
        ("  ```\n  a\n b\nc\n  ```", ["a\nb\nc"]),
        ("``` a ``` b", []),
        ("```\nopen", []),
    ],
)
def test_a_block_ends_where_its_own_fence_does(text: str, blocks: list[str]) -> None:
    assert fenced_blocks(text) == blocks


def test_a_block_that_is_not_closed_counts_where_it_is_asked_for() -> None:
    assert fenced_blocks("```py\na\n```\n```py\nb", "py", unclosed=True) == ["a", "b"]


# What a problem begins with

SQUARE = {
    "functional": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n\ncheck(f)"  # noqa: E501
}

PREFIXES = {
    "docstring": 'def f(n):\n    """Squares."""\n',
    "half": "def f(n):\n",
    "without an end": "def f(n):",
    "pass": "def f(n):\n    pass\n",
    "import": 'def f(n):\n    import math\n    """Squares."""\n',
    "import and pass": "def f(n):\n    from math import prod\n    pass\n",
    "return None": "def f(n):\n    return None\n",
    "return": "def f(n):\n    return\n",
    "return a constant": 'def f(n):\n    """Squares."""\n    return -1\n',
    "return a list": "def f(n):\n    return []\n",
    "assignment": "def f(n):\n    result = 0\n    return result\n",
    "assignment alone": "def f(n):\n    result = None\n",
    "dots": "def f(n): ...\n",
    "raise": "def f(n):\n    raise NotImplementedError\n",
    "helper": "def g(n):\n    return n * n\n\ndef f(n):\n    # your code\n    pass\n",
    "imports": "from typing import List\nimport math\n\ndef f(n: int) -> int:\n    return 0\n",
}
WHOLE = {
    "the function": "def f(n):\n    return n * n",
    "with an import": "import math\ndef f(n):\n    return math.prod([n, n])",
    "with the future": "from __future__ import annotations\ndef f(n: Whatever):\n    return n * n",
    "a lambda": "f = lambda n: n * n",
    "with a helper": "def help_me(n):\n    return n * n\n\ndef f(n):\n    return help_me(n)",
}
REST = {
    "body": "    return n * n",
    "body of two lines": "    m = n\n    return m * n",
    "body without its first indentation": "m = n\n    return m * n",
    "body without indentation": "m = n\nreturn m * n",
    "body and more": "    return n * n\n\nprint(f(2))",
}


@needs_sandbox
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("answer", WHOLE)
def test_a_stub_hides_no_function_that_the_answer_defines(prefix: str, answer: str) -> None:
    assert reward(fenced(WHOLE[answer]), SQUARE, prefix=PREFIXES[prefix]) == (1.0, None)


@needs_sandbox
@pytest.mark.parametrize("prefix", [name for name in PREFIXES if name not in ("without an end", "dots")])
@pytest.mark.parametrize("answer", REST)
def test_the_body_of_a_function_continues_where_its_beginning_ends(prefix: str, answer: str) -> None:
    assert reward(fenced(REST[answer]), SQUARE, prefix=PREFIXES[prefix]) == (1.0, None)


@needs_sandbox
@pytest.mark.parametrize("prefix", ["docstring", "return None", "assignment", "half", "imports"])
@pytest.mark.parametrize(
    "answer", ["    return n + n", "def f(n):\n    return n + n", "def g(n):\n    return n * n"]
)
def test_a_wrong_answer_stays_wrong_behind_a_stub(prefix: str, answer: str) -> None:
    assert reward(fenced(answer), SQUARE, prefix=PREFIXES[prefix])[0] == 0.0


@needs_sandbox
def test_an_answer_uses_what_the_prefix_imports_and_defines() -> None:
    prefix = "from math import prod\n\ndef twice(n):\n    return [n, n]\n\ndef f(n):\n    return None\n"
    assert reward(fenced("def f(n):\n    return prod(twice(n))"), SQUARE, prefix=prefix) == (1.0, None)


@needs_sandbox
@pytest.mark.parametrize(
    "helper",
    [
        "def same(a, b):\n    return a == b\n",
        "def same(a, b):\n    result = a == b\n    return result\n",
        "def same(a, b):\n    if a == b:\n        return True\n    return False\n",
        "def same(a, b): assert a == b; return True\n",
    ],
)
def test_an_answer_takes_the_place_of_no_helper_that_the_tests_use(helper: str) -> None:
    gold = {"functional": "assert same(f(2), 4)"}
    forged = "def same(a, b):\n    return True\n\ndef f(n):\n    return 0"
    assert reward(fenced(forged), gold, prefix=f"{helper}\ndef f(n):\n    return None\n")[0] == 0.0


@needs_sandbox
def test_a_method_is_filled_in_as_a_function_is() -> None:
    gold = {"functional": "assert Solution().f(3) == 9"}
    prefix = "class Solution:\n    def f(self, n: int) -> int:\n"
    for answer in (
        "        return n * n",
        "return n * n",
        "class Solution:\n    def f(self, n):\n        return n * n",
    ):
        assert reward(fenced(answer), gold, prefix=prefix) == (1.0, None)


@needs_sandbox
def test_a_program_is_joined_to_its_prefix_as_well() -> None:
    prefix = "def double(n):\n    return None\n"
    answer = "def double(n):\n    return n * 2\n\nprint(double(int(input())))"
    assert reward(fenced(answer), DOUBLE, prefix=prefix) == (1.0, None)


def test_a_deep_prefix_or_answer_ends_nothing() -> None:
    assert join_program("def f(n):\n", "(" * 100_000).startswith("def f")
    assert import_customary_names("(" * 100_000) == {}


# Imports that benchmarks make


@needs_sandbox
@pytest.mark.parametrize(
    "body",
    [
        "class Solution:\n    def top(self, nums: List[int], k: int) -> Optional[List[int]]:\n        return sorted(nums)[::-1][:k]",  # noqa: E501
        "def top(nums, k):\n    return heapq.nlargest(k, nums)",
        "def top(nums, k):\n    return nlargest(k, nums)",
        "@lru_cache(None)\ndef size(k):\n    return math.floor(k)\ndef top(nums, k):\n    return sorted(nums, reverse=True)[:size(k)]",  # noqa: E501
        "def top(nums, k):\n    d = defaultdict(int)\n    return list(deque(sorted(nums, key=lambda x: (-x, d[x]))))[:k]",  # noqa: E501
    ],
)
def test_functions_find_the_customary_imports(body: str) -> None:
    gold = {"inputs": ["[1,2,3]\n2"], "outputs": ["[3,2]"], "fn_name": "top"}
    assert reward(fenced(body), gold) == (1.0, None)


@needs_sandbox
def test_programs_find_them_too_and_their_own_names_come_first() -> None:
    program = (
        "def gcd(a, b):\n    return 2\nn = int(input())\nprint(Counter({n: n * gcd(4, 4)})[n])\nsys.exit(0)"
    )
    assert reward(fenced(program), DOUBLE) == (1.0, None)


@needs_sandbox
def test_a_name_that_nobody_defines_stays_an_error() -> None:
    assert "NameError" in str(reward(fenced("print(undefined_name)"), DOUBLE)[1])


def test_only_what_is_missing_is_imported() -> None:
    assert import_customary_names("import math\nprint(math.pi, sum([1]))") == {}
    assert set(import_customary_names("print(sqrt(2), math.pi)")) == {"sqrt", "math"}


# Numbers


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("inf", "inf", True),
        ("-inf", "inf", False),
        ("inf", "-inf", False),
        ("Infinity", "inf", True),
        ("nan", "inf", False),
        ("inf", "nan", False),
        ("nan", "1.5", False),
        ("nan", "3", False),
        ("inf", "3", False),
        ("1e400", "2e400", False),
        ("1e400", "10e399", True),
        ("1e400", "inf", True),
        ("1e308", "inf", False),
        ("-1e999", "1e999", False),
        ("inf", "1e400", False),
        ("snan", "1", False),
    ],
)
def test_infinity_and_nan_are_near_nothing_else(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


def test_values_that_are_infinite_are_near_themselves_alone() -> None:
    infinite = float("inf")
    assert are_close(infinite, infinite, 1e-6)
    assert not any(
        are_close(*pair, 1e-6)
        for pair in ((infinite, -infinite), (infinite, 1e308), (float("nan"), infinite))
    )


@needs_sandbox
def test_integers_have_as_many_digits_as_they_need() -> None:
    number = 7**5200
    import sys

    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        golds = [
            {"inputs": ["5200\n"], "outputs": [f"{number}"]},
            {"inputs": [[5200]], "outputs": [number], "fn_name": "f"},
            {"inputs": [f"{number}"], "outputs": [number], "fn_name": "same"},
        ]
        texts = [json.dumps(gold) for gold in golds]
        wrong = json.dumps({"inputs": [[5200]], "outputs": [number + 1], "fn_name": "f"})
    finally:
        sys.set_int_max_str_digits(most)
    answers = [
        "print(7**int(input()))",
        "def f(n):\n    return 7**n",
        "def same(n):\n    return n",
    ]
    for code, gold in zip(answers, texts, strict=True):
        assert Code().grade(fenced(code), Problem(id="p", prompt="?", gold=gold)).reward == 1.0
    assert Code().grade(fenced(answers[1]), Problem(id="p", prompt="?", gold=wrong)).reward == 0.0
    assert sys.get_int_max_str_digits() == most
