"""Layouts of published measurements, against closed forms and the formulas of their authors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpp import Device, Single, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.stage import marked, marks_of
from gpp.plan.build import make_plan
from sweeps.fit_v100 import Constants as PaperConstants
from sweeps.fit_v100 import allowed, configured, kept
from sweeps.truth.__main__ import halved, sheet
from sweeps.truth.layouts import Torchgpipe, laid_out, with_float_loss, with_recomputed_shards, with_scores, with_split_head
from sweeps.truth.predict import Constants, as_torchgpipe, flops, predict, problem_of, stage_range
from sweeps.truth.rows import Row, rows
from tests.support.graphs import chain, cluster

SIZES = {"num_layers": 2, "hidden": 64, "num_heads": 4, "vocabulary": 512, "sequence": 32}
GPT = Row(
    source="megatron_1",
    model="small",
    settings=("model=gpt", "dtype=bfloat16", *(f"model.{name}={size}" for name, size in SIZES.items())),
    cluster="dgx_a100",
    devices=4,
    data=2,
    tensor=2,
    pipeline=1,
    balance=(),
    attention="scores",
    loss="float32",
    recompute="layers",
    schedule="1f1b",
    microbatch=2,
    minibatch=16,
    metric="TFLOP/s a GPU",
    value=1.0,
    use="judge",
)
HALF = Constants(0.5, 0.5, 1e-6)


@pytest.mark.parametrize(("stages", "count"), [(1, 2), (2, 3), (4, 6)])
@pytest.mark.parametrize("keeps_last", [True, False])
def test_torchgpipe_recomputes_while_it_waits(stages: int, count: int, keeps_last: bool) -> None:
    """On n equal stages: (m + n - 1) forwards, n backwards of the first one, and m - 1 times a backward and a forward again.

    With checkpoint='always' the last stage, which waits for nothing, computes one forward more.
    """
    problem = Problem(
        graph=chain(stages, forward=1.0, backward=2.0), cluster=cluster(stages), cost=Constant(), minibatch_size=count
    )
    plan = make_plan(problem, "by hand", [(1 << s, 1) for s in range(stages)], 1)
    plan = replace(plan, stages=tuple(marked(stage, recompute=stage.ops) for stage in plan.stages))
    strategy = Strategy(name="s", planner=Single(), schedule=Torchgpipe())
    found = as_torchgpipe(strategy, plan, problem, keeps_last=keeps_last)
    assert found.step_s == pytest.approx((count + stages - 1) * 1.0 + stages * 2.0 + (count - 1) * 3.0 + (not keeps_last))


def test_captured_flops_are_those_of_the_authors_formula() -> None:
    """Equation 3 of Narayanan et al. counts four forwards of the layers, one of them again, and three of the head."""
    graph = problem_of(GPT, HALF).graph
    layers = sum(op.forward_flops for op in graph.ops if op.name.startswith("layers."))
    head = sum(op.forward_flops for op in graph.ops) - layers
    assert 4 * layers + 3 * head == pytest.approx(flops(GPT), rel=1e-6)


def test_a_recomputed_shard_runs_its_forward_once_more() -> None:
    problem = problem_of(GPT, HALF)
    plain = laid_out(replace(GPT, recompute="none"), problem).stages[0]
    problem = replace(problem, graph=with_recomputed_shards(problem.graph, problem, 2, 2))
    again = laid_out(GPT, problem).stages[0]
    rest = tuple(op for op in plain.ops if op not in marks_of(again).recompute)
    before, after = StageCost.of(problem, plain), StageCost.of(problem, again)
    outside = StageCost.of(problem, replace(plain, ops=rest))
    assert after.forward_s == pytest.approx(before.forward_s)
    assert after.backward_s - before.backward_s == pytest.approx(before.forward_s - outside.forward_s, rel=1e-6)


def test_a_split_head_runs_on_its_share_and_sums_the_gradient_of_its_input() -> None:
    plain = problem_of(GPT, HALF).graph
    split = with_split_head(GPT, plain)
    head = next(i for i, op in enumerate(plain.ops) if op.name == "head")
    assert list(plain.shares(2)[head:]) == [1.0, 1.0] and list(split.shares(2)[head:]) == [0.5, 0.5]
    way = next(v for v in split.ops[head].variants if v.degree == 2)
    assert way.params == 0.5 and way.backward_sums.num_bytes == 2 * SIZES["hidden"] * SIZES["sequence"]


def test_a_wider_team_is_faster_and_a_slower_card_slower() -> None:
    one, two = replace(GPT, tensor=1, data=4), replace(GPT, tensor=1, data=4, recompute="none")
    assert predict(two, HALF).step_s < predict(one, HALF).step_s < predict(one, replace(HALF, compute=0.1, memory=0.1)).step_s


ORDERS = {"1f1b": (1, 2, 2, 1), "interleaved_1f1b": (0, *[1] * 6, 0), "zb_1p": (1, 2, 2, 1), "zb_2p": (1, 2, 2, 1)}


def row_of(order: str) -> Row:
    """Zero bubble's layout, small: 6 layers on 4 devices, one fewer on the first and on the last."""
    settings = tuple(re.sub(r"num_layers=\d+", "num_layers=6", word) for word in GPT.settings)
    shape = replace(GPT, source="zero_bubble", settings=settings, data=1, tensor=1, pipeline=4, recompute="none", minibatch=24)
    return replace(shape, balance=ORDERS[order], schedule=order)  # pyright: ignore[reportArgumentType]


