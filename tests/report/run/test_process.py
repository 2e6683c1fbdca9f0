from __future__ import annotations

from gpp.report.run.result import peak_memory_bytes, reset_peak_memory


def test_the_peak_is_seen_and_forgotten() -> None:
    reset_peak_memory()
    before = peak_memory_bytes()
    block = bytearray(200_000_000)
    block[::4096] = b"x" * len(block[::4096])
    peak = peak_memory_bytes()
    assert peak > before + 150_000_000
    del block
    reset_peak_memory()
    assert peak_memory_bytes() <= peak
