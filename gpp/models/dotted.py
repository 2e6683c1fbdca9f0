"""Dotted paths: finding the object that a user named, building it from plain data, telling whether its code changed.

Free of torch; `origin` and `source_hash` do not import the code that they describe.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

from gpp.errors import GppError, InvalidConfig

PACKAGE = Path(__file__).resolve().parents[1]


def resolve(path: str, *, field: str) -> Any:
    """The object that a dotted path names, as in `"transformers.CLIPModel"`.

    Args:
        path: `package.module.attribute`; attributes may nest.
        field: name of the setting, for the message.

    Raises:
        InvalidConfig: there is no such module or attribute, and the fix names the nearest one that exists; or importing
            the module fails, and the message says where.
    """
    names = check_dotted(path, field=field).split(".")
    found: Any = None
    for count, name in enumerate(names):
        prefix, here = ".".join(names[:count]), ".".join(names[: count + 1])
        if found is not None and hasattr(found, name):
            found = getattr(found, name)
            continue
        found = _imported(here, field, path, prefix, found)
    return found


def _imported(module: str, field: str, path: str, prefix: str = "", parent: Any = None) -> Any:
    """A module.

    Args:
        field, path: the setting that names it, and its value.
        prefix, parent: what of the path has been found before, and its name; None for nothing.

    Raises:
        InvalidConfig: there is no such module, or importing it fails.
    """
    try:
        with users_code(field, path):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            name = missing if parent is None else missing.rpartition(".")[2]
            raise _unknown(path, field, prefix, name, parent) from error
        rule = f"importing {module} needs {missing!r}, which is not installed"
        raise InvalidConfig(field, path, rule, f"pip install {missing.split('.')[0]}") from error


def import_named(modules: Iterable[str], field: str) -> None:
    """Import modules that a setting names.

    Raises:
        InvalidConfig: one is no module, or importing it fails; names the setting and the line.
    """
    if isinstance(modules, str):
        raise InvalidConfig(field, modules, "must be a list of modules", f"write [{modules!r}]")
    for module in modules:
        if not (isinstance(module, str) and all(name.isidentifier() for name in module.split("."))):
            raise InvalidConfig(field, module, "must be the name of a module", "write it as an import does, as in package.module")
        _imported(module, field, module)


@contextmanager
def users_code(field: str, path: str) -> Iterator[None]:
    """Run code that a setting names; whatever it raises becomes an error that names the setting and the user's line.

    A module that is not found is passed on, since only the caller knows whether the user named it.

    Args:
        field: name of the setting.
        path: dotted path of the code.

    Raises:
        InvalidConfig: the code raised an exception, or ended the process.
    """
    try:
        yield
    except (GppError, ModuleNotFoundError):
        raise
    except (Exception, SystemExit) as error:  # no signal: that ends the run, whoever's code it finds at work
        raise raised_by(error, field=field, path=path) from error


def raised_by(error: BaseException, *, field: str, path: str) -> InvalidConfig:
    """The error for code of the user's that raised another: names the setting, the exception, file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_installed(Path(frame.filename)) and _is_users(frame.filename)]
    frame = (own or list(frames) or [None])[-1]
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    else:
        place = f"{frame.filename}:{frame.lineno}, in {frame.name}" if frame else "at an unknown place"
    if isinstance(error, SystemExit):
        return InvalidConfig(field, path, f"called sys.exit({error.code!r}) ({place})", "take the call out of it")
    said = " ".join(str(error).split())
    words = f"{type(error).__name__}: {said}" if said else type(error).__name__
    words = words if len(words) <= LONGEST_SAID else f"{words[:LONGEST_SAID]}..."
    if lacking := ABSTRACT.fullmatch(words):
        return InvalidConfig(field, path, f"is a class that lacks {lacking[1]}", "add to the class what its base says of it")
    return InvalidConfig(
        field, path, f"raised {words.removesuffix('.')} ({place})", "correct the code there, or the settings that it gets"
    )


ABSTRACT = re.compile(r"TypeError: Can.t instantiate abstract class \w+ with(?:out an implementation for)? abstract methods? (.+)")
"""The words of Python for a class that leaves out what its base asks of it: those up to 3.11, and those from 3.12 on."""

