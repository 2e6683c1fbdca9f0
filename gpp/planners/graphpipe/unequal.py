"""Devices of unequal speed and memory: partitions for them.

Objective: the predicted iteration time, as everywhere. What the tables of a search cannot know is which device a stage will
get. So partitions come from three views of the cluster, and only real devices judge them:
1. as if all devices were its slowest and smallest: whatever fits then fits anywhere (`StageCosts`; the ordinary search);
2. as if all were average: of the speed that adds up to the cluster's, with the least, the median and the largest memory
   (`average`), along the structure of the graph;
3. as it is, type by type, along lines of operators (`heterogeneous_chain`).

`rebalance` then improves the best plans on their own devices.

Constraints: those of the planner that calls; a stage's slowest replica decides its time, its smallest one what it may hold.

Complexity: 2 is the ordinary search three times over; 3 see `heterogeneous_chain`.

Departures: the paper has no unequal devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpp.graph.series_parallel import Order
from gpp.planners.common.average import average
from gpp.planners.common.heterogeneous_chain import simulate_layouts
from gpp.planners.common.incumbent import Incumbent
from gpp.planners.common.stage_costs import StageCosts
from gpp.planners.graphpipe.candidate_partitions import candidate_partitions
from gpp.planners.graphpipe.partition_search import PartitionSearch
from gpp.planners.graphpipe.sp_structure import SPStructure

DEPTH_SCALES = (0.25, 0.5, 0.75, 1.0)
"""Depths of a line that memory is reckoned with, in units of its stages."""

PATIENCE = 6
"""Simulations without a better plan after which no further partition of a view is simulated."""


def simulate_unequal(incumbent: Incumbent, orders: Sequence[Order], lines: Sequence[tuple[int, ...]]) -> None:
    """Simulate partitions for average devices along the structure, and for each type of device along lines."""
    assessor = incumbent.assessor
    views = [StageCosts(problem, replication=assessor.costs.replication) for problem in average(assessor.problem)]
    for costs in views:
        for order in orders:
            found = candidate_partitions(PartitionSearch(SPStructure(costs, order)), assessor, incumbent.best_s)
            incumbent.simulate_all(found.fitting, PATIENCE)
    for line in lines:
        structure = SPStructure(views[0], None, line)
        simulate_layouts(incumbent, views[0], structure.intervals, structure.root.bounds, DEPTH_SCALES)
