"""What a stage costs whose operators are split over the devices of each replica."""

from __future__ import annotations

from gpp.cost.problem import Problem
from gpp.cost.stage import AbstractBill
from gpp.cost.variants import Repeats, running, sums_s
from gpp.errors import InvalidPlan
from gpp.graph.op_graph import ReplicaSums, Variant, mask_of
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.stage import Stage
from gpp.weights.base import PipelinePosition


class TensorParallelBill(AbstractBill):
    """Passes take the seconds in which the devices of a replica exchange shards."""

    def check(self, problem: Problem, s: int, stage: Stage, value: TensorParallel, position: PipelinePosition) -> None:
        """Prove that every operator declares the degree, and shares no parameter with another stage."""
        if value.degree == 1:
            return
        mask = mask_of(stage.ops)
        problem.trainable_bytes(stage.ops, value.degree)
        for name in sorted({name for op in stage.ops for name in problem.graph.ops[op].params}):
            if problem.graph.readers[name] & ~mask:
                raise InvalidPlan(f"stage {s} splits {name} over {value.degree} devices, but another stage reads it too")

    def exchange_s(
        self, problem: Problem, stage: Stage, value: TensorParallel, samples: int, repeats: Repeats
    ) -> tuple[float, float]:
        """As declared.

        What a profile declares at the stage's boundary moves over the link between a replica's first and last device; sums are
        rings over its devices. The slowest replica decides.
        """
        graph, cluster, own, mask = problem.graph, problem.cluster, stage.share(samples), mask_of(stage.ops)
        ways = [running(graph, op, 0.0, 0.0, op in repeats.declared, value.degree).variant or Variant() for op in stage.ops]
        boundary = own * sum(sum(size for peer, size in (*v.receive, *v.send) if not mask >> peer & 1) for v in ways)
        boundary_s = max(boundary / cluster.link(team[0], team[-1]).bandwidth_bytes_per_s for team in stage.replicas)
        forward = backward = ReplicaSums()
        for v in ways:
            forward = forward.plus(v.forward_sums.num_bytes, v.forward_sums.count)
            backward = backward.plus(v.backward_sums.num_bytes, v.backward_sums.count)
        forward_s, backward_s = (max(sums_s(cluster, sums, own, team) for team in stage.replicas) for sums in (forward, backward))
        return boundary_s + forward_s, boundary_s + backward_s


BILL = TensorParallelBill()
