"""Labelled cases of every registered grader: whoever registers one adds it here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.countdown import CountdownGrader
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.function import FunctionGrader
from treetune.tasks.graders.math import MathGrader
from treetune.tasks.graders.minerva import Minerva
from treetune.tasks.graders.numeric import Gsm8kExact, Gsm8kLenientSubstring, Numeric
from treetune.tasks.graders.reasoning_gym import ReasoningGymGrader
from treetune.testing.graders import Case
from treetune.vocabulary import Problem


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

LABELLED: dict[str, Labelled] = {
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
    "final_answer": Labelled(
        FinalAnswer(),
        [Case(problem("7"), right=["3+4=#7", "#6\n#07"], wrong=["#8"], nearly=["#7.0"], silent=["7", "7#"])],
    ),
    "function": Labelled(
        FunctionGrader(path="tests.tasks.grader_cases:is_gold"),
        [Case(problem("7"), right=["it is 7"], wrong=["it is 8"], nearly=["it is 7."])],
    ),
    "gsm8k_exact": Labelled(Gsm8kExact(), [GSM8K]),
    "gsm8k_lenient_substring": Labelled(
        Gsm8kLenientSubstring(),
        [Case(problem("18"), right=["#### 18", "#### 118"], wrong=["#### 19"], silent=["It is 18."])],
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
}
