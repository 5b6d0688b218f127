"""Parts from outside of the package: modules that a configuration imports, and installed ones.

``imports: ['my_package.my_part']`` in a configuration imports a user's module, whose parts are then
known by their `type`. It is looked for among what is installed, then in the working directory, then in
the folders of the configuration files and of the files that these import. An installed package can name
modules in its entry points (group ``treetune.parts``), and needs no `imports`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import linecache
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from treetune.config import folders, schema
from treetune.config.errors import ConfigIssue, nearest
from treetune.config.explain import Explanation
from treetune.config.layers import shorten_path
from treetune.config.moved import remedy_for_import
from treetune.config.registrable import Registrable
from treetune.config.schema import IMPORTS_KEY, OWN_PACKAGE, PARTS_ENTRY_POINT
from treetune.contracts import KeyPath
from treetune.exceptions import ConfigError

_MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME_IN_TREETUNE = re.compile(r"treetune(_|\.|$)")
_REGISTER_DECORATOR = re.compile(r"^@\w+(\.\w+)*\.register\(", re.MULTILINE)


def import_parts(data: Any, explanation: Explanation | None = None) -> None:
    """Imports the modules that the configuration ``data`` names, and those of installed packages.

    Raises ConfigError with everything that is wrong with these modules. If `imports` is not a list of texts,
    this function skips it: the schema of the object with this key reports the mistake.

    Args:
        data: The configuration.
        explanation: Tells which file set each of its keys. Modules are also searched in the folders of these
            files. None: only in the current folder.
    """
    folders.set_search_folders([Path.cwd(), *(explanation.folders if explanation else ())])
    issues = list(_import_installed_parts())
    names = data.get(IMPORTS_KEY.name) if isinstance(data, dict) else None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        for number, name in enumerate(names):
            issues += _import_and_check(
                name, (IMPORTS_KEY.name, str(number)), _find_naming_file(name, explanation)
            )
    if issues:
        raise ConfigError(issues)


def import_package(package: ModuleType, left_out_folder: str = "") -> None:
    """Imports those modules below a package that register a part.

    Other modules are not imported: they may import packages that aren't installed. Modules in the package's
    folder `left_out_folder` are not imported either.
    """
    for folder in map(Path, package.__path__):
        for file in sorted(folder.rglob("*.py")):
            if left_out_folder and folder / left_out_folder in file.parents:
                continue
            if file.name == "__init__.py" or not _REGISTER_DECORATOR.search(file.read_text(encoding="utf-8")):
                continue
            names_below_package = file.relative_to(folder).with_suffix("").parts
            module_name = ".".join([package.__name__, *names_below_package])
            importlib.import_module(module_name)


def function_at(path: str) -> Callable[..., Any]:
    """Returns the function that ``package.module:function`` names. Raises ValueError with a message for
    users."""
    module, colon, name = path.partition(":")
    if not colon or not _MODULE_NAME.fullmatch(module) or not name.isidentifier():
        raise ValueError(
            f"path is {path!r}: it should be a module and a function in it, such as 'my_rewards:score'"
        )
    folders.add_configured_module(module)  # so that it is looked for in the user's folders
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        issue = _issue_of_failed_import(module, label="path", source=None, error=error)
        raise ValueError("; ".join(filter(None, [issue.what, issue.remedy]))) from error
    if not callable(function):
        functions = [other for other, value in vars(sys.modules[module]).items() if callable(value)]
        near = nearest(name, functions)
        remedy = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"path is {path!r}, and {_file_of(module)} has no function {name!r}{remedy}")
    return function


@functools.cache
def _import_installed_parts() -> tuple[ConfigIssue, ...]:
    """Imports the parts of installed packages, which name them by entry points. Returns what is wrong with
    these parts."""
    issues: list[ConfigIssue] = []
    for entry in importlib.metadata.entry_points(group=PARTS_ENTRY_POINT):
        package = entry.dist.name if entry.dist else "?"
        if package == OWN_PACKAGE:  # an installation of version 0.1, which named its own packages here
            continue
        source = (
            f"the installed package {package}, entry point {entry.name!r} of the group {PARTS_ENTRY_POINT!r}"
        )
        module = entry.value.partition(":")[0]
        # The key is empty, since no key of the configuration names the module.
        issues += _import_and_check(module, key=(), source=source)
    return tuple(issues)


def _find_naming_file(name: str, explanation: Explanation | None) -> str | None:
    """Returns the file that names a module in `imports`. Several files may add to that list."""
    settings = explanation.settings((IMPORTS_KEY.name,)) if explanation else []
    settings_with_name = [
        setting for setting in settings if isinstance(setting.value, list) and name in setting.value
    ]
    # If no file's list has the name, the list is computed: then the last file that sets it is returned.
    candidates = settings_with_name or settings
    return candidates[-1].location if candidates else None


def _import_and_check(name: str, key: KeyPath, source: str | None) -> Iterator[ConfigIssue]:
    """Imports a module, or all of a package, and yields what is wrong with it or with a part in it."""
    label = ".".join(key) or name
    if not _MODULE_NAME.fullmatch(name):
        # Of a path such as "my_package/my_part.py", this is "my_package.my_part".
        corrected = re.sub(r"[/\\]+", ".", name.removesuffix(".py")).strip(".")
        is_valid = _MODULE_NAME.fullmatch(corrected) is not None
        remedy = f"write {corrected!r}" if is_valid else "such as 'my_package.my_part'"
        yield ConfigIssue(f"should be the name of a Python module, is {name!r}", label, source, remedy)
        return
    folders.add_configured_module(name)  # so that it is looked for in the user's folders
    try:
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):
            import_package(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        yield _issue_of_failed_import(name, label, source, error)
        return
    for family in Registrable.__subclasses__():
        for part_type, part in family.parts_by_name().items():
            if part.__module__ == name or part.__module__.startswith(f"{name}."):
                yield from _issues_of_part(family, part_type, part, label, source)


def _issues_of_part(
    family: type[Registrable], name: str, part: type, label: str, source: str | None
) -> Iterator[ConfigIssue]:
    """Yields mistakes in a part's class because of which its keys can't be read."""
    part_name = f"{schema.family_word(family)} {name!r} ({_file_of(part.__module__)})"
    if not issubclass(part, family):
        word = schema.family_word(family)
        fault = f"{part_name} is registered as {word} and isn't a sub-class of {family.__name__}"
        remedy = f"class {part.__name__}({family.__name__}): …"
        yield ConfigIssue(fault, label, source, remedy)
    elif not getattr(getattr(part, "__dataclass_params__", None), "frozen", False):
        fault = f"{part_name} must be decorated with @dataclass(frozen=True, kw_only=True)"
        remedy = f"put the decorator between @….register(…) and class {part.__name__}"
        yield ConfigIssue(fault, label, source, remedy)
    elif error := _unreadable_field(part):
        fault = f"{part_name} has a field whose type can't be read: {error}"
        remedy = "the types of fields are read at the start: import what they name at the module's top"
        yield ConfigIssue(fault, label, source, remedy)
    elif unwritten := _unwritten_methods(part):
        fault = f"{part_name} is missing methods that every {schema.family_word(family)} has"
        signatures = [
            f"{method_name}{inspect.signature(method)}" for method_name, method in unwritten.items()
        ]
        remedy = f"write {' and '.join(signatures)} in class {part.__name__}"
        yield ConfigIssue(fault, label, source, remedy)


def _unwritten_methods(part: type) -> dict[str, Callable[..., Any]]:
    """Returns the methods that a part has to write, and has not written, by name.

    A method that only raises NotImplementedError has to be written if a method of the part calls it, or if
    code outside of the class does.
    """
    methods = dict(inspect.getmembers(part, inspect.isfunction))
    # `co_names` are the names that a function's code uses, among them those of methods that it calls.
    called_by_bases: set[str] = set()
    for base in part.__mro__[1:]:
        for method in filter(inspect.isfunction, vars(base).values()):
            called_by_bases |= set(method.__code__.co_names)
    called_by_part: set[str] = set()
    for method in methods.values():
        called_by_part |= set(method.__code__.co_names)
    unwritten: dict[str, Callable[..., Any]] = {}
    for name, method in methods.items():
        is_abstract = method.__code__.co_names == ("NotImplementedError",)
        is_called_by_part = name in called_by_part
        # If no base class calls a method, code outside of the class must call it: it would have no use
        # otherwise.
        is_called_from_outside = name not in called_by_bases
        # Any other method is called by base classes alone, in methods that the part has overridden. So it
        # isn't needed.
        if is_abstract and (is_called_by_part or is_called_from_outside):
            unwritten[name] = method
    return unwritten


def _unreadable_field(part: type) -> str | None:
    """Returns the error of the first field whose type can't be read; None where all can."""
    try:
        for key in schema.keys_of(part).values():
            schema.check_annotation(key.annotation)
    except (NameError, TypeError) as error:
        return str(error)
    return None


