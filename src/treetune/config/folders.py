"""Finds a user's own modules in the folders of the configuration, and remembers which were found."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from typing_extensions import override

DIGITS_OF_HASH = 16


class OwnFolders(MetaPathFinder):
    """Finds modules in a user's folders, after everything that is installed.

    The folders are not on `sys.path`, where any folder of a working directory (`wandb`, `data`, …) would
    pass for a package of that name. Here a folder without ``__init__.py`` is a package only if a
    configuration names it.
    """

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.used_modules: set[str] = set()
        """Top-level modules that a configuration asked for, and those that were found in the folders."""

    @override
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the module of this name in the user's folders; None if there is none."""
        if path is not None:  # a part of a package that has been found already
            return None
        spec = PathFinder.find_spec(name, self.folders)
        # Without an origin it is a folder without __init__.py, which only counts if a configuration names it.
        if spec is None or (spec.origin is None and name not in self.used_modules):
            return None
        self.used_modules.add(name)
        return spec


_OWN_FOLDERS = OwnFolders()


def set_search_folders(folders: Iterable[Path | str], names: Iterable[str] = ()) -> None:
    """Sets the folders in which modules are looked for from now on, in this order, and adds `names` to the
    modules that a configuration asks for."""
    _OWN_FOLDERS.folders = list(dict.fromkeys(map(str, folders)))
    _OWN_FOLDERS.used_modules.update(names)
    if _OWN_FOLDERS not in sys.meta_path:
        sys.meta_path.append(_OWN_FOLDERS)


def add_configured_module(module: str) -> None:
    """Notes that a configuration names this module."""
    _OWN_FOLDERS.used_modules.add(module.partition(".")[0])


def search_folders_and_names() -> tuple[list[str], list[str]]:
    """Returns the arguments with which `set_search_folders` finds the same modules in another process: the
    folders and the names."""
    return list(_OWN_FOLDERS.folders), sorted(_OWN_FOLDERS.used_modules)


def import_folders() -> list[str]:
    """Returns the folders in which modules of users are looked for, the first one first: the working
    directory and those of the configuration files. A part that starts another Python hands them on to it."""
    return list(_OWN_FOLDERS.folders)


def own_modules() -> dict[str, str]:
    """Returns the user's modules that this process has imported, each with a hash of its file.

    A run with parts of its own also depends on their code. The manifest keeps these hashes, so that a resumed
    run can report that the code has changed.
    """
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        top_level_name = name.partition(".")[0]
        is_users_module = top_level_name in _OWN_FOLDERS.used_modules
        if is_users_module and file is not None and Path(file).is_file():
            hashes[name] = hashlib.blake2b(Path(file).read_bytes()).hexdigest()[:DIGITS_OF_HASH]
    return hashes
