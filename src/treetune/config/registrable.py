"""The registry: a base class knows its parts by the name that users write as `type`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar, TypeVar

from typing_extensions import override

from treetune.config.former_names import refuse_former_names
from treetune.contracts import Part

T = TypeVar("T", bound=type)

REMEDY_BY_FORMER_METHOD = {
    "missing": "yield treetune.contracts.Finding(…, level='missing') in `check(experiment)`",
    "notes": "yield treetune.contracts.Finding(…, level='warning') in `check(experiment)`",
    "remarks": "yield treetune.contracts.Finding(…, level='warning') in `check(experiment)`",
}
"""Methods of earlier versions that are no longer called, and what to write instead. Registering a part that
has one is refused, since its messages would be lost."""


class Registrable(Part):
    """Base of everything that a configuration can choose with ``{type: 'name', …}``.

    The direct sub-classes of Registrable are the families (Task, Credit, …), each with a registry
    of its own. Parts are frozen dataclasses: the constructor's signature is the schema. A module
    that registers a part imports nothing heavy (torch, transformers, vllm, deepspeed, datasets,
    numpy): it does so inside the functions that need it.
    """

    _parts: ClassVar[dict[str, type]]
    default: ClassVar[str | None] = None
    """The name of the part that is meant where a configuration of this family gives no `type`."""
    to_declare: ClassVar[tuple[str, ...]] = ()
    """Class attributes that every part of the family must set; they have no default."""
    root: ClassVar[str | None] = None
    """The name of a whole configuration of this family, as in ``class Runtime(Registrable, root="an
    experiment")``; None if the family's parts only occur within configurations."""

    @override
    def __init_subclass__(cls, root: str | None = None, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if Registrable in cls.__bases__:  # the class is a family, and its sub-classes are the family's parts
            cls._parts = {}
            cls.root = root
            return
        # A user's class is refused if it defines a method or attribute that only earlier versions used. The
        # package's own classes aren't checked: `MixedTask`, for example, has the method `of`, which every
        # task could have in earlier versions.
        package_of_class, package_of_registry = cls.__module__.split(".")[0], __name__.split(".")[0]
        if package_of_class != package_of_registry:
            for base in cls.__mro__:
                if Registrable in base.__bases__:  # the family to which the class belongs
                    refuse_former_names(base, cls)

    @classmethod
    def register(cls, name: str) -> Callable[[T], T]:
        """Returns a class decorator that registers a part: ``@Credit.register("group")``.

        The decorator raises ValueError for a name that is taken. It raises TypeError for a part that doesn't
        set an attribute in `to_declare`, or that has a method in `REMEDY_BY_FORMER_METHOD`.
        """

        def add(part: T) -> T:
            before = cls._parts.get(name)
            # A module that is imported anew, after an error or in a notebook, replaces its own part.
            if before is not None and _module_and_name(before) != _module_and_name(part):
                raise ValueError(
                    f"{cls.__name__} {name!r} is registered twice: by"
                    f" {_name_and_file(before)} and by {_name_and_file(part)}"
                )
            # Earlier versions called the methods in `REMEDY_BY_FORMER_METHOD` to get a part's messages.
            # Nothing calls them now, so the messages would be lost. But if the family (`cls`) has a method
            # with such a name, its parts may have it, too.
            for former_method, remedy in REMEDY_BY_FORMER_METHOD.items():
                if callable(getattr(part, former_method, None)) and not hasattr(cls, former_method):
                    raise TypeError(
                        f"{cls.__name__} {name!r}, {_name_and_file(part)}, has `{former_method}`, which"
                        f" is no longer called: {remedy}"
                    )
            for declared in cls.to_declare:
                if not hasattr(part, declared):
                    raise TypeError(
                        f"{cls.__name__} {name!r}, {_name_and_file(part)}, doesn't set `{declared}`: set it"
                        " in the class"
                    )
            cls._parts[name] = part
            return part

        return add

    @classmethod
    def registered_name(cls) -> str | None:
        """Returns the `type` under which this class is registered; None if it isn't."""
        for name, part in cls._parts.items():
            if part is cls:
                return name
        return None

    @classmethod
    def parts_by_name(cls) -> dict[str, type]:
        """Returns the classes of this family's parts, by name."""
        return dict(cls._parts)


def _module_and_name(part: type) -> tuple[str, str]:
    return part.__module__, part.__qualname__


def _name_and_file(part: type) -> str:
    """Returns a class's whole name and its file, for messages."""
    file = getattr(sys.modules.get(part.__module__), "__file__", None)
    return f"{part.__module__}.{part.__qualname__}" + (f" ({file})" if file else "")
