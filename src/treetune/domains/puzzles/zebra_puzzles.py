"""Zebra puzzles, which ask who has what and lives where. Their clues admit one arrangement.

A set of arrangements is an integer with a bit for each arrangement. The set that several clues admit is the
``&`` of the clues' sets, so a puzzle with half a million arrangements is made in milliseconds.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from itertools import permutations
from operator import or_
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Le
from typing_extensions import override

from treetune.domains.graders.puzzles import ZebraGrader
from treetune.domains.puzzles.base import Puzzle, Puzzles, needed_clues
from treetune.tasks.base import Task
from treetune.vocabulary import Problem

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
"""For each attribute: the words by which clues call a person with a value, and the values."""

LETTERS = ("abcdefgh", "mnopqrst", "uvwxyzij", "ABCDEFGH", "MNOPQRST")
"""The values of each attribute with the wording ``symbols``: a letter for each value."""

# The templates of clues: {0}, {1} and {2} are the clue's items, p and q are positions from 1, and r is a
# position modulo 2.
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

MOST_ARRANGEMENTS = 2_000_000
"""The most arrangements of a puzzle, since each clue's set has a bit for each of them."""

ClueKind = Literal[
    "at", "same", "adjacent", "ends", "middle", "between", "parity", "before", "apart", "xor", "or", "nor"
]

KINDS: tuple[ClueKind, ...] = (
    "at", "same", "adjacent", "ends", "middle", "between", "parity", "before", "apart", "xor", "or", "nor",
)  # fmt: skip
"""The kinds of clues, from the most informative to the least."""

AttributeValue = tuple[int, int]
"""The number of an attribute, and the number of one of its values."""


class ZebraClue(NamedTuple):
    """A clue about some items."""

    kind: ClueKind
    items: tuple[AttributeValue, ...]
    places: tuple[int, ...] = ()
    """The positions, counted from 0, that the clue names, in the order of its items. For ``parity`` it is one
    position modulo 2, and most kinds have none."""


def kinds_of(level: int) -> tuple[ClueKind, ...]:
    """Returns the kinds of clues of a level from 1 to 20. Up to level 12, each level adds the next kind. Each
    further level removes the most informative one."""
    return KINDS[:level] if level <= len(KINDS) else KINDS[level - len(KINDS) :]


def count_arrangements(objects: int, attributes: int) -> int:
    """Returns the number of arrangements of so many objects and attributes."""
    return int(math.factorial(objects) ** attributes)


