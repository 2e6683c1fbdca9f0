"""What a stage's policy says of each of its captured nodes: whose storages are held, moved or made again, and by which run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx

from gpp.capture.codec import is_random, operator_of, writes
from gpp.graph.captured import Captured, Node, node_references
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.stage import marks_of
from gpp.stage import Stage

KEPT, MOVED = -1, -2
"""Ways of a node that is in no run: its storages stay, or go to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """Connected operators that are discarded, and computed again together.

    Args:
        nodes: all that may be called again, views of its values by other operators included.
        reads: nodes whose values they read: others, and of their own those that stay.
        copied: those of `reads` that a pass writes in place, so that the values of before are copied.
        behind: runs whose storages its inputs may be views of; never itself, and never in a circle.
    """

    nodes: frozenset[str]
    reads: frozenset[str]
    copied: frozenset[str]
    behind: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class NodeMarks:
    """A stage's policy, node by node. Places are positions in `calls`.

    Args:
        calls: nodes that the training pass calls, in order.
        way: of each place: `KEPT`, `MOVED`, or the number of its run.
        stays: nodes of boundaries whose values other operators read: the storages of these values stay.
        draws: nodes before which the state of the random generators is kept: where a run begins to draw, or goes on after
            others have drawn.
    """

    captured: Captured
    calls: tuple[str, ...]
    op_of: Mapping[str, int]
    way: tuple[int, ...]
    stays: frozenset[str]
    runs: tuple[NodeRun, ...]
    draws: frozenset[str]
    segments: Mapping[str, tuple[str, ...]] = field(repr=False)

    @cached_property
    def place(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.calls)}

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Of each place the runs that read its value and do not make it themselves."""
        return tuple(tuple(r for r, run in enumerate(self.runs) if name in run.reads) for name in self.calls)

    @cached_property
    def _writing(self) -> frozenset[int]:
        """Operators with a node that writes in place."""
        return frozenset(self.op_of[name] for name in self.calls if name in self.op_of and _writes(self.captured.node_of[name]))

    @cached_property
    def _of_op(self) -> dict[int, list[str]]:
        out: dict[int, list[str]] = defaultdict(list)
        for name, op in self.op_of.items():
            out[op].append(name)
        return out

    def needed(self, run: int, places: Iterable[int]) -> frozenset[str]:
        """Nodes of a run that must be called again for storages that the nodes at `places` make.

        An operator that writes in place is called whole, and who draws random numbers draws all that were drawn before in a row.
        """
        own, seen = self.runs[run].nodes, set[str]()
        todo = [self.calls[place] for place in places]
        while todo:
            name = todo.pop()
            if name in seen or name not in own:
                continue
            seen.add(name)
            node = self.captured.node_of[name]
            todo += (*self.made_for(name), *node.after, *self.segments.get(name, ()))
            if (op := self.op_of.get(name)) in self._writing and op is not None:
                todo += self._of_op[op]
        return frozenset(seen)

    def made_for(self, name: str) -> list[str]:
        """Nodes that a node reads, without those whose values stay for it."""
        own = self.op_of.get(name)
        return [n for n in node_references(self.captured.node_of[name]) if n not in self.stays or self.op_of[n] == own]

    @classmethod
    def of(cls, captured: Captured, graph: OpGraph, stage: Stage, calls: tuple[str, ...]) -> NodeMarks:
        """Those of a plan's stage; `calls` as `gpp.capture.stage.StageModule.calls`."""
        op_of = _owners(captured, graph, stage, calls)
        marks = marks_of(stage)
        again, moved = set(marks.recompute), set(marks.offload)
        stays = _staying(captured, calls, op_of, set(marks.boundaries))
        joined = nx.Graph()
        joined.add_nodes_from(marks.recompute)
        called, sources = set(calls), _sources(captured, calls, op_of, again, stays)
        for name in calls:
            if (op := op_of.get(name)) in again:
                for need in node_references(captured.node_of[name]):
                    if op_of.get(need, op) in again and need in called and need not in stays:
                        joined.add_edge(op_of.get(need, op), op)
        views = [
            (op_of[sources[need]], op_of[name])
            for name in calls
            if op_of.get(name) in again
            for need in node_references(captured.node_of[name])
            if need in sources
        ]
        run_of = _components(joined, views)
        way = tuple(run_of[op_of[n]] if op_of.get(n) in again else MOVED if op_of.get(n) in moved else KEPT for n in calls)
        runs = _runs(captured, calls, op_of, way, sources, stays)
        draws, segments = _random(captured, calls, way)
        return cls(captured=captured, calls=calls, op_of=op_of, way=way, stays=stays, runs=runs, draws=draws, segments=segments)


def _writes(node: Node) -> bool:
    return bool(node.mutates) or (node.kind == "call" and writes(operator_of(node.target)))


