"""Walks one device's list of actions: one handler for each kind, and a clock around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from gpp.program import COMPUTE, RECEIVES, Action
from gpp.runtime.channels import AbstractTransport
from gpp.runtime.stage import StageRunner
from gpp.timeline import Event


class Interpreter:
    """Runs a device's actions of one program.

    Args:
        reduce_params: gradient group -> the device's own parameters in the group's order, and the group's size.
        update: the optimizer step.
        synchronize: waits for the accelerator, so that an event's end is the end of its kernels.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        runner: StageRunner,
        transport: AbstractTransport,
        *,
        reduce_params: Mapping[int, tuple[list[torch.nn.Parameter], int]],
        update: Callable[[], None],
        synchronize: Callable[[], None] | None = None,
        pending_limit: int | None = None,
    ) -> None:
        self.runner, self.transport, self.update, self.synchronize = runner, transport, update, synchronize
        self.reduce_params, self.pending_limit = reduce_params, pending_limit
        self.events: list[Event] = []
        # The last send of what a compute action made frees it.
        last = {(a.kind, a.microbatch): i for i, a in enumerate(actions) if a.kind[0] == "S"}
        self.actions = [(a, last.get((a.kind, a.microbatch)) == i) for i, a in enumerate(actions)]
        self.handlers: dict[str, Callable[[Action, bool], int]] = {
            "F": self._forward,
            "B": self._backward,
            "RF": self._receive,
            "RB": self._receive,
            "SF": self._send,
            "SB": self._send,
            "R": self._reduce,
            "U": self._update,
        }

    def run(self) -> None:
        """Run the list once; `events` then holds what the device did, waiting excluded."""
        self.events = []
        clock, device = time.perf_counter, self.runner.device_id
        for action, last in self.actions:
            kind = action.kind
            if kind in COMPUTE:
                self.runner.arrive(kind, action.microbatch)
            start = clock()
            num_bytes = self.handlers[kind](action, last)
            if kind not in RECEIVES:
                self.events.append(Event(device, kind, action.stage, action.microbatch, start, clock(), num_bytes))
        self.transport.flush()

    def _forward(self, action: Action, last: bool) -> int:
        self.runner.forward(action.microbatch)
        self._sync()
        return 0

    def _backward(self, action: Action, last: bool) -> int:
        self.runner.backward(action.microbatch)
        self._sync()
        return 0

    def _sync(self) -> None:
        if self.synchronize:
            self.synchronize()

    def _receive(self, action: Action, last: bool) -> int:
        self.runner.post(action.kind[1], action.microbatch, action.peer_stage, action.peer_device, action.lo, action.hi)
        return 0

    def _send(self, action: Action, last: bool) -> int:
        if self.pending_limit is not None:
            self.transport.flush(self.pending_limit)
        return self.runner.send(
            action.kind[1], action.microbatch, action.peer_stage, action.peer_device, action.lo, action.hi, last
        )

    def _reduce(self, action: Action, last: bool) -> int:
        params, n = self.reduce_params[action.microbatch]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        self.transport.reduce(action.microbatch, flat)
        at = 0
        for param in params:
            param.grad = flat[at : at + param.numel()].view_as(param)
            at += param.numel()
        self._sync()
        # What a ring moves over each member's link: the same measure as the simulator's.
        return round(flat.numel() * flat.element_size() * 2 * (n - 1) / n)

    def _update(self, action: Action, last: bool) -> int:
        self.update()
        self._sync()
        return 0