@dataclass(frozen=True)
class ZebraShape:
    """The size of a puzzle. Each of the objects in a row has a different value of every attribute."""

    objects: int
    attributes: int

    @property
    def items(self) -> Sequence[AttributeValue]:
        return [(attribute, value) for attribute in range(self.attributes) for value in range(self.objects)]

    def rows(self, arrangement: int) -> list[list[int]]:
        """Returns the attributes' values at each position, in the arrangement with this number."""
        # An order says which value of an attribute is at each position. The number of an arrangement has a
        # digit for each attribute: the number of the attribute's order. The base is the number of orders.
        orders = _all_orders(self.objects)
        chosen = []
        for _ in range(self.attributes):
            arrangement, order = divmod(arrangement, len(orders))
            chosen.append(orders[order])
        return [[order[position] for order in chosen] for position in range(self.objects)]

    def random_clue(self, generator: random.Random, kind: ClueKind) -> ZebraClue | None:
        """Draws a clue of the kind. Returns None if the draw makes no sense as a clue.

        The clue is drawn without regard to a solution, so it may be false.
        """
        if kind in ("at", "ends", "middle", "parity"):
            if kind == "middle" and self.objects % 2 == 0:
                return None  # there is no middle
            if kind == "ends" and self.objects == 2:
                return None  # everybody is at an end
            item = generator.choice(self.items)
            if kind == "at":
                return ZebraClue(kind, (item,), (generator.randrange(self.objects),))
            if kind == "parity":  # a position modulo 2
                return ZebraClue(kind, (item,), (generator.randrange(2),))
            return ZebraClue(kind, (item,), ())
        count = 3 if kind == "between" else 2
        # The items of "same" and "apart" are values of two attributes.
        if len(self.items) < count or (kind in ("same", "apart") and self.attributes == 1):
            return None
        items = tuple(generator.sample(self.items, count))
        if kind in ("same", "apart") and items[0][0] == items[1][0]:
            return None  # two values of one attribute are never together
        # The kinds "xor", "or" and "nor" have a position for each item, and the others have none.
        places: tuple[int, ...] = ()
        if kind in ("xor", "or", "nor"):
            places = tuple(generator.randrange(self.objects) for _ in items)
        return ZebraClue(kind, items, places)

    def true_arrangements(self, clue: ZebraClue) -> int:
        """Returns the set of arrangements for which the clue is true."""
        arrangements_at = _arrangements_by_position(self)
        # `first` and `second` have, for each position, the set of arrangements with the clue's first or
        # second item there. `&` means that two things hold at once, and `|` that at least one of them does.
        first = arrangements_at[clue.items[0]]
        second = arrangements_at[clue.items[1]] if len(clue.items) > 1 else first
        last = self.objects - 1
        match clue.kind:
            case "at":
                return first[clue.places[0]]
            case "ends":
                return first[0] | first[last]
            case "middle":
                return first[last // 2]
            case "parity":
                remainder = clue.places[0]  # of the position, modulo 2
                return _union(
                    first[position] for position in range(self.objects) if position % 2 == remainder
                )
            case "same":
                return _union(
                    first_set & second_set for first_set, second_set in zip(first, second, strict=True)
                )
            case "apart":
                return self.all_arrangements ^ self.true_arrangements(clue._replace(kind="same"))
            case "adjacent":
                return _union(
                    first[position] & (second[position + 1]) | first[position + 1] & second[position]
                    for position in range(last)
                )
            case "before":
                return _union(first[position] & _union(second[position + 1 :]) for position in range(last))
            case "between":
                third = arrangements_at[clue.items[2]]
                return _union(
                    first[position]
                    & (
                        _union(second[:position]) & _union(third[position + 1 :])
                        | _union(third[:position]) & _union(second[position + 1 :])
                    )
                    for position in range(1, last)
                )
        # "xor", "or" and "nor" say how many of two statements are true: that the first item is at the first
        # position, and that the second item is at the second one.
        first_set, second_set = first[clue.places[0]], second[clue.places[1]]
        if clue.kind == "xor":
            return first_set ^ second_set
        if clue.kind == "or":
            return first_set | second_set
        return self.all_arrangements ^ (first_set | second_set)

    @property
    def all_arrangements(self) -> int:
        return (1 << count_arrangements(self.objects, self.attributes)) - 1


def unique_clues(
    generator: random.Random,
    shape: ZebraShape,
    kinds: Sequence[ClueKind],
    arrangement: int,
    draws: int = 1000,
) -> list[ZebraClue] | None:
    """Returns clues that are together true only for this arrangement, and none of which is superfluous.
    Returns None if `draws` draws of a clue don't suffice."""
    target = 1 << arrangement
    chosen: list[tuple[ZebraClue, int]] = []
    possible = shape.all_arrangements
    for _ in range(draws):
        clue = shape.random_clue(generator, generator.choice(list(kinds)))
        if clue is None:
            continue
        true_arrangements = shape.true_arrangements(clue)
        is_true = bool(true_arrangements & target)
        excludes_none = possible & true_arrangements == possible
        if not is_true or excludes_none:
            continue
        chosen.append((clue, true_arrangements))
        possible &= true_arrangements
        if possible == target:
            break
    else:
        return None
    return needed_clues(generator, chosen, target)


def random_arrangement(generator: random.Random, arrangements: int) -> int:
    """Returns one of the arrangements of the set `arrangements`, with equal probabilities. (The set 0b1010
    contains the arrangements 1 and 3.)"""
    # `rank` says which of the set bits is drawn: 0 is the lowest. The loop halves `arrangements`, and keeps
    # the half that has this bit. `number` counts the bits below the part that is kept.
    rank = generator.randrange(arrangements.bit_count())
    number = 0
    width = arrangements.bit_length()
    while width > 1:
        half_width = width // 2
        lower_bits = arrangements & ((1 << half_width) - 1)
        lower_count = lower_bits.bit_count()
        if rank < lower_count:
            arrangements, width = lower_bits, half_width
        else:
            rank -= lower_count
            number += half_width
            arrangements, width = arrangements >> half_width, width - half_width
    return number


def _union(sets: Iterable[int]) -> int:
    """Returns the union of sets of arrangements."""
    return reduce(or_, sets, 0)


@cache
def _all_orders(objects: int) -> Sequence[tuple[int, ...]]:
    return tuple(permutations(range(objects)))


@lru_cache(maxsize=8)
def _arrangements_by_position(shape: ZebraShape) -> dict[AttributeValue, list[int]]:
    """Returns for each item and each position the set of arrangements that have the item there, as an integer
    with a bit for each arrangement."""
    orders, count = _all_orders(shape.objects), count_arrangements(shape.objects, shape.attributes)
    positions: dict[AttributeValue, list[int]] = {}
    for attribute, value in shape.items:
        # The number of an arrangement has a digit for each attribute, which is the number of an order (see
        # `ZebraShape.rows`). Counting up, this attribute's digit stays the same for `stride` numbers, and all
        # its digits come back after `period` numbers. So the bits of a set repeat after `period` bits, too.
        # `pattern` has these bits, with `stride` ones for each order that has the value at the position.
        # `every_period` has one bit at the start of each period, such as 0b0101 for 4 arrangements and the
        # period 2. Multiplying by it repeats the pattern.
        stride = len(orders) ** attribute
        period = stride * len(orders)
        every_period = ((1 << count) - 1) // ((1 << period) - 1)
        run = (1 << stride) - 1
        positions[attribute, value] = []
        for position in range(shape.objects):
            pattern = 0
            for number, order in enumerate(orders):
                if order[position] == value:
                    pattern |= run << (stride * number)
            positions[attribute, value].append(every_period * pattern)
    return positions


@Task.register("zebra_puzzles")
@dataclass(frozen=True, kw_only=True)
class ZebraPuzzles(Puzzles):
    r"""The answer is a table of some people in a row, with the value of each attribute of each person. The
    values follow from clues. Clues are drawn until only one arrangement satisfies all of them. Then
    superfluous clues are removed. Puzzles have at most two million arrangements. With the wording ``symbols``
    values are letters: the answer to ``2ab,mn:a@1,b=n>\n`` is ``am/bn``.

    **Demonstrations** try a table, name the first clue that it violates, and continue with a table that
    satisfies all clues named so far. With `demonstration_noise` p, a table that violates a clue is given as
    the answer with probability p.
    """

    objects: tuple[Annotated[int, Ge(2), Le(8)], Annotated[int, Ge(2), Le(8)]] = (3, 4)
    """The fewest and the most people."""
    attributes: tuple[Annotated[int, Ge(1), Le(5)], Annotated[int, Ge(1), Le(5)]] = (2, 3)
    """The fewest and the most attributes."""
    level: Annotated[int, Ge(1), Le(20)] = 8
    """The kinds of clues, from 1 (only positions) over 12 (all) to 20 (only the least informative)."""
    grader: ZebraGrader = GRADER

    kind: ClassVar[str] = "zebra puzzles"
    ranges: ClassVar[tuple[str, ...]] = ("objects", "attributes")

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        count = count_arrangements(self.objects[1], self.attributes[1])
        if count > MOST_ARRANGEMENTS:
            raise ValueError(
                f"{self.objects[1]} objects with {self.attributes[1]} attributes have {count:,} arrangements,"
                f" more than {MOST_ARRANGEMENTS:,}: choose fewer objects or attributes"
            )
        if POSITION not in self.grader.given:
            raise ValueError(
                f"the grader's given columns don't include {POSITION!r}, which these puzzles give"
            )

    @override
    def draw_puzzle(self, generator: random.Random) -> Puzzle | None:
        shape = ZebraShape(generator.randint(*self.objects), generator.randint(*self.attributes))
        arrangement = generator.randrange(count_arrangements(shape.objects, shape.attributes))
        clues = unique_clues(generator, shape, kinds_of(self.level), arrangement)
        if clues is None:
            return None
        if self.wording == "symbols":
            # The prompt doesn't show these names of attributes, but the gold's table needs some.
            header = [str(number) for number in range(shape.attributes)]
            values = [list(LETTERS[number][: shape.objects]) for number in range(shape.attributes)]
        else:
            header = generator.sample(list(ATTRIBUTES), shape.attributes)
            values = []
            for name in header:
                _, names_of_values = ATTRIBUTES[name]
                values.append(generator.sample(names_of_values, shape.objects))
        clue_texts = [self._write_clue(clue, header, values) for clue in clues]
        data = {
            "shape": (shape.objects, shape.attributes),
            "header": header,
            "values": values,
            "clues": clues,
        }
        gold = _as_json(header, _table_of_names(shape, arrangement, values))
        key = (tuple(map(tuple, values)), frozenset(clue_texts))
        return Puzzle(self._prompt(shape, header, values, clue_texts), gold, key, data)

    def _prompt(
        self,
        shape: ZebraShape,
        header: Sequence[str],
        values: Sequence[Sequence[str]],
        clue_texts: Sequence[str],
    ) -> str:
        """Writes the prompt: the values of each attribute, and the clues."""
        if self.wording == "symbols":
            # Such as ``3abc,def:b<d,a@2>`` with two attributes: one has the values a, b and c. The last ">"
            # ends the prompt.
            letters_of_attributes = ["".join(letters) for letters in values]
            return f"{shape.objects}{','.join(letters_of_attributes)}:{','.join(clue_texts)}>\n"
        attributes = "\n".join(
            f"{name}: {', '.join(sorted(values_of_attribute))}"
            for name, values_of_attribute in zip(header, values, strict=True)
        )
        listed = "\n".join(f"- {clue}" for clue in clue_texts)
        example = {"header": [POSITION, *header], "rows": [["1", *("…" for _ in header)], ["…"]]}
        table = self.grader.write_in_tags(json.dumps(example, ensure_ascii=False))
        return (
            f"{shape.objects} people live in a row, at positions 1 to {shape.objects} from left to right."
            f" They differ in everything that is listed here:\n{attributes}\nIt is known that:\n{listed}\n"
            f"Who has what? Think first, and end with a table: {table}"
        )

    def _write_clue(self, clue: ZebraClue, header: Sequence[str], values: Sequence[Sequence[str]]) -> str:
        """Writes a clue: ``Ann is at position 2.``, or ``a@2`` in symbols."""
        symbols = self.wording == "symbols"

        def name(item: AttributeValue) -> str:
            attribute, value_number = item
            value = values[attribute][value_number]
            if symbols:
                return value
            words, _ = ATTRIBUTES[header[attribute]]  # "the owner of the {}"
            return words.format(value)

        # The templates name the clue's positions p and q. Zeros stand for those that it doesn't have.
        positions = [place + 1 for place in clue.places]
        p, q = [*positions, 0, 0][:2]
        # For ``parity``, the place is a position, counted from 0, modulo 2. The text counts positions from 1,
        # so the remainder 0 means an odd position there. Other templates have no {r} and no {parity}.
        is_odd = clue.kind == "parity" and clue.places[0] == 0
        template = (SYMBOLS if symbols else SENTENCES)[clue.kind]
        parity = "odd" if is_odd else "even"
        text = template.format(*map(name, clue.items), p=p, q=q, r=int(is_odd), parity=parity)
        return text if symbols else text[0].upper() + text[1:]

    @override
    def solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        shape, values = ZebraShape(*problem.data["shape"]), problem.data["values"]
        clues: Sequence[ZebraClue] = problem.data["clues"]
        possible = shape.all_arrangements
        while True:
            arrangement = random_arrangement(generator, possible)
            rows = _table_of_names(shape, arrangement, values)
            # A clue's set of arrangements has the bit `arrangement` if the clue is true for the table.
            violated_clues = (clue for clue in clues if not shape.true_arrangements(clue) >> arrangement & 1)
            violated_clue = next(violated_clues, None)
            symbols = self.wording == "symbols"
            # ``am/bn`` in symbols, ``Ann, cat; Bob, dog`` in words
            table = "/".join(map("".join, rows)) if symbols else "; ".join(map(", ".join, rows))
            # `draws_error` says whether the solution has an error in this step. The error is to give a table
            # as the answer although it violates a clue.
            if violated_clue is None or self.draws_error(generator):
                yield table if symbols else _as_json(problem.data["header"], rows)
                return
            clue = self._write_clue(violated_clue, problem.data["header"], values)
            yield f"{table}:{clue}" if symbols else f"Not {table}: {clue}"
            possible &= shape.true_arrangements(violated_clue)

    @override
    def symbols(self) -> str:
        letters = "".join(LETTERS[number][: self.objects[1]] for number in range(self.attributes[1]))
        signs = set("".join(SYMBOLS.values())) - set("{}pqr")  # without the fields of the templates
        return letters + "0123456789:,>/" + "".join(signs)


def _as_json(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the table with the positions as its first column."""
    numbered = [[str(position), *row] for position, row in enumerate(rows, start=1)]
    return json.dumps({"header": [POSITION, *header], "rows": numbered})


def _table_of_names(shape: ZebraShape, arrangement: int, values: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the rows of an arrangement with the names of its values."""
    rows = []
    for row in shape.rows(arrangement):
        rows.append([values[attribute][value] for attribute, value in enumerate(row)])
    return rows
