"""Quantised messages against plain numpy that codes one value at a time, and the codec's work against what its kernels do."""

import numpy as np
import pytest
import torch

from gpp.graph.op_graph import Tensor
from gpp.mechanisms.quantised_edges.sizes import clip_factor, decoding, encoding
from gpp.mechanisms.quantised_edges.worker import Quantiser
from tests.support.moved import Moved


def quantiser(bits: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **more: bool) -> Quantiser:
    return Quantiser(bits=bits, shape=shape, dtype=dtype, clip=more.get("clip", False), gelu=more.get("gelu", False))


def clipped(sample: np.ndarray, bits: int, gelu: bool) -> np.ndarray:
    """A sample without its outliers, as the authors have it: [values] in float64."""
    if gelu:
        middle, scale, bits = 0.0, np.sqrt(0.5 * 2 * np.mean(sample**2)), bits + 1
    else:
        middle, scale = np.mean(sample), np.sqrt(0.5 * np.var(sample))
    reach = clip_factor(bits) * scale
    return np.clip(sample, middle - reach, middle + reach)


@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", ["", "laplace", "gelu"])
def test_values_come_back_within_half_a_level(bits: int, dtype: torch.dtype, clip: str) -> None:
    rng = np.random.default_rng(bits)
    shape = (int(rng.integers(1, 5)), int(rng.integers(1, 40)))
    x = rng.laplace(3.0, 2.0, (6, *shape)) * np.array([1e-3, 1.0, 1e4, 1.0, 0.0, 7.0])[:, None, None]
    x[3] = 5.0  # one value over and over
    given = torch.from_numpy(x).to(dtype)
    own = quantiser(bits, shape, dtype, clip=bool(clip), gelu=clip == "gelu")
    found = own.decode(own.encode(given)).double().numpy()
    exact = given.double().numpy().reshape(6, -1)
    for sample, back in zip(exact, found.reshape(6, -1), strict=True):
        want = clipped(sample, bits, clip == "gelu") if clip else sample
        half = (want.max() - want.min()) / (2 * (2**bits - 1))
        rounding = np.finfo(np.float64 if dtype is torch.float64 else np.float32).eps * 8 * np.abs(sample).max()
        assert np.abs(back - want).max() <= half + rounding
        levels = (back - want.min()) / (2 * half) if half > rounding else np.zeros(1)
        assert np.abs(levels - np.round(levels)).max() < 0.01 and len(np.unique(np.round(levels))) <= 2**bits
    assert found.shape == (6, *shape) and own.decode(own.encode(given)).dtype is dtype


@pytest.mark.parametrize("bits", range(2, 17))
def test_words_hold_levels_one_by_one(bits: int) -> None:
    """A word is read bit by bit: level k of a sample lies in word k mod W, from bit q (k div W) on."""
    rng = np.random.default_rng(bits)
    count = int(rng.integers(1, 70))
    top = 2**bits - 1
    levels = rng.integers(0, top + 1, (3, count))
    levels[:, 0], levels[:, -1] = 0, top if count > 1 else 0
    x = torch.from_numpy(levels.astype(np.float32))
    own = quantiser(bits, (count,))
    coded = own.encode(x)
    per_word = 32 // bits
    width = -(-count // per_word)
    assert coded.shape == (3, 2 + width) and coded.dtype is torch.int32
    step = coded[:, 1].contiguous().view(torch.float32).tolist()
    assert step == [1.0 if count > 1 else 0.0] * 3
    for row, wanted in zip(coded[:, 2:].tolist(), levels.tolist(), strict=True):
        text = [f"{word & 0xFFFFFFFF:032b}"[::-1] for word in row]
        read = [int(text[k % width][bits * (k // width) : bits * (k // width + 1)][::-1], 2) for k in range(count)]
        assert read == wanted
    assert torch.equal(own.decode(coded), x)


def test_samples_are_coded_by_themselves() -> None:
    x, own = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0)), quantiser(5, (5, 3), clip=True)
    assert torch.equal(own.encode(x), torch.cat([own.encode(x[i : i + 1]) for i in range(7)]))
    assert torch.equal(own.encode(x.transpose(1, 2).contiguous().transpose(1, 2)), own.encode(x))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_in_its_sample(wrong: float) -> None:
    x = torch.ones(3, 9).cumsum(1)
    x[1, 4] = wrong
    own = quantiser(4, (9,))
    back = own.decode(own.encode(x))
    assert not back[1].isfinite().any() and torch.equal(back[[0, 2]], own.decode(own.encode(x[[0, 2]])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 3, 6, 8, 13])
@pytest.mark.parametrize("clip", ["", "laplace", "gelu"])
def test_the_bill_is_what_the_kernels_do(dtype: torch.dtype, bits: int, clip: str) -> None:
    own = quantiser(bits, (40, 50), dtype, clip=bool(clip), gelu=clip == "gelu")
    x = torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    values = "gelu" if clip == "gelu" else "real"
    tensor = Tensor(name="x", producer=0, consumers=(1,), bytes_per_sample=2000 * dtype.itemsize, values=values)
    name = str(dtype).removeprefix("torch.")
    with Moved() as there:
        coded = own.encode(x)
    with Moved() as back:
        own.decode(coded)
    made = encoding([tensor], name, 3, bits, clip=bool(clip)), decoding([tensor], name, 3, bits)
    assert [made[0].kernels, made[1].kernels] == [there.launches, back.launches]
    assert [made[0].moved, made[1].moved] == pytest.approx([there.bytes, back.bytes], rel=0.01)
