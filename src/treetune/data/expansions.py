"""Adds fields to rows of some public data sets, so that templates can use them.

The setting `expand` of a `prepare_data` configuration names one of these functions. Each takes a row and a
seed, and returns the row with further fields, or None for a row that can't be used.
"""

from __future__ import annotations

import json
import random
from typing import Any

Fields = dict[str, Any]

MOST_TESTS = 8
"""The most tests of a program that are kept. If there are more, the seed draws which ones."""


def code_tests(row: Fields, seed: int) -> Fields | None:
    """Adds `oracle`, which a grader of programs reads as the gold answer, and `function_name`. Returns None
    if the row has no tests.

    TACO has the tests in `input_output`, and DeepCoder in `tests`. `function_name` is empty if the tests run
    a whole program.
    """
    tests = _read_json(row.get("tests") or row.get("input_output"))
    if isinstance(tests, dict):  # as TACO has them
        pairs = list(zip(tests.get("inputs") or (), tests.get("outputs") or ()))
        name = tests.get("fn_name")
    else:
        pairs = [(test.get("input"), test.get("output")) for test in tests or ()]
        name = _name_of_function(row, tests or ())
    if not pairs:
        return None
    # Tests of a function are values, and tests of a whole program are the texts of its input and output.
    if name:
        pairs = [(_read_arguments(inputs), _read_result(output)) for inputs, output in pairs]
    else:
        pairs = [(_join_lines(text_in), _join_lines(text_out)) for text_in, text_out in pairs]
    if len(pairs) > MOST_TESTS:
        chosen = sorted(random.Random(seed).sample(range(len(pairs)), MOST_TESTS))
        pairs = [pairs[index] for index in chosen]
    oracle = {
        "inputs": [test_input for test_input, _ in pairs],
        "outputs": [test_output for _, test_output in pairs],
    }
    if name:
        oracle["fn_name"] = name
    return {**row, "oracle": oracle, "function_name": name or ""}


def codeio_pair(row: Fields, seed: int) -> Fields | None:
    """Adds `given`, `wanted` and `direction`. Returns None if the program has no pair of input and output.

    `direction` is the side of the first pair that is to be predicted, ``output`` or ``input``. The seed draws
    it. `wanted` is this side of the pair, and `given` the other side.
    """
    pairs = row.get("ios") or ()
    if not pairs:
        return None
    first_pair = pairs[0]
    direction = random.Random(seed).choice(("output", "input"))
    other_side = "input" if direction == "output" else "output"
    return {**row, "direction": direction, "given": first_pair[other_side], "wanted": first_pair[direction]}


def shuffled_choices(row: Fields, seed: int) -> Fields | None:
    """Adds `choices` and `letter` to a row of GPQA.

    `choices` has a line for each of the four answers, in an order that the seed draws. `letter` is the letter
    of the right answer.
    """
    right = row["Correct Answer"]
    options = [right, *(row[f"Incorrect Answer {number}"] for number in (1, 2, 3))]
    random.Random(seed).shuffle(options)
    lines = [f"{letter}) {str(option).strip()}" for letter, option in zip("ABCD", options)]
    fields = {name.replace(" ", "_"): value for name, value in row.items()}  # so that templates can name them
    return {**fields, "choices": "\n".join(lines), "letter": "ABCD"[options.index(right)]}


def orz_turns(row: Fields, seed: int) -> Fields | None:
    """Returns the `question` and the `answer` of a pair of turns, as Open-Reasoner-Zero writes them."""
    # The names of the two columns depend on the reader. In alphabetical order, the question's column comes
    # first.
    question, answer = (row[name] for name in sorted(row)[:2])
    return {"question": question["value"], "answer": answer["ground_truth"]["value"]}


def _read_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _name_of_function(row: Fields, tests: Any) -> str | None:
    """Returns the name of the function that the tests call; None if the tests run a whole program.

    Some sub-sets of DeepCoder have the name in a test, others in the row's metadata.
    """
    metadata = _read_json(row.get("metadata") or "{}")
    for test in tests:
        if test.get("fn_name"):
            return test["fn_name"]
    calls_function = any(test.get("testtype") == "functional" for test in tests)
    return metadata.get("func_name") if calls_function else None


def _read_arguments(arguments: Any) -> Any:
    """Returns the arguments of a call, which are a list, or text with a line of JSON for each."""
    return [json.loads(line) for line in arguments.split("\n")] if isinstance(arguments, str) else arguments


def _read_result(expected: Any) -> Any:
    """Returns the expected result of a call, which is JSON text, another text, or a list with the result as
    its only item."""
    if isinstance(expected, str):
        try:
            return json.loads(expected)
        except ValueError:
            return expected
    return expected[0] if isinstance(expected, list) and len(expected) == 1 else expected


def _join_lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)
