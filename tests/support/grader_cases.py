"""Labelled cases of every registered grader: whoever registers one adds it here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.conformance import Case
from treetune.tasks.graders.countdown import CountdownGrader
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.function import FunctionGrader
from treetune.tasks.graders.numeric import Gsm8kExact, Gsm8kLenientSubstring, Numeric
from treetune.vocabulary import Problem
from treetune_domains.graders.code import Code
from treetune_domains.graders.codeio import CodeIO
from treetune_domains.graders.cruxeval import CruxEval
from treetune_domains.graders.instruction_following import InstructionFollowing
from treetune_domains.graders.livebench import LiveBench
from treetune_domains.graders.math import MathGrader
from treetune_domains.graders.minerva import Minerva
from treetune_domains.graders.multiple_choice import MultipleChoice
from treetune_domains.graders.puzzles import GridGrader, OrderingGrader, ZebraGrader
from treetune_domains.graders.reasoning_gym import ReasoningGymGrader
from treetune_domains.graders.table import TableGrader
from treetune_domains.graders.tagged import F1, ExactMatch, OneWord
from treetune_lab.signposts import SignpostsGrader


@dataclass(frozen=True)
class Labelled:
    """`skip`: hostile answers that a preset accepts, since the code that it repeats does."""

    grader: Grader
    cases: Sequence[Case]
    skip: Sequence[str] = ()


def problem(gold: str, prompt: str = "?") -> Problem:
    return Problem(id=f"test/{gold[:20]}", prompt=prompt, gold=gold)


def is_gold(response: str, gold: str) -> float | None:
    """A user's function."""
    words = response.split()
    return float(words[-1] == gold) if words else None


FACT = Case(
    problem('["Neil Armstrong", "Armstrong"]'),
    right=["<answer>the Armstrong.</answer>", "<answer>\nneil armstrong\n</answer>"],
    wrong=["<answer>Buzz Aldrin</answer>"],
    nearly=["<answer>It was Neil Armstrong</answer>", "<answer>Neil</answer>"],
    silent=["Neil Armstrong"],
)

GSM8K = Case(
    problem("18"),
    right=["It is\n#### 18"],
    wrong=["#### 19", "#### -18"],
    nearly=["#### 18.5"],
    silent=["It is 18."],
)

CHAIN_SUM = Problem(
    id="test/chain_sum",
    prompt="14 + 50 =",
    gold="64",
    data={
        "dataset": "chain_sum",
        "config": "{}",
        "question": "State the final answer to the following arithmetic problem: 14 + 50 =",
        "entry": '{"answer": "64", "metadata": {}}',
    },
)

ELSEWHERE = {"judge": "test_judge.py"}
"""Those that need something to be started, and the file of tests that holds them against their cases."""

FENCED = "```python\n{}\n```"

