"""Secrets do not belong into settings: a run directory, its report and its tracker hold all settings, for others to read.

What a run prints goes to its tracker, too, and may hold what no setting does: `masked` takes known forms of secrets out of it, and
the values of environment variables that are secrets by their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpp.errors import InvalidConfig

_KEY = re.compile(r"(^|_)(api_?key|secret(_key)?|password|passwd|credentials?|private_key|(access|auth|hf|bearer)_token)$", re.I)
_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|(AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""Keys of Hugging Face, GitHub, OpenAI and Anthropic, AWS, Slack; signed tokens; private keys."""


_VARIABLE = re.compile(r"(^|_)(token|secret|password|passwd|credentials?|(api|access|private|secret)_?key)$", re.I)
"""Names of environment variables whose values are secrets."""

LEAST = 8
"""Characters of a variable's value that is looked for; shorter ones would be found in ordinary words."""


def masked(words: str) -> str:
    """The same words with *** in place of every secret that is known by its form or by its variable's name."""
    for name, value in os.environ.items():
        if len(value) >= LEAST and _VARIABLE.search(name):
            words = words.replace(value, "***")
    return _VALUE.sub("***", words)


def refuse_secrets(config: Mapping[str, Any]) -> None:
    """Refuse a setting that is a secret by its name or by its form.

    Raises:
        InvalidConfig: names the setting, and never its value.
    """
    for place, key, value in _texts(config):
        if value and (_KEY.search(key) or _VALUE.search(value)):
            raise InvalidConfig(
                place,
                "***",
                "looks like a secret, and settings are written into the run directory, the report and the tracker",
                "put it into an environment variable, which your own code reads",
            )


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
