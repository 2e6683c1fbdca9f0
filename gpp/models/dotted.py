"""Dotted paths: finding the object that a user named, building it from plain data, telling whether its code changed.

Free of torch; `origin` and `source_hash` do not import the code that they describe.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

from gpp.errors import InvalidConfig


def resolve(path: str, *, field: str) -> Any:
    """The object that a dotted path names, as in `"transformers.CLIPModel"`.

    Args:
        path: `package.module.attribute`; attributes may nest.
        field: name of the setting, for the message.

    Raises:
        InvalidConfig: there is no such module or attribute; the fix names the nearest one that exists.
    """
    names = check_dotted(path, field=field).split(".")
    found: Any = None
    for count, name in enumerate(names):
        prefix, here = ".".join(names[:count]), ".".join(names[: count + 1])
        if found is not None and hasattr(found, name):
            found = getattr(found, name)
            continue
        try:
            found = importlib.import_module(here)
        except ModuleNotFoundError as error:
            if error.name and error.name != here and not here.startswith(f"{error.name}."):
                raise InvalidConfig(
                    field,
                    path,
                    f"importing {here} needs {error.name!r}, which is not installed",
                    f"pip install {error.name.split('.')[0]}",
                ) from error
            raise _unknown(path, field, prefix, name, found) from error
    return found


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


def construct(description: Mapping[str, Any]) -> Any:
    """The object whose `key()` is `description`: reads a model or data set back from a run directory."""
    fields = {name: value for name, value in description.items() if name not in ("_target_", "source")}
    return resolve(description["_target_"], field="_target_")(**fields)


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
