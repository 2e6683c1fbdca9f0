from __future__ import annotations

import pytest

from gpp.errors import InvalidConfig
from gpp.models.random_graph import RandomGraph
from tests.support.conf import model_named


@pytest.mark.parametrize("kind", ["series_parallel", "dag", "towers", "chain"])
def test_the_same_settings_give_the_same_graph(kind: str) -> None:
    model = model_named("random", f"model.kind={kind}", "model.num_ops=33")
    one, other = model.captured(), RandomGraph(kind=kind, num_ops=33).captured()
    assert one == other and one.graph.num_ops == 33 and one.batch is None
    assert model.inputs() == model.targets() == {}


def test_towers_are_equal_branches_that_meet() -> None:
    graph = RandomGraph(kind="towers", num_ops=18, num_branches=4).captured().graph
    ends = [op for op in range(18) if 17 in {c for t in graph.tensors if t.producer == op for c in t.consumers}]
    assert len(ends) == 4 and len({op.forward_flops for op in graph.ops}) == 1
    assert len(graph.tensors) == 17


def test_it_cannot_be_trained() -> None:
    with pytest.raises(InvalidConfig, match="mode=plan"):
        RandomGraph().build()
    with pytest.raises(InvalidConfig, match="kind"):
        RandomGraph(kind="ring")
    with pytest.raises(InvalidConfig, match="num_branches"):
        RandomGraph(kind="towers", num_ops=4, num_branches=4).captured()
