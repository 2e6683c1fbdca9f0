"""The file form of every value: JSON that reads back equal. Every file that this package reads is opened here.

Values are frozen standard-library dataclasses; pydantic reads and writes them with their declared types, strictly: `true`
and `"3"` are no numbers, a number is finite, an integer has 64 bits, a key appears once and is one of the fields. What is
wrong is one `InvalidFile`, with the file, the place in it, the value, the rule and the fix.

A file that only a program writes, and that may be made again at any time (a cache), is sealed: a digest in its first line
covers what it holds and what it was made for. A damaged one is as good as none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from pydantic import TypeAdapter
from pydantic_core import CoreConfig, SchemaValidator, ValidationError

from gpp.errors import GppError, InvalidConfig, InvalidFile
from gpp.files import anonymous, folder, write_text
from gpp.private import hidden

T = TypeVar("T")

MOST_BYTES = 2**30
"""The size up to which a file is read."""

MOST_INTEGER = 2**63 - 1

CORRECT = "correct the file"


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


@cache
def _reader(cls: Any) -> SchemaValidator:
    return SchemaValidator(_strict(_adapter(cls).core_schema), CoreConfig(strict=True, allow_inf_nan=False))


def _strict(schema: Any) -> Any:
    """The schema with every integer bounded, every number finite, and every class closed unless it says otherwise."""
    if isinstance(schema, list | tuple):
        return type(schema)(_strict(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    out = {key: _strict(part) if key not in ("default", "expected", "metadata") else part for key, part in schema.items()}
    if out.get("type") == "int":
        out = {"ge": -MOST_INTEGER, "le": MOST_INTEGER} | out
    elif out.get("type") == "dataclass":
        given = out.get("config") or {}
        out["config"] = {"extra_fields_behavior": "forbid", **given, "strict": True, "allow_inf_nan": False}
    return out


def to_json(value: object, cls: Any = None) -> str:
    """JSON text of a value; `from_json(cls, to_json(value, cls)) == value`.

    Args:
        cls: the declared type, as in `tuple[Stage, ...]`; None: the value's own class, which says nothing of what a tuple holds.
    """
    return _adapter(cls or type(value)).dump_json(value, indent=1).decode()


def write_value(path: str | Path, value: object, cls: Any = None) -> None:
    """Write a value that `read_json` reads back equal; `cls` as in `to_json`."""
    write_text(path, to_json(value, cls), exact=True)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted paths; lists become JSON text, so that a cell holds the whole list."""
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in flatten(item, f"{prefix}.{key}" if prefix else str(key)).items()}
    return {prefix: json.dumps(value) if isinstance(value, list) else value}


def from_json(cls: type[T], text: str | bytes, source: object = "JSON", fix: str = CORRECT, setting: str = "") -> T:
    """The value of class `cls` that `text` describes.

    Args:
        cls: with a class method `upgraded` where files of earlier versions have another form: it takes their plain content.
        source: the file, or another name of the text, for messages.
        fix: what a user can do if the text is wrong.
        setting: the setting that names the file; empty where none does.

    Raises:
        InvalidFile: the text is no JSON, or does not describe a `cls`.
    """
    text, wrong = text if isinstance(text, str) else _decoded(text, source, setting), _Wrong(source, fix, setting)
    content = _content(text, wrong)
    if (upgrade := getattr(cls, "upgraded", None)) is not None and (current := upgrade(content)) != content:
        content, text = current, json.dumps(current)
    try:
        return _reader(cls).validate_json(text)
    except ValidationError as error:
        found = error.errors(include_url=False)
    raise _refusal(content, found, wrong)


class _Wrong(NamedTuple):
    """What is wrong with a text, at a place: an `InvalidFile`."""

    source: object
    fix: str
    setting: str

    def at(self, place: str, rule: str, value: Sequence[object] = (), fix: str = "") -> InvalidFile:
        return InvalidFile(self.source, place, rule, fix or self.fix, value, self.setting)


