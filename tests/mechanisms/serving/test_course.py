"""The settings of workers that answer requests, in settings.json."""

import json
from typing import Any

import pytest

from gpp.errors import InvalidFile
from gpp.mechanisms.serving.course import Arrivals, Requests
from gpp.runtime.job import Settings
from gpp.serialization import from_json, to_json

PLAIN: dict[str, Any] = {
    "steps": 1, "minibatch_size": 8, "dtype": "float32", "seed": 0, "optimizer": {}, "data": {}, "model": {}
}  # fmt: skip
COURSE = Requests(buffers=2, arrivals=Arrivals(requests=3, rate=5.0), answers=True, samples=4)


def test_a_course_stands_under_its_mechanism() -> None:
    settings = Settings(**PLAIN, course=COURSE)
    text = to_json(settings, Settings)
    assert json.loads(text)["course"] == {"serving": json.loads(to_json(COURSE))}
    assert from_json(Settings, text) == settings
    assert "course" not in json.loads(to_json(Settings(**PLAIN), Settings))


def test_files_of_earlier_versions_have_it_under_its_own_name() -> None:
    course = json.loads(to_json(COURSE)) | {"kept": {"window": 8}}
    for earlier in ({"serving": course}, {"course": {"serving": course}}):
        found = from_json(Settings, json.dumps(PLAIN | earlier))
        assert (found.course, found.kept) == (COURSE, {"window": 8})


@pytest.mark.parametrize("course", [3, {}, {"unknown": {}}, {"serving": {"buffers": 0}}])
def test_what_is_no_course_is_refused(course: object) -> None:
    with pytest.raises(InvalidFile, match="course"):
        from_json(Settings, json.dumps(PLAIN | {"course": course}))


@pytest.mark.parametrize(
    "both",
    [
        {"serving": json.loads(to_json(COURSE)), "course": {"serving": json.loads(to_json(COURSE))}},
        {"course": {"serving": json.loads(to_json(COURSE)) | {"kept": {}}}, "kept": {}},
        {"course": {"serving": json.loads(to_json(COURSE)) | {"kept": {}}, "other": {}}},
    ],
    ids=["two courses", "kept twice", "another beside it"],
)
def test_a_course_that_stands_in_two_places_is_refused(both: dict[str, Any]) -> None:
    with pytest.raises(InvalidFile):
        from_json(Settings, json.dumps(PLAIN | both))
