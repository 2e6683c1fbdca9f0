"""Operators as groups of nodes: only the merges without which a cut would be impossible or wrong.

Nodes that belong to no operator (`free`) are found first. The others are joined by a union-find, groups that end up in
a cycle are joined as well, and pure views join a neighbour. No other merges join independent branches; coarsening is
done elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import networkx as nx

from gpp.capture.codec import size
from gpp.capture.counts import needed_by, needs
from gpp.capture.draft import Draft
from gpp.capture.measure import Facts
from gpp.graph.captured import closure, is_loss, loss_nodes, node_references


@dataclass(kw_only=True)
class NodeGroups:
    """Operators as lists of node names, both in execution order, and further results of the analysis.

    Args:
        live: nodes that the results or the buffers' updates need.
        producer: operator that a non-free call belongs to, by node name.
    """

    groups: list[list[str]]
    live: set[str]
    producer: dict[str, int] = field(default_factory=dict)


class Merger:
    """Analysis of one model. Fills `free`, `after` and `mutates` of the drafts, and keeps their copies.

    Args:
        results: name -> node; a loss among them.
    """

    def __init__(self, drafts: list[Draft], facts: dict[str, Facts], results: dict[str, str]) -> None:
        self.drafts, self.facts, self.results = drafts, facts, results
        self.draft = {draft.name: draft for draft in drafts}
        self.index = {draft.name: i for i, draft in enumerate(drafts)}
        self.owner_of: dict[int, Draft] = {}
        self.touching: dict[int, list[str]] = defaultdict(list)
        for draft in drafts:
            for storage in dict.fromkeys((*facts[draft.name].storages, *facts[draft.name].reads, *facts[draft.name].writes)):
                self.owner_of.setdefault(storage, draft)
                self.touching[storage].append(draft.name)
        self.written = {
            s: [n for n in names if s in facts[n].writes]
            for s, names in self.touching.items()
            if any(s in facts[n].writes for n in names)
        }
        self.parent: dict[str, str] = {}

    def merge(self) -> NodeGroups:
        """Run the whole analysis, in the order of the module's docstring."""
        self._keep_copies()
        self._order_writes()
        live = self._live()
        self._find_free(live)
        self.units = [d.name for d in self.drafts if d.kind in ("call", "block") and not d.free and d.name in live]
        self.parent = {unit: unit for unit in self.units}
        self.inputs = {unit: [r for r in needs(self.draft[unit]) if r in self.parent] for unit in self.units}
        self.users: dict[str, list[str]] = defaultdict(list)
        for unit in self.units:
            for name in self.inputs[unit]:
                self.users[name].append(unit)
        self._join_uncuttable()
        self._join_writes()
        self._join_side_results()
        for component in list(nx.strongly_connected_components(self._graph())):
            self._join(list(component))
        self._join_views()
        return self._collect(live)

    def _keep_copies(self) -> None:
        """Let an operator that has copied a tensor into which somebody then writes copy it whatever its strides are.

        A tensor that comes in a message is contiguous, so `contiguous`, `reshape` and `flatten` would hand on that very tensor.
        """
        for storage in self.written:
            owner = self.owner_of[storage]
            if owner.target == "aten.contiguous.default":
                owner.target, owner.kwargs = "aten.clone.default", {"memory_format": {"memory_format": "contiguous_format"}}
            elif owner.target in ("aten.reshape.default", "aten.flatten.using_ints"):
                owner.target, owner.kwargs = "aten._reshape_copy.default", {}
                owner.args = [owner.args[0], [size(extent) for extent in owner.shape or ()]]

    def _order_writes(self) -> None:
        """A node that reads a storage comes after those that have written to it before."""
        for storage, writers in self.written.items():
            owner = self.owner_of[storage]
            for name in self.touching[storage]:
                draft = self.draft[name]
                earlier = [w for w in writers if self.index[w] < self.index[name]]
                draft.after = tuple(dict.fromkeys((*draft.after, *earlier)))
            if owner.kind in ("param", "buffer", "constant"):
                for writer in writers:
                    self.draft[writer].mutates = tuple(dict.fromkeys((*self.draft[writer].mutates, owner.target)))
        for draft in self.drafts:
            direct = set(node_references(draft))
            draft.after = tuple(name for name in draft.after if name not in direct)

    def _live(self) -> set[str]:
        roots = [*self.results.values(), *(d.name for d in self.drafts if d.mutates)]
        for result in self.results.values():
            for storage in self.facts[result].storages:
                roots += self.written.get(storage, [])
        return needed_by(self.draft, roots)

    def _find_free(self, live: set[str]) -> None:
        """Set `free`: start from all nodes that could be free, and take back those that share storage with others."""
        bound = set(self.results.values())
        while True:
            uses_input: dict[str, bool] = {}
            uses_param: dict[str, bool] = {}
            for draft in self.drafts:
                read = needs(draft)
                uses_input[draft.name] = draft.kind == "input" or any(uses_input[n] for n in read)
                uses_param[draft.name] = draft.kind == "param" or any(uses_param[n] for n in read)
                if draft.kind != "call":
                    continue
                facts = self.facts[draft.name]
                preparation = not uses_param[draft.name] and not facts.forward_flops
                draft.free = (
                    draft.name not in bound
                    and not facts.random
                    and (preparation or not uses_input[draft.name])
                    and all(self.draft[n].free or self.draft[n].kind not in ("call", "block") for n in read)
                )
            taken = set()
            for storage, writers in self.written.items():
                inside = [w for w in writers if w in live]
                if any(not self.draft[w].free for w in inside) or (inside and self.owner_of[storage].kind == "input"):
                    taken.update(n for n in self.touching[storage] if self.draft[n].kind == "call")
            if taken <= bound:
                return
            bound |= taken

    def _find(self, name: str) -> str:
        while self.parent[name] != name:
            self.parent[name] = self.parent[self.parent[name]]
            name = self.parent[name]
        return name

    def _join(self, names: list[str]) -> None:
        """Union; the earliest node represents the group, so groups keep their place."""
        roots = sorted({self._find(name) for name in names}, key=self.index.__getitem__)
        for root in roots[1:]:
            self.parent[root] = roots[0]

    def _join_uncuttable(self) -> None:
        """(i) A value whose samples cannot be told apart stays with all its readers."""
        for unit in self.units:
            if self.facts[unit].parts is not None or self.draft[unit].batch_dim is None:
                self._join([unit, *self.users[unit]])

    def _join_writes(self) -> None:
        """(ii) in-place writes and (iii) buffers that somebody updates.

        Readers after the last write see the final value wherever they are; earlier readers must see the old value, so
        they stay. Every stage would have its own copy of a parameter, a buffer or an input, so all nodes that touch it
        stay together.
        """
        for storage, writers in self.written.items():
            owner = self.owner_of[storage]
            touching = [n for n in self.touching[storage] if n in self.parent]
            writing = [w for w in writers if w in self.parent]
            if owner.kind in ("call", "block"):
                if writing:
                    last = max(self.index[w] for w in writing)
                    self._join([n for n in touching if self.index[n] <= last])
                continue
            self._join([*touching, *(unit for unit in self.units if self._reads_freely(unit, set(self.touching[storage])))])

    def _reads_freely(self, unit: str, names: set[str]) -> bool:
        """Whether a unit depends on one of `names` through free nodes."""

        def free(name: str) -> list[str]:
            return [need for need in needs(self.draft[name]) if self.draft[need].free]

        return not names.isdisjoint(closure(free(unit), free))

    def _join_side_results(self) -> None:
        """(iv) Nodes that only a metric needs join a loss; those that only buffers need join their input's maker."""
        losses = {loss: needed_by(self.draft, [loss]) for loss in loss_nodes(self.results)}
        for_loss = set().union(*losses.values())
        for_results = set(for_loss)
        for name, node in self.results.items():
            if not is_loss(name):
                read = needed_by(self.draft, [node])
                for_results |= read
                # among several losses, the one that reads most of the same inputs; among equal ones, the first
                nearest = max(losses, key=lambda loss: len(losses[loss] & read))
                self._join([nearest, *(unit for unit in self.units if unit in read and unit not in for_loss)])
        for unit in self.units:
            if unit not in for_results and not self.users[unit] and self._find(unit) == unit:
                self._join([unit, self.inputs[unit][-1] if self.inputs[unit] else next(iter(losses))])

    def _graph(self) -> nx.DiGraph:
        graph = nx.DiGraph()
        graph.add_nodes_from(dict.fromkeys(self._find(unit) for unit in self.units))
        for unit in self.units:
            for name in self.inputs[unit]:
                if self._find(name) != self._find(unit):
                    graph.add_edge(self._find(name), self._find(unit))
        return graph

    def _join_views(self) -> None:
        """(v) A pure view joins its producer if that has no other reader, else its only reader, else it stays."""
        members: dict[str, list[str]] = defaultdict(list)
        for unit in self.units:
            members[self._find(unit)].append(unit)
        graph = self._graph()
        for group in list(members):
            if not all(self.facts[unit].view for unit in members[group]) or set(self.results.values()) & set(members[group]):
                continue
            before, behind = list(graph.predecessors(group)), list(graph.successors(group))
            if len(before) == 1 and list(graph.successors(before[0])) == [group]:
                target = before[0]
            elif len(behind) == 1:
                target = behind[0]
            else:
                continue
            self._contract(graph, group, target)
            members[target] = members.pop(group) + members[target]

    def _contract(self, graph: nx.DiGraph, group: str, target: str) -> None:
        """Move a group into a neighbour, which keeps its name in `graph`."""
        for name in list(graph.predecessors(group)):
            if name != target:
                graph.add_edge(name, target)
        for name in list(graph.successors(group)):
            if name != target:
                graph.add_edge(target, name)
        graph.remove_node(group)
        self.parent[group] = target

    def _collect(self, live: set[str]) -> NodeGroups:
        members: dict[str, list[str]] = defaultdict(list)
        for unit in self.units:
            members[self._find(unit)].append(unit)
        graph = self._graph()
        first = {group: self.index[units[0]] for group, units in members.items()}
        order = list(nx.lexicographical_topological_sort(graph, key=first.__getitem__))
        out = NodeGroups(groups=[members[group] for group in order], live=live)
        out.producer = {unit: number for number, units in enumerate(out.groups) for unit in units}
        for draft in self.drafts:
            if draft.free and draft.mutates and draft.name in live:
                out.groups[self._home(draft, out)].append(draft.name)
        for units in out.groups:
            units.sort(key=self.index.__getitem__)
        return out

    def _home(self, draft: Draft, out: NodeGroups) -> int:
        """The operator that a free update of a buffer belongs to: one of the same module, else the nearest one."""

        def nearness(unit: str) -> tuple[int, int]:
            a, b = draft.module.split("."), self.draft[unit].module.split(".")
            common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            same = draft.module == self.draft[unit].module
            return (-len(a) - 1 if same else -common, abs(self.index[unit] - self.index[draft.name]))

        return out.producer[min(out.producer, key=nearness)]
