"""The bill of a stage: what it costs in seconds and in bytes. Whoever predicts, validates, emulates or reports reads it here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, final

import numpy as np
from pydantic import Field

from gpp.cost.amounts import Amounts, StageBytes
from gpp.cost.known import known
from gpp.cost.problem import Problem, Remembered
from gpp.cost.variants import NOTHING_AGAIN, Repeats, held
from gpp.graph.op_graph import OpGraph, Tensor, mask_of
from gpp.mechanism import parts
from gpp.stage import AbstractStageValue, Stage
from gpp.weights.base import PipelinePosition


class AbstractBill:
    """The terms that a mechanism adds to the bill of a stage: none, unless its own class says otherwise."""

    def of(self, problem: Problem, stage: Stage, value: Any, bill: StageCost) -> StageCost:
        """The bill with the mechanism's terms of seconds and bytes.

        Args:
            value: what the mechanism says of the stage, of its own class; here and below.
        """
        return bill

    def check(self, problem: Problem, s: int, stage: Stage, value: Any, position: PipelinePosition) -> None:
        """Prove that the value of stage number s goes with the weight policy.

        Raises:
            InvalidPlan: names stage, field, value, rule and fix.
        """
        return None

    def repeats(self, problem: Problem, stage: Stage, value: Any) -> Repeats | None:
        """What the stage's backwards do again; None: nothing."""
        return None

    def exchange_s(self, problem: Problem, stage: Stage, value: Any, samples: int, repeats: Repeats) -> tuple[float, float]:
        """Seconds that devices exchange tensors in a forward and in a backward, of a mechanism that lets several share a replica.

        Args:
            samples: of a micro-batch, over all replicas.
        """
        return 0.0, 0.0

    def amounts(self, problem: Problem, stage: Stage, value: Any) -> Amounts | None:
        """What the bytes of the stage are made of, of a mechanism that makes it hold less (`spares`); None: as of any stage."""
        return None

    def first_backward(self, problem: Problem, stage: Stage, value: Any, gradients: np.ndarray) -> float | None:
        """The most bytes beyond all that is held, in the first backward of a mini-batch, of a stage that holds less.

        Args:
            gradients: [operators] bytes of the sums that each one's backward makes, which are not there before.

        Returns:
            None where that is not known.
        """
        return None

    def beside(self, problem: Problem, stage: Stage, value: Any) -> Iterable[tuple[int, float]]:
        """Bytes that devices beside the stage's own hold for it: (device, bytes)."""
        return ()

    def message_bytes(self, graph: OpGraph, value: Any, reader: int, tensors: Sequence[Tensor]) -> tuple[float, float]:
        """Bytes of the messages with these tensors to stage number `reader`, of a mechanism that codes them (`codes`): for each
        sample, and in each message beside them."""
        return sum(tensor.bytes_per_sample for tensor in tensors), 0.0

    def coding_s(
        self, problem: Problem, value: Any, reader: int, tensors: Sequence[Tensor], samples: int, ends: tuple[int, int]
    ) -> tuple[float, float]:
        """Seconds that the devices at both ends of such a message, of so many samples, take to code it and to read it."""
        return 0.0, 0.0


def bills_of(stage: Stage) -> Iterator[tuple[AbstractBill, AbstractStageValue]]:
    """What the mechanisms of a stage add to its bill, each with what it says of the stage."""
    for value in stage.mechanisms:
        for part in parts((value.name,), "bill", "BILL", AbstractBill):
            yield part, value


PLAIN = AbstractBill()


def messages_of(stage: Stage) -> tuple[AbstractBill, Any]:
    """What codes the messages of a stage, and what it says of the stage; where nothing does, tensors travel as they are."""
    return next((pair for pair in bills_of(stage) if pair[1].codes), (PLAIN, None))