LABELLED: dict[str, Labelled] = {
    "code": Labelled(
        Code(test_seconds=0.5),
        [
            Case(
                problem('{"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}'),
                right=[FENCED.format("print(sum(map(int, input().split())))")],
                wrong=[FENCED.format("print(3)"), FENCED.format("print('passed'); exit()")],
                nearly=[FENCED.format("print(sum(map(int, input().split())), end='.5')")],
                silent=["print(sum(map(int, input().split())))"],
                hanging=[
                    FENCED.format("while True: pass"),
                    FENCED.format("import os\nwhile True: os.fork()"),
                ],
            ),
            Case(
                problem('{"functional": "assert f(2) == 4\\nassert f(3) == 9"}'),
                right=[FENCED.format("def f(n): return n * n")],
                wrong=[FENCED.format("def f(n): return 4"), FENCED.format("import os; os._exit(0)")],
                nearly=[FENCED.format("def f(n): return n * n + 1e-3")],
                silent=["def f(n): return n * n"],
                hanging=[FENCED.format("def f(n):\n    while True: pass")],
            ),
        ],
    ),
    "cruxeval": Labelled(
        CruxEval(),
        [
            Case(
                problem('{"code": "def f(n): return [n, n]", "input": "3"}'),
                right=["```\n[3, 3]\n```", "<answer>assert f(3) == [3, 3]</answer>"],
                wrong=["```\n[3]\n```", "```\nassert f(4) == [4, 4]\n```"],
                nearly=["```\n(3, 3)\n```", "```\nf(3)\n```"],
                silent=["[3, 3]"],
                hanging=["```\n" + "9" * 5000 + "**9**9\n```"],
            )
        ],
    ),
    "codeio": Labelled(
        CodeIO(),
        [
            Case(
                problem('{"output": [1, 2.5, true]}'),
                right=['```json\n{"output": [1, 2.5, true]}\n```', '```\n"output": [1, 2.5, true]\n```'],
                wrong=['```json\n{"output": [1, 2.6, true]}\n```', "```json\nf(1)\n```"],
                nearly=['```json\n{"output": [1, 2.5, 1]}\n```', '```json\n{"input": [1, 2.5, true]}\n```'],
                silent=["It gives a list.", "```json\n```"],
                hanging=["```json\n" + "[" * 50_000 + "\n```", "```\n" + "-" * 90_000 + "1\n```"],
            )
        ],
    ),
    "countdown": Labelled(
        CountdownGrader(),
        [
            Case(
                problem("39 from 12 34 7"),
                right=["<answer>12 + 34 - 7</answer>", "first <answer>1</answer> <answer>34+12-7</answer>"],
                wrong=["<answer>12 + 34 + 7</answer>", "<answer>39</answer>"],
                nearly=["<answer>34 + 5</answer>", "<answer>34+12-7"],
                silent=["12 + 34 - 7"],
                hanging=["<answer>12^34^7</answer>", "<answer>" + "(" * 5000 + "</answer>"],
            )
        ],
    ),
    "exact_match": Labelled(ExactMatch(), [FACT]),
    "f1": Labelled(F1(), [FACT]),
    "final_answer": Labelled(
        FinalAnswer(),
        [Case(problem("7"), right=["3+4=#7", "#6\n#07"], wrong=["#8"], nearly=["#7.0"], silent=["7", "7#"])],
    ),
    "function": Labelled(
        FunctionGrader(path="tests.support.grader_cases:is_gold"),
        [Case(problem("7"), right=["it is 7"], wrong=["it is 8"], nearly=["it is 7."])],
    ),
    "grid": Labelled(
        GridGrader(),
        [
            Case(
                problem("[[1, 0], [0, 3]]"),
                right=["<answer>[[1, 0], [0, 3]]</answer>", "<answer>\n[ [1,0],\n[0,3] ]</answer>"],
                wrong=["<answer>[[0, 0], [0, 0]]</answer>", "<answer>the same</answer>"],
                nearly=["<answer>[[1, 0], [0, 2]]</answer>", "<answer>[[1, 0], [0, 3], [0, 0]]</answer>"],
                silent=["[[1, 0], [0, 3]]"],
                hanging=["<answer>" + "[" * 100_000 + "</answer>"],
            )
        ],
    ),
    "gsm8k_exact": Labelled(Gsm8kExact(), [GSM8K]),
    "gsm8k_lenient_substring": Labelled(
        Gsm8kLenientSubstring(),
        [Case(problem("18"), right=["#### 18", "#### 118"], wrong=["#### 19"], silent=["It is 18."])],
    ),
    "instruction_following": Labelled(
        InstructionFollowing(),
        [
            Case(
                Problem(
                    id="test/instructions",
                    prompt="Praise the sea in at most nine words, in small letters and without commas.",
                    gold="",
                    data={
                        "instruction_id_list": [
                            "keywords:existence",
                            "length_constraints:number_words",
                            "change_case:english_lowercase",
                            "punctuation:no_comma",
                        ],
                        "kwargs": [
                            {"keywords": ["sea"], "num_words": None},
                            {"num_words": 10, "relation": "less than"},
                            {},
                            {},
                        ],
                    },
                ),
                right=["the sea is blue and it is very wide"],
                wrong=["I love the mountains, which are high.", "no"],
                nearly=["the sea is blue, and it is very wide", "The sea is blue and it is very wide"],
                silent=["<think>the sea is blue</think>"],
            )
        ],
    ),
    "livebench": Labelled(
        LiveBench(),
        [
            Case(
                Problem(id="test/lies", prompt="?", gold="yes, no, yes", data={"task": "web_of_lies_v2"}),
                right=["So: **yes, no, yes**", "<solution>yes, no, yes</solution>"],
                wrong=["**no, no, yes**"],
                nearly=["**yes, no**", "**yes, unknown, yes**", "**yes, no, yes** or **no, no, no**"],
            ),
            Case(
                Problem(id="test/join", prompt="?", gold="{'a': 'x', 'b': 'y'}", data={"task": "tablejoin"}),
                right=["```python\n{'b': 'y', 'a': 'x'}\n```"],
                wrong=["```python\n{'a': 'y'}\n```", "no columns"],
                nearly=["{'a': 'x'}"],
                hanging=["{" * 50_000],
            ),
        ],
    ),
    "math": Labelled(
        MathGrader(),
        [
            Case(
                problem(r"\frac{3}{4}"),
                right=[r"So \boxed{\frac{3}{4}}.", r"\boxed{0.75}", "The answer is 3/4."],
                wrong=[r"\boxed{\frac{4}{3}}", r"\boxed{-\frac{3}{4}}"],
                nearly=[r"\boxed{0.7501}", r"\boxed{75}"],
                silent=["I don't know."],
                hanging=[r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(x+1)^{99999}}"],
            )
        ],
    ),
    "minerva": Labelled(
        Minerva(),
        [
            Case(
                problem(r"\frac{3}{4}"),
                right=[r"So \boxed{\frac{3}{4}}."],
                wrong=[r"\boxed{\frac{4}{3}}"],
                nearly=[r"\boxed{0.9}"],
                hanging=[r"\boxed{9^{9^{9^{9}}}}"],
            )
        ],
    ),
    "multiple_choice": Labelled(
        MultipleChoice(),
        [
            Case(
                problem("C"),
                right=[r"\boxed{C}", "The answer is (C)."],
                wrong=[r"\boxed{B}", "Answer: D"],
                nearly=[r"\boxed{B, C}", "Answer: Compute it", r"\boxed{C} or rather \boxed{D}"],
                silent=["", "C", r"\boxed{Cat}"],
            )
        ],
    ),
    "numeric": Labelled(
        Numeric(),
        [
            Case(
                problem("She has #### 1,080"),
                right=["#### 1080", "#### $1,080.00", "#### 2160/2", "####\n1080 eggs"],
                wrong=["#### 1081", "#### -1080"],
                nearly=["#### 1,08", "#### 108000"],
                silent=["1080"],
            )
        ],
    ),
    "one_word": Labelled(
        OneWord(),
        [
            Case(
                problem("wumpus"),
                right=["<answer>wumpus</answer>", "<answer>\nWumpus.\n</answer>"],
                wrong=["<answer>tove</answer>"],
                nearly=["<answer>wumpuss</answer>", "<answer>a wumpus</answer>"],
                silent=["wumpus"],
            )
        ],
    ),
    "ordering": Labelled(
        OrderingGrader(),
        [
            Case(
                problem('["Ann", "Bob", "Eve"]'),
                right=['<answer>["ann", "bob", "eve"]</answer>', "<answer>Ann,\nBob,\nEve</answer>"],
                wrong=['<answer>["Bob", "Ann", "Eve"]</answer>'],
                nearly=['<answer>["Ann", "Bob"]</answer>', "<answer>Ann, Bob, Eve, Ann</answer>"],
                silent=["Ann, Bob, Eve"],
            )
        ],
    ),
    "reasoning_gym": Labelled(
        ReasoningGymGrader(),
        [
            Case(
                CHAIN_SUM,
                right=["<answer>64</answer>", "<answer>1</answer>\n<answer>\n64\n</answer>"],
                wrong=["<answer>63</answer>"],
                nearly=["<answer>64.5</answer>", "<answer>It is 64</answer>"],
                silent=["64", "<answer></answer>"],
            )
        ],
    ),
    "signposts": Labelled(
        SignpostsGrader(),
        [
            Case(
                Problem(
                    id="way",
                    prompt="B..\nF..\n",
                    gold="31",
                    data={"groups": [[0], [1]], "length": 8, "first": 0},
                ),
                right=["B3a\nF1b\n"],
                wrong=["B2a\nF2b\n", "13"],
                nearly=["B3a\nF2b\n", "B3a\n", "31", "B3aF1b"],
            )
        ],
    ),
    "table": Labelled(
        TableGrader(),
        [
            Case(
                problem("12.5 | Norway"),
                right=[r"\boxed{12.5 | Norway}", r"\boxed{\text{norway}|12.50}"],
                wrong=[r"\boxed{Norway}", r"\boxed{13 | Norway}"],
                nearly=[r"\boxed{1250 | Norway}", r"\boxed{0.125 | Norway}", r"\boxed{12.5 | 12.5}"],
                silent=["12.5 and Norway"],
                hanging=[r"\boxed{9**9**9**9 | Norway}"],
            )
        ],
    ),
    "zebra": Labelled(
        ZebraGrader(),
        [
            Case(
                problem('{"header": ["Position", "Cat"], "rows": [["1", "Ann"], ["2", "Bob"]]}'),
                right=[
                    '<answer>{"header": ["Position", "Cat"], "rows": [["1", "Ann"],\n["2", "bob"]]}</answer>',
                    '<answer>[["2", "Bob"], ["1", "Ann"]]</answer>',
                ],
                wrong=['<answer>[["1", "Bob"], ["2", "Ann"]]</answer>', "<answer>Ann, Bob</answer>"],
                nearly=['<answer>[["1", "Ann"], ["2", ""]]</answer>', '<answer>[["1", "Ann"]]</answer>'],
                silent=['[["1", "Ann"], ["2", "Bob"]]'],
            )
        ],
    ),
}
