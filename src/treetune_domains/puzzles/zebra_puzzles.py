"""Zebra puzzles: who lives where with what, from clues that leave one arrangement."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from treetune.tasks.base import Task
from treetune.vocabulary import Problem
from treetune_domains.graders.zebra import ZebraGrader
from treetune_domains.puzzles.puzzles import Puzzle, Puzzles
from treetune_domains.puzzles.zebra_clues import (
    MOST_ARRANGEMENTS,
    Clue,
    Item,
    Shape,
    arrangements,
    kinds_of,
    random_arrangement,
    unique_clues,
)

GRADER = ZebraGrader()
POSITION = "Position"

ATTRIBUTES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Name": ("{}", ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")),
    "Pet": ("the owner of the {}", ("cat", "dog", "eel", "fox", "goat", "hen", "owl", "pig")),
    "Drink": ("whoever drinks {}", ("tea", "milk", "water", "juice", "coffee", "cocoa", "cider", "soda")),
    "Job": ("the {}", ("baker", "pilot", "nurse", "smith", "clerk", "judge", "miner", "poet")),
    "Colour": ("whoever lives in the {} house",
               ("red", "blue", "green", "white", "black", "yellow", "pink", "grey")),
}  # fmt: skip
"""How somebody with a value is called, and the values."""

LETTERS = ("abcdefgh", "mnopqrst", "uvwxyzij", "ABCDEFGH", "MNOPQRST")
"""Values of each attribute in symbols."""

SENTENCES = {
    "at": "{0} is at position {p}.",
    "same": "{0} is {1}.",
    "adjacent": "{0} and {1} are next to each other.",
    "ends": "{0} is at one of the two ends.",
    "middle": "{0} is in the middle.",
    "between": "{0} is somewhere between {1} and {2}.",
    "parity": "{0} is at a position with an {parity} number.",
    "before": "{0} is somewhere to the left of {1}.",
    "apart": "{0} is not {1}.",
    "xor": "Either {0} is at position {p} or {1} is at position {q}, but not both.",
    "or": "{0} is at position {p}, or {1} is at position {q}, or both.",
    "nor": "Neither is {0} at position {p} nor {1} at position {q}.",
}
SYMBOLS = {
    "at": "{0}@{p}", "same": "{0}={1}", "adjacent": "{0}~{1}", "ends": "{0}|", "middle": "{0}^",
    "between": "{1}_{0}_{2}", "parity": "{0}%{r}", "before": "{0}<{1}", "apart": "{0}!{1}",
    "xor": "{0}{p}+{1}{q}", "or": "{0}{p};{1}{q}", "nor": "-{0}{p}{1}{q}",
}  # fmt: skip


@Task.register("zebra_puzzles")
@dataclass(frozen=True, kw_only=True)
class ZebraPuzzles(Puzzles):
    r"""Find out which of `objects` (fewest and most) people in a row has which value of `attributes` (fewest
    and most) attributes, from clues. Small puzzles: of at most two million arrangements.

    `level` says of which kinds clues are, from 1 (positions alone) over 12 (all) to 20 (only those that say
    least): see `zebra_clues.KINDS`. Clues are drawn until one arrangement is left; then those are taken away
    without which that stays so. In symbols values are letters: ``2ab,mn:a@1,b=n>\n`` asks for ``am/bn``.

    **Demonstrations** try a table, name the first clue that it breaks, and go on with one that keeps all
    clues named so far. With `demonstration_noise` p the teacher passes each try that breaks a clue off for
    the answer with probability p.
    """

    objects: tuple[Annotated[int, Ge(2), Le(8)], Annotated[int, Ge(2), Le(8)]] = (3, 4)
    attributes: tuple[Annotated[int, Ge(1), Le(5)], Annotated[int, Ge(1), Le(5)]] = (2, 3)
    level: Annotated[int, Ge(1), Le(20)] = 8
    grader: ZebraGrader = GRADER

    kind: ClassVar[str] = "zebra puzzles"

    def __post_init__(self) -> None:
        for name in ("objects", "attributes"):
            least, most = getattr(self, name)
            if least > most:
                raise ValueError(f"{name} is [{least}, {most}]: give the smaller one first")
        count = arrangements(self.objects[1], self.attributes[1])
        if count > MOST_ARRANGEMENTS:
            raise ValueError(
                f"{self.objects[1]} objects with {self.attributes[1]} attributes have {count:,} arrangements,"
                f" more than {MOST_ARRANGEMENTS:,}: choose fewer objects or attributes"
            )
        if POSITION not in self.grader.given:
            raise ValueError(f"the grader's given columns lack {POSITION!r}, which these puzzles tell")

    def _draw(self, generator: random.Random) -> Puzzle | None:
        shape = Shape(generator.randint(*self.objects), generator.randint(*self.attributes))
        arrangement = generator.randrange(arrangements(shape.objects, shape.attributes))
        clues = unique_clues(generator, shape, kinds_of(self.level), arrangement)
        if clues is None:
            return None
        header, values = self._names(generator, shape)
        rows = _table(shape, arrangement, values)
        gold = json.dumps(
            {
                "header": [POSITION, *header],
                "rows": [[str(place), *row] for place, row in enumerate(rows, start=1)],
            }
        )
        told = [self._told(clue, header, values) for clue in clues]
        data = {
            "shape": (shape.objects, shape.attributes),
            "header": header,
            "values": values,
            "clues": clues,
        }
        prompt = self._prompt(shape, header, values, told)
        return Puzzle(prompt, gold, (tuple(map(tuple, values)), frozenset(told)), data)

    def _names(self, generator: random.Random, shape: Shape) -> tuple[list[str], list[list[str]]]:
        """Names of the attributes, and of their values."""
        if self.wording == "symbols":
            return [str(number) for number in range(shape.attributes)], [
                list(LETTERS[number][: shape.objects]) for number in range(shape.attributes)
            ]
        header = generator.sample(list(ATTRIBUTES), shape.attributes)
        return header, [generator.sample(ATTRIBUTES[name][1], shape.objects) for name in header]

    def _prompt(
        self, shape: Shape, header: Sequence[str], values: Sequence[Sequence[str]], told: Sequence[str]
    ) -> str:
        if self.wording == "symbols":
            return f"{shape.objects}{','.join(map(''.join, values))}:{','.join(told)}>\n"
        attributes = "\n".join(
            f"{name}: {', '.join(sorted(of_it))}" for name, of_it in zip(header, values, strict=True)
        )
        listed = "\n".join(f"- {clue}" for clue in told)
        example = {"header": [POSITION, *header], "rows": [["1", *("…" for _ in header)], ["…"]]}
        table = self.grader.tagged(json.dumps(example, ensure_ascii=False))
        return (
            f"{shape.objects} people live in a row, at positions 1 to {shape.objects} from left to right."
            f" They differ in everything that is listed here:\n{attributes}\nIt is known that:\n{listed}\n"
            f"Who has what? Think first, and end with a table: {table}"
        )

    def _told(self, clue: Clue, header: Sequence[str], values: Sequence[Sequence[str]]) -> str:
        symbols = self.wording == "symbols"

        def name(item: Item) -> str:
            value = values[item[0]][item[1]]
            return value if symbols else ATTRIBUTES[header[item[0]]][0].format(value)

        p, q = (*(place + 1 for place in clue.places), 0, 0)[:2]
        # Positions are counted from 1, so that the remainder 0 of a place belongs to an odd number.
        odd = bool(clue.places) and clue.places[0] == 0
        template = (SYMBOLS if symbols else SENTENCES)[clue.kind]
        text = template.format(*map(name, clue.items), p=p, q=q, r=int(odd), parity="odd" if odd else "even")
        return text if symbols else text[0].upper() + text[1:]

    def _solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        shape, values = Shape(*problem.data["shape"]), problem.data["values"]
        clues: Sequence[Clue] = problem.data["clues"]
        left = shape.all
        while True:
            tried = random_arrangement(generator, left)
            rows = _table(shape, tried, values)
            broken = next((clue for clue in clues if not shape.true_of(clue) >> tried & 1), None)
            symbols = self.wording == "symbols"
            table = "/".join(map("".join, rows)) if symbols else "; ".join(map(", ".join, rows))
            if broken is None or self._slips(generator):
                header = [POSITION, *problem.data["header"]]
                numbered = [[str(place), *row] for place, row in enumerate(rows, start=1)]
                yield table if symbols else json.dumps({"header": header, "rows": numbered})
                return
            said = self._told(broken, problem.data["header"], values)
            yield f"{table}:{said}" if symbols else f"Not {table}: {said}"
            left &= shape.true_of(broken)

    def _letters(self) -> str:
        letters = "".join(LETTERS[number][: self.objects[1]] for number in range(self.attributes[1]))
        return letters + "0123456789:,>/" + "".join(SYMBOLS.values()).translate(_BRACES)


_BRACES = {ord(sign): None for sign in "{}pqr"}


def _table(shape: Shape, arrangement: int, values: Sequence[Sequence[str]]) -> list[list[str]]:
    return [
        [values[attribute][value] for attribute, value in enumerate(row)] for row in shape.rows(arrangement)
    ]
