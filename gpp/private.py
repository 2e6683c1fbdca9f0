"""What is a secret, and text without it: whatever a run writes, prints or tells a tracker goes through here.

Three kinds are known: texts with a known form (`ghp_...`, `hf_...`, the password of a URL), values of environment
variables that are secrets by their names, and settings that are secrets by their names. `masked` puts *** in their place.

A worker needs the true settings to make its data set. No file holds them: `keep` puts those that are secrets into the
environment variable GPP_SECRETS, which only processes of the same user can read and which workers inherit, `hidden` puts a
token in place of each into the text of a job, and `shown` puts them back where the variable is there.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Final, TextIO, final
from urllib.parse import quote

from gpp.errors import InvalidConfig

SECRETS = "GPP_SECRETS"
"""Environment variable with the settings that are secrets: a JSON list of texts."""

MASK = "***"

LEAST, LEAST_SETTING = 8, 6
"""Characters of a variable's value, and of a setting, that are looked for; shorter ones would be found in ordinary words."""

_FORM = re.compile(
    r"(?<![A-Za-z0-9])"
    r"(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|sk-[A-Za-z0-9_-]{20,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----)?",
    re.DOTALL,
)
"""Keys of Hugging Face, GitHub, GitLab, OpenAI and Anthropic, AWS, Slack; signed tokens; private keys."""

_OF_GIT = ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-")
_BEGINNINGS = (*_OF_GIT, "hf_", "sk-", "AKIA", "ASIA", "xox", "eyJ", "-----BEGIN ")
"""One of these is in every text that `_FORM` finds; to look for them is ten times as fast."""

_URL = re.compile(r"(://[^\s/?#:@'\"<>\\]*:)(?!\*\*\*@)([^\s/@'\"<>\\]+)@")
"""Scheme's end and user, password of a URL. """

_WHOLE_URL = re.compile(r"\w[\w+.-]*://[^/?#:@]*:(.+)@[^@]*", re.DOTALL)
"""A text that is nothing but a URL with a password, which may hold any character then."""

_SECRET_WORDS = frozenset("secret secrets password passwd passphrase credential credentials dsn apikey pat".split())  # noqa: SIM905
_KEY_OF = frozenset("api private access secret signing account auth encryption deploy license ssh".split())  # noqa: SIM905
_ENVIRONMENT_WORDS = _SECRET_WORDS | {"key", "token", "auth", "pass", "pw"}

_OF_TEXT = "pad bos eos mask unk cls sep start end begin stop num max min per next image text special class prompt new type by"
_TOKEN_OF_TEXT = frozenset(_OF_TEXT.split())
"""Words before `token` in the names of settings of a language model."""

_PLACE: Final = re.compile(r'"\*\*\*secret (\d+)\*\*\*"')


def _words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]