@pytest.mark.long
def test_interleaved_stages_are_one_layer_each_round_and_round() -> None:
    problem = problem_of(row_of("interleaved_1f1b").run, HALF)
    plan = laid_out(row_of("interleaved_1f1b"), problem)
    names = [{problem.graph.ops[op].name.rsplit(".", 1)[0] for op in stage.ops} for stage in plan.stages]
    layers = [{name.split(".")[1] for name in found if name.startswith("layers.")} for found in names]
    assert layers == [set(), *({str(i)} for i in range(6)), set()]
    assert [stage.devices for stage in plan.stages] == [(s % 4,) for s in range(8)]


def test_zero_bubbles_schedules_are_faster_than_1f1b_and_keep_their_caps() -> None:
    found = {order: predict(row_of(order), HALF) for order in ORDERS}
    assert found["zb_2p"].step_s < found["zb_1p"].step_s < found["1f1b"].step_s > found["interleaved_1f1b"].step_s
    assert found["1f1b"].peak_bytes < found["interleaved_1f1b"].peak_bytes < found["zb_2p"].peak_bytes


def test_scores_are_those_of_the_micro_batches_that_the_fullest_device_holds() -> None:
    """5 a s^2 bytes of each of 2 samples and 2 layers, for 3 micro-batches on the second of 4 stages."""
    row = row_of("1f1b")
    more = predict(row, HALF).peak_bytes - predict(replace(row, attention="fused"), HALF).peak_bytes
    assert more == pytest.approx(5 * SIZES["num_heads"] * SIZES["sequence"] ** 2 * 2 * 2 * 3)


@pytest.mark.parametrize(
    ("slowed", "count", "each", "named"),
    [
        (with_scores, SIZES["num_heads"] * SIZES["sequence"] ** 2, (13, 19), "scaled_dot_product_attention"),
        (with_float_loss, SIZES["vocabulary"] * SIZES["sequence"], (38, 14), "loss"),
    ],
)
def test_kernels_of_their_own_take_their_bytes_more(
    slowed: Callable[[Row, OpGraph, Device], OpGraph], count: int, each: tuple[int, int], named: str
) -> None:
    """Forward and backward, at the rate of the memory; other operators are as they were."""
    problem = problem_of(GPT, HALF)
    device = problem.cluster.devices[0]
    pairs = zip(problem.graph.ops, slowed(GPT, problem.graph, device).ops, strict=True)
    for before, after in pairs:
        more = (after.forward_flops - before.forward_flops, after.backward_flops - before.backward_flops)
        seconds = [flops / device.flop_per_s("bfloat16") for flops in more]
        share = count / device.memory_bandwidth_bytes_per_s if before.name.endswith(named) else 0
        assert seconds == pytest.approx([many * share for many in each])


