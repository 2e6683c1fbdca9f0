"""What is written for engines of chains of modules, and layouts read back from it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpp import Even, GPipe, Interleaved1F1B, OneFOneB, Plan, Sequential, Strategy, ZeroBubbleH1
from gpp.analysis.explain.single import changes, least_s, single_changes
from gpp.app.exporting import settled
from gpp.app.given import check_given
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.export.base import AbstractExporter, ToExport, torchrun
from gpp.export.deepspeed import DeepSpeed
from gpp.export.imports import layout_of, shipped
from gpp.export.megatron import Megatron
from gpp.export.modules import Modules
from gpp.export.nearest import by_modules, nearest
from gpp.export.page import plan_page
from gpp.export.torchtitan import TorchTitan
from gpp.graph.captured import Captured
from gpp.mechanisms.marks.stage import Marks
from gpp.mechanisms.serving.exporter import SgLang, Vllm
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.schedules.base import AbstractSchedule
from tests.support.graphs import within
from tests.support.inprocess import captured_named, problem_of

HAND = "Ett|ttt|tt|tL"
STRATEGY = Strategy(name="test", planner=Even(), schedule=OneFOneB())


@cache
def gpt() -> Captured:
    return captured_named("gpt_small", "model.num_layers=8")[1]


def posed(devices: int = 4) -> tuple[Problem, Modules]:
    modules = Modules.of(gpt())
    return replace(problem_of(gpt(), devices, 32), graph=modules.graph), modules


def laid_out(text: str = HAND, devices: int = 4) -> ToExport:
    problem, modules = posed(devices)
    layout = layout_of(text)
    assert layout is not None
    return ToExport(model="gpt_small", captured=gpt(), problem=problem, strategy=STRATEGY, plan=layout.plan(problem, modules))


def test_the_modules_of_a_model_are_its_ends_and_its_layers() -> None:
    modules = Modules.of(gpt())
    assert (modules.opening, modules.closing) == (("embed",), ("norm", "head"))
    assert modules.layers == tuple(f"layers.{i}" for i in range(8)) and modules.prefix == "layers"
    named = [op.name for op in modules.graph.ops if op.kind == "module"]
    assert named == list(modules.names)
    assert sum(op.forward_flops for op in modules.graph.ops) == pytest.approx(sum(op.forward_flops for op in gpt().graph.ops))


def test_a_module_that_several_layers_call_is_theirs() -> None:
    """One module rotates the queries and keys of all layers."""
    captured = captured_named("llama_small", "model.num_layers=2")[1]
    assert any(op.name.startswith("rotary.") for op in captured.graph.ops)
    assert Modules.of(captured).names == ("tok_embeddings", "layers.0", "layers.1", "norm", "lm_head")


def test_megatron_gets_the_layout_that_was_read() -> None:
    made = Megatron().exported(laid_out())
    assert made.files["layout.txt"].strip() == HAND
    flags = dict(line.split(" ", 1) for line in made.files["arguments.txt"].splitlines())
    assert (flags["--pipeline-model-parallel-size"], flags["--num-layers"]) == ("4", "8")
    assert int(flags["--global-batch-size"]) == 32 and 32 % int(flags["--micro-batch-size"]) == 0


def test_torchtitan_gets_its_own_names() -> None:
    made = TorchTitan().exported(laid_out())
    stages = tomllib.loads(made.files["torchtitan.toml"])["parallelism"]["module_fqns_per_model_part"]
    assert stages[0] == ["tok_embeddings", "layers.0", "layers.1"] and stages[-1] == ["layers.7", "norm", "lm_head"]
    assert len(made.files["schedule.csv"].splitlines()) == 4
    scope: dict[str, Any] = {}
    # Without torchtitan: what the module says of the stages, and that it is Python.
    source = made.files["planned.py"]
    compile(source, "planned.py", "exec")
    exec(source[source.index("STAGES") : source.index("def planned")], scope)
    assert scope["STAGES"] == stages


def test_without_a_pipeline_torchtitan_takes_one_micro_batch_at_a_time() -> None:
    """It has micro-batches in a pipeline alone: all that one has is its local batch."""
    e = laid_out("EttttttttL")
    made = TorchTitan().exported(e)
    batch = tomllib.loads(made.files["torchtitan.toml"])["training"]
    assert batch == {"local_batch_size": e.plan.stages[0].microbatch_size, "global_batch_size": 32} and e.plan.num_devices == 1
    assert batch["local_batch_size"] < 32
    chain = TorchTitan().exported(laid_out())
    assert tomllib.loads(chain.files["torchtitan.toml"])["training"]["local_batch_size"] == 32


def test_ranks_are_launched_on_the_nodes_of_their_devices() -> None:
    e = laid_out()
    assert torchrun(e.problem.cluster, e.plan) == "torchrun --nproc-per-node 4"
    two = replace(e.problem.cluster, nodes=(0, 0, 1, 1))
    assert torchrun(two, e.plan) == "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint $FIRST_NODE:29500"
    uneven = replace(e.problem.cluster, nodes=(0, 0, 0, 1))
    assert torchrun(uneven, e.plan).startswith("torchrun --nnodes 2 --nproc-per-node $RANKS_HERE ")


def test_deepspeed_gets_the_boundaries() -> None:
    made = DeepSpeed().exported(laid_out())
    assert json.loads(made.files["parts.json"])["parts"] == [0, 3, 6, 8, 11]
    config = json.loads(made.files["ds_config.json"])
    size = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert size == config["train_batch_size"] == 32


@pytest.mark.parametrize(
    ("exporter", "command"),
    [
        (Vllm(), "VLLM_PP_LAYER_PARTITION=2,3,2,1 vllm serve MODEL --pipeline-parallel-size 4"),
        (SgLang(), "SGLANG_PP_LAYER_PARTITION=2,3,2,1 python -m sglang.launch_server --model-path MODEL --pp-size 4"),
    ],
)
def test_servers_get_the_layers_of_each_stage(exporter: AbstractExporter, command: str) -> None:
    made = exporter.exported(laid_out())
    assert made.command == command and made.files["environment"].strip() == command.partition(" ")[0]
    with pytest.raises(UnsupportedPlan, match=r"stage 3 has no layer"):
        exporter.exported(laid_out("Ettt|ttt|tt|L"))


@pytest.mark.parametrize("exporter", [TorchTitan(), Megatron(), DeepSpeed(), Vllm()], ids=lambda e: e.name)
def test_what_is_written_is_read_as_the_same_plan(exporter: AbstractExporter, tmp_path: Path) -> None:
    e = laid_out()
    file = {"torchtitan": "torchtitan.toml", "megatron": "layout.txt", "deepspeed": "parts.json", "vllm": "environment"}
    text = exporter.exported(e).files[file[exporter.name]]
    if exporter.name == "vllm":
        given = text.partition("=")[2].strip()
    else:
        (tmp_path / file[exporter.name]).write_text(text)
        given = str(tmp_path / file[exporter.name])
    layout = layout_of(given)
    assert layout is not None and layout.source == exporter.name
    problem, modules = posed()
    assert [stage.ops for stage in layout.plan(problem, modules).stages] == [stage.ops for stage in e.plan.stages]


def test_an_order_of_passes_in_a_file_is_run_or_refused(tmp_path: Path) -> None:
    e = laid_out()
    for name in ("torchtitan.toml", "schedule.csv"):
        (tmp_path / name).write_text(TorchTitan().exported(e).files[name])
    layout = layout_of(str(tmp_path / "torchtitan.toml"))
    assert layout is not None and layout.warnings("1f1b") == ()
    check_given(STRATEGY, "mine", e.plan, e.problem, layout)
    with pytest.raises(InvalidConfig, match=r"order of .*schedule.csv: rank 0 does 0B0 where .*=gpipe does 0F\d.*Fix: set the"):
        check_given(replace(STRATEGY, schedule=GPipe()), "mine", e.plan, e.problem, layout)
    order = (tmp_path / "schedule.csv").read_text()
    # torch's other form has what stands between passes.
    (tmp_path / "schedule.csv").write_text(order.replace("0F0", "0UNSHARD,0F0,0SEND_F0").replace("\n", ",0REDUCE_GRAD,\n"))
    check_given(STRATEGY, "mine", e.plan, e.problem, layout)
    (tmp_path / "schedule.csv").write_text(order.partition("\n")[0])
    with pytest.raises(InvalidConfig, match="rank 1 does nothing more where"):
        check_given(STRATEGY, "mine", e.plan, e.problem, layout)
    (tmp_path / "schedule.csv").unlink()
    with pytest.raises(InvalidConfig, match=r"schedule.csv, which cannot be read: .*Fix: put it there, or take"):
        check_given(STRATEGY, "mine", e.plan, e.problem, layout)


# As Megatron's documentation, MCore's tests and papers write them, with the stages that they mean.
WRITTEN = {
    "Et*3|(tt|)*2,L": ["Ettt", "tt", "tt", "L"],
    "E|t*3|t*3|tt|L": ["E", "ttt", "ttt", "tt", "L"],
    "(Et|)*1(tt|)*3tL": ["Et", "tt", "tt", "tt", "tL"],
}


@pytest.mark.parametrize(("text", "stages"), WRITTEN.items())
def test_layout_strings_mean_what_megatron_takes_them_for(text: str, stages: list[str]) -> None:
    layout = Megatron().layout(text)
    assert layout is not None
    letters = {"opening": "E", "layer": "t", "closing": "L"}
    assert ["".join(letters[kind] for kind in part.kinds) for part in layout.parts] == stages


def test_a_layout_of_more_stages_than_ranks_goes_round_and_round() -> None:
    problem, modules = posed(2)
    layout = Megatron().layout("Ett|tt||ttttL")
    assert layout is not None
    # The empty stage has its turn, and no work.
    assert [stage.devices for stage in layout.plan(problem, modules).stages] == [(0,), (1,), (1,)]
    odd = Megatron().layout("Ett|ttt|tttL")
    assert odd is not None
    with pytest.raises(InvalidConfig, match="needs 3 devices, or a divisor of its 3 stages"):
        odd.plan(problem, modules)
    stages = [
        ["embed", "layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "layers.5"],
        ["layers.6", "layers.7", "norm", "head"],
    ]
    text = f"[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = {json.dumps(stages)}\n"
    found = TorchTitan().layout(text)
    assert found is not None
    assert [stage.devices for stage in found.plan(problem, modules).stages] == [(0,), (1,), (0,), (1,)]


def test_the_degrees_of_a_layout_are_those_of_its_file() -> None:
    """Its own names, in a V, with replicas as torchtitan counts them: all devices that are left, where the file says no number."""
    stages = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3"], ["layers.4", "layers.5"]]
    stages += [["layers.6", "layers.7", "norm", "lm_head"]]
    text = "\n".join(
        [
            "[parallelism]",
            "pipeline_parallel_degree = 2",
            'pipeline_parallel_schedule = "ZBVZeroBubble"',
            "pipeline_parallel_microbatch_size = 2",
            f"module_fqns_per_model_part = {json.dumps(stages)}",
        ]
    )
    problem, modules = posed(8)
    for more, devices in (("", 4), ("\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 1", 2)):
        found = TorchTitan().layout(text + more)
        assert found is not None
        plan = found.plan(problem, modules)
        first, second = tuple(range(devices)), tuple(range(devices, 2 * devices))
        assert [stage.devices for stage in plan.stages] == [first, second, second, first]
        assert {stage.microbatch_size for stage in plan.stages} == {2 * devices}
        assert not found.warnings("zero_bubble_v")
        assert ["set strategy/schedule=zero_bubble_v for the file's" in words for words in found.warnings("1f1b")] == [True]
    own = TorchTitan().layout(text.replace("ZBVZeroBubble", "PipelineScheduleMulti"))
    assert own is not None and "no strategy/schedule is the file's" in own.warnings("zero_bubble_v")[0]
    with pytest.raises(InvalidConfig, match="needs 10 devices for 2 ranks of 5 replicas"):
        many = TorchTitan().layout(f"{text}\ndata_parallel_replicate_degree = 5\ndata_parallel_shard_degree = 1")
        assert many is not None
        many.plan(problem, modules)
    with pytest.raises(InvalidConfig, match="has tensor_parallel_degree = 2, and a layout"):
        TorchTitan().layout(f"{text}\ntensor_parallel_degree = 2")


def test_a_configuration_of_ones_own_is_imported_by_its_path() -> None:
    for config, line in (
        ("llama3_8b", "from torchtitan.models.llama3.config_registry import llama3_8b as base"),
        ("mine.sizes.llama_24", "from mine.sizes import llama_24 as base"),
    ):
        assert line in TorchTitan(config=config).exported(laid_out()).files["planned.py"].splitlines()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ett|ttt|tt|tt|tL", "has 10 layers, and the model has 8"),
        ("Ett|ttt|tt|t", "leaves out norm, head"),
        ("Et|tEt|tt|tttL", "has embed twice"),
    ],
)
def test_a_layout_that_is_none_for_the_model_says_why(text: str, words: str) -> None:
    problem, modules = posed()
    layout = Megatron().layout(text)
    assert layout is not None
    with pytest.raises(InvalidConfig, match=words):
        layout.plan(problem, modules)


def test_paths_of_plans_and_files_that_are_not_there_are_no_layouts() -> None:
    assert layout_of("outputs/latest/job/plan.json") is None and layout_of("nowhere.toml") is None
    with pytest.raises(InvalidConfig, match="is a program"):
        layout_of("outputs/latest/export/torchtitan/planned.py")
    assert {exporter.name for exporter in shipped()} == {"torch", "torchtitan", "megatron", "deepspeed", "vllm"}


def _marked(plan: Plan) -> Plan:
    first = plan.stages[0]
    return replace(plan, stages=(first.having(Marks(recompute=first.ops)), *plan.stages[1:]))


def _split(plan: Plan, degrees: tuple[int, ...]) -> Plan:
    stages = [
        replace(stage, devices=(2 * s, 2 * s + 1)).having(TensorParallel(degree=degree))
        for s, (stage, degree) in enumerate(zip(plan.stages, degrees, strict=True))
    ]
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize(
    ("exporter", "change", "words"),
    [
        (TorchTitan(), lambda p: _split(p, (2, 1, 1, 1)), "stage 1 splits its operators over 1 devices and stage 0 over 2"),
        (DeepSpeed(), lambda p: _split(p, (2, 2, 2, 2)), "stage 0 has tensor_parallel .*export=deepspeed has no setting"),
    ],
)
def test_mechanisms_reach_engines_that_have_them(exporter: AbstractExporter, change: Callable[[Plan], Plan], words: str) -> None:
    e = laid_out(devices=8)
    with pytest.raises(UnsupportedPlan, match=words):
        exporter.exported(e.having(change(e.plan)))


def test_one_degree_for_all_is_told_and_partial_recomputation_is_priced() -> None:
    e = laid_out(devices=8)
    flags = Megatron().exported(e.having(_split(e.plan, (2, 2, 2, 2)))).files["arguments.txt"]
    assert "--tensor-model-parallel-size 2" in flags
    marked = e.having(_marked(e.plan))
    made = Megatron().exported(marked)
    assert "--recompute-granularity full" in made.files["arguments.txt"]
    (lost,) = made.lost
    assert "computes every layer again" in lost.what and lost.seconds is not None and lost.seconds > 0
    assert lost.seconds == pytest.approx(made.ran.step_s() - marked.step_s())


def test_another_order_of_passes_is_priced() -> None:
    e = laid_out()
    made = Megatron().exported(e.having(e.plan, strategy=replace(STRATEGY, schedule=GPipe())))
    (lost,) = made.lost
    assert "gpipe" in lost.what and lost.seconds is not None


def test_a_plan_that_cuts_a_module_is_refused_by_edge_and_the_nearest_one_is_priced() -> None:
    problem = replace(problem_of(gpt(), 4, 32, max_ops=1000), microbatch_size=4)
    plan = STRATEGY.plan(problem)
    e = ToExport(model="gpt_small", captured=gpt(), problem=problem, strategy=STRATEGY, plan=plan)
    words = r"edge \d->\d .*nearest plan that it can run has \d stages? and is predicted to take .*%"
    with pytest.raises(UnsupportedPlan, match=words) as refused:
        settled(e, Megatron())
    assert str(refused.value).count("nearest=true") == 1
    with pytest.raises(UnsupportedPlan, match=r"edge \d->\d .*\(no plan was found") as refused:
        settled(replace(e, problem=within(problem, 1.0)), Megatron(nearest=True))
    assert "nearest=true" not in str(refused.value)
    other, made, why = settled(e, Megatron(nearest=True))
    assert why is not None and "edge" in why and made.files["layout.txt"].count("t") == 8
    page = plan_page(Megatron(nearest=True), e, other, made, why)
    assert "This is the nearest plan that the engine can run" in page and "| rank | device |" in page
    # A module takes what its operators take.
    known, modules = e.problem.op_times(4, 0), by_modules(e).problem.op_times(4, 0)
    assert modules.forward_s.sum() == pytest.approx(known.forward_s.sum())


def test_the_changes_that_help_most_are_what_the_simulator_says() -> None:
    e = laid_out("E|tttttt|t|tL")
    base = e.step_s()
    predicted = STRATEGY.predict(e.plan, e.problem)
    loads = [sum(x.end_s - x.start_s for x in predicted.events if x.stage == s and x.kind in "FB") for s in range(4)]
    found = single_changes(e.plan, base, e.problem, STRATEGY, loads)
    assert 1 <= len(found) <= 3
    assert any("move" in what.change for what, _ in found)
    for what, plan in found:
        STRATEGY.check(plan, e.problem)
        assert what.iteration_s == pytest.approx(STRATEGY.predict(plan, e.problem).metrics.iteration_s)
        assert what.iteration_s is not None and what.iteration_s < base


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe(), ZeroBubbleH1(), Interleaved1F1B(k=2)], ids=lambda s: s.name)
def test_changes_that_are_not_simulated_could_not_be_among_the_best(schedule: AbstractSchedule) -> None:
    """All of them are simulated here: none is below what is said of it before, and the best three are those that are told."""
    ranks = 2 if schedule.per_device > 1 else 4
    e, strategy = laid_out("Ettttt|t|t|tL", devices=ranks), replace(STRATEGY, schedule=schedule)
    base, every = strategy.predict(e.plan, e.problem, record=False).metrics.iteration_s, []
    for _, plan in changes(e.plan, e.problem, [3.0, 1.0, 2.0, 0.0]):
        strategy.check(plan, e.problem)
        every.append(strategy.predict(plan, e.problem, record=False).metrics.iteration_s)
        assert least_s(plan, e.problem, strategy) <= every[-1] * (1 + 1e-9)
    found = [what.iteration_s for what, _ in single_changes(e.plan, base, e.problem, strategy, [3.0, 1.0, 2.0, 0.0])]
    assert len(every) > 5 and found == sorted(seconds for seconds in every if seconds < base)[:3]


def _at(memory_bytes: float, minibatch_size: int) -> ToExport:
    """The model on four devices of so much memory, cut by hand."""
    e = laid_out("Ett|tt|tt|ttL")
    problem = replace(within(e.problem, memory_bytes), minibatch_size=minibatch_size, optimizer_state_factor=2.0)
    return e.having(replace(e.plan, minibatch_size=minibatch_size), problem)


@pytest.mark.parametrize(
    "exporter", [TorchTitan(), *(pytest.param(one, marks=pytest.mark.long) for one in (Megatron(), DeepSpeed()))]
)
def test_the_nearest_plan_has_equally_many_replicas_of_each_stage(exporter: AbstractExporter) -> None:
    roomy = _at(1e12, 32)
    found = nearest(roomy, exporter)
    assert found is not None
    plan = exporter.exported(found).ran.plan
    assert len({len(stage.devices) for stage in plan.stages}) == 1 and len(plan.stages[0].devices) > 1
    assert found.step_s() < roomy.step_s()


def test_the_nearest_plan_has_no_replicas_where_nobody_wants_them_and_fits_where_there_is_little_memory() -> None:
    roomy, narrow = _at(1e12, 16), _at(6e6, 16)
    chain = replace(STRATEGY, planner=Sequential(replication=False))
    without = nearest(replace(roomy, strategy=chain), TorchTitan())  # as the user has asked
    assert without is not None and {len(stage.devices) for stage in without.plan.stages} == {1}
    found = nearest(narrow, Megatron())
    assert found is not None and len(found.plan.stages) > 1
    found.strategy.check(found.plan, found.problem)