LONGEST_SAID = 600
"""Characters of another exception's message that ours repeats."""


def _is_users(filename: str) -> bool:
    """Whether a file is neither ours nor Python's own."""
    path = Path(filename)
    return not filename.startswith("<") and PACKAGE not in path.parents and Path(inspect.__file__).parent not in path.parents


def call(path: str, positional: Iterable[Any], named: Mapping[str, Any], *, field: str, arguments: str) -> Any:
    """The object that a factory makes.

    Args:
        path, field: the factory's dotted path, and the setting that names it.
        arguments: the setting that holds `named`.

    Raises:
        InvalidConfig: there is no such factory, the arguments do not fit its signature, or it raised an exception.
    """
    function = resolve(path, field=field)
    if not callable(function):
        raise InvalidConfig(field, path, f"is a {type(function).__name__}", "name a class or a function")
    positional = tuple(positional)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have no signature
        signature = None
    try:
        if signature is not None:
            signature.bind(*positional, **named)
    except TypeError as error:
        parameters = signature.parameters.values() if signature else ()
        known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        unknown = sorted(set(named) - set(known))
        fix = nearest(unknown[0], known) if unknown else f"arguments are {', '.join(known)}"
        what = f"it has no argument {unknown[0]}" if unknown else str(error)
        raise InvalidConfig(arguments, dict(named), f"do not fit {function.__qualname__}: {what}", fix) from error
    with users_code(field, path):
        try:
            return function(*positional, **named)
        except ModuleNotFoundError as error:
            raise raised_by(error, field=field, path=path) from error


def check_dotted(path: str, *, field: str) -> str:
    """`path`, when it has the form `module.attribute`.

    Raises:
        InvalidConfig: the path has another form.
    """
    names = path.split(".") if isinstance(path, str) else []
    if len(names) < 2 or not all(name.isidentifier() for name in names):
        raise InvalidConfig(field, path, "must be a dotted path", "write package.module.Name, as in transformers.CLIPModel")
    return path


def _unknown(path: str, field: str, prefix: str, name: str, parent: Any) -> InvalidConfig:
    if parent is None:
        return InvalidConfig(field, path, f"no module named {name!r}", "install it, or put its folder on PYTHONPATH")
    return InvalidConfig(field, path, f"{prefix} has no {name!r}", nearest(name, dir(parent), prefix=f"{prefix}."))


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Words for the fix of an unknown name: the nearest known one, or where to look."""
    known = sorted(candidate for candidate in known if not candidate.startswith("_"))
    close = [other for other in known if other.lower() == name.lower()] or get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}"
    return f"one of {', '.join(known)}" if 0 < len(known) <= 12 else f"look at the names that {prefix or 'it '}offers"


def origin(path: str, *, field: str) -> str:
    """A word that changes when the code behind a dotted path changes.

    For an installed package it is the distribution and version; for the user's own code it is a hash of every source
    file of the top-level package, or of the folder when the module stands alone. Nothing is imported.

    Raises:
        InvalidConfig: there is no such top-level module.
    """
    top = check_dotted(path, field=field).split(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise _unknown(path, field, "", top, None)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    file = Path(spec.origin) if spec.has_location and spec.origin else None
    if folders:
        if any(_is_installed(folder) for folder in folders):
            return _distribution(top)
        return source_hash(source for folder in folders for source in folder.rglob("*.py"))
    if file is None:
        return f"builtin {top}"
    return _distribution(top) if _is_installed(file) else source_hash(file.parent.glob("*.py"))


def source_hash(files: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of source files, whatever the order in which they come."""
    digest = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    return f"sha256:{digest.hexdigest()}"


def _is_installed(path: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(path.parts))


def _distribution(top: str) -> str:
    try:
        return f"{top} {metadata.version(top)}"
    except metadata.PackageNotFoundError:
        owners = metadata.packages_distributions().get(top, [])
        return " ".join(f"{owner} {metadata.version(owner)}" for owner in sorted(set(owners))) or top
