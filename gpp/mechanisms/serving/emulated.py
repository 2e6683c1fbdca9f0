"""Emulated devices that serve requests: the rules of `gpp.mechanisms.serving.stream` by both clocks.

A reader tells its senders when it has begun a pass, over the channel that a training would use for gradients: so a sender knows
when there is room for the message that needs it. A stream goes through twice: unpaced, for the virtual clock and the time scale;
then paced, with fewer requests. By the virtual clock a device computes while a message waits for room; here its thread waits for
the reader's word, so paced latencies may be shorter where devices run ahead.
"""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, TextIO, final

import torch

from gpp.files import write_text
from gpp.mechanisms.serving.course import requests_of
from gpp.mechanisms.serving.stream import StreamStatus, stream_of
from gpp.program.held import Meter
from gpp.program.kinds import BACKWARD, COMPUTE, TRANSFERS
from gpp.program.program import channel_of
from gpp.runtime.emulator.emulated import CLOCKS, Clock, EmulatedHost, EmulatedMailbox, EmulatedRunner, sleep_until
from gpp.runtime.emulator.pace import Pace
from gpp.runtime.emulator.worker import Agree, run_emulated
from gpp.runtime.hang_detection.status import AbstractStatus, NoStatus
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport, Channel
from gpp.runtime.transport.form import MAIN_MEMORY
from gpp.runtime.transport.shared_memory import RingSize
from gpp.runtime.worker.interpreter import Interpreter
from gpp.runtime.worker.mailbox import Posted
from gpp.runtime.worker.process import KEPT_STEPS, write_line
from gpp.runtime.worker.seat import Seat
from gpp.simulate.messages import message_rates

ROOM = 4096
"""Messages of 16 bytes for which a channel has room here; what bounds them are the clocks."""

PACED = 64
"""Most requests that are paced."""

SETTLE_S = 0.02
"""Seconds from the agreement of all workers to the begin of a stream."""


def _back(channel: Channel) -> Channel:
    """The channel on which a reader tells a sender when it has begun its passes."""
    _, stage, peer_stage, device, peer_device = channel
    return BACKWARD, peer_stage, stage, peer_device, device


class ServingRoute(NamedTuple):
    """A device's knowledge of the others while they serve.

    Args:
        buffers: messages for which an edge has room.
        incoming, outgoing: its channels.
        number: (device, micro-batch of a request) -> which of that device's passes of a request it is.
        passes: device -> its passes of a request.
        microbatches: of a request.
    """

    buffers: int
    incoming: tuple[Channel, ...]
    outgoing: tuple[Channel, ...]
    number: dict[tuple[int, int], int]
    passes: dict[int, int]
    microbatches: int

    @classmethod
    def of(cls, job: Job, device: int) -> ServingRoute:
        """That of a device."""
        channels = {channel_of(action, device) for action in job.program.actions[device] if action.kind in TRANSFERS}
        number, passes = dict[tuple[int, int], int](), dict[int, int]()
        for other, actions in job.program.actions.items():
            own = [action.microbatch for action in actions if action.kind in COMPUTE]
            passes[other] = len(own)
            number |= {(other, microbatch): place for place, microbatch in enumerate(own)}
        return cls(
            buffers=requests_of(job.settings.course).buffers,
            incoming=tuple(sorted(channel for channel in channels if channel[4] == device)),
            outgoing=tuple(sorted(channel for channel in channels if channel[3] == device)),
            number=number,
            passes=passes,
            microbatches=job.plan.minibatch_size // job.plan.stages[0].microbatch_size,
        )


