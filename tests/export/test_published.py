"""Published layouts: read, predicted, bounded, and changed as told (`python -m sweeps.layouts` for all twelve)."""

from __future__ import annotations

import pytest

from gpp.export.imports import layout_of
from sweeps.layouts.__main__ import SAME, judged, main
from sweeps.layouts.published import LAYOUTS


def test_each_layout_has_the_modules_of_its_model() -> None:
    assert len(LAYOUTS) == 12 and len({one.name for one in LAYOUTS}) == 12
    for one in LAYOUTS:
        layout = layout_of(one.text)
        assert layout is not None and one.source and one.minibatch % one.microbatch == 0
        layers = next(int(word.partition("=")[2]) for word in one.model if word.startswith("model.num_layers="))
        named = sum(name.startswith("layers.") for part in layout.parts for name in part.names)
        assert named or sum(part.kinds.count("layer") for part in layout.parts) == layers
        assert not named or named == layers
        assert one.chunks * one.ranks >= len(layout.parts)


@pytest.mark.long
def test_a_change_that_is_applied_takes_what_was_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = judged(LAYOUTS[0])
    assert found.changes and found.off <= SAME and found.full < 1
    assert found.bound_s is not None and found.best_s is not None and found.bound_s <= found.best_s <= found.step_s
    for told, is_s in found.changes:
        assert told.iteration_s is not None and is_s < found.step_s
    assert main("no such layout") == 1
