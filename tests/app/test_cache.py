"""A cache that cannot be written to is refused before the work whose result it is to keep."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from gpp import Distributed, Profiled, local
from gpp.app.capturing import captured_model
from gpp.app.in_place import early
from gpp.capture.kept_profile import measured
from gpp.errors import InvalidConfig
from gpp.runtime.cards.local import Identity, speeds
from tests.support.conf import option
from tests.support.graphs import chain


def test_it_is_refused_before_anything_is_captured_or_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "file").touch()
    monkeypatch.setattr("gpp.capture.examples.capture_model", None)
    with pytest.raises(InvalidConfig, match=r"cache_dir=.*file/graphs: cannot be written to"):
        captured_model(option("model", "digits"), "float32", str(folder), None, 64)
    monkeypatch.setattr("gpp.app.in_place.Rehearsals", None)
    with pytest.raises(InvalidConfig, match=r"cost.cache_dir=.*file/machines: cannot be written to"):
        early(cost := Profiled(cache_dir=str(folder)), local(num_devices=2), Distributed())
    monkeypatch.setattr("gpp.capture.kept_profile.profile", None)
    with pytest.raises(InvalidConfig, match=r"cost.cache_dir=.*file: cannot be written to"):
        measured(cost, SimpleNamespace(batch=None), chain(2), largest=4)  # type: ignore[arg-type]
    monkeypatch.setattr("gpp.runtime.cards.local.measure", None)
    cards = Identity(kind="cpu", cards=(), workers=(0, 1), backend="gloo", torch_version="", runtime_version="")
    with pytest.raises(InvalidConfig, match=r"cache_dir=.*file: cannot be written to"):
        speeds(cards, folder)