def beside_bytes(problem: Problem, stage: Stage) -> Iterator[tuple[int, float]]:
    """Bytes that devices beside a stage's own hold for it: (device, bytes)."""
    for added, value in bills_of(stage):
        yield from added.beside(problem, stage, value)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage's times, and its bytes on each of its devices, as plain numbers.

    Args:
        forward_s, backward_s: seconds of one micro-batch, its weights made ready included; the slowest device decides.
        last_forward_s, last_backward_s: the same of the last one, which is smaller where its size does not divide the mini-batch.
        update_s: seconds of the optimizer's step and of what the weight policy adds to it.
        static_bytes: weights, gradients, optimizer's state, and rows of the user's inputs.
        version_bytes: copies of the weights beyond one.
        microbatch_bytes: memory of each micro-batch between its forward and its backward.
        transient_bytes: memory while one micro-batch is computed; or while an update is made, as far as that is more.
        weight_s, last_weight_s: of a backward's seconds, those of the weights' gradients: of a micro-batch, and of the last one.
        late_bytes: memory of each micro-batch until these are made, where the backward leaves them for later.
        waiting_bytes: of `transient_bytes`, messages that may wait for their pass while another stage of the device computes.
        moved_bytes, last_moved_bytes: what goes to the host after a forward, and comes back before the backward: of a micro-batch,
            and of the last one.
        own_s: seconds of an action of each kind that a mechanism has added to the stage: (kind, seconds).
    """

    forward_s: float
    backward_s: float
    last_forward_s: float
    last_backward_s: float
    update_s: float
    static_bytes: float
    version_bytes: float
    microbatch_bytes: float
    transient_bytes: float
    moved_bytes: float = 0.0
    last_moved_bytes: float = 0.0
    weight_s: float = 0.0
    last_weight_s: float = 0.0
    late_bytes: float = 0.0
    waiting_bytes: float = 0.0
    own_s: Annotated[tuple[tuple[str, float], ...], Field(exclude_if=lambda seconds: not seconds)] = ()

    @classmethod
    def of(cls, problem: Problem, stage: Stage, depth: int | None = None) -> StageCost:
        """The bill of a stage.

        Args:
            depth: of the pipeline, for policies whose versions depend on it; None: the stage is the first of its pipeline.
        """
        made = _BILLS.of(problem)
        if (known_bill := made.get((stage, depth))) is not None:
            return known_bill
        position = _position(problem, stage, depth)
        rest = problem.minibatch_size % stage.microbatch_size
        forward, backward, weight = _pass_s(problem, stage, stage.microbatch_size, position)
        last = _pass_s(problem, stage, rest, position) if rest else (forward, backward, weight)
        firsts = (partial(added.first_backward, problem, stage, value) for added, value in bills_of(stage) if value.spares)
        memory = known(problem, stage, stage_bytes(problem, stage, depth), next(firsts, None))
        memory = memory.settled(-(-stage.in_flight // stage.unit))
        bill = cls(
            forward_s=forward,
            backward_s=backward,
            last_forward_s=last[0],
            last_backward_s=last[1],
            update_s=_update_s(problem, stage, position),
            static_bytes=memory.static,
            version_bytes=memory.versions,
            microbatch_bytes=memory.microbatch,
            transient_bytes=float(memory.transient),
            weight_s=weight,
            last_weight_s=last[2],
            late_bytes=memory.late,
            waiting_bytes=memory.waiting,
            moved_bytes=memory.moved,
            last_moved_bytes=stage_amounts(problem, stage).moved * stage.share(rest) if rest else memory.moved,
        )
        for added, value in bills_of(stage):
            bill = added.of(problem, stage, value, bill)
        made[stage, depth] = bill
        return bill

    def pass_s(self, *, last: bool) -> tuple[float, float]:
        """Seconds of a forward and of a backward of a micro-batch, or of the last one where it is smaller."""
        return (self.last_forward_s, self.last_backward_s) if last else (self.forward_s, self.backward_s)

    def plus(self, forward_s: float, backward_s: float, update_s: float) -> StageCost:
        """The bill with so many seconds more for each pass and each update."""
        return replace(
            self,
            forward_s=self.forward_s + forward_s,
            backward_s=self.backward_s + backward_s,
            last_forward_s=self.last_forward_s + forward_s,
            last_backward_s=self.last_backward_s + backward_s,
            update_s=self.update_s + update_s,
        )

    @property
    def memory(self) -> StageBytes:
        return StageBytes(
            self.static_bytes,
            self.version_bytes,
            self.microbatch_bytes,
            self.transient_bytes,
            self.moved_bytes,
            self.late_bytes,
            self.waiting_bytes,
        )


_BILLS = Remembered[tuple[Stage, int | None], StageCost]()


def stage_bytes(problem: Problem, stage: Stage, depth: int | None = None) -> StageBytes:
    """Bytes on one device of a stage; `depth` as in `StageCost.of`."""
    weights = problem.regime.weights
    copies = 1 if weights.flushes else weights.copies(_position(problem, stage, depth))
    amounts = stage_amounts(problem, stage)
    held, share = amounts.held(stage.samples, copies), problem.updated_share(stage.ops, len(stage.replicas))
    less = amounts.trainable * (1.0 - share)
    state, (update, _) = problem.optimizer_state_factor, problem.update_factors
    return held._replace(static=held.static - less * state, update=held.update - less * update)


def stage_amounts(problem: Problem, stage: Stage) -> Amounts:
    """`Problem.amounts` of a stage whose operators may be split over several devices, or of which mechanisms hold less."""
    changed = (added.amounts(problem, stage, value) for added, value in bills_of(stage) if value.spares)
    if (amounts := next(changed, None)) is not None:
        return amounts
    return problem.amounts(mask_of(stage.ops)) if stage.devices_per_replica == 1 else split_amounts(problem, stage)[0]


def split_amounts(problem: Problem, stage: Stage, declared: tuple[int, ...] = ()) -> tuple[Amounts, float]:
    """The amounts of a stage whose operators run as they declare for the devices of its replicas.

    Args:
        declared: operators that run as they declare for being computed again.

    Returns:
        The amounts; of them the bytes per sample that operators hold for one micro-batch alone.
    """
    whole, sums = problem.amounts(mask_of(stage.ops)), problem.sums(mask_of(stage.ops))
    own = held(problem.graph, stage.ops, declared, stage.devices_per_replica)
    split = problem.amounts_of(
        own.params,
        kept=whole.kept + own.kept - sum(problem.graph.ops[op].saved_bytes for op in stage.ops),
        once=whole.once + own.extra,
        fixed=whole.fixed,
        rows=sums.rows,
        late=whole.late,
        waiting=whole.waiting,
    )
    return split, own.extra


def pass_times(problem: Problem, stage: Stage, samples: int) -> tuple[float, float, float]:
    """Seconds of a forward and of a backward on a micro-batch of so many samples, and of the latter those of the weights'
    gradients; without what the weight policy adds."""
    found = (again for added, value in bills_of(stage) if (again := added.repeats(problem, stage, value)) is not None)
    repeats, degree = next(found, None), stage.devices_per_replica
    sharing = ((added, value) for added, value in bills_of(stage) if value.devices_per_replica > 1)
    each = (added.exchange_s(problem, stage, value, samples, repeats or NOTHING_AGAIN) for added, value in sharing)
    exchange = next(each, (0.0, 0.0))
    return problem.split_times(stage.ops, samples, stage.devices, stage.stride, repeats, degree, exchange)


def _pass_s(problem: Problem, stage: Stage, samples: int, position: PipelinePosition) -> tuple[float, float, float]:
    """`pass_times`, the weights made ready included."""
    forward, backward, weight = pass_times(problem, stage, samples)
    more = _weights_s(problem, stage, position)
    return forward + more[0], backward + more[1], weight


def finish_s(problem: Problem, trainable_bytes: float, devices: tuple[int, ...]) -> float:
    """Seconds after the last backward of a mini-batch: the gradients' all-reduce over a stage's devices, and the update."""
    updated = trainable_bytes if problem.updates is None else trainable_bytes / len(devices)
    update_s = problem.cost.update_s(updated, problem.cluster.devices[devices[0]])
    return update_s + problem.cluster.allreduce_s(trainable_bytes, devices)


class FinishLines(NamedTuple):
    """What `finish_s` is for any bytes: the update's fixed seconds and those for each byte, and `Cluster.allreduce_lines`."""

    update: tuple[float, float]
    sums: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, problem: Problem, devices: tuple[int, ...]) -> FinishLines:
        """Those of a stage on these devices, whose update grows in proportion to its bytes beside what it takes at all."""
        share = 1 if problem.updates is None else len(devices)
        low, high = (problem.cost.update_s(size / share, problem.cluster.devices[devices[0]]) for size in (1.0, FAR))
        each = (high - low) / (FAR - 1)
        return cls((low - each, each), problem.cluster.allreduce_lines(devices))

    def seconds(self, trainable_bytes: np.ndarray) -> np.ndarray:
        """`finish_s` of many stages.

        Planners of chains add a micro-batch's share of it to the time of a stage, whose devices are not known yet: they
        take neighbours, as `Placer` gives them.
        """
        fixed, each = self.update
        sums = [own + size * trainable_bytes for own, size in self.sums]
        total = fixed + each * trainable_bytes + (np.maximum.reduce(sums) if sums else 0.0)
        return np.where(trainable_bytes > 0, total, 0.0)