@final
class ServedMailbox(EmulatedMailbox):
    """Messages of a stream; `begins` are when the passes began, by the virtual clock."""

    def start(self, route: ServingRoute, requests: int, arrivals: list[float] | None) -> None:
        """Start a stream, in which nothing is under way.

        Args:
            arrivals: when each request comes, for a stage that no other feeds; None: at once.
        """
        self.channels.begin(anew=True)
        self.route, self.requests, self.arrivals, self.begins = route, requests, arrivals, list[float]()
        self._left = deque([(0.0, 0.0)] * (route.buffers + 1), maxlen=route.buffers + 1)
        self._heard: dict[Channel, list[float]] = {}

    def _accept(self, direction: str, microbatch: int, messages: list[Posted]) -> None:
        """Wait for the messages of a pass, for room for what it makes, and for its request."""
        super()._accept(direction, microbatch, messages)
        virtual_s, real_s = self._left[0]
        if self.arrivals is not None:
            came_s = self.arrivals[microbatch // self.route.microbatches]
            virtual_s, real_s = max(virtual_s, came_s), max(real_s, self.clock.real_s(came_s))
        self.ready_s = max(self.ready_s, virtual_s)
        if self.clock.time_scale:
            sleep_until(real_s)
        self._left.append((0.0, 0.0))
        self.begins.append(self.ready_s)
        for channel in self.route.incoming:
            self.transport.send(_back(channel), torch.tensor([self.ready_s, 0.0], dtype=torch.float64))

    def _taken_s(self, channel: Channel, microbatch: int) -> float:
        route, reader = self.route, channel[4]
        request, within = divmod(microbatch, route.microbatches)
        wanted = request * route.passes[reader] + route.number[reader, within] - route.buffers
        self._hear(channel, wanted + 1)
        return self._heard[channel][wanted] if wanted >= 0 else 0.0

    def _hear(self, channel: Channel, count: int) -> None:
        """Wait until the reader has said of so many passes when they began."""
        heard = self._heard.setdefault(channel, [])
        while len(heard) < count:
            heard.append(float(self.transport.post(_back(channel), CLOCKS)()[0]))

    def _message(self, channel: Channel, microbatch: int, lo: int, hi: int, last: bool) -> tuple[torch.Tensor, int]:
        found = super()._message(channel, microbatch, lo, hi, last)
        gone, before = self.channels.free[channel], self._left[-1]
        self._left[-1] = max(gone[0], before[0]), max(gone[1], before[1])
        return found

    def finish(self) -> None:
        """Take what readers still say, so that none of it is found by the next stream."""
        for channel in self.route.outgoing:
            self._hear(channel, self.requests * self.route.passes[channel[4]])


@final
class EmulatedServer:
    """One emulated device of a job that serves requests."""

    def __init__(
        self, job: Job, *, device_id: int, transport: AbstractTransport, agree: Agree, status: AbstractStatus | None = None
    ) -> None:
        plan, graph, cluster = job.plan, job.graph, job.cluster
        self.job, self.serving, self.device_id, self.transport = job, requests_of(job.settings.course), device_id, transport
        self.agree = agree
        self.clock, self.route = Clock(), ServingRoute.of(job, device_id)
        (self.stage,) = plan.stages_of_device[device_id]
        self.cost = job.costs[self.stage]
        rates = message_rates(plan, graph)
        self.mailbox = ServedMailbox(
            stage=self.stage, device_id=device_id, transport=transport, rates=rates, cluster=cluster, clock=self.clock
        )
        self.held = Meter((self.stage,), ())
        runner = EmulatedRunner(
            stage=self.stage,
            cost=self.cost,
            last=-1,  # all micro-batches are equally large
            mailbox=self.mailbox,
            host=EmulatedHost({}, self.clock),
            clock=self.clock,
            held=self.held,
        )
        self.actions = job.program.actions[device_id]
        self.counts = dict.fromkeys(range(len(plan.stages)), self.route.microbatches)
        self.status = StreamStatus(status or NoStatus(), self.actions, self.counts)
        mailboxes = {self.stage: self.mailbox}
        seat = Seat(device_id=device_id, device=MAIN_MEMORY, transport=transport, status=self.status)
        self.interpreter = Interpreter(self.actions, {self.stage: runner}, mailboxes, seat)
        both = (*self.route.incoming, *self.route.outgoing)
        transport.prepare({way: RingSize(CLOCKS.num_bytes, ROOM) for channel in both for way in (channel, _back(channel))})

    def stream(self, requests: int, time_scale: float) -> list[dict[str, Any]]:
        """One stream from an empty pipeline; a record of each request by both clocks."""
        start = self.agree([time.perf_counter() + SETTLE_S])[0]
        self.clock.virtual_s, self.clock.time_scale, self.clock.zero_s = 0.0, time_scale, start
        rate, plan = self.serving.arrivals.rate, self.job.plan
        came = self.serving.arrivals.times_s() if rate and not plan.predecessors[self.stage] else None
        self.mailbox.start(self.route, requests, came)
        stream = stream_of(self.actions, self.serving.buffers, self.counts, plan.minibatch_size, requests)
        records: list[dict[str, Any]] = []
        sleep_until(start)
        for number, actions in self.status.told(stream, 0):
            first = len(self.mailbox.begins)
            self.interpreter.run(actions, ends=False)
            virtual_s, end = self.clock.virtual_s, time.perf_counter()
            self.clock.occupy(virtual_s, self.cost.update_s)
            events, _ = self.interpreter.take()
            begun_s = self.mailbox.begins[first] if came is None else came[number]
            begun = min((event.start_s for event in events if event.kind in COMPUTE), default=end)
            records.append(
                {
                    "step": number,
                    "start": begun if came is None else self.clock.real_s(came[number]),
                    "end": end,
                    "virtual": [begun_s, virtual_s],
                    "events": events,
                }
            )
        self.transport.flush()
        self.mailbox.finish()
        return records

    def run(self, out: TextIO, ranks: Path) -> None:
        """Both streams: the unpaced one, which sets the time scale, and the paced one."""
        settings = self.job.settings
        free = self.stream(settings.steps, 0.0)
        # By the slowest device; what the clock says is the same for all in the steady state.
        took_s, virtual_s = self.agree([free[-1]["end"] - free[0]["start"], free[-1]["virtual"][1] - free[0]["virtual"][0]])
        paced = min(settings.steps, PACED)
        time_scale = Pace(**settings.engine).choose(virtual_s / len(free), took_s / len(free), paced)
        records = self.stream(paced, time_scale)
        for record in records:
            write_line(out, {name: record[name] for name in ("step", "start", "end")})
        result = {
            "device": self.device_id,
            "peak_memory_bytes": round(self.held.peak_bytes({self.stage: self.cost.memory})),
            "steps": records[-KEPT_STEPS:],
            "time_scale": time_scale,
            "unpaced_s": took_s / len(free),
            "virtual": [record["virtual"] for record in free],
        }
        write_text(ranks / f"device_{self.device_id}.json", json.dumps(result), exact=True)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    run_emulated(run_dir, EmulatedServer)