def read_json(cls: type[T], path: str | Path, *, setting: str = "", fix: str = CORRECT) -> T:
    """The value of class `cls` in a file.

    Args:
        setting: the setting that names the file; empty where none does.
        fix: what a user can do if the content is wrong.

    Raises:
        InvalidFile: the file cannot be read, is no JSON, or does not describe a `cls`.
    """
    return from_json(cls, read_text(path, setting=setting), path, fix, setting)


def read_text(path: str | Path, *, setting: str = "") -> str:
    """The text of a file: UTF-8, with or without a byte order mark.

    Raises:
        InvalidFile: there is no such file, it is no regular file (a pipe is never waited for), it may not be read, it is larger
            than `MOST_BYTES`, or it is no text.
    """
    return _decoded(read_bytes(path, setting=setting), path, setting)


def _decoded(content: bytes, source: object, setting: str = "") -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = content.count(b"\n", 0, error.start) + 1, error.start - content.rfind(b"\n", 0, error.start)
        place = f":{line}:{column}"
        raise InvalidFile(source, place, f"is no UTF-8 text ({error.reason})", "name a text file", setting=setting) from None


def read_bytes(path: str | Path, *, setting: str = "") -> bytes:
    """The content of a file.

    Raises:
        InvalidFile: as `read_text`.
    """
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(path, _reason(error), setting) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise _unreadable(path, f"it is {_KINDS.get(stat.S_IFMT(found.st_mode), 'no regular file')}", setting)
        if found.st_size > MOST_BYTES:
            raise _unreadable(path, f"it has {found.st_size} bytes, and at most {MOST_BYTES} are read", setting)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(MOST_BYTES)
    except OSError as error:
        raise _unreadable(path, _reason(error), setting) from None
    finally:
        os.close(handle)


_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device"}


def _reason(error: OSError | ValueError) -> str:
    if not isinstance(error, OSError):
        return "no file has such a name"
    words = error.strerror or errno.errorcode.get(error.errno or 0, "unreadable")
    return words[:1].lower() + words[1:] if error.strerror else words


def _unreadable(path: object, reason: str, setting: str) -> InvalidFile:
    return InvalidFile(path, "", f"cannot be read: {reason}", "name a file that can be read", setting=setting)


def seal(path: Path, value: object, setting: str) -> None:
    """Write a value into a cache's folder, under a name that says what it was made for; `unseal` reads it.

    Other processes see the old file or the whole new one.

    Args:
        setting: names the folder, for messages.

    Raises:
        InvalidConfig: the folder cannot be written to.
    """
    text = to_json(value)
    if hidden(text) == text:  # a cache outlives the run, and no secret is to
        with _writing(path, setting):
            write_text(path, f"{_digest(text, path.stem)}\n{text}", exact=True)


def check_sealable(path: Path, setting: str) -> None:
    """Refuse a folder that cannot be written to, before the work whose value `seal` is to write there. Arguments as of `seal`."""
    with _writing(path, setting):
        anonymous(folder(path.parent)).close()


