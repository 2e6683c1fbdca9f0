from collections import Counter

import numpy as np
import pytest

from gpp.errors import InvalidConfig
from gpp.graph.coarsen.coarsen import _weights, coarsen
from gpp.graph.coarsen.groups import nodes_of
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor, mask_of
from gpp.graph.random_graphs import random_dag, random_series_parallel
from tests.support.long import thinned
from tests.support.operations import calls


def coarsening_loss(fine: OpGraph, coarse: OpGraph) -> float:
    """The parallelism that coarsening took away, 0 (none) to 1.

    This is the share, by weight, of operator pairs that could have run at the same time and no longer can: 0.5 if a
    model of two equal branches became one operator. `coarse` is the result of `coarsen` on `fine`.
    """
    position = {nodes_of(op)[0]: i for i, op in enumerate(fine.ops)}
    group_of = np.zeros(fine.num_ops, dtype=np.intp)
    for g, op in enumerate(coarse.ops):
        group_of[[position[node] for node in nodes_of(op) if node in position]] = g
    weight = np.array([time for time, _ in _weights(fine)], dtype=float)
    free = _incomparable(fine) & ~_incomparable(coarse)[np.ix_(group_of, group_of)]
    return float(weight @ free @ weight / max(weight.sum(), 1.0) ** 2)


