"""Define small parts to configure, which have the shapes of an experiment's parts and do no work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval, MinLen

import treetune.parts  # noqa: F401  (the package's own families come first, whichever test is first)
from treetune.config.registrable import Registrable


class Shape(Registrable):
    """A family."""


@Shape.register("circle")
@dataclass(frozen=True, kw_only=True)
class Circle(Shape):
    """A round shape. `radius` is half its width."""

    radius: Annotated[float, Gt(0)]
    colour: Literal["red", "green"] = "red"


@Shape.register("square")
@dataclass(frozen=True, kw_only=True)
class Square(Shape):
    side: Annotated[int, Gt(0)] = 1


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A plain part: one class, no `type`."""

    width: Annotated[float, Interval(ge=0, le=10)]
    tags: Annotated[tuple[str, ...], MinLen(1)] = ("plain",)


class Picture(Registrable, root="an experiment"):
    """The root family."""


@Picture.register("drawing")
@dataclass(frozen=True, kw_only=True)
class Drawing(Picture):
    seed: Annotated[int, Ge(0)]
    directory: str
    shape: Shape
    experiment_name: str = "untitled"
    extra: Shape | None = None
    more: tuple[Shape, ...] = ()
    named: Mapping[str, Shape] = field(default_factory=dict)
    frame: Frame | None = None
    shadow: bool = False
    scale: float = 1.0
    limit: Annotated[int, Gt(0)] | None = None
    pair: tuple[int, float] = (1, 1.0)
    size: int = 8
    tile: int = 4

    def __post_init__(self) -> None:
        if self.size % self.tile:
            raise ValueError(f"size {self.size} is no multiple of tile {self.tile}")


class Gallery(Registrable, root="a table"):
    """The other root family, without a seed of its own."""


@Gallery.register("wall")
@dataclass(frozen=True, kw_only=True)
class Wall(Gallery):
    rows: tuple[str, ...]
    directory: str = "."