@cache
def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name holds a secret.

    >>> [is_secret_variable(name) for name in ("WANDB_API_KEY", "DB_PASSWORD", "TOKENIZERS_PARALLELISM", "PWD")]
    [True, True, False, False]
    """
    return not _ENVIRONMENT_WORDS.isdisjoint(_words_of(name))


@cache
def is_secret_setting(name: str) -> bool:
    """Whether a setting of this name holds a secret.

    >>> [is_secret_setting(name) for name in ("github_token", "dsn", "apiKey", "pad_token", "num_tokens", "key")]
    [True, True, True, False, False, False]
    """
    words = ["", *_words_of(name)]
    pairs = list(pairwise(words))
    named = not _SECRET_WORDS.isdisjoint(words)
    return named or any((b == "key" and a in _KEY_OF) or (b == "token" and a and a not in _TOKEN_OF_TEXT) for a, b in pairs)


def masked(words: str) -> str:
    """The same words with *** in place of every secret that is known, in whatever way it is written there.

    >>> masked("cannot reach postgres://me:hunter2@db/x")
    'cannot reach postgres://me:***@db/x'
    """
    for needle in _needles():
        if needle in words:
            words = words.replace(needle, MASK)
    if "://" in words and "@" in words:
        words = _URL.sub(rf"\g<1>{MASK}@", words)
    if any(beginning in words for beginning in _BEGINNINGS):
        words = _FORM.sub(MASK, words)
    return words


def masked_json(text: str) -> str:
    """The same JSON with *** in its texts: a number that a secret is a part of stays one.

    Args:
        text: one value, or lines of values.
    """
    if masked(text) == text:
        return text
    body = text.rstrip("\n")
    try:
        value = json.loads(text)
    except ValueError:
        return "".join(map(masked_json, text.splitlines(keepends=True))) if "\n" in body else masked(text)
    return json.dumps(masked_value(value), indent=1 if "\n" in body else None) + text[len(body) :]


def masked_value(value: Any, name: str = "") -> Any:
    """The same nested mappings and lists with *** in their texts, and in place of settings that are secrets by their names.

    Args:
        name: of the setting; empty where it has none.
    """
    if isinstance(value, str):
        return MASK if value and is_secret_setting(name) else masked(value)
    if isinstance(value, Mapping):
        return {masked(key) if isinstance(key, str) else key: masked_value(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_value(item, name) for item in value]
    return value


_seen: dict[Any, Any] = {}
_found: tuple[str, ...] = ()


def _needles() -> tuple[str, ...]:
    """Texts to look for, the longest first; made again when the environment has changed.

    `os.environ` decodes every variable that is read, which takes a hundred microseconds; the mapping behind it is compared
    in one, so that a line of a worker can be masked.
    """
    global _seen, _found
    now: dict[Any, Any] = os.environ._data  # pyright: ignore[reportAttributeAccessIssue]
    if now != _seen:
        _seen = dict(now)
        variables = [value for name, value in os.environ.items() if is_secret_variable(name) and name != SECRETS]
        known = [value for value in variables if len(value) >= LEAST and not os.path.exists(value)]
        cores = [url[1] if (url := _WHOLE_URL.fullmatch(text)) else text for text in _kept()]  # of a URL its password
        known += [core for core in cores if len(core) >= LEAST_SETTING]
        _found = tuple(sorted({form for value in known for form in _written(value)}, key=lambda form: (-len(form), form)))
    return _found


def _written(value: str) -> Iterator[str]:
    """A text as files and messages write it."""
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value)[1:-1]
    yield html.escape(value)
    yield html.escape(value).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    yield quote(value, safe="")
    yield value.replace("'", "''")  # YAML
    yield value.replace("'", "'\"'\"'")  # a shell's words


def secret_settings(config: Any) -> dict[str, str]:
    """Settings that are secrets, by name or by form: place -> text."""
    return {
        place: text
        for place, name, text in _texts(config)
        if text and (is_secret_setting(name) or _FORM.search(text) or _WHOLE_URL.fullmatch(text) or masked(text) != text)
    }


def _texts(value: Any, place: str = "", key: str = "") -> Iterator[tuple[str, str, str]]:
    """(place, last key, text) of every text in nested mappings and lists."""
    if isinstance(value, str):
        yield place, key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{place}.{name}".lstrip("."), str(name))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _texts(item, f"{place}[{i}]", key)


def keep(config: Any) -> tuple[str, ...]:
    """Remember the settings that are secrets, for this process and for those that it will start; returns their places."""
    found = secret_settings(config)
    if new := [text for text in dict.fromkeys(found.values()) if text not in _kept() and text != MASK]:
        os.environ[SECRETS] = json.dumps([*_kept(), *new])
    return tuple(found)


def _kept() -> tuple[str, ...]:
    return _parsed(os.environ.get(SECRETS, ""))


@cache
def _parsed(text: str) -> tuple[str, ...]:
    try:
        found = json.loads(text or "[]")
    except ValueError:
        found = None
    if not (isinstance(found, list) and all(isinstance(item, str) for item in found)):
        raise InvalidConfig(SECRETS, MASK, "must be a JSON list of texts", "unset it: gpp sets it for its own workers")
    return tuple(found)


def hidden(text: str) -> str:
    """A job's JSON with a token in place of each text that is a secret setting; `shown` is the inverse."""
    for number, secret in enumerate(_kept()):
        for form in {json.dumps(secret), json.dumps(secret, ensure_ascii=False)}:
            text = text.replace(form, f'"{MASK}secret {number}{MASK}"')
    return text


def apart(value: Any) -> Any:
    """A value of JSON's types with *** in place of each text that is a secret setting; alike in every run with these settings."""
    return json.loads(_PLACE.sub(f'"{MASK}"', hidden(json.dumps(value))))


def shown(text: str) -> str:
    """A job's JSON with the secrets of GPP_SECRETS in place of their tokens.

    Raises:
        InvalidConfig: the variable has none for a token: somebody started this process who does not know the settings.
    """
    known = _kept()

    def value(match: re.Match[str]) -> str:
        if (number := int(match[1])) >= len(known):
            rule = "has no value for a secret setting of this job, whose files hold none"
            fix = "start workers from the run's own command, or let the data set read the secret from a variable of its own"
            raise InvalidConfig(SECRETS, MASK if known else None, rule, fix)
        return json.dumps(known[number])

    return _PLACE.sub(value, text) if MASK in text else text


@final
class MaskedStream:
    """A text stream that is written to without secrets.

    Args:
        lines: whether it holds lines of JSON.
    """

    def __init__(self, stream: TextIO, *, lines: bool = False) -> None:
        self._stream, self._masked = stream, masked_json if lines else masked

    def write(self, words: str) -> int:
        self._stream.write(self._masked(words))
        return len(words)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> MaskedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
