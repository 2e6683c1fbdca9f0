"""The emulating engine: the real runtime, one process a device, on devices that only take time.

Workers, interpreter, channels and messages are those of `distributed`; an operator occupies its device for as long as
the cost model says on the cluster described, and a transfer its link. So plans of 32 unequal devices run on a laptop.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, final

from pydantic import Field

from gpp.runtime.emulator.pace import Overhead, Pace
from gpp.runtime.engine import AbstractServer, Progress
from gpp.runtime.job import Job
from gpp.runtime.mode import course_run
from gpp.settings import Positive, Seconds, settings
from gpp.simulate.simulator import steady_period, update_ends
from gpp.timeline import Emulation, Event, Outcome


@final
@settings("engine")
class Emulate(AbstractServer):
    """Runs a plan on emulated devices.

    Nothing is computed, so there is no loss; recomputed and split operators are only times and run too.

    Args:
        max_steps: at most so many steps; all are alike, and the first one, unpaced, sets the time scale.
        budget_s: seconds that the other steps may take together.
        overhead: the share of a step that the runtime itself may take; the time scale is made large enough for it.
        time_scale: seconds of this machine for one of the cluster; None lets the first step decide.
    """

    own_runtime: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False
    name: str = "emulate"
    max_steps: Annotated[int, Field(ge=2)] | None = 4
    budget_s: Seconds = 60.0
    overhead: Overhead = 0.005
    time_scale: Positive | None = None

    @property
    def worker_settings(self) -> dict[str, Any]:
        pace = Pace(budget_s=self.budget_s, overhead=self.overhead, time_scale=self.time_scale)
        # The devices described may be GPUs; the workers are processes of this machine in any case.
        # A time scale of the user has no budget: nobody gives up before a day.
        timeout_s = 300.0 + self.budget_s if self.time_scale is None else 86400.0
        return {"device_kind": "cpu", "timeout_s": timeout_s, "engine": asdict(pace)}

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.controller.collected import devices_of, timeline
        from gpp.runtime.controller.controller import run_workers

        if (course := course_run(job)) is not None:
            return course.execute(job, run_dir, progress, emulated=True)
        quiet = Progress(on_step=lambda step, loss, rate: progress.on_step(step, None, None))
        logs = run_workers("gpp.runtime.emulator.worker", job, run_dir, job.plan.num_devices, quiet, processes=1)
        steps = [record["steps"] for record in devices_of(run_dir / "ranks")]
        scale = steps[0][-1]["time_scale"]
        # From one step's end to the next one's; the first two begin at a moment of their own.
        took = {step: logs.ends[step] - (logs.starts[step] if step < 2 else logs.ends[step - 1]) for step in sorted(logs.ends)}
        virtual_s = max(record["virtual_s"] for device in steps for record in device)
        if job.streams:
            # A record is of several mini-batches, and filling and draining are none of a step's.
            took = {step: _pace(job, [device[step] for device in steps]) for step in took}
            updates = {int(s): ends for device in steps for s, ends in device[-1]["virtual_updates"].items()}
            virtual_s = steady_period(updates, job.plan)[1]
        unpaced_s = took.pop(0)
        measured = timeline(job, run_dir, took, seconds=1.0 / scale)
        emulation = Emulation(
            time_scale=scale,
            virtual_iteration_s=virtual_s,
            unpaced_s=unpaced_s,
            step_s=tuple(seconds / scale for seconds in took.values()),
        )
        return Outcome(measured=measured, emulation=emulation)


def _pace(job: Job, records: list[dict[str, Any]]) -> float:
    """Seconds of a mini-batch in the steady state of one run of the program, by what the devices recorded of it."""
    return steady_period(update_ends([Event(*event) for record in records for event in record["events"]], job.plan), job.plan)[1]
