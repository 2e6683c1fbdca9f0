"""Numbers of torch's generator that nobody needs: leave them out, in 0.06 s however many they are.

torch's generator of the CPU is MT19937, a linear recurrence over bits. Its state after n steps is a sum (exclusive or) of the first
19,937 states that follow now: those whose power of x is in x^n modulo the characteristic polynomial. Haramoto, Matsumoto,
Nishimura, Panneton and L'Ecuyer, "Efficient jump ahead for F2-linear random number generators" (2008), has the method; Matsumoto
and Nishimura, "Mersenne Twister" (1998), appendix A, has the polynomial.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

N, M, R, A = 624, 397, 31, 0x9908B0DF
"""Words of the state, distance of the recurrence, low bits of a word, and the matrix, as the paper names them."""

DEGREE = N * 32 - R

JUMPED = 1 << 24
"""Numbers from which on a jump takes less time than to draw them: 0.06 s, and 3.6 ns each, as measured."""

CHUNK = 1 << 16

_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * N)
"""Bytes of `torch.get_rng_state()`: numbers left in the block, plus one (int32); place of the next (uint64); the block (uint64)."""


def skip(count: int) -> None:
    """Advance torch's generator of the CPU by so many 32-bit numbers."""
    if count >= JUMPED:
        jump(count)
        return
    chunk = torch.empty(min(count, CHUNK))
    while count > 0:
        chunk[: min(count, CHUNK)].uniform_()
        count -= CHUNK


def jump(count: int) -> None:
    """As `skip`, by the polynomial: for any number of them in the same time."""
    state = torch.get_rng_state().numpy().copy()
    left, place = int(state[_LEFT].view(np.int32)[0]), int(state[_NEXT].view(np.uint64)[0])
    used = N if left == 1 else place  # at 1 the block is used up, and the next number begins another
    blocks, used = divmod(used + count, N)
    if used == 0:  # the block before stays until the next number is asked for
        blocks, used = blocks - 1, N
    words = state[_WORDS].view(np.uint64).astype(np.uint32)
    if blocks:
        words = _ahead(words, N * blocks)
    state[_WORDS] = words.astype(np.uint64).view(np.uint8)
    state[_LEFT] = np.array([N - used + 1], np.int32).view(np.uint8)
    state[_NEXT] = np.array([used], np.uint64).view(np.uint8)
    torch.set_rng_state(torch.from_numpy(state))


def _ahead(words: np.ndarray, count: int) -> np.ndarray:
    """The `N` words that follow `count` > 0 words after those of a state: uint32 [N]."""
    following = _sequence(words, DEGREE + N + 1)
    # The first word's low bits are no part of the state, so the sum begins with the second.
    powers = _bits(_power(count - 1))
    out = np.zeros(N, np.uint32)
    for place in np.flatnonzero(powers):
        out ^= following[place + 1 : place + 1 + N]
    return out


def _sequence(words: np.ndarray, count: int) -> np.ndarray:
    """The first `count` words of the recurrence, and up to a block more, from the first `N` on."""
    out = np.empty(count + N, np.uint32)
    out[:N] = words
    step = N - M  # as many words depend on earlier ones only
    for at in range(N, count, step):
        end = min(at + step, len(out))
        high, low = out[at - N : end - N], out[at - N + 1 : end - N + 1]
        mixed = (high & np.uint32(0x80000000)) | (low & np.uint32(0x7FFFFFFF))
        out[at:end] = out[at - N + M : end - N + M] ^ (mixed >> np.uint32(1)) ^ ((mixed & np.uint32(1)) * np.uint32(A))
    return out


@cache
def _rest() -> tuple[int, ...]:
    """The powers below `DEGREE` of the characteristic polynomial."""
    first, second = (1 << N) ^ (1 << M), (1 << (N - 1)) ^ (1 << (M - 1))
    seconds = [1]
    for _ in range(R):
        seconds.append(_product(seconds[-1], second))
    total = _product(first, seconds[R])
    for i in range(32):
        if A >> i & 1:
            total ^= _product(first, seconds[R - 1 - i]) if i < R else 1
    return tuple(power for power in range(DEGREE) if total >> power & 1)


def _product(long: int, sparse: int) -> int:
    out = 0
    while sparse:
        low = sparse & -sparse
        out ^= long << (low.bit_length() - 1)
        sparse ^= low
    return out


def _power(count: int) -> int:
    """x^count modulo the characteristic polynomial, a bit for each power."""
    out = 1
    for bit in f"{count:b}":
        out = _reduced(_square(out) << int(bit))
    return out


def _square(value: int) -> int:
    spread = np.zeros(2 * DEGREE, np.uint8)
    spread[::2] = _bits(value)
    return int.from_bytes(np.packbits(spread, bitorder="little").tobytes(), "little")


def _bits(value: int) -> np.ndarray:
    """The lowest `DEGREE` bits: uint8 [DEGREE]."""
    raw = np.frombuffer(value.to_bytes(DEGREE // 8 + 1, "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little")[:DEGREE]


def _reduced(value: int) -> int:
    while high := value >> DEGREE:
        value ^= high << DEGREE
        for power in _rest():
            value ^= high << power
    return value