def _owners(captured: Captured, graph: OpGraph, stage: Stage, calls: tuple[str, ...]) -> dict[str, int]:
    """The operator of each node. A node that belongs to none is the only operator's that reads it; if several do, nobody's."""
    of = {node: op for op in stage.ops for node in graph.ops[op].nodes}
    readers: dict[str, set[int]] = defaultdict(set)
    for name in reversed(calls):
        node = captured.node_of[name]
        own = readers[name] if node.free else {of[name]}
        for need in (*node_references(node), *node.after):
            readers[need] |= own
    out = {}
    for name in calls:
        owners = readers[name] if captured.node_of[name].free else {of[name]}
        if len(owners) == 1:
            (out[name],) = owners
    return out


def _staying(captured: Captured, calls: tuple[str, ...], op_of: Mapping[str, int], boundaries: set[int]) -> frozenset[str]:
    """Nodes of boundaries that other operators read."""
    return frozenset(
        need
        for name in calls
        for need in node_references(captured.node_of[name])
        if op_of.get(need) in boundaries and op_of.get(need) != op_of.get(name)
    )


def _sources(
    captured: Captured, calls: tuple[str, ...], op_of: Mapping[str, int], again: set[int], stays: frozenset[str]
) -> dict[str, str]:
    """Views that operators that are not discarded make of what discarded ones have made, and what does not stay: view -> the node
    of which it is one."""
    out: dict[str, str] = {}
    for name in calls:
        node = captured.node_of[name]
        if node.kind != "call" or node.free or op_of.get(name) in again or not (of := _viewed(node)):
            continue
        if of in out or (op_of.get(of) in again and of not in stays):
            out[name] = out.get(of, of)
    return out


def _viewed(node: Node) -> str | None:
    """The node of whose value this one is a view, by its operator's schema."""
    target = operator_of(node.target)
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None or writes(target) or not node.args:
        return None
    return node.args[0].get("ref") if isinstance(node.args[0], dict) else None


def _components(joined: nx.Graph, views: list[tuple[int, int]]) -> dict[int, int]:
    """Discarded operator -> the number of its run. Runs that would wait for each other, over views, are one."""
    group = {op: i for i, ops in enumerate(nx.connected_components(joined)) for op in ops}
    waits = nx.DiGraph()
    waits.add_nodes_from(group.values())
    waits.add_edges_from((group[a], group[b]) for a, b in views)
    one = {i: min(circle) for circle in nx.strongly_connected_components(waits) for i in circle}
    number = {first: run for run, first in enumerate(sorted(set(one.values())))}
    return {op: number[one[i]] for op, i in group.items()}


def _runs(
    captured: Captured,
    calls: tuple[str, ...],
    op_of: Mapping[str, int],
    way: tuple[int, ...],
    sources: Mapping[str, str],
    stays: frozenset[str],
) -> tuple[NodeRun, ...]:
    way_of = dict(zip(calls, way, strict=True))
    members: dict[int, set[str]] = {run: set() for run in range(max(way, default=KEPT) + 1)}
    for name in reversed(calls):
        # Views of its own values that it reads from other operators are made again too.
        if (own := way_of[name]) >= 0:
            members[own].add(name)
            for need in node_references(captured.node_of[name]):
                while need in sources:
                    members[own].add(need)
                    need = next(n for n in node_references(captured.node_of[need]))
    written = {name for node in captured.nodes for name in node.mutates}
    runs, behind = [], nx.DiGraph()
    for run, nodes in members.items():
        pairs = [(name, need) for name in nodes for need in node_references(captured.node_of[name])]
        stayed = {need for name, need in pairs if need in stays and op_of.get(name) != op_of[need]}
        reads = {need for _, need in pairs} - nodes | stayed
        behind.add_node(run)
        behind.add_edges_from((run, way_of[need]) for need in reads - stayed if way_of.get(need, KEPT) >= 0)
        stores = any(_writes(captured.node_of[name]) for name in nodes)
        copied = {
            name
            for name in reads
            if (captured.node_of[name].kind == "input" and stores)
            or (captured.node_of[name].kind not in ("call", "block", "input") and captured.node_of[name].target in written)
        }
        runs.append((frozenset(nodes), frozenset(reads), frozenset(copied)))
    return tuple(
        NodeRun(nodes=nodes, reads=reads, copied=copied, behind=frozenset(nx.descendants(behind, run)))
        for run, (nodes, reads, copied) in enumerate(runs)
    )


def _random(captured: Captured, calls: tuple[str, ...], way: tuple[int, ...]) -> tuple[frozenset[str], dict[str, tuple[str, ...]]]:
    """`NodeMarks.draws`; and node that draws -> those that have drawn before it since the state was kept."""
    draws, segments, last, drawn = set[str](), dict[str, tuple[str, ...]](), KEPT, list[str]()
    for name, own in zip(calls, way, strict=True):
        node = captured.node_of[name]
        if node.kind != "block" and not is_random(operator_of(node.target), node.args, node.kwargs):
            continue
        if own != last or own < 0:
            drawn, last = [], own
            if own >= 0:
                draws.add(name)
        segments[name] = tuple(drawn)
        drawn.append(name)
    return frozenset(draws), segments