def test_a_row_says_how_its_attention_and_its_loss_are_computed() -> None:
    for other in (replace(GPT, attention="fused"), replace(GPT, loss="captured")):
        assert predict(other, HALF).step_s < predict(GPT, HALF).step_s


def whole_ms(row: Row, constants: Constants) -> float:
    """The prediction of a row without a pipeline, from its model with 1 and with 2 layers: all layers take the same."""
    layers = int(row.words["model.num_layers"])
    few = [re.sub(r"num_layers=\d+", f"num_layers={count}", " ".join(row.settings)).split() for count in (1, 2)]
    one, two = (predict(replace(row, settings=tuple(words)), constants).of(row) for words in few)
    return one + (layers - 1) * (two - one)


@pytest.mark.long
def test_tensor_parallelism_over_two_nodes_is_as_fast_as_measured() -> None:
    """vTrain's GPT 3.6B without a fit. A ring over one network card of a node would take two and a half times as long."""
    found = {(row.tensor, row.microbatch): row for row in rows("vtrain.csv") if row.model == "GPT 3.6B" and row.pipeline == 1}
    constants = sheet("dgx_a100")
    for shape in ((8, 16), (16, 16)):
        assert whole_ms(found[shape], constants) == pytest.approx(found[shape].value, rel=0.2)
    wide = found[16, 16]
    narrow = replace(wide, settings=tuple(word.replace("network_cards=4", "network_cards=1") for word in wide.settings))
    assert whole_ms(narrow, constants) > 2.4 * wide.value


def test_vtrains_rows_and_their_halves() -> None:
    found = rows("vtrain.csv")
    assert len(found) == 60 and all(row.data * row.tensor * row.pipeline == row.devices for row in found)
    used, others = halved(found)
    assert len(used) == len(others) == 30 and {*used, *others} == {*found} and halved(found) == (used, others)


@pytest.mark.long  # the layouts of one round are the next tests'
def test_any_number_of_stages_is_faster_than_one_and_slower_than_no_idle_time() -> None:
    """A small row with 8 stages on 4 devices lies between its two ends."""
    settings = tuple(re.sub(r"num_layers=\d+", "num_layers=8", word) for word in GPT.settings)
    row = replace(row_of("interleaved_1f1b"), settings=settings, balance=(1,) * 8)
    few, many = stage_range(row, HALF)
    assert many.step_s < predict(row, HALF).step_s < few.step_s


def test_published_layouts_have_all_layers() -> None:
    """Qi et al.: a layer fewer on the first and on the last stage, and a layer a chunk where chunks are interleaved."""
    found = [row for row in rows() if row.source == "zero_bubble"]
    assert len(found) == 96
    for row in found:
        layers = int(row.words["model.num_layers"])
        each = 1 if row.schedule == "interleaved_1f1b" else (layers + 2) // row.pipeline
        assert row.balance == (each - 1, *[each] * (len(row.balance) - 2), each - 1) and sum(row.balance) == layers
        assert row.per_device * row.pipeline * each == layers + 2


def test_rows_name_their_fit_and_what_they_measure() -> None:
    found = rows()
    assert len(found) == 131 and {row.cluster for row in found} == {"p40_8", "dgx_a100"}
    for row in found:
        assert row.data * row.tensor * row.pipeline == row.devices
    for card in ("p40_8", "dgx_a100"):
        assert sum(row.use == "fit" for row in found if row.cluster == card) == 3


@pytest.mark.parametrize("model", [pytest.param("dlrm", marks=pytest.mark.long), "candle_uno"])
def test_no_published_throughput_lies_above_the_bound(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the constants of experiment=paper could not be right; those of a data sheet are not."""
    monkeypatch.setattr(kept(), "path", tmp_path / "kept.jsonl")
    monkeypatch.setattr(kept(), "known", {})
    constants, samples = configured()
    assert allowed(model, samples[model], constants)
    assert not allowed(model, samples[model], PaperConstants(12.6e12, 80e-6, 0.03))
