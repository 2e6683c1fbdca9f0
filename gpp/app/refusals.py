"""Every error of a command line as one that names field, value, rule and fix.

Hydra and OmegaConf say what went wrong in words of their own; those are read here alone. Nothing here imports them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from gpp.app.vocabulary import Vocabulary, at, brief, nearest
from gpp.errors import LONGEST, GppError, InvalidConfig
from gpp.models.dotted import raised_by, resolve

LONGEST_NUMBER = 1000
"""Digits; Python refuses to read more than 4,300."""
FLAGS = re.compile(r"--?(cd|cn|cp|config|package|p|cfg|c|info|i|run|r|experimental)")
OF_HYDRA = ("_target_", "_convert_", "_recursive_", "_partial_")
VALUES: dict[str, object] = {"null": None, "true": True, "false": False}


def check_words(words: Sequence[str]) -> None:
    """Refuse words that Hydra cannot even read.

    Raises:
        InvalidConfig: a word has no key, or a number of more digits than can be read; it starts with dashes, or sets what Hydra
            notes.
    """
    for word in words:
        key, equals, text = split(word)
        if re.search(rf"\d(_?\d){{{LONGEST_NUMBER}}}", word):
            rule = f"has a number of more than {LONGEST_NUMBER} digits"
            raise _refused(brief(key), text, rule, "give a number that fits the setting")
        if equals and not key:
            raise _refused("(no key)", text, "a setting is written as KEY=VALUE", f"write KEY={text}")
        if re.match(r"hydra\.runtime\b", key):
            raise _refused(key, text, "is what Hydra notes of a run, and no setting", "set hydra.run.dir=... for the run's folder")
        if word.startswith("-") and equals and not FLAGS.fullmatch(word.partition("=")[0].split("-config")[0]):
            raise _refused(key, text, "settings are written without dashes", f"write {key.lstrip('-')}={text}")


def split(word: str) -> tuple[str, str, str]:
    """(key, equals sign or nothing, text of the value) of a word of the command line."""
    key, equals, text = word.partition("=")
    return key.lstrip("+~"), equals, text


def _refused(key: str, text: str, rule: str, fix: str) -> InvalidConfig:
    """The error for a text on the command line; the text is shown as the value that it stands for, and cut if long."""
    value: object = VALUES.get(text, brief(text))
    for number in (float, int):
        with suppress(ValueError):
            value = number(text) if len(text) <= LONGEST else value
    return InvalidConfig(key, value, rule, fix)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def plain(text: str) -> str:
    """The sentences of another library's message, in one line, without its remarks about itself."""
    drop = ("full_key:", "object_type", "reference_type", "See https", "Set the environment", "Config search path", "provider=")
    lines = (line.strip() for line in text.splitlines())
    words = " ".join(dict.fromkeys(line for line in lines if line and not line.startswith(drop)))
    words = re.sub(r"\s*See https?://\S+( for details)?\.?|, set env var HYDRA_FULL_ERROR=1[^.]*\.", "", words)
    return words.strip().removesuffix(".").strip()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What is known of a command line that makes no configuration, or one without an experiment.

    Args:
        error: Hydra's error.
        words: overrides as they were written.
        vocabulary: what could have been written.
        config: makes the plain configuration, its references as they are written; None where there is none.
        culprit: finds the word without which there is a configuration; None if there is none or several.
    """

    error: BaseException
    words: Sequence[str]
    vocabulary: Vocabulary
    config: Callable[[], Any] = lambda: None
    culprit: Callable[[], str | None] = lambda: None

    def explained(self) -> GppError:
        """The error for the user: the first of these readings that fits."""
        ours = next((found for found in self._chain if isinstance(found, GppError)), None)
        if isinstance(ours, InvalidConfig):
            return another_kind(ours, self.config(), self.vocabulary)
        if ours is not None:
            return ours
        for reading in (self._file, self._grammar, self._missing, self._key, self._reference, self._object):
            if (refused := reading()) is not None:
                return refused
        return self._anything()

    @property
    def _chain(self) -> list[BaseException]:
        return list(causes(self.error))

    @property
    def _text(self) -> str:
        return "\n".join(map(str, self._chain))

    def _given(self, key: str) -> str:
        """The text that the command line gives a key; empty if it gives none."""
        return next((text for name, _, text in map(split, reversed(self.words)) if name.partition("@")[0] == key), "")

    def _file(self) -> InvalidConfig | None:
        """A file that cannot be read, or is no YAML."""
        for found in self._chain:
            mark: Any = getattr(found, "problem_mark", None)
            if mark is not None:
                what = " ".join(str(part) for part in (getattr(found, "context", None), getattr(found, "problem", None)) if part)
                place = f"line {mark.line + 1}, column {mark.column + 1}"
                return InvalidConfig("file", mark.name, f"{place}: {what or 'is no YAML'}", "correct it there")
            if isinstance(found, UnicodeDecodeError) or type(found).__name__ == "ReaderError":
                rule = "holds bytes that are no text in UTF-8"
                return InvalidConfig("file", self.vocabulary.unreadable() or "a YAML file", rule, "save it as UTF-8")
            if isinstance(found, OSError) and found.filename and not hasattr(found, "missing_cfg_file"):
                words = (found.strerror or str(found)).lower()
                return InvalidConfig("file", brief(str(found.filename)), words, "name another, or make room for it there")
        return None

    def _grammar(self) -> InvalidConfig | None:
        """A word that is no override, or that only a sweep may hold."""
        written = next((found for error in self._chain if (found := getattr(error, "override", None))), None)
        if written is not None:
            key, equals, text = split(str(written))
            if not equals:
                return _refused(key, "", "a setting is written as KEY=VALUE", self.vocabulary.meant(key))
            fix = f"close its quotes and brackets; a text with signs is written as '{key}=\"...\"'"
            return _refused(key, text, "cannot be read", fix)
        if match := re.search(r"Ambiguous value for argument '(.+?)=(.*)'|Sweep parameters '(.+?)=(.*)' requires", self._text):
            key, text = (match.group(1) or match.group(3)).lstrip("+"), match.group(2) or match.group(4)
            listed = f", or write '{key}=[{text}]' for a list" if "(" not in text else ""
            return _refused(key, text, "are several values, one for each job of a sweep", f"add -m{listed}")
        if match := re.search(r"Sweeping over Hydra's configuration is not supported : '(.+?)=(.*)'", self._text):
            return _refused(match.group(1), match.group(2), "is one setting for the whole sweep", "give it one value")
        if match := re.search(r"Multiple values for ([^\s.]+)\.", self._text):
            key = match.group(1).partition("@")[0]
            text = self._given(key)
            return _refused(key, text, "has a default, and + adds another", f"write {key}={text}")
        return None

    def _missing(self) -> InvalidConfig | None:
        """An option, a file or a folder that does not exist."""
        if match := re.search(r"Additional config directory '([^']+)' not found", self._text):
            return InvalidConfig("-cd", match.group(1), "there is no such folder", "correct the path, as in -cd sweeps")
        if match := re.search(r"Cannot find primary config '([^']+)'", self._text):
            known = sorted({path.stem for folder in self.vocabulary.folders for path in folder.glob("*.yaml")})
            near = nearest(match.group(1), known)
            fix = f"{f'write -cn {near}; ' if near else ''}there are {', '.join(known)}, and those of another folder with -cd"
            return InvalidConfig("-cn", match.group(1), "there is no such file", fix)
        match = re.search(r"(?:In '([^']+)': )?Could not (?:find|load) '([^']+)'", self._text)
        if match is None:
            return None
        inside, missing = match.groups()
        group, _, name = missing.rpartition("/")
        known = next((found for error in self._chain if (found := getattr(error, "options", None))), ())
        fix = self.vocabulary.choose(group, name, known) if group else "correct the name"
        if self._given(group) == name or inside in (None, "config", "hydra/config"):
            return _refused(group or "-cn", name, "there is no such option", fix)
        return InvalidConfig(f"defaults of {inside}.yaml", missing, "there is no such file", fix.replace(f"{group}=", f"{group}: "))

    def _key(self) -> InvalidConfig | None:
        """A key that does not exist, or that exists already."""
        if match := re.search(r"An item is already at '([^']+)'", self._text):
            key = match.group(1)
            return _refused(key, self._given(key), "is there already, and + adds", f"write {key}={self._given(key)}")
        if match := re.search(r"Could not delete(?: from config)?[.:]? (?:The value of )?'([^'=]+)", self._text):
            rule = "~ takes away what is there, and this is not"
            return _refused(f"~{match.group(1)}", self._given(match.group(1)), rule, "leave it out")
        if match := re.search(r"force-add of config groups is not supported: '\+\+([^=]+)=(.*)'", self._text):
            key, text = match.groups()
            return _refused(key, text, "is a group, and ++ is for settings", f"write {self.vocabulary.assigned(key, text)}")
        found = re.search(
            r"Could not override '([^']+)'|looks like a config group override, but config group '([^']+)'", self._text
        )
        if found is None:
            return None
        key = (found.group(1) or found.group(2)).partition("@")[0]
        text, options = self._given(key), self.vocabulary.options(key)
        if not any(split(word)[0].partition("@")[0] == key for word in self.words):
            return InvalidConfig("defaults", key, plain(self._text), "correct the list of defaults in the YAML file")
        if text in options:
            return _refused(key, text, "has no default that it could replace", f"write +{key}={text}")
        if options:
            return _refused(key, text, "there is no such option", self.vocabulary.choose(key, text))
        if not re.search(r"is not in struct|not in '|No match in the defaults|does not exist", self._text):
            return _refused(key, text, plain(self._text), "give it a value of the right type")
        inner = re.search(r"full_key: (\S+)", self._text)
        if text.lstrip().startswith("{") and inner is not None and inner.group(1).startswith(f"{key}."):
            rule = f"has no {inner.group(1).removeprefix(f'{key}.')}, and a mapping changes what is there alone"
            return _refused(key, text, rule, f"write +{inner.group(1)}=VALUE to add it")
        rule = f"there is no such {'group' if '/' in key else 'setting'}"
        return _refused(key, text, rule, self.vocabulary.meant(key, text))

    def _reference(self) -> InvalidConfig | None:
        """A value that is missing, or that refers to others in a circle or to nothing."""
        if match := re.search(r"Missing mandatory value: (\S+)", self._text):
            return InvalidConfig(match.group(1), "???", "has no default", f"give {match.group(1)}=VALUE")
        error = next((found for found in self._chain if "nterpolation" in type(found).__name__), None)
        if error is None and not any(isinstance(found, RecursionError) for found in self._chain):
            return None
        flat = dict(_leaves(self.config()))
        if "Recursive interpolation" in self._text or any(isinstance(error, RecursionError) for error in self._chain):
            for key in (circle := _circle(flat))[:1]:
                rule = f"refers to itself ({' -> '.join(circle)})"
                return InvalidConfig(key, flat[key], rule, f"give {key} a value of its own")
        if error is None:
            return None
        said = str(error).splitlines()[0]
        missing = re.search(r"Interpolation key '([^']+)' not found|Unsupported interpolation type (\S+)", said)
        variable = re.search(r"Environment variable '([^']+)' not found", said)
        named = next((name for match in (missing, variable) if match for name in match.groups() if name), "${")
        referring = (key for key, value in flat.items() if "${" in str(value) and named in str(value))
        key = str(getattr(error, "full_key", None) or next(referring, "a setting"))
        raw = flat.get(key, self._given(key))
        if missing is not None and missing.group(1):
            near = nearest(missing.group(1), self.vocabulary.settings)
            fix = f"write ${{{near}}}" if near else "name a setting that exists"
            return InvalidConfig(key, raw, f"there is no setting {missing.group(1)}", fix)
        if missing is not None:
            fix = "write ${NAME} for a setting, ${oc.env:NAME} for a variable of the environment"
            return InvalidConfig(key, raw, f"there is no resolver {missing.group(2)}", fix)
        if variable is not None:
            return InvalidConfig(key, raw, f"the environment has no {named}", f"set {named}, or write ${{oc.env:{named},VALUE}}")
        own, _, fix = re.sub(r".*raised while resolving interpolation: ", "", said).partition(" Fix: ")
        return InvalidConfig(key, raw, plain(own.strip("\"'")), plain(fix.strip("\"'")) or f"give {key} a value")

    def _object(self) -> GppError | None:
        """An object of the configuration that could not be made."""
        if not any("Instantiation" in type(found).__name__ for found in self._chain):
            return None
        full = re.search(r"full_key: (\S+)", str(self.error))
        key = full.group(1) if full else ""
        node: Any = self.config()
        for root, value in node.items() if isinstance(node, Mapping) else ():
            # Hydra calls the first item of a list `cluster0`.
            if isinstance(value, list) and key.startswith(str(root)) and self.vocabulary.options(str(root)):
                return InvalidConfig(
                    root, self._given(root), "is a list, and an option is a mapping", f"correct the file of {root}"
                )
        for part in re.findall(r"[^.\[\]]+", key):
            node = node[int(part)] if isinstance(node, list) else node.get(part) if isinstance(node, Mapping) else None
        if not isinstance(node, Mapping) or "_target_" not in node:
            return None
        field, path = f"{key}._target_" if key else "_target_", node["_target_"]
        try:
            target = resolve(path, field=field)
        except GppError as refused:
            return refused
        if not callable(target):
            return InvalidConfig(field, path, f"is a {type(target).__name__}", "name a class or a function")
        given = {name: value for name, value in node.items() if name not in OF_HYDRA}
        try:
            inspect.signature(target).bind(**given)
        except (TypeError, ValueError) as mismatch:
            if self._given(field):
                return InvalidConfig(field, path, f"does not take the settings of {key or 'a run'}", f"leave {field} out")
            return self._unfitting(f"{key}." if key else "", given, target, mismatch)
        cause = self.error.__cause__
        return (
            InvalidConfig(field, path, plain(str(self.error)), "name another")
            if cause is None
            else raised_by(cause, field=field, path=path)
        )

    def _unfitting(self, prefix: str, given: Mapping[str, Any], target: Callable[..., Any], error: Exception) -> InvalidConfig:
        """Settings that are no arguments of the class that they are for."""
        name = getattr(target, "__qualname__", str(target))
        try:
            parameters = inspect.signature(target).parameters
        except ValueError:  # some builtins have none
            return InvalidConfig(f"{prefix}_target_", name, str(error), "name another class or function")
        for extra in given:
            if extra in parameters:
                continue
            near = nearest(extra, parameters)
            fix = f"write {prefix}{near}" if near else f"leave it out; {name} has {', '.join(parameters)}"
            if not prefix:
                fix = self.vocabulary.meant(extra, self._given(extra))
            rule = f"{name} has no such setting" if prefix else f"there is no such {'group' if '/' in extra else 'setting'}"
            return InvalidConfig(f"{prefix}{extra}", given[extra], rule, fix)
        lacking = next((p.name for p in parameters.values() if p.default is p.empty and p.name not in given), "_target_")
        key = f"{prefix}{lacking}"
        taken_away = any(word.startswith(f"~{key}") for word in self.words)
        return InvalidConfig(key, "???", f"{name} needs it", f"leave ~{key} out" if taken_away else f"give {key}=VALUE")

    def _anything(self) -> InvalidConfig:
        """An error that is read nowhere else: the word without which it does not occur, and what was said."""
        culprit = self.culprit() or (self.words[0] if len(self.words) == 1 else "")
        key, _, text = split(culprit)
        if "must be a string or a list" in self._text and self.vocabulary.options(key):
            return _refused(key, text, "must be the name of an option", self.vocabulary.choose(key, text))
        rule = brief(plain(self._text)) or type(self.error).__name__
        if not key:
            return InvalidConfig("command line", " ".join(self.words), rule, "leave words out until it is read")
        return _refused(key, text, rule, f"correct {key}, or leave it out")


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything that is no section."""
    if isinstance(node, Mapping):
        for key, inner in node.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, node


