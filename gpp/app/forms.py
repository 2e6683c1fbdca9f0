"""Batches of other shapes than the examples': a program for each, over the same stages, weights and optimizers.

A batch of fewer samples runs the same operators on fewer of them. For one of other lengths (other sizes behind the samples) the
model is captured again: what an operator costs and how large its tensors are follow from the lengths in ways that no symbol of
torch.export tells. So it is for other numbers and words among the inputs (the grid of a picture), which a capture has in it. All
keep the stages, so that no weight moves and no worker starts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, final

from gpp.app.batches import check_dense, same_constants
from gpp.cost.models.analytical import Analytical
from gpp.cost.problem import Problem
from gpp.data.base import TARGET
from gpp.errors import CaptureError, Infeasible, InvalidConfig, InvalidPlan
from gpp.graph.captured import Captured
from gpp.graph.coarsen.groups import grouped_like
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.program import reduce_groups
from gpp.runtime.job import Job
from gpp.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from gpp.capture.given import ModelInputs

Rows: TypeAlias = "Mapping[str, Tensor]"
"""A mini-batch by the names of the captured inputs and targets."""

Lengths = tuple[tuple[Any, ...], ...]
"""Sizes behind the samples of each input and target, in the order of the captured inputs; and each constant, as (name, text)."""

PAD = "pad batches to a few lengths, as in multiples of 64, with a mask or labels that the loss leaves out"


@final
class Forms:
    """The forms of a pipeline's batches, each made when its first batch comes.

    Args:
        job, problem, strategy: of the examples.
        examples: the inputs of the examples, taken apart.
        capture: captures the model at the lengths of a batch, with its constants.
        most: lengths that may be captured, those of the examples included.

    `jobs` are those of all forms, by number.
    """

    def __init__(
        self,
        job: Job,
        problem: Problem,
        strategy: Strategy,
        examples: ModelInputs,
        capture: Callable[[Rows, ModelInputs], Captured],
        *,
        most: int,
    ) -> None:
        self._job, self._problem, self._strategy, self._capture, self._most = job, problem, strategy, capture, most
        self._inputs = job.captured.rows
        self._constants = examples.constants
        sizes: Lengths = tuple(tuple(int(size) for size in (node.shape or ())[1:]) for node in self._inputs.values())
        own = sizes + _texts(examples.constants)
        self._captured: dict[Lengths, tuple[Captured, OpGraph]] = {own: (job.captured, job.graph)}
        self._numbers = {(job.plan.minibatch_size, own): 0}
        self.jobs = [job]

    def number(self, rows: Rows, batch: ModelInputs) -> int | None:
        """The number of a batch's form, 0 for that of the examples; None for a new one.

        Raises:
            InvalidConfig: a tensor is of another form than in the examples; the batch is larger, or cannot be cut as they are.
        """
        found = self._numbers.get(shape := self._shape(rows, batch))
        if found is None:
            self._check_size(shape[0])
        return found

    def make(self, rows: Rows, batch: ModelInputs) -> Job:
        """The job of a new form.

        Args:
            batch: the inputs among the rows, as they were given.

        Raises:
            InvalidConfig: the model calls other operators at these lengths, or was captured at too many; the plan does not fit the
                devices at these sizes.
        """
        size, lengths = self._shape(rows, batch)
        captured, graph = self._captured.get(lengths) or self._captured_at(lengths, rows, batch)
        job, strategy = self._job, self._strategy
        plan = _smaller(replace(job.plan, graph_fingerprint=graph.fingerprint), size)
        # Times play no part: the plan is given. Measured ones would be of another graph.
        problem = replace(self._problem, graph=graph, minibatch_size=size, microbatch_size=None, cost=Analytical())
        try:
            strategy.check(plan, problem)
        except (Infeasible, InvalidPlan) as error:
            shown = [size, *([list(node.shape or ())[1:] for node in captured.rows.values()])]
            raise InvalidConfig("batch", shown, f"does not fit the plan: {error}", "give the largest batch as example") from error
        cards = job.settings.backend == "nccl"
        return replace(
            job,
            settings=replace(job.settings, minibatch_size=size, train_samples=size, evaluation_samples=size),
            captured=captured,
            graph=graph,
            plan=plan,
            program=strategy.lower(plan, problem, cards=cards),
            evaluation=strategy.lower_evaluation(plan, problem, size, cards=cards),
            costs=plan.bills(strategy.posed(problem)),
        )

    def keep(self, rows: Rows, batch: ModelInputs, job: Job) -> int:
        """Note the job of a batch's form; its number."""
        size, lengths = self._shape(rows, batch)
        self._captured[lengths] = job.captured, job.graph
        self._numbers[size, lengths] = len(self.jobs)
        self.jobs.append(job)
        return len(self.jobs) - 1

    def _shape(self, rows: Rows, batch: ModelInputs) -> tuple[int, Lengths]:
        """Samples of a batch, and its lengths.

        Raises:
            InvalidConfig: a tensor is of another form than in the examples.
        """
        check_dense(rows)
        sizes = {name.removeprefix(TARGET): len(tensor) if tensor.dim() else 0 for name, tensor in rows.items()}
        size = next(iter(sizes.values()))
        if set(sizes.values()) != {size} or not size:
            raise InvalidConfig("batch", sizes, "must all have as many samples, at least one", "give one mini-batch, batch first")
        for name, node in self._inputs.items():
            here, form = list(rows[name].shape), [size, *(node.shape or ())[1:]]
            if len(here) != len(form) or 0 in here or (self._most == 1 and here != form):
                rule = f"{name.removeprefix(TARGET)!r} must be of shape {form}, as in the examples"
                fix = "give as many dimensions, none of them empty"
                raise InvalidConfig(
                    "batch", here, rule, fix if self._most > 1 else "say gpp.Planning(lengths=N), to have the model captured at N"
                )
            kind = str(rows[name].dtype).removeprefix("torch.")
            if kind != node.dtype:
                rule = f"{name.removeprefix(TARGET)!r} must be {node.dtype}, as in the examples"
                raise InvalidConfig("batch", kind, rule, f"convert it, as in tensor.to(torch.{node.dtype})")
        if self._most == 1:
            same_constants(self._constants, batch.constants)
        return size, tuple(tuple(rows[name].shape[1:]) for name in self._inputs) + _texts(batch.constants)

    def _check_size(self, size: int) -> None:
        """Refuse numbers of samples that the plan cannot be run on.

        Raises:
            InvalidConfig: says which can.
        """
        plan = self._job.plan
        only = self._job.captured.batch and max(stage.microbatch_size for stage in plan.stages)
        most, least = plan.minibatch_size, max(len(stage.replicas) for stage in plan.stages)
        fix = "drop the last batch of a loader that does not divide (drop_last=True)"
        if size > most:
            raise InvalidConfig(
                "batch", size, f"samples must be at most {most}, as in the examples", "give the largest batch as example"
            )
        if size < least:
            raise InvalidConfig("batch", size, f"samples are fewer than the {least} replicas of a stage", fix)
        for s, stage in enumerate(plan.stages):
            if stage.sharing and -(-size // (b := stage.microbatch_size)) % stage.stride:
                rule = f"must make a multiple of {stage.stride} micro-batches of {b}, which the replicas of stage {s} take in turn"
                raise InvalidConfig("batch", size, rule, f"{fix}, or plan with {stage.sharing.without}")
        if only and size % only:
            rule = f"samples cannot be cut into micro-batches of {only}, the only size that the plan of this model runs at"
            raise InvalidConfig("batch", size, rule, fix)

    def _captured_at(self, lengths: Lengths, rows: Rows, batch: ModelInputs) -> tuple[Captured, OpGraph]:
        """The model at other lengths, its operators in the groups of the examples'.

        Raises:
            InvalidConfig: it has been captured at too many; it cannot be at these, or calls other operators.
        """
        shown = [list(sizes) for sizes in lengths]
        if len(self._captured) >= self._most:
            raise InvalidConfig(
                "batch",
                shown,
                f"is of other lengths than the {self._most} that the model has been captured at",
                f"{PAD}; or say gpp.Planning(lengths={2 * self._most})",
            )
        if any(stage.devices_per_replica > 1 or stage.beside for stage in self._job.plan.stages):
            rule = "has other lengths than the examples, and the plan splits operators over devices"
            raise InvalidConfig("batch", shown, rule, "pad it, or use a planner that gives each stage one device for a replica")
        try:
            captured = self._capture(rows, batch)
        except CaptureError as error:
            raise InvalidConfig("batch", shown, f"has lengths at which the model cannot be captured: {error}", "pad it") from error
        graph = grouped_like(captured.graph, self._job.graph)
        if graph is None or not self._alike(captured, graph):
            rule = "has lengths at which the model calls other operators than for the examples"
            fix = "pad it to lengths of at least 2, or as long as the examples; or call gpp.parallelize again for it"
            raise InvalidConfig("batch", shown, rule, fix)
        return captured, graph

    def _alike(self, captured: Captured, graph: OpGraph) -> bool:
        """Whether a capture calls the operators of the examples', in the same groups with the same weights and edges."""
        own, base = captured.node_of, self._job.captured.node_of
        groups = zip(graph.ops, self._job.graph.ops, strict=True)
        return (
            all(set(new.nodes) == set(op.nodes) and set(new.params) == set(op.params) for new, op in groups)
            and all(own[node].target == base[node].target for op in graph.ops for node in op.nodes)
            and captured.results == self._job.captured.results
            and captured.batch == self._job.captured.batch
            and reduce_groups(self._job.plan, graph) == reduce_groups(self._job.plan, self._job.graph)
        )


def _texts(constants: Mapping[str, Any]) -> Lengths:
    """Constants by name, as parts of a key: 1 and True are two."""
    return tuple((name, repr(value)) for name, value in sorted(constants.items()))


def _smaller(plan: Plan, size: int) -> Plan:
    """The plan for a mini-batch of so many samples; micro-batches are as large as before, as far as there are as many."""
    stages = []
    for stage in plan.stages:
        b = min(stage.microbatch_size, size)
        stages.append(replace(stage, microbatch_size=b, in_flight=stage.in_flight // stage.microbatch_size * b))
    return replace(plan, stages=tuple(stages), minibatch_size=size)
