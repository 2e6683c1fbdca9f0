"""Damaged texts: bytes turned, cut, doubled and put in; values of JSON exchanged for others; keys dropped, doubled and invented."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

RAW = {"@NaN@": "NaN", "@Infinity@": "-Infinity", "@1e999@": "1e999", "@huge@": "9" * 400, "@endless@": "7" * 5000}
"""Words that stand for what Python's JSON would not write."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 1000, 10**9, 10**12, 10**18, 2**63, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, 1.5, -1.5, 1e308, -1e308, 5e-324, 1e-300, 1e18, 1e19),
    *(
        "",
        "x",
        "0",
        "1",
        "-1",
        "true",
        "node1",
        "stage",
        "\x1b[31mred\x1b[0m",
        "\ud800",
        "\u202e",
        "\x00",
        "a" * 5000,
        "<script>",
        "../..",
    ),
    *([], {}, [[]], [0], [0, 1], [1, 0], [0, 0], {"a": 1}, {"ref": "x"}, {"ref": []}, {"size": ["mul", "b"]}, [None], [True]),
    *RAW,
)

CHUNKS = (
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\x1b[2J",
        b"\n",
        b"\r\n",
        b"\t",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"-",
    ),
    *(
        b"0",
        b"9" * 30,
        b"1" * 5000,
        b"1e999",
        b"NaN",
        b"[" * 400,
        b'{"a":' * 300,
        b"\\ud800",
        b"null",
        b"true",
        "é²٣".encode(),
        b" ",
    ),
    *(
        b"@d0",
        b"s0.F0@d0",
        b" -- ",
        b"idle@d0",
        b"idle@d-1",
        b"&a [*a]",
        b"!!python/object",
        b"? ",
        b"- ",
        b": ",
        b"# ",
        b"% ",
        b"*x",
    ),
)

Place = tuple[Any, Any]
"""A container, and a key or an index in it."""


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """The content with one to three random edits of its bytes."""
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(out) + 1)
        size = min(rng.choice((1, 1, 2, 5, 20, 200, 2000)), len(out) - at)
        match rng.randrange(8):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = out[at : at + size]
            case 4:
                out[at:at] = rng.choice(CHUNKS)
            case 5:
                del out[at:]
            case 6:
                other = rng.randrange(len(out) + 1)
                out[at : at + size] = out[other : other + size]
            case _:
                lines = bytes(out).split(b"\n")
                a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
                lines[a], lines[b] = lines[b], lines[a]
                out = bytearray(b"\n".join(lines))
    return bytes(out)


def damaged_numbers(content: bytes, rng: random.Random) -> bytes:
    """One number, or one digit, exchanged for another: what stays well formed and means something else."""
    digits = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
    if not digits:
        return damaged_bytes(content, rng)
    at = end = rng.choice(digits)
    if rng.random() < 0.4:
        return content[:at] + str(rng.randrange(10)).encode() + content[at + 1 :]
    while end < len(content) and 48 <= content[end] <= 57:
        end += 1
    while at and 48 <= content[at - 1] <= 57:
        at -= 1
    number = int(content[at:end][:18])
    new = rng.choice((number + 1, number - 1, 0, -1, 2 * number, number * 10**6, 10**9, 10**17, 10**25))
    return content[:at] + str(new).encode() + content[end:]


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    """The content with one to three values, keys or items exchanged, dropped, doubled or invented."""
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            break
        holder, key = rng.choice(places)
        rng.choice(_EDITS)(value, holder, key, places, rng)
    text = json.dumps(value, indent=rng.choice((None, 1)))
    for word, raw in RAW.items():
        text = text.replace(f'"{word}"', raw)
    return text.encode()


def _places(value: Any) -> list[Place]:
    out: list[Place] = []
    todo = [value]
    while todo:
        holder = todo.pop()
        inner = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        out += [(holder, key) for key, _ in inner]
        todo += [item for _, item in inner if isinstance(item, dict | list)]
    return out


def _exchange(value: Any, holder: Any, key: Any, places: list[Place], rng: random.Random) -> None:
    holder[key] = rng.choice(VALUES)


def _nudge(value: Any, holder: Any, key: Any, places: list[Place], rng: random.Random) -> None:
    numbers = [(h, k) for h, k in places if isinstance(h[k], int | float) and not isinstance(h[k], bool)]
    if numbers:
        holder, key = rng.choice(numbers)
        old = holder[key]
        holder[key] = rng.choice((old + 1, old - 1, -old, 2 * old, old * 10**9, float(old), str(old), 0, [old]))


def _drop(value: Any, holder: Any, key: Any, places: list[Place], rng: random.Random) -> None:
    del holder[key]


def _double(value: Any, holder: Any, key: Any, places: list[Place], rng: random.Random) -> None:
    if isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[f"{key}{rng.choice(('_', 's', '2', ''))}"] = holder[key]


def _copy(value: Any, holder: Any, key: Any, places: list[Place], rng: random.Random) -> None:
    other, theirs = rng.choice(places)
    holder[key] = json.loads(json.dumps(other[theirs]))


def _deepen(value: Any, holder: Any, key: Any, places: list[Place], rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2, 150, 300))):
        holder[key] = [holder[key]]


def _turn(value: Any, holder: Any, key: Any, places: list[Place], rng: random.Random) -> None:
    lists = [h[k] for h, k in places if isinstance(h[k], list) and len(h[k]) > 1]
    if lists:
        rng.choice((list.reverse, rng.shuffle))(rng.choice(lists))


_EDITS: tuple[Callable[..., None], ...] = (_exchange, _exchange, _exchange, _nudge, _nudge, _drop, _double, _copy, _deepen, _turn)


def twice(content: bytes, rng: random.Random) -> bytes:
    """The content with one line of JSON given twice: the same key, with the same value or another."""
    lines = content.split(b"\n")
    keyed = [i for i, line in enumerate(lines) if b'": ' in line and line.rstrip().endswith(b",")]
    if not keyed:
        return damaged_bytes(content, rng)
    at = rng.choice(keyed)
    lines.insert(at, lines[at])
    return b"\n".join(lines)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content, damaged in one way or another."""
    ways: list[Callable[[bytes, random.Random], bytes]] = [damaged_bytes, damaged_bytes, damaged_numbers]
    if content.lstrip()[:1] in (b"{", b"["):
        ways += [damaged_json, damaged_json, damaged_json, damaged_json, twice]
    return rng.choice(ways)(content, rng)
