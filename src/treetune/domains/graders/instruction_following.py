"""The grader of IFEval: instructions that a program can check (Zhou et al., 2023, arXiv:2311.07911)."""

from __future__ import annotations

import json
import os
import random
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from typing_extensions import override

from treetune.config.errors import nearest
from treetune.contracts import Finding, report_missing
from treetune.domains.extras import missing_extras
from treetune.exceptions import Unavailable
from treetune.tasks.graders.base import Grader
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

IDS_KEY, ARGUMENTS_KEY = "instruction_id_list", "kwargs"
"""The keys of a row with the ids of its instructions, and with the arguments of each."""

_INSTRUCTIONS_ON_LANGUAGE = (
    "language:response_language",
    "change_case:english_capital",
    "change_case:english_lowercase",
)
"""Instructions whose checks detect the language of the text. If the library detects none, it takes them as
followed."""
_INSTRUCTION_ON_LETTERS = "keywords:letter_frequency"
"""The instruction to use a letter a number of times."""

MISSING_SENTENCE_DATA = (
    "the data by which nltk finds sentences, for instructions on numbers of sentences and of capital words:"
    " `python -m nltk.downloader punkt_tab` fetches it where there is a network; elsewhere copy its folder,"
    " tokenizers/punkt_tab, and name the folder above it in NLTK_DATA"
)


@dataclass(frozen=True)
class Instruction:
    """An instruction of IFEval, such as ``length_constraints:number_words``, with its arguments."""

    id: str
    arguments: Mapping[str, Any]


@Grader.register("instruction_following")
@dataclass(frozen=True, kw_only=True)
class InstructionFollowing(Grader):
    """Gives the reward 1 for a response that follows all instructions of its problem, such as a number of
    words, a title, no commas, or German. The checks are those of IFEval in the lm-eval library.

    The instructions are under ``instruction_id_list`` and ``kwargs``, as in the published rows. These keys
    are in the gold, as JSON, or in the problem's `data`. The share of followed instructions is a number of
    the grade, ``instructions``. A text without a recognizable language follows no instruction about language.

    Two instructions need data of nltk that no package contains (`check` reports if it is missing).
    """

    strict: bool = True
    """Whether only the unchanged text is checked. If not, an instruction is also followed if the text without
    its first line, its last line, its asterisks, or several of these follows it."""
    score: Literal["all", "share"] = "all"
    """The reward if only some instructions are followed: 0 (``all``), or their share."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        if absent := missing_extras("the grader instruction_following", "lm_eval", "nltk", "langdetect"):
            yield from report_missing(absent)
            return
        import nltk

        try:
            nltk.data.find("tokenizers/punkt_tab/english/")
        except LookupError:
            yield from report_missing([MISSING_SENTENCE_DATA])

    @override
    def prepare(self) -> None:
        _load_check_classes()

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        return response.strip() or None

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        texts = [extracted]
        if not self.strict:  # the eight texts that IFEval's loose accuracy tries
            lines = extracted.split("\n")
            texts = []
            for kept_lines in (lines, lines[1:], lines[:-1], lines[1:-1]):
                text = "\n".join(kept_lines).strip()
                texts += [text, text.replace("*", "")]
        instructions = read_instructions(problem)
        followed = 0
        for instruction in instructions:
            followed += any(_is_followed(instruction, text) for text in texts if text.strip())
        share = followed / len(instructions)
        reward = share if self.score == "share" or share == 1 else 0.0
        return Grade(reward=reward, outcome="ok", numbers={"instructions": share})


def read_instructions(problem: Problem) -> Sequence[Instruction]:
    """Returns the instructions of a problem. Raises ValueError if it has none."""
    fields: Any = problem.data
    if problem.gold.lstrip().startswith("{"):  # the gold may be a JSON object with the instructions
        fields = {**problem.data, **json.loads(problem.gold)}
    ids, arguments = fields.get(IDS_KEY), fields.get(ARGUMENTS_KEY)
    if isinstance(arguments, str):  # Parquet files may have them as JSON text
        arguments = json.loads(arguments)
    if ids is None or arguments is None or len(ids) == 0 or len(ids) != len(arguments):
        raise ValueError(
            f"problem {problem.id} has no {IDS_KEY!r} and {ARGUMENTS_KEY!r} of the same length,"
            " neither in its gold nor in its fields"
        )
    pairs = zip(ids, arguments, strict=True)
    return [Instruction(id, its_arguments or {}) for id, its_arguments in pairs]


def _is_followed(instruction: Instruction, text: str) -> bool:
    """Returns whether a text follows an instruction, as the library checks it.

    Raises ValueError if the library doesn't have the instruction or arguments are missing, and Unavailable if
    nltk's data is missing.
    """
    check_classes = _load_check_classes()
    if instruction.id not in check_classes:
        nearest_ids = nearest(instruction.id, check_classes)
        suggestion = f"; did you mean {nearest_ids[0]!r}?" if nearest_ids else ""
        raise ValueError(f"there is no instruction {instruction.id!r}{suggestion}")
    if instruction.id in _INSTRUCTIONS_ON_LANGUAGE:
        import langdetect

        try:
            langdetect.detect(text)
        except langdetect.LangDetectException:  # the library would count the instruction as followed
            return False
    check = check_classes[instruction.id](instruction.id)
    names = check.get_instruction_args_keys()
    arguments: dict[str, Any] = {name: instruction.arguments.get(name) for name in names}
    if missing := [name for name in names if arguments[name] in (None, "", [])]:
        raise ValueError(f"instruction {instruction.id!r} doesn't have its arguments {', '.join(missing)}")
    if instruction.id == _INSTRUCTION_ON_LETTERS and not str(arguments["letter"]).isalpha():
        # The library can't count a sign such as "!": it would count a random letter instead.
        count = text.count(str(arguments["letter"]))
        frequency: int = arguments["let_frequency"]
        if arguments["let_relation"] == "less than":
            return count < frequency
        return count >= frequency
    # The library replaces invalid arguments by random ones. The seed makes them the same every time.
    state = random.getstate()
    random.seed(0)
    try:
        check.build_description(**arguments)
        try:
            return bool(check.check_following(text))
        except LookupError as error:
            raise Unavailable(f"missing: {MISSING_SENTENCE_DATA}") from error
    finally:
        random.setstate(state)


@lru_cache(maxsize=1)
def _load_check_classes() -> Mapping[str, Any]:
    """Returns the library's class for each instruction.

    Only the library's modules of IFEval are imported, since the package around them needs a dozen more
    packages. These modules are also kept from downloading data.
    """
    import langdetect

    langdetect.DetectorFactory.seed = 0  # without a seed its results are random
    spec = find_spec("lm_eval")
    assert spec is not None and spec.origin is not None, "check finds missing packages"
    # An empty package takes the place of lm_eval.tasks, so that the modules in its folder are found without
    # importing the package itself.
    package = types.ModuleType("lm_eval.tasks")
    package.__path__ = [str(Path(spec.origin).parent / "tasks")]
    loaded_package, rank = sys.modules.get(package.__name__), os.environ.get("LOCAL_RANK")
    sys.modules[package.__name__] = package
    os.environ["LOCAL_RANK"] = "1"  # only rank 0 downloads
    try:
        from lm_eval.tasks.ifeval import instructions_registry
    finally:
        if loaded_package is None:
            del sys.modules[package.__name__]
        else:
            sys.modules[package.__name__] = loaded_package
        if rank is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = rank
    check_classes: Mapping[str, Any] = instructions_registry.INSTRUCTION_DICT
    return check_classes
