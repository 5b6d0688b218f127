"""The registry: a base class knows its parts by the name that users write as `type`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from treetune.contracts import Part

T = TypeVar("T", bound=type)


class Registrable(Part):
    """Base of everything that a configuration can choose with ``{type: 'name', …}``.

    The direct sub-classes of Registrable are the families (Task, Credit, …), each with a registry
    of its own. Parts are frozen dataclasses: the constructor's signature is the schema. A module
    that registers a part imports nothing heavy (torch, transformers, vllm, deepspeed, datasets,
    numpy): it does so inside the functions that need it.
    """

    _parts: ClassVar[dict[str, type]]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if Registrable in cls.__bases__:
            cls._parts = {}

    @classmethod
    def register(cls, name: str) -> Callable[[T], T]:
        """Class decorator: ``@Credit.register("group")``."""

        def add(part: T) -> T:
            assert name not in cls._parts, f"{cls.__name__} {name!r} is registered twice"
            cls._parts[name] = part
            return part

        return add

    @classmethod
    def registered(cls) -> dict[str, type]:
        """Names and classes of this family."""
        return dict(cls._parts)