@contextmanager
def _writing(path: Path, setting: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidConfig(setting, path.parent, f"cannot be written to: {error}", "set cache_dir=FOLDER") from None


def unseal(cls: type[T], path: Path) -> T | None:
    """The value that `seal` wrote under this name; None if there is none, or it is not as it was written."""
    try:
        digest, _, text = read_text(path).partition("\n")
        if digest != _digest(text, path.stem):
            return None
        return _adapter(cls).validate_json(text)  # as it was written: what `from_json` looks for cannot be there
    except (InvalidFile, ValidationError):
        return None


def _digest(text: str, purpose: str) -> str:
    return hashlib.sha256(f"{purpose}\n{text}".encode()).hexdigest()


def _content(text: str, wrong: _Wrong) -> Any:
    """The plain content of JSON in which nothing is said twice.

    Raises:
        InvalidFile: with line and column.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        line, column, rule = error.lineno, error.colno, f"is no JSON: {error.msg[:1].lower()}{error.msg[1:]}"
    except (ValueError, RecursionError):
        line, column, rule = _first_fault(text)
    raise wrong.at(f":{line}:{column}", rule)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key is given twice")
    return out


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


DEEPEST = 100
"""Lists and objects inside each other that a file may have."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[-+\w.]+')


def _first_fault(text: str) -> tuple[int, int, str]:
    """Line, column and rule of the first thing that JSON's grammar allows and this package does not."""
    keys: list[set[str]] = []
    last = ""
    for match in _TOKEN.finditer(text):
        word, fault = match[0], ""
        if word in "{[":
            keys.append(set())
            fault = f"is nested more than {DEEPEST} levels deep" if len(keys) > DEEPEST else ""
        elif word in "}]":
            keys = keys[:-1]
        elif word == ":" and keys:
            fault = f"is given twice: {last[:60]}" if last in keys[-1] else ""
            keys[-1].add(last)
        elif word in ("NaN", "Infinity", "-Infinity"):
            fault = f"must be a finite number, not {word}"
        elif len(word) > 20 and word.lstrip("-").isdigit():
            fault = f"has {len(word)} digits: an integer is at most {MOST_INTEGER}"
        if fault:
            before = text.rfind("\n", 0, match.start())
            return text.count("\n", 0, match.start()) + 1, match.start() - before, fault
        last = word
    return 1, 1, "is no JSON that can be read"


def _refusal(content: Any, found: Sequence[Mapping[str, Any]], wrong: _Wrong) -> InvalidFile:
    """The first of pydantic's errors, in the file's terms."""
    first = found[0]
    kind, rule, context = first["type"], first["msg"], first.get("ctx") or {}
    if kind == "json_invalid":
        words, _, at = str(context.get("error", rule)).partition(" at line ")
        line, _, column = at.partition(" column ")
        return wrong.at(f":{line}:{column}" if column else "", f"is no JSON: {words}")
    place, values = _place(content, first["loc"], kind)
    inner = context.get("error")
    if isinstance(inner, InvalidConfig):
        *_, name = inner.field.split(".")
        return wrong.at(f"{place}.{name}".lstrip("."), inner.rule, [inner.value], f"{wrong.fix}: {inner.fix}")
    if isinstance(inner, GppError):
        return wrong.at(place, str(inner).removesuffix("."))
    if kind == "missing":
        return wrong.at(place, "is missing")
    if kind == "unexpected_keyword_argument":
        known = sorted({str(error["loc"][-1]) for error in found if error["type"] == "missing"})
        near = get_close_matches(str(first["loc"][-1]), known, n=1)
        return wrong.at(place, f"is no field{f'; {near[0]} is missing' if near else ''}")
    return wrong.at(place, _in_our_words(rule), values)


_WORDS = (
    (r"^(Input|Value|Dictionary|Tuple|List|String) should (be|have|match)|^Value error, ", r"must \2"),
    ("a valid number", "a number"),
    ("a valid integer.*", "an integer"),
    ("a valid string", "a text"),
    ("a valid boolean", "true or false"),
    ("a valid (array|tuple|list)|an array", "a list"),
    ("a valid dictionary|an instance of .*", "an object"),
    ("less than or equal to", "at most"),
    ("greater than or equal to", "at least"),
    ("greater than", "above"),
    ("after validation, not .*", ""),
)


def _in_our_words(rule: str) -> str:
    """A rule as pydantic says it, in the terms of the other messages."""
    for theirs, ours in _WORDS:
        rule = re.sub(theirs, ours, rule)
    return rule[:1].lower() + rule[1:].strip()


def _place(content: Any, steps: Sequence[int | str], kind: str) -> tuple[str, list[object]]:
    """A path such as `stages[3].devices[0]`, and the value there, in a list; steps that are none in the content are left out."""
    path, value, there = "", content, True
    for i, step in enumerate(steps):
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(value, dict) and str(step) in value:
            path, value = f"{path}.{step}", value[str(step)]
        elif kind == "missing" and i == len(steps) - 1:
            path, there = f"{path}.{step}", False
    return path.lstrip("."), [value] if there and not isinstance(value, dict | list) else []
