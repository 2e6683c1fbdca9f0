"""When a worker's lines are written."""

import io
import json

from gpp.runtime.worker.process import Lines


def steps_in(out: io.StringIO) -> list[int]:
    return [json.loads(line)["step"] for line in out.getvalue().splitlines()]


def test_the_line_of_a_step_is_held_until_there_is_time() -> None:
    out = io.StringIO()
    lines = Lines(out, holds=True)
    lines.step({"step": 0})
    assert steps_in(out) == []
    lines.step({"step": 1})
    assert steps_in(out) == [0]
    lines.write({"step": 2})
    assert steps_in(out) == [0, 1, 2]
    lines.step({"step": 3})
    lines.flush()
    lines.flush()
    assert steps_in(out) == [0, 1, 2, 3]


def test_a_worker_that_never_waits_writes_at_once() -> None:
    out = io.StringIO()
    Lines(out, holds=False).step({"step": 0})
    assert steps_in(out) == [0]