def _circle(flat: Mapping[str, Any]) -> list[str]:
    """Settings that refer to each other in a circle, the first one again at the end; empty if there are none."""

    def referred(key: str) -> list[str]:
        out = []
        for dots, name in re.findall(r"\$\{(\.*)([\w.]+)\}", str(flat[key])):
            above = key.split(".")[: -len(dots)] if dots else []
            out.append(".".join([*above, name]))
        return [name for name in out if name in flat]

    def search(walk: list[str]) -> list[str]:
        for following in referred(walk[-1]):
            if following == walk[0]:
                return [*walk, following]
            if following not in walk and (found := search([*walk, following])):
                return found
        return []

    return next((found for first in flat if (found := search([first]))), [])


def another_kind(error: InvalidConfig, config: Any, vocabulary: Vocabulary) -> InvalidConfig:
    """The error with a better fix, where an object of the configuration is of the wrong class.

    The fix names the group that makes the right one: `strategy.weights=flush` means `strategy/weights=flush`.
    """
    group, value = error.field.replace(".", "/"), error.value
    options = vocabulary.options(group)
    if "of the class" not in error.rule or not options:
        return error
    node = at(config, error.field)
    if isinstance(node, Mapping) and "_target_" in node:
        rule = f"makes a {type(value).__name__}, and must make {error.rule.removeprefix('must be ')}"
        fix = f"leave it out, or {vocabulary.choose(group, '')}"
        return InvalidConfig(f"{error.field}._target_", node["_target_"], rule, fix)
    text = value if isinstance(value, str) else ""
    fix = f"write {group}={text}" if text in options else vocabulary.choose(group, text)
    return InvalidConfig(error.field, value, "must be the name of an option", fix)


def ended(code: object, config: Any = None) -> InvalidConfig:
    """The error for code of the user's that ended the process.

    Args:
        config: the plain configuration, if that code may be a module of a class in it.
    """
    for key, path in _leaves(config):
        if key.split(".")[-1] == "_target_":
            try:
                resolve(path, field=key)
            except InvalidConfig as refused:
                return refused
    return InvalidConfig("sys.exit", code, "was called by code that a setting names", "take the call out of that code")
