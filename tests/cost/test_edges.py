"""What a quantised message takes: bytes by hand, clipping by the numbers of its authors and by minimising the error itself."""

import math
from dataclasses import replace

import pytest

from gpp.cost.edges import LEAST_BITS, clip_factor, most_bits, sent_bytes, useful_bits
from gpp.graph.op_graph import Tensor


@pytest.mark.parametrize(
    ("values", "bits", "dtype", "num_bytes"),
    [
        (10, 8, "float32", 8 + 3 * 4),  # four values a word
        (10, 6, "float32", 8 + 2 * 4),  # five a word, two bits of which say nothing
        (10, 3, "float32", 8 + 4),
        (33, 2, "float32", 8 + 3 * 4),
        (7, 16, "float32", 8 + 4 * 4),
        (7, 9, "float32", 8 + 3 * 4),
        (7, 16, "float64", 16 + 4 * 4),  # the least value and the step are as exact as the values
        (7, 16, "bfloat16", 8 + 4 * 4),
    ],
)
def test_bytes_of_a_message(values: int, bits: int, dtype: str, num_bytes: int) -> None:
    size = {"float32": 4, "float64": 8, "bfloat16": 2}[dtype]
    tensor = Tensor(name="x", producer=0, consumers=(1,), bytes_per_sample=values * size)
    assert sent_bytes(tensor, bits, dtype) == num_bytes
    assert sent_bytes(tensor, 0, dtype) == values * size
    assert sent_bytes(replace(tensor, values="other"), bits, dtype) == values * size


def test_clipping_is_that_of_its_authors() -> None:
    # Banner et al. 2019, section 2: 2.83, 3.89 and 5.03 scales of a Laplace distribution at 2, 3 and 4 bits.
    assert [clip_factor(bits) for bits in (2, 3, 4)] == pytest.approx([2.83, 3.89, 5.03], abs=0.01)


@pytest.mark.parametrize("bits", range(2, 18))
def test_clipping_loses_least(bits: int) -> None:
    def lost(alpha: float) -> float:
        """Mean squared error of Laplace values of scale 1: tails beyond alpha, and 2^bits even steps within."""
        return 2 * math.exp(-alpha) + alpha**2 / (3 * 4**bits)

    low, high = 0.0, 60.0
    for _ in range(200):  # the error falls to its one minimum, and rises behind it
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if lost(a) < lost(b) else (a, high)
    assert clip_factor(bits) == pytest.approx(low, rel=1e-4)


def test_auto_takes_the_most_bits_that_have_room() -> None:
    tensor = Tensor(name="x", producer=0, consumers=(1,), bytes_per_sample=4000)

    def num_bytes(bits: int) -> float:
        return sent_bytes(tensor, bits, "float32")

    fewer = [bits for bits in range(2, 17) if not any(num_bytes(more) <= num_bytes(bits) for more in range(bits + 1, 17))]
    assert sorted(useful_bits()) == fewer
    for room in (*range(0, 4200, 7), *(num_bytes(bits) for bits in range(2, 17))):
        every = [bits for bits in range(2, 17) if num_bytes(bits) <= room]
        expected = 0 if room >= 4000 else max(every, default=LEAST_BITS)
        assert num_bytes(most_bits(num_bytes, room)) == num_bytes(expected)