def _issue_of_failed_import(name: str, label: str, source: str | None, error: BaseException) -> ConfigIssue:
    """Returns the issue of a module whose import ended in an error, with file, line and the line's text."""
    missing_module = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    # The module itself isn't found, or a package around it, and not something that it imports.
    if missing_module and (name == missing_module or name.startswith(f"{missing_module}.")):
        return _issue_of_missing_module(name, missing_module, label, source)
    fault = f"{name} can't be imported: {type(error).__name__}: {error}"
    text = ""
    remedy = None
    frame = _frame_within(name, error)
    if frame is not None:
        file, line = frame
        fault += f" ({shorten_path(file)}:{line})"
        text = linecache.getline(file, line).strip()
        # The user's module may import a name that treetune had in an earlier version.
        if isinstance(error, ImportError) and _NAME_IN_TREETUNE.match(error.name or ""):
            remedy = remedy_for_import(file, line)
    if remedy is None and missing_module:
        remedy = f"{missing_module} is not installed for {sys.executable}, nor found in {_describe_folders()}"
    return ConfigIssue(fault, label, source, remedy, f"    {text}" if text else None)


def _frame_within(name: str, error: BaseException) -> tuple[str, int] | None:
    """Returns the file and line of the user's code in which an import failed: the innermost frame that isn't
    a library's."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno
    top = name.partition(".")[0]
    _, users_modules = folders.search_folders_and_names()  # the first parts of the names of users' modules
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if module == top or module in users_modules:
            return frame.f_code.co_filename, line
    return None


def _issue_of_missing_module(name: str, missing_module: str, label: str, source: str | None) -> ConfigIssue:
    """Returns the issue of a module that isn't there. `missing_module` is the part of its name that can't be
    found: all of it, or a package in it."""
    package, _, last_part = missing_module.rpartition(".")
    if not package:
        searched_folders: Sequence[str] = folders.import_folders()
        fault = f"there is no module {missing_module!r}"
        where_looked = f"looked among the installed packages, then in {_describe_folders()}"
    else:
        parent = sys.modules.get(package)
        searched_folders = getattr(parent, "__path__", [])
        fault = f"there is no module {last_part!r} in the package {package!r}"
        where_looked = f"looked in {_file_of(package)}"
        if parent is not None and not hasattr(parent, "__path__"):
            where_looked = f"{package} is {_file_of(package)}, which is a module, not a package"
    near = nearest(last_part, [module.name for module in pkgutil.iter_modules(searched_folders)])
    suggestion = ""
    if near:
        corrected = ".".join(filter(None, [package, near[0]]))
        after_missing = name[len(missing_module) :]
        suggestion = f"did you mean {corrected + after_missing!r}? "
    return ConfigIssue(fault, label, source, f"{suggestion}{where_looked}")


def _describe_folders() -> str:
    """Returns the folders that are searched for users' modules, in one line."""
    working_directory = str(Path.cwd())
    shown = []
    for folder in folders.import_folders():
        shown.append(f"{folder} (the working directory)" if folder == working_directory else folder)
    return ", ".join(shown)


def _file_of(module_name: str) -> str:
    """Returns the file of a module that is loaded, or the folder of a package; its name where it has none."""
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return shorten_path(file) if file else module_name
