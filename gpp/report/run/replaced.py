"""The plans that were replaced while a run went on, as a table."""

from __future__ import annotations

from gpp.replan import Moved
from gpp.report.draw import text
from gpp.report.draw.page import Column, PageTable
from gpp.report.run.record import RunRecord


def replaced_table(run: RunRecord) -> PageTable | None:
    """A row for each switch to another plan; None for a run under one plan."""
    rows = list[list[str]]()
    for one in run.result.get("replaced", ()):
        why = [f"device {device} lost" for device in one["lost"]]
        why += [f"device {device} {factor:.2f} times as long as planned" for device, factor in sorted(one["slow"].items())]
        row, switch = [str(one["first"]), "; ".join(why)], one["switch"]
        if switch is None:
            row += ["new workers", *["–"] * 6]
        else:
            row += ["; ".join(str(Moved(**moved)) for moved in switch["moved"]), text.num_bytes(switch["bytes"])]
            row += [text.seconds(switch[name]) for name in ("predicted_pause_s", "pause_s")]
            before_s, after_s = switch["predicted_step_s"]
            row += [*(text.significant(rate) for rate in switch["samples_per_s"]), f"{before_s / after_s:.2f}×"]
        rows.append(row)
    if not rows:
        return None
    words, numbers = (
        ("why", "moved"),
        ("sent", "pause, predicted", "pause, measured", "samples/s before", "samples/s after", "faster, predicted"),
    )
    columns = [Column(name="from step", kind="n"), *(Column(name=name) for name in words)]
    return PageTable(columns=[*columns, *(Column(name=name, kind="n") for name in numbers)], rows=rows)
