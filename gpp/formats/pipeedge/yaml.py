"""YAML that is data, as a value of a declared type: as strict as `gpp.serialization` is with JSON.

Only mappings, lists and scalars mean something here. Anchors (of which a short file can make a large one), tags, several documents
and keys that are given twice are refused, and nesting ends where that of JSON does. A plain scalar is a number if it is written
like one, in any of YAML's or C's ways; what is quoted is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gpp.errors import InvalidFile
from gpp.serialization import CORRECT, DEEPEST, from_json, read_text

T = TypeVar("T")

_INTEGER = re.compile(r"[-+]?[0-9]{1,19}")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(cls: type[T], path: str | Path, *, setting: str) -> T:
    """The value of class `cls` in a file.

    Args:
        setting: the setting that names the file.

    Raises:
        InvalidFile: the file cannot be read, is no YAML of this kind, or does not describe a `cls`.
    """
    text = read_text(path, setting=setting)
    return from_json(cls, json.dumps(_content(text, path, setting)), path, CORRECT, setting)


def _content(text: str, path: str | Path, setting: str) -> Any:
    """The plain content of the one document of a file, made from the parser's events: nothing in them is constructed."""
    open_nodes: list[_YamlNode] = []
    document: list[Any] = []
    for event in _events(text, path, setting):
        fault = _fault(event, len(open_nodes), len(document))
        if isinstance(event, yaml.CollectionEndEvent):
            value = open_nodes.pop().content
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append(_YamlNode({} if isinstance(event, yaml.MappingStartEvent) else []))
            value = _NOTHING
        elif isinstance(event, yaml.ScalarEvent):
            value = _scalar(event.value) if event.implicit[0] else event.value
        else:
            value = _NOTHING
        if value is not _NOTHING and not fault:
            fault = open_nodes[-1].take(value) if open_nodes else document.append(value)
        if fault:
            place = f":{event.start_mark.line + 1}:{event.start_mark.column + 1}"
            raise InvalidFile(path, place, fault, CORRECT, setting=setting)
    return document[0] if document else None


def _events(text: str, path: str | Path, setting: str) -> Iterator[Any]:
    try:
        yield from yaml.parse(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        words = getattr(error, "problem", None) or getattr(error, "reason", None) or "it holds characters that YAML does not allow"
        raise InvalidFile(path, place, f"is no YAML: {words}", CORRECT, setting=setting) from None


def _fault(event: Any, depth: int, documents: int) -> str | None:
    """The fault of a parser's event, wherever it stands."""
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        return "is an anchor or refers to one; write out what it stands for"
    if getattr(event, "tag", None) is not None:
        return "has a tag; plain YAML has none"
    if isinstance(event, yaml.DocumentStartEvent) and documents:
        return "begins a second document; a file has one"
    if isinstance(event, yaml.CollectionStartEvent) and depth >= DEEPEST:
        return f"is nested more than {DEEPEST} levels deep"
    return None


_NOTHING = object()


class _YamlNode:
    """A mapping or a list that is being read."""

    __slots__ = ("_key", "content")

    def __init__(self, content: dict[str, Any] | list[Any]) -> None:
        self.content, self._key = content, _NOTHING

    def take(self, value: Any) -> str | None:
        """Put the next item in, a mapping's keys and values by turns; returns what is wrong with it."""
        if isinstance(self.content, list):
            self.content.append(value)
        elif self._key is not _NOTHING:
            self.content[str(self._key)], self._key = value, _NOTHING
        elif isinstance(value, dict | list):
            return "is a key that is no plain word"
        elif str(value) in self.content:
            return f"is given twice: {str(value)[:60]}"
        else:
            self._key = value
        return None


def _scalar(word: str) -> Any:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _INTEGER.fullmatch(word):
        return int(word)
    return float(word) if _FLOAT.fullmatch(word) else word