def _incomparable(graph: OpGraph) -> np.ndarray:
    """Whether neither of two operators comes before the other: bool, [num_ops, num_ops]."""
    rows = [graph.all_mask & ~(graph.ancestors[i] | graph.descendants[i] | 1 << i) for i in range(graph.num_ops)]
    size = -(-graph.num_ops // 8)
    packed = np.frombuffer(b"".join(row.to_bytes(size, "little") for row in rows), dtype=np.uint8)
    return np.unpackbits(packed.reshape(graph.num_ops, size), axis=1, bitorder="little")[:, : graph.num_ops].astype(bool)


class Model:
    """Writes operator graphs as code: `x = model("name", [inputs], weight)`."""

    def __init__(self):
        self.ops, self.readers, self.params = [], {}, []

    def __call__(self, name, inputs, weight, param_bytes=0):
        op = len(self.ops)
        params = ()
        if param_bytes:
            params = (f"{name}.weight",)
            self.params.append(Param(name=params[0], num_bytes=param_bytes))
        self.ops.append(
            Op(
                name=name,
                kind=name.rsplit(".", 1)[-1],
                forward_flops=weight * 1e9,
                backward_flops=weight * 2e9,
                saved_bytes=weight,
                params=params,
                nodes=(f"{name}_node",),
            )
        )
        for x in inputs:
            self.readers.setdefault(x, []).append(op)
        return op

    def layer(self, path, x):
        """A Transformer layer of weight 12.5."""
        norm = self(f"{path}.norm1", [x], 0.01)
        qkv = [self(f"{path}.attention.{name}", [norm], 1) for name in ("query", "key", "value")]
        mixed = self(f"{path}.attention.mix", qkv, 0.5)
        out = self(f"{path}.attention.out", [mixed], 1)
        add = self(f"{path}.add", [x, out], 0.001)
        norm = self(f"{path}.norm2", [add], 0.01)
        wide = self(f"{path}.mlp.up", [norm], 4)
        wide = self(f"{path}.mlp.gelu", [wide], 0.02)
        return self(f"{path}.add_1", [add, self(f"{path}.mlp.down", [wide], 4)], 0.001)

    def graph(self):
        tensors = tuple(
            Tensor(name=self.ops[op].name, producer=op, consumers=tuple(readers), bytes_per_sample=4.0)
            for op, readers in sorted(self.readers.items())
        )
        return OpGraph(name="model", ops=tuple(self.ops), tensors=tensors, params=tuple(self.params))


def multi_modal(num_branches, num_layers):
    model = Model()
    ends = []
    for b in range(num_branches):
        x = model(f"branches.{b}.embed", [], 1, param_bytes=1000)
        for n in range(num_layers):
            x = model.layer(f"branches.{b}.layers.{n}", x)
        ends.append(x)
    model("head", [model("cat", ends, 0.001)], 5, param_bytes=100)
    return model.graph()


def members(fine, coarse):
    """Fine operator ids of each group."""
    position = {node: i for i, op in enumerate(fine.ops) for node in op.nodes or (op.name,)}
    return [sorted({position[node] for node in op.nodes or (op.name,)}) for op in coarse.ops]


def check(fine, coarse):
    """What holds for every coarsening."""
    groups = members(fine, coarse)
    assert sorted(op for group in groups for op in group) == list(range(fine.num_ops))  # a partition
    assert all(fine.is_convex(mask_of(group)) for group in groups)
    where = {op: g for g, group in enumerate(groups) for op in group}
    wanted = Counter()
    for tensor in fine.tensors:  # the graph of the groups goes forward, and holds every crossing tensor once
        outside = {where[c] for c in tensor.consumers} - {where[tensor.producer]}
        assert all(consumer > where[tensor.producer] for consumer in outside)
        if outside:
            wanted[tensor.name, where[tensor.producer], tuple(sorted(outside)), tensor.bytes_per_sample] += 1
    assert wanted == Counter((t.name, t.producer, t.consumers, t.bytes_per_sample) for t in coarse.tensors)
    for field in ("forward_flops", "backward_flops", "traffic_bytes", "num_kernels", "saved_bytes"):
        assert sum(getattr(op, field) for op in coarse.ops) == pytest.approx(sum(getattr(op, field) for op in fine.ops))
    assert coarse.params == fine.params
    for op, group in zip(coarse.ops, groups, strict=True):
        assert op.params == tuple(dict.fromkeys(p for i in group for p in fine.ops[i].params))
        assert list(op.nodes) == [n for i in group for n in fine.ops[i].nodes or (fine.ops[i].name,)] or not op.nodes


@pytest.mark.parametrize("max_ops", [1, 2, 7, 30, 200])
@pytest.mark.parametrize("seed", thinned(range(6)))
@pytest.mark.parametrize("make", [random_dag, random_series_parallel])
def test_random_graphs(make, seed, max_ops):
    fine = make(80, seed)
    coarse = coarsen(fine, max_ops)
    check(fine, coarse)
    assert coarse.num_ops <= max_ops
    assert coarse == coarsen(fine, max_ops)
    assert 0.0 <= coarsening_loss(fine, coarse) <= 1.0


@pytest.mark.parametrize("max_ops", [128, 64, 40, 16, 6, 5])
def test_branches_never_share_a_group(max_ops):
    fine = multi_modal(4, 8)
    coarse = coarsen(fine, max_ops)
    check(fine, coarse)
    assert 5 <= coarse.num_ops <= max_ops
    for group in members(fine, coarse):
        assert len({fine.ops[op].name.split(".")[1] for op in group if fine.ops[op].name.startswith("branches.")}) <= 1
    assert coarsening_loss(fine, coarse) < 0.01  # the little that q, k and v had


@pytest.mark.parametrize("max_ops", [128, 64, 40, 20, 12])
def test_repeated_layers_are_cut_alike(max_ops):
    fine = multi_modal(2, 8)
    coarse = coarsen(fine, max_ops)
    cuts = Counter()
    for group in members(fine, coarse):
        inside = [fine.ops[op].name.split(".") for op in group]
        if all(name[0] == "branches" and name[2] == "layers" for name in inside):
            cuts[tuple(sorted((int(name[3]) - min(int(n[3]) for n in inside), ".".join(name[4:])) for name in inside))] += 1
    assert cuts
    assert all(count % 2 == 0 for count in cuts.values())  # both branches
    covered = Counter(member[1] for cut, count in cuts.items() for member in cut for _ in range(count))
    assert set(covered.values()) == {16}  # every layer, whole or in the same pieces


def test_groups_carry_the_users_names():
    fine = multi_modal(2, 4)
    assert {"branches.1.embed", "branches.1.layers.3", "head"} <= {op.name for op in coarsen(fine, 12).ops}
    assert [op.name for op in coarsen(fine, 3).ops] == ["branches.0", "branches.1", "head"]
    names = [op.name for op in coarsen(fine, 30).ops]
    assert {"branches.0.layers.0.attention", "branches.0.layers.0.mlp.up"} <= set(names)
    assert len(set(names)) == len(names)


def test_branches_stay_in_one_piece_of_the_order():
    names = [op.name.split(".")[1] for op in coarsen(multi_modal(4, 4), 40).ops[:-1]]
    assert names == sorted(names)


def test_dust_goes_even_where_the_count_would_do():
    model = Model()
    x = model("a", [], 1)
    x = model("view", [x], 0.0)
    x = model("b", [x], 1)
    model("loss", [x], 0.0)
    assert [op.name for op in coarsen(model.graph(), 100).ops] == ["a", "b"]


def test_a_mask_joins_its_first_reader():
    model = Model()
    mask = model("mask", [], 0.0)
    x = model("embed", [], 1)
    for n in range(3):
        x = model(f"layers.{n}", [x, mask], 1)
    coarse = coarsen(model.graph(), 100)
    check(model.graph(), coarse)
    assert [op.name for op in coarse.ops] == ["embed", "layers.0", "layers.1", "layers.2"]


def test_tables_that_cost_memory_but_no_time_stay_apart():
    model = Model()
    towers = [model(f"tables.{n}", [], 1e-9, param_bytes=10**8) for n in range(6)]
    towers.append(model("dense", [], 10, param_bytes=10**6))
    model("top", towers, 10, param_bytes=10**6)
    assert coarsen(model.graph(), 100).num_ops == 8


def test_gluing_branches_is_the_last_resort_and_is_said():
    fine = multi_modal(4, 4)
    assert coarsening_loss(fine, coarsen(fine, 5)) < 0.01
    coarse = coarsen(fine, 4)
    check(fine, coarse)
    assert coarse.num_ops == 4
    assert coarsening_loss(fine, coarse) > 0.1
    two = multi_modal(2, 4)
    assert coarsening_loss(two, coarsen(two, 1)) == pytest.approx(0.5, abs=0.06)
    assert coarsening_loss(two, two) == 0.0


def test_shared_parameters_count_once_in_a_group():
    tied = Param(name="w", num_bytes=8)
    ops = tuple(Op(name=f"op{i}", forward_flops=1.0, params=("w",)) for i in range(3))
    tensors = tuple(Tensor(name=f"t{i}", producer=i, consumers=(i + 1,), bytes_per_sample=4.0) for i in range(2))
    coarse = coarsen(OpGraph(name="g", ops=ops, tensors=tensors, params=(tied,)), 1)
    assert [op.params for op in coarse.ops] == [("w",)]
    assert coarse.ops[0].nodes == ("op0", "op1", "op2")


@pytest.mark.parametrize("max_ops", [0, -1, 1.5, "many"])
def test_bad_max_ops(max_ops):
    with pytest.raises(InvalidConfig, match=r"graph\.max_ops"):
        coarsen(multi_modal(1, 1), max_ops)


def test_empty_and_single():
    empty = OpGraph(name="g", ops=(), tensors=())
    assert coarsen(empty, 4) == empty
    one = OpGraph(name="g", ops=(Op(name="a"),), tensors=())
    assert coarsen(one, 4) == one


def test_work_grows_with_the_operators():
    half, fine = multi_modal(4, 20), multi_modal(4, 40)
    assert fine.num_ops > 1900 and coarsen(fine, 128).num_ops <= 128
    made = [calls(lambda of=of: coarsen(of, 128)) for of in (half, fine)]
    # 440 an operator as this is written.
    assert made[1] < 1000 * fine.num_ops and made[1] < 2.5 * made[0]
