import math

import pytest

from gpp.report.draw import text


def test_layers_become_a_range() -> None:
    assert text.compress_names([f"branches.0.layers.{i}" for i in range(4)]) == ("branches.0.layers.0-3",)


def test_gaps_stay_apart() -> None:
    assert text.compress_names(["a.0", "a.1", "a.3", "b"]) == ("a.0-1", "a.3", "b")


def test_two_numbers_join_one_after_the_other() -> None:
    names = [f"branches.{b}.layers.{i}" for b in (0, 1) for i in range(3)]
    assert text.compress_names(names) == ("branches.0-1.layers.0-2",)
    assert text.compress_names(names[:-1]) == ("branches.0.layers.0-2", "branches.1.layers.0-1")


def test_a_module_held_whole_stands_for_its_operators() -> None:
    universe = [f"tower.layers.{i}.{part}" for i in range(4) for part in ("attention", "mlp")] + ["head.linear"]
    assert text.compress_names(universe[:4], universe) == ("tower.layers.0-1",)
    assert text.compress_names(universe[:3], universe) == ("tower.layers.0", "tower.layers.1.attention")
    assert text.compress_names(universe[:8], universe) == ("tower",)
    assert text.compress_names(universe, universe) == ("tower", "head")


def test_numbered_words_and_nothing() -> None:
    assert text.compress_names(["linear_1", "linear_2", "relu"]) == ("linear_1-2", "relu")
    assert text.compress_names([]) == ()


def test_compression_loses_nothing() -> None:
    names = ["x.0.a", "x.1.a", "x.0.b", "y1.z2", "y1.z3", "y2.z2", "y2.z3", "y2.z4"]
    out = text.compress_names(names)
    assert "x.0-1.a" in out and "x.0.b" in out and len(out) < len(names)


@pytest.mark.parametrize("length", [4, 8, 12, 16, 30])
def test_shortened_paths_fit(length: int) -> None:
    assert len(text.shorten_path("encoder.blocks.17.attention.projection", length)) <= length
    assert len(text.shorten("x" * 99, length)) <= length


def test_paths_keep_their_numbers() -> None:
    assert text.shorten_path("branches.0.layers.0-3", 14) == "br.0.laye.0-3" or "0" in text.shorten_path(
        "branches.0.layers.0-3", 14
    )
    assert text.shorten_path("short", 9) == "short"


def test_drawings_have_the_end_of_a_path() -> None:
    assert text.path_end("branches.0.layers.0-3", 14) == "…0.layers.0-3"
    assert text.path_end("branches.0.layers.0-3", 11) == "…layers.0-3"
    assert text.path_end("encoder.multihead_attention", 10) == "…attention"
    assert text.path_end("short", 9) == "short"


def test_amounts() -> None:
    assert text.seconds(0.0123) == "12.3 ms" and text.seconds(2.5e-5) == "25.0 µs" and text.seconds(None) == "–"
    assert text.num_bytes(1.5e9) == "1.50 GB" and text.num_bytes(12) == "12 B" and text.num_bytes(math.nan) == "–"
    assert text.significant(1234) == "1,234" and text.significant(0.0001234) == "0.000123" and text.significant(0) == "0"
    assert text.significant(0.9999) == "1.00" and text.significant(9.999) == "10.0"
    assert text.percent(0.123) == "12.3 %" and text.ratio(1.066) == "1.07×" and text.quotient(1, 0) is None
    assert text.ranges([3, 0, 1, 2, 6], "d") == "d0-3, d6" and text.ranges([]) == ""