FAR: Final = 1e9
"""Bytes through whose update its line goes, beside one byte."""


def _position(problem: Problem, stage: Stage, depth: int | None) -> PipelinePosition:
    accumulation = max(problem.accumulation(stage.microbatch_size) // stage.stride, 1)
    return PipelinePosition(warmup=max(stage.ahead, 1) - 1, depth=depth or max(stage.ahead, 1), accumulation=accumulation)


def _update_s(problem: Problem, stage: Stage, position: PipelinePosition) -> float:
    trainable = problem.trainable_bytes(stage.ops, stage.devices_per_replica)
    share = problem.updated_share(stage.ops, len(stage.replicas))
    update_s = problem.cost.update_s(trainable * share, problem.cluster.devices[stage.devices[0]])
    return update_s + _weights_s(problem, stage, position)[2]


def _weights_s(problem: Problem, stage: Stage, position: PipelinePosition) -> tuple[float, float, float]:
    """Seconds that the weight policy adds to a forward, to a backward and to an update: means over a mini-batch."""
    if problem.regime.weights.flushes:
        return 0.0, 0.0, 0.0
    trainable, device = problem.trainable_bytes(stage.ops, stage.devices_per_replica), problem.cluster.devices[stage.devices[0]]
    if not trainable:
        return 0.0, 0.0, 0.0
    traffic, launch_s = problem.regime.weights.traffic(position, problem.optimizer), problem.cost.launch_s(device)
    forward, backward, update = (problem.cost.move_s(work.moved * trainable, device) + work.launches * launch_s for work in traffic)
    return forward, backward, update
